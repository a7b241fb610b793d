"""The file source: JSON lines, plain or gzipped, or one JSON array.

Owns the reading of a file line by line with the place of every row, and the refusal of broken
lines. Refuses to own what the columns mean, and every format that can carry code.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from surefoot.data.files import locate
from surefoot.data.options import Option
from surefoot.data.rows import BadRow, Sieve
from surefoot.data.source import ROW_OPTIONS, Items, Loaded, Request, Source, checked_rows
from surefoot.errors import DataError

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_SKIP = 1 << 16


def load(request: Request, sieve: Sieve) -> Loaded:
    """The file's rows, checked; no split of its own."""
    return checked_rows(request, raw(request), sieve)


def raw(request: Request) -> Items:
    """The file's rows as they are."""
    path = locate(request.spec.source, request.base_dir, key=request.key)
    items = read_items(path, max_line_bytes=request.options["max_line_bytes"])
    return Items(items, f"{path} is empty: it has no rows. Write one JSON object a line.")


def read_items(path: Path, *, max_line_bytes: int) -> Iterator[tuple[str, object]]:
    """(place, row or BadRow) for every line that is not blank, or for every array element.

    A file whose first character is `[` is one JSON array. A gzip stream that breaks off, or a file
    that cannot be read, is a DataError even for a forgiving source: rows are lost without a count.
    """
    try:
        with _open(path) as file:
            if _is_array(file):
                yield from _array_items(file, path)
            else:
                yield from _line_items(file, path, max_line_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _is_array(file: IO[bytes]) -> bool:
    first = file.read(_SKIP).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    file.seek(0)
    return first == b"["


def _line_items(file: IO[bytes], path: Path, max_line_bytes: int) -> Iterator[tuple[str, object]]:
    number = 0
    while line := file.readline(max_line_bytes + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        place = f"{path}:{number}"
        if len(line) > max_line_bytes and not line.endswith(b"\n"):
            size = len(line) + _skip_line(file)
            yield (
                place,
                BadRow(f"the line has {size} bytes, more than max_line_bytes {max_line_bytes}"),
            )
        elif line.strip():
            yield place, _parse(line)


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while part := file.readline(_SKIP):
        skipped += len(part.rstrip(b"\n"))
        if part.endswith(b"\n"):
            break
    return skipped


def _array_items(file: IO[bytes], path: Path) -> Iterator[tuple[str, object]]:
    value = _parse(file.read())
    if isinstance(value, BadRow):
        raise DataError(f"{path}: {value.reason}. A file that starts with [ is one JSON array.")
    assert isinstance(value, list), type(value)
    for number, element in enumerate(value, start=1):
        yield f"{path}: element {number}", element


def _parse(line: bytes) -> object:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 at byte {error.start + 1}")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON at column {error.pos + 1}: {error.msg}")
    except BadRow as problem:
        return problem
    except RecursionError:
        return BadRow("malformed JSON: nested too deeply")
    except ValueError as error:
        return BadRow(f"malformed JSON: {error}")


def _no_constant(name: str) -> Any:
    raise BadRow(f"malformed JSON: {name} is not a JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"malformed JSON: key {twin!r} appears twice in one object")
    return result


SOURCE = Source(
    name="jsonl",
    splits=False,
    options={**ROW_OPTIONS, "max_line_bytes": Option(int, 1 << 20, at_least=1)},
    reads=frozenset({"columns"}),
    load=load,
    raw=raw,
)
