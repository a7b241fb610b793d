"""The order in which rows are trained on, as a function of the seed and the position alone.

Owns the keyed permutations, the mixing of the sources of a step by weight, the passing over of
prompts outside a solve-rate window, and the cursor.
Refuses to own the rows' content, and what counts as solved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from surefoot import draws
from surefoot.data.schedule import Span
from surefoot.data.window import Window
from surefoot.errors import CheckpointError, RecipeError


class Drawn(Protocol):
    """What a stream hands out: a dataclass with a name, and a place that the stream fills in."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...

    @property
    def position(self) -> int: ...


D = TypeVar("D", bound=Drawn)


@dataclass(frozen=True, slots=True)
class Lane(Generic[D]):
    """One source of a stream: rows, weight, steps, and the solve rates that are kept (or all)."""

    rows: Sequence[D]
    weight: float
    span: Span
    keep: tuple[float, float] | None

    def __post_init__(self) -> None:
        assert self.rows, "a lane needs rows"
        if not self.weight > 0 or self.weight == float("inf"):
            raise RecipeError(
                f"a data source has weight {self.weight}, but must have a finite weight above 0. "
                "Remove the source to leave it out."
            )


class Stream(Generic[D]):
    """An endless keyed order over one or several sources.

    With one source, epoch e visits the rows in `permutation(seed, "stream", n, e)`. With several
    active at a step, the source of position p is `choice(seed, "stream/source", weights, p)` over
    the weights of the active ones, and each source walks through its own permutations at its own
    pace. Positions count prompts taken; rows passed over (`window.py`) have none.
    """

    def __init__(self, lanes: Sequence[Lane[D]], *, seed: int, hash: str) -> None:
        assert lanes, "a stream needs sources"
        self._lanes = tuple(lanes)
        self._seed = seed
        self._hash = hash
        self._position = 0
        self._step = 1
        self._walked = [0] * len(self._lanes)
        self._before = 0
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._windows = tuple(
            None if lane.keep is None else Window(lane.keep, [row.id for row in lane.rows])
            for lane in self._lanes
        )
        self._passed_over = self._refills = 0

    def __len__(self) -> int:
        """Rows of one epoch, all sources together."""
        return sum(len(lane.rows) for lane in self._lanes)

    @property
    def rows(self) -> list[D]:
        """Every row of every source, in their own order."""
        return [row for lane in self._lanes for row in lane.rows]

    @property
    def position(self) -> int:
        """Prompts taken so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """Whole passes over the source, of those active at this step, that had the fewest."""
        return min(self._walked[index] // len(self._lanes[index].rows) for index in self._active())

    @property
    def passed_over(self) -> int:
        """Rows passed over in this step (all its takes) because of their solve rate."""
        return self._passed_over

    @property
    def refills(self) -> int:
        """How often in this step a source had no prompt left inside, and all were taken again."""
        return self._refills

    @property
    def active_rows(self) -> int:
        """Rows of the sources that are active at the last step taken for."""
        return sum(len(self._lanes[index].rows) for index in self._active())

    def take(self, prompts: int, *, step: int) -> list[D]:
        """The next P prompts for a step (from 1), each with its position; epochs run on."""
        assert prompts >= 0 and step >= 1, (prompts, step)
        if step != self._step:
            self._step = step
            self._passed_over = self._refills = 0
        active = self._active()
        assert active, f"no source is active at step {step}"
        return [self._next(active) for _ in range(prompts)]

    def observe(self, outcomes: Mapping[str, tuple[int, int]]) -> None:
        """What prompts that were taken gave: id -> (solved, tried).

        Kept for sources with a window; a prompt with nothing tried stays as it was.
        """
        for id, (solved, tried) in outcomes.items():
            for window in self._windows:
                if window is not None and id in window:
                    window.observe(id, solved, tried)

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON.

        `counts` are the rows walked over in each source, `before` the positions taken from other
        sources: sum(counts) + before = position + passed_over.
        """
        return {
            "position": self._position,
            "step": self._step,
            "counts": list(self._walked),
            "sizes": [len(lane.rows) for lane in self._lanes],
            "before": self._before,
            "passed_over": sum(self._walked) + self._before - self._position,
            "solved": [None if window is None else window.text() for window in self._windows],
            "hash": self._hash,
        }

    def restore(self, cursor: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Go to a cursor of this data; CheckpointError if it is of other data, or damaged.

        `other_data`: the rows may be others. The position stays, each source is as far through its
        rows as its namesake was (from the start if there are more or fewer sources), and what was
        solved is forgotten.
        """
        # Without `before` it is of a release that had none: no position was taken elsewhere.
        missing = self.cursor().keys() - cursor.keys() - {"before"}
        if missing:
            raise CheckpointError(
                f"the stream's cursor lacks {', '.join(sorted(missing))}: the checkpoint's state "
                "is damaged, or of another version. Resume from an older checkpoint, or start a "
                "new run directory."
            )
        if not other_data:
            self._check_same_data(cursor)
        counts = [int(count) for count in cursor["counts"]]
        position, passed = int(cursor["position"]), int(cursor["passed_over"])
        before = int(cursor.get("before", 0))
        sound = len(counts) == len(cursor["solved"]) == len(cursor["sizes"])
        adds_up = sum(counts) + before == position + passed
        if not sound or not adds_up or min(*counts, position, passed, before) < 0:
            raise CheckpointError(
                f"the stream's cursor counts {counts} and {before} before do not add up to "
                f"position {position} and {passed} passed over: the checkpoint's state is damaged. "
                "Resume from an older checkpoint."
            )
        if other_data and len(counts) != len(self._lanes):
            counts, before = [0] * len(self._lanes), position
        for index, window in enumerate(self._windows):
            if window is not None:
                # A window that the recipe was allowed to add starts without counts.
                window.restore("" if other_data else cursor["solved"][index] or "")
        self._walked = counts
        self._before = before
        self._position = position
        self._step = int(cursor["step"])
        self._passed_over = self._refills = 0

    def _check_same_data(self, cursor: Mapping[str, Any]) -> None:
        sizes = [len(lane.rows) for lane in self._lanes]
        if cursor["sizes"] != sizes:
            raise CheckpointError(
                f"the data changed since the checkpoint: its sources had {cursor['sizes']} rows, "
                f"now they have {sizes}. Restore the data, or start a new run directory."
            )
        if cursor["hash"] != self._hash:
            raise CheckpointError(
                f"the data changed since the checkpoint: its hash was {cursor['hash'][:16]}, now "
                f"it is {self._hash[:16]}, with as many rows. A row, the tokenizer or the template "
                "differs. Restore it, or start a new run directory."
            )

    def _active(self) -> list[int]:
        return [index for index, lane in enumerate(self._lanes) if lane.span.holds(self._step)]

    def _next(self, active: Sequence[int]) -> D:
        source = active[0]
        if len(active) > 1:
            weights = [self._lanes[index].weight for index in active]
            chosen = draws.choice(self._seed, "stream/source", weights, self._position)
            source = active[chosen]
        prompt = self._walk(source)
        taken = replace(prompt, position=self._position)
        self._position += 1
        return taken

    def _walk(self, source: int) -> D:
        """The next row of a source that is not passed over."""
        rows, window = self._lanes[source].rows, self._windows[source]
        if window is not None and window.empty:
            window.forget()
            self._refills += 1
        while True:
            epoch, place = divmod(self._walked[source], len(rows))
            row = int(self._order(source, epoch)[place])
            self._walked[source] += 1
            if window is None or window.takes(row):
                return rows[row]
            self._passed_over += 1

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            purpose = "stream" if source == 0 else f"stream/{source}"
            size = len(self._lanes[source].rows)
            cached = epoch, draws.permutation(self._seed, purpose, size, epoch)
            self._orders[source] = cached
        return cached[1]
