"""What a paid reward need not be asked: contents whose verdicts are kept, or asked about already.

Owns the identity of a user's function, the lookup before a call, and keeping what came of it.
Refuses to own the table (`cache.py`), and calling.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.records import ScoreStatus
from surefoot.reward.cache import ScoreCache, content_key
from surefoot.reward.contract import PartScore

Verdicts = list[PartScore]  # of one content: one sample's, or all of a batch


def identity_of(function: Callable[..., Any], options: Mapping[str, Any]) -> str | None:
    """A hash over the function's file, its name, its options, and what a closure holds.

    None where one of them has no fixed text, so that two functions could not be told apart.
    """
    bound: list[Any] = []
    while isinstance(function, functools.partial):
        bound.append([function.args, function.keywords])
        function = function.func
    if not inspect.isfunction(function):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [function.__defaults__, function.__kwdefaults__, cells, bound, dict(options)]
    try:
        source = Path(inspect.getfile(function)).read_bytes()
        name = [function.__module__, function.__qualname__, function.__code__.co_firstlineno]
        return content_key({"file": hashlib.sha256(source).hexdigest(), "name": name, "held": held})
    except (OSError, TypeError, ValueError):
        return None


@dataclass(slots=True)
class Asked:
    """The contents that must be asked about, by index, and what is known of the others."""

    indices: list[int]
    _count: int
    _cache: ScoreCache | None = None
    _keys: list[str] = field(default_factory=list)
    _known: dict[int, Verdicts] = field(default_factory=dict)
    _same: dict[int, int] = field(default_factory=dict)

    @property
    def spared(self) -> int:
        """Contents that nobody is asked about."""
        return self._count - len(self.indices)

    def keep(self, index: int, parts: Verdicts) -> None:
        """Keep what one content has earned, unless a part of it was not scored."""
        if self._cache is not None and all(p.status is ScoreStatus.SCORED for p in parts):
            self._cache.put(self._keys[index], {"parts": [part.to_json() for part in parts]})

    def all(self, verdicts: Mapping[int, Verdicts]) -> list[Verdicts]:
        """Those of every content, from those of `indices`."""
        known = {**self._known, **verdicts}
        return [known[self._same.get(index, index)] for index in range(self._count)]


def ask(payloads: Sequence[bytes], *, cache: ScoreCache | None, identity: str | None) -> Asked:
    """What to ask about: everything, or with an identity what is neither kept nor asked twice."""
    count = len(payloads)
    if cache is None or identity is None:
        return Asked(list(range(count)), count)
    keys = [content_key({"reward": identity, "of": json.loads(p)}) for p in payloads]
    asked = Asked([], count, cache, keys)
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        if key in first:
            asked._same[index] = first[key]
            continue
        first[key] = index
        kept = _read(cache.get(key))
        if kept is None:
            asked.indices.append(index)
        else:
            asked._known[index] = kept
    return asked


def _read(value: Mapping[str, Any] | None) -> Verdicts | None:
    """Kept verdicts; None where there are none, or something else lies under their key."""
    try:
        parts = [PartScore.from_json(part) for part in (value or {})["parts"]]
    except (KeyError, TypeError, ValueError):
        return None
    return parts if all(part.status is ScoreStatus.SCORED for part in parts) else None
