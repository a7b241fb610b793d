"""The metrics of the grader, of every reward and of all together.

Owns their names: TRL's where TRL has one.
Refuses to own how parts are combined (`combine.py`) or normalised (`loops`, `objective`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.records import Score, ScoreStatus
from surefoot.reward.contract import PartScore


@dataclass(slots=True)
class Tally:
    """The verdicts of one or more calls of the grader, and the metrics of all of them together."""

    names: Sequence[str]
    breaker: int = 0
    limits: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    """Further counts and sums, by the whole name of their metric."""
    _latencies: dict[str, list[float]] = field(init=False, default_factory=dict)
    _verdicts: dict[str, list[PartScore]] = field(init=False)
    _seconds: dict[str, float] = field(init=False)
    _statuses: list[ScoreStatus] = field(init=False, default_factory=list)
    _whole: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._verdicts = {name: [] for name in self.names}
        self._seconds = dict.fromkeys(self.names, 0.0)

    def add(self, name: str, verdicts: Sequence[PartScore], *, seconds: float) -> None:
        """One reward's verdicts of one call."""
        self._verdicts[name] += verdicts
        self._seconds[name] += seconds

    def count(self, metric: str, amount: float) -> None:
        """Add to a metric that is there once something was added, be it 0."""
        self.counted[metric] = self.counted.get(metric, 0.0) + amount

    def add_latencies(self, name: str, seconds: Sequence[float]) -> None:
        """Of single calls of a reward, from its first attempt to its last."""
        self._latencies.setdefault(name, []).extend(seconds)

    def add_scores(self, scores: Sequence[Score], *, seconds: float) -> None:
        """The combined scores of one call."""
        self._statuses += [score.status for score in scores]
        self._whole += seconds

    def counts(self) -> dict[str, float]:
        """The metrics; what is not known is absent.

        `rewards/<name>/mean` and `/std` (ddof 1) over the samples where that reward gave a value,
        `/missing` the share of samples that it could not score (its own or the row's fault), and
        `/not_applicable` the number for which it returned None; `/steps`, of a reward that returned
        any, is their mean number over the samples with a value. `reward_failures` counts samples
        without a score by a grader's fault or because no reward applies, `reward_unscorable` those
        of bad rows, `reward_breaker` verdicts given up after repeated deadlines, `reward_limits`
        texts that used up a CPU limit. Seconds are under `time/reward` and `time/rewards/<name>`.
        `time/rewards/<name>/p50`, `/p95` and `/max` are those of single calls. What was `count`ed,
        and what batch rewards log by `log_metric`, is there too.
        """
        counts = {
            **self.logged,
            "reward_failures": float(self._statuses.count(ScoreStatus.INFRA_ERROR)),
            "reward_unscorable": float(self._statuses.count(ScoreStatus.UNSCORABLE)),
            "reward_breaker": float(self.breaker),
            "reward_limits": float(self.limits),
            "time/reward": self._whole,
            **self.counted,
        }
        for name, verdicts in self._verdicts.items():
            counts |= _summary(name, verdicts)
            counts[f"time/rewards/{name}"] = self._seconds[name]
        for name, seconds in self._latencies.items():
            if seconds:
                counts[f"time/rewards/{name}/p50"] = quantile(seconds, 0.5)
                counts[f"time/rewards/{name}/p95"] = quantile(seconds, 0.95)
                counts[f"time/rewards/{name}/max"] = max(seconds)
        return counts


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def _summary(name: str, verdicts: Sequence[PartScore]) -> dict[str, float]:
    values = [v.value for v in verdicts if v.value is not None]
    missing = sum(v.status is not ScoreStatus.SCORED for v in verdicts)
    absent = len(verdicts) - len(values) - missing
    summary = {f"rewards/{name}/not_applicable": float(absent)}
    if verdicts:
        summary[f"rewards/{name}/missing"] = missing / len(verdicts)
    if values:
        summary[f"rewards/{name}/mean"] = statistics.fmean(values)
    if len(values) > 1:
        summary[f"rewards/{name}/std"] = statistics.stdev(values)
    steps = [len(v.steps) for v in verdicts if v.value is not None]
    if any(steps):
        summary[f"rewards/{name}/steps"] = statistics.fmean(steps)
    return summary
