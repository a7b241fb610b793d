"""What became of demonstrations, pairs, labels and rankings on their way into a run.

Owns the counts and the lines printed from them. Refuses to own any decision about a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.data.report import Report, told

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
        head = [
            f"{self.source}: {self.rows} rows, {self.train} to train on, {self.eval} for eval",
            f"  {self.examples} {self.kind}, {self.tokens} tokens, {self.trained_tokens} trained",
        ]
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
        return head + told(self, notes)


class ExampleReport(Report[ExampleSourceReport]):
    """Of demonstrations, pairs, labels or rankings."""

    __slots__ = ()
    names = COUNTS
