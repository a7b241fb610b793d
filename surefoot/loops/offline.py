"""The loop of methods that train on given data: supervised and preference rows.

Owns what is written down of a step and of an evaluation, and the findings that end a run.
Refuses to own the losses (`learner/`), when to evaluate and save (`stepping`), and the loop over
sampled completions (`online`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from surefoot.errors import StoppedOnFinding
from surefoot.learner.batch import Packing
from surefoot.learner.descent import Descended
from surefoot.learner.optim import Optimizer
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.desk import Desk
from surefoot.loops.metrics import Metrics
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress
from surefoot.loops.step import NONFINITE_LIMIT
from surefoot.loops.stepping import GO_BACK, Step, StepLoop
from surefoot.models.memory import halved, out_of_memory, too_small
from surefoot.recipe import Recipe
from surefoot.run.read import Evaluation

T = TypeVar("T")

CHANCE = 0.5
"""Share of comparisons that a coin gets right."""


@dataclass(frozen=True)
class Look:
    """An evaluation on held-out rows."""

    metrics: Metrics
    accuracy: Evaluation | None = None
    """Of comparisons: how many of the held-out pairs are in the right order."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """For groups.jsonl, one a held-out pair."""
    finding: tuple[str, str] | None = None
    """Kind and words of what people should know."""


class Stream(Protocol):
    """Examples in a keyed order, with a place that can be saved."""

    @property
    def epoch(self) -> float: ...
    def take(self, prompts: int, *, step: int) -> Sequence[Any]: ...
    def cursor(self) -> dict[str, Any]: ...
    def restore(self, cursor: Mapping[str, Any]) -> None: ...


class Task(Protocol):
    """What a method does with a batch of examples."""

    optimizer: Optimizer
    interrupt: Callable[[], None]
    """Called between the passes of a step, until a weight changes, and of an evaluation."""

    @property
    def budget(self) -> int:
        """Tokens a micro-batch."""
        ...

    def limit(self, budget: int) -> None:
        """Lower the token budget of a micro-batch."""
        ...

    def learn(self, examples: Sequence[Any], *, rate: float) -> tuple[Descended, Metrics]:
        """One optimizer step."""
        ...

    def tokens(self, examples: Sequence[Any]) -> int:
        """Tokens that training sees in these examples."""
        ...

    def look(self, step: int) -> Look | None:
        """Evaluate on the held-out rows; None where there are none."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint, by file."""
        ...


class Budgeted:
    """What every task is: passes that keep to a token budget."""

    def __init__(self, optimizer: Optimizer, packing: Packing) -> None:
        self.optimizer = optimizer
        self.packing = packing
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def budget(self) -> int:
        return self.packing.budget

    def limit(self, budget: int) -> None:
        if 0 < budget < self.packing.budget:
            self.packing = replace(self.packing, budget=budget)


