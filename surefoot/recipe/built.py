"""Which keys of a recipe have their function in this version.

Owns the table `BUILT` for the recipe's own keys; a row's are in `methods/built.py`.
Refuses to own anything about values that are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import NotBuiltError
from surefoot.methods import check_built
from surefoot.recipe.recipe import Recipe

BUILT: Mapping[str, tuple[Any, ...]] = {
    "model.template": ("auto", "none"),
    "rollout.engine": ("local",),
    "rollout.ahead": (0,),
    "rollout.urls": ((),),
    "optim.offload": (False,),
    "doctor.action": ("report",),
}
"""Key -> the values whose functions exist; a key that is not here is built whole."""


def check(recipe: Recipe) -> None:
    """Raise NotBuiltError naming the key, the value and what is built."""
    for key, values in BUILT.items():
        section, _, name = key.partition(".")
        _check(key, getattr(getattr(recipe, section), name), values)
    check_built(recipe.method)


def _check(key: str, value: Any, built: tuple[Any, ...]) -> None:
    if value not in built:
        words = ", ".join(_word(option) for option in built)
        raise NotBuiltError(
            f"{key}: {_word(value)} is not built yet in this version; built: {words}"
        )


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)
