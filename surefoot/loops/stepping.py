"""From the first step to the last, whatever a step is.

Owns that the row of a step is written once, with the evaluation that belongs to it, and that state
is saved before every stop is raised, and at the end.
Refuses to own what a step does (`online`, `offline`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from surefoot.errors import Interrupted, NotSaved, Stop, StoppedOnFinding
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.desk import Desk, Saver
from surefoot.loops.metrics import Metrics
from surefoot.loops.process import peak_memory
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress
from surefoot.recipe.schema import Run
from surefoot.run.files import plain

GO_BACK = "To go back behind the step that did it, delete the newest of the checkpoints"
"""What to say of weights that a run has saved and may not want."""

L = TypeVar("L")
"""What an evaluation is."""


@dataclass
class Step:
    """A step whose weights are in place and whose row is not yet written; everything is JSON."""

    step: int
    row: Metrics
    tokens: int
    """Sampled, or seen by training."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    finding: str | None = None
    """Why the run stops after this step, if it does."""


class StepLoop(ABC, Generic[L]):
    """Runs steps from `progress` to the last one."""

    def __init__(
        self, desk: Desk, progress: Progress, stopper: Stopper, callbacks: Callbacks, run: Run
    ) -> None:
        self.desk = desk
        self.progress = progress
        self.stopper = stopper
        self.callbacks = callbacks
        self.settings = run
        self.steps = int(run.steps or 0)
        self.saver = Saver(
            desk,
            callbacks,
            saved=progress.step if desk.directory.has_checkpoint() else -1,
            current=progress.written == progress.step,
        )

    def run(self) -> None:
        """Train to the last step. Stops are raised after state is saved."""
        self.stopper.computing()
        try:
            self._begin()
            while self.progress.step < self.steps:
                self._one_step(self.progress.step + 1)
                self.stopper.check()
            self.stopper.safe()
            self._save(last=True)
        except (Interrupted, StoppedOnFinding) as stop:
            self.stopper.safe()
            self.desk.ledger.event("stopped", str(stop))
            if not isinstance(stop, NotSaved):
                self._save(last=True)
            raise

    def _begin(self) -> None:
        """What an earlier process left unwritten, or the evaluation before the first step."""
        if self.progress.owed is not None:
            self._finish(Step(**self.progress.owed))
            self.stopper.check()
        elif self.progress.step == 0 and self.progress.evaluated < 0 and self.settings.eval_every:
            row: Metrics = {}
            with self.stopper.held():
                looked = self._timed_look(0, row)
            if looked is not None:
                self._publish(row, looked)

    def _one_step(self, step: int) -> None:
        began = time.perf_counter()
        before, place = self._copy(), self._cursor()
        try:
            done = self._take(step)
        except Stop:
            # Nothing has been trained yet: the step is redone whole when the run resumes.
            self._go_back(before, place)
            if self._spent():
                self.saver.current = False
            raise
        self.progress.step = step
        done.row["time/step"] = seconds = time.perf_counter() - began
        done.row["time/tokens_per_second"] = done.tokens / seconds
        done.row["memory/peak_bytes"] = peak_memory()
        self._finish(done)
        every = self.settings.checkpoint_every
        if every and step % every == 0 and step != self.steps:
            self._save(last=False)

    def _finish(self, done: Step) -> None:
        """Evaluate if it is due, write the row, and stop if the step said so.

        An evaluation that a signal cuts off is owed: the next process takes it up.
        """
        looked = ended = None
        if self._due(done.step):
            try:
                with self.stopper.held():
                    looked = self._timed_look(done.step, done.row)
            except StoppedOnFinding as stop:
                # The weights of this step are new, so its row must be written before a stop.
                ended = stop
            except Interrupted:
                self.progress.owed = plain(asdict(done))
                raise
        self.progress.owed = None
        self._write(done, looked)
        if ended is not None:
            raise ended
        if done.finding is not None:
            raise StoppedOnFinding(done.finding)

    def _due(self, step: int) -> bool:
        every = self.settings.eval_every
        return bool(every) and (step % every == 0 or step == self.steps)

    def _timed_look(self, step: int, row: Metrics) -> L | None:
        began = time.perf_counter()
        looked = self._look(step, row)
        if looked is not None:
            row["time/eval"] = time.perf_counter() - began
            self.progress.evaluated = step
        return looked

    def _save(self, *, last: bool) -> None:
        """A checkpoint of the last step done, unless there is one; the `last` must succeed."""
        if self.saver.saved == self.progress.step and self.saver.current:
            return
        refused = self.progress.nonfinite > 0
        if refused and not last:
            # The weights are those of an older step: saving them again would retire better ones.
            return
        self.progress.cursor = self._cursor()
        tensors = self._tensors()
        for name in _not_finite(tensors):
            raise NotSaved(
                f"after step {self.progress.step} the weight {name} is not finite: training has "
                "diverged. These weights are not saved. Lower optim.learning_rate, and go on from "
                "an older checkpoint or start again in a new run.dir"
            )
        keep = self.settings.keep + refused
        self.saver.save(self.progress.step, tensors, self._state(), keep=keep, last=last)

    def _copy(self) -> Progress:
        """The run's memory as it is, for going back to."""
        progress = self.progress
        return replace(
            progress,
            quarantined=[*progress.quarantined],
            warm_trail=[*progress.warm_trail],
        )

    def _spent(self) -> bool:
        """Whether an abandoned step was paid for, which the newest checkpoint does not know."""
        return False

    def _state(self) -> dict[str, Any]:
        """The run's memory as JSON."""
        return asdict(self.progress)

    @abstractmethod
    def _cursor(self) -> dict[str, Any]:
        """The stream's place."""

    @abstractmethod
    def _go_back(self, before: Progress, place: Mapping[str, Any]) -> None:
        """Undo a step that was abandoned before a weight changed."""

    @abstractmethod
    def _take(self, step: int) -> Step:
        """Train one step. Stops may be raised as long as no weight has changed."""

    @abstractmethod
    def _look(self, step: int, row: Metrics) -> L | None:
        """Evaluate, and add the metrics to the row; None where nothing is held out."""

    @abstractmethod
    def _publish(self, row: Metrics, looked: L) -> None:
        """Write and show the evaluation before the first step."""

    @abstractmethod
    def _write(self, done: Step, looked: L | None) -> None:
        """Write and show a step, and tell the callbacks."""

    @abstractmethod
    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint, by file."""


def _not_finite(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """Names of weights that hold NaN or an infinity; moments of an optimizer may."""
    for file, content in tensors.items():
        if file.endswith("optimizer"):
            continue
        for name, tensor in content.items():
            if not bool(tensor.isfinite().all()):
                yield name
