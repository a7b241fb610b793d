"""The history baseline: an average of the rewards of earlier steps (Williams 1992).

Owns one average and its update. It is subtracted before it learns of a step, so no reward is
compared with itself. Refuses to own which steps share an average (task, prompt) and when one is
stale: both are the loop's.

Plain numbers and lists only, so that a checkpoint can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from surefoot.errors import SurefootError

Mode = Literal["ema", "window", "cumulative"]


@dataclass
class MovingAverage:
    """An average of reward batches.

    ema         b <- decay b + (1 - decay) mean(batch); `debias` weighs batch t by
                (1 - decay) / (1 - decay^t) instead, which leaves `init` no weight: the same as
                starting at 0 and dividing by 1 - decay^t
    window      the mean of all rewards of the last `window` batches
    cumulative  the mean of all rewards so far (arXiv:2402.14740 Eq. 8)

    Before the first batch the average is `init`; None takes the first batch's own mean.
    Rewards that are all equal give exactly their value, so that advantages of nothing are 0.
    """

    mode: Mode = "ema"
    decay: float = 0.9
    init: float | None = 0.0
    debias: bool = False
    window: int | None = None
    batches: int = 0
    """Batches seen."""
    average: float = 0.0
    """What `baseline` says once a batch was seen."""
    recent: list[tuple[float, int]] = field(default_factory=list)
    """Mean and number of the rewards of the batches that still count (window, cumulative)."""

    def baseline(self, rewards: Sequence[float]) -> float:
        """What to subtract from this batch; it is read only where nothing came before it.

        Errors: SurefootError if there is neither a history, nor `init`, nor a reward.
        """
        if self.batches > 0:
            return self.average
        if self.init is not None:
            return self.init
        if not rewards:
            raise SurefootError("A history without init starts at a batch with rewards.")
        return mean_of(rewards)

    def update(self, rewards: Sequence[float]) -> None:
        """Learn of a batch. An empty one changes nothing. Errors: SurefootError if not finite."""
        if not rewards:
            return
        if not all(math.isfinite(reward) for reward in rewards):
            raise SurefootError("A history takes finite rewards; leave missing ones out.")
        mean = mean_of(rewards)
        self.batches += 1
        if self.mode == "ema":
            self._blend(mean)
            return
        self.recent.append((mean, len(rewards)))
        if self.mode == "window":
            self.recent = self.recent[-(self.window or 1) :]
        means, numbers = zip(*self.recent, strict=True)
        self.average = mean_of(means, numbers)
        if self.mode == "cumulative":
            self.recent = [(self.average, sum(numbers))]

    @property
    def half_life(self) -> float:
        """Batches after which half of a jump of the rewards is learned; inf if it never is.

        Of the ema alone: the others forget by the window, or not at all.
        """
        if self.mode != "ema":
            return math.inf
        return math.log(0.5) / math.log(self.decay) if self.decay > 0 else 0.0

    def _blend(self, mean: float) -> None:
        weight = 1.0 - self.decay
        if self.batches == 1:
            if self.debias or self.init is None:
                self.average = mean
                return
            self.average = self.init
        elif self.debias:
            weight /= 1.0 - self.decay**self.batches
        self.average += weight * (mean - self.average)


def mean_of(values: Sequence[float], weights: Sequence[int] | None = None) -> float:
    """The mean, over deviations from the smallest, so that equal values give exactly themselves."""
    low = min(values)
    if weights is None:
        return low + math.fsum(value - low for value in values) / len(values)
    parts = (weight * (value - low) for value, weight in zip(values, weights, strict=True))
    return low + math.fsum(parts) / sum(weights)
