"""Plain values to rows and back: words, mappings and lists as a recipe writes them.

Owns the reading rules: a bare word is that kind with its defaults; a mapping with the
discriminator is that kind; a mapping with `use` is a user's function; any other mapping changes
single values of the present kind.
Refuses to own files and names of rows: `registry.py` finds the row to start from.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods.checks import did_you_mean
from surefoot.methods.choices import FAMILIES, Family
from surefoot.methods.custom import CONTRACTS, Custom
from surefoot.methods.types import Method, Row

_LARGEST: Mapping[Any, float] = {float: 1e30, int: 2**31 - 1}
"""Well inside float32 and tensor sizes: beyond them is no setting, and no error that says so."""


def with_fields(row: Row, changes: Mapping[str, Any]) -> Row:
    """`row` with the fields of `changes` set, each written as in a recipe.

    Raises RecipeError naming the key (as `method.gate.low`), with the nearest known name.
    """
    names = [field.name for field in dataclasses.fields(row) if field.name != "name"]
    values = {key: _field(row, key, raw, names) for key, raw in changes.items()}
    return dataclasses.replace(row, **values)


def as_mapping(row: Row) -> dict[str, Any]:
    """Every value of `row` as plain words, numbers, mappings and lists; `with_fields` reads it."""
    return {field.name: _plain(getattr(row, field.name), field.name) for field in _fields(row)}


def describe(row: Row) -> dict[str, Any]:
    """What differs from the defaults of the row's type, in the notation of a recipe.

    A choice that is of another kind than the default is shown with the options it sets.
    """
    base = type(row)(name=row.name)
    return {
        field.name: _shown(getattr(row, field.name), getattr(base, field.name), field.name)
        for field in _fields(row)
        if field.name != "name" and getattr(row, field.name) != getattr(base, field.name)
    }


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _field(row: Row, key: str, raw: Any, names: list[str]) -> Any:
    path = f"method.{key}"
    if key not in names:
        kind = type(row).__name__.lower()
        raise RecipeError(f"{path}: {kind} rows have no such field{did_you_mean(key, names)}")
    # Preference and Supervised rows hold plain values only.
    family = FAMILIES.get(key) if isinstance(row, Method) else None
    if family is None:
        return plain_value(typing.get_type_hints(type(row))[key], raw, path=path)
    if family.many:
        return _many(family, raw, getattr(row, key), path=path)
    return _one(family, raw, getattr(row, key), path=path)


def _many(family: Family, raw: Any, current: tuple[Any, ...], *, path: str) -> tuple[Any, ...]:
    if isinstance(raw, Mapping) and raw and all(str(key).isdigit() for key in raw):
        values = list(current)
        for key, change in raw.items():
            index = int(key)
            if index >= len(values):
                raise RecipeError(f"{path}.{key}: the row has {len(values)} of them; give a list")
            values[index] = _one(family, change, values[index], path=f"{path}.{key}")
        return tuple(values)
    if raw is None or raw == "none":
        return ()
    items = raw if isinstance(raw, list | tuple) else [raw]
    return tuple(_one(family, item, None, path=f"{path}.{i}") for i, item in enumerate(items))


def _one(family: Family, raw: Any, current: Any, *, path: str) -> Any:
    if raw is None or raw is False:
        raw = "none"
    if isinstance(raw, str):
        return _prototype(family, raw, path=path)
    if dataclasses.is_dataclass(raw):
        if type(raw) not in {type(value) for value in family.kinds.values()}:
            raise RecipeError(f"{path}: {raw!r} is not one of {', '.join(family.kinds)}")
        return raw
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{path}: {raw!r} is neither a word nor a mapping")
    values = {str(key): value for key, value in raw.items()}
    if _is_custom(family, values, current, path=path):
        return _custom(values, current, path=path)
    if family.key in values:
        word = values.pop(family.key)
        # The same kind written out keeps what the row already says for it.
        same = current is not None and current.kind == word
        start = current if same else _prototype(family, word, path=f"{path}.{family.key}")
    elif current is None:
        raise RecipeError(f"{path}: say which with {family.key}: one of {', '.join(family.kinds)}")
    else:
        start = current
    return _changed(family, start, values, path=path)


def _is_custom(family: Family, values: Mapping[str, Any], current: Any, *, path: str) -> bool:
    """Whether a mapping means a user's function: it says so, or it changes one's options."""
    if Custom.kind not in family.kinds:
        if "use" in values:
            raise RecipeError(f"{path}: takes no function of your own; {', '.join(CONTRACTS)} do")
        return False
    if family.key in values:
        return bool(values[family.key] == Custom.kind)
    return "use" in values or isinstance(current, Custom)


def _custom(values: Mapping[str, Any], current: Any, *, path: str) -> Custom:
    options = {name: value for name, value in values.items() if name not in ("kind", "use")}
    own = isinstance(current, Custom)
    use = values.get("use", current.use if own else None)
    if not isinstance(use, str):
        raise RecipeError(f"{path}: say which function, as in {{use: my_maths.py:my_function}}")
    # The same function written out keeps the options that the row already sets.
    kept = dict(current.options) if own and current.use == use else {}
    try:
        return Custom(use, tuple({**kept, **options}.items()))
    except RecipeError as error:
        raise RecipeError(f"{path}{str(error).removeprefix('method')}") from error


def _prototype(family: Family, word: Any, *, path: str) -> Any:
    own = Custom.kind in family.kinds and isinstance(word, str)
    if own and (word == Custom.kind or ":" in word):
        function = word if ":" in word else "my_maths.py:my_function"
        raise RecipeError(f"{path}: a function of your own is written {{use: {function}}}")
    if not isinstance(word, str) or word not in family.kinds:
        raise RecipeError(f"{path}: {word!r} is not known{did_you_mean(str(word), family.kinds)}")
    return family.kinds[word]


def _changed(family: Family, start: Any, values: Mapping[str, Any], *, path: str) -> Any:
    hints = typing.get_type_hints(type(start))
    names = family.options(start)
    changes: dict[str, Any] = {}
    for name, raw in values.items():
        here = f"{path}.{name}"
        if name not in names:
            reads = f"{start.kind} reads {', '.join(names) if names else 'no options'}"
            raise RecipeError(f"{here}: no such option, {reads}{_nearest(name, names)}")
        inner = FAMILIES.get(name)
        if inner is not None:
            changes[name] = _one(inner, raw, getattr(start, name), path=here)
        else:
            changes[name] = plain_value(hints[name], raw, path=here)
    return dataclasses.replace(start, **changes)


def _nearest(word: str, names: Sequence[str]) -> str:
    tail = did_you_mean(word, names)
    return tail if tail.startswith("; did") else ""


def plain_value(annotation: Any, raw: Any, *, path: str) -> Any:
    """`raw` as a value of `annotation` (int, float, bool, str, Literal, or one of them | None)."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(annotation)
        if raw is None and type(None) in options:
            return None
        (annotation,) = (option for option in options if option is not type(None))
        return plain_value(annotation, raw, path=path)
    if origin is typing.Literal:
        words = [str(word) for word in typing.get_args(annotation)]
        if raw not in words:
            raise RecipeError(f"{path}: {raw!r} is not known{did_you_mean(str(raw), words)}")
        return raw
    if annotation is bool and isinstance(raw, bool):
        return raw
    number = isinstance(raw, int | float) and not isinstance(raw, bool)
    largest = _LARGEST.get(annotation)
    if number and largest is not None and largest < abs(raw) < math.inf:
        most = f"{largest:,}" if annotation is int else f"{largest:g}"
        raise RecipeError(f"{path}: {raw!r:.60} is too large; it is at most {most}")
    if annotation is float and number and math.isfinite(raw):
        return float(raw)
    if annotation is int and number and math.isfinite(raw) and raw == int(raw):
        return int(raw)
    if annotation is str and isinstance(raw, str):
        return raw
    wanted = {bool: "true or false", float: "a number", int: "a whole number", str: "a word"}
    raise RecipeError(f"{path}: {raw!r} is not {wanted[annotation]}")


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, Custom):
        return {"kind": value.kind, **value.plain()}
    if not dataclasses.is_dataclass(value):
        return value
    family = FAMILIES[name]
    rest = {option: _plain(getattr(value, option), option) for option in family.options(value)}
    return {family.key: value.kind, **rest} if rest else value.kind


def _shown(value: Any, default: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return [_shown(item, None, name) for item in value]
    if isinstance(value, Custom):
        return value.plain()
    if not dataclasses.is_dataclass(value):
        return value
    family = FAMILIES[name]
    same = type(value) is type(default)
    rest = {}
    for option in family.options(value):
        present = getattr(value, option)
        # By identity, because a 0 that is said must not pass for the switch False.
        off = present is None or present is False
        if present != getattr(default, option) if same else not off:
            rest[option] = _shown(present, None, option)
    return {family.key: value.kind, **rest} if rest else value.kind
