"""Writing files that are either whole or absent, and values that are always valid JSON.

Owns the atomic write (temporary file, fsync, rename, fsync of the directory) and the JSON dialect
of a run directory. Refuses to own any layout: names and places belong to `directory`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np


def fsync_directory(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; a crash at any moment leaves the old file or the new one.

    Raises OSError when the disk refuses; the old file is then untouched.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text; lone surrogates become U+FFFD."""
    atomic_write_bytes(path, valid_text(text).encode())


def atomic_write_json(path: Path, value: Any) -> None:
    """`atomic_write_text` of indented JSON in the dialect of `plain`."""
    atomic_write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def valid_text(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD, so that it can be written as UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain(value: Any, where: str = "value") -> Any:
    """`value` as what JSON has: NaN and infinities become null, numpy scalars become numbers.

    Raises TypeError naming the place of anything else (a tensor, an open file).
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value, where)
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {valid_text(str(key)): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return valid_text(os.fspath(value))
    raise TypeError(f"{where} is a {type(value).__name__}, which the ledger cannot write as JSON")


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of a JSONL file, newline included; keys keep their order."""
    return json.dumps(plain(row, "row"), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The row on one line of a JSONL file, or None when the line is torn or foreign."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
