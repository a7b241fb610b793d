"""Reading a run directory, finished, running or crashed.

Owns turning its files back into rows, evaluations and a summary.
Refuses to write anything, and to judge what it reads: findings belong to the doctor.
"""

from __future__ import annotations

import json
import math
import statistics as plain_statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from surefoot.errors import RunDirectoryError
from surefoot.run.directory import FILES, RunDirectory
from surefoot.run.files import parse_line
from surefoot.statistics import Interval, paired_difference, wilson

TIME_KEYS = (
    "time/rollout",
    "time/reward",
    "time/score",
    "time/update",
    "time/sync",
    "time/eval",
    "time/checkpoint",
)

_LARGEST = 1e300
"""Above it sums of numbers are none; nothing that a run measures comes near."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at the held-out rows: shares in [0, 1], 95 % limits of the accuracy.

    `clustered`: the rows are comparisons, of which several may share a prompt; the limits know it.
    """

    step: int
    n: int
    correct: int
    low: float
    high: float
    reward: float | None = None
    eos_share: float | None = None
    clustered: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        *,
        n: int,
        correct: int,
        reward: float | None = None,
        eos_share: float | None = None,
        limits: tuple[float, float] | None = None,
    ) -> Self:
        """`correct` of `n` rows (1 or more) were right; the limits are Wilson's if not given."""
        low, high = wilson(correct, n) if limits is None else limits
        clustered = limits is not None
        return cls(step, n, correct, low, high, reward, eos_share, clustered)

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    def metrics(self) -> dict[str, float | int | None]:
        """The columns of `metrics.jsonl` from which this evaluation is read back."""
        found: dict[str, float | int | None] = {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            "eval/eos_share": self.eos_share,
            "eval/n": self.n,
        }
        if self.clustered:
            found |= {"eval/accuracy_low": self.low, "eval/accuracy_high": self.high}
        return found


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to. Times are seconds; anything that the run did not record is None."""

    name: str
    steps: int | None
    first: Evaluation | None
    last: Evaluation | None
    difference: Interval | None  # accuracy of `last` minus `first` on the same prompts
    pairs: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    time_shares: Mapping[str, float]  # of the recorded parts, largest first; they add up to 1
    cost: float | None = None  # US dollars of rewards with a price and of judges


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Every whole row of `metrics.jsonl`, oldest first; a torn last line is left out."""
    return list(_rows_of_steps(_open(path).metrics))


def read_environment(path: Path | str) -> dict[str, Any]:
    """The record of the machine, `environment.json`; RunDirectoryError if it is none."""
    file = RunDirectory(path).environment
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{file}: cannot be read ({error}); this is no run directory, or it is damaged"
        ) from error
    if not isinstance(facts, dict):
        raise RunDirectoryError(f"{file}: is damaged: it holds no JSON object; restore a copy")
    return facts


def read_groups(path: Path | str, *, split: str | None = None) -> list[dict[str, Any]]:
    """Every whole row of `groups.jsonl`, of one split ("train", "eval") or of both."""
    rows = _rows_of_steps(_open(path).groups)
    return [row for row in rows if split is None or row.get("split") == split]


def read_samples(path: Path | str) -> list[dict[str, Any]]:
    """Every whole row of `samples.jsonl`."""
    return list(_rows_of_steps(_open(path).samples))


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Every whole row of `events.jsonl`."""
    return list(_rows(_open(path).events))


def latest_step(path: Path | str) -> int | None:
    """The last step that has a row, or None when there is none yet."""
    return max((row["step"] for row in read_metrics(path)), default=None)


def evaluations(path: Path | str) -> list[Evaluation]:
    """The evaluations of a run, ascending by step; of a step done twice, the later one."""
    found: dict[int, Evaluation] = {}
    for row in read_metrics(path):
        accuracy, n = number(row, "eval/accuracy"), number(row, "eval/n")
        if accuracy is None or n is None or not (0 <= accuracy <= 1 and n >= 1):
            continue
        found[row["step"]] = Evaluation.of(
            row["step"],
            n=int(n),
            correct=round(accuracy * int(n)),
            reward=number(row, "eval/reward"),
            eos_share=number(row, "eval/eos_share"),
            limits=_limits(row),
        )
    return [found[step] for step in sorted(found)]


def summary(path: Path | str) -> RunSummary:
    """What the run directory at `path` says so far, from its first evaluation to its last."""
    rows = read_metrics(path)
    looks = evaluations(path)
    first, last = (looks[0], looks[-1]) if looks else (None, None)
    difference, pairs = None, 0
    # Before the first step every comparison is a tie, so there is nothing to compare with.
    if first and last and not last.clustered and first.step != last.step:
        before, after = _pairs(read_groups(path, split="eval"), first.step, last.step)
        pairs = len(before)
        difference = paired_difference(before, after) if pairs else None
    return RunSummary(
        name=RunDirectory(path).name,
        steps=max((row["step"] for row in rows), default=None),
        first=first,
        last=last,
        difference=difference,
        pairs=pairs,
        seconds_per_step=_median(rows, "time/step"),
        tokens_per_second=_median(rows, "time/tokens_per_second"),
        time_shares=_time_shares(rows),
        cost=_cost(rows),
    )


def _open(path: Path | str) -> RunDirectory:
    directory = RunDirectory(path)
    if not any((directory.path / name).exists() for name in FILES):
        why = "holds nothing of a run" if directory.path.is_dir() else "does not exist"
        raise RunDirectoryError(
            f"run directory {directory.path} {why}; name the directory in a recipe's run.dir"
        )
    return directory


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            for line in file:
                row = parse_line(line)
                if row is not None and "step" in row:
                    yield row
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error.strerror}); restore a copy, or move it elsewhere"
        ) from error


def _rows_of_steps(path: Path) -> Iterator[dict[str, Any]]:
    """What a hand or a disk has changed beyond telling its step is as foreign as a torn line."""
    return (row for row in _rows(path) if type(row["step"]) is int and 0 <= row["step"] < 2**63)


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number under a key of a row; None where there is none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        return None
    return value if math.isfinite(value) else None


def _pairs(
    rows: Sequence[Mapping[str, Any]], first: int, last: int
) -> tuple[list[bool], list[bool]]:
    """Right or wrong before and after, over the prompts that have both."""
    verdicts: dict[int, dict[str, bool]] = {first: {}, last: {}}
    for row in rows:
        correct, prompt = row.get("correct"), row.get("prompt")
        if row["step"] in verdicts and isinstance(prompt, str) and correct is not None:
            verdicts[row["step"]][prompt] = bool(correct)
    common = [prompt for prompt in verdicts[first] if prompt in verdicts[last]]
    return [verdicts[first][prompt] for prompt in common], [
        verdicts[last][prompt] for prompt in common
    ]


def _limits(row: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = number(row, "eval/accuracy_low"), number(row, "eval/accuracy_high")
    return None if low is None or high is None else (low, high)


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for row in rows if (value := number(row, key)) is not None]
    return plain_statistics.median(values) if values else None


def _cost(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The last totals of what is paid by the call, and of what is paid by the token."""
    totals = []
    for key in ("cost/total", "judge/usd"):
        totals += [value for row in rows if (value := number(row, key)) is not None][-1:]
    return sum(totals) if totals else None


def _time_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums = {key: sum(number(row, key) or 0.0 for row in rows) for key in TIME_KEYS}
    total = sum(sums.values())
    largest = sorted((key for key in sums if sums[key] > 0), key=lambda key: -sums[key])
    return {key.removeprefix("time/"): sums[key] / total for key in largest}
