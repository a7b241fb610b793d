"""The grader: every reward on every completion, one three-valued score each (DESIGN law 13).

Owns the order of the rewards, how their verdicts combine, and telling each distinct failure once in
the log.
Refuses to own the metrics (`tally.py`), and what is done with a missing or unscorable sample: the
learner's side drops groups, quarantines rows and stops a run that fails too often.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.records import Group, Score, ScoreStatus, StopReason
from surefoot.reward.batch import encode_batch, read_reply
from surefoot.reward.contract import (
    PartScore,
    RewardSample,
    check_columns,
    encode_sample,
    failed,
    sample_of,
    within,
)
from surefoot.reward.resolve import FunctionPart, Part, Reward, resolve
from surefoot.reward.tally import Tally
from surefoot.reward.workers import Failure, Outcome, Workers

log = logging.getLogger(__name__)
NONE_APPLIES = "no part applies"


@dataclass(frozen=True, slots=True)
class _Item:
    """One completion to be scored, and where its row came from."""

    sample: RewardSample
    prompt_id: str
    version: int


class Grader:
    """Scores groups with the rewards of one run.

    `parts` are a recipe's reward entries, functions, or `FunctionPart`s; `functions` are added
    after them. Construction finds and checks every reward and, if one of them needs it, forks the
    process that later starts workers: build the grader before models, threads and GPUs. `base_dir`
    is the recipe's folder, beside which `path/file.py:function` is looked for first;
    `max_new_tokens` is the rollout's cap, for rewards that measure length against it; `allow` is
    the recipe's `run.allow`.

    A function runs in a worker process: what it prints goes to stderr, its input is empty, and its
    globals are its worker's own. A deadline (`timeout`, wall-clock seconds) counts per sample for a
    native reward and per call for a batch reward. An exception, a death of the worker, NaN or a
    non-number from a native reward is tried once more within the same deadline. A reward model runs
    in this process instead, without a deadline, and is loaded by the first call of `score`.
    """

    def __init__(
        self,
        parts: Sequence[Part | FunctionPart | Callable[..., Any]],
        *,
        base_dir: Path | None = None,
        functions: Sequence[Callable[..., Any]] = (),
        max_new_tokens: int | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self.rewards: tuple[Reward, ...] = resolve(
            [*parts, *functions], base_dir=base_dir, max_new_tokens=max_new_tokens, allow=allow
        )
        served = [reward.served for reward in self.rewards if reward.served is not None]
        warm = dict.fromkeys(reward.warm for reward in self.rewards if reward.warm is not None)
        self._workers = Workers(served, warm=tuple(warm)) if served else None
        self._index = {
            reward.name: served.index(reward.served)
            for reward in self.rewards
            if reward.served is not None
        }
        self._tally: Tally | None = None
        self._told: set[tuple[str, str]] = set()

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
        if self._workers is not None:
            self._workers.close()

    def counts(self) -> dict[str, float]:
        """Metrics of the last `score` and the calls that it continued (see `Tally.counts`)."""
        return {} if self._tally is None else self._tally.counts()

    def score(
        self, groups: Sequence[Group], *, same_step: bool = False, counted: bool = True
    ) -> list[Group]:
        """The same groups in the same order, with one score per completion.

        A completion that the engine itself failed to give is missing without being graded, and not
        counted as a failure of the rewards. `same_step` adds to the metrics of the call before
        instead of starting new ones, for a step that samples in several rounds. What is not
        `counted` stays out of the metrics: completions that are scored, but never trained.
        """
        began = time.monotonic()
        tally = Tally([reward.name for reward in self.rewards])
        if counted:
            if self._tally is not None and same_step:
                tally = self._tally
            self._tally = tally
        items = [
            _Item(sample_of(group.prompt, completion), group.prompt.id, completion.version)
            for group in groups
            for completion in group.completions
            if completion.stop is not StopReason.ERROR
        ]
        verdicts: dict[str, list[PartScore]] = {}
        for reward in self.rewards:
            start = time.monotonic()
            verdicts[reward.name] = self._verdicts(reward, items, tally) if items else []
            tally.add(reward.name, verdicts[reward.name], seconds=time.monotonic() - start)
        graded = [
            combine(self.rewards, {name: parts[i] for name, parts in verdicts.items()})
            for i in range(len(items))
        ]
        self._tell_none_applies(items, graded)
        tally.add_scores(graded, seconds=time.monotonic() - began)
        return _put_back(groups, graded)

    def _tell_none_applies(self, items: Sequence[_Item], graded: Sequence[Score]) -> None:
        rows = [
            item.prompt_id
            for item, score in zip(items, graded, strict=True)
            if score.detail == NONE_APPLIES
        ]
        if rows and ("", NONE_APPLIES) not in self._told:
            self._told.add(("", NONE_APPLIES))
            log.warning(
                "%d of %d completions have no score, because every reward returned None for them "
                "(first: row %s); give such rows a reward, or leave them out",
                len(rows),
                len(items),
                rows[0],
            )

    def _verdicts(self, reward: Reward, items: Sequence[_Item], tally: Tally) -> list[PartScore]:
        if reward.rule is not None:
            verdicts = [reward.rule(item.sample) for item in items]
        elif reward.scorer is not None:
            verdicts = [
                self._named(reward, verdict, i)
                for i, verdict in enumerate(reward.scorer([item.sample for item in items]))
            ]
        elif reward.batched:
            verdicts = self._batch(reward, items, tally)
        else:
            verdicts = self._natives(reward, items, tally)
        return self._inside(reward, verdicts, items)

    def _inside(
        self, reward: Reward, verdicts: Sequence[PartScore], items: Sequence[_Item]
    ) -> list[PartScore]:
        """The verdicts, with a failure for steps that end beyond their text."""
        judged = []
        for i, (verdict, item) in enumerate(zip(verdicts, items, strict=True)):
            inside = within(verdict, item.sample.text)
            judged.append(verdict if inside is verdict else self._named(reward, inside, i))
        return judged

    def _natives(self, reward: Reward, items: Sequence[_Item], tally: Tally) -> list[PartScore]:
        outcomes = self._run(
            reward,
            [encode_sample(item.sample, item.prompt_id) for item in items],
            again=lambda reply: reply["status"] == ScoreStatus.INFRA_ERROR,
        )
        verdicts = []
        for i, outcome in enumerate(outcomes):
            if outcome.failure is None:
                verdict = PartScore.from_json(outcome.value)
            elif outcome.failure is Failure.LIMIT and reward.at_limit is not None:
                verdict = reward.at_limit(items[i].sample)
                tally.limits += 1
            else:
                verdict = self._failure(reward, outcome)
                tally.breaker += outcome.failure is Failure.BREAKER
            verdicts.append(self._named(reward, verdict, i))
        return verdicts

    def _batch(self, reward: Reward, items: Sequence[_Item], tally: Tally) -> list[PartScore]:
        for item in items:
            check_columns(item.sample.columns, item.prompt_id)
        payload = encode_batch([item.sample for item in items], step=items[0].version)
        (outcome,) = self._run(reward, [payload], again=lambda reply: False)
        if outcome.failure is not None:
            verdict = self._failure(reward, outcome)
            return [self._named(reward, verdict, None)] * len(items)
        tally.logged |= {k: v for k, v in outcome.value["metrics"].items() if math.isfinite(v)}
        if "wrong" in outcome.value:
            (verdict,) = read_reply(outcome.value, 1)
            return [self._named(reward, verdict, None)] * len(items)
        verdicts = read_reply(outcome.value, len(items))
        return [self._named(reward, verdict, i) for i, verdict in enumerate(verdicts)]

    def _run(
        self, reward: Reward, payloads: Sequence[bytes], *, again: Callable[[Any], bool]
    ) -> list[Outcome]:
        assert self._workers is not None
        return self._workers.run(
            self._index[reward.name],
            payloads,
            timeout=reward.timeout,
            again=again,
            recycle=reward.recycle,
        )

    def _failure(self, reward: Reward, outcome: Outcome) -> PartScore:
        assert outcome.failure is not None
        if outcome.failure is Failure.EXCEPTION:
            self._tell(reward, outcome.place, f"raised {outcome.detail}\n{outcome.trace}")
            return failed(f"raised {outcome.detail}")
        return failed(outcome.detail)

    def _named(self, reward: Reward, verdict: PartScore, index: int | None) -> PartScore:
        """The verdict with the reward, and the sample's index, in its detail; failures are told."""
        if verdict.status is ScoreStatus.SCORED:
            return verdict
        where = "the whole call" if index is None else f"sample {index}"
        if verdict.status is ScoreStatus.INFRA_ERROR and not verdict.detail.startswith("raised "):
            self._tell(reward, verdict.detail, f"{verdict.detail} (first for {where})")
        return PartScore(verdict.status, None, f"{reward.name}, {where}: {verdict.detail}")

    def _tell(self, reward: Reward, key: str, message: str) -> None:
        if (reward.name, key) not in self._told:
            self._told.add((reward.name, key))
            log.error("reward %s: %s", reward.name, message)


