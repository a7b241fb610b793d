"""The online loop: sample, score, keep, assign, update, write down; DESIGN section 4 as code.

Owns the order of a step, when to evaluate, save and stop.
Refuses to own what each line does.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass

import torch

from surefoot.errors import CheckpointError, Interrupted, StoppedOnFinding
from surefoot.learner.batch import Batch, Plan, make_batch
from surefoot.learner.update import Facts, Learner, UpdateReport
from surefoot.loops import metrics as names
from surefoot.loops.assemble import Parts
from surefoot.loops.control import adapts, next_coef, with_coef
from surefoot.loops.credit import Credit, Standing, assign, needs_facts, stand
from surefoot.loops.evaluate import Evaluated, evaluate
from surefoot.loops.keep import Gathered, gather, unscorable_reason
from surefoot.loops.process import peak_memory
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, tensors
from surefoot.run.checkpoint import save
from surefoot.run.directory import RunDirectory
from surefoot.run.display import Display
from surefoot.run.ledger import Ledger
from surefoot.run.rows import eval_row, sample_rows, train_row
from surefoot.run.trackers import Trackers

_SHOWN = 3
_NONFINITE_LIMIT = 3


@dataclass
class Desk:
    """Where a run writes: its directory, ledger, trackers and the terminal."""

    directory: RunDirectory
    ledger: Ledger
    trackers: Trackers
    display: Display
    identity: dict[str, str]


@dataclass(frozen=True)
class Taken:
    """A step, done but not yet written down."""

    gathered: Gathered
    standing: Standing | None
    credit: Credit | None
    row: names.Metrics


class OnlineLoop:
    """Runs the steps of an online method from `progress` to the recipe's end."""

    def __init__(
        self, parts: Parts, learner: Learner, desk: Desk, progress: Progress, stopper: Stopper
    ) -> None:
        self.parts = parts
        self.learner = learner
        self.desk = desk
        self.progress = progress
        self.stopper = stopper
        self.row = parts.row
        """The row with the KL coefficient of the current step."""
        self.saved = progress.step if desk.directory.has_checkpoint() else -1
        self.failed_saves = 0

    def run(self) -> None:
        """Train to the last step. Stops are raised after state is saved."""
        steps = int(self.parts.recipe.run.steps or 0)
        try:
            self.parts.engine.load(self.parts.loaded.model, version=self.progress.step)
            if self.progress.step == 0 and self.progress.evaluated < 0:
                self._evaluate_start()
            while self.progress.step < steps:
                self._one_step(self.progress.step + 1, last=self.progress.step + 1 == steps)
                self.stopper.check()
        except (Interrupted, StoppedOnFinding) as stop:
            self.desk.ledger.event("stopped", str(stop))
            self._save()
            raise
        if self.saved != self.progress.step:
            self._save()

    def _one_step(self, step: int, *, last: bool) -> None:
        began = time.perf_counter()
        before = copy.deepcopy(self.progress)
        self.progress.cursor = self.parts.data.stream.cursor()
        try:
            taken = self._take(step)
        except Interrupted:
            # Nothing has been trained yet: the step is redone whole when the run resumes.
            self.parts.data.stream.restore(self.progress.cursor)
            before.cursor = self.progress.cursor
            self.progress = before
            raise
        self.progress.step = step
        self.progress.cursor = self.parts.data.stream.cursor()
        looked = None
        if self._due_for_evaluation(step, last):
            # The weights of this step are new, so its row must be written before a stop.
            with self.stopper.held():
                looked = self._evaluate(step, taken.row)
        taken.row["time/step"] = time.perf_counter() - began
        tokens = taken.gathered.tokens
        taken.row["time/tokens_per_second"] = tokens / taken.row["time/step"]
        taken.row["memory/peak_bytes"] = peak_memory()
        self._write(step, taken, looked)
        self._stop_if_told(taken)
        every = self.parts.recipe.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

    def _take(self, step: int) -> Taken:
        """One step as data. Interruptions may come until the update begins, not later."""
        parts = self.parts
        row = self.row = self.learner.row = with_coef(parts.row, self.progress.kl_coef)
        began = time.perf_counter()
        parts.engine.load(parts.loaded.model, version=step - 1)
        synced = time.perf_counter()
        quarantined = set(self.progress.quarantined)
        gathered = gather(
            row,
            stream=parts.data.stream,
            engine=parts.engine,
            grader=parts.grader,
            prompts=parts.recipe.rollout.prompts_per_step,
            quarantined=quarantined,
            interrupt=self.stopper.check,
        )
        out = names.rollout_metrics(gathered, prompts=parts.recipe.rollout.prompts_per_step)
        out.update(names.part_metrics(parts.grader.counts()))
        out["time/sync"] = synced - began
        out["time/rollout"] = gathered.rollout_seconds
        out["time/reward"] = gathered.reward_seconds
        self._quarantine(gathered, quarantined)
        self.progress.tokens += gathered.tokens + sum(len(g.prompt.ids) for g in gathered.seen)
        out["num_tokens"] = self.progress.tokens
        out["epoch"] = parts.data.stream.epoch
        out["learning_rate"] = self.learner.optimizer.rate(step)
        if not gathered.groups:
            self._count_signal(out, found=False)
            return Taken(gathered, None, None, out)
        batch = make_batch(gathered.groups)
        standing = stand(row, batch, max_new_tokens=parts.recipe.rollout.max_new_tokens)
        credit = self._learn(step, batch, standing, out)
        return Taken(gathered, standing, credit, out)

    def _learn(self, step: int, batch: Batch, standing: Standing, out: names.Metrics) -> Credit:
        """Score, assign and update; after running out of memory, again in smaller pieces."""
        while True:
            try:
                facts, credit, report = self._score_and_update(step, batch, standing, out)
                break
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error) or self.learner.applied or not self.learner.halve():
                    raise
                self.learner.optimizer.clear()
                self.progress.budget = self.learner.packing.budget
                self.desk.ledger.event(
                    "out_of_memory",
                    f"step {step}: redone with {self.progress.budget} tokens per micro-batch",
                )
        out.update(names.credit_metrics(standing, credit))
        out.update(names.update_metrics(batch, standing, facts, report, self.row))
        if adapts(self.row):
            out["kl/coef"] = self.row.kl.coef
            self.progress.kl_coef = next_coef(self.row, batch, standing, facts, report)
        self._count_signal(out, found=credit.signal_found)
        self._count_nonfinite(step, batch, report)
        return credit

    def _score_and_update(
        self, step: int, batch: Batch, standing: Standing, out: names.Metrics
    ) -> tuple[Facts, Credit, UpdateReport]:
        row, learner = self.row, self.learner
        began = time.perf_counter()
        early = needs_facts(row)
        facts = Facts()
        if early:
            # KL in the reward: the advantages need every present completion scored first.
            plan = learner.plan(batch, standing.present_PG.reshape(-1), step=step)
            facts = learner.score(batch, plan, old=True, reference=True)
            credit = assign(row, batch, standing, facts)
        else:
            credit = assign(row, batch, standing, facts)
            plan = learner.plan(batch, credit.forwarded_B, step=step)
            facts = self._late_facts(step, batch, plan)
        self.stopper.check()
        scored = time.perf_counter()
        report = learner.update(batch, plan, credit.signal, facts, step=step)
        out["time/score"] = scored - began
        out["time/update"] = time.perf_counter() - scored
        return facts, credit, report

    def _late_facts(self, step: int, batch: Batch, plan: Plan) -> Facts:
        """Old log-probabilities if weights change within the step; the reference if a term or a
        measurement reads it."""
        row = self.row
        old = not self.learner.single_step
        in_loss = row.kl.place == "loss" and row.kl.coef != 0
        facts = Facts()
        if old or in_loss:
            facts = self.learner.score(batch, plan, old=old, reference=in_loss)
        measured = row.kl.place != "none" and row.kl.coef == 0 and row.kl.measure_every > 0
        if measured and (step - 1) % row.kl.measure_every == 0 and plan.passes:
            seen = self.learner.measure(batch, plan.passes[0])
            facts = Facts(facts.old_logp_BT, seen.ref_logp_BT, seen.ref_rows)
        return facts

    def _quarantine(self, gathered: Gathered, quarantined: set[str]) -> None:
        reasons = {group.prompt.id: unscorable_reason(group) for group in gathered.seen}
        for prompt in sorted(quarantined - set(self.progress.quarantined)):
            self.progress.quarantined.append(prompt)
            text = f"row {prompt} cannot be scored ({reasons[prompt]}), and is not asked again"
            self.desk.ledger.event("quarantined", text, {"prompt": prompt})
            if len(self.progress.quarantined) == 1:
                self.desk.display.note(f"{text}; further ones are in events.jsonl")

    def _count_signal(self, out: names.Metrics, *, found: bool) -> None:
        self.progress.silent = 0 if found else self.progress.silent + 1
        out["steps_without_signal"] = self.progress.silent

    def _count_nonfinite(self, step: int, batch: Batch, report: UpdateReport) -> None:
        for applied in report.applied:
            self.progress.nonfinite = 0 if applied else self.progress.nonfinite + 1
            if self.progress.nonfinite >= _NONFINITE_LIMIT:
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

    def _due_for_evaluation(self, step: int, last: bool) -> bool:
        every = self.parts.recipe.run.eval_every
        return bool(every and self.parts.data.eval_prompts) and (step % every == 0 or last)

    def _evaluate(self, step: int, out: names.Metrics) -> Evaluated:
        began = time.perf_counter()
        self.parts.engine.load(self.parts.loaded.model, version=step)
        looked = evaluate(
            self.parts.engine, self.parts.grader, self.parts.data.eval_prompts, step=step
        )
        out.update(looked.evaluation.metrics())
        out["time/eval"] = time.perf_counter() - began
        self.progress.evaluated = step
        return looked

    def _evaluate_start(self) -> None:
        if not (self.parts.recipe.run.eval_every and self.parts.data.eval_prompts):
            return
        row: names.Metrics = {}
        looked = self._evaluate(0, row)
        self._publish(0, row, looked)

    def _publish(self, step: int, row: names.Metrics, looked: Evaluated | None) -> None:
        """An evaluation without a training step: only before the first."""
        assert looked is not None
        self.desk.ledger.step(step, row, _eval_rows(looked), _eval_samples(looked))
        self.desk.trackers.log(step, row)
        self._show(step, looked)

    def _write(self, step: int, taken: Taken, looked: Evaluated | None) -> None:
        groups = [train_row(group, dead=dead, kept=kept) for group, dead, kept in _fates(taken)]
        samples = []
        for place, group in enumerate(taken.gathered.groups):
            size = len(group.completions)
            advantages = [None] * size
            if taken.credit is not None:
                advantages = [float(value) for value in taken.credit.advantage_PG[place]]
            samples.extend(sample_rows(group, advantages=advantages))
        if looked is not None:
            groups.extend(_eval_rows(looked))
        self.desk.ledger.step(step, taken.row, groups, samples)
        self.desk.trackers.log(step, taken.row)
        for trouble in self.desk.trackers.troubles():
            self.desk.ledger.event("tracker", trouble)
            self.desk.display.note(trouble)
        self.desk.display.step(step, taken.row)
        if looked is not None:
            self._show(step, looked)

    def _show(self, step: int, looked: Evaluated) -> None:
        self.desk.display.evaluation(looked.evaluation)
        self.desk.display.samples(
            [
                (g.prompt.text, g.completions[0].text, g.scores[0].value if g.scores else None)
                for g in looked.groups[:_SHOWN]
            ]
        )

    def _stop_if_told(self, taken: Taken) -> None:
        """Stops on a finding: no signal, non-finite steps, failing graders."""
        run, row = self.parts.recipe.run, taken.row
        # A count that was saved stops a resumed run only when a step of it adds to the count.
        if row.get("skipped_steps") and self.progress.nonfinite >= _NONFINITE_LIMIT:
            raise StoppedOnFinding(
                f"{self.progress.nonfinite} optimizer steps in a row had a non-finite loss or "
                "gradient; see the nonfinite events for the prompts, and lower "
                "optim.learning_rate or mend the data"
            )
        limit = run.stop_without_signal
        if limit != "never" and self.progress.silent >= limit:
            raise StoppedOnFinding(
                f"{self.progress.silent} steps in a row gave no signal: the mean reward is "
                f"{_said(row.get('reward'))}, and no completion had an advantage. Take easier or "
                "harder prompts, a larger method.group_size or another reward; for a control run "
                "set run.stop_without_signal to never"
            )
        failures = row.get("reward_failures") or 0
        total = sum(len(group.completions) for group in taken.gathered.seen)
        if total and failures / total >= run.stop_at_failure_rate:
            raise StoppedOnFinding(
                f"{failures:g} of {total} completions of this step could not be scored by a "
                "grader's fault; see the log for each error. Mend the reward, or raise "
                "run.stop_at_failure_rate"
            )

    def _save(self) -> None:
        """A checkpoint; one failure is survived, two in a row stop the run."""
        if self.saved == self.progress.step:
            return
        began = time.perf_counter()
        self.progress.cursor = self.parts.data.stream.cursor()
        self.progress.budget = self.learner.packing.budget
        self.desk.ledger.sync()
        try:
            save(
                self.desk.directory,
                self.progress.step,
                tensors(self.learner),
                asdict(self.progress),
                keep=self.parts.recipe.run.keep,
                identity=self.desk.identity,
            )
        except CheckpointError as error:
            self.failed_saves += 1
            self.desk.ledger.event("checkpoint_failed", str(error))
            self.desk.display.note(str(error))
            if self.failed_saves >= 2:
                raise
            return
        self.failed_saves = 0
        self.saved = self.progress.step
        seconds = time.perf_counter() - began
        self.desk.ledger.event(
            "checkpoint", f"saved step {self.saved}", {"step": self.saved, "seconds": seconds}
        )


def _fates(taken: Taken) -> list[tuple[object, bool, bool]]:
    """Every sampled group of the step: was it dead, was it trained on."""
    places = {id(group): place for place, group in enumerate(taken.gathered.groups)}
    fates = []
    for group in taken.gathered.seen:
        place = places.get(id(group))
        dead = kept = False
        if place is not None and taken.credit is not None and taken.standing is not None:
            dead = bool(taken.credit.dead_P[place])
            kept = not bool(taken.standing.dropped_P[place])
        fates.append((group, dead, kept))
    return fates


def _eval_rows(looked: Evaluated) -> list[dict[str, object]]:
    return [
        eval_row(group, correct=flag)
        for group, flag in zip(looked.groups, looked.correct, strict=True)
    ]


def _eval_samples(looked: Evaluated) -> list[dict[str, object]]:
    return [
        row
        for group in looked.groups
        for row in sample_rows(group, advantages=[None], split="eval")
    ]


def _out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
    )


def _said(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "unknown"
