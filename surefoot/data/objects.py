"""The `rows` source: rows passed from Python instead of a file, a list or a dataset object.

Owns which source reads which argument, and the numbering of the rows in messages.
Refuses to own the checks, which are those of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.data.rows import Sieve
from surefoot.data.source import (
    ROW_OPTIONS,
    Items,
    Loaded,
    Objects,
    Request,
    Source,
    checked_rows,
)
from surefoot.errors import DataError, RecipeError

if TYPE_CHECKING:
    from surefoot.recipe import DataSource

_NAME = "rows"


def load(request: Request, sieve: Sieve) -> Loaded:
    """The rows passed, checked as the lines of a file are; no split of its own."""
    return checked_rows(request, raw(request), sieve)


def raw(request: Request) -> Items:
    """The rows passed as they are."""
    given = request.objects
    if given is None:
        raise RecipeError(
            f"{request.key}.source is 'rows', but no rows were passed. Pass them from Python as "
            "surefoot.train(recipe, data=rows), or name a file or a source."
        )
    if isinstance(given.rows, str | bytes | Mapping):
        raise DataError(
            f"{given.name} is a {type(given.rows).__name__}, but must be a list of rows, each a "
            "mapping of column names to values. Of several named parts pass one: "
            f"{given.name}['train']."
        )
    items = ((f"{given.name}[{index}]", row) for index, row in enumerate(given.rows))
    return Items(items, f"{given.name} is empty: it has no rows.")


def assign(
    specs: Sequence[DataSource],
    rows: Iterable[Mapping[str, Any]] | None,
    eval_rows: Iterable[Mapping[str, Any]] | None,
) -> list[Objects | None]:
    """What each source reads: with eval_rows the source `rows` of role eval reads those.

    RecipeError if an argument has no reader, or two.
    """
    readers = [index for index, spec in enumerate(specs) if spec.source == _NAME]
    for_eval = [index for index in readers if specs[index].role == "eval"]
    given: list[Objects | None] = [None] * len(specs)
    if eval_rows is not None:
        if len(for_eval) != 1:
            raise RecipeError(
                "rows were passed as eval_data, so the recipe must name the source 'rows' exactly "
                "once with role: eval. Add {source: rows, role: eval}, or pass no eval_data."
            )
        given[for_eval[0]] = Objects("eval_data", eval_rows)
        readers = [index for index in readers if index not in for_eval]
    if rows is not None:
        if len(readers) != 1:
            raise RecipeError(
                "rows were passed as data, so the recipe must name the source 'rows' exactly once, "
                "and no other source reads them. Set data: {source: rows}, or pass no data."
            )
        given[readers[0]] = Objects("data", rows)
    return given


SOURCE = Source(
    name=_NAME,
    splits=False,
    options=ROW_OPTIONS,
    reads=frozenset({"columns"}),
    load=load,
    raw=raw,
)
