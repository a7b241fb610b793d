"""Rewards run at the same time, and what they say does not depend on who is done first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_reward_grader import Entry, group, native, values

from surefoot.records import ScoreStatus
from surefoot.reward import FunctionPart, Grader, RewardSample
from surefoot.reward.contract import PartScore, scored
from surefoot.reward.resolve import Reward

PATIENCE = 20.0


def meet(folder: Path, me: str, others: Sequence[str]) -> float:
    """1 once all are here at the same time, 0 if they never are."""
    (folder / me).touch()
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if all((folder / other).exists() for other in others):
            return 1.0
        time.sleep(0.005)
    return 0.0


def waits(folder: Path, me: str, others: Sequence[str]) -> FunctionPart:
    return native(lambda sample: meet(folder, me, others), name=me, timeout=PATIENCE)


def with_scorers(grader: Grader, *scorers: Reward) -> Grader:
    grader.rewards = (*grader.rewards, *scorers)
    return grader


def scorer(name: str, judge: Callable[[RewardSample], float], *, concurrent: bool = True) -> Reward:
    def all_of_them(samples: Sequence[RewardSample]) -> list[PartScore]:
        return [scored(judge(sample)) for sample in samples]

    return Reward(name, 1.0, 10.0, None, scorer=all_of_them, concurrent=concurrent)


def test_workers_network_scorers_and_a_model_wait_for_each_other(tmp_path):
    """Each of the five begins before any of them has ended."""
    names = ["one", "two", "net", "net2", "model"]

    def listed(completions, **columns):
        return [meet(tmp_path, "two", names)] * len(completions)

    parts = [waits(tmp_path, "one", names), FunctionPart(listed, name="two", timeout=PATIENCE)]
    threads: dict[str, threading.Thread] = {}

    def seen(name: str) -> Callable[[RewardSample], float]:
        def judge(sample: RewardSample) -> float:
            threads[name] = threading.current_thread()
            return meet(tmp_path, name, names)

        return judge

    with Grader(parts) as grader:
        with_scorers(
            grader,
            scorer("net", seen("net")),
            scorer("net2", seen("net2")),
            scorer("model", seen("model"), concurrent=False),
        )
        (graded,) = grader.score([group(["a"])])
    assert (graded.scores or ())[0].parts == dict.fromkeys(names, 1.0)
    assert threads["model"] is threading.main_thread()
    assert threading.main_thread() not in (threads["net"], threads["net2"])


@pytest.mark.parametrize("turned", [False, True])
def test_scores_do_not_depend_on_who_is_done_first(turned):
    def slow(sample):
        time.sleep(0.003 * (len(sample.text) * 7 % 5))
        return 0.1 * len(sample.text)

    def odd(sample):
        time.sleep(0.003 * (len(sample.text) * 3 % 4))
        if len(sample.text) % 7 == 3:
            raise ValueError("three over")
        return 1.0 / len(sample.text)

    parts = [native(slow, name="slow", weight=0.3), native(odd, name="odd"), Entry("numeric")]
    groups = [group(["x" * n for n in range(k + 1, k + 9)]) for k in range(0, 24, 8)]
    with Grader(parts[::-1] if turned else parts) as grader:
        graded = grader.score(groups)
    lengths = [n for k in range(0, 24, 8) for n in range(k + 1, k + 9)]
    for n, score in zip(lengths, [s for g in graded for s in g.scores or ()], strict=True):
        if n % 7 == 3:
            assert score.status is ScoreStatus.INFRA_ERROR and "three over" in score.detail
            assert score.parts == {"slow": 0.1 * n, "odd": None, "numeric": 0.0}
        else:
            assert score.parts == {"slow": 0.1 * n, "odd": 1.0 / n, "numeric": 0.0}
            assert score.value == pytest.approx(0.03 * n + 1.0 / n)


def test_an_error_of_one_scorer_ends_the_call_and_the_grader_lives_on(tmp_path):
    def fails(sample: RewardSample) -> float:
        raise KeyError("no such model")

    with Grader([native(lambda s: time.sleep(30), name="slow", timeout=60.0)]) as grader:
        plain = grader.rewards
        with_scorers(grader, scorer("model", fails, concurrent=False))
        start = time.monotonic()
        with pytest.raises(KeyError, match="no such model"):
            grader.score([group(["a"])])
        assert time.monotonic() - start < 15.0
        grader.rewards = tuple(replace(r, timeout=0.2) for r in plain)
        (graded,) = grader.score([group(["a"])])
        assert "deadline of 0.2 s" in (graded.scores or ())[0].detail


def test_what_is_submitted_is_scored_while_the_caller_goes_on(tmp_path):
    """The first group is scored before it is collected; groups come back as `score` gives them."""

    def marks(sample):
        (tmp_path / sample.text).touch()
        return float(len(sample.text))

    with Grader([native(marks, name="marks", timeout=PATIENCE), Entry("numeric")]) as grader:
        first = grader.submit([group(["a", "bb"])])
        until = time.monotonic() + PATIENCE
        while not (tmp_path / "bb").exists():
            assert time.monotonic() < until
            time.sleep(0.005)
        second = grader.submit([group(["7", "ccc"])], same_step=True)
        assert values(grader.collect(second)) == [2.0, 3.0]
        assert values(grader.collect(first)) == [1.0, 2.0]
        assert grader.counts()["rewards/marks/mean"] == 1.75
        with pytest.raises(AssertionError, match="collected already"):
            grader.collect(first)


def test_what_is_never_collected_does_not_outlive_the_grader():
    with Grader([native(lambda s: time.sleep(30), name="slow", timeout=60.0)]) as grader:
        grader.submit([group(["a"])])
        start = time.monotonic()
    assert time.monotonic() - start < 15.0
    assert not [t for t in threading.enumerate() if t.name == "reward workers"]


def test_each_function_keeps_its_state_in_a_worker_of_its_own():
    calls: list[str] = []

    def first(sample):
        calls.append("first")
        return float(len(calls))

    def second(sample):
        calls.append("second")
        return 10.0 * len(calls)

    with Grader([native(first), native(second)]) as grader:
        (graded,) = grader.score([group(["a"])])
        assert (graded.scores or ())[0].parts == {"first": 1.0, "second": 10.0}
        (graded,) = grader.score([group(["a"])])
        assert (graded.scores or ())[0].parts == {"first": 2.0, "second": 20.0}


@pytest.mark.parametrize("kind", ["worker", "network"])
def test_waiting_can_be_interrupted_and_the_grader_lives_on(kind, tmp_path):
    go_on = tmp_path / "go on"

    def slow(sample: RewardSample) -> float:
        until = time.monotonic() + PATIENCE
        while not go_on.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return 1.0

    own = slow if kind == "worker" else lambda sample: 1.0
    with Grader([native(own, name="own", timeout=PATIENCE)]) as grader:
        if kind == "network":
            with_scorers(grader, scorer("slow", slow))
        asked: list[float] = []

        def stop() -> None:
            asked.append(time.monotonic())
            if len(asked) > 2:
                raise KeyboardInterrupt

        grader.interrupt = stop
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            grader.score([group(["a", "b"])])
        assert time.monotonic() - began < PATIENCE / 2
        assert len(asked) == 3
        go_on.touch()
        grader.interrupt = lambda: None
        (graded,) = grader.score([group(["a", "b"])])
        assert [score.parts["own"] for score in graded.scores or ()] == [1.0, 1.0]
