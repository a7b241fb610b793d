"""One row of a dataset, checked: from whatever a source yields to a `Row`, or a stated reason.

Owns the column mapping, the checks of prompt, answer, task and id, the cleaning of text, and what
happens to a row that fails: strict sources raise at once, forgiving ones list it and go on.
Refuses to own files, tokens and lengths.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from surefoot.data.answers import FORMATS
from surefoot.data.options import nearest
from surefoot.errors import DataError, RecipeError

Message = Mapping[str, str]

ROLES = ("system", "user", "assistant", "tool")
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
ABSENT = object()
# What other datasets call the prompt; suggested, never assumed.
PROMPT_NAMES = ("question", "problem", "messages", "query", "instruction", "input")
# A reward gets these three by other means, so they never travel as columns.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class BadRow(Exception):
    """Why one row cannot be used; always caught inside this room and given its place."""

    def __init__(self, reason: str, kind: str = "invalid") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Row:
    """A checked row before tokens: `where` is its place for people, `id` its name for records."""

    where: str
    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None
    task: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that was left out: its place, and the reason."""

    where: str
    reason: str
    kind: str


@dataclass(slots=True)
class Sieve:
    """What happens to bad rows of one source: raise at the first, or list up to a share of them."""

    key: str
    skip: bool = False
    max_share: float = 0.01
    seen: int = 0
    mended: int = 0
    listed: list[Quarantined] = field(default_factory=list)

    def reject(self, where: str, problem: BadRow) -> None:
        """List the row, or raise DataError where the source is strict."""
        if not self.skip:
            raise DataError(
                f"{where}: {problem.reason}. Mend the row, or set {self.key}.skip_invalid: true "
                "to leave out bad rows and list them."
            )
        self.listed.append(Quarantined(where, problem.reason, problem.kind))

    def close(self) -> None:
        """Raise DataError if more rows were left out than the source allows."""
        lost = len(self.listed)
        if self.seen == 0 or lost <= self.max_share * self.seen:
            return
        first = self.listed[0]
        raise DataError(
            f"{self.key}: {lost} of {self.seen} rows are invalid ({lost / self.seen:.1%}), more "
            f"than the {self.max_share:.1%} allowed. The first, {first.where}: {first.reason}. "
            f"Mend the data, or allow more with {self.key}.max_invalid: {_share_above(lost, self)}."
        )


def _share_above(lost: int, sieve: Sieve) -> str:
    return f"{math.ceil(100 * lost / sieve.seen) / 100:g}"


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Which column plays which part. `renamed` maps a new column name to the one in the data.

    A name that is no column may be a path into nested ones, as in reward_model.ground_truth.
    """

    key: str
    prompt: str = "prompt"
    answer: str = "answer"
    answer_required: bool = False
    answer_format: str | None = None
    task: str = "task"
    task_required: bool = False
    id: str = "id"
    id_required: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Mapping[str, str], *, key: str, answer_format: str | None) -> ColumnMap:
        """From a recipe's `columns`; RecipeError if a name in it is not text."""
        for part, name in columns.items():
            if not isinstance(name, str) or not name:
                raise RecipeError(f"{key}.columns.{part} is {name!r}: give the name of a column.")
        parts = ("prompt", "answer", "task", "id")
        return cls(
            key=key,
            prompt=columns.get("prompt", "prompt"),
            answer=columns.get("answer", "answer"),
            answer_required="answer" in columns or answer_format is not None,
            answer_format=answer_format,
            task=columns.get("task", "task"),
            task_required="task" in columns,
            id=columns.get("id", "id"),
            id_required="id" in columns,
            renamed={new: old for new, old in columns.items() if new not in parts},
        )

    def pick(self, raw: Mapping[str, Any], part: str, column: str) -> Any:
        """The value of a column that must be there; BadRow names what is there instead."""
        value = lookup(raw, column)
        if value is not ABSENT:
            return value
        present = ", ".join(map(str, raw)) or "none"
        guesses = [name for name in PROMPT_NAMES if name in raw] if part == "prompt" else []
        hint = f". Did you mean {guesses[0]!r}?" if guesses else nearest(column, map(str, raw))
        example = guesses[0] if guesses else "NAME"
        raise BadRow(
            f"column {column!r} is missing; columns present: {present}{hint} "
            f"Map it with {self.key}.columns: {{{part}: {example}}}"
        )


def parse_rows(
    items: Iterable[tuple[str, object]],
    columns: ColumnMap,
    sieve: Sieve,
    *,
    task: str | None,
) -> list[Row]:
    """Checked rows in the order given; each item is (place, the raw row or a BadRow).

    `task` labels every row; None takes the row's own, else "default". Bad rows go to `sieve`,
    among them every row whose own id came before.
    """
    return checked(items, sieve, lambda where, raw: _read(where, raw, columns, task))


class Named(Protocol):
    """A row that has been read."""

    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=Named)


def checked(
    items: Iterable[tuple[str, object]],
    sieve: Sieve,
    read: Callable[[str, object], tuple[N, bool, int]],
) -> list[N]:
    """Every row that `read` takes, in the order given; the bad ones go to `sieve`.

    `read` gives the row, whether it brought an id of its own, and the number of strings mended;
    an own id that came before makes a row bad.
    """
    rows: list[N] = []
    places: dict[str, str] = {}
    for where, raw in items:
        sieve.seen += 1
        try:
            if isinstance(raw, BadRow):
                raise raw
            row, given, mended = read(where, raw)
            if given and row.id in places:
                raise BadRow(f"id {row.id!r} was already used by {places[row.id]}")
        except BadRow as problem:
            sieve.reject(where, problem)
            continue
        if given:
            places[row.id] = where
        sieve.mended += mended
        rows.append(row)
    return rows


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def lookup(raw: Mapping[str, Any], column: str) -> Any:
    if column in raw:
        return raw[column]
    node: Any = raw
    for name in column.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return ABSENT
        node = node[name]
    return node


