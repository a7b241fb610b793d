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

    ema         b <- decay b + (1 - decay) mean(batch); `debias` divides by 1 - decay^t after t
                batches, which takes out the weight of a start at 0
    window      the mean of all rewards of the last `window` batches
    cumulative  the mean of all rewards so far (arXiv:2402.14740 Eq. 8)

    Before the first batch the average is `init`; None takes the first batch's own mean.
    """

    mode: Mode = "ema"
    decay: float = 0.9
    init: float | None = 0.0
    debias: bool = False
    window: int | None = None
    batches: int = 0
    """Batches seen."""
    average: float = 0.0
    """The ema, before debiasing."""
    recent: list[tuple[float, int]] = field(default_factory=list)
    """Sum and number of the rewards of the batches that still count (window, cumulative)."""

    def baseline(self, rewards: Sequence[float]) -> float:
        """What to subtract from this batch; it is read only where nothing came before it.

        Errors: SurefootError if there is neither a history, nor `init`, nor a reward.
        """
        if self.batches == 0:
            if self.init is not None:
                return self.init
            if not rewards:
                raise SurefootError("A history without init starts at a batch with rewards.")
            return math.fsum(rewards) / len(rewards)
        if self.mode == "ema":
            return self.average / self._known if self.debias else self.average
        count = sum(number for _, number in self.recent)
        return math.fsum(total for total, _ in self.recent) / count

    def update(self, rewards: Sequence[float]) -> None:
        """Learn of a batch. An empty one changes nothing. Errors: SurefootError if not finite."""
        if not rewards:
            return
        if not all(math.isfinite(reward) for reward in rewards):
            raise SurefootError("A history takes finite rewards; leave missing ones out.")
        mean = math.fsum(rewards) / len(rewards)
        if self.mode == "ema":
            if self.batches == 0:
                self.average = mean if self.init is None else self.init
            if self.batches > 0 or self.init is not None:
                self.average = self.decay * self.average + (1.0 - self.decay) * mean
        else:
            self.recent.append((math.fsum(rewards), len(rewards)))
            if self.mode == "window":
                self.recent = self.recent[-(self.window or 1) :]
            else:
                totals, numbers = zip(*self.recent, strict=True)
                self.recent = [(math.fsum(totals), sum(numbers))]
        self.batches += 1

    @property
    def half_life(self) -> float:
        """Batches after which half of a jump of the rewards is learned; inf if it never is.

        Of the ema alone: the others forget by the window, or not at all.
        """
        if self.mode != "ema":
            return math.inf
        return math.log(0.5) / math.log(self.decay) if self.decay > 0 else 0.0

    @property
    def _known(self) -> float:
        """Weight of what was seen, the rest being the start's; an own mean leaves no rest."""
        return 1.0 if self.init is None else 1.0 - self.decay**self.batches
