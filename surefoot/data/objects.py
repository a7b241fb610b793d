"""The `rows` source: dictionaries passed from Python instead of a file.

Owns the numbering of the rows in messages. Refuses to own the checks, which are those of a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.data.rows import ColumnMap, Sieve, parse_rows
from surefoot.data.source import Loaded, Request, Source
from surefoot.errors import DataError, RecipeError


def load(request: Request, sieve: Sieve) -> Loaded:
    """The rows passed as `data`, checked as the lines of a file are; no split of its own."""
    spec = request.spec
    if request.objects is None:
        raise RecipeError(
            f"{request.key}.source is 'rows', but no rows were passed. Pass them from Python as "
            "surefoot.train(recipe, data=rows), or name a file or a source."
        )
    if spec.task is not None and "task" in spec.columns:
        raise RecipeError(
            f"{request.key}.task and {request.key}.columns.task both label the rows. Keep one."
        )
    if isinstance(request.objects, str | bytes | Mapping):
        raise DataError(
            f"data is a {type(request.objects).__name__}, but must be a list of rows, each a "
            "mapping of column names to values."
        )
    items = ((f"data[{index}]", row) for index, row in enumerate(request.objects))
    columns = ColumnMap.of(spec.columns, key=request.key)
    rows = parse_rows(items, columns, sieve, task=spec.task)
    if sieve.seen == 0:
        raise DataError("data is empty: it has no rows.")
    return Loaded(rows, None)


SOURCE = Source(name="rows", splits=False, options={}, reads=frozenset({"columns"}), load=load)
