"""Shift detection: whether the rewards of the last steps are of another level than those before.

Owns the test, what it remembers of a stream of batches, and the words for what it found.
Refuses to own which rewards make one stream and what becomes of their average (`history`).

The test. The last 12 batches of a stream are cut at each of the last 4 places. With n1 values
after a cut and n2 before it, t the difference of their means, v the population variance of all of
them together times (1/n1 + 1/n2), and M the largest part that one value can have in t (its
distance from the common mean over n1 or n2), Bennett's inequality (1962) says for each sign of t

    P(a difference of t or more by chance) <= exp(-h),  h = v/M^2 phi(M t / v),
    phi(u) = (1 + u) ln(1 + u) - u.

It is t^2 / 2v, the exponent of the usual z test, for small M, and honest where that test is not:
rare successes, heavy tails, a handful of values. A shift is reported at h >= ln(2 cuts / 0.001):
the chance of a report is bounded by 0.001 per step (both signs, all cuts) with variance and range
taken from the values in sight. The bound is loose: by simulation (bench/results/shift.txt) steps
without a shift gave no report, and a fall of the solve rate from 0.7 to 0.2 with 32 prompts a step
is reported within three steps in nearly all runs if two steps or more were seen before it, in three
of four after a single one.

A value is the mean reward of one prompt: completions of the same prompt are not independent.
A difference below half a standard deviation of the rewards is never a shift: a history that stale
adds less than a quarter to the variance of the advantages. Rewards that rise because the policy
learns mostly stay below it; the steeper the climb, the more often it is taken for a shift (same
file).

There is no floor under the variance: after rewards that were all equal, M bounds what one new
value can say. One that differs is not reported; a whole batch of 32 that differs is, at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.objective.history import mean_of

KEPT = 12
CUTS = 4
CHANCE = 0.001
LEAST = 0.5


@dataclass(frozen=True)
class Value:
    """The rewards of one prompt in one step."""

    rewards: Sequence[float]
    label: str | None


@dataclass(frozen=True)
class Past:
    """One batch of values, as far as it is remembered."""

    step: int
    count: int
    mean: float
    square: float
    """Sum of squared deviations of the values from their mean."""
    low: float
    high: float
    within: float
    """Sum over the values of the variance of the rewards inside each."""
    labels: Mapping[str, int]
    """Values of each label."""


@dataclass(frozen=True)
class Jump:
    """A shift, from the batch of step `since` on."""

    since: int
    mean: float
    before: float
    z: float
    """The normal deviate of as small a chance, with the sign of the change."""
    label: str | None
    """The label that the batches since then have more of; None if there is none."""


class Detector:
    """Watches one stream of batches."""

    def __init__(self, past: Sequence[Past] = ()) -> None:
        self.past = list(past)

    def see(self, values: Sequence[Value], *, step: int) -> Jump | None:
        """Take a batch in. After a shift only this batch is remembered: it is reported once."""
        if not values:
            return None
        self.past = [*self.past, _summary(values, step)][-KEPT:]
        jump = _strongest(self.past)
        if jump is not None:
            self.past = self.past[-1:]
        return jump

    def to_state(self) -> list[dict[str, Any]]:
        """The remembered batches as JSON."""
        return [dataclasses.asdict(past) for past in self.past]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Detector:
        return cls([Past(**past) for past in state])


def bennett(t: float, variance: float, part: float) -> float:
    """The exponent h of Bennett's bound for a difference t > 0 of this variance.

    `part` is the largest share of one value in t. Both > 0.
    """
    u = part * t / variance
    # Below that the series u^2/2 - u^3/6 is exact, and the difference is rounding.
    phi = (1 + u) * math.log1p(u) - u if u > 1e-4 else u * u / 2 - u**3 / 6
    return variance / part**2 * phi


def _strongest(past: Sequence[Past]) -> Jump | None:
    """The cut with the least chance, if that is small enough and the difference large enough."""
    cuts = range(1, min(CUTS, len(past) - 1) + 1)
    if not cuts:
        return None
    count, mean = _count(past), _mean(past)
    square = math.fsum(one.square + one.count * (one.mean - mean) ** 2 for one in past)
    if square == 0:
        return None
    least = LEAST * math.sqrt((square + math.fsum(one.within for one in past)) / count)
    above, below = max(one.high for one in past) - mean, mean - min(one.low for one in past)
    best, h = None, math.log(2 * len(cuts) / CHANCE)
    for cut in cuts:
        before, after = past[:-cut], past[-cut:]
        n1, n2 = _count(after), _count(before)
        t = _mean(after) - _mean(before)
        if t == 0 or abs(t) < least:
            continue
        up, down = (above, below) if t > 0 else (below, above)
        found = bennett(abs(t), square / count * (1 / n1 + 1 / n2), max(up / n1, down / n2))
        if found >= h:
            best, h = (cut, t), found
    if best is None:
        return None
    cut, t = best
    before, after = past[:-cut], past[-cut:]
    z = math.copysign(math.sqrt(2 * h), t)
    return Jump(after[0].step, _mean(after), _mean(before), z, _risen(before, after))


def _risen(before: Sequence[Past], after: Sequence[Past]) -> str | None:
    """The label whose share rose most, by the same test."""
    n1, n2 = _count(after), _count(before)
    best, h = None, math.log(2 / CHANCE)
    for label in sorted({label for past in after for label in past.labels}):
        new = sum(past.labels.get(label, 0) for past in after)
        old = sum(past.labels.get(label, 0) for past in before)
        t, share = new / n1 - old / n2, (new + old) / (n1 + n2)
        if t <= 0:
            continue
        variance = share * (1 - share) * (1 / n1 + 1 / n2)
        found = bennett(t, variance, max((1 - share) / n1, share / n2))
        if found >= h:
            best, h = label, found
    return best


def _summary(values: Sequence[Value], step: int) -> Past:
    means = [mean_of(value.rewards) for value in values]
    mean = mean_of(means)
    inside = [
        math.fsum((reward - own) ** 2 for reward in value.rewards) / len(value.rewards)
        for value, own in zip(values, means, strict=True)
    ]
    return Past(
        step=step,
        count=len(values),
        mean=mean,
        square=math.fsum((own - mean) ** 2 for own in means),
        low=min(means),
        high=max(means),
        within=math.fsum(inside),
        labels=dict(sorted(Counter(v.label for v in values if v.label is not None).items())),
    )


def _count(past: Sequence[Past]) -> int:
    return sum(one.count for one in past)


def _mean(past: Sequence[Past]) -> float:
    return mean_of([one.mean for one in past], [one.count for one in past])
