"""The grader: every reward on every completion, one three-valued score each (DESIGN law 13).

Owns running all rewards at the same time, each where it belongs, and what a run has paid for them.
Refuses to own the share of one reward (`shares.py`), how verdicts combine (`combine.py`), the
metrics' names (`tally.py`), and what is done with a missing or unscorable sample: the learner's
side drops groups, quarantines rows and stops a run that fails too often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from surefoot.errors import StoppedOnFinding
from surefoot.records import Group, Score, StopReason
from surefoot.reward.cache import ScoreCache
from surefoot.reward.calls import FAILURES_IN_A_ROW
from surefoot.reward.combine import NONE_APPLIES, combine, put_back
from surefoot.reward.contract import sample_of
from surefoot.reward.resolve import FunctionPart, Part, Reward, resolve
from surefoot.reward.shares import Item, Share, Task, Told
from surefoot.reward.tally import Tally
from surefoot.reward.workers import Workers

if TYPE_CHECKING:
    from surefoot.reward.judge import Judges, JudgeSetup

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pending:
    """Groups that are being scored; `Grader.collect` gives them back."""

    groups: Sequence[Group]
    items: Sequence[Item]
    shares: Sequence[Share]
    tally: Tally
    began: float
    stop: threading.Event
    workers: Task[None] | None = None


class Grader:
    """Scores groups with the rewards of one run.

    `parts` are a recipe's reward entries, functions, or `FunctionPart`s; `functions` are added
    after them. Construction finds and checks every reward and, if one of them needs it, forks the
    process that later starts workers: build the grader before models, threads and GPUs. `base_dir`
    is the recipe's folder, beside which `path/file.py:function` is looked for first;
    `max_new_tokens` is the rollout's cap, for rewards that measure length against it; `allow` is
    the recipe's `run.allow`; `judge` is what judge rewards share.

    A function runs in a worker process: what it prints goes to stderr, its input is empty, and its
    globals are its worker's own. A deadline (`timeout`, wall-clock seconds) counts per sample for a
    native reward and per call for a batch reward. An exception, a death of the worker, NaN or a
    non-number from a native reward is tried again within the same deadline. A reward model runs in
    this process instead, without a deadline, and is loaded by the first call of `score`.

    All workers, all scorers that wait for a network, and what runs in this process work at the same
    time; the scores do not depend on who is done first.
    """

    def __init__(
        self,
        parts: Sequence[Part | FunctionPart | Callable[..., Any]],
        *,
        base_dir: Path | None = None,
        functions: Sequence[Callable[..., Any]] = (),
        max_new_tokens: int | None = None,
        allow: Collection[str] = (),
        judge: JudgeSetup | None = None,
    ) -> None:
        self.judges = None if judge is None else _open_judges(judge)
        """What the judge rewards share, and what they have cost."""
        self.rewards: tuple[Reward, ...] = resolve(
            [*parts, *functions],
            base_dir=base_dir,
            max_new_tokens=max_new_tokens,
            allow=allow,
            judges=self.judges,
        )
        served = [reward.served for reward in self.rewards if reward.served is not None]
        warm = dict.fromkeys(reward.warm for reward in self.rewards if reward.warm is not None)
        self._workers = Workers(served, warm=tuple(warm)) if served else None
        self._index = {
            reward.name: served.index(reward.served)
            for reward in self.rewards
            if reward.served is not None
        }
        kept = any(reward.identity is not None for reward in self.rewards)
        self._cache = ScoreCache() if kept else None
        self._tally: Tally | None = None
        self._told = Told()
        self._pending: list[Pending] = []
        self._streaks: dict[str, tuple[int, str]] = {}
        self._spent = 0.0
        self.interrupt: Callable[[], None] = lambda: None
        """Called while `collect` waits; raises to abandon what was submitted."""

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End and reap the worker processes; a second call does nothing."""
        for pending in list(self._pending):
            self._abandon(pending)
        if self._workers is not None:
            self._workers.close()
        if self._cache is not None:
            self._cache.close()
        if self.judges is not None:
            self.judges.close()

    @property
    def spent(self) -> float | None:
        """US dollars of all calls of this grader so far; None where no reward names a price."""
        known = any(reward.price is not None for reward in self.rewards)
        return self._spent if known else None

    def stop_if_broken(self) -> None:
        """StoppedOnFinding where a reward has failed so often in a row that it will not mend."""
        for name, (count, why) in self._streaks.items():
            if count >= FAILURES_IN_A_ROW:
                raise StoppedOnFinding(
                    f"reward {name}: {count} calls in a row failed, at first with: {why}. Their "
                    "scores are missing, and nothing was learned from them; mend the reward or "
                    "what it calls, and send the same command again"
                )

    def counts(self) -> dict[str, float]:
        """Metrics of the last `score` and the calls that it continued (see `Tally.counts`)."""
        if self._tally is None:
            return {}
        counts = self._tally.counts()
        for reward in self.rewards:
            if reward.watch is not None:
                counts |= reward.watch.metrics()
        return counts

    def score(
        self, groups: Sequence[Group], *, same_step: bool = False, counted: bool = True
    ) -> list[Group]:
        """The same groups in the same order, with one score per completion.

        A completion that the engine itself failed to give is missing without being graded, and not
        counted as a failure of the rewards. `same_step` adds to the metrics of the call before
        instead of starting new ones, for a step that samples in several rounds. What is not
        `counted` stays out of the metrics, but for its cost: completions that are scored, but
        never trained.
        """
        return self.collect(self.submit(groups, same_step=same_step, counted=counted))

    def submit(
        self, groups: Sequence[Group], *, same_step: bool = False, counted: bool = True
    ) -> Pending:
        """Begin to score groups while the caller goes on; `collect` waits for them.

        Workers and scorers that wait for a network begin at once. What runs in this process, such
        as rules and reward models, runs in `collect`. The workers take one submission after the
        other. The arguments are those of `score`.
        """
        began = time.monotonic()
        tally = Tally([reward.name for reward in self.rewards])
        if counted:
            if self._tally is not None and same_step:
                tally = self._tally
            else:
                self._begin()
            self._tally = tally
        items = [
            Item(sample_of(group.prompt, completion), group.prompt.id, completion.version)
            for group in groups
            for completion in group.completions
            if completion.stop is not StopReason.ERROR
        ]
        shares = [self._share(reward, items) for reward in self.rewards] if items else []
        pending = Pending(groups, items, shares, tally, began, threading.Event())
        for share in shares:
            share.begin()
        calls = [share.call for share in shares if share.call is not None]
        if calls:
            workers = self._workers
            assert workers is not None
            work = partial(workers.run, calls, stop=pending.stop)
            pending.workers = Task(work, name="reward workers")
        self._pending.append(pending)
        return pending

    def collect(self, pending: Pending) -> list[Group]:
        """The groups that were submitted, with one score per completion; once for each."""
        assert pending in self._pending, "collected already, or of another grader"
        try:
            for share in pending.shares:
                share.work_here()
            if pending.workers is not None:
                pending.workers.wait(self.interrupt)
            for share in pending.shares:
                share.wait(self.interrupt)
        except BaseException:
            self._abandon(pending)
            raise
        self._pending.remove(pending)
        self._pay(pending)
        verdicts = {share.reward.name: share.finish(pending.tally) for share in pending.shares}
        for share in pending.shares:
            self._streaks[share.reward.name] = (share.streak, share.first_failure)
        graded = [
            combine(self.rewards, {name: parts[i] for name, parts in verdicts.items()})
            for i in range(len(pending.items))
        ]
        self._tell_none_applies(pending.items, graded)
        pending.tally.add_scores(graded, seconds=time.monotonic() - pending.began)
        return put_back(pending.groups, graded)

    def _share(self, reward: Reward, items: Sequence[Item]) -> Share:
        streak, _ = self._streaks.get(reward.name, (0, ""))
        return Share(
            reward,
            items,
            function=self._index.get(reward.name),
            cache=self._cache,
            streak=streak,
            told=self._told,
        )

    def _abandon(self, pending: Pending) -> None:
        """End what can be ended of it; its workers are free, or killed, afterwards."""
        self._pending.remove(pending)
        pending.stop.set()
        if pending.workers is not None:
            assert self._workers is not None
            self._workers.wake()
            pending.workers.end()
        self._pay(pending)

    def _pay(self, pending: Pending) -> None:
        # What is scored and not counted is paid for in the same step.
        tally = pending.tally if self._tally is None else self._tally
        self._spent += sum(share.pay(tally) for share in pending.shares)

    def _begin(self) -> None:
        for reward in self.rewards:
            if reward.watch is not None:
                reward.watch.begin()

    def _tell_none_applies(self, items: Sequence[Item], graded: Sequence[Score]) -> None:
        rows = [
            item.prompt_id
            for item, score in zip(items, graded, strict=True)
            if score.detail == NONE_APPLIES
        ]
        if rows and self._told.first("", NONE_APPLIES):
            log.warning(
                "%d of %d completions have no score, because every reward returned None for them "
                "(first: row %s); give such rows a reward, or leave them out",
                len(rows),
                len(items),
                rows[0],
            )


def _open_judges(setup: JudgeSetup) -> Judges:
    # Not at the top of the file: most runs have no judge, and its schema needs pydantic.
    from surefoot.reward.judge import Judges

    return Judges(setup)
