"""Validation errors in our words: the key, what is wrong, and the nearest name.

Owns the call into pydantic and the translation of what it says.
Refuses to own the rules: they are in `schema.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from surefoot.errors import RecipeError
from surefoot.methods.checks import did_you_mean
from surefoot.recipe.schema import Lora, Section

S = TypeVar("S", bound=Section)


def validated(section: type[S], raw: Any, *, path: str) -> S:
    """`raw` as a `section`; RecipeError lists every bad key of it, one a line."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{path}: is a mapping of keys, not {raw!r:.60}")
    try:
        return section.model_validate(dict(raw))
    except ValidationError as error:
        raise RecipeError("\n".join(_lines(section, error, path))) from error


def _lines(section: type[Section], error: ValidationError, path: str) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for problem in error.errors():
        key, fields = _key(section, problem["loc"], path)
        if problem["type"] == "extra_forbidden":
            text = f"no such key{did_you_mean(str(problem['loc'][-1]), fields)}"
        elif problem["type"] == "missing":
            text = "is required"
        else:
            text = f"{problem['input']!r:.60}: {_plain(problem['msg'])}"
        grouped.setdefault(key, []).append(text)
    # Alternatives (a number or the word auto) come as one problem each; they share one line.
    return [f"{key}: {_joined(texts)}" for key, texts in grouped.items()]


def _joined(texts: list[str]) -> str:
    first, *others = texts
    return " or ".join([first, *(text.rpartition(": ")[2] for text in others)])


def _key(section: type[Section], loc: tuple[Any, ...], path: str) -> tuple[str, list[str]]:
    fields = [name for name in section.model_fields if name != "options"]
    names = [path, str(loc[0])]
    if loc[0] == "lora" and len(loc) > 1:
        return ".".join([*names, str(loc[1])]), list(Lora.model_fields)
    return ".".join(names), fields


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:].replace("Input should be", "should be")
