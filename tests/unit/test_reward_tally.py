"""Rewards one by one: not applicable against failed, and their metrics."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reward_grader import Entry, group, native, values

from surefoot.records import Score, ScoreStatus
from surefoot.reward import FunctionPart, Grader
from surefoot.reward.contract import PartScore
from surefoot.reward.grader import combine
from surefoot.reward.resolve import Reward
from surefoot.reward.tally import Tally

NOT_APPLICABLE = PartScore(ScoreStatus.SCORED)
FAILED = PartScore(ScoreStatus.INFRA_ERROR, None, "broken")
BAD_ROW = PartScore(ScoreStatus.UNSCORABLE, None, "bad row")


def number(value: float) -> PartScore:
    return PartScore(ScoreStatus.SCORED, value)


REWARDS = (Reward("a", 2.0, 1.0, None), Reward("b", -1.0, 1.0, None), Reward("c", 0.0, 1.0, None))


@pytest.mark.parametrize(
    ("verdicts", "status", "value"),
    [
        ((number(1.0), number(0.5), number(9.0)), "scored", 1.5),
        ((number(1.0), NOT_APPLICABLE, number(9.0)), "scored", 2.0),
        ((NOT_APPLICABLE, number(0.5), NOT_APPLICABLE), "scored", -0.5),
        ((NOT_APPLICABLE, NOT_APPLICABLE, number(9.0)), "scored", 0.0),
        ((NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE), "infra_error", None),
        ((number(1.0), FAILED, number(9.0)), "infra_error", None),
        ((NOT_APPLICABLE, FAILED, NOT_APPLICABLE), "infra_error", None),
        ((number(1.0), BAD_ROW, number(9.0)), "unscorable", None),
        ((FAILED, BAD_ROW, NOT_APPLICABLE), "infra_error", None),
    ],
)
def test_none_leaves_the_sum_and_a_failure_takes_the_sample(verdicts, status, value):
    score = combine(REWARDS, dict(zip("abc", verdicts, strict=True)))
    assert (score.status.value, score.value) == (status, value)


def listed(verdicts: dict[str, float | None], name: str, weight: float = 1.0) -> FunctionPart:
    """A TRL reward that looks each completion up."""
    return FunctionPart(
        lambda completions, **columns: [verdicts[c] for c in completions], weight, name
    )


def test_trls_none_is_left_out_and_does_not_count_as_zero():
    first = listed({"x": 1.0, "y": None, "z": None}, "first", 2.0)
    second = listed({"x": 0.25, "y": 0.5, "z": None}, "second")
    with Grader([first, second]) as grader:
        (graded,) = grader.score([group(["x", "y", "z"])])
        counts = grader.counts()
    assert values([graded]) == [2.25, 0.5, None]
    assert counts["rewards/first/mean"] == 1.0 and "rewards/first/std" not in counts
    assert counts["rewards/second/mean"] == 0.375
    assert counts["rewards/second/std"] == pytest.approx(0.125 * math.sqrt(2))
    assert counts["rewards/first/not_applicable"] == 2.0
    assert counts["rewards/first/missing"] == 0.0
    assert counts["reward_failures"] == 1.0
    assert [score.parts for score in graded.scores or ()] == [
        {"first": 1.0, "second": 0.25},
        {"first": None, "second": 0.5},
        {"first": None, "second": None},
    ]


def test_that_no_reward_applies_is_told_once_with_its_row(caplog):
    with Grader([listed({"x": None, "y": 1.0}, "n")]) as grader, caplog.at_level(logging.WARNING):
        grader.score([group(["y", "x"], row="row 17")])
        grader.score([group(["x"], row="row 18")])
    told = [r.getMessage() for r in caplog.records if "returned None" in r.getMessage()]
    assert len(told) == 1
    assert "1 of 2" in told[0] and "row 17" in told[0]


def test_missing_is_the_share_that_a_reward_could_not_score():
    def picky(sample):
        return Score(ScoreStatus.INFRA_ERROR, detail="busy") if sample.text == "1" else None

    with Grader([Entry("numeric"), native(picky, name="picky")]) as grader:
        grader.score([group(["1", "2", "3"]), group(["7"], "seven")])
        counts = grader.counts()
    assert counts["rewards/numeric/missing"] == 0.25
    assert counts["rewards/picky/missing"] == 0.25
    assert counts["rewards/picky/not_applicable"] == 3.0
    assert "rewards/picky/mean" not in counts


def test_a_step_in_rounds_has_one_set_of_metrics():
    with Grader([Entry("numeric", weight=10.0)]) as grader:
        grader.score([group(["7", "7"])])
        grader.score([group(["1", "7"]), group(["1", "x"], None)], same_step=True)
        counts = grader.counts()
        assert counts["rewards/numeric/mean"] == 0.75
        assert counts["rewards/numeric/std"] == 0.5
        assert counts["rewards/numeric/missing"] == pytest.approx(1 / 3)
        assert counts["reward_unscorable"] == 2.0
        grader.score([group(["1"])])
        assert grader.counts()["rewards/numeric/mean"] == 0.0
        assert grader.counts()["reward_unscorable"] == 0.0


def test_seconds_add_up_over_the_rounds():
    tally = Tally(["n"])
    tally.add("n", [number(1.0)], seconds=0.5)
    tally.add("n", [], seconds=0.25)
    tally.add_scores([], seconds=1.0)
    tally.add_scores([], seconds=2.0)
    counts = tally.counts()
    assert (counts["time/rewards/n"], counts["time/reward"]) == (0.75, 3.0)


VERDICTS = st.one_of(
    st.floats(-8, 8).map(number), st.just(NOT_APPLICABLE), st.just(FAILED), st.just(BAD_ROW)
)


@settings(max_examples=60, deadline=None)
@given(st.tuples(VERDICTS, VERDICTS, VERDICTS))
def test_the_weighted_parts_give_the_score_back(drawn):
    """What a normalisation per part reads: names and weights of the rewards, and `parts`."""
    score = combine(REWARDS, dict(zip("abc", drawn, strict=True)))
    assert list(score.parts) == [reward.name for reward in REWARDS]
    if score.valid:
        terms = [(r.weight, score.parts[r.name]) for r in REWARDS]
        assert any(value is not None for _, value in terms)
        total = sum(weight * value for weight, value in terms if value is not None)
        assert total == pytest.approx(score.value, abs=1e-12)
