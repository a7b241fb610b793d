"""What became of the data on its way into a run: counts, and the rows that were left out.

Owns the numbers and the lines printed from them. Refuses to own any decision about a row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from surefoot.data.rows import Quarantined

COUNTS = (
    "rows",
    "quarantined",
    "control_tokens",
    "surrogates",
    "gold_rejected",
    "too_long",
    "duplicates",
    "overlap",
    "train",
    "eval",
)
LOUD_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Counts of rows of one source.

    rows = quarantined + gold_rejected + too_long + overlap + train + eval. `control_tokens` are the
    quarantined rows with a control token; `surrogates` counts strings mended; `duplicates` counts
    rows that ask what an earlier one asks, and that stay. `drawn` says at which steps the source
    takes part (empty: all); `revision` is the commit of a hub's rows.
    """

    source: str
    rows: int
    quarantined: int
    control_tokens: int
    surrogates: int
    gold_rejected: int
    too_long: int
    duplicates: int
    overlap: int
    train: int
    eval: int
    limit: int
    limit_reason: str
    drawn: str
    revision: str | None

    def lines(self) -> list[str]:
        """One line of what was kept, and one for each thing that was not."""
        lines = [f"{self.source}: {self.rows} rows, {self.train} to train on, {self.eval} for eval"]
        if self.revision:
            lines.append(f"  revision {self.revision}")
        if self.drawn:
            lines.append(f"  {self.drawn}")
        if self.too_long:
            share = self.too_long / self.rows
            loud = ". That is a large share: check the limit" if share > LOUD_SHARE else ""
            lines.append(
                f"  {self.too_long} left out ({share:.1%}): longer than {self.limit} tokens "
                f"({self.limit_reason}){loud}"
            )
        notes = {
            "quarantined": "left out: invalid (listed in the quarantine)",
            "control_tokens": "of these for a control token in the prompt",
            "gold_rejected": "left out: their own answer fails their own scorer",
            "overlap": "left out of training: the same prompt is in the eval set",
            "duplicates": "repeat an earlier prompt (kept)",
            "surrogates": "strings had lone surrogates, replaced by U+FFFD",
        }
        counts = asdict(self)
        lines += [f"  {counts[name]} {text}" for name, text in notes.items() if counts[name]]
        return lines


@dataclass(frozen=True, slots=True)
class DataReport:
    """The reports of all sources, and every row left out with its place and reason."""

    sources: tuple[SourceReport, ...]
    quarantine: tuple[Quarantined, ...]

    def counts(self) -> dict[str, int]:
        """Totals over the sources, by the names of `SourceReport`."""
        rows = [asdict(source) for source in self.sources]
        return {name: sum(row[name] for row in rows) for name in COUNTS}

    def lines(self) -> list[str]:
        """What to print before training."""
        return [line for source in self.sources for line in source.lines()]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "sources": [asdict(source) for source in self.sources],
            "quarantine": [asdict(row) for row in self.quarantine],
        }
