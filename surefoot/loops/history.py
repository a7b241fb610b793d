"""The averages of a history baseline: which rewards share one, and what a shift does to them.

Owns the scopes, the order (read before, learn after a step), `on_shift`, and the saved state.
Refuses to own one average's arithmetic (`objective/history`) and the test for a shift (`shift`).

Scope `global` has one average, `task` one per label (rows without one share one), `prompt` one per
prompt. A shift is looked for on each average's own batches, so a task that is new is none under
scope `task`. Under scope `prompt` none is looked for: one value per visit cannot tell a shift from
learning.

On a shift, `report` keeps the average and `reset` starts it again at this step's own rewards, for
the steps that follow. An ema or a window forgets the old level in time. A cumulative average never
does: with n old and m new rewards, n / (n + m) of the gap is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import CheckpointError, SurefootError
from surefoot.loops.shift import Detector, Jump, Value
from surefoot.methods import History
from surefoot.objective.history import MovingAverage

LIMIT = 50_000
"""Averages kept; the one unseen for longest goes first, and its rows start at `init` again."""
_ALL = ""
_UNLABELLED = "default"  # what records.Prompt calls the task of a row without one

Rewards = tuple[str, str | None, Sequence[float]]
"""A prompt's id, its task (None: no label), and its rewards of this step, missing ones left out."""


@dataclass(frozen=True)
class Shift:
    """The history is stale: the rewards since step `since` are not of its level."""

    step: int
    """The step that showed it."""
    since: int
    scope: str
    task: str | None
    """Scope task: whose average it is. Else the task that the steps since then have more of."""
    mean: float
    """Mean reward since then, over prompts."""
    before: float
    """The same over the steps before, at most 11."""
    z: float
    """The difference as a normal deviate of as small a chance, by Bennett's bound."""
    reset: bool

    def __str__(self) -> str:
        whose = "the rewards changed" if self.task is None else f"task {self.task!r}"
        text = (
            f"{whose} since step {self.since}; reward mean {self.mean:.2f} against a history of "
            f"{self.before:.2f} (z {self.z:+.1f})"
        )
        if self.reset:
            return f"{text}; the history starts again at step {self.step}"
        return f"{text}; the history is kept: method.baseline.on_shift=reset would start it again"


class HistoryBook:
    """Every average of a run whose baseline is a history."""

    def __init__(self, rule: History) -> None:
        self.rule = rule
        self.dropped = 0
        """Averages dropped since this book was made, because there were more than LIMIT."""
        self._averages: dict[str, MovingAverage] = {}  # the one unseen for longest first
        self._detectors: dict[str, Detector] = {}

    def __len__(self) -> int:
        return len(self._averages)

    def baselines(self, prompts: Iterable[tuple[str, str | None]]) -> tuple[float, ...]:
        """What to subtract from the rewards of each (prompt id, task). Changes nothing."""
        found = (self._averages.get(self._key(prompt, task)) for prompt, task in prompts)
        return tuple(self.rule.init if a is None else a.baseline(()) for a in found)

    def learn(self, rewards: Sequence[Rewards], *, step: int) -> tuple[Shift, ...]:
        """Learn of a step that is certain, after its baselines were read.

        Errors: SurefootError if a reward is not finite; then nothing was learned.
        """
        rewards = [item for item in rewards if item[2]]
        for prompt, _, values in rewards:
            if not all(math.isfinite(value) for value in values):
                raise SurefootError(
                    f"prompt {prompt} has a reward that is NaN or infinite; a history takes finite "
                    "rewards: leave missing ones out"
                )
        shifts = self._watch(rewards, step)
        gathered: dict[str, list[float]] = {}
        for prompt, task, values in rewards:
            gathered.setdefault(self._key(prompt, task), []).extend(values)
        for key, values in gathered.items():
            average = self._averages.pop(key, None)
            anew = key in shifts and shifts[key].reset
            if average is None or anew:
                average = self._average(own=anew)
            average.update(values)
            self._averages[key] = average
        self._trim()
        return tuple(shifts.values())

    def to_state(self) -> dict[str, Any]:
        """Everything as JSON: from_state of it goes on exactly as this book would.

        Per average a few numbers (mode window: two per batch in the window), per detector at most
        12 batches of a few numbers. At most LIMIT averages; scope prompt has no detectors.
        """
        return {
            "rule": _said(self.rule),
            "averages": [
                [key, a.batches, a.average, [list(batch) for batch in a.recent]]
                for key, a in self._averages.items()
            ],
            "detectors": {key: one.to_state() for key, one in self._detectors.items()},
        }

    @classmethod
    def from_state(cls, rule: History, state: Mapping[str, Any]) -> HistoryBook:
        """The book that was saved; an empty one if another rule made it.

        A run goes on under another rule only where the recipe allows the change by name, and then
        its history starts again. Errors: CheckpointError if the state is of another version.
        """
        book = cls(rule)
        try:
            if state["rule"] != _said(rule):
                return book
            for key, batches, number, recent in state["averages"]:
                average = book._average(own=True)
                average.batches, average.average = batches, number
                average.recent = [(mean, count) for mean, count in recent]
                book._averages[key] = average
            for key, past in state["detectors"].items():
                book._detectors[key] = Detector.from_state(past)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved history does not have the fields of this version ({error}); resume "
                "with the version that wrote it"
            ) from error
        return book

    def _watch(self, rewards: Sequence[Rewards], step: int) -> dict[str, Shift]:
        """The averages that are stale, by their key."""
        if self.rule.scope == "prompt":
            return {}
        streams: dict[str, list[Value]] = {}
        for prompt, task, values in rewards:
            label = None if task in (None, _UNLABELLED) else task
            streams.setdefault(self._key(prompt, task), []).append(Value(values, label))
        found = {}
        for key, batch in streams.items():
            jump = self._detectors.setdefault(key, Detector()).see(batch, step=step)
            if jump is not None:
                found[key] = self._shift(key, jump, step)
        return found

    def _shift(self, key: str, jump: Jump, step: int) -> Shift:
        return Shift(
            step=step,
            since=jump.since,
            scope=self.rule.scope,
            task=jump.label if self.rule.scope != "task" else None if key == _UNLABELLED else key,
            mean=jump.mean,
            before=jump.before,
            z=jump.z,
            reset=self.rule.on_shift == "reset",
        )

    def _key(self, prompt: str, task: str | None) -> str:
        """Which average the rewards of a prompt belong to."""
        if self.rule.scope == "global":
            return _ALL
        if self.rule.scope == "prompt":
            return prompt
        return _UNLABELLED if task is None else task

    def _average(self, *, own: bool) -> MovingAverage:
        """An average without batches; `own` starts at its first batch's mean, not at init."""
        rule = self.rule
        init = None if own else rule.init
        return MovingAverage(rule.mode, rule.decay, init, rule.debias, rule.window)

    def _trim(self) -> None:
        while len(self._averages) > LIMIT:
            oldest = next(iter(self._averages))
            del self._averages[oldest]
            self._detectors.pop(oldest, None)
            self.dropped += 1


def _said(rule: History) -> dict[str, Any]:
    """What decides the numbers; `on_shift` may change while a history goes on."""
    return {key: value for key, value in dataclasses.asdict(rule).items() if key != "on_shift"}
