"""Callbacks: a user's code that looks on while a run goes, and may end it.

Owns `Callback`, `STOP` and the dispatcher. A callback sees copies and changes nothing.
Refuses to own when each is called and what is saved (`stepping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from surefoot.errors import Interrupted, RecipeError, StoppedOnFinding
from surefoot.run.read import Evaluation


class EndedByCallback(Interrupted):
    """A callback asked for the end of the run."""


class Verdict(Enum):
    """What a callback may return."""

    STOP = "stop"

    def __repr__(self) -> str:
        return "surefoot.STOP"


STOP: Final = Verdict.STOP
"""Return it from a callback to end the run: state is saved, and the same call goes on."""


class Callback:
    """Override what you need. Return `surefoot.STOP` to end the run, else nothing.

    A step that an earlier process of the run showed is not shown again after a resume. An
    exception ends the run: state is saved, and the error names the callback.
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> Verdict | None:
        """After a training step: its row of `metrics.jsonl`."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Verdict | None:
        """After an evaluation of the weights of `step`."""

    def on_checkpoint(self, step: int, path: Path) -> Verdict | None:
        """After a checkpoint was saved under `path`."""

    def on_end(self, run_path: Path) -> None:
        """Once, before `train` returns; not when it raises."""


class Callbacks:
    """Calls every callback in order. What one returns stops the run after all have been called."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        if isinstance(callbacks, Callback | type):
            raise RecipeError("callbacks: is one callback; pass a list of them")
        self._all = tuple(callbacks)
        for given in self._all:
            if isinstance(given, type):
                raise RecipeError(
                    f"callbacks: {given.__name__} is a class; pass {given.__name__}()"
                )
            if not isinstance(given, Callback):
                raise RecipeError(
                    f"callbacks: {given!r:.60} is no surefoot.Callback; derive a class from it"
                )
        self._shown = -1
        self.stopped = False
        """Whether a callback ended the run."""

    def started(self, shown: int | None) -> None:
        """`shown` is the last step that an earlier process showed; None: the run starts."""
        self._shown = -1 if shown is None else shown

    def step(
        self, step: int, metrics: Mapping[str, Any], evaluation: Evaluation | None = None
    ) -> None:
        """A training step, and the evaluation that followed it if there was one."""
        if step <= self._shown:
            return
        ends = self._tell("on_step", step, lambda each: each.on_step(step, _copy(metrics)))
        if evaluation is not None:
            ends += self._look(step, evaluation)
        self._stop(ends, step)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation without a training step: only before the first."""
        if step > self._shown:
            self._stop(self._look(step, evaluation), step)

    def checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint; also one of a step that was shown before, because its files are new."""
        self._stop(
            self._tell("on_checkpoint", step, lambda each: each.on_checkpoint(step, path)), step
        )

    def ended(self, run_path: Path) -> None:
        """The run is over and everything is written."""
        self._tell("on_end", None, lambda each: each.on_end(run_path))

    def _look(self, step: int, evaluation: Evaluation) -> list[str]:
        return self._tell("on_evaluation", step, lambda each: each.on_evaluation(step, evaluation))

    def _tell(
        self, name: str, step: int | None, call: Callable[[Callback], Verdict | None]
    ) -> list[str]:
        """The names of those that want to stop."""
        ends = []
        for each in self._all:
            who = f"callback {type(each).__name__}.{name}"
            when = "" if step is None else f" at step {step}"
            try:
                said = call(each)
            except Exception as error:
                raise StoppedOnFinding(
                    f"{who} failed{when} with {type(error).__name__}: {error}. State is saved; "
                    "mend the callback, or leave it out"
                ) from error
            if said is STOP and step is not None:
                ends.append(who)
            elif said is not None:
                raise StoppedOnFinding(
                    f"{who} returned {said!r:.60}{when}; return surefoot.STOP or nothing"
                    if step is not None
                    else f"{who} returned {said!r:.60}; it returns nothing"
                )
        return ends

    def _stop(self, ends: list[str], step: int) -> None:
        if ends:
            self.stopped = True
            raise EndedByCallback(
                f"{', '.join(ends)} ended the run after step {step}; state is saved, and the same "
                "call goes on"
            )


def _copy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(metrics))
