"""Several demonstrations in one row, so that no padding is forwarded.

Owns which demonstrations share a row, and where each token of a row belongs.
Refuses to own masks and tensors, and never splits a demonstration.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.data.examples import Demonstration
from surefoot.errors import DataError


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Documents one behind the other, [T] each.

    `positions` start again at 0 with every document. `documents[t]` is the place in this row of
    the document that token t belongs to: a token may see another iff both have the same one.
    `sources` are the indices of the documents in what was packed.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    positions: tuple[int, ...]
    documents: tuple[int, ...]
    sources: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.ids, self.trained, self.positions, self.documents)}
        assert lengths == {len(self.ids)}, lengths
        starts = [index for index, position in enumerate(self.positions) if position == 0]
        assert len(starts) == len(self.sources), (starts, self.sources)
        assert not any(self.trained[start] for start in starts), "a first id is trained"


def pack(demonstrations: Sequence[Demonstration], *, row_tokens: int) -> list[PackedRow]:
    """Rows of at most `row_tokens` tokens that hold every demonstration once.

    Best-fit decreasing: the longest first, each into the fullest row that still takes it, equal
    lengths in the order given. Inside a row and among rows the given order is kept, so equal
    input gives equal rows. DataError for a demonstration that no row takes.
    """
    lengths = [demonstration.length for demonstration in demonstrations]
    for demonstration, length in zip(demonstrations, lengths, strict=True):
        if length > row_tokens:
            raise DataError(
                f"demonstration {demonstration.id} has {length} tokens, more than the {row_tokens} "
                "of a packed row, and none is split. Lower data.max_tokens, or pack longer rows."
            )
    rows: list[list[int]] = []
    # (tokens left, row), ascending: the first that is large enough is the fullest that fits.
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(free, (lengths[index], -1))
        left, row = (row_tokens, len(rows)) if place == len(free) else free.pop(place)
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(free, (left - lengths[index], row))
    ordered = sorted(sorted(row) for row in rows)
    return [_joined(row, demonstrations) for row in ordered]


def _joined(sources: Sequence[int], demonstrations: Sequence[Demonstration]) -> PackedRow:
    parts = [demonstrations[source] for source in sources]
    return PackedRow(
        ids=tuple(id for part in parts for id in part.ids),
        trained=tuple(flag for part in parts for flag in part.trained),
        positions=tuple(place for part in parts for place in range(part.length)),
        documents=tuple(index for index, part in enumerate(parts) for _ in part.ids),
        sources=tuple(sources),
    )
