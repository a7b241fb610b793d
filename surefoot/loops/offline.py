"""The loop of methods that train on given data: supervised and preference rows.

Owns when to evaluate, save and stop, and what is written down of a step.
Refuses to own the losses (`tasks`), and the loop over sampled completions (`online`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from surefoot.errors import Stop, StoppedOnFinding
from surefoot.learner.batch import Packing
from surefoot.learner.descent import Descended
from surefoot.learner.optim import Optimizer
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.desk import Desk, Saver
from surefoot.loops.metrics import Metrics
from surefoot.loops.process import peak_memory
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress
from surefoot.loops.step import NONFINITE_LIMIT
from surefoot.loops.stepping import StepLoop
from surefoot.models.memory import out_of_memory
from surefoot.recipe import Recipe
from surefoot.run.read import Evaluation

CHANCE = 0.5
"""Share of comparisons that a coin gets right."""
LEAST_BUDGET = 64
"""Tokens a micro-batch is never cut below."""


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

    @property
    def budget(self) -> int:
        return self.packing.budget

    def limit(self, budget: int) -> None:
        if 0 < budget < self.packing.budget:
            self.packing = replace(self.packing, budget=budget)


class OfflineLoop(StepLoop):
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
        super().__init__(desk, progress, stopper, steps=int(recipe.run.steps or 0))
        self.recipe = recipe
        self.task = task
        self.stream = stream
        self.callbacks = callbacks
        self.saver = Saver(
            desk,
            callbacks,
            keep=recipe.run.keep,
            saved=progress.step if desk.directory.has_checkpoint() else -1,
        )
        self._told: set[str] = set()

    def _begin(self) -> None:
        if self.unseen:
            self._look_at_start()

    def _one_step(self, step: int, *, last: bool) -> None:
        began = time.perf_counter()
        before, place = replace(self.progress), self.stream.cursor()
        try:
            row = self._learn(step)
        except Stop:
            # Nothing has been trained yet: the step is redone whole when the run resumes.
            self.stream.restore(place)
            self.progress = before
            raise
        self.progress.step = step
        looked = None
        if self._due(step, last):
            # The weights of this step are new, so its row must be written before a stop.
            with self.stopper.held():
                looked = self._look(step, row)
        row["time/step"] = time.perf_counter() - began
        row["time/tokens_per_second"] = int(row["step_tokens"] or 0) / float(row["time/step"] or 1)
        row["memory/peak_bytes"] = peak_memory()
        self._write(step, row, looked)
        self.callbacks.step(step, row, None if looked is None else looked.accuracy)
        if row["skipped_steps"] and self.progress.nonfinite >= NONFINITE_LIMIT:
            raise StoppedOnFinding(
                f"{self.progress.nonfinite} optimizer steps in a row had a non-finite loss or "
                "gradient; lower optim.learning_rate or mend the data"
            )
        limit = self.recipe.run.stop_without_signal
        if limit != "never" and self.progress.silent >= limit:
            raise StoppedOnFinding(
                f"{self.progress.silent} steps in a row had a gradient of exactly zero, so nothing "
                "was learned: every example is beyond what the loss asks for, or its margin is "
                "flat. Take harder data, lower the margin or beta of the method, or set "
                "run.stop_without_signal to never"
            )
        every = self.recipe.run.checkpoint_every
        if every and step % every == 0 and not last:
            self._save()

    def _learn(self, step: int) -> Metrics:
        rate = self.task.optimizer.rate(step)
        examples = self.stream.take(int(self.recipe.optim.batch_size or 0), step=step)
        self.stopper.check()
        began = time.perf_counter()
        while True:
            try:
                done, row = self.task.learn(examples, rate=rate)
                break
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error) or self.task.budget <= LEAST_BUDGET:
                    raise
                self.task.optimizer.clear()
                self.progress.budget = self.task.budget // 2
                self.task.limit(self.progress.budget)
                self.desk.ledger.event(
                    "out_of_memory",
                    f"step {step}: redone with {self.progress.budget} tokens per micro-batch",
                )
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
        return {**out, **row}

    def _due(self, step: int, last: bool) -> bool:
        every = self.recipe.run.eval_every
        return bool(every) and (step % every == 0 or last)

    def _look(self, step: int, row: Metrics) -> Look | None:
        began = time.perf_counter()
        looked = self.task.look(step)
        if looked is None:
            return None
        row.update(looked.metrics)
        if looked.accuracy is not None:
            row.update(looked.accuracy.metrics())
        row["time/eval"] = time.perf_counter() - began
        self.progress.evaluated = step
        return looked

    def _look_at_start(self) -> None:
        if not self.recipe.run.eval_every:
            return
        row: Metrics = {}
        looked = self._look(0, row)
        if looked is None:
            return
        self.desk.write(0, row, looked.rows, [])
        self._show(looked)
        if looked.accuracy is not None:
            self.callbacks.evaluation(0, looked.accuracy)

    def _write(self, step: int, row: Metrics, looked: Look | None) -> None:
        self.desk.write(step, row, [] if looked is None else looked.rows, [])
        self.desk.display.step(step, row)
        if looked is not None:
            self._show(looked)
            if step == self.steps:
                self._judge(looked)

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

    def _save(self) -> None:
        if self.saver.saved == self.progress.step:
            return
        self.progress.cursor = self.stream.cursor()
        self.progress.budget = self.task.budget
        self.saver.save(self.progress.step, self.task.tensors(), asdict(self.progress))