class OfflineLoop(StepLoop[Look]):
    """Runs the steps of a method from `progress` to the recipe's end."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        stream: Stream,
        desk: Desk,
        progress: Progress,
        stopper: Stopper,
        callbacks: Callbacks,
    ) -> None:
        super().__init__(desk, progress, stopper, callbacks, recipe.run)
        self.recipe = recipe
        self.task = task
        self.task.interrupt = stopper.check
        self.stream = stream
        self._told: set[str] = set()

    def _take(self, step: int) -> Step:
        rate = self.task.optimizer.rate(step)
        examples = self.stream.take(int(self.recipe.optim.batch_size or 0), step=step)
        self.stopper.check()
        began = time.perf_counter()
        with self.stopper.held():
            done, row = self._in_pieces(step, lambda: self.task.learn(examples, rate=rate))
        seen = self.task.tokens(examples)
        self.progress.tokens += seen
        bad = not done.applied and not done.silent
        self.progress.nonfinite = self.progress.nonfinite + 1 if bad else 0
        self.progress.silent = self.progress.silent + 1 if done.silent else 0
        if bad:
            self.desk.ledger.event(
                "nonfinite",
                f"step {step}: skipped, because the loss or the gradient was not finite",
                {"rows": [example.id for example in examples]},
            )
        out: Metrics = {
            "optimizer_steps": int(done.applied),
            "skipped_steps": int(bad),
            "steps_without_signal": self.progress.silent,
            "forwarded_tokens": done.forwarded,
            "learning_rate": rate,
            "epoch": self.stream.epoch,
            "num_tokens": self.progress.tokens,
            "step_tokens": seen,
            "time/update": time.perf_counter() - began,
        }
        if not bad:
            out["loss"] = done.loss
            out["grad_norm"] = done.grad_norm
        return Step(step, {**out, **row}, seen, finding=self._finding(bad))

    def _in_pieces(self, step: int, work: Callable[[], T]) -> T:
        """What `work` gives; after running out of memory, again in smaller pieces."""
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                budget = halved(self.task.budget)
                if budget is None:
                    raise StoppedOnFinding(too_small(self.task.budget)) from error
            self.task.optimizer.clear()
            self.task.limit(budget)
            self.desk.ledger.event(
                "out_of_memory", f"step {step}: redone with {budget} tokens per micro-batch"
            )

    def _finding(self, bad: bool) -> str | None:
        """Why the run stops after this step, if it does."""
        if bad and self.progress.nonfinite >= NONFINITE_LIMIT:
            return (
                f"{self.progress.nonfinite} optimizer steps in a row had a non-finite loss or "
                f"gradient; lower optim.learning_rate or mend the data. {GO_BACK}"
            )
        limit = self.settings.stop_without_signal
        if limit != "never" and self.progress.silent >= limit:
            return (
                f"{self.progress.silent} steps in a row had a gradient of exactly zero, so nothing "
                "was learned: every example is beyond what the loss asks for, or its margin is "
                "flat. Take harder data, lower the margin or beta of the method, or set "
                "run.stop_without_signal to never"
            )
        return None

    def _cursor(self) -> dict[str, Any]:
        return self.stream.cursor()

    def _go_back(self, before: Progress, place: Mapping[str, Any]) -> None:
        self.task.optimizer.clear()
        self.stream.restore(place)
        self.progress = before

    def _look(self, step: int, row: Metrics) -> Look | None:
        looked = self._in_pieces(step, lambda: self.task.look(step))
        if looked is None:
            return None
        row.update(looked.metrics)
        if looked.accuracy is not None:
            row.update(looked.accuracy.metrics())
        return looked

    def _publish(self, row: Metrics, looked: Look) -> None:
        self.desk.write(0, row, looked.rows, [])
        self._show(looked)
        if looked.accuracy is not None:
            self.callbacks.evaluation(0, looked.accuracy)

    def _write(self, done: Step, looked: Look | None) -> None:
        self.desk.write(done.step, done.row, [] if looked is None else looked.rows, [])
        self.desk.display.step(done.step, done.row)
        if looked is not None:
            self._show(looked)
            if done.step == self.steps:
                self._judge(looked)
        self.callbacks.step(done.step, done.row, None if looked is None else looked.accuracy)

    def _judge(self, looked: Look) -> None:
        """Say of comparisons, at the end, that they were not learned."""
        seen = looked.accuracy
        if seen is not None and seen.low <= CHANCE:
            self.desk.tell(
                "chance",
                f"{seen.accuracy:.2f} [{seen.low:.2f}, {seen.high:.2f}] of the held-out pairs are "
                "in order, which is not shown to be better than chance: a policy that is trained "
                "on this reward may get worse. Take more pairs or more held-out ones, or see what "
                "`surefoot audit data` says of them",
            )

    def _show(self, looked: Look) -> None:
        if looked.accuracy is not None:
            self.desk.display.evaluation(looked.accuracy)
        else:
            told = ", ".join(f"{k} {v:.4g}" for k, v in looked.metrics.items() if v is not None)
            self.desk.display.note(f"eval: {told}")
        if looked.finding is not None and looked.finding[0] not in self._told:
            self._told.add(looked.finding[0])
            self.desk.tell(*looked.finding)

    def _state(self) -> dict[str, Any]:
        asked = self.recipe.optim.tokens_per_microbatch
        self.progress.budget = self.task.budget if self.task.budget != asked else 0
        return super()._state()

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return self.task.tensors()
