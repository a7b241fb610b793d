"""Where every value of a recipe came from.

Owns the bookkeeping while a recipe is read, and the final table.
Refuses to own the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.methods import FAMILIES, Row, as_mapping
from surefoot.recipe.recipe import Recipe, leaves

_RESOLVED = (
    "model.compute",
    "model.reference_dtype",
    "rollout.dtype",
    "rollout.rows",
    "run.dir",
)


class Origins:
    """Collects what was written, by dotted key, the last writer winning."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[str, Any]] = {}

    def put(self, key: str, value: Any, origin: str) -> None:
        """Remember that `value` was written at `key`; what lay below it is forgotten."""
        self.forget(key)
        self._spread(key, value, origin)

    def forget(self, key: str) -> None:
        """Nothing was written at `key` or below it."""
        for old in [k for k in self._written if k == key or k.startswith(f"{key}.")]:
            del self._written[old]

    def copy(self) -> Origins:
        """As much, to be added to apart."""
        made = Origins()
        made._written = dict(self._written)
        return made

    def take(self, stage: Origins, key: str) -> None:
        """What a stage wrote at `key` and below it takes the place of what is known of it here."""
        self.forget(key)
        for place, (origin, value) in stage._written.items():
            if place == key or place.startswith(f"{key}."):
                self._written[place] = ("stage" if origin == "recipe" else origin, value)

    def stands(self, key: str, first: Origins) -> bool:
        """Whether what `first` wrote at `key` was copied from there and is still here."""
        return key in first._written and self._written.get(key) is first._written[key]

    def written(self) -> dict[str, str]:
        """Every key that was written, and who wrote it."""
        return {key: origin for key, (origin, _) in self._written.items()}

    def _spread(self, key: str, value: Any, origin: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self._spread(f"{key}.{name}", item, origin)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                self._spread(f"{key}.{index}", item, origin)
        else:
            self._written[key] = (origin, value)

    def of(self, recipe: Recipe, row: Row) -> dict[str, str]:
        """The origin of every value of `recipe`, whose row started as `row`."""
        start = as_mapping(row)
        return {key: self._of(key, start, row.name) for key in leaves(recipe)}

    def _of(self, key: str, start: Mapping[str, Any], name: str) -> str:
        written = self._find(key)
        if written is not None:
            origin, value = written
            unset = value == "auto" or value is None
            return "auto" if key in _RESOLVED and unset else origin
        if key in _RESOLVED:
            return "auto"
        if key.startswith("method."):
            return f"row {name}" if _same_kind(self, key, start) else "default"
        return "default"

    def _find(self, key: str) -> tuple[str, Any] | None:
        if key in self._written:
            return self._written[key]
        below = [k for k in self._written if k.startswith(f"{key}.")]
        if below:
            return self._written[below[0]]
        # A bare word was written for the kind; a single word for a list of one.
        parent, _, last = key.rpartition(".")
        field = _field(parent)
        if field in FAMILIES and last == FAMILIES[field].key:
            return self._written.get(parent) or self._written.get(parent.rpartition(".")[0])
        return None

    def kind(self, path: str, key: str) -> Any:
        """The kind that was written for the field at `path`, or None."""
        for place in (f"{path}.{key}", path):
            if place in self._written and isinstance(self._written[place][1], str):
                return self._written[place][1]
        return None

    def replaced(self, path: str, key: str) -> bool:
        """Whether the list at `path` was written whole rather than changed in single values."""
        return path in self._written or any(
            place.startswith(f"{path}.") and place.endswith(f".{key}") for place in self._written
        )


def _field(path: str) -> str:
    parts = [part for part in path.split(".") if not part.isdigit()]
    return parts[-1] if parts else ""


def _same_kind(origins: Origins, key: str, start: Mapping[str, Any]) -> bool:
    """Whether the row's own kind still stands at `key`, so that the row gave the value."""
    parts = key.split(".")
    if len(parts) < 3 or parts[1] not in FAMILIES:
        return True
    family = FAMILIES[parts[1]]
    if family.many:
        return not origins.replaced(f"method.{parts[1]}", family.key)
    present = start[parts[1]]
    kind = present[family.key] if isinstance(present, Mapping) else present
    return origins.kind(f"method.{parts[1]}", family.key) in (None, kind)
