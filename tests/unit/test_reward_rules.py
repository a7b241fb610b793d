"""Built-in rules, by hand."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from surefoot.errors import RecipeError
from surefoot.records import ScoreStatus, StopReason
from surefoot.reward.contract import PartScore, RewardSample
from surefoot.reward.figures import last_boxed, numbers, only_number, value
from surefoot.reward.options import fill
from surefoot.reward.resolve import BUILT_INS

UNSCORABLE = PartScore(ScoreStatus.UNSCORABLE).status


def sample(text: str, answer: str | None = "7", *, tokens: int = 3, **columns: object):
    return RewardSample(
        prompt="question",
        text=text,
        ids=tuple(range(tokens)),
        answer=answer,
        task="default",
        columns=columns,
        stop=StopReason.STOP,
    )


def judge(use: str, text: str, answer: str | None = "7", **options: object) -> float | None:
    built_in = BUILT_INS[use]
    verdict = built_in.make(fill(built_in.schema, options, reward=use))(sample(text, answer))
    assert (verdict.value is None) == (verdict.status is UNSCORABLE)
    assert verdict.value is not None or verdict.detail
    return verdict.value


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("7", "7", 1.0),
        ("  7\n", "7", 1.0),
        ("17", "7", 0.0),
        ("", "7", 0.0),
        ("New   York", "New York", 1.0),
        ("new york", "New York", 0.0),
        ("the answer is 7", "7", 0.0),
        ("7", None, None),
        ("7", "  ", None),
    ],
)
def test_exact(text, answer, expected):
    assert judge("exact", text, answer) == expected


def test_exact_options():
    assert judge("exact", "STRASSE", "straße", ignore_case=True) == 1.0
    assert judge("exact", "a  b", "a b", collapse_spaces=False) == 0.0
    assert judge("exact", "a b", "a b", collapse_spaces=False) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("17", "7", 0.0),
        ("7 is wrong, 17", "7", 0.0),
        ("17, no, 7", "7", 1.0),
        ("1,000", "1000", 1.0),
        ("1000", "1,000", 1.0),
        ("12,345,678.5", "12345678.5", 1.0),
        ("1,2", "2", 1.0),
        ("1,0000", "1000", 0.0),
        ("-3", "-3", 1.0),
        ("\u22123", "-3", 1.0),
        ("5-3", "3", 1.0),
        ("5-3", "-3", 0.0),
        ("= -3", "-3", 1.0),
        ("(2)-4", "4", 1.0),
        ("$42.", "42", 1.0),
        ("-$42.50", "-42.5", 1.0),
        ("$-42", "-42", 1.0),
        ("42%", "42", 1.0),
        ("it costs 42€", "42", 1.0),
        ("3/4", "0.75", 1.0),
        ("0.75", "3/4", 1.0),
        ("6/8", "3/4", 1.0),
        (r"\frac{3}{4}", "3/4", 1.0),
        (r"-\dfrac{3}{4}", "-0.75", 1.0),
        ("1/0", "1", 0.0),
        (".5", "0.5", 1.0),
        ("...7", "7", 1.0),
        ("7.", "7", 1.0),
        ("007", "7", 1.0),
        ("+7", "7", 1.0),
        ("7e0", "7", 1.0),
        ("1.5e3", "1500", 1.0),
        ("1e-3", "0.001", 1.0),
        ("1e999999999", "1", 0.0),
        ("7kg", "7", 1.0),
        ("x7", "7", 0.0),
        ("version 1.2.7", "7", 0.0),
        ("答案是7。", "7", 1.0),
        ("no number here", "7", 0.0),
        ("", "7", 0.0),
        ("0", "-0", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
    ],
)
def test_numeric_reads_the_last_number(text, answer, expected):
    assert judge("numeric", text, answer) == expected


@pytest.mark.parametrize("answer", [None, "", "seven", "7 apples", "7 8", "1/0", "nan", "inf"])
def test_numeric_with_a_bad_answer_blames_the_row_whatever_the_text(answer):
    assert judge("numeric", "7", answer) is None
    assert judge("numeric", "nonsense", answer) is None


@pytest.mark.parametrize(
    ("which", "text", "expected"),
    [
        ("last", "first 7 then 8", 0.0),
        ("first", "first 7 then 8", 1.0),
        ("only", "first 7 then 8", 0.0),
        ("only", "the answer is 7", 0.0),
        ("only", " 7.\n", 1.0),
        ("only", "$7", 1.0),
        ("only", "7 7", 0.0),
        ("only", "", 0.0),
    ],
)
def test_numeric_which(which, text, expected):
    assert judge("numeric", text, "7", which=which) == expected


def test_numeric_tolerance_is_absolute_and_exact_at_its_edge():
    assert judge("numeric", "0.3", "0.2", tolerance=0.1) == 1.0
    assert judge("numeric", "0.31", "0.2", tolerance=0.1) == 0.0
    assert judge("numeric", "7", "8", tolerance=1) == 1.0


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf"), "0.1", True])
def test_numeric_refuses_a_tolerance_that_is_none(tolerance):
    with pytest.raises(RecipeError, match="tolerance"):
        judge("numeric", "7", tolerance=tolerance)


def test_numbers_are_read_exactly():
    assert [value(found) for found in numbers("1/3 and -2.50, 1,024")] == [
        Fraction(1, 3),
        Fraction(-5, 2),
        Fraction(1024),
    ]
    assert only_number("9" * 5000) is None
    assert only_number("1/3 ") == Fraction(1, 3)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 300_000,
        "1," * 150_000,
        "1,000" * 60_000,
        "a1" * 150_000,
        "-" * 300_000,
        "1e" * 150_000,
        "1/" * 150_000,
        r"\boxed{" * 40_000,
        "{" * 300_000,
        "}" * 300_000,
        "\\frac{" * 50_000,
        r"\boxed{7}" * 30_000,
    ],
)
@pytest.mark.parametrize("use", ["numeric", "boxed", "exact"])
def test_rules_in_the_runs_own_process_take_linear_time(use, text):
    start = time.process_time()
    judge(use, text)
    assert time.process_time() - start < 3.0  # quadratic would be minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7", None),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"{ \boxed{7}", "7"),
        (r"} \boxed{7}", "7"),
        (r"\boxed{}", ""),
        (r"boxed{7}", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"\boxed{7}", "7", 1.0),
        (r"\boxed{17}", "7", 0.0),
        (r"\boxed{7.0}", "7", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1\frac{1}{2}}", "5.5", 0.0),
        (r"\boxed{x + 1}", "x+1", 1.0),
        (r"\boxed{x+1}", "1+x", 0.0),
        (r"\boxed{\text{Paris}}", "Paris", 1.0),
        (r"\boxed{paris}", "Paris", 0.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        ("7", "7", 0.0),
        (r"\boxed{}", "7", 0.0),
        (r"\boxed{7}", r"thus \boxed{7}", 1.0),
        (r"\boxed{7}", r"\boxed{}", None),
        (r"\boxed{7}", None, None),
    ],
)
def test_boxed(text, answer, expected):
    assert judge("boxed", text, answer) == expected


def test_boxed_ignore_case():
    assert judge("boxed", r"\boxed{paris}", "Paris", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("a7b", None, {"pattern": r"\d"}, 1.0),
        ("ab", None, {"pattern": r"\d"}, 0.0),
        ("a7", None, {"pattern": r"\d", "match": "full"}, 0.0),
        (" 7\n", None, {"pattern": r"\d", "match": "full"}, 1.0),
        ("answer: 7", "7", {"pattern": r"answer: (\d+)", "group": 1}, 1.0),
        ("answer: 17", "7", {"pattern": r"answer: (\d+)", "group": 1}, 0.0),
        ("a: 1 a: 7", "7", {"pattern": r"a: (?P<n>\d)", "group": "n"}, 1.0),
        ("a: 1 a: 7", "7", {"pattern": r"a: (\d)", "group": 1, "which": "first"}, 0.0),
        ("ANSWER b", "B", {"pattern": r"answer (\w)", "group": 1, "ignore_case": True}, 1.0),
        ("ax", "x", {"pattern": r"a(b)?", "group": 1}, 0.0),
        ("none", "7", {"pattern": r"a: (\d)", "group": 1}, 0.0),
        ("a: 7", None, {"pattern": r"a: (\d)", "group": 1}, None),
    ],
)
def test_regex(text, answer, options, expected):
    assert judge("regex", text, answer, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pattern"),
        ({"pattern": "("}, "not a regex"),
        ({"pattern": "a", "group": 1}, "no group 1"),
        ({"pattern": "a", "group": "n"}, "no group 'n'"),
        ({"pattern": 7}, "takes str"),
    ],
)
def test_regex_refuses_options_that_cannot_work(options, message):
    with pytest.raises(RecipeError, match=message):
        judge("regex", "a", **options)


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({"target": 10}, 10, 1.0),
        ({"target": 10}, 5, 0.5),
        ({"target": 10}, 15, 0.5),
        ({"target": 10}, 20, 0.0),
        ({"target": 10}, 500, 0.0),
        ({"max": 10}, 1, 1.0),
        ({"max": 10}, 10, 1.0),
        ({"max": 10}, 15, 0.5),
        ({"max": 10}, 20, 0.0),
        ({"max": 10}, 500, 0.0),
    ],
)
def test_length_counts_tokens_and_needs_no_answer(options, tokens, expected):
    built_in = BUILT_INS["length"]
    rule = built_in.make(fill(built_in.schema, options, reward="length"))
    assert rule(sample("text", None, tokens=tokens)).value == expected


@pytest.mark.parametrize(
    "options", [{}, {"target": 1, "max": 1}, {"target": 0}, {"max": -1}, {"max": 1.5}]
)
def test_length_refuses_options_that_cannot_work(options):
    with pytest.raises(RecipeError, match="length"):
        judge("length", "a", **options)


def test_an_unknown_option_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match=r"'tolerence'.*'tolerance'"):
        judge("numeric", "7", tolerence=0.1)
    with pytest.raises(RecipeError, match=r"'middle'.*'last' or 'first' or 'only'"):
        judge("numeric", "7", which="middle")


def legs(answer: str) -> dict[str, object]:
    return {"dataset": "leg_counting", "entry": {"question": "?", "answer": answer, "metadata": {}}}


def test_reasoning_gym_is_strict_unless_asked():
    pytest.importorskip("reasoning_gym")
    built_in = BUILT_INS["reasoning_gym"]

    def verdict(text: str, columns: dict[str, object], **options: object) -> PartScore:
        rule = built_in.make(fill(built_in.schema, options, reward="reasoning_gym"))
        return rule(sample(text, None, **columns))

    row = {"reasoning_gym": legs("7")}
    assert verdict("7", row).value == 1.0
    assert verdict("17", row).value == 0.0
    assert verdict("17", row, partial=True).value == 0.5  # that library's rule for containment
    assert verdict("so <answer> 7 </answer> it is", row, tag="answer").value == 1.0
    assert verdict("<answer>7</answer><answer>8", row, tag="answer").value == 1.0
    assert verdict("7", row, tag="answer").value == 0.0
    assert verdict("</answer>7", row, tag="answer").value == 0.0
    for broken in ({}, {"reasoning_gym": 7}, {"reasoning_gym": {"dataset": "x"}}):
        assert verdict("7", broken).status is UNSCORABLE
    unknown = {"reasoning_gym": {"dataset": "nope", "entry": {}}}
    assert "nope" in verdict("7", unknown).detail
