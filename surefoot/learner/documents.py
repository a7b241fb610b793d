"""Documents as the rows of a forward pass: padded, or several in a row that do not see each other.

Owns the layout of demonstrations, where the trained tokens lie anywhere in a document.
Refuses to own which documents share a row (`data`), groups that share a prompt (`layouts`) and the
loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.learner.layouts import Bundle, Microbatch


@dataclass(frozen=True)
class Document:
    """Token ids, which of them are trained, and the document's place in the batch.

    Nothing foretells the first token, so it is never trained.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    row: int

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.trained) >= 2, (len(self.ids), len(self.trained))

    @property
    def read(self) -> int:
        """Tokens that are inputs: all but the last."""
        return len(self.ids) - 1

    @property
    def scored(self) -> int:
        return sum(self.trained[1:])


Line = Sequence[Document]
"""Documents that share a row, in order."""


def line_width(line: Line) -> int:
    """Positions of a row that a line takes."""
    return sum(document.read for document in line)


def document_passes(lines: Sequence[Line], *, budget: int) -> list[Microbatch]:
    """Lay lines out in passes of at most `budget` positions each; a single line may exceed it.

    Lines of similar width share a pass, so that little is padded. Documents without a trained token
    are not forwarded; a line of such documents is left out.
    """
    wanted = [[document for document in line if document.scored] for line in lines]
    ordered = sorted(filter(None, wanted), key=lambda line: (-line_width(line), line[0].row))
    parts: list[list[Line]] = []
    for line in ordered:
        if parts and (len(parts[-1]) + 1) * line_width(parts[-1][0]) <= budget:
            parts[-1].append(line)
        else:
            parts.append([line])
    return [_laid_out(part) for part in parts]


def _laid_out(lines: Sequence[Line]) -> Microbatch:
    width = line_width(lines[0])
    ids = torch.zeros(len(lines), width, dtype=torch.long)
    positions = torch.arange(width).repeat(len(lines), 1)
    segment = torch.full_like(ids, -1)
    scored: list[tuple[int, int, int, int]] = []
    for r, line in enumerate(lines):
        at = 0
        for number, document in enumerate(line):
            end = at + document.read
            ids[r, at:end] = torch.tensor(document.ids[:-1])
            positions[r, at:end] = torch.arange(document.read)
            segment[r, at:end] = number
            scored.extend(
                (document.row, t, document.ids[t], r * width + at + t - 1)
                for t in range(1, len(document.ids))
                if document.trained[t]
            )
            at = end
    rows, columns, targets, places = torch.tensor(scored, dtype=torch.long).T.contiguous()
    bundles = tuple(
        Bundle(document.ids[:1], (document.ids[1:],), (document.row,))
        for line in lines
        for document in line
    )
    shared = any(len(line) > 1 for line in lines)
    mask = None
    if shared:
        index = torch.arange(width)
        # Padding sees its own segment only, itself included: no query is left without a key.
        same = segment[:, :, None] == segment[:, None, :]
        mask = (index[:, None] >= index[None, :]) & same
    layout = "packed" if shared else "rows"
    return Microbatch(layout, rows, columns, targets, places, bundles, ids, positions, mask)
