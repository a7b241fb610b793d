"""One reward's share of a call of the grader: what it is asked, and the verdicts that come of it.

Owns the payloads of a reward, reading its outcomes, the names in its failures (each distinct one is
told once in the log), and what it adds to the metrics.
Refuses to own when it runs (`grader.py`), attempts and deadlines (`calls.py`), and combining.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from surefoot.records import ScoreStatus
from surefoot.reward.batch import encode_batch, read_reply
from surefoot.reward.cache import ScoreCache
from surefoot.reward.calls import Call, Failure, Outcome
from surefoot.reward.contract import (
    PartScore,
    RewardSample,
    check_columns,
    encode_sample,
    failed,
    within,
)
from surefoot.reward.paid import ask
from surefoot.reward.resolve import Reward
from surefoot.reward.tally import Tally

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL = 0.05
"""Seconds between two looks at whether the run is to stop."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion to be scored, and where its row came from."""

    sample: RewardSample
    prompt_id: str
    version: int


class Task(Generic[Result]):
    """Work in a thread of its own, begun at once; `wait` gives its result or raises its error."""

    def __init__(self, work: Callable[[], Result], *, name: str) -> None:
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.seconds = 0.0
        threading.Thread(target=self._go, args=(work,), name=name, daemon=True).start()

    def _go(self, work: Callable[[], Result]) -> None:
        began = time.monotonic()
        try:
            self._results.append(work())
        except BaseException as error:
            self._error = error
        finally:
            self.seconds = time.monotonic() - began
            self._done.set()

    def end(self) -> None:
        """Wait for it, whatever comes of it."""
        self._done.wait()

    def wait(self, interrupt: Callable[[], None]) -> Result:
        """`interrupt` is called now and then meanwhile, and may raise."""
        while not self._done.wait(_POLL):
            interrupt()
        if self._error is not None:
            raise self._error
        return self._results[0]


class Told:
    """The failures that the log has heard of, over all calls of a grader."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def first(self, name: str, key: str) -> bool:
        """Whether this is news; it is none from now on."""
        if (name, key) in self._told:
            return False
        self._told.add((name, key))
        return True

    def failure(self, reward: Reward, outcome: Outcome) -> PartScore:
        """The verdict on what has no reply."""
        if outcome.failure is not Failure.EXCEPTION:
            return failed(outcome.detail)
        if self.first(reward.name, outcome.place):
            log.error("reward %s: raised %s\n%s", reward.name, outcome.detail, outcome.trace)
        return failed(f"raised {outcome.detail}")

    def named(self, reward: Reward, verdict: PartScore, index: int | None) -> PartScore:
        """The verdict with the reward, and the sample's index, in its detail; failures are told."""
        if verdict.status is ScoreStatus.SCORED:
            return verdict
        where = "the whole call" if index is None else f"sample {index}"
        detail = verdict.detail
        told = verdict.status is not ScoreStatus.INFRA_ERROR or detail.startswith("raised ")
        if not told and self.first(reward.name, detail):
            log.error("reward %s: %s (first for %s)", reward.name, detail, where)
        return PartScore(verdict.status, None, f"{reward.name}, {where}: {detail}")


