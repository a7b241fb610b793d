"""What became of demonstrations, pairs, labels and rankings on their way into a run.

Owns the counts and the lines printed from them. Refuses to own any decision about a row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from surefoot.data.report import LOUD_SHARE
from surefoot.data.rows import Quarantined

COUNTS = (
    "rows",
    "quarantined",
    "control_tokens",
    "surrogates",
    "gold_rejected",
    "tied",
    "too_long",
    "duplicates",
    "overlap",
    "apart",
    "train",
    "eval",
    "examples",
    "tokens",
    "trained_tokens",
)


@dataclass(frozen=True, slots=True)
class ExampleSourceReport:
    """Counts of rows of one source.

    rows = quarantined + gold_rejected + tied + too_long + overlap + train + eval. `tied` rows have
    equal answers; `duplicates` give the very tokens of an earlier row, and stay; `apart` rows had
    prompt and answer tokenised apart. `examples`, `tokens` and `trained_tokens` are those of one
    pass over the training rows.
    """

    source: str
    kind: str
    rows: int
    quarantined: int
    control_tokens: int
    surrogates: int
    gold_rejected: int
    tied: int
    too_long: int
    duplicates: int
    overlap: int
    apart: int
    train: int
    eval: int
    examples: int
    tokens: int
    trained_tokens: int
    limit: int
    limit_reason: str
    drawn: str
    revision: str | None

    def lines(self) -> list[str]:
        """One line of what was kept, and one for each thing that was not."""
        lines = [
            f"{self.source}: {self.rows} rows, {self.train} to train on, {self.eval} for eval",
            f"  {self.examples} {self.kind}, {self.tokens} tokens, {self.trained_tokens} trained",
        ]
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
            "control_tokens": "of these for a control token in a text",
            "gold_rejected": "left out: their own answer fails their own scorer",
            "tied": "left out: two of their answers are the same tokens",
            "overlap": "left out of training: the same prompt is in the eval set",
            "duplicates": "repeat an earlier row (kept)",
            "apart": "had a token across prompt and answer, so the two were tokenised apart",
            "surrogates": "strings had lone surrogates, replaced by U+FFFD",
        }
        counts = asdict(self)
        lines += [f"  {counts[name]} {text}" for name, text in notes.items() if counts[name]]
        return lines


@dataclass(frozen=True, slots=True)
class ExampleReport:
    """The reports of all sources, and every row left out with its place and reason."""

    sources: tuple[ExampleSourceReport, ...]
    quarantine: tuple[Quarantined, ...]

    def counts(self) -> dict[str, int]:
        """Totals over the sources, by the names of `ExampleSourceReport`."""
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
