"""The built-in reward `code`: programs that a model wrote, run on the tests of their row.

Owns the options, finding the program in a text, and the score.
Refuses to own isolation (`sandbox.py`), the tests and their comparison (`code_tests.py`).

The process that runs a program never decides: outputs and values are compared here, outside, with
expected ones that never enter the sandbox.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from surefoot.errors import RecipeError
from surefoot.reward.code_tests import Compare, Test, TestsError, judge, read_tests
from surefoot.reward.contract import PartScore, RewardSample, scored, unscorable
from surefoot.reward.rules import Rule
from surefoot.reward.sandbox import START_SECONDS, Box, Ended, Job, Limits, Tier
from surefoot.reward.sandbox_probe import Isolation, isolation

ALLOWANCE = "unisolated_code"
_LONGEST_SECONDS = 43_200.0
_MARGIN_SECONDS = 10.0  # of the deadline, beside starting the box: a last report, and its end
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_PYTHON = frozenset({"python", "py", "python3", "py3"})
_DETAIL = 160
_FORGED = re.compile(r"\d+ of \d+ tests passed; test \d+: tamper: ")


@dataclass(frozen=True, slots=True)
class CodeOptions:
    """Where the tests and the program stand, how they are compared, and the limits of a run.

    `cpu_limit` and `wall_limit` are seconds for one test, `total_limit` wall-clock seconds for all
    tests of one completion; a program that meets one of them fails, and the tests not run with it.
    `wall_limit` counts time in which a program waits or sleeps, `cpu_limit` that in which it runs.
    """

    tests: str | tuple[str, ...] = "tests"
    language: Literal["python"] = "python"
    extract: Literal["any", "fence", "whole"] = "any"
    after: str | None = None
    fraction: bool = False
    compare: Compare = "lines"
    tolerance: float = 1.0e-9
    cpu_limit: float = 3.0
    wall_limit: float = 10.0
    total_limit: float = 60.0
    memory_mb: int = 512
    output_kb: int = 256
    disk_mb: int = 16
    processes: int = 16
    isolation: Literal["auto", "namespaces", "guarded", "none"] = "auto"

    def __post_init__(self) -> None:
        if not self.columns or "" in self.columns:
            raise ValueError("tests names no column")
        if self.after == "":
            raise ValueError("after is empty; it is a text such as </think>")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}; it is a number from 0 to below 1")
        limits = (self.cpu_limit, self.wall_limit, self.total_limit, _LONGEST_SECONDS)
        if not (limits[0] > 0.0 and all(one <= next_one for one, next_one in pairwise(limits))):
            raise ValueError(
                f"cpu_limit, wall_limit and total_limit are {self.cpu_limit:g}, "
                f"{self.wall_limit:g} and {self.total_limit:g}; they are seconds, more than 0, "
                f"none is above the next, and none above {_LONGEST_SECONDS:g}"
            )
        for name, value, least in (
            ("memory_mb", self.memory_mb, 64),
            ("output_kb", self.output_kb, 1),
            ("disk_mb", self.disk_mb, 1),
            ("processes", self.processes, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it is at least {least}")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tests,) if isinstance(self.tests, str) else tuple(self.tests)

    @property
    def deadline(self) -> float:
        """Seconds within which a completion has its score, whatever its program does."""
        return self.total_limit + START_SECONDS + _MARGIN_SECONDS

    @property
    def limits(self) -> Limits:
        return Limits(
            cpu=self.cpu_limit,
            wall=self.wall_limit,
            memory_mb=self.memory_mb,
            output_kb=self.output_kb,
            disk_mb=self.disk_mb,
            processes=self.processes,
        )


def settle(options: CodeOptions, allow: Collection[str]) -> Isolation:
    """The tier that this machine has; RecipeError where the recipe does not allow so little."""
    wanted = None if options.isolation == "auto" else Tier(options.isolation)
    found = isolation(wanted)
    if found.tier is not Tier.NAMESPACES and ALLOWANCE not in allow:
        raise RecipeError(
            f"reward 'code' runs programs that the model writes, and has no boundary around them "
            f"here ({found}); run where user namespaces are allowed, or, in a machine that may be "
            f"lost, add {ALLOWANCE} to run.allow"
        )
    return found


def code(options: CodeOptions, tier: Tier) -> Rule:
    """1 where the program passes every test of the row, else 0; with `fraction` the share passed.

    A row whose tests cannot be used is unscorable. A box that cannot be started raises, which is
    the machine's fault: a missing score.
    """

    def rule(sample: RewardSample) -> PartScore:
        try:
            tests = _tests_of(sample, options)
        except TestsError as error:
            return unscorable(str(error))
        program = extract(sample.text, options)
        if program is None:
            return scored(0.0, "no program in the text")
        passed, why = _run(program, tests, options, tier)
        told = f"{passed} of {len(tests)} tests passed"
        value = passed / len(tests) if options.fraction else float(passed == len(tests))
        return scored(value, f"{told}; {why}" if why else told)

    return rule


def _tests_of(sample: RewardSample, options: CodeOptions) -> tuple[Test, ...]:
    tests: list[Test] = []
    for name in options.columns:
        if sample.columns.get(name) is None:
            raise TestsError(f"the row has no column {name!r}, which the option tests names")
        tests += read_tests(sample.columns[name])
    return tuple(tests)


def _run(
    program: str, tests: tuple[Test, ...], options: CodeOptions, tier: Tier
) -> tuple[int, str]:
    """How many tests the program passes, and why it fails the first that it does not."""
    passed, why = 0, ""
    with Box(tier, options.limits) as box:
        until = time.monotonic() + options.total_limit
        for k, test in enumerate(tests):
            left = until - time.monotonic()
            if left <= 0:
                return passed, why or f"test {k}: not run, all of the time was used"
            job = Job(program, test.stdin, test.call, test.args, test.kwargs)
            report = box.run(job, within=left)
            wrong = judge(test, report, compare=options.compare, tolerance=options.tolerance)
            passed += wrong is None
            if wrong is None:
                continue
            # A class's name, for one, is text of the program, and may be no UTF-8.
            said = f"test {k}: {wrong[:_DETAIL]}".encode("utf-8", "replace").decode()
            forged = report.ended in (Ended.TAMPER, Ended.GONE)
            why = said if forged else why or said
            if forged or report.ended is Ended.WALL or not options.fraction:
                break
    return passed, why


def tampered(detail: str) -> bool:
    """Whether a verdict's detail tells of a forged report, or of a supervisor that was ended."""
    return _FORGED.match(detail) is not None


