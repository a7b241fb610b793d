"""What an audit found: findings with their mends, tables, figures, and the verdict over them.

Owns the forms of a finding and of a report, and how both are printed, written as JSON and shown
on a page. Refuses to own any check: each decides for itself how bad what it found is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from surefoot.errors import DataError
from surefoot.report.page import (
    Bars,
    Grid,
    Histogram,
    Item,
    Page,
    Part,
    Section,
    Tone,
    readable,
    write_page,
)

JSON_NAME, PAGE_NAME = "audit.json", "audit.html"
# A cell of the printed table; the page has all of it.
_CELL = 60


class Severity(StrEnum):
    """How bad: nothing, worth knowing, to be changed before a run, or no run on this."""

    OK = "ok"
    INFO = "info"
    CHANGE = "change"
    STOP = "stop"


_ORDER = (Severity.STOP, Severity.CHANGE, Severity.INFO, Severity.OK)
_VERDICTS: Mapping[Severity, str] = {Severity.STOP: "stop", Severity.CHANGE: "go with changes"}
_TONES: Mapping[Severity, Tone] = {
    Severity.STOP: "bad",
    Severity.CHANGE: "warn",
    Severity.INFO: "note",
    Severity.OK: "good",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: the sentence, what to do about it, and the numbers behind it."""

    check: str
    severity: Severity
    text: str
    mend: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row has {len(row)} cells, not {len(self.columns)}"
                )


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All that an audit of `subject` found; `kind` is what was audited, "data" or "reward".

    A value of `figures` that maps `edges` and `counts` is drawn as a histogram, one that maps
    `bars` to {label: value} as bars; `title` and `caption` beside them are shown with it.
    """

    kind: str
    subject: str
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """go, go with changes, or stop: the worst finding decides."""
        return _VERDICTS.get(self._worst(), "go")

    def lines(self) -> list[str]:
        """The verdict, the findings from the worst down, then the tables; plain text."""
        lines = [f"{self.verdict.upper()}: audit of {self.kind} {_line(self.subject)}"]
        for finding in self._sorted():
            lines.append(f"  {finding.severity:<6} {finding.check}: {_line(finding.text)}")
            if finding.mend:
                lines.append(f"         mend: {_line(finding.mend)}")
        for table in self.tables:
            lines += ["", *_columns(table)]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON data: no lone surrogate, no NaN; a missing number is null."""
        return {
            "kind": self.kind,
            "subject": _plain(self.subject),
            "verdict": self.verdict,
            "findings": [
                {
                    "check": finding.check,
                    "severity": str(finding.severity),
                    "text": _plain(finding.text),
                    "mend": _plain(finding.mend),
                    "figures": _plain(finding.figures),
                }
                for finding in self._sorted()
            ],
            "tables": [
                {
                    "title": _plain(table.title),
                    "columns": _plain(table.columns),
                    "rows": _plain(table.rows),
                }
                for table in self.tables
            ],
            "figures": _plain(self.figures),
        }

    def write(self, folder: Path) -> tuple[Path, Path]:
        """audit.json and audit.html in `folder`, which is made; an earlier audit is replaced."""
        data, page = folder / JSON_NAME, folder / PAGE_NAME
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data.write_text(text + "\n", encoding="utf-8", newline="\n")
            return data, write_page(page, self._page())
        except OSError as error:
            raise DataError(
                f"--out: {str(folder)!r:.200} cannot be written ({error.strerror}); name another "
                "directory"
            ) from error

    def _worst(self) -> Severity:
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in _ORDER if severity in found), Severity.OK)

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: _ORDER.index(finding.severity))

    def _page(self) -> Page:
        items: tuple[Part, ...] = tuple(
            Item(
                f"{finding.severity} · {finding.check}",
                _TONES[finding.severity],
                (finding.text, f"Mend: {finding.mend}" if finding.mend else ""),
            )
            for finding in self._sorted()
        )
        pictures = tuple(
            picture
            for name, value in self.figures.items()
            if (picture := _picture(name, value)) is not None
        )
        grids: tuple[Part, ...] = tuple(
            Grid(table.title, table.columns, table.rows) for table in self.tables
        )
        sections = [Section("Findings", items)]
        sections += [Section("Pictures", pictures)] if pictures else []
        sections += [Section("Tables", grids)] if grids else []
        return Page(
            title=f"Audit of {self.kind}: {self.subject}",
            verdict=f"Verdict: {self.verdict}",
            tone=_TONES[self._worst()],
            sections=tuple(sections),
            footer=f"surefoot audit {self.kind}; the same facts are in {JSON_NAME}",
        )


def _picture(name: str, value: Any) -> Part | None:
    if not isinstance(value, Mapping):
        return None
    title, caption = str(value.get("title", name)), str(value.get("caption", ""))
    if {"edges", "counts"} <= value.keys():
        edges, counts = map(float, value["edges"]), map(float, value["counts"])
        return Histogram(title, tuple(edges), tuple(counts), caption)
    if isinstance(value.get("bars"), Mapping):
        bars = ((str(label), float(number)) for label, number in value["bars"].items())
        return Bars(title, tuple(bars))
    return None


def _line(text: str) -> str:
    return " ".join(readable(text).split())


def _columns(table: Table) -> list[str]:
    """The table with its columns below each other."""
    rows = [tuple(_cell(cell) for cell in row) for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [_line(table.title), lines[0], "  " + "  ".join("-" * w for w in widths), *lines[1:]]


def _cell(text: str) -> str:
    line = _line(text[: 4 * _CELL])
    return line if len(line) <= _CELL else line[: _CELL - 1] + "…"


def _plain(value: Any) -> Any:
    """`value` as JSON holds it: numpy's numbers made Python's, text made UTF-8."""
    if isinstance(value, str):
        return _utf8(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return _utf8(str(value))


def _utf8(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)
