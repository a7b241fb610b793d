"""What every source takes and gives: the door between `build` and the sources.

Owns the request (a recipe's source with its options read) and the result (checked rows, and the
held-out ones where the source splits itself), the step from raw rows to checked ones, and the
refusal of keys that a source does not read. Refuses to own any source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.data.answers import FORMATS
from surefoot.data.options import Option
from surefoot.data.rows import ColumnMap, Row, Sieve, parse_rows
from surefoot.errors import DataError, RecipeError

if TYPE_CHECKING:
    from surefoot.recipe import DataSource

# The test set must not move with the run's seed, or runs of one comparison would differ in it.
SPLIT_SEED = 0
# What every source of given rows reads, whatever it reads them from.
ROW_OPTIONS: Mapping[str, Option] = {"answer_format": Option(str, one_of=tuple(FORMATS))}


@dataclass(frozen=True, slots=True)
class Objects:
    """Rows passed from Python, and the name of the argument in messages."""

    name: str
    rows: Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """One source of a recipe: its key in messages, its spec, its options, and where it looks."""

    key: str
    spec: DataSource
    options: Mapping[str, Any]
    eval_size: int
    base_dir: Path | None = None
    objects: Objects | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows to train on, and the source's own held-out rows (None: it does not split).

    `revision` is the commit that a hub's rows are of.
    """

    rows: list[Row]
    held_out: list[Row] | None
    gold_rejected: int = 0
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """Raw rows with their places, what to say if there are none, and the commit of a hub's rows."""

    rows: Iterable[tuple[str, object]]
    empty: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A registered source: its options, the common keys it reads, and its loader.

    `splits` says that it makes its own held-out rows. `raw` gives rows before any check, as the
    examples of supervised and preference training need them; None for questions that are made.
    """

    name: str
    splits: bool
    options: Mapping[str, Option]
    reads: frozenset[str]
    load: Callable[[Request, Sieve], Loaded]
    raw: Callable[[Request], Items] | None = None


def refuse_unread(source: Source, spec: DataSource, *, key: str) -> None:
    """RecipeError for `columns` or `split` set on a source that does not read them (law 14)."""
    given = {"columns": bool(spec.columns), "split": spec.split is not None}
    for name, is_set in given.items():
        if is_set and name not in source.reads:
            raise RecipeError(f"{key}.{name}: source {source.name!r} does not read it. Remove it.")


def checked_rows(request: Request, items: Items, sieve: Sieve) -> Loaded:
    """Raw rows checked by the request's columns, task and answer format; no split of their own."""
    spec, key = request.spec, request.key
    refuse_two_tasks(spec, key=key)
    columns = ColumnMap.of(spec.columns, key=key, answer_format=request.options["answer_format"])
    rows = parse_rows(items.rows, columns, sieve, task=spec.task)
    if sieve.seen == 0:
        raise DataError(items.empty)
    return Loaded(rows, None, revision=items.revision)


def refuse_two_tasks(spec: DataSource, *, key: str) -> None:
    """RecipeError where both the source and a column label the rows."""
    if spec.task is not None and "task" in spec.columns:
        raise RecipeError(f"{key}.task and {key}.columns.task both label the rows. Keep one.")
