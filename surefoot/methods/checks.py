"""Bounds on single values of a row, with messages that name the key.

Owns the few comparisons that every variant repeats.
Refuses to own combinations of fields: `types.py` checks those.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from surefoot.errors import RecipeError

_LISTED = 40
"""More names than this are no help in a message."""


def need(ok: bool, key: str, message: str) -> None:
    """Raise RecipeError `method.<key>: <message>` unless `ok`."""
    if not ok:
        raise RecipeError(f"method.{key}: {message}")


def at_least(key: str, value: float, low: float) -> None:
    need(math.isfinite(value) and value >= low, key, f"{value} must be at least {low}")


def above(key: str, value: float, low: float) -> None:
    need(math.isfinite(value) and value > low, key, f"{value} must be above {low}")


def within(key: str, value: float, low: float, high: float) -> None:
    need(low <= value <= high, key, f"{value} must lie between {low} and {high}")


def one_of(key: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a word that is not in `allowed`, naming the nearest one."""
    names = list(allowed)
    if value not in names:
        need(False, key, f"{value!r} is not known{did_you_mean(str(value), names)}")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The tail of a message about an unknown word: the nearest name, else all of them."""
    options = list(names)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if len(options) > _LISTED:
        return ""
    return f"; choose from {', '.join(sorted(options))}" if options else ""
