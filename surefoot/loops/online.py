"""The online loop: step after step, with evaluations, checkpoints and stops between.

Owns when to evaluate, save and stop, and what is written down of a step.
Refuses to own what happens inside one (`step`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from surefoot.errors import Stop, StoppedOnFinding
from surefoot.learner.update import Learner
from surefoot.loops import metrics as names
from surefoot.loops.assemble import Parts
from surefoot.loops.desk import Desk, Saver
from surefoot.loops.evaluate import Evaluated, evaluate
from surefoot.loops.process import peak_memory
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, tensors
from surefoot.loops.step import NONFINITE_LIMIT, Stepper, Taken
from surefoot.loops.stepping import StepLoop
from surefoot.records import ScoreStatus, StopReason
from surefoot.run.rows import eval_row, sample_rows, train_row

_SHOWN = 3


class OnlineLoop(StepLoop):
    """Runs the steps of an online method from `progress` to the recipe's end."""

    def __init__(
        self, parts: Parts, learner: Learner, desk: Desk, progress: Progress, stopper: Stopper
    ) -> None:
        super().__init__(desk, progress, stopper, steps=int(parts.recipe.run.steps or 0))
        self.parts = parts
        self.learner = learner
        self.stepper = Stepper(parts, learner, desk, stopper, history=progress.history)
        # The stepper's book holds it from here on.
        self.progress.history = {}
        self._paid_before = progress.cost
        self.saver = Saver(
            desk,
            parts.callbacks,
            keep=parts.recipe.run.keep,
            saved=progress.step if desk.directory.has_checkpoint() else -1,
        )

    def _begin(self) -> None:
        self.parts.engine.load(self.parts.loaded.model, version=self.progress.step)
        if self.unseen:
            self._evaluate_start()

    def _one_step(self, step: int, *, last: bool) -> None:
        began = time.perf_counter()
        before = replace(
            self.progress,
            quarantined=[*self.progress.quarantined],
            warm_trail=[*self.progress.warm_trail],
        )
        self.progress.cursor = self.parts.data.stream.cursor()
        try:
            taken = self.stepper.take(step, self.progress)
        except Stop:
            # Nothing has been trained yet: the step is redone whole when the run resumes.
            self.parts.data.stream.restore(self.progress.cursor)
            before.cursor = self.progress.cursor
            self.progress = before
            raise
        self.progress.step = step
        self.progress.cursor = self.parts.data.stream.cursor()
        looked = ended = None
        if self._due_for_evaluation(step, last):
            # The weights of this step are new, so its row must be written before a stop.
            with self.stopper.held():
                try:
                    looked = self._evaluate(step, taken.row)
                except StoppedOnFinding as stop:
                    ended = stop
        taken.row["time/step"] = time.perf_counter() - began
        tokens = taken.gathered.tokens
        taken.row["time/tokens_per_second"] = tokens / taken.row["time/step"]
        taken.row["memory/peak_bytes"] = peak_memory()
        self._count_cost(taken.row)
        self._write(step, taken, looked)
        seen = None if looked is None else looked.evaluation
        self.parts.callbacks.step(step, taken.row, seen)
        if ended is not None:
            raise ended
        self._stop_if_told(taken)
        every = self.parts.recipe.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

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
        self.desk.write(step, row, _eval_rows(looked), _eval_samples(looked))
        self._show(step, looked)
        self.parts.callbacks.evaluation(step, looked.evaluation)

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
        self.desk.write(step, taken.row, groups, samples)
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
        if row.get("skipped_steps") and self.progress.nonfinite >= NONFINITE_LIMIT:
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
                f"grader's fault, the first of row {_first_failure(taken)}; see the log for each "
                "error. Mend the reward, or raise run.stop_at_failure_rate"
            )

    def _count_cost(self, row: names.Metrics) -> None:
        """What the run has paid; what an abandoned step has cost was paid too."""
        spent = self.parts.grader.spent
        if spent is not None:
            row["cost/total"] = self.progress.cost = self._paid_before + spent

    def _save(self) -> None:
        if self.saver.saved == self.progress.step:
            return
        self.progress.cursor = self.parts.data.stream.cursor()
        self.progress.budget = self.learner.packing.budget
        self._count_cost({})
        state = asdict(self.progress)
        if self.stepper.book is not None:
            state["history"] = self.stepper.history()
        self.saver.save(self.progress.step, tensors(self.learner), state)


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


def _first_failure(taken: Taken) -> str:
    """The row of the first completion that a reward failed, and what that reward said."""
    for group in taken.gathered.seen:
        for completion, score in zip(group.completions, group.scores or (), strict=True):
            engine = completion.stop is StopReason.ERROR
            if score.status is ScoreStatus.INFRA_ERROR and not engine:
                return f"{group.prompt.id} ({score.detail})"
    return "(none)"


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


def _said(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "unknown"
