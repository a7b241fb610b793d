"""Reading a judge's reply: one verdict in a fixed form at its end, or none.

Owns the forms that count: a JSON object that ends the reply, or a last line `key: value`.
Refuses to guess: a number somewhere in the text, one outside the scale, or a verdict quoted inside
a sentence is no verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

_REFUSAL = re.compile(
    r"\b(i'?m sorry|i am sorry|i apologi[sz]e|i (can'?t|cannot|can not|won'?t|am unable|'?m unable)"
    r"|as an ai\b)",
    re.IGNORECASE,
)
_LOOKED_AT = 200


def refuses(text: str) -> bool:
    """Whether a reply without a verdict begins like a refusal; for the metrics only."""
    return (
        _REFUSAL.search(text[:_LOOKED_AT].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
        is not None
    )


def read_score(text: str, low: float, high: float) -> float | None:
    """The finite number `score` from `low` to `high`, else None."""
    value = _field(text, "score")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number may have more digits than a float holds.
    if not low <= value <= high or not math.isfinite(value):
        return None
    return float(value)


def read_word(text: str, key: str, words: Sequence[str]) -> str | None:
    """The one of `words` that `key` has, letter case aside, else None."""
    value = _field(text, key)
    if not isinstance(value, str):
        return None
    return next((word for word in words if word.lower() == value.strip().lower()), None)


def _field(text: str, key: str) -> Any:
    """What `key` has in the object or the line at the end of the reply; None if nothing is."""
    text = text.strip()
    if text.endswith("```"):
        text = text[:-3].rstrip()
    if text.endswith("}"):
        for start in {text.find("{"), text.rfind("{")}:
            # An object inside a sentence may be one that the judge quotes.
            if not text[:start].rpartition("\n")[2].strip():
                found = _object(text[start:])
                if found is not None:
                    return found.get(key)
        return None
    line = text.rpartition("\n")[2].strip().replace("*", "")
    match = re.fullmatch(rf"{key}\s*:\s*(\S+)", line, re.IGNORECASE)
    if match is None:
        return None
    word = match[1].strip("\"'.`") if not re.fullmatch(r"[-+.\d]+", match[1]) else match[1]
    return float(word) if re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", word) else word


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
