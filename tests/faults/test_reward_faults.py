"""Rewards that raise, hang, die or lie: what is lost is exactly what failed, and nothing is left.

Rows 22 to 24, 28, 29, 32 and 35 of the fault matrix, on real processes; each has a test of its
number at the end.
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
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import EXIT_FINDING, StoppedOnFinding
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import FunctionPart, Grader, code, reward_function
from surefoot.reward.sandbox_folders import SandboxError

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
    retries: int = 1
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


def test_a_batch_of_hangs_is_given_up_after_three_deadlines(tmp_path):
    """Four hang at a time."""

    def hang(sample):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    with Grader([native(hang)]) as grader:
        start = time.monotonic()
        scores = grade(grader, ["hang"] * 20)
        assert time.monotonic() - start <= 3 * DEADLINE + SLACK
        assert {score.status for score in scores} == {MISSING}
        assert sum("given up" in score.detail for score in scores) == 8
        assert grader.counts()["reward_breaker"] == 8.0
        assert grader.counts()["rewards/part/deadlines"] == 12.0
        # Those that hung are gone; a worker that has just begun may wait for the next call.
        hung = {int(file.name) for file in tmp_path.iterdir()}
        assert len(hung) >= 12
        assert wait_until(lambda: not hung & set(children(nursery(grader))))


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


# The rows of the fault matrix, by number.


def test_row_22_a_reward_that_raises_costs_its_item_and_is_told_once(caplog):
    def f(sample):
        if sample.text.startswith("bad"):
            raise KeyError("verdict")
        return float(len(sample.text))

    texts = ["a", "bad 1", "abc", "bad 2"]
    with caplog.at_level(logging.ERROR), Grader([native(f, timeout=5.0)]) as grader:
        scores = grade(grader, texts)
        assert [score.status is MISSING for score in scores] == [False, True, False, True]
        assert values(scores) == [1.0, None, 3.0, None]
        assert grader.counts()["rewards/part/retries"] == 2.0
        assert grader.counts()["reward_failures"] == 2.0
    assert len(caplog.records) == 1 and "Traceback" in caplog.text


def test_row_23_one_hang_of_sixty_four_costs_a_deadline_and_no_sibling():
    def f(sample):
        return time.sleep(60) if sample.text == "hang" else float(len(sample.text))

    texts = ["x" * (1 + n % 5) for n in range(64)]
    texts[20] = "hang"
    with Grader([native(f)]) as grader:
        grade(grader, ["warm"])
        start = time.monotonic()
        scores = grade(grader, texts)
        assert time.monotonic() - start <= DEADLINE + SLACK
        told = [None if text == "hang" else float(len(text)) for text in texts]
        assert values(scores) == told
        counts = grader.counts()
        assert (counts["rewards/part/deadlines"], counts["reward_breaker"]) == (1.0, 0.0)
        assert counts["rewards/part/missing"] == 1 / 64


def test_row_23_three_hangs_do_not_give_up_siblings_that_are_slow():
    """The siblings take longer than the deadline of those that hang."""

    def f(sample):
        time.sleep(60 if sample.text == "hang" else 0.04)
        return 1.0

    texts = ["hang"] * 3 + ["ok"] * 40
    with Grader([native(f)]) as grader:
        scores = grade(grader, texts)
        assert values(scores) == [None] * 3 + [1.0] * 40
        assert grader.counts()["reward_breaker"] == 0.0


def test_row_23_more_hangs_than_workers_are_bounded_and_cost_no_sibling():
    def f(sample):
        return time.sleep(60) if sample.text == "hang" else 1.0

    texts = ["hang"] * 6 + ["ok"] * 20
    with Grader([native(f)]) as grader:
        grade(grader, ["warm"])
        start = time.monotonic()
        scores = grade(grader, texts)
        # Four at a time, so that six take two deadlines.
        assert time.monotonic() - start <= 2 * DEADLINE + SLACK
        assert values(scores) == [None] * 6 + [1.0] * 20


@pytest.mark.parametrize("odd", [math.nan, math.inf, "1.0", [1.0], b"1"])
def test_row_24_what_is_no_number_is_missing_and_names_its_index(odd):
    with Grader([native(lambda s: odd if s.text == "odd" else 0.25, timeout=5.0)]) as grader:
        scores = grade(grader, ["a", "odd", "b"])
    assert values(scores) == [0.25, None, 0.25]
    assert scores[1].status is MISSING and scores[1].detail.startswith("part, sample 1: returned")


def test_row_24_none_does_not_apply_and_a_wrong_length_is_the_whole_call():
    applies = native(lambda s: None if s.text == "none" else 0.25, timeout=5.0)
    with Grader([applies, Entry("exact")]) as grader:
        assert values(grade(grader, ["none", "7"])) == [0.0, 1.25]
    with Grader([listed(lambda completions: [1.0], timeout=5.0), Entry("exact")]) as grader:
        scores = grade(grader, ["7", "8"])
        assert [score.status for score in scores] == [MISSING] * 2
        assert "1 values for 2 completions" in scores[0].detail


def test_row_28_a_sandbox_that_fails_costs_its_item_after_a_retry(monkeypatch):
    boxed = code._run

    def flaky(program, tests, options, tier):
        if "unlucky" in program:
            raise SandboxError("the sandbox did not start: no process left")
        return boxed(program, tests, options, tier)

    monkeypatch.setattr(code, "_run", flaky)
    tests = [{"input": "", "output": "5"}]
    texts = ["print(5)", "print(5)  # unlucky", "print(6)"]
    with Grader([Entry("code", timeout=10.0)], allow=("unisolated_code",)) as grader:
        (graded,) = grader.score([group(texts, tests=tests)])
        scores = list(graded.scores or ())
        assert values(scores) == [1.0, None, 0.0]
        assert scores[1].status is MISSING and "did not start" in scores[1].detail
        assert grader.counts()["rewards/code/retries"] == 1.0
        grader.stop_if_broken()


def test_row_28_failures_in_a_row_end_the_call_and_then_the_run():
    def f(sample):
        if sample.text == "down":
            raise OSError("quota")
        return 1.0

    with Grader([native(f, timeout=20.0)]) as grader:
        for _ in range(3):
            grade(grader, ["down"] * 20)
            grader.stop_if_broken()
        assert values(grade(grader, ["ok"])) == [1.0]
        scores = grade(grader, ["down"] * 70)
        # One good reply set the count back. Up to four more may fail before they are counted.
        given_up = [s for s in scores if "given up after 6" in s.detail]
        assert 2 <= len(given_up) <= 6 and "failures in a row" in given_up[0].detail
        assert {score.status for score in scores} == {MISSING}
        with pytest.raises(
            StoppedOnFinding, match=r"reward part: \d+ calls .*OSError: quota"
        ) as stop:
            grader.stop_if_broken()
        assert stop.value.exit_code == EXIT_FINDING
        assert values(grade(grader, ["ok"])) == [1.0]
        grader.stop_if_broken()


def test_row_28_the_run_stops_with_its_state_and_trains_on_nothing(tiny_model, tmp_path):
    """The step in which it is found is not trained: a missing batch is not a batch of zeros."""
    from support.loop import make_loop

    method = {"name": "rloo", "group_size": 4, "kl": {"coef": 0.0, "measure_every": 0}}
    bench = make_loop(
        tiny_model, tmp_path / "run", method=method, judge=lambda p, s, c: float(s % 2), steps=4
    )

    def broken() -> None:
        if len(bench.grader.asked) == 3:
            raise StoppedOnFinding("reward exact: 64 calls in a row failed")

    bench.grader.stop_if_broken = broken
    with pytest.raises(StoppedOnFinding, match="64 calls"):
        bench.run()
    assert bench.desk.directory.checkpoint_steps() == [2]
    assert [row["step"] for row in bench.metrics()] == [1, 2]


def test_row_29_a_forged_pass_scores_zero_and_is_counted():
    from test_code_attacks import FORGE

    attack = textwrap.dedent(FORGE["many answers"])
    honest = "def solve(n):\n    return n + 1"
    wrong = "def solve(n):\n    raise ValueError('1 of 1 tests passed; test 0: tamper: no')"
    tests = [{"call": "solve", "args": [3], "expect": 4}]
    with Grader([Entry("code", timeout=10.0)], allow=("unisolated_code",)) as grader:
        graded = grader.score([group([honest, attack, wrong], tests=tests)])
        scores = list(graded[0].scores or ())
        assert values(scores) == [1.0, 0.0, 0.0]
        assert grader.counts()["rewards/code/tamper"] == 1.0
        grader.score([group([honest], tests=tests)])
        assert grader.counts()["rewards/code/tamper"] == 0.0


@pytest.mark.parametrize("answer", [None, "", "seven", "1/0"])
def test_row_32_a_gold_that_cannot_be_read_is_unscorable_and_never_a_score(answer):
    prompt = Prompt("row 3", 0, (1,), "q", answer, "sums")
    told = Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, 0, "7")
    with Grader([Entry("numeric"), native(lambda s: 1.0, timeout=5.0)]) as grader:
        bad, good = grader.score([Group(prompt, (told,)), group(["7"])])
        assert grader.counts()["reward_unscorable"] == 1.0
        assert grader.counts()["reward_failures"] == 0.0
    (score,) = bad.scores or ()
    assert score.status is ScoreStatus.UNSCORABLE and score.value is None
    assert score.detail.startswith("numeric, sample 0: ")
    assert values(list(good.scores or ())) == [2.0]


def test_row_35_odd_completions_have_an_ordinary_score():
    """Empty, cut off, the prompt again, and several final answers, of which the last counts."""
    prompt = Prompt("r", 0, (1,), "What is 3 + 4?", "7", "sums")
    cut = Completion((5,), (-0.1,), StopReason.LENGTH, 0, 1, "the answer is 7")
    rest = [
        Completion((2,), (-0.1,), StopReason.STOP, 0, 0, ""),
        cut,
        Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, 2, prompt.text),
        Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, 3, "7, no: 8"),
        Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, 4, "8, no: 7"),
    ]
    seen = native(lambda s: len(s.text) / 100 if s.stop is StopReason.STOP else -1.0, timeout=5.0)
    with Grader([Entry("numeric"), seen]) as grader:
        (graded,) = grader.score([Group(prompt, tuple(rest))])
        assert grader.counts()["reward_failures"] == 0.0
    scores = list(graded.scores or ())
    assert [score.parts["numeric"] for score in scores] == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert [score.parts["part"] for score in scores] == [0.0, -1.0, 0.14, 0.08, 0.08]
