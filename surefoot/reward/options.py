"""Options of built-in rewards: a dataclass is the schema, a mapping from the recipe fills it.

Owns the check of names and plain types, with the nearest name in the message.
Refuses to own what an option means; a schema's own __post_init__ checks its values.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from surefoot.errors import RecipeError

Schema = TypeVar("Schema")


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' or the list of what there is, ready to end a message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(names)}" if names else "there is none"


def fill(schema: type[Schema], options: Mapping[str, Any], *, reward: str) -> Schema:
    """An instance of the dataclass `schema`; RecipeError names the option that does not fit."""
    assert dataclasses.is_dataclass(schema)
    hints = typing.get_type_hints(schema)
    for name, value in options.items():
        if name not in hints:
            raise RecipeError(f"reward {reward!r} has no option {name!r}; {nearest(name, hints)}")
        if not _fits(value, hints[name]):
            raise RecipeError(
                f"option {name!r} of reward {reward!r} is {value!r}; it takes {_say(hints[name])}"
            )
    for field in dataclasses.fields(schema):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in options:
            raise RecipeError(
                f"reward {reward!r} needs the option {field.name!r}; set it in its entry"
            )
    try:
        return schema(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"reward {reward!r}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return any(type(value) is type(allowed) and value == allowed for allowed in hint.__args__)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in hint.__args__)
    if origin is tuple:  # tuple[X, ...] alone; a recipe has lists
        return isinstance(value, list | tuple) and all(_fits(v, hint.__args__[0]) for v in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _say(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, hint.__args__))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_say(option) for option in hint.__args__)
    if origin is tuple:
        return f"a list of {_say(hint.__args__[0])}"
    if origin is collections.abc.Mapping:
        return "a mapping"
    return "null" if hint is type(None) else str(hint.__name__)
