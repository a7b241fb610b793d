"""The columnar file source: Parquet, and Arrow files and streams.

Owns the reading of a file in batches with the number of every row.
Refuses to own what the columns mean, and directories of files (`hub.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot.data.files import locate
from surefoot.data.rows import Sieve
from surefoot.data.source import ROW_OPTIONS, Items, Loaded, Request, Source, checked_rows
from surefoot.errors import DataError

SUFFIXES = (".parquet", ".arrow")
BATCH = 1024
# Earlier ones unpickle what a file's schema brings.
_OLDEST_PYARROW = 15


def load(request: Request, sieve: Sieve) -> Loaded:
    """The file's rows, checked; no split of its own."""
    return checked_rows(request, raw(request), sieve)


def raw(request: Request) -> Items:
    """The file's rows as they are."""
    path = locate(request.spec.source, request.base_dir, key=request.key)
    return Items(read_items(path), f"{path} is empty: it has no rows.")


def read_items(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) for every row, numbered from 1; DataError for a file that is not whole."""
    pyarrow = package(f"{path.suffix} files")
    with _whole(path, pyarrow.lib.ArrowException):
        if path.suffix.lower() == ".parquet":
            file = importlib.import_module("pyarrow.parquet").ParquetFile(path)
            names, batches = file.schema_arrow.names, file.iter_batches(BATCH, use_threads=False)
        else:
            names, batches = _arrow_batches(pyarrow, path)
        yield from numbered(batches, names=names, place=str(path))


def numbered(
    batches: Iterable[Any], *, names: list[str], place: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, row) of record batches or tables, as plain Python values, numbered from 1."""
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise DataError(f"{place}: column {twins[0]!r} appears twice. Rename one of the two.")
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{place}: row {number}", row


def package(what: str) -> Any:
    """The module pyarrow; DataError naming the extra if it is absent or too old to be safe."""
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(
            f"{what} need the package pyarrow, which is not installed. Install it with: "
            "pip install 'surefoot[data]'"
        ) from error
    if int(pyarrow.__version__.partition(".")[0]) < _OLDEST_PYARROW:
        raise DataError(
            f"{what} need pyarrow {_OLDEST_PYARROW} or newer; {pyarrow.__version__} may run code "
            "that a file brings. Update it with: pip install 'surefoot[data]'"
        )
    return pyarrow


def _arrow_batches(pyarrow: Any, path: Path) -> tuple[list[str], Iterator[Any]]:
    """Names and batches of an Arrow file, or of a stream, which the datasets library writes."""
    ipc = importlib.import_module("pyarrow.ipc")
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    source = pyarrow.memory_map(str(path))
    if is_file:
        reader = ipc.open_file(source)
        count = reader.num_record_batches
        return reader.schema.names, (reader.get_batch(index) for index in range(count))
    reader = ipc.open_stream(source)
    return reader.schema.names, iter(reader)


@contextmanager
def _whole(path: Path, broken: type[Exception]) -> Iterator[None]:
    try:
        yield
    except broken as error:
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        raise DataError(
            f"{path} is not a whole {kind} file ({error}). Fetch or write it again."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


SOURCE = Source(
    name="arrow",
    splits=False,
    options=ROW_OPTIONS,
    reads=frozenset({"columns"}),
    load=load,
    raw=raw,
)
