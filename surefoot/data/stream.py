"""The order in which prompts are trained on, as a function of the seed and the position alone.

Owns the keyed permutations, the mixing of several sources by weight, and the cursor.
Refuses to own the rows' content and every notion of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot import draws
from surefoot.errors import CheckpointError, RecipeError
from surefoot.records import Prompt


class Stream:
    """An endless keyed order over one or several sources.

    With one source, epoch e visits the rows in `permutation(seed, "stream", n, e)`. With several,
    the source of position p is `choice(seed, "stream/source", weights, p)`, and each source walks
    through its own permutations at its own pace.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Prompt]],
        *,
        weights: Sequence[float],
        seed: int,
        hash: str,
    ) -> None:
        assert sources and all(sources), "a stream needs sources with rows"
        assert len(sources) == len(weights), (len(sources), len(weights))
        for weight in weights:
            if not weight > 0 or weight == float("inf"):
                raise RecipeError(
                    f"a data source has weight {weight}, but must have a finite weight above 0. "
                    "Remove the source to leave it out."
                )
        self._sources = tuple(tuple(rows) for rows in sources)
        self._weights = tuple(float(weight) for weight in weights)
        self._seed = seed
        self._hash = hash
        self._counts = [0] * len(self._sources)
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        """Rows of one epoch, all sources together."""
        return sum(len(rows) for rows in self._sources)

    @property
    def position(self) -> int:
        """Prompts taken so far."""
        return sum(self._counts)

    @property
    def epoch(self) -> int:
        """Whole passes over the source that was passed over least often."""
        passes = (
            count // len(rows) for count, rows in zip(self._counts, self._sources, strict=True)
        )
        return min(passes)

    def take(self, prompts: int) -> list[Prompt]:
        """The next P prompts, each with its position; crosses into the next epoch where it must."""
        assert prompts >= 0, prompts
        return [self._next() for _ in range(prompts)]

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return {
            "position": self.position,
            "counts": list(self._counts),
            "sizes": [len(rows) for rows in self._sources],
            "hash": self._hash,
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Go to a cursor of this data; CheckpointError if it is of other data, or damaged."""
        missing = {"position", "counts", "sizes", "hash"} - cursor.keys()
        if missing:
            raise CheckpointError(
                f"the stream's cursor lacks {', '.join(sorted(missing))}: the checkpoint's state "
                "is damaged. Resume from an older checkpoint."
            )
        sizes = [len(rows) for rows in self._sources]
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
        counts = [int(count) for count in cursor["counts"]]
        if len(counts) != len(sizes) or min(counts) < 0 or sum(counts) != cursor["position"]:
            raise CheckpointError(
                f"the stream's cursor counts {counts} do not add up to position "
                f"{cursor['position']}: the checkpoint's state is damaged. Resume from an older "
                "checkpoint."
            )
        self._counts = counts

    def _next(self) -> Prompt:
        position = self.position
        source = 0
        if len(self._sources) > 1:
            source = draws.choice(self._seed, "stream/source", self._weights, position)
        rows = self._sources[source]
        epoch, place = divmod(self._counts[source], len(rows))
        prompt = rows[self._order(source, epoch)[place]]
        self._counts[source] += 1
        return replace(prompt, position=position)

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            purpose = "stream" if source == 0 else f"stream/{source}"
            size = len(self._sources[source])
            cached = epoch, draws.permutation(self._seed, purpose, size, epoch)
            self._orders[source] = cached
        return cached[1]