def row_id(raw: Mapping[str, Any]) -> str:
    """The name of a row that brings none: 16 hex digits of the sha256 of its canonical JSON."""
    return hashlib.sha256(canonical(raw).encode()).hexdigest()[:16]


def clean(value: Any, path: str) -> tuple[Any, int]:
    """Plain JSON data with lone surrogates made U+FFFD, and how many strings were mended.

    Numbers and arrays of numpy become Python's; dates, times and decimals become text.
    BadRow for what JSON cannot hold: other types, keys that are not text, NaN and infinity.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        mended = _LONE_SURROGATE.sub(_REPLACEMENT, value)
        return mended, int(mended != value)
    if value is None or isinstance(value, bool | int):
        return value, 0
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"column {path!r} holds {value}; write null for a missing number")
        return value, 0
    if isinstance(value, list | tuple):
        pairs = [clean(element, path) for element in value]
        return [element for element, _ in pairs], sum(count for _, count in pairs)
    if isinstance(value, Mapping):
        return _clean_mapping(value, path)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat(), 0
    if isinstance(value, decimal.Decimal):
        return str(value), 0
    raise BadRow(f"column {path!r} holds {kind_of(value)}, which JSON cannot hold")


def _clean_mapping(value: Mapping[Any, Any], path: str) -> tuple[dict[str, Any], int]:
    cleaned: dict[str, Any] = {}
    total = 0
    for key, element in value.items():
        if not isinstance(key, str):
            raise BadRow(f"key {key!r} in {path!r} is not text")
        name, mended = clean(key, path)
        cleaned[name], count = clean(element, path or name)
        total += mended + count
    return cleaned, total


def _read(where: str, raw: object, columns: ColumnMap, task: str | None) -> tuple[Row, bool, int]:
    """(the row, whether it brought its own id, strings mended)."""
    if not isinstance(raw, Mapping):
        raise BadRow(f"the row is {kind_of(raw)}, not an object with named columns")
    try:
        data, mended = clean(raw, "")
    except RecursionError:
        raise BadRow("the row is nested too deeply") from None
    prompt = read_prompt(columns.pick(data, "prompt", columns.prompt), columns.prompt)
    answer = _answer(data, columns)
    if columns.task_required or (task is None and data.get(columns.task) is not None):
        task = read_label(columns.pick(data, "task", columns.task), columns.task)
    given = columns.id_required or data.get(columns.id) is not None
    name = read_label(columns.pick(data, "id", columns.id), columns.id) if given else row_id(data)
    extra = {key: value for key, value in data.items() if key not in _NOT_COLUMNS}
    for new, old in columns.renamed.items():
        if new in data and new != old:
            raise BadRow(f"column {old!r} cannot be renamed {new!r}: that column exists already")
        extra[new] = columns.pick(data, new, old)
    if columns.answer_format is not None and "answer" in extra and columns.answer == "answer":
        extra["answer"] = answer
    row = Row(where, name, prompt, answer, "default" if task is None else task, extra)
    return row, given, mended


def read_prompt(value: Any, column: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return read_text(value, f"prompt column {column!r}")
    if not isinstance(value, list):
        raise BadRow(
            f"prompt column {column!r} holds {kind_of(value)}, not text or a list of messages"
        )
    if not value:
        raise BadRow(f"prompt column {column!r} is an empty list of messages")
    messages = tuple(read_message(message, index) for index, message in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise BadRow("the last message has role 'assistant'; a prompt ends before the answer")
    if all(message["role"] == "system" for message in messages):
        raise BadRow("the messages hold a system prompt only")
    return messages


def read_message(message: Any, index: int) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise BadRow(f"message {index} is not an object with 'role' and 'content'")
    # Columnar files write null for a key that only other rows have.
    others = {key for key in message.keys() - {"role", "content"} if message[key] is not None}
    if others:
        raise BadRow(
            f"message {index} has {', '.join(sorted(others))}; messages hold role and content only"
        )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadRow(f"message {index} has role {role!r}; roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise BadRow(f"message {index} has {kind_of(content)} as content, not text")
    return {"role": role, "content": read_text(content, f"message {index}")}


def _answer(data: Mapping[str, Any], columns: ColumnMap) -> str | None:
    column = columns.answer
    required = columns.answer_required
    value = columns.pick(data, "answer", column) if required else data.get(column)
    if value is None and not required:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"answer column {column!r} holds {kind_of(value)}, not text or a number")
    text = read_text(str(value), f"answer column {column!r}")
    if columns.answer_format is None:
        return text
    read, lacking = FORMATS[columns.answer_format]
    gold = read(text)
    if gold is None:
        raise BadRow(f"answer column {column!r} has {lacking}")
    return gold


def read_label(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"column {column!r} holds {kind_of(value)}, not text")
    return read_text(str(value), f"column {column!r}")


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def read_text(value: str, what: str) -> str:
    if not value.strip():
        raise BadRow(f"{what} is empty")
    if "\0" in value:
        raise BadRow(f"{what} contains a NUL character (U+0000)")
    return value
