"""What became of the data on its way into a run: counts, and the rows that were left out.

Owns the numbers and the lines printed from them. Refuses to own any decision about a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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
        head = f"{self.source}: {self.rows} rows, {self.train} to train on, {self.eval} for eval"
        notes = {
            "quarantined": "left out: invalid (listed in the quarantine)",
            "control_tokens": "of these for a control token in the prompt",
            "gold_rejected": "left out: their own answer fails their own scorer",
            "overlap": "left out of training: the same prompt is in the eval set",
            "duplicates": "repeat an earlier prompt (kept)",
            "surrogates": "strings had lone surrogates, replaced by U+FFFD",
        }
        return [head, *told(self, notes)]


class Counted(Protocol):
    """What the report of a source of any kind holds."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rows(self) -> int: ...
    @property
    def too_long(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def limit_reason(self) -> str: ...
    @property
    def drawn(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    def lines(self) -> list[str]: ...


def told(source: Counted, notes: Mapping[str, str]) -> list[str]:
    """A line for each thing that was not kept, or that is to be known; `notes` by count."""
    lines = [f"  revision {source.revision}"] if source.revision else []
    lines += [f"  {source.drawn}"] if source.drawn else []
    if source.too_long:
        share = source.too_long / source.rows
        loud = ". That is a large share: check the limit" if share > LOUD_SHARE else ""
        lines.append(
            f"  {source.too_long} left out ({share:.1%}): longer than {source.limit} tokens "
            f"({source.limit_reason}){loud}"
        )
    counts = asdict(source)
    return lines + [f"  {counts[name]} {text}" for name, text in notes.items() if counts[name]]


S = TypeVar("S", bound=Counted)


@dataclass(frozen=True, slots=True)
class Report(Generic[S]):
    """The reports of all sources, and every row left out with its place and reason."""

    sources: tuple[S, ...]
    quarantine: tuple[Quarantined, ...]
    names: ClassVar[tuple[str, ...]]
    """The counts that add up over sources."""

    def counts(self) -> dict[str, int]:
        """Totals over the sources, by the names of their reports."""
        rows = [asdict(source) for source in self.sources]
        return {name: sum(row[name] for row in rows) for name in self.names}

    def lines(self) -> list[str]:
        """What to print before training."""
        return [line for source in self.sources for line in source.lines()]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "sources": [asdict(source) for source in self.sources],
            "quarantine": [asdict(row) for row in self.quarantine],
        }


class DataReport(Report[SourceReport]):
    """Of prompts."""

    __slots__ = ()
    names = COUNTS
