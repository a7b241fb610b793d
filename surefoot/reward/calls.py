"""One function and the payloads that it is to answer: what is known of each, and what is due next.

Owns attempts, the pauses between them, deadlines of payloads, and when the rest is given up.
Refuses to own processes (`workers.py`), and what a payload or a reply means.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

WIDTH = 4  # workers of one function
DEADLINES_IN_A_ROW = 3 * WIDTH  # without one good reply between; then the rest is given up
FAILURES_IN_A_ROW = 64  # of any kind, over calls; then the rest is given up
BACKOFF_SECONDS = 0.05  # before the first retry, doubled before each further one


class Failure(StrEnum):
    """Why a payload has no reply."""

    EXCEPTION = "exception"
    DEADLINE = "deadline"
    DIED = "died"
    BREAKER = "breaker"
    LIMIT = "limit"  # of CPU time, which the function set itself
    START = "start"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reply, or why there is none; `place` tells distinct errors apart, `trace` is for people.

    `seconds` are those from its first attempt on, pauses included; None where there was none.
    """

    value: Any = None
    failure: Failure | None = None
    detail: str = ""
    place: str = ""
    trace: str = ""
    seconds: float | None = None


def pause_before(function: int, item: int, attempt: int) -> float:
    """Seconds before attempt 2, 3, ...: doubling, times 0.5 to 1.5, the same for the same item."""
    jitter = random.Random(f"{function}/{item}/{attempt}").random()
    return BACKOFF_SECONDS * 2.0 ** (attempt - 2) * (0.5 + jitter)


@dataclass(slots=True)
class Call:
    """`payloads` (encoded JSON) for a function, each with `timeout` seconds from its first attempt.

    Exceptions, deaths and replies for which `again` holds are tried again, up to `retries` times
    within the same deadline. With `recycle` workers are replaced after that many payloads.
    `streak` is the number of failures in a row, of calls before this one included. `heard` is told
    each good reply at once, by the payload's index.
    """

    function: int
    payloads: Sequence[bytes]
    timeout: float
    again: Callable[[Any], bool]
    retries: int = 1
    recycle: int | None = None
    streak: int = 0
    heard: Callable[[int, Any], None] | None = None
    width: int = 1
    given: int = 0
    """Payloads handed to a worker, retries included."""
    retried: int = 0
    deadlines: int = 0
    """Payloads whose worker was killed at their deadline."""
    first_failure: str = ""
    failed_starts: int = 0
    progress: float = field(default_factory=time.monotonic)
    """When something was last heard of a payload."""
    left: int = field(init=False)
    queue: deque[int] = field(init=False)
    until: dict[int, float] = field(init=False, default_factory=dict)
    _outcomes: list[Outcome | None] = field(init=False)
    _attempts: list[int] = field(init=False)
    _waiting: list[tuple[float, int]] = field(init=False, default_factory=list)
    _hung: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        count = len(self.payloads)
        self.left = count
        self.queue = deque(range(count))
        self._outcomes = [None] * count
        self._attempts = [0] * count

    @property
    def outcomes(self) -> list[Outcome]:
        """One for each payload, in order, once none is left."""
        assert self.left == 0
        return [outcome for outcome in self._outcomes if outcome is not None]

    def release(self, now: float) -> None:
        """Put payloads whose pause is over at the front of the queue."""
        while self._waiting and self._waiting[0][0] <= now:
            self.queue.appendleft(heapq.heappop(self._waiting)[1])

    def next_release(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def give(self) -> tuple[int, bytes, float]:
        """The next payload: its index, its bytes, and until when it must be answered."""
        item = self.queue.popleft()
        self._attempts[item] += 1
        self.given += 1
        self.retried += self._attempts[item] > 1
        until = self.until.setdefault(item, time.monotonic() + self.timeout)
        return item, self.payloads[item], until

    def settle(self, item: int, outcome: Outcome) -> None:
        """Keep the outcome, or let the payload wait for another attempt within its deadline."""
        now = self.progress = time.monotonic()
        bad = outcome.failure is not None or self.again(outcome.value)
        last = outcome.failure in (Failure.DEADLINE, Failure.LIMIT)
        if bad and not last and self._attempts[item] <= self.retries:
            due = now + pause_before(self.function, item, self._attempts[item] + 1)
            if due < self.until[item]:
                heapq.heappush(self._waiting, (due, item))
                return
        began = self.until[item] - self.timeout
        self._outcomes[item] = replace(outcome, seconds=now - began)
        self.left -= 1
        self._count(outcome, bad=bad)
        if self.heard is not None and not bad:
            self.heard(item, outcome.value)

    def _count(self, outcome: Outcome, *, bad: bool) -> None:
        if outcome.failure is Failure.DEADLINE:
            self.deadlines += 1
            self._hung += 1
        elif not bad:
            self._hung = 0
        if bad and outcome.failure is not Failure.LIMIT:
            self.streak += 1
            self.first_failure = self.first_failure or outcome.detail or str(outcome.value)
        else:
            self.streak, self.first_failure = 0, ""

    def give_up_if_hopeless(self) -> None:
        """Leave the rest unanswered where nothing good has been heard for too long."""
        if not self.left:
            return
        if self._hung >= DEADLINES_IN_A_ROW:
            detail = f"given up after {self._hung} deadlines of {self.timeout:g} s in a row"
        elif self.streak >= FAILURES_IN_A_ROW:
            detail = f"given up after {self.streak} failures in a row"
        else:
            return
        self.give_up(Outcome(failure=Failure.BREAKER, detail=detail))

    def give_up(self, outcome: Outcome) -> None:
        self.queue.clear()
        self._waiting.clear()
        if outcome.failure is Failure.START:
            self.streak += self.left
            self.first_failure = self.first_failure or outcome.detail
        self.left = 0
        self._outcomes = [outcome if known is None else known for known in self._outcomes]
