"""A data file as an audit sees it: every row with its place, and what could not be read.

Owns the choice between pairs and prompts, and the values that stand beside a pair.
Refuses to own the reading and checking of rows, which are the data room's, so that an audit and a
run say the same of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.data.build import source_of
from surefoot.data.encode import Encoding, ExampleEncoder
from surefoot.data.examples import Pair
from surefoot.data.files import locate
from surefoot.data.forms import Form, Reader
from surefoot.data.options import COMMON_OPTIONS, KEYS, read_options
from surefoot.data.prompts import Encoded, encode_row
from surefoot.data.rows import (
    ABSENT,
    BadRow,
    ColumnMap,
    Quarantined,
    Row,
    Sieve,
    lookup,
    parse_rows,
)
from surefoot.data.source import Request
from surefoot.errors import DataError
from surefoot.recipe import DataSource

Kind = Literal["pairs", "prompts"]
KEY = "data"
_SIDES = ("chosen", "rejected")
BESIDE = ("score_chosen", "score_rejected", "answer")
"""Columns of a pair that no training reads: what else is known of the two answers."""
_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True, slots=True)
class Raw:
    """The rows of a file as they are, with their places, and what kind they are of."""

    path: Path
    kind: Kind
    items: tuple[tuple[str, object], ...]
    columns: Mapping[str, str]
    answer_format: str | None


@dataclass(frozen=True, slots=True)
class PairRow:
    """One pair that was read, and its values beside: numbers for scores, text for an answer."""

    form: Form
    score_chosen: float | None
    score_rejected: float | None
    answer: str | None

    @property
    def where(self) -> str:
        return self.form.where


@dataclass(frozen=True, slots=True)
class Left:
    """What was not read: the rows with reasons, how many rows there were, strings mended.

    `lost` is what the loader would say: more rows are bad than it allows. Rows too long for the
    model are `too_long`, as (place, id, tokens).
    """

    listed: tuple[Quarantined, ...]
    seen: int
    mended: int
    lost: str | None
    too_long: tuple[tuple[str, str, int], ...] = ()
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """What measures rows: the model's tokenizer and template, and the most tokens of a row."""

    encoder: ExampleEncoder
    limit: int


def number_of(where: str) -> int:
    """The number at the end of a place: the line, the row or the element."""
    found = _NUMBER.search(where)
    assert found is not None, where
    return int(found[1])


def read(
    file: Path | str,
    *,
    kind: Kind | None,
    columns: Mapping[str, str],
    answer_format: str | None,
) -> Raw:
    """Every row of a file. Without `kind` they are pairs if the first has a side of one."""
    path = locate(str(file), None, key=KEY)
    spec = DataSource(source=str(path), options={"answer_format": answer_format})
    source = source_of(spec, None, key=KEY)
    if source.raw is None:
        raise DataError(
            f"{file} is no file of rows. Name a .jsonl, .json, .parquet or .arrow file."
        )
    schema = {**COMMON_OPTIONS, **source.options}
    options = read_options(spec.options, schema, key=KEY, source=source.name, keys=KEYS)
    given = source.raw(Request(KEY, spec, options, 0))
    items = tuple(given.rows)
    if not items:
        raise DataError(given.empty)
    found = kind or _kind(items, columns)
    return Raw(path, found, items, columns, answer_format)


def read_pairs(
    raw: Raw, *, max_invalid: float, lengths: Lengths | None = None
) -> tuple[list[PairRow], Left]:
    """The pairs that a run would read, and what it would leave out."""
    own = {part: name for part, name in raw.columns.items() if part not in BESIDE}
    sieve = Sieve(KEY, skip=True, max_share=max_invalid)
    reader = Reader(KEY, Pair, own, None, lengths is None or lengths.encoder.has_template)
    forms = reader.read_all(raw.items, sieve)
    rows = dict(raw.items)
    pairs = [_beside(form, rows[form.where], raw.columns) for form in forms]
    too_long: list[tuple[str, str, int]] = []
    if lengths is not None:
        pairs = list(_fitting_pairs(pairs, lengths, sieve, too_long))
    return pairs, _left(sieve, too_long, lengths)


