"""From the first step to the last, whatever a step is.

Owns that state is saved before every stop is raised, and at the end.
Refuses to own what a step does (`online`, `offline`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from surefoot.errors import Interrupted, StoppedOnFinding
from surefoot.loops.desk import Desk
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress


class StepLoop(ABC):
    """Runs steps from `progress` to the last one."""

    def __init__(self, desk: Desk, progress: Progress, stopper: Stopper, *, steps: int) -> None:
        self.desk = desk
        self.progress = progress
        self.stopper = stopper
        self.steps = steps

    def run(self) -> None:
        """Train to the last step. Stops are raised after state is saved."""
        try:
            self._begin()
            while self.progress.step < self.steps:
                step = self.progress.step + 1
                self._one_step(step, last=step == self.steps)
                self.stopper.check()
        except (Interrupted, StoppedOnFinding) as stop:
            self.desk.ledger.event("stopped", str(stop))
            self._save()
            raise
        self._save()

    @property
    def unseen(self) -> bool:
        """Whether the weights before the first step have not been evaluated."""
        return self.progress.step == 0 and self.progress.evaluated < 0

    @abstractmethod
    def _begin(self) -> None:
        """What comes before the first step of this process."""

    @abstractmethod
    def _one_step(self, step: int, *, last: bool) -> None: ...

    @abstractmethod
    def _save(self) -> None:
        """A checkpoint of the last step done, unless there is one."""
