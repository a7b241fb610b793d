"""What it costs to run programs in a sandbox, by tier, against a bare interpreter.

    python bench/sandbox.py          writes bench/results/sandbox.txt

A completion pays for one box, and for every test a run in it. Wall clock is the best of many, CPU
time the mean: both stay true on a machine that has other work.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.reward.sandbox import Box, Job, Limits, Tier
from surefoot.reward.sandbox_probe import broken_promises
from surefoot.reward.sandbox_walls import interpreter

TIMES = 12
PRINT = Job("print(input())", "1\n")
CALL = Job("def f(x): return x", call="f", args=[1])
CASES = {"box alone": (PRINT, 0), "1 program": (PRINT, 1), "1 call": (CALL, 1)}
CASES |= {"10 programs": (PRINT, 10), "10 calls": (CALL, 10)}


def used() -> float:
    """Seconds of CPU of this process and of all that it has reaped."""
    return sum(os.times()[:4])


def milliseconds(call: Callable[[], object]) -> str:
    """Best wall clock and mean CPU time of a call."""
    call()
    best, before = float("inf"), used()
    for _ in range(TIMES):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return f"{best * 1e3:6.1f} /{(used() - before) / TIMES * 1e3:5.1f}"


def bare() -> None:
    subprocess.run(interpreter(["-c", PRINT.code]), input=b"1\n", capture_output=True, check=True)


def run(tier: Tier, job: Job, count: int) -> None:
    with Box(tier, Limits()) as box:
        for _ in range(count):
            report = box.run(job)
            assert report.answered or report.stdout == b"1\n", report


def main() -> None:
    release = platform.release().split("-")[0]
    lines = [
        f"Milliseconds, best wall clock / mean CPU time of {TIMES}; Python "
        f"{platform.python_version()}, Linux {release}, {os.cpu_count()} CPUs",
        f"{'':12}" + "".join(f"{name:>15}" for name in CASES),
        f"{'bare python':12}{'':15}{milliseconds(bare):>15}",
    ]
    for tier in Tier:
        if broken_promises(tier):
            lines.append(f"{tier.value:12}not on this machine")
            continue
        cells = [milliseconds(lambda t=tier, j=job, n=n: run(t, j, n)) for job, n in CASES.values()]
        lines.append(f"{tier.value:12}" + "".join(f"{cell:>15}" for cell in cells))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (Path(__file__).parent / "results" / "sandbox.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