def read_prompts(
    raw: Raw, *, max_invalid: float, lengths: Lengths | None = None
) -> tuple[list[Row], Left]:
    """The prompts that a run would read, and what it would leave out."""
    sieve = Sieve(KEY, skip=True, max_share=max_invalid)
    columns = ColumnMap.of(raw.columns, key=KEY, answer_format=raw.answer_format)
    rows = parse_rows(raw.items, columns, sieve, task=None)
    too_long: list[tuple[str, str, int]] = []
    if lengths is not None:
        rows = list(_fitting_prompts(rows, lengths, sieve, too_long))
    return rows, _left(sieve, too_long, lengths)


def _fitting_pairs(
    pairs: list[PairRow], lengths: Lengths, sieve: Sieve, too_long: list[tuple[str, str, int]]
) -> Iterator[PairRow]:
    encoding = Encoding(lengths.encoder, Pair, None, None, False)
    for pair in pairs:
        try:
            coded = encoding.code(pair.form)
        except BadRow as problem:
            sieve.reject(pair.where, problem)
            continue
        # Equal answers have no example; the audit names them itself.
        if coded is not None and coded.length > lengths.limit:
            too_long.append((pair.where, pair.form.id, coded.length))
        else:
            yield pair


def _fitting_prompts(
    rows: list[Row], lengths: Lengths, sieve: Sieve, too_long: list[tuple[str, str, int]]
) -> Iterator[Row]:
    for row in rows:
        try:
            encoded: Encoded = encode_row(
                row, lengths.encoder, system=None, allow_control_tokens=False
            )
        except BadRow as problem:
            sieve.reject(row.where, problem)
            continue
        if len(encoded.prompt.ids) > lengths.limit:
            too_long.append((row.where, row.id, len(encoded.prompt.ids)))
        else:
            yield row


def _left(sieve: Sieve, too_long: list[tuple[str, str, int]], lengths: Lengths | None) -> Left:
    lost = None
    try:
        sieve.close()
    except DataError as error:
        lost = str(error)
    limit = None if lengths is None else lengths.limit
    return Left(tuple(sieve.listed), sieve.seen, sieve.mended, lost, tuple(too_long), limit)


def _kind(items: tuple[tuple[str, object], ...], columns: Mapping[str, str]) -> Kind:
    rows = (row for _, row in items if isinstance(row, Mapping))
    first = next(rows, {})
    sides = [lookup(first, columns.get(side, side)) is not ABSENT for side in _SIDES]
    # A side that is missing is a fault of a pair, not a prompt.
    return "pairs" if any(sides) else "prompts"


def _beside(form: Form, raw: object, columns: Mapping[str, str]) -> PairRow:
    assert isinstance(raw, Mapping), raw
    values: list[Any] = []
    for part in BESIDE:
        value = lookup(raw, columns.get(part, part))
        if part in columns and value is ABSENT:
            raise DataError(
                f"{form.where}: there is no column {columns[part]!r}. Name another with --column "
                f"{part}=NAME, or leave it out."
            )
        values.append(value)
    return PairRow(form, _score(values[0]), _score(values[1]), _text(values[2]))


def _score(value: Any) -> float | None:
    """true and false are scores too: right and wrong."""
    return float(value) if isinstance(value, bool | int | float) and value == value else None


def _text(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)


def exchanged(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row with its two sides, and their scores, in each other's place."""
    changed = dict(row)
    for one, other in (_SIDES, BESIDE[:2]):
        first, second = columns.get(one, one), columns.get(other, other)
        if first in row and second in row:
            changed[first], changed[second] = row[second], row[first]
        elif (one, other) == _SIDES:
            raise DataError(
                f"columns {first!r} and {second!r} are inside others, and --fix-flips swap changes "
                "columns of the row itself. Use --fix-flips drop."
            )
    return changed