class Share:
    """What one reward does in one call of the grader.

    `function` is its number among the workers' functions, None where it runs in this process;
    `streak` its failed calls in a row until now.
    """

    def __init__(
        self,
        reward: Reward,
        items: Sequence[Item],
        *,
        function: int | None,
        cache: ScoreCache | None,
        streak: int,
        told: Told,
    ) -> None:
        self.reward = reward
        self.streak = streak
        self.first_failure = ""
        self.call: Call | None = None
        self._items = items
        self._told = told
        self._task: Task[list[PartScore]] | None = None
        self._found: list[PartScore] = []
        self._seconds = 0.0
        self._ran = 0
        self._began = time.monotonic()
        if function is not None:
            payloads = self._payloads()
            self._asked = ask(payloads, cache=cache, identity=reward.identity)
            self.call = Call(
                function=function,
                payloads=[payloads[index] for index in self._asked.indices],
                timeout=reward.timeout,
                again=_never if reward.batched else _is_failure,
                retries=reward.retries,
                recycle=reward.recycle,
                streak=streak,
                heard=None if reward.identity is None else self._keep,
            )

    @property
    def calls(self) -> int:
        """Calls that a price is paid for."""
        return self._ran if self.call is None else self.call.given

    def _payloads(self) -> list[bytes]:
        if not self.reward.batched:
            return [encode_sample(item.sample, item.prompt_id) for item in self._items]
        for item in self._items:
            check_columns(item.sample.columns, item.prompt_id)
        samples = [item.sample for item in self._items]
        return [encode_batch(samples, step=self._items[0].version)]

    def begin(self) -> None:
        """Start what runs in a thread of its own."""
        if self.call is None and self.reward.concurrent:
            self._task = Task(self._scored_here, name=f"reward {self.reward.name}")

    def work_here(self) -> None:
        """Do what belongs into this thread, if anything does."""
        if self.call is None and self._task is None:
            began = time.monotonic()
            self._found = self._scored_here()
            self._seconds = time.monotonic() - began

    def _scored_here(self) -> list[PartScore]:
        reward = self.reward
        self._ran = len(self._items)
        if reward.rule is not None:
            return [reward.rule(item.sample) for item in self._items]
        assert reward.scorer is not None, reward.name
        return reward.scorer([item.sample for item in self._items])

    def wait(self, interrupt: Callable[[], None]) -> None:
        """Until a scorer that runs in a thread of its own is done."""
        if self._task is not None:
            self._found = self._task.wait(interrupt)
            self._seconds = self._task.seconds

    def finish(self, tally: Tally) -> list[PartScore]:
        """One verdict for each item, once everything has run; the metrics go into `tally`."""
        name = self.reward.name
        if self.call is None:
            verdicts = [self._told.named(self.reward, v, i) for i, v in enumerate(self._found)]
            verdicts = [self._inside(v, i) for i, v in enumerate(verdicts)]
            if self.reward.scorer is not None:
                self._count_streak(verdicts)
        else:
            self._seconds = max(0.0, self.call.progress - self._began)
            verdicts = self._of_workers(self.call, tally)
            tally.add_latencies(name, [o.seconds for o in self.call.outcomes if o.seconds])
            tally.count(f"rewards/{name}/retries", self.call.retried)
            tally.count(f"rewards/{name}/deadlines", self.call.deadlines)
            self.streak, self.first_failure = self.call.streak, self.call.first_failure
        if self.reward.tampered is not None:
            forged = sum(self.reward.tampered(verdict.detail) for verdict in verdicts)
            tally.count(f"rewards/{name}/tamper", forged)
        tally.add(name, verdicts, seconds=self._seconds)
        return verdicts

    def pay(self, tally: Tally) -> float:
        """US dollars that this share has cost; they are counted even where it was abandoned."""
        if self.reward.price is None:
            return 0.0
        cost = self.reward.price * self.calls
        tally.count(f"cost/rewards/{self.reward.name}", cost)
        if self.reward.identity is not None:
            tally.count(f"rewards/{self.reward.name}/cached", self._asked.spared)
        return cost

    def _keep(self, item: int, reply: Any) -> None:
        """Keep a paid verdict as soon as it is there: the step may not come to its end."""
        if self.reward.batched and "wrong" in reply:
            return
        index = self._asked.indices[item]
        items = self._items if self.reward.batched else [self._items[index]]
        told = reply["parts"] if self.reward.batched else [reply]
        parts = [PartScore.from_json(part) for part in told]
        texts = [item.sample.text for item in items]
        self._asked.keep(index, [within(p, t) for p, t in zip(parts, texts, strict=True)])

    def _count_streak(self, verdicts: Sequence[PartScore]) -> None:
        for verdict in verdicts:
            if verdict.status is ScoreStatus.INFRA_ERROR:
                self.streak += 1
                # What follows the first is often no more than having been given up.
                self.first_failure = self.first_failure or verdict.detail
            else:
                self.streak, self.first_failure = 0, ""

    def _inside(self, verdict: PartScore, index: int) -> PartScore:
        """The verdict, or a failure where its steps end beyond the text."""
        inside = within(verdict, self._items[index].sample.text)
        return verdict if inside is verdict else self._told.named(self.reward, inside, index)

    def _of_workers(self, call: Call, tally: Tally) -> list[PartScore]:
        sent = zip(self._asked.indices, call.outcomes, strict=True)
        if self.reward.batched:
            told = {index: self._batch(outcome, tally) for index, outcome in sent}
        else:
            told = {index: [self._native(index, outcome, tally)] for index, outcome in sent}
        return [verdict for verdicts in self._asked.all(told) for verdict in verdicts]

    def _native(self, index: int, outcome: Outcome, tally: Tally) -> PartScore:
        at_limit = self.reward.at_limit
        if outcome.failure is None:
            verdict = PartScore.from_json(outcome.value)
        elif outcome.failure is Failure.LIMIT and at_limit is not None:
            verdict = at_limit(self._items[index].sample)
            tally.limits += 1
        else:
            verdict = self._told.failure(self.reward, outcome)
            tally.breaker += outcome.failure is Failure.BREAKER
        return self._inside(self._told.named(self.reward, verdict, index), index)

    def _batch(self, outcome: Outcome, tally: Tally) -> list[PartScore]:
        size = len(self._items)
        if outcome.failure is not None:
            verdict = self._told.failure(self.reward, outcome)
            return [self._told.named(self.reward, verdict, None)] * size
        tally.logged |= {k: v for k, v in outcome.value["metrics"].items() if math.isfinite(v)}
        if "wrong" in outcome.value:
            (verdict,) = read_reply(outcome.value, 1)
            return [self._told.named(self.reward, verdict, None)] * size
        verdicts = read_reply(outcome.value, size)
        named = [self._told.named(self.reward, v, i) for i, v in enumerate(verdicts)]
        return [self._inside(v, i) for i, v in enumerate(named)]


def _is_failure(reply: Any) -> bool:
    return bool(reply["status"] == ScoreStatus.INFRA_ERROR)


def _never(reply: Any) -> bool:
    return False
