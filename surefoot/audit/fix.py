"""The cleaned file, and the list of what was left out or changed, and why.

Owns writing: kept lines keep their bytes, and nothing that exists is written over.
Refuses to own the choice of rows; the checks make it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from surefoot.audit.reading import Raw, exchanged, number_of
from surefoot.data.rows import clean
from surefoot.errors import DataError

REMOVED = ".removed.jsonl"


@dataclass(frozen=True, slots=True)
class Mend:
    """What is done with one row: its place, its id where it has one, the check, and the reason."""

    where: str
    id: str | None
    check: str
    reason: str
    action: Literal["removed", "swapped"] = "removed"
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The files that were written, and the numbers of rows kept as they are, changed, left out."""

    file: Path
    list: Path
    kept: int
    swapped: int
    removed: int

    def figures(self) -> dict[str, object]:
        numbers = {"kept": self.kept, "swapped": self.swapped, "removed": self.removed}
        return {"file": str(self.file), "list": str(self.list), **numbers}

    def line(self) -> str:
        return (
            f"wrote {self.file}: {self.kept} rows as they were, {self.swapped} swapped, "
            f"{self.removed} left out (listed in {self.list})"
        )


def refuse_existing(target: Path) -> None:
    """DataError where a file that would be written is there already."""
    for path in (target, Path(f"{target}{REMOVED}")):
        if path.exists():
            raise DataError(f"--fix: {path} exists already. Name a file that does not.")
    if not target.parent.is_dir():
        raise DataError(f"--fix: there is no directory {target.parent}. Make it first.")


def fix(raw: Raw, mends: Iterable[Mend], target: Path) -> Fixed:
    """Write `target` without the rows of `mends`, and beside it the list of them.

    The first mend of a row counts. Lines of JSON that stay have the bytes they had; rows of other
    formats are written as lines of JSON. A target that ends with .gz is compressed.
    """
    refuse_existing(target)
    first: dict[str, Mend] = {}
    for mend in mends:
        first.setdefault(mend.where, mend)
    swapped = sum(mend.action == "swapped" for mend in first.values())
    removed = len(first) - swapped
    kept = len(raw.items) - len(first)
    if kept + swapped == 0:
        raise DataError(f"--fix: nothing of {raw.path} would be left. No file was written.")
    listing = Path(f"{target}{REMOVED}")
    with _writer(target) as out:
        for line in _lines(raw, first):
            out.write(line)
    with listing.open("xb") as out:
        for where, _ in raw.items:
            if where in first:
                out.write(_listed(first[where]))
    return Fixed(target, listing, kept, swapped, removed)


def _reader(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _writer(target: Path) -> IO[bytes]:
    return gzip.open(target, "xb") if target.name.endswith(".gz") else target.open("xb")


def _lines(raw: Raw, mends: Mapping[str, Mend]) -> Iterator[bytes]:
    lines = _file_lines(raw)
    for where, row in raw.items:
        mend = mends.get(where)
        if mend is None:
            yield (_json(row) if lines is None else lines[number_of(where)])
        elif mend.action == "swapped":
            assert isinstance(row, Mapping), where
            yield _json(exchanged(row, raw.columns))


def _file_lines(raw: Raw) -> dict[int, bytes] | None:
    """The bytes of each line by its number; None for a format that is not lines of JSON."""
    name = raw.path.name
    is_text = name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz"))
    if not is_text or raw.items[0][0] == f"{raw.path}: element 1":
        return None
    with _reader(raw.path) as file:
        found = dict(enumerate(file, start=1))
    last = max(found)
    if not found[last].endswith(b"\n"):
        found[last] += b"\n"
    return found


def _json(row: object) -> bytes:
    plain, _ = clean(row, "")
    return json.dumps(plain, ensure_ascii=False).encode() + b"\n"


def _listed(mend: Mend) -> bytes:
    row = {
        "row": number_of(mend.where),
        "where": mend.where,
        "id": mend.id,
        "action": mend.action,
        "check": mend.check,
        "reason": mend.reason,
        "figures": dict(mend.figures),
    }
    plain, _ = clean(row, "")
    return json.dumps(plain, ensure_ascii=False).encode() + b"\n"
