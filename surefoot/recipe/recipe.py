"""What one run is: the resolved recipe, as attributes.

Owns the `Recipe` value, its plain form, and the putting-in of `auto` values.
Refuses to own reading (`load.py`), writing (`dump.py`) and judging (`checks.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods import FAMILIES, Row, as_mapping, rows
from surefoot.recipe.explain import validated
from surefoot.recipe.schema import (
    SECTIONS,
    CriticModel,
    DataSource,
    Doctor,
    Judge,
    Model,
    Optim,
    RewardPart,
    Rollout,
    Run,
    Section,
)


@dataclass(frozen=True)
class Recipe:
    """One run, every value resolved except `auto` values that need the machine.

    `origins` says for every dotted key where its value came from: default, recipe, override,
    alias NAME, row NAME, auto, or stage (the key is a stage's own). `notes` are sentences for the
    user (accepted aliases).
    `base_dir` is where relative paths of model, data and reward start; None = working directory.
    `stages` holds, by key, what was written where the directory of an earlier stage stands now.
    Equality looks at the values alone.
    """

    model: Model
    data: tuple[DataSource, ...]
    reward: tuple[RewardPart, ...]
    method: Row
    critic: CriticModel
    rollout: Rollout
    optim: Optim
    run: Run
    doctor: Doctor
    judge: Judge
    stages: Mapping[str, Any] = field(default_factory=dict, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    base_dir: Path | None = field(default=None, compare=False)

    def with_auto(self, values: Mapping[str, Any]) -> Recipe:
        """This recipe with `auto` values put in, by dotted key.

        Only keys that hold `auto`, or that an earlier resolution filled, can be set.
        """
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            if section not in SECTIONS or name not in SECTIONS[section].model_fields:
                raise RecipeError(f"{key}: no such key can be resolved")
            present = getattr(getattr(self, section), name)
            if present != "auto" and self.origins.get(key) != "auto":
                raise RecipeError(f"{key}: holds {present!r}, not auto")
            sections.setdefault(section, {})[name] = value
        changes: dict[str, Any] = {
            section: _with(getattr(self, section), section, new)
            for section, new in sections.items()
        }
        origins = {**self.origins, **dict.fromkeys(values, "auto")}
        return dataclasses.replace(self, origins=origins, **changes)


def _with(section: Section, name: str, values: Mapping[str, Any]) -> Section:
    return validated(type(section), {**section.model_dump(), **values}, path=name)


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """Every value of `recipe` as plain words, numbers, lists and mappings; `load` reads it."""
    plain: dict[str, Any] = {
        "model": _plain(recipe.model),
        "data": [_with_options(source) for source in recipe.data],
        "reward": [_with_options(part) for part in recipe.reward],
        "method": _method(recipe.method),
    }
    for name in SECTIONS:
        plain.setdefault(name, _plain(getattr(recipe, name)))
    for key, written in recipe.stages.items():
        name, _, last = key.partition(".")
        plain[name][int(last) if name == "reward" else last] = written
    return plain


def leaves(recipe: Recipe) -> dict[str, Any]:
    """Every single value of `recipe` by dotted key, as in `data.0.source` or `method.kl.coef`."""
    found: dict[str, Any] = {}
    for section, value in to_mapping(recipe).items():
        _walk(value, section, found, depth=1)
    return found


def _walk(value: Any, path: str, found: dict[str, Any], *, depth: int) -> None:
    name = path.rpartition(".")[2]
    mapping = isinstance(value, dict) and bool(value)
    entries = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    # What lies below an option or below columns is one value of the room that reads it.
    opaque = path.startswith(("data.", "reward.")) and depth > 2
    if mapping and not opaque:
        for key, item in value.items():
            _walk(item, f"{path}.{key}", found, depth=depth + 1)
    elif (entries or name in ("shaping", "terms")) and value and not opaque:
        for index, item in enumerate(value):
            _walk(item, f"{path}.{index}", found, depth=depth + 1)
    elif isinstance(value, str) and path.startswith("method.") and _family(path) is not None:
        found[f"{path}.{_family(path)}"] = value
    else:
        found[path] = value


def _family(path: str) -> str | None:
    """The discriminator of the row field at `path`, if it is a choice of kinds."""
    parts = [part for part in path.split(".")[1:] if not part.isdigit()]
    family = FAMILIES.get(parts[-1]) if parts else None
    return family.key if family is not None else None


def _plain(section: Section) -> dict[str, Any]:
    return {key: _listed(value) for key, value in section.model_dump().items()}


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value


def _with_options(section: DataSource | RewardPart) -> dict[str, Any]:
    plain = _plain(section)
    options = plain.pop("options")
    return {**plain, **options}


def _method(row: Row) -> dict[str, Any]:
    plain = as_mapping(row)
    name = plain.pop("name")
    kind = type(row).__name__.lower()
    # A user's row is written whole, so that the run directory does not need the user's file.
    if type(rows().get(name)) is type(row):
        return {"name": name, **plain}
    return {"name": name, "type": kind, **plain}