def extract(text: str, options: CodeOptions) -> str | None:
    """The program in a completion; None where there is none.

    The last fenced block marked as Python, else the last without a mark; a block may be left open,
    as at a stop string. Without a block: the whole text, unless `extract` is fence.
    """
    if options.after is not None:
        _, found, text = text.rpartition(options.after)
        if not found:
            return None
    program: str | None = text
    if options.extract != "whole":
        block = _last_block(text)
        if block is not None or options.extract == "fence" or _FENCE.search(text):
            program = block
    return program if program is not None and program.strip() else None


def _last_block(text: str) -> str | None:
    marked: str | None = None
    bare: str | None = None
    opened: tuple[str, str, int] | None = None  # its fence, its mark, where its text begins
    for match in _FENCE.finditer(text):
        fence, mark = match[1], match[2].strip().lower()
        if opened is None:
            opened = (fence, mark.split(" ")[0], match.end() + 1)
        elif fence.startswith(opened[0]) and not mark:
            marked, bare = _sorted(text[opened[2] : match.start()], opened[1], marked, bare)
            opened = None
    if opened is not None:
        marked, bare = _sorted(text[opened[2] :], opened[1], marked, bare)
    return bare if marked is None else marked


def _sorted(
    block: str, mark: str, marked: str | None, bare: str | None
) -> tuple[str | None, str | None]:
    if mark in _PYTHON:
        return block, bare
    return marked, bare if mark else block
