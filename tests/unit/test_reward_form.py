"""Tags, repetition and the cosine of length, by hand."""

from __future__ import annotations

import time

import pytest
from test_reward_grader import Entry, group, values
from test_reward_rules import judge, sample

from surefoot.errors import RecipeError
from surefoot.records import ScoreStatus, StopReason
from surefoot.reward import Grader, resolve
from surefoot.reward.contract import RewardSample
from surefoot.reward.options import fill
from surefoot.reward.resolve import BUILT_INS

GOOD = "<think>2 and 5</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        ("<think>a < b, <b>bold</b></think><answer>7</answer>", 1.0),
        ("", 0.0),
        ("7", 0.0),
        ("<answer>7</answer><think>2 and 5</think>", 0.0),
        ("<think>2 and 5</think>", 0.0),
        ("<answer>7</answer>", 0.0),
        (f"Well: {GOOD}", 0.0),
        (f"{GOOD} done", 0.0),
        ("<think>a</think> so <answer>7</answer>", 0.0),
        (f"{GOOD}{GOOD}", 0.0),
        ("<think>a</think><think>b</think><answer>7</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>7</answer>", 0.0),
        ("<think>a<answer>7</answer></think>", 0.0),
        ("<think>a<answer>7</think></answer>", 0.0),
        ("<think>a</think><answer>7", 0.0),
        ("<think>a<answer>7</answer>", 0.0),
        ("a</think><answer>7</answer>", 0.0),
        ("<think>a</think><answer>7</answer></answer>", 0.0),
        ("<think> </think><answer>7</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<THINK>a</THINK><answer>7</answer>", 0.0),
        ("<think >a</think><answer>7</answer>", 0.0),
    ],
)
def test_tags(text, expected):
    assert judge("tags", text, None) == expected


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (f"{GOOD} done", {"outside": "after"}, 1.0),
        (f"So {GOOD}", {"outside": "after"}, 0.0),
        ("<think>a</think> so <answer>7</answer>", {"outside": "after"}, 0.0),
        ("So <think>a</think> it <answer>7</answer> is", {"outside": "any"}, 1.0),
        ("So <think>a</think> it <answer>7</answer></answer>", {"outside": "any"}, 0.0),
        ("<think>a</think> 7", {"tags": ["think"], "outside": "after"}, 1.0),
        ("<think></think><answer> </answer>", {"empty": True}, 1.0),
        ("<a>x</a><b>y</b><c>z</c>", {"tags": ["a", "b", "c"]}, 1.0),
        ("<a>x</a><c>y</c><b>z</b>", {"tags": ["a", "b", "c"]}, 0.0),
        ("<tool-call>x</tool-call>", {"tags": ["tool-call"]}, 1.0),
        ("a</think><answer>7</answer>", {"opened": True}, 1.0),
        (GOOD, {"opened": True}, 0.0),
        ("</think><answer>7</answer>", {"opened": True}, 0.0),
    ],
)
def test_tags_options(text, options, expected):
    assert judge("tags", text, None, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": []}, "tags is empty"),
        ({"tags": ["a", "a"]}, "twice"),
        ({"tags": ["<a>"]}, "without brackets"),
        ({"tags": "think"}, "takes a list of str"),
        ({"tags": ["a", 1]}, "takes a list of str"),
        ({"outside": "before"}, "'none' or 'after' or 'any'"),
    ],
)
def test_tags_refuse_options_that_cannot_work(options, message):
    with pytest.raises(RecipeError, match=message):
        judge("tags", GOOD, None, **options)


def repetition(ids: list[int], text: str = "", **options: object) -> float | None:
    built_in = BUILT_INS["repetition"]
    rule = built_in.make(fill(built_in.schema, options, reward="repetition"))
    return rule(RewardSample("q", text, tuple(ids), None, "t", {}, StopReason.STOP)).value


@pytest.mark.parametrize(
    ("ids", "options", "expected"),
    [
        ([1, 2, 3, 4], {}, 0.0),
        ([5, 5, 5, 5, 5], {"ngram_size": 2}, -0.75),  # one bigram of four
        ([1, 2, 1, 2, 1], {"ngram_size": 2}, -0.5),  # 12 21 12 21
        ([1, 2, 1, 2, 1], {}, -1 / 3),  # 121 212 121
        ([1, 1, 2], {"ngram_size": 1}, -1 / 3),
        ([5, 5, 5, 5, 5], {"ngram_size": 2, "max_penalty": -0.4}, -0.3),
        ([1, 1], {}, 0.0),
        ([1, 1, 1], {}, 0.0),
        ([], {}, 0.0),
    ],
)
def test_repetition_counts_ngrams_of_token_ids(ids, options, expected):
    assert repetition(ids, **options) == pytest.approx(expected, abs=1e-12)


