"""Answers that are written inside longer text: the bare gold of a known format.

Owns the formats that `answer_format` names. Refuses to own how a completion is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


def gsm8k(text: str) -> str | None:
    """What follows the last `####`, without the commas of thousands; None if nothing does."""
    _, mark, gold = text.rpartition("####")
    return _THOUSANDS.sub("", gold.strip()) or None if mark else None


FORMATS: Mapping[str, tuple[Callable[[str], str | None], str]] = {
    "gsm8k": (gsm8k, "no answer after ####"),
}
"""Name -> (reader, what a row without such an answer is told)."""
