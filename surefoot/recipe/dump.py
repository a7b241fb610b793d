"""The resolved recipe as YAML, each value with its origin.

Owns the layout of `recipe.yaml`. Refuses to own the values (`recipe.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.recipe.recipe import Recipe, leaves, to_mapping
from surefoot.recipe.text import dump

HEADER = "# The resolved recipe; after each value: where it came from.\n"


def to_yaml(recipe: Recipe) -> str:
    """`recipe` as YAML that `load` reads back as an equal recipe; floats round-trip exactly."""
    lines = list(_block(to_mapping(recipe), "", 0, recipe, frozenset(leaves(recipe))))
    return HEADER + "\n".join(lines) + "\n"


def _block(
    mapping: dict[str, Any], path: str, indent: int, recipe: Recipe, ends: frozenset[str]
) -> Iterator[str]:
    for name, value in mapping.items():
        key = f"{path}{name}"
        head = f"{' ' * indent}{dump(name)}:"
        if key in ends or not value or not isinstance(value, dict | list):
            yield f"{head} {dump(value)}{_comment(recipe, key)}"
        elif isinstance(value, dict):
            yield head
            yield from _block(value, f"{key}.", indent + 2, recipe, ends)
        else:
            yield head
            yield from _entries(value, key, indent, recipe, ends)


def _entries(
    items: list[Any], key: str, indent: int, recipe: Recipe, ends: frozenset[str]
) -> Iterator[str]:
    for index, item in enumerate(items):
        here = f"{key}.{index}"
        if not isinstance(item, dict):
            yield f"{' ' * (indent + 2)}- {dump(item)}{_comment(recipe, here)}"
            continue
        first, *others = _block(item, f"{here}.", indent + 4, recipe, ends)
        yield f"{' ' * (indent + 2)}- {first.lstrip()}"
        yield from others


def _comment(recipe: Recipe, key: str) -> str:
    # A bare word for a kind is kept under the kind's own key.
    for place in (key, f"{key}.kind", f"{key}.place", f"{key}.level"):
        if place in recipe.origins:
            return f"  # {recipe.origins[place]}"
    return ""
