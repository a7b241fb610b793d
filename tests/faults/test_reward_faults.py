"""Rewards that raise, hang, die or lie: what is lost is exactly what failed, and nothing is left.

Rows 22 to 24, 32 and 35 of the fault matrix, on real processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import FunctionPart, Grader, reward_function

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")

DEADLINE = 0.6
SLACK = 1.0
MISSING = ScoreStatus.INFRA_ERROR


@dataclass(frozen=True)
class Entry:
    use: str
    weight: float = 1.0
    name: str | None = None
    timeout: float = DEADLINE
    price: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def group(texts: Sequence[str], **columns: Any) -> Group:
    prompt = Prompt("r", 0, (1,), "q", "7", "sums", None, columns)
    return Group(
        prompt,
        tuple(
            Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, i, text)
            for i, text in enumerate(texts)
        ),
    )


def native(function: Callable[..., Any], timeout: float = DEADLINE) -> FunctionPart:
    return FunctionPart(reward_function(function), name="part", timeout=timeout)


def listed(function: Callable[..., Any], timeout: float = DEADLINE) -> FunctionPart:
    return FunctionPart(function, name="part", timeout=timeout)


def grade(grader: Grader, texts: Sequence[str]) -> list[Score]:
    (graded,) = grader.score([group(texts)])
    return list(graded.scores or ())


def values(scores: Sequence[Score]) -> list[float | None]:
    return [score.value for score in scores]


def nursery(grader: Grader) -> int:
    assert grader._workers is not None
    return grader._workers.pid


def alive(pid: int) -> bool:
    """Running or a zombie: anything that the kernel still lists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After every test: no child of ours, not even a zombie, and no open grader."""
    before = set(children(os.getpid()))
    yield
    left = set(children(os.getpid())) - before
    assert not left, f"processes left: {left}"


def spin(sample):
    while True:
        pass


def sleep(sample):
    time.sleep(60)


def spin_in_c(sample):
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 40)))


def hold_the_lock(sample):
    """A C call that never gives other Python threads a turn."""
    ctypes.PyDLL(None).sleep(60)


def swallow(sample):
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            continue


def ignore_signals(sample):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def start_threads(sample):
    threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def start_programs(sample):
    subprocess.run(["sleep", "60"], check=False)


async def sleep_async(sample):
    import asyncio

    await asyncio.sleep(60)


HANGS = [
    spin,
    sleep,
    spin_in_c,
    hold_the_lock,
    swallow,
    ignore_signals,
    start_threads,
    start_programs,
    sleep_async,
]


@pytest.mark.parametrize("hang", HANGS)
def test_one_hanging_sample_costs_itself_and_at_most_a_deadline(hang):
    def f(sample):
        return hang(sample) if sample.text == "hang" else 1.0

    async def g(sample):
        return await hang(sample) if sample.text == "hang" else 1.0

    with Grader([native(g if hang is sleep_async else f)]) as grader:
        grade(grader, ["warm"])
        start = time.monotonic()
        scores = grade(grader, ["a", "hang", "b", "c", "d"])
        assert time.monotonic() - start <= DEADLINE + SLACK
        assert values(scores) == [1.0, None, 1.0, 1.0, 1.0]
        assert scores[1].status is MISSING and "deadline of 0.6 s" in scores[1].detail
        assert grader.counts()["reward_failures"] == 1.0
        assert values(grade(grader, ["a", "b"])) == [1.0, 1.0]


MONSTER = "$9^{9^{9^9}}$"
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs the extra math"
)


@needs_math_verify
def test_a_hang_in_the_algebra_is_missing_and_costs_its_siblings_nothing():
    with Grader([Entry("math", timeout=2.0, options={"cpu_limit": 60.0})]) as grader:
        assert values(grade(grader, ["7"])) == [1.0]
        before = children(nursery(grader))
        start = time.monotonic()
        scores = grade(grader, ["7", MONSTER, "8", "$7.0$", "7"])
        assert time.monotonic() - start <= 2.0 + 2 * SLACK
        assert values(scores) == [1.0, None, 0.0, 1.0, 1.0]
        assert scores[1].status is MISSING and "deadline of 2 s" in scores[1].detail
        assert grader.counts()["reward_failures"] == 1.0
        assert values(grade(grader, ["7"])) == [1.0]
        assert wait_until(lambda: set(children(nursery(grader))) - set(before) != set())


@needs_math_verify
def test_texts_that_use_up_the_cpu_limit_are_wrong_and_nothing_is_given_up():
    texts = [MONSTER] * 5 + ["7"]
    options = {"cpu_limit": 0.3}
    cosine = {"max_len": 4, "checker_options": options}
    parts = [
        Entry("math", timeout=30.0, options=options),
        Entry("cosine", timeout=30.0, options=cosine),
    ]
    with Grader(parts) as grader:
        scores = grade(grader, texts)
        counts = grader.counts()
    # Two of four tokens: half way between the value of no length and that of all of it.
    assert [s.parts["math"] for s in scores] == [0.0] * 5 + [1.0]
    assert [s.parts["cosine"] for s in scores] == pytest.approx([-0.75] * 5 + [0.75])
    assert "CPU time" in scores[0].detail
    assert (counts["reward_limits"], counts["reward_failures"]) == (10.0, 0.0)
    assert counts["reward_breaker"] == 0.0


def test_a_cpu_limit_that_no_rule_set_is_a_failure():
    def f(sample):
        signal.setitimer(signal.ITIMER_PROF, 0.05)
        while True:
            pass

    with Grader([native(f, timeout=20.0)]) as grader:
        (score,) = grade(grader, ["a"])
    assert score.status is MISSING and "ended by signal" in score.detail


def test_a_hanging_batch_call_loses_the_call_and_no_more():
    def f(completions, **columns):
        if "hang" in completions:
            time.sleep(60)
        return [1.0] * len(completions)

    with Grader([listed(f), Entry("exact")]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["a", "hang"])
        assert time.monotonic() - start <= DEADLINE + SLACK
        assert [score.status for score in scores] == [MISSING] * 2
        assert scores[0].parts == {"part": None, "exact": 0.0}
        assert values(grade(grader, ["7"])) == [2.0]


def test_several_hangs_are_waited_for_together():
    def f(sample):
        return time.sleep(60) if sample.text == "hang" else 1.0

    with Grader([native(f)]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["hang", "a", "hang", "b"])
        assert time.monotonic() - start <= DEADLINE + SLACK
        assert values(scores) == [None, 1.0, None, 1.0]


def test_a_batch_of_hangs_is_given_up_after_three_deadlines():
    with Grader([native(sleep)]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["hang"] * 20)
        assert time.monotonic() - start <= DEADLINE + SLACK
        assert {score.status for score in scores} == {MISSING}
        assert sum("given up" in score.detail for score in scores) == 17
        assert grader.counts()["reward_breaker"] == 17.0
        assert wait_until(lambda: children(nursery(grader)) == [])


def test_a_slow_start_does_not_count_against_the_deadline():
    def f(sample):
        time.sleep(DEADLINE / 2)
        return 1.0

    with Grader([native(f)]) as grader:
        assert values(grade(grader, ["a", "b", "c", "d", "e"])) == [1.0] * 5


def test_a_catastrophic_pattern_is_killed():
    entry = Entry("regex", options={"pattern": r"(a+)+b", "match": "full"})
    with Grader([entry]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["a" * 40, "aab"])
        assert time.monotonic() - start <= DEADLINE + SLACK
        assert values(scores) == [None, 1.0]


class Odd(BaseException):
    """Like some timeouts: not an Exception."""


def raise_odd():
    raise Odd("out of time")


def crash(end):
    faulthandler.disable()  # its dump would only clutter the test's output
    end()


def deep(n=0):
    return deep(n + 1)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (raise_odd, "Odd: out of time"),
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os._exit(7), "exit code 7"),
        (lambda: crash(lambda: os.kill(os.getpid(), signal.SIGSEGV)), "signal 11"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: crash(lambda: ctypes.string_at(0)), "signal 11"),
        (lambda: os.closerange(3, 100), "process"),
        (lambda: deep(), "RecursionError"),
        (lambda: math.nan, "nan"),
        (lambda: math.inf, "inf"),
        (lambda: "1.0", "'1.0' (str)"),
        (lambda: [1.0], "[1.0] (list)"),
        (lambda: object(), "object"),
    ],
)
def test_a_failing_sample_costs_only_itself(fail, reason):
    def f(sample):
        return fail() if sample.text == "bad" else 1.0

    with Grader([native(f, timeout=5.0)]) as grader:
        scores = grade(grader, ["a", "bad", "b"])
        assert values(scores) == [1.0, None, 1.0]
        assert scores[1].status is MISSING
        assert reason in scores[1].detail
        assert scores[1].detail.startswith("part, sample 1: ")
        assert values(grade(grader, ["a"])) == [1.0]


def test_a_failure_that_passes_is_tried_again(tmp_path):
    def f(sample):
        mark = tmp_path / sample.text
        if mark.exists():
            return 1.0
        mark.touch()
        if sample.text == "dies":
            os._exit(1)
        if sample.text == "nan":
            return math.nan
        raise ConnectionError("busy")

    with Grader([native(f, timeout=5.0)]) as grader:
        assert values(grade(grader, ["raises", "dies", "nan"])) == [1.0] * 3


def test_a_failure_is_tried_twice_and_never_beyond_its_deadline(tmp_path):
    def f(sample):
        with (tmp_path / sample.text).open("a") as log:
            log.write("x")
        time.sleep(0.4 if sample.text == "slow" else 0.0)
        raise ValueError("always")

    with Grader([native(f)]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["quick", "slow"])
        assert time.monotonic() - start <= DEADLINE + SLACK
    assert (tmp_path / "quick").read_text() == "xx"
    assert (tmp_path / "slow").read_text() == "xx"
    assert "ValueError" in scores[0].detail and "deadline" in scores[1].detail


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1.0, None, 0.5], [1.0, None, 0.5]),
        ([1.0, math.nan, 0.5], [1.0, None, 0.5]),
        ([1.0, "1", True], [1.0, None, 1.0]),
        ([1.0, 0.5], [None] * 3),
        ([1.0] * 4, [None] * 3),
        ("abc", [None] * 3),
        (1.0, [None] * 3),
        (None, [None] * 3),
    ],
)
def test_what_a_batch_function_returns(result, expected):
    with Grader([listed(lambda completions: result, timeout=5.0)]) as grader:
        scores = grade(grader, ["a", "b", "c"])
    assert values(scores) == expected
    for index, score in enumerate(scores):
        assert (score.status is MISSING) == (expected[index] is None)


@pytest.mark.parametrize("fail", [lambda: 1 / 0, lambda: os._exit(3), raise_odd])
def test_a_failing_batch_call_loses_the_call_and_no_more(fail):
    def f(completions, **columns):
        return fail() if "bad" in completions else [1.0] * len(completions)

    async def g(completions, **columns):
        return f(completions)

    for function in (f, g):
        with Grader([listed(function, timeout=5.0)]) as grader:
            assert values(grade(grader, ["a", "bad"])) == [None, None]
            assert values(grade(grader, ["a", "b"])) == [1.0, 1.0]


def test_each_distinct_error_is_logged_once_with_its_traceback(caplog):
    def f(sample):
        if sample.text == "key":
            return {}["nope"]
        raise ValueError(f"unlike every other: {sample.text}")

    with caplog.at_level(logging.ERROR), Grader([native(f, timeout=5.0)]) as grader:
        for _ in range(3):
            grade(grader, ["a", "b", "key", "key"])
    assert len(caplog.records) == 2
    assert "ValueError" in caplog.text and "KeyError" in caplog.text
    assert caplog.text.count('raise ValueError(f"unlike') == 1


def test_a_function_whose_fork_comes_back_answers_once():
    def f(sample):
        os.fork()
        return float(len(sample.text))

    with Grader([native(f, timeout=5.0)]) as grader:
        assert values(grade(grader, ["x" * n for n in range(12)])) == list(range(12))


def test_an_interrupted_call_does_not_disturb_the_next():
    def f(sample):
        time.sleep(0.5 if sample.text == "slow" else 0.0)
        return float(len(sample.text))

    class Wake(Exception):
        pass

    def wake(number, frame):
        raise Wake

    before = signal.signal(signal.SIGALRM, wake)
    try:
        with Grader([native(f, timeout=20.0)]) as grader:
            grade(grader, ["a"])
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Wake):
                grade(grader, ["slow", "slow"])
            assert values(grade(grader, ["abc"])) == [3.0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
