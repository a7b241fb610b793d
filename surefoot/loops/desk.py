"""Where a run writes while it goes, and the checkpoints that it leaves.

Owns the bundle of directory, ledger, trackers and terminal, and how often a save may fail.
Refuses to own what is in a checkpoint (`state`), and when one is due (the loops).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import CheckpointError, NotSaved
from surefoot.loops.callbacks import Callbacks
from surefoot.run.checkpoint import save
from surefoot.run.directory import RunDirectory
from surefoot.run.display import Display
from surefoot.run.ledger import Ledger
from surefoot.run.trackers import Trackers


@dataclass
class Desk:
    """Where a run writes: its directory, ledger, trackers and the terminal."""

    directory: RunDirectory
    ledger: Ledger
    trackers: Trackers
    display: Display
    identity: dict[str, str]

    def tell(self, kind: str, text: str, facts: dict[str, Any] | None = None) -> None:
        """An event that people should see while the run goes."""
        self.ledger.event(kind, text, facts)
        self.display.note(text)

    def write(
        self,
        step: int,
        row: Mapping[str, float | int | str | None],
        groups: list[dict[str, Any]],
        samples: list[dict[str, Any]],
    ) -> None:
        """The rows of a step, in the ledger and the trackers; their troubles are told."""
        self.ledger.step(step, row, groups, samples)
        self.trackers.log(step, row)
        for trouble in self.trackers.troubles():
            self.tell("tracker", trouble)


class Saver:
    """Saves checkpoints; one failure is survived, two in a row stop the run."""

    def __init__(self, desk: Desk, callbacks: Callbacks, *, saved: int, current: bool) -> None:
        """`saved` is the step of the newest checkpoint, -1 without one; `current`: it is all that
        the run knows of that step."""
        self._desk = desk
        self._callbacks = callbacks
        self._failed = 0
        self.saved = saved
        self.current = current

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        *,
        keep: int,
        last: bool,
    ) -> None:
        """Write a checkpoint, and retire all but the newest `keep`.

        The `last` one of a process is tried twice and must succeed. Raises NotSaved.
        """
        try:
            path = self._write(step, tensors, state, keep)
        except CheckpointError as error:
            if self._failed < 2 and not last:
                return
            try:
                path = self._write(step, tensors, state, keep)
            except CheckpointError:
                raise self._not_saved(step, error) from error
        self._callbacks.checkpoint(step, path)

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        keep: int,
    ) -> Path:
        desk = self._desk
        began = time.perf_counter()
        try:
            _secure(desk.ledger, step)
            path = save(desk.directory, step, tensors, state, keep=keep, identity=desk.identity)
        except CheckpointError as error:
            self._failed += 1
            desk.tell("checkpoint_failed", str(error))
            raise
        self._failed = 0
        self.saved, self.current = step, True
        seconds = time.perf_counter() - began
        desk.ledger.event("checkpoint", f"saved step {step}", {"step": step, "seconds": seconds})
        return path

    def _not_saved(self, step: int, error: CheckpointError) -> NotSaved:
        there = "there is none"
        if self.saved >= 0:
            there = f"the newest one is of step {self.saved}"
        return NotSaved(
            f"stopped at step {step}, because no checkpoint can be written: {error}. Of "
            f"checkpoints {there}; with room on the disk the same command goes on from it"
        )


def _secure(ledger: Ledger, step: int) -> None:
    try:
        ledger.secure()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint of step {step} could not be written, because the ledger's rows before it "
            f"could not be ({error.strerror}); earlier checkpoints are untouched. Free space, or "
            "name another run.dir"
        ) from error
