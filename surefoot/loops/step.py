"""One step of the online loop as data: sample, score, keep, assign, update.

Owns the order inside a step, and what it adds to the run's memory.
Refuses to own what each line does, and when to evaluate, save and stop (`stepping`, `online`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from surefoot.errors import NotSaved, StoppedOnFinding
from surefoot.learner.batch import Batch, Plan, make_batch
from surefoot.learner.update import Facts, Learner, UpdateReport
from surefoot.loops import metrics as names
from surefoot.loops.assemble import Parts
from surefoot.loops.control import adapts, next_coef, with_coef
from surefoot.loops.credit import Credit, assign, kl_in_reward, needs_facts
from surefoot.loops.critics import make_critic
from surefoot.loops.desk import Desk
from surefoot.loops.health import critic_metrics
from surefoot.loops.history import HistoryBook, Rewards
from surefoot.loops.keep import Gathered, gather, solved_counts, unscorable_reason
from surefoot.loops.places import place_steps
from surefoot.loops.signals import Stopper
from surefoot.loops.standing import Standing, check_rewards, cut_off, stand
from surefoot.loops.state import Progress
from surefoot.loops.warmup import active, on_returns, still_warming, warm
from surefoot.methods import Gae, History, Method, MethodWarmup
from surefoot.models.memory import out_of_memory, too_small

NONFINITE_LIMIT = 3
"""Optimizer steps in a row that may be refused before the run stops."""


@dataclass(frozen=True)
class Taken:
    """A step, done but not yet written down."""

    gathered: Gathered
    standing: Standing | None
    credit: Credit | None
    row: names.Metrics


class Stepper:
    """Takes the steps of a run; `progress` is the run's memory, changed as a step succeeds."""

    def __init__(
        self,
        parts: Parts,
        learner: Learner,
        desk: Desk,
        stopper: Stopper,
        *,
        history: Mapping[str, Any],
    ) -> None:
        """`history` is the saved state of a history baseline; empty at the start."""
        self.parts = parts
        self.learner = learner
        self.desk = desk
        self.stopper = stopper
        learner.interrupt = stopper.check
        self.row = parts.row
        """The row with the KL coefficient of the current step."""
        self.weights = {part.name: part.weight for part in parts.grader.rewards}
        self.book = self.plain = None
        if isinstance(parts.row.baseline, History):
            self.book = _book(parts.row.baseline, history.get("rewards"))
            if kl_in_reward(parts.row):
                self.plain = _book(parts.row.baseline, history.get("plain"))
        self._told_dropped = False

    def history(self) -> dict[str, Any]:
        """The state of the history baseline, as JSON."""
        books = {"rewards": self.book, "plain": self.plain}
        return {name: book.to_state() for name, book in books.items() if book is not None}

    def _row(self, progress: Progress) -> Method:
        """The row that trains now, with the KL coefficient that holds now."""
        row = active(self.parts.row, progress)
        return with_coef(row, progress.kl_coef) if row is self.parts.row else row

    def take(self, step: int, progress: Progress) -> Taken:
        """One step as data. Interruptions may come until a weight changes, not later."""
        parts = self.parts
        row = self.row = self.learner.row = self._row(progress)
        began = time.perf_counter()
        parts.engine.load(parts.loaded.model, version=step - 1)
        synced = time.perf_counter()
        quarantined = set(progress.quarantined)
        gathered = gather(
            row,
            step=step,
            stream=parts.data.stream,
            engine=parts.engine,
            version=step - 1,
            grader=parts.grader,
            prompts=parts.recipe.rollout.prompts_per_step,
            quarantined=quarantined,
            interrupt=self.stopper.check,
        )
        self.hear_engine()
        progress.stale = progress.stale + 1 if gathered.stale else 0
        out = names.rollout_metrics(gathered, prompts=parts.recipe.rollout.prompts_per_step)
        out.update(names.part_metrics(parts.grader.counts()))
        out["time/sync"] = synced - began
        out["time/rollout"] = gathered.rollout_seconds
        out["time/reward"] = gathered.reward_seconds
        self._quarantine(gathered, quarantined, progress)
        progress.tokens += gathered.tokens + sum(len(g.prompt.ids) for g in gathered.seen)
        out["num_tokens"] = progress.tokens
        out["epoch"] = parts.data.stream.epoch
        if any(source.keep_solve_rate is not None for source in parts.recipe.data):
            out["prompts/passed_over"] = parts.data.stream.passed_over
            out["prompts/refills"] = parts.data.stream.refills
        out["learning_rate"] = self.learner.optimizer.rate(step)
        if gathered.groups:
            batch = make_batch(gathered.groups)
            limit = parts.recipe.rollout.max_new_tokens
            standing = stand(
                row,
                batch,
                max_new_tokens=limit,
                weights=self.weights,
                steps=place_steps(batch, parts.loaded.template.tokenizer),
            )
            check_rewards(row, batch, standing)
            credit = self._learn(step, batch, standing, progress, out)
            taken = Taken(gathered, standing, credit, out)
        else:
            _count_signal(progress, out, found=False)
            taken = Taken(gathered, None, None, out)
        parts.data.stream.observe(solved_counts(gathered.seen, part=parts.grader.rewards[0].name))
        return taken

    def hear_engine(self) -> None:
        """Write down what the engine overcame."""
        for told in self.parts.engine.troubles():
            self.desk.tell("engine", told)

    def _learn(
        self, step: int, batch: Batch, standing: Standing, progress: Progress, out: names.Metrics
    ) -> Credit:
        """Score, assign and update; after running out of memory, again in smaller pieces."""
        warming = still_warming(self.row, progress)
        budget = self.learner.packing.budget
        self.learner.touched = False
        while True:
            try:
                facts, credit, report = self._score_and_update(
                    step, batch, standing, out, warming=warming
                )
                break
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._smaller(step, error)
        if self.learner.packing.budget < budget:
            self.desk.ledger.event(
                "out_of_memory",
                f"step {step}: redone with {self.learner.packing.budget} tokens per micro-batch",
            )
        self._remember(step, batch, standing, credit)
        out.update(names.credit_metrics(standing, credit))
        out.update(names.update_metrics(batch, standing, facts, report, self.row))
        if facts.value_BT is not None:
            seed = self.parts.recipe.run.seed
            out.update(critic_metrics(batch, standing, credit, facts, report, seed=seed, step=step))
        warmup = self.parts.row.warmup
        if step == 1 + (progress.warmed if isinstance(warmup, MethodWarmup) else 0):
            self._warn_of_short_ones(batch, standing)
        if warmup.kind != "none" and not progress.warm:
            self._warm_up(progress, out)
        if adapts(self.row):
            out["kl/coef"] = self.row.kl.coef
            progress.kl_coef = next_coef(self.row, batch, standing, facts, report)
        _count_signal(progress, out, found=credit.signal_found)
        self._count_nonfinite(step, batch, report, progress)
        return credit

    def _smaller(self, step: int, error: BaseException) -> None:
        """Go on in smaller pieces, or stop."""
        learner = self.learner
        learner.clear()
        if learner.touched:
            raise NotSaved(
                f"step {step}: {too_small(learner.packing.budget)}. Some weights of this step have "
                "changed and others not, so it is not saved; the newest checkpoint is resumed from"
            ) from error
        if not learner.halve():
            raise StoppedOnFinding(too_small(learner.packing.budget)) from error

    def _warm_up(self, progress: Progress, out: names.Metrics) -> None:
        """Count a step of the warm-up; after one with another row the policy gets its critic."""
        row = self.parts.row
        out["warmup_steps"] = progress.warmed + 1
        told = warm(row, progress, out.get("critic/explained_variance"))
        if told is None:
            return
        self.desk.tell("warmup", told)
        if self.learner.critic is None:
            self.learner.critic = make_critic(
                self.parts.recipe, row, self.parts.loaded, self.learner.scorer
            )

    def _score_and_update(
        self, step: int, batch: Batch, standing: Standing, out: names.Metrics, *, warming: bool
    ) -> tuple[Facts, Credit, UpdateReport]:
        row, learner = self.row, self.learner
        if warming:
            row = on_returns(row)
        began = time.perf_counter()
        early = needs_facts(row)
        facts = Facts()
        if early:
            # KL in the reward or values: the advantages need every present completion scored first.
            plan = learner.plan(batch, standing.present_PG.reshape(-1), step=step)
            facts = self._facts(batch, plan, charged=kl_in_reward(row))
            if isinstance(row.credit, Gae) and row.credit.bootstrap_truncated:
                cut_B = cut_off(batch) & standing.present_PG.reshape(-1)
                facts = replace(facts, bootstrap_B=learner.bootstrap(batch, cut_B))
            credit = assign(row, batch, standing, facts, book=self.book, plain=self.plain)
            plan = plan.only(credit.forwarded_B)
        else:
            credit = assign(row, batch, standing, facts, book=self.book, plain=self.plain)
            plan = learner.plan(batch, credit.forwarded_B, step=step)
            facts = self._facts(batch, plan, charged=False)
        facts = self._measured(step, batch, plan, facts)
        self.stopper.check()
        scored = time.perf_counter()
        with self.stopper.held():
            report = learner.update(batch, plan, credit.signal, facts, step=step, warming=warming)
        out["time/score"] = scored - began
        out["time/update"] = time.perf_counter() - scored
        return facts, credit, report

    def _facts(self, batch: Batch, plan: Plan, *, charged: bool) -> Facts:
        """Old log-probabilities if weights change within the step, the reference if a term reads
        it, both for a KL that is `charged` to the reward; values where there is a critic."""
        row = self.row
        old = charged or not self.learner.single_step
        reference = charged or (row.kl.place == "loss" and row.kl.coef != 0)
        if not (old or reference or row.critic.kind != "none"):
            return Facts()
        return self.learner.score(batch, plan, old=old, reference=reference)

    def _measured(self, step: int, batch: Batch, plan: Plan, facts: Facts) -> Facts:
        """With a coefficient of 0 the reference is still asked now and then, for the metric."""
        row = self.row
        due = row.kl.coef == 0 and row.kl.measure_every > 0
        if not due or (step - 1) % row.kl.measure_every != 0 or not plan.passes:
            return facts
        seen = self.learner.measure(batch, plan.passes[0])
        return replace(facts, ref_logp_BT=seen.ref_logp_BT, ref_rows=seen.ref_rows)

    def _quarantine(self, gathered: Gathered, quarantined: set[str], progress: Progress) -> None:
        reasons = {group.prompt.id: unscorable_reason(group) for group in gathered.seen}
        for prompt in sorted(quarantined - set(progress.quarantined)):
            progress.quarantined.append(prompt)
            text = f"row {prompt} cannot be scored ({reasons[prompt]}), and is not asked again"
            self.desk.ledger.event("quarantined", text, {"prompt": prompt})
            if len(progress.quarantined) == 1:
                self.desk.display.note(f"{text}; further ones are in events.jsonl")

    def _warn_of_short_ones(self, batch: Batch, standing: Standing) -> None:
        """A lambda of the length is 0 below 1 / alpha tokens, so that only the critic credits."""
        credit = self.row.credit
        if not isinstance(credit, Gae) or credit.length_alpha is None:
            return
        least = 1.0 / credit.length_alpha
        length_B = batch.mask_BT.sum(1)[standing.present_PG.reshape(-1)]
        short = float((length_B < least).double().mean()) if length_B.numel() else 0.0
        if short > 0.5:
            self.desk.tell(
                "short_completions",
                f"{short:.0%} of the completions are shorter than 1 / method.credit.length_alpha = "
                f"{least:g} tokens, where lambda is 0 and the reward reaches earlier tokens "
                "through the critic alone; set method.credit.length_alpha=1.0 for answers this "
                "short",
            )

    def _remember(self, step: int, batch: Batch, standing: Standing, credit: Credit) -> None:
        """Let a history baseline learn of a step that is certain, and say what it finds."""
        if self.book is None:
            return
        if self.plain is not None:
            self.plain.learn(_told(batch, standing.reward_PG, standing.present_PG), step=step)
        rewards = _told(batch, credit.shaped_PG, standing.present_PG)
        for shift in self.book.learn(rewards, step=step):
            # An event's own `step` is the last one that was written down.
            facts = {"at" if key == "step" else key: value for key, value in asdict(shift).items()}
            self.desk.tell("history_shift", str(shift), facts)
        if self.book.dropped and not self._told_dropped:
            self._told_dropped = True
            self.desk.tell(
                "history_dropped",
                "more prompts than a history keeps; those unseen for longest start at "
                "method.baseline.init again; take baseline.scope task or global",
            )

    def _count_nonfinite(
        self, step: int, batch: Batch, report: UpdateReport, progress: Progress
    ) -> None:
        for applied in report.applied:
            progress.nonfinite = 0 if applied else progress.nonfinite + 1
            if progress.nonfinite >= NONFINITE_LIMIT:
                break
        if not report.skipped:
            return
        ids = sorted({batch.groups[int(batch.group_B[row])].prompt.id for row in report.bad_rows})
        self.desk.ledger.event(
            "nonfinite",
            f"step {step}: {report.skipped} optimizer step(s) skipped, because the loss or the "
            "gradient was not finite",
            {"prompts": ids},
        )


def _book(rule: History, state: Mapping[str, Any] | None) -> HistoryBook:
    return HistoryBook(rule) if state is None else HistoryBook.from_state(rule, state)


def _told(batch: Batch, reward_PG: Tensor, present_PG: Tensor) -> list[Rewards]:
    """What a history learns of: an infinite reward is left out, as its update is refused."""
    told_PG = present_PG & reward_PG.isfinite()
    return [
        (group.prompt.id, group.prompt.task, reward_G[told_G].tolist())
        for group, reward_G, told_G in zip(batch.groups, reward_PG, told_PG, strict=True)
    ]


def _count_signal(progress: Progress, out: names.Metrics, *, found: bool) -> None:
    progress.silent = 0 if found else progress.silent + 1
    out["steps_without_signal"] = progress.silent
