"""The checks of the reward audit, each on graders with a known fault."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
from support.graders import GOLDS, anywhere, bench, exact, last_number, of, prompts

from surefoot.audit import exploits, odd, shuffled
from surefoot.audit.bench import OutOfCalls
from surefoot.audit.forms import FORMS, own_forms, read_forms
from surefoot.audit.golds import distinct, gold_findings, try_golds, written, wrong_answers
from surefoot.audit.noise import noise_findings
from surefoot.audit.report import Finding, Severity
from surefoot.audit.rewrites import rewrite_findings, rewrites
from surefoot.errors import RecipeError
from surefoot.records import Prompt, Score, ScoreStatus
from surefoot.reward.figures import only_number, same_answer

# --- right answers and wrong ones


@pytest.mark.parametrize("gold", ["42", "-3", "0", "1/3", "2.5", "1,200", "\\frac{3}{4}", "x+1"])
def test_no_wrong_answer_is_right_and_no_rewrite_is_wrong(gold):
    for answer in wrong_answers(gold, ["5", gold, "11"], place=0).values():
        assert not same_answer(answer, gold)
    number = only_number(gold)
    for text in rewrites(gold).values():
        assert text != gold
        if number is not None:
            # Read here without the markings around the number.
            bare = text.replace(" units", "").strip("*$").rstrip(".")
            assert only_number(bare) == number, text


def test_wrong_answers_of_a_number_by_hand():
    made = wrong_answers("42", ["42", "42.0", "17"], place=0)
    assert made == {
        "another row's gold": "17",
        "off by one": "43",
        "wrong sign": "-42",
        "ten times too large": "420",
        "a hundredth": "0.42",
    }
    assert wrong_answers("x^2+1", ["x^2+1"], place=0) == {"one digit changed": "x^3+1"}
    assert wrong_answers("0", ["0"], place=0) == {"off by one": "1"}


def test_numbers_are_written_as_people_do():
    wanted = {(3, 1): "3", (-1, 8): "-0.125", (1, 3): "1/3", (5, 100): "0.05", (-7, 6): "-7/6"}
    for (over, under), text in wanted.items():
        assert written(Fraction(over, under)) == text
    assert distinct(["1/2", "0.5", "2", "2.0", "x"]) == ["1/2", "2", "x"]


def test_a_sound_grader_has_golds_at_the_top_and_wrong_answers_at_the_bottom():
    desk, rows = bench(last_number), prompts()
    reading = read_forms(desk, rows)
    assert reading.best.name == "plain" and len(reading.read) == len(FORMS)
    findings, (table,) = gold_findings(try_golds(desk, rows, reading.best), reading.best)
    assert {f.check: f.severity for f in findings} == {
        "golds": Severity.OK,
        "wrong answers": Severity.OK,
        "youden": Severity.OK,
    }
    j = of(findings, "youden").figures["j"]
    assert j["estimate"] == 1.0 and 0.8 < j["low"] < 1.0
    assert [row[0] for row in table.rows][:2] == ["another row's gold", "off by one"]


def test_the_form_that_a_grader_reads_is_found_and_may_be_given():
    boxed = read_forms(bench(lambda p, t: float(f"\\boxed{{{p.answer}}}" in t)), prompts())
    assert [form.name for form in boxed.read] == [
        "boxed",
        "boxed in a sentence",
        "boxed after think",
    ]
    behind = bench(lambda p, t: float(t.rpartition("A: ")[2] == p.answer and "A: " in t))
    assert read_forms(behind, prompts()).read == ()
    mine = own_forms(["So:\\nA: {answer}"])
    assert mine[0].of("7") == "So:\nA: 7"
    assert read_forms(behind, prompts(), mine).best == mine[0]
    with pytest.raises(RecipeError, match=r"\{answer\}"):
        own_forms(["A:"])


@pytest.mark.parametrize(
    ("function", "severity"),
    [
        (lambda p, t: 1.0, Severity.STOP),
        (lambda p, t: 0.0, Severity.STOP),
        (lambda p, t: 1.0 - exact(p, t), Severity.STOP),
        # Half of the rows are graded, the other half is refused whatever is said.
        (lambda p, t: exact(p, t) * (p.position % 2), Severity.CHANGE),
        (exact, Severity.OK),
    ],
)
def test_j_stops_what_does_not_tell_right_from_wrong(function, severity):
    desk, rows = bench(function), prompts()
    form = read_forms(desk, rows).best
    findings, _ = gold_findings(try_golds(desk, rows, form), form)
    assert of(findings, "youden").severity is severity


def test_a_grader_that_takes_off_by_one_is_told_so_with_the_row():
    near = bench(lambda p, t: float(t.isdigit() and 0 <= int(t) - int(str(p.answer)) <= 1))
    findings, (table,) = gold_findings(try_golds(near, prompts(), FORMS[0]), FORMS[0])
    found = of(findings, "wrong answers")
    assert found.severity is Severity.CHANGE and "'13', off by one: '14'" in found.text
    shares = {row[0]: row[2].split(" ")[0] for row in table.rows}
    assert shares["off by one"] == "100.0%" and shares["wrong sign"] == "0.0%"


def test_part_of_the_score_for_a_wrong_answer_is_told_and_not_counted_as_accepted():
    partial = bench(lambda p, t: 1.0 if t == p.answer else 0.2 if t.startswith("-") else 0.0)
    findings, _ = gold_findings(try_golds(partial, prompts(), FORMS[0]), FORMS[0])
    found = of(findings, "wrong answers")
    assert found.severity is Severity.INFO and found.figures["above_bottom"] == len(GOLDS)
    assert of(findings, "youden").figures["fpr"]["estimate"] == 0.0


def test_rows_that_the_grader_calls_bad_are_named():
    picky = bench(lambda p, t: None if p.id == "r3" else exact(p, t))
    findings, _ = gold_findings(try_golds(picky, prompts(), FORMS[0]), FORMS[0])
    found = of(findings, "unscorable")
    assert found.severity is Severity.CHANGE and found.figures["rows"] == ["r3"]
    assert of(findings, "youden").figures["right"] == len(GOLDS) - 1


# --- exploits


def exploit_findings(function: Callable[[Prompt, str], float | None], rows=None) -> list[Finding]:
    desk, rows = bench(function), prompts() if rows is None else rows
    attempts = exploits.try_exploits(desk, rows, read_forms(desk, rows).read)
    return exploits.exploit_findings(attempts)[0]


def test_a_grader_that_accepts_any_listed_candidate_is_stopped():
    found = of(exploit_findings(anywhere), "exploits")
    assert found.severity is Severity.STOP
    assert {each["family"] for each in found.figures["accepted"]} == {"shotgun"}
    assert "16 of 16" in found.text and "one answer from one place" in found.mend


def test_lists_are_found_in_the_form_that_a_grader_reads_too():
    def in_box(prompt: Prompt, text: str) -> float:
        inside = re.search(r"\\boxed\{(.*?)\}", text)
        return float(inside is not None and str(prompt.answer) in inside[1].split(", "))

    found = of(exploit_findings(in_box), "exploits")
    assert found.severity is Severity.STOP
    assert {each["dress"] for each in found.figures["accepted"]} >= {"boxed"}


@pytest.mark.parametrize("function", [last_number, exact])
def test_a_grader_of_one_answer_is_not_fooled_by_one_hit(function):
    # The last of the listed candidates is the gold of one row, and of that row alone.
    assert of(exploit_findings(function), "exploits").severity is Severity.OK


@pytest.mark.parametrize(
    ("function", "family"),
    [
        (lambda p, t: float(not t.strip() or exact(p, t)), "empty"),
        (lambda p, t: float("Ignore all previous" in t or exact(p, t)), "plea"),
        (lambda p, t: float(t == "Thought process:" or exact(p, t)), "master key"),
        (lambda p, t: float("<answer></answer>" in t or exact(p, t)), "format only"),
        (lambda p, t: float(len(t) > 2000 or exact(p, t)), "padding"),
        (lambda p, t: float(p.text in t or exact(p, t)), "echo"),
    ],
)
def test_each_family_is_found(function, family):
    found = of(exploit_findings(function), "exploits")
    assert found.severity is Severity.STOP
    assert family in {each["family"] for each in found.figures["accepted"]}


def test_an_echo_that_holds_the_answer_now_and_then_asks_for_a_change():
    # A quarter of the prompts end with their own answer.
    rows = [
        Prompt(
            p.id, p.position, (1,), f"{p.text} {p.answer if p.position % 4 == 0 else 0}", p.answer
        )
        for p in prompts()
    ]
    assert of(exploit_findings(last_number, rows), "exploits").severity is Severity.CHANGE
    # One in thirty is luck.
    rare = [Prompt(p.id, p.position, (1,), f"{p.position} and 55", p.answer) for p in prompts()]
    assert of(exploit_findings(last_number, rare), "exploits").severity is Severity.OK


def test_a_denied_answer_is_told_and_does_not_stop():
    findings = exploit_findings(last_number)
    assert of(findings, "denials").severity is Severity.INFO


def test_one_gold_for_all_rows_is_said_to_be_too_few():
    found = of(exploit_findings(exact, prompts(["5"] * 8)), "exploits")
    assert found.severity is Severity.INFO and found.text.startswith("skipped")


# --- rewrites, odd inputs, noise, shuffled


def test_rewrites_that_are_refused_ask_for_a_change():
    strict, _ = rewrite_findings(bench(exact), prompts(), FORMS[0])
    assert strict[0].severity is Severity.CHANGE
    assert strict[0].figures["refused"]["estimate"] == 1.0
    assert strict[0].figures["by_kind"]["with decimals"] == [30, 30]
    lenient, _ = rewrite_findings(bench(last_number), prompts(), FORMS[0])
    assert lenient[0].severity is Severity.OK and lenient[0].figures["refused"]["estimate"] == 0.0


@pytest.mark.fault(24)
def test_odd_inputs_that_break_a_grader_are_named():
    def brittle(prompt: Prompt, text: str) -> float:
        if not text:
            raise RuntimeError("string index out of range")
        return exact(prompt, text)

    findings, (table,) = odd.odd_findings(bench(brittle), prompts())
    found = of(findings, "odd inputs")
    assert found.severity is Severity.CHANGE and found.figures["failed"] == ["nothing"]
    assert "string index out of range" in found.text
    assert table.rows[0][:3] == ("nothing", "infra_error", "")
    sound, _ = odd.odd_findings(bench(last_number), prompts())
    assert {f.check: f.severity for f in sound} == {
        "odd inputs": Severity.OK,
        "same again": Severity.OK,
        "time": Severity.INFO,
    }


@pytest.mark.fault(22, 32)
def test_a_grader_that_always_fails_is_stopped_and_one_that_blames_the_row_is_told():
    def broken(prompt: Prompt, text: str) -> float:
        raise RuntimeError("no service")

    assert of(odd.odd_findings(bench(broken), prompts())[0], "odd inputs").severity is Severity.STOP
    blaming = bench(lambda p, t: None if "\0" in t else 0.0)
    found = of(odd.odd_findings(blaming, prompts())[0], "odd inputs")
    assert found.severity is Severity.CHANGE and found.figures["unscorable"] == ["a NUL character"]


def test_scores_that_depend_on_the_others_of_a_call_are_found():
    desk = bench(exact)
    plain = desk.grader.score
    # The first of a call gets more than the others.
    desk.grader.score = lambda groups: [  # type: ignore[method-assign]
        group if place else group.scored((Score(ScoreStatus.SCORED, 9.0, {"plain": 9.0}),))
        for place, group in enumerate(plain(groups))
    ]
    found = of(odd.odd_findings(desk, prompts())[0], "same again")
    assert found.severity is Severity.CHANGE and "in another order" in found.text


def test_a_grader_of_chance_is_said_to_be_one():
    ticks = itertools.count()
    coin = bench(lambda p, t: float((next(ticks) * 7919 % 101) > 50))
    assert of(odd.odd_findings(coin, prompts())[0], "same again").severity is Severity.INFO
    groups = [coin.group(prompt, ["a", "b", "c", "d"]) for prompt in prompts()]
    found = of(noise_findings(coin, groups, "made up", seed=0)[0], "noise")
    assert found.severity is Severity.STOP and found.figures["noise_std"] > 0.3
    steady = bench(lambda p, t: float(len(t)))
    groups = [steady.group(prompt, ["a", "bb"]) for prompt in prompts()]
    found = of(noise_findings(steady, groups, "made up", seed=0)[0], "noise")
    assert found.severity is Severity.OK and found.figures["icc"] == 1.0


def test_a_paid_grader_is_asked_anew_and_not_read_back():
    seen: list[int] = []
    desk = bench(lambda p, t: float(seen.append(p.columns["audit_round"]) or 0))
    desk.grader.rewards[0].identity = "kept"  # type: ignore[misc]
    noise_findings(desk, [desk.group(prompts()[0], ["a"])], "made up", seed=0)
    assert seen == [0, 1, 2]


def test_a_reward_that_does_not_read_the_reference_is_stopped():
    groups = [bench(exact).group(prompt, [str(prompt.answer), "nothing"]) for prompt in prompts()]
    blind = shuffled.shuffled_findings(
        bench(lambda p, t: float(t != "nothing")), groups, "made up", seed=0
    )
    assert blind.severity is Severity.STOP and blind.figures["left"] == 1.0
    sound = shuffled.shuffled_findings(bench(exact), groups, "made up", seed=0)
    assert sound.severity is Severity.OK and sound.figures["left"] == 0.0
    half = bench(lambda p, t: 1.0 if exact(p, t) else 0.5 if t.isdigit() else 0.0)
    some = shuffled.shuffled_findings(half, groups, "made up", seed=0)
    assert some.severity is Severity.CHANGE and some.figures["left"] == 0.5


def test_the_reference_is_exchanged_with_all_columns():
    rows = prompts(["3", "3.0", "8"])
    pairs = shuffled.exchanged([bench(exact).group(row, ["t"]) for row in rows])
    swapped = {own.prompt.id: other.prompt for own, other in pairs}
    assert swapped["r0"].answer == "8" and swapped["r0"].columns == {"answer": "8"}
    assert swapped["r2"].answer == "3" and swapped["r2"].text == rows[2].text


# --- the bound on calls


def test_no_more_answers_are_scored_than_the_bound():
    desk = bench(exact, cap=5)
    rows = prompts()
    desk.marks([(row, "x") for row in rows[:5]])
    with pytest.raises(OutOfCalls):
        desk.marks([(rows[0], "x")])
    assert desk.calls == 5
