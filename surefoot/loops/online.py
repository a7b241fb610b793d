"""The online loop: what a step over sampled completions leaves behind, and what it is stopped for.

Owns what is written down of a step and of an evaluation, and the findings that end a run.
Refuses to own what happens inside a step (`step`), and when to evaluate and save (`stepping`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surefoot.learner.update import Learner
from surefoot.loops import metrics as names
from surefoot.loops.assemble import Parts
from surefoot.loops.desk import Desk
from surefoot.loops.evaluate import Evaluated, evaluate
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, tensors
from surefoot.loops.step import NONFINITE_LIMIT, Stepper, Taken
from surefoot.loops.stepping import GO_BACK, Step, StepLoop
from surefoot.records import ScoreStatus, StopReason
from surefoot.run.rows import eval_row, sample_rows, train_row

STALE_LIMIT = 3
"""Steps in a row with completions of other weights after which the run stops."""
_SHOWN = 3


class OnlineLoop(StepLoop[Evaluated]):
    """Runs the steps of an online method from `progress` to the recipe's end."""

    def __init__(
        self, parts: Parts, learner: Learner, desk: Desk, progress: Progress, stopper: Stopper
    ) -> None:
        super().__init__(desk, progress, stopper, parts.callbacks, parts.recipe.run)
        self.parts = parts
        self.learner = learner
        self.stepper = Stepper(parts, learner, desk, stopper, history=progress.history)
        # The stepper's book holds it from here on.
        self.progress.history = {}
        self._paid_before = progress.cost

    def _take(self, step: int) -> Step:
        taken = self.stepper.take(step, self.progress)
        groups = [train_row(group, dead=dead, kept=kept) for group, dead, kept in _fates(taken)]
        return Step(
            step,
            taken.row,
            taken.gathered.tokens,
            groups,
            _samples(taken),
            self._finding(taken),
        )

    def _cursor(self) -> dict[str, Any]:
        return self.parts.data.stream.cursor()

    def _go_back(self, before: Progress, place: Mapping[str, Any]) -> None:
        self.learner.clear()
        self.parts.data.stream.restore(place)
        self.progress = before

    def _due(self, step: int) -> bool:
        return bool(self.parts.data.eval_prompts) and super()._due(step)

    def _look(self, step: int, row: names.Metrics) -> Evaluated | None:
        if not self.parts.data.eval_prompts:
            return None
        self.parts.engine.load(self.parts.loaded.model, version=step)
        looked = evaluate(
            self.parts.engine, self.parts.grader, self.parts.data.eval_prompts, step=step
        )
        self.stepper.hear_engine()
        row.update(looked.evaluation.metrics())
        return looked

    def _publish(self, row: names.Metrics, looked: Evaluated) -> None:
        self.desk.write(0, row, _eval_rows(looked), _eval_samples(looked))
        self._show(looked)
        self.callbacks.evaluation(0, looked.evaluation)

    def _write(self, done: Step, looked: Evaluated | None) -> None:
        self._count_cost(done.row)
        groups = done.groups if looked is None else [*done.groups, *_eval_rows(looked)]
        self.desk.write(done.step, done.row, groups, done.samples)
        self.desk.display.step(done.step, done.row)
        if looked is not None:
            self._show(looked)
        seen = None if looked is None else looked.evaluation
        self.callbacks.step(done.step, done.row, seen)

    def _show(self, looked: Evaluated) -> None:
        self.desk.display.evaluation(looked.evaluation)
        self.desk.display.samples(
            [
                (g.prompt.text, g.completions[0].text, g.scores[0].value if g.scores else None)
                for g in looked.groups[:_SHOWN]
            ]
        )

    def _finding(self, taken: Taken) -> str | None:
        """Why the run stops after this step: non-finite steps, no signal, failing graders."""
        run, row = self.settings, taken.row
        # A count that was saved stops a resumed run only when a step of it adds to the count.
        if row.get("skipped_steps") and self.progress.nonfinite >= NONFINITE_LIMIT:
            return (
                f"{self.progress.nonfinite} optimizer steps in a row had a non-finite loss or "
                "gradient; see the nonfinite events for the prompts, and lower "
                f"optim.learning_rate or mend the data. {GO_BACK}"
            )
        limit = run.stop_without_signal
        if limit != "never" and self.progress.silent >= limit:
            return (
                f"{self.progress.silent} steps in a row gave no signal: the mean reward is "
                f"{_said(row.get('reward'))}, and no completion had an advantage. Take easier or "
                "harder prompts, a larger method.group_size or another reward; for a control run "
                "set run.stop_without_signal to never"
            )
        apart = abs(float(row.get("mismatch/kl_k1") or 0.0))
        cut = "truncated_sampling" in run.allow
        if run.stop_at_mismatch != "never" and not cut and apart >= run.stop_at_mismatch:
            return (
                f"the engine's log-probabilities and the trainer's are {apart:.3g} nats a token "
                "apart at what should be the same weights: the engine samples under stale or "
                "other weights, or at another temperature. See that its weights are reloaded, or "
                "set run.stop_at_mismatch"
            )
        if taken.gathered.stale and self.progress.stale >= STALE_LIMIT:
            return (
                f"the engine sampled under other weights than those of the step "
                f"{self.progress.stale} steps in a row, this time {taken.gathered.stale} "
                f"completions ({_first_stale(taken)}); they are not trained on. See that the "
                "engine's weights are reloaded after every update"
            )
        failures = row.get("reward_failures") or 0
        total = sum(len(group.completions) for group in taken.gathered.seen)
        if total and float(failures) / total >= run.stop_at_failure_rate:
            return (
                f"{failures:g} of {total} completions of this step could not be scored by a "
                f"grader's fault, the first of row {_first_failure(taken)}; see the log for each "
                "error. Mend the reward, or raise run.stop_at_failure_rate"
            )
        return None

    def _count_cost(self, row: names.Metrics) -> None:
        """What the run has paid; what an abandoned step has cost was paid too."""
        spent = self.parts.grader.spent
        if spent is not None:
            row["cost/total"] = self.progress.cost = self._paid_before + spent

    def _spent(self) -> bool:
        known = self.progress.cost
        self._count_cost({})
        return self.progress.cost != known

    def _state(self) -> dict[str, Any]:
        budget = self.learner.packing.budget
        asked = self.parts.recipe.optim.tokens_per_microbatch
        self.progress.budget = budget if budget != asked else 0
        self._count_cost({})
        state = super()._state()
        if self.stepper.book is not None:
            state["history"] = self.stepper.history()
        return state

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return tensors(self.learner)


def _samples(taken: Taken) -> list[dict[str, Any]]:
    samples = []
    for place, group in enumerate(taken.gathered.groups):
        advantages: list[float | None] = [None] * len(group.completions)
        if taken.credit is not None:
            advantages = [float(value) for value in taken.credit.advantage_PG[place]]
        samples.extend(sample_rows(group, advantages=advantages))
    return samples


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


def _first_stale(taken: Taken) -> str:
    details = [
        completion.detail
        for group in taken.gathered.seen
        for completion in group.completions
        if completion.stop is StopReason.ERROR and completion.detail
    ]
    return details[0] if details else "(none)"


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
