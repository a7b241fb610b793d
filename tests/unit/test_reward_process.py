"""Process rewards: values at places inside a completion, from a function to the score."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from test_reward_grader import Entry, group, native, scores

import surefoot
from surefoot.records import ProcessReward, Score, ScoreStatus
from surefoot.reward import FunctionPart, Grader, batch, contract, wire
from surefoot.reward.contract import PartScore
from surefoot.reward.grader import combine
from surefoot.reward.resolve import Reward
from surefoot.reward.tally import Tally
from surefoot.run.rows import sample_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"


def paid(value: float, *steps: tuple[int, float]) -> PartScore:
    return PartScore(ScoreStatus.SCORED, value, "", steps)


def test_by_step_finds_the_end_of_every_piece():
    text = "a = 1\n\nb = 2\nso 3\n"
    given = ProcessReward.by_step(text, [0.5, -1.0, 1.0])
    assert given == ProcessReward((0.5, -1.0, 1.0), (5, 12, 17))
    assert [text[:end].rpartition("\n")[2] for end in given.ends] == ["a = 1", "b = 2", "so 3"]
    assert surefoot.ProcessReward is ProcessReward


@pytest.mark.parametrize(
    ("text", "separator", "ends"),
    [
        ("", "\n", ()),
        ("\n\n", "\n", ()),
        ("one", "\n", (3,)),
        ("one step. two. ", ". ", (8, 13)),
        ("\n\ufeffx\n", "\n", (3,)),
        ("one\n \ntwo", "\n", (3, 5, 9)),
    ],
)
def test_pieces_by_hand(text, separator, ends):
    given = ProcessReward.by_step(text, [1.0] * len(ends), separator=separator)
    assert given.ends == ends


@pytest.mark.parametrize("count", [1, 3])
def test_a_value_for_each_step_or_none_at_all(count):
    with pytest.raises(ValueError, match=rf"{count} values for 2 steps"):
        ProcessReward.by_step("a\nb", [1.0] * count)


@pytest.mark.parametrize(
    ("values", "ends", "value", "steps"),
    [
        ([0.5, 0.25], [3, 7], 0.75, ((3, 0.5), (7, 0.25))),
        ([True, -2], (1, 2), -1.0, ((1, 1.0), (2, -2.0))),
        (np.array([0.5, 1.0], np.float32), np.array([1, 4]), 1.5, ((1, 0.5), (4, 1.0))),
        ([np.array(0.5)], [np.array(2)], 0.5, ((2, 0.5),)),
        # One after the other in float64, the 1 would be lost.
        ([1e16, 1.0, -1e16], [1, 2, 3], 1.0, ((1, 1e16), (2, 1.0), (3, -1e16))),
        ([], [], 0.0, ()),
    ],
)
def test_a_process_reward_is_worth_its_sum(values, ends, value, steps):
    verdict = contract.read_value(ProcessReward(values, ends))
    assert verdict == PartScore(ScoreStatus.SCORED, value, "", steps)


@pytest.mark.parametrize(
    ("values", "ends", "named"),
    [
        ([1.0], [3, 7], "1 values and 2 ends"),
        ([], [3], "0 values and 1 ends"),
        ([1.0, math.nan], [3, 7], "value 1 is nan"),
        ([math.inf], [3], "value 0 is inf"),
        ([None], [3], "value 0 is None"),
        (["1"], [3], "value 0 is '1'"),
        ([1.0, 1.0], [3, 3], r"do not ascend \(3 is before 3\)"),
        ([1.0, 1.0], [7, 3], r"do not ascend \(7 is before 3\)"),
        ([1.0], [0], "end 0 is 0"),
        ([1.0, 1.0], [-1, 3], "end 0 is -1"),
        ([1.0], [3.0], r"end 0 is 3\.0"),
        ([1.0], [True], "end 0 is True"),
        ([1.7e308, 1.7e308], [1, 2], "no finite sum"),
    ],
)
def test_what_does_not_fit_is_the_rewards_fault(values, ends, named):
    verdict = contract.read_value(ProcessReward(values, ends))
    assert verdict.status is ScoreStatus.INFRA_ERROR
    assert (verdict.value, verdict.steps) == (None, ())
    assert re.search(named, verdict.detail), verdict.detail


def test_a_score_keeps_its_steps():
    """What is not in them belongs to the whole completion."""
    verdict = contract.read_value(Score(ScoreStatus.SCORED, 1.0, steps=((3, 0.25),)))
    assert verdict == paid(1.0, (3, 0.25))
    twice = Score(ScoreStatus.SCORED, 1.0, steps=((3, 0.25), (3, 0.5)))
    assert "do not ascend" in contract.read_value(twice).detail


def test_steps_survive_the_way_from_a_worker():
    verdict = contract.read_value(ProcessReward(np.array([0.1, 0.2]), np.array([2, 5])))
    (message,) = wire.Inbox().feed(wire.frame(wire.encode(verdict.to_json())))
    assert PartScore.from_json(message) == verdict
    assert "steps" not in contract.scored(1.0).to_json()


def test_each_value_of_a_list_may_be_a_process_reward():
    reply = batch.read_list([ProcessReward([1.0, 2.0], [1, 2]), 0.5, None], 3)
    parts = batch.read_reply(reply, 3)
    assert [part.value for part in parts] == [3.0, 0.5, None]
    assert [len(part.steps) for part in parts] == [2, 0, 0]
    (wrong,) = batch.read_reply(batch.read_list(ProcessReward([1.0], [1]), 1), 1)
    assert "ProcessReward" in wrong.detail and wrong.status is ScoreStatus.INFRA_ERROR


@pytest.mark.parametrize(
    ("status", "value", "steps"),
    [
        (ScoreStatus.INFRA_ERROR, None, ((1, 1.0),)),
        (ScoreStatus.UNSCORABLE, None, ((1, 1.0),)),
        (ScoreStatus.SCORED, 1.0, ((1, math.nan),)),
        (ScoreStatus.SCORED, 1.0, ((2, 1.0), (1, 0.0))),
    ],
)
def test_a_score_checks_its_steps(status, value, steps):
    with pytest.raises(AssertionError):
        Score(status, value, steps=steps)


REWARDS = (Reward("a", 2.0, 1.0, None), Reward("b", -1.0, 1.0, None), Reward("c", 0.0, 1.0, None))


def test_weighted_steps_of_all_parts_by_their_ends():
    first, second = paid(0.75, (3, 0.5), (7, 0.25)), paid(4.0, (3, 1.0), (5, 3.0))
    score = combine(REWARDS, {"a": first, "b": second, "c": paid(9.0, (4, 9.0))})
    assert score.steps == ((3, 1.0), (3, -1.0), (5, -3.0), (7, 0.5))
    assert score.value == 2 * 0.75 - 4.0
    assert score.parts == {"a": 0.75, "b": 4.0, "c": 9.0}


def test_a_part_without_steps_is_in_the_value_alone():
    score = combine(
        REWARDS, {"a": paid(1.0, (2, 1.0)), "b": contract.scored(0.5), "c": contract.scored(1.0)}
    )
    assert (score.value, score.steps) == (1.5, ((2, 2.0),))
    plain = combine(REWARDS, dict.fromkeys("abc", contract.scored(1.0)))
    assert (plain.value, plain.steps) == (1.0, ())


def test_a_failed_part_takes_the_steps_of_the_others():
    good, bad = paid(1.0, (2, 1.0)), contract.failed("broken")
    score = combine(REWARDS, {"a": good, "b": bad, "c": contract.scored(0.0)})
    assert (score.status, score.value, score.steps) == (ScoreStatus.INFRA_ERROR, None, ())


def test_a_weighted_step_that_is_not_finite_is_missing():
    huge = paid(0.0, (1, 1.7e308), (2, -1.7e308))
    score = combine(REWARDS, {"a": huge, "b": contract.scored(0.0), "c": contract.scored(0.0)})
    assert score.status is ScoreStatus.INFRA_ERROR and "not finite" in score.detail


def line_lengths(text: str) -> ProcessReward:
    return ProcessReward.by_step(text, [float(len(s)) for s in text.split("\n") if s])


async def native_later(sample):
    return line_lengths(sample.text)


def listed(completions, **columns):
    return [line_lengths(text) for text in completions]


async def listed_later(completions, **columns):
    return [line_lengths(text) for text in completions]


@pytest.mark.parametrize(
    "part",
    [
        native(lambda sample: line_lengths(sample.text), name="lines", weight=0.5),
        native(native_later, name="lines", weight=0.5),
        FunctionPart(listed, name="lines", weight=0.5),
        FunctionPart(listed_later, name="lines", weight=0.5),
    ],
    ids=["native", "native async", "batch", "batch async"],
)
def test_both_contracts_return_them(part):
    with Grader([part, Entry("exact")]) as grader:
        (graded,) = grader.score([group(["one\nfour", "7", ""])])
    found = [(score.value, score.steps) for score in graded.scores or ()]
    # By characters: "one" ends at 3, "four" at 8; "7" is also the answer.
    assert found == [(3.5, ((3, 1.5), (8, 2.0))), (1.5, ((1, 0.5),)), (0.0, ())]
    assert [score.parts["lines"] for score in graded.scores or ()] == [7.0, 1.0, 0.0]


def test_characters_are_not_bytes():
    with Grader([native(lambda s: ProcessReward([1.0], [len(s.text)]), name="n")]) as grader:
        (score,) = scores(grader.score([group(["\U0001f600 naïve"])]))
    assert score.steps == ((7, 1.0),)


def ninth(text: str) -> ProcessReward:
    return ProcessReward([1.0], [9])


@pytest.mark.parametrize(
    "part",
    [
        native(lambda sample: ninth(sample.text), name="far"),
        FunctionPart(lambda completions: [ninth(text) for text in completions], name="far"),
    ],
    ids=["native", "batch"],
)
def test_an_end_beyond_the_text_fails_that_sample_alone(part, caplog):
    with Grader([part]) as grader:
        first, second = scores(grader.score([group(["12345678", "123456789"])]))
    assert first.status is ScoreStatus.INFRA_ERROR
    assert first.detail.startswith("far, sample 0: ") and "character 9" in first.detail
    assert "text of 8" in first.detail
    assert (second.value, second.steps) == (1.0, ((9, 1.0),))
    assert "character 9" in caplog.text


def test_a_rule_is_held_to_the_text_too():
    with Grader([Entry("numeric")]) as grader:
        (numeric,) = grader.rewards
        grader.rewards = (dataclasses.replace(numeric, rule=lambda s: paid(1.0, (9, 1.0))),)
        first, second = scores(grader.score([group(["12345678", "123456789"])]))
    assert first.status is ScoreStatus.INFRA_ERROR and "numeric, sample 0" in first.detail
    assert second.steps == ((9, 1.0),)


def test_the_metric_is_the_mean_number_of_steps():
    def lines(sample):
        return math.nan if sample.text == "bad" else line_lengths(sample.text)

    with Grader([native(lines), Entry("numeric")]) as grader:
        grader.score([group(["a\nb\nc", "7", "", "bad"])])
        counts = grader.counts()
        # 3, 1 and 0 steps; the failed one is in no mean.
        assert counts["rewards/lines/steps"] == pytest.approx(4 / 3)
        assert "rewards/numeric/steps" not in counts
        grader.score([group([""])])
        assert "rewards/lines/steps" not in grader.counts()


def test_steps_of_several_rounds_are_one_metric():
    tally = Tally(["n"])
    tally.add("n", [paid(1.0, (1, 1.0)), contract.scored(0.0)], seconds=0.0)
    tally.add("n", [paid(1.0, (1, 0.5), (2, 0.5))], seconds=0.0)
    assert tally.counts()["rewards/n/steps"] == 1.0


def test_sample_rows_show_them():
    first = Score(ScoreStatus.SCORED, 1.0, steps=((3, 0.25), (7, 0.75)))
    graded = group(["one\ntwo", "x"]).scored((first, Score(ScoreStatus.SCORED, 0.0)))
    one, other = sample_rows(graded, advantages=[0.5, -0.5])
    assert one["steps"] == [[3, 0.25], [7, 0.75]] and one["score"] == 1.0
    assert "steps" not in other
    assert all("steps" not in row for row in sample_rows(group(["a"]), advantages=[None]))


def test_the_pages_example_is_a_reward():
    section = PAGE.read_text(encoding="utf-8").split("\n## Process rewards\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    text = "2 + 3 = 5\nthen 5 * 2 = 11\nso 11"
    with Grader([names["sums_hold"]]) as grader:
        (score,) = scores(grader.score([group([text])]))
    # Right, wrong, and a line without a sum.
    assert score.steps == ((9, 1.0), (25, -1.0), (31, 0.0))
    assert score.value == 0.0
