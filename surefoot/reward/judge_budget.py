"""What a judge has cost, and the point at which no further call is made.

Owns the count of calls and dollars over a whole run, and what is set aside for calls under way.
Refuses to own where the count is kept between processes: the caller passes `keep`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.errors import StoppedOnFinding


@dataclass(frozen=True, slots=True)
class Spent:
    """Requests that were sent, and US dollars, since the run began."""

    calls: int = 0
    usd: float = 0.0


class Budget:
    """Counts every request before it is sent; safe to use from several threads.

    `limit_calls` and `limit_usd` are never exceeded: a request is sent only if the most that it may
    cost still fits beside what was spent and what is set aside for others under way. `keep` is told
    each new count, with all that is set aside in it, so that a process that dies has counted too
    much rather than too little.
    """

    def __init__(
        self,
        *,
        limit_calls: int | None,
        limit_usd: float | None,
        spent: Spent | None = None,
        keep: Callable[[Spent], None] | None = None,
    ) -> None:
        self._limit_calls = limit_calls
        self._limit_usd = limit_usd
        self._spent = Spent() if spent is None else spent
        self._keep = keep
        self._aside = 0.0
        self._under_way = 0
        self._changed = threading.Condition()

    @property
    def spent(self) -> Spent:
        """The cost of the requests that were answered or lost; those under way count as calls."""
        with self._changed:
            return self._spent

    def take(self, most: float) -> None:
        """Count one request that costs at most `most` dollars; StoppedOnFinding if it cannot be.

        Waits where it may still fit once others under way have turned out cheaper.
        """
        with self._changed:
            while True:
                self._check_calls()
                if self._fits(most):
                    break
                if not self._under_way:
                    raise self._no_money(most)
                self._changed.wait()
            self._spent = Spent(self._spent.calls + 1, self._spent.usd)
            self._under_way += 1
            self._aside += most
            self._tell()

    def settle(self, most: float, cost: float) -> None:
        """The request for which `most` was set aside has cost `cost`."""
        with self._changed:
            self._under_way -= 1
            # A sum of differences would leave a trace of rounding behind.
            self._aside = max(self._aside - most, 0.0) if self._under_way else 0.0
            self._spent = Spent(self._spent.calls, self._spent.usd + cost)
            self._tell()
            self._changed.notify_all()

    def _tell(self) -> None:
        if self._keep is not None:
            self._keep(Spent(self._spent.calls, self._spent.usd + self._aside))

    def _fits(self, most: float) -> bool:
        if self._limit_usd is None:
            return True
        return self._spent.usd + self._aside + most <= self._limit_usd

    def _check_calls(self) -> None:
        if self._limit_calls is not None and self._spent.calls >= self._limit_calls:
            raise StoppedOnFinding(
                f"the judge's budget is spent: {self._spent.calls} calls were made, and "
                f"judge.budget_calls is {self._limit_calls}. Verdicts are kept; raise "
                "judge.budget_calls and send the same command again"
            )

    def _no_money(self, most: float) -> StoppedOnFinding:
        return StoppedOnFinding(
            f"the judge's budget is spent: {self._spent.calls} calls cost "
            f"${self._spent.usd:.4g}, the next may cost up to ${most:.4g}, and judge.budget_usd is "
            f"{self._limit_usd:g}. Verdicts are kept; raise judge.budget_usd and send the same "
            "command again"
        )
