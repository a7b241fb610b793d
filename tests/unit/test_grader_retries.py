"""Failed calls are tried again: how often, after how long, and what is never tried again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from test_reward_grader import Entry, group, native, values

from surefoot.errors import RecipeError
from surefoot.records import Score, ScoreStatus
from surefoot.reward import Grader
from surefoot.reward.calls import Call, Failure, Outcome, pause_before
from surefoot.reward.tally import Tally, quantile


def times(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "times").read_text().split()]


def noting(folder: Path, then):
    def f(sample):
        with (folder / "times").open("a") as file:
            file.write(f"{time.monotonic()}\n")
        return then()

    return f


def fail():
    raise ConnectionError("busy")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_failure_is_tried_again_as_often_as_the_recipe_says(tmp_path, retries):
    part = native(noting(tmp_path, fail), name="f", timeout=30.0, retries=retries)
    with Grader([part]) as grader:
        assert values(grader.score([group(["a"])])) == [None]
        assert grader.counts()["rewards/f/retries"] == retries
    assert len(times(tmp_path)) == 1 + retries


def test_the_pauses_double_with_a_spread_of_one_half_to_three_halves(tmp_path):
    part = native(noting(tmp_path, fail), name="f", timeout=30.0, retries=3)
    with Grader([part]) as grader:
        grader.score([group(["a"])])
    gaps = [later - early for early, later in itertools.pairwise(times(tmp_path))]
    assert all(gap >= least for gap, least in zip(gaps, (0.025, 0.05, 0.1), strict=True)), gaps


def test_the_pause_is_the_same_for_the_same_item_and_another_for_others():
    pauses = [pause_before(0, item, 2) for item in range(200)]
    assert pauses == [pause_before(0, item, 2) for item in range(200)]
    assert len(set(pauses)) == 200
    assert 0.025 <= min(pauses) < 0.03 and 0.07 < max(pauses) <= 0.075
    assert 0.1 <= pause_before(0, 0, 4) <= 0.3


@pytest.mark.parametrize(
    "then",
    [
        lambda: Score(ScoreStatus.UNSCORABLE, detail="bad row"),
        lambda: 0.0,
        lambda: None,
    ],
)
def test_what_is_no_fault_of_the_grader_is_not_tried_again(tmp_path, then):
    with Grader([native(noting(tmp_path, then), name="f", timeout=30.0, retries=5)]) as grader:
        grader.score([group(["a"])])
        assert grader.counts()["rewards/f/retries"] == 0.0
    assert len(times(tmp_path)) == 1


def test_a_batch_call_that_raises_is_tried_again(tmp_path):
    def f(completions, **columns):
        with (tmp_path / "times").open("a") as file:
            file.write(f"{time.monotonic()}\n")
        if len(times(tmp_path)) == 1:
            raise ConnectionError("busy")
        return [1.0] * len(completions)

    with Grader([f]) as grader:
        assert values(grader.score([group(["a", "b"])])) == [1.0, 1.0]
        assert grader.counts()["rewards/f/retries"] == 1.0


def test_retries_that_nothing_would_read_are_refused():
    with pytest.raises(RecipeError, match=r"reward\.retries is -1"):
        Grader([Entry("regex", retries=-1, options={"pattern": "a"})])
    with pytest.raises(RecipeError, match="'numeric': nothing would read it"):
        Grader([Entry("numeric", retries=3)])


HANGS = Outcome(failure=Failure.DEADLINE, detail="late")
GOOD = Outcome(value={"status": "scored"})
RAISES = Outcome(failure=Failure.EXCEPTION, detail="raised")


def hear(outcomes: list[Outcome], count: int = 200, streak: int = 0) -> Call:
    """A call of which the first payloads had these outcomes."""
    call = Call(0, [b"{}"] * count, 10.0, lambda reply: False, retries=0, streak=streak)
    for outcome in outcomes:
        item, _, _ = call.give()
        call.settle(item, outcome)
        call.give_up_if_hopeless()
    return call


def test_only_deadlines_in_a_row_give_up_the_rest():
    assert hear([HANGS] * 11 + [GOOD] + [HANGS] * 11).left == 200 - 23
    given_up = hear([HANGS] * 11 + [GOOD] + [HANGS] * 12)
    assert given_up.left == 0
    told = given_up.outcomes
    assert [o.failure for o in told[:11]] == [Failure.DEADLINE] * 11
    assert {o.failure for o in told[24:]} == {Failure.BREAKER} and len(told) == 200


def test_failures_in_a_row_are_counted_over_calls():
    assert hear([RAISES] * 63).left == 200 - 63
    assert hear([RAISES] * 64).left == 0
    assert hear([RAISES] * 40 + [GOOD] + [RAISES] * 40).streak == 40
    assert hear([RAISES] * 3, streak=60).left == 200 - 3
    assert hear([RAISES] * 4, streak=60).left == 0


def test_a_limit_that_the_function_set_is_no_failure_of_the_grader():
    assert hear([Outcome(failure=Failure.LIMIT, detail="CPU")] * 100).left == 100


def test_latencies_are_those_of_single_calls():
    """Nearest rank: of twenty the tenth, the nineteenth and the last."""
    seconds = [float(n) for n in range(1, 21)]
    assert (quantile(seconds, 0.5), quantile(seconds, 0.95)) == (10.0, 19.0)
    assert (quantile([3.0], 0.5), quantile([3.0], 0.95)) == (3.0, 3.0)
    assert quantile([4.0, 1.0, 2.0], 0.5) == 2.0
    tally = Tally(["n"])
    assert "time/rewards/n/p50" not in tally.counts()
    tally.add_latencies("n", seconds[10:])
    tally.add_latencies("n", seconds[:10])
    counts = tally.counts()
    assert [counts[f"time/rewards/n/{key}"] for key in ("p50", "p95", "max")] == [10.0, 19.0, 20.0]


def test_the_latency_of_a_slow_sample_is_the_largest():
    def f(sample):
        time.sleep(0.3 if sample.text == "slow" else 0.0)
        return 1.0

    with Grader([native(f), Entry("numeric")]) as grader:
        grader.score([group(["a", "slow", "b", "c", "d"])])
        counts = grader.counts()
    assert counts["time/rewards/f/p50"] <= counts["time/rewards/f/p95"]
    assert 0.3 <= counts["time/rewards/f/max"] <= counts["time/reward"]
    assert not [key for key in counts if key.startswith("time/rewards/numeric/")]
