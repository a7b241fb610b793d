"""Where a file or a directory of data is: from the recipe's directory, or from here.

Owns the place that `data.source` names and what to say when nothing is there.
Refuses to own what is inside; each format has its own reader.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import DataError

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")


def resolved(source: str, base_dir: Path | None) -> Path:
    """The path that `source` means; a relative one starts at the recipe's directory."""
    path = Path(source).expanduser()
    return path if path.is_absolute() or base_dir is None else base_dir / path


def locate(source: str, base_dir: Path | None, *, key: str) -> Path:
    """The file that `source` names; DataError if there is none."""
    path = resolved(source, base_dir)
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"{key}.source: {path} is a directory. Name one file in it.")
    beside = sorted(p.name for p in path.parent.glob("*") if p.name.endswith(SUFFIXES))
    there = f" Files there: {', '.join(beside[:5])}." if beside else ""
    raise DataError(
        f"{key}.source: there is no file {path}.{there} A relative path starts at the recipe's "
        "directory, or at the working directory without a recipe file."
    )