def test_repetition_of_words():
    text = "The cat saw\nthe  CAT"  # the cat, cat saw, saw the, the cat
    assert repetition([1, 1, 1, 1], text, ngram_size=2, unit="words") == -0.25
    assert repetition([1, 2], "go go", unit="words") == 0.0


def test_repetition_stays_in_its_range_and_is_linear():
    start = time.perf_counter()
    value = repetition([3] * 200_000)
    assert value is not None and -1.0 < value < -0.99999
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    "options", [{"ngram_size": 0}, {"max_penalty": 0.5}, {"max_penalty": 0.0}, {"unit": "letters"}]
)
def test_repetition_refuses_options_that_cannot_work(options):
    with pytest.raises(RecipeError, match=next(iter(options))):
        repetition([1], **options)


def cosine(text: str, tokens: int, stop: StopReason = StopReason.STOP, **options: object):
    built_in = BUILT_INS["cosine"]
    given = {"max_len": 100, "checker": "numeric", **options}
    rule = built_in.make(fill(built_in.schema, given, reward="cosine"))
    return rule(RewardSample("q", text, tuple(range(tokens)), "7", "t", {}, stop))


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("7", 0, 1.0),
        ("7", 50, 0.75),
        ("7", 100, 0.5),
        ("7", 150, 0.5),
        ("8", 0, -1.0),
        ("8", 50, -0.75),
        ("8", 100, -0.5),
        ("8", 200, -0.5),
    ],
)
def test_cosine_with_its_defaults(text, tokens, expected):
    assert cosine(text, tokens).value == expected


def test_cosine_with_the_papers_values():
    paper = {
        "max_len": 300,
        "max_value_correct": 2.0,
        "min_value_correct": 1.0,
        "min_value_wrong": -10.0,
        "max_value_wrong": 0.0,
        "exceed_value": -10.0,
    }
    assert cosine("7", 100, **paper).value == pytest.approx(1.75)
    assert cosine("8", 100, **paper).value == pytest.approx(-7.5)
    assert cosine("7", 200, **paper).value == pytest.approx(1.25)
    assert cosine("8", 200, **paper).value == pytest.approx(-2.5)
    assert cosine("7", 300, **paper).value == pytest.approx(1.0)
    assert cosine("7", 300, StopReason.LENGTH, **paper).value == -10.0
    assert cosine("7", 299, StopReason.LENGTH, **paper).value == pytest.approx(1.0, abs=1e-4)
    assert cosine("7", 301, **paper).value == -10.0


def test_cosine_never_rises_with_length_where_correct_and_never_falls_where_wrong():
    right = [cosine("7", n).value for n in range(0, 220, 7)]
    wrong = [cosine("8", n).value for n in range(0, 220, 7)]
    assert right == sorted(right, reverse=True)
    assert wrong == sorted(wrong)
    assert min(right) > max(wrong)


def test_cosine_passes_on_what_its_checker_cannot_score():
    built_in = BUILT_INS["cosine"]
    options = fill(built_in.schema, {"max_len": 9, "checker": "numeric"}, reward="cosine")
    verdict = built_in.make(options)(sample("7", "seven"))
    assert verdict.status is ScoreStatus.UNSCORABLE and "seven" in verdict.detail


def test_cosine_takes_the_options_of_its_checker():
    assert cosine("8 7", 50).value == 0.75
    assert cosine("8 7", 50, checker_options={"which": "first"}).value == -0.75
    assert cosine(r"\boxed{7}", 50, checker="boxed").value == 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": None}, "max_len is not set"),
        ({"max_len": 0}, "max_len is 0"),
        ({"min_value_wrong": 0.0}, "min_value_wrong"),
        ({"min_value_correct": 2.0}, "min_value_correct"),
        ({"min_value_correct": -0.75}, "no wrong completion"),
        ({"exceed_value": float("nan")}, "exceed_value"),
        ({"checker": "mat"}, "did you mean 'math'"),
        ({"checker_options": {"wich": "last"}}, "did you mean 'which'"),
        ({"checker_options": [1]}, "takes a mapping"),
    ],
)
def test_cosine_refuses_options_that_cannot_work(options, message):
    with pytest.raises(RecipeError, match=message):
        cosine("7", 1, **options)


def test_cosine_measures_against_the_rollouts_cap_unless_it_has_its_own():
    entry = Entry("cosine", options={"checker": "numeric"})
    with Grader([entry], max_new_tokens=4) as grader:
        assert values(grader.score([group(["7", "8"])])) == [pytest.approx(0.75), -0.75]
    own = Entry("cosine", options={"checker": "numeric", "max_len": 2})
    with Grader([own], max_new_tokens=4) as grader:
        assert values(grader.score([group(["7", "8"])])) == [0.5, -0.5]
    with pytest.raises(RecipeError, match=r"rollout\.max_new_tokens"):
        resolve([entry])
