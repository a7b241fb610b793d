"""Options that belong to one source, and the names that a user nearly wrote.

Owns the reading of `DataSource.options` against a source's schema: unknown names, types, ranges.
Refuses to own the meaning of any option; a source documents and uses its own.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.errors import RecipeError

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its type, its default (None: no value), the values allowed, if it must be."""

    kind: type
    default: Any = None
    at_least: float | None = None
    required: bool = False
    one_of: tuple[str, ...] = ()


KEYS = (
    "source",
    "split",
    "columns",
    "task",
    "weight",
    "from_step",
    "until_step",
    "max_prompt_tokens",
    "max_tokens",
    "eval_size",
    "keep_solve_rate",
    "role",
)
"""What a recipe says of every source outside its options, for a name nearly written."""
# Every source has these, beside its own.
COMMON_OPTIONS: Mapping[str, Option] = {
    "skip_invalid": Option(bool, False),
    "max_invalid": Option(float, 0.01, at_least=0),
    "allow_control_tokens": Option(bool, False),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: a full stop, and the closest of `known` if one is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f". Did you mean {found[0]!r}?" if found else "."


def read_options(
    given: Mapping[str, Any],
    schema: Mapping[str, Option],
    *,
    key: str,
    source: str,
    keys: Iterable[str] = (),
) -> dict[str, Any]:
    """Every option of `schema` with its given or default value; `key` prefixes names in messages.

    `keys` are the names that every source has beside its options, for a name nearly written.

    Raises RecipeError for an unknown name, a missing required one, a wrong type or value.
    """
    for name in given:
        if name not in schema:
            known = ", ".join(sorted(schema)) or "none"
            raise RecipeError(
                f"{key}.{name}: source {source!r} has no such option"
                f"{nearest(name, [*schema, *keys])} "
                f"Its options: {known}."
            )
    values = {}
    for name, option in schema.items():
        if name in given and given[name] is not None:
            values[name] = _checked(given[name], option, f"{key}.{name}")
        elif option.required:
            raise RecipeError(f"{key}.{name} is missing: source {source!r} needs it.")
        else:
            values[name] = option.default
    return values


def _checked(value: Any, option: Option, key: str) -> Any:
    right = isinstance(value, option.kind)
    if option.kind is float:
        right = isinstance(value, int | float) and math.isfinite(value)
    if option.kind is int and isinstance(value, float) and value.is_integer():
        value, right = int(value), True  # YAML's 1e3
    if isinstance(value, bool) and option.kind is not bool:
        right = False
    if not right:
        expected = _WORDS.get(option.kind, "a mapping")
        raise RecipeError(f"{key} is {value!r}, but it must be {expected}.")
    if option.at_least is not None and value < option.at_least:
        raise RecipeError(f"{key} is {value}, but it must be at least {option.at_least}.")
    if option.one_of and value not in option.one_of:
        raise RecipeError(f"{key} is {value!r}, but it must be one of: {', '.join(option.one_of)}.")
    return value
