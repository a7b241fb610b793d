"""Reward processes end when they should: no orphan, no zombie, and nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.records import Completion, Group, Prompt, Score, StopReason
from surefoot.reward import FunctionPart, Grader, reward_function
from surefoot.reward.calls import Call
from surefoot.reward.workers import Workers

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")

DEADLINE = 0.6


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


def test_helpers_of_a_killed_worker_die_with_it(tmp_path):
    def f(sample):
        grouped = subprocess.Popen(["sleep", "60"])
        escaped = subprocess.Popen(["sleep", "60"], start_new_session=True)
        (tmp_path / "pids").write_text(f"{grouped.pid} {escaped.pid}")
        time.sleep(60)

    with Grader([native(f)]) as grader:
        assert values(grade(grader, ["a"])) == [None]
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert wait_until(lambda pid=pid: not alive(pid))


def test_a_child_that_outlives_a_dead_worker_does_not_hide_the_death():
    def f(sample):
        subprocess.Popen(["sleep", "60"], close_fds=False)
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)

    with Grader([native(f, timeout=20.0)]) as grader:
        start = time.monotonic()
        (score,) = grade(grader, ["a"])
        assert time.monotonic() - start < 10.0
        assert "exit code 5" in score.detail
        assert wait_until(lambda: children(nursery(grader)) == [])


def test_close_leaves_no_process_and_no_zombie():
    grader = Grader([native(lambda sample: time.sleep(60))])
    pid = nursery(grader)
    grade(grader, ["a", "b"])
    grade(grader, ["c"])
    workers = children(pid)
    assert alive(pid) and state(pid) != "Z"
    grader.close()
    assert not alive(pid)
    assert not any(alive(worker) for worker in workers)


def test_no_zombie_gathers_while_the_grader_lives():
    def f(sample):
        os._exit(1)

    with Grader([native(f, timeout=5.0)]) as grader:
        for _ in range(5):
            grade(grader, ["a", "b"])
        pid = nursery(grader)
        assert wait_until(lambda: not any(state(child) == "Z" for child in children(pid)))
        assert len(children(pid)) <= 4


def test_a_grader_that_is_dropped_ends_its_processes():
    grader = Grader([native(lambda sample: 1.0)])
    pid = nursery(grader)
    grade(grader, ["a"])
    del grader
    assert wait_until(lambda: not alive(pid))


def test_two_graders_live_and_end_apart():
    first = Grader([native(lambda sample: 1.0)])
    second = Grader([native(lambda sample: 2.0)])
    assert values(grade(first, ["a"])) == [1.0]
    first.close()
    assert not alive(nursery(first))
    assert values(grade(second, ["a"])) == [2.0]
    second.close()


def test_a_grader_built_in_a_thread_that_ends_goes_on():
    built: list[Grader] = []
    thread = threading.Thread(target=lambda: built.append(Grader([native(lambda s: 1.0)])))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with built[0] as grader:
        assert values(grade(grader, ["a"])) == [1.0]


def test_workers_that_die_between_calls_are_replaced():
    with Grader([native(lambda sample: 1.0)]) as grader:
        assert values(grade(grader, ["a"])) == [1.0]
        for pid in children(nursery(grader)):
            os.kill(pid, signal.SIGKILL)
        assert values(grade(grader, ["a", "b"])) == [1.0, 1.0]


def test_a_worker_is_replaced_after_its_share_and_others_keep_theirs():
    def pid(payload):
        return os.getpid()

    workers = Workers([pid, pid])

    def run(function: int, count: int, recycle: int | None) -> list[int]:
        call = Call(function, [b"{}"] * count, 20.0, lambda reply: False, recycle=recycle)
        workers.run([call])
        return [outcome.value for outcome in call.outcomes]

    try:
        (kept,) = run(0, 1, None)
        recycled = run(1, 7, 2)
        assert all(recycled.count(one) <= 2 for one in recycled)
        assert len(set(recycled)) >= 4 and kept not in recycled
        (more,) = run(1, 1, 2)
        assert recycled.count(more) <= 1
        assert run(0, 1, None) == [kept]
        assert wait_until(lambda: len(children(workers.pid)) <= 5)
    finally:
        workers.close()


def test_a_killed_nursery_is_named():
    with Grader([native(lambda sample: 1.0)]) as grader:
        assert values(grade(grader, ["a"])) == [1.0]
        (worker,) = children(nursery(grader))
        os.kill(nursery(grader), signal.SIGKILL)
        assert wait_until(lambda: not alive(worker) and state(nursery(grader)) == "Z")
        with pytest.raises(RewardError, match="ended from outside"):
            grade(grader, ["a"])


def test_signals_to_the_nursery_are_the_runs_business():
    with Grader([native(lambda sample: 1.0)]) as grader:
        assert values(grade(grader, ["a"])) == [1.0]
        (worker,) = children(nursery(grader))
        os.kill(worker, signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(nursery(grader), number)
        assert values(grade(grader, ["a"])) == [1.0]
        assert children(nursery(grader)) == [worker]


SCRIPT = """
import os, signal, sys, time
from surefoot.records import Completion, Group, Prompt, StopReason
from surefoot.reward import FunctionPart, Grader, reward_function
from surefoot.reward.workers import Workers

def f(sample):
    print(sys.stdin.read(), end="")
    if sample.text == "hang":
        time.sleep(60)
    return 1.0

def group(text):
    prompt = Prompt("r", 0, (1,), "q")
    return Group(prompt, (Completion((5,), (-0.1,), StopReason.STOP, 0, 0, text),))

grader = Grader([FunctionPart(reward_function(f), timeout=60.0)])
grader.score([group("a")])
pid = grader._workers.pid
child = open(f"/proc/{pid}/task/{pid}/children").read().split()[0]
print(pid, child, flush=True)
"""


def start(rest: str) -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + rest],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no controlling terminal either
    )
    assert process.stdout is not None
    pid, worker = map(int, process.stdout.readline().split())
    return process, pid, worker


@pytest.mark.parametrize("rest", ["time.sleep(60)", "grader.score([group('hang')])"])
def test_everything_dies_with_a_killed_run(rest):
    process, pid, worker = start(rest)
    with process:
        time.sleep(0.2)
        process.kill()
        process.wait()
        assert wait_until(lambda: not alive(pid) and not alive(worker))


@pytest.mark.parametrize(
    "rest", ["pass", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), signal.SIGTERM)"]
)
def test_everything_dies_with_a_run_that_ends(rest):
    process, pid, worker = start("sys.excepthook = lambda *_: None\n" + rest)
    with process:
        process.wait(timeout=20)
        assert wait_until(lambda: not alive(pid) and not alive(worker))


def test_ctrl_c_reaches_the_run_alone():
    rest = """
interrupted = []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
print("armed", flush=True)
while not interrupted:
    time.sleep(0.01)
value = grader.score([group("a")])[0].scores[0].value
same = open(f"/proc/{pid}/task/{pid}/children").read().split() == [child]
print(value, same, flush=True)
grader.close()
"""
    process, pid, worker = start(rest)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "1.0 True\n"
        assert process.wait(timeout=20) == 0
        assert not alive(pid) and not alive(worker)
