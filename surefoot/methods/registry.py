"""Names to rows: the built-in ones, changed ones, and a user's own.

Owns the lookup and the loading of a user's row file.
Refuses to own the values (`table.py`) and their reading (`coerce.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods.checks import did_you_mean
from surefoot.methods.coerce import as_mapping, with_fields
from surefoot.methods.custom import attribute, load_module
from surefoot.methods.preference_rows import PREFERENCE_ROWS, SUPERVISED_ROWS
from surefoot.methods.table import ROWS
from surefoot.methods.types import Method, Preference, Row, Supervised

_BY_NAME: Mapping[str, Row] = MappingProxyType(
    {row.name: row for row in (*ROWS, *PREFERENCE_ROWS, *SUPERVISED_ROWS)}
)
_TYPES: Mapping[str, type[Row]] = {
    "method": Method,
    "preference": Preference,
    "supervised": Supervised,
}


def rows() -> Mapping[str, Row]:
    """Every built-in row by name, in the order of the table."""
    return _BY_NAME


def online_rows() -> Mapping[str, Method]:
    """Every built-in row of a method that samples completions."""
    return {name: row for name, row in _BY_NAME.items() if isinstance(row, Method)}


def get(name: str) -> Row:
    """The built-in row `name`; RecipeError with the nearest name otherwise."""
    if name not in _BY_NAME:
        raise RecipeError(f"method: there is no row {name!r}{did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]


def base(spec: str | Mapping[str, Any], *, base_dir: Path | None = None) -> Row:
    """The row that `spec` starts from, before its field overrides.

    A name; or a mapping with exactly one of `name` (a built-in row; with `type` method, preference
    or supervised, an unnamed row starting from that type's defaults) and `use` (`file.py:ROW`,
    relative to `base_dir`, else the working directory; or `package.module:ROW`).
    """
    if isinstance(spec, str):
        return get(spec)
    chosen = [key for key in ("name", "use") if spec.get(key) is not None]
    if chosen == ["use"]:
        if "type" in spec:
            raise RecipeError("method.type: goes with name, not with use; leave it out")
        return _load(str(spec["use"]), base_dir)
    if chosen != ["name"]:
        raise RecipeError(
            "method: say exactly one of name (a built-in row) and use (file.py:ROW)"
            f"; built in: {', '.join(_BY_NAME)}"
        )
    name = str(spec["name"])
    if "type" not in spec:
        return get(name)
    kind = str(spec["type"])
    if kind not in _TYPES:
        raise RecipeError(f"method.type: {kind!r} is not known{did_you_mean(kind, _TYPES)}")
    return _TYPES[kind](name=name)


def resolve(spec: str | Mapping[str, Any], *, base_dir: Path | None = None) -> Row:
    """The row that a recipe's `method` key means; `base` and then the field overrides."""
    row = base(spec, base_dir=base_dir)
    if isinstance(spec, str):
        return row
    changes = {k: v for k, v in spec.items() if k not in ("name", "use", "type")}
    return with_fields(row, changes)


def spec(row: Row) -> dict[str, Any]:
    """What a recipe's `method` key would say of `row`, whole; `resolve` gives the row back."""
    plain = as_mapping(row)
    name = plain.pop("name")
    if type(_BY_NAME.get(name)) is type(row):
        return {"name": name, **plain}
    return {"name": name, "type": type(row).__name__.lower(), **plain}


def _load(use: str, base_dir: Path | None) -> Row:
    place, colon, name = use.rpartition(":")
    if not colon or not place or not name:
        raise RecipeError(f"method.use: {use!r} must read file.py:ROW or package.module:ROW")
    module = load_module(place, base_dir=base_dir, key="method.use")
    row = attribute(module, name, key="method.use", place=place)
    if not isinstance(row, Row):
        raise RecipeError(
            f"method.use: {name} in {place} is of type {type(row).__name__}, not a Method, "
            "Preference or Supervised row"
        )
    return row