def combine(rewards: Sequence[Reward], verdicts: dict[str, PartScore]) -> Score:
    """One sample's score: the weighted sum over the rewards that apply to it.

    A reward whose grader failed makes the sample missing, and one whose row is at fault makes it
    unscorable; where no reward applies the sample is missing. `parts` keeps the values unweighted.
    """
    parts = {name: verdict.value for name, verdict in verdicts.items()}
    for status in (ScoreStatus.INFRA_ERROR, ScoreStatus.UNSCORABLE):
        details = [v.detail for v in verdicts.values() if v.status is status]
        if details:
            return Score(status, None, parts, "; ".join(details))
    weighted = [
        reward.weight * value for reward in rewards if (value := parts[reward.name]) is not None
    ]
    if not weighted:
        return Score(ScoreStatus.INFRA_ERROR, None, parts, NONE_APPLIES)
    total = sum(weighted)
    steps = _weighted_steps(rewards, verdicts)
    if not math.isfinite(total) or not all(math.isfinite(value) for _, value in steps):
        detail = f"the weighted sum of {parts}, or a step in it, is not finite"
        return Score(ScoreStatus.INFRA_ERROR, None, parts, detail)
    details = [f"{name}: {v.detail}" for name, v in verdicts.items() if v.detail]
    return Score(ScoreStatus.SCORED, total, parts, "; ".join(details), steps)


def _weighted_steps(
    rewards: Sequence[Reward], verdicts: dict[str, PartScore]
) -> tuple[tuple[int, float], ...]:
    """Of all rewards by ascending end, in the order of the rewards where two have the same."""
    steps = [
        (end, reward.weight * value)
        for reward in rewards
        if reward.weight != 0
        for end, value in verdicts[reward.name].steps
    ]
    return tuple(sorted(steps, key=lambda step: step[0]))


def _put_back(groups: Sequence[Group], graded: Sequence[Score]) -> list[Group]:
    """Scores into their groups, in order; completions that the engine failed get a missing one."""
    left = iter(graded)
    scored = []
    for group in groups:
        scores = tuple(
            Score(ScoreStatus.INFRA_ERROR, detail=f"the engine failed: {completion.detail}")
            if completion.stop is StopReason.ERROR
            else next(left)
            for completion in group.completions
        )
        scored.append(group.scored(scores))
    return scored
