"""A recipe from a file or a mapping, with overrides: the one way to make a `Recipe`.

Owns the order of things: words become mappings, aliases become our keys, overrides are laid
over, sections are validated, `auto` is resolved where the recipe alone decides it.
Refuses to own the pieces (`text.py`, `aliases.py`, `schema.py`, `checks.py`, `built.py`), and
recipes of several trainings (`stages.py`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods import Method, Row, base, resolve
from surefoot.methods.checks import did_you_mean
from surefoot.methods.registry import spec
from surefoot.recipe import aliases, built, checks, text
from surefoot.recipe.explain import validated
from surefoot.recipe.origins import Origins
from surefoot.recipe.recipe import Recipe, to_mapping
from surefoot.recipe.references import check_names, earlier_stages, references
from surefoot.recipe.schema import KEYS, SECTIONS, DataSource, RewardPart, Section

BATCH_SIZE = 16
"""Examples a step of supervised and preference methods, where optim.batch_size says nothing."""
_WORD_MEANS = {"model": "path", "data": "source", "reward": "use", "method": "name"}


def load(
    source: Path | str | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    base_dir: Path | None = None,
    outside: Collection[str] = (),
) -> Recipe:
    """The recipe of a YAML file or a mapping, with `key.sub=value` overrides laid over it.

    `base_dir` is where relative paths start (default: the file's directory); `outside` names the
    sections (data, reward) that Python objects will supply and that may therefore be missing.
    A recipe that lies in the directory of a stage may name the stages before it.
    Raises RecipeError naming the key, and NotBuiltError for what this version does not have.
    """
    if isinstance(source, Recipe) and not overrides:
        return source
    raw, place, stem = read_source(source)
    if raw.pop("stages", None):
        raise RecipeError(
            "stages: this recipe is a chain of several trainings, and one is wanted here; "
            "surefoot train runs a chain"
        )
    origins = Origins()
    notes = given(raw, origins)
    notes += overridden(raw, overrides, origins)
    recipe = made(raw, origins, notes, base_dir=base_dir or place, stem=stem)
    check_names(recipe, _earlier(source))
    checks.check(recipe, outside=outside)
    built.check(recipe)
    return recipe


def made(
    raw: Mapping[str, Any],
    origins: Origins,
    notes: Sequence[str],
    *,
    base_dir: Path | None,
    stem: str | None,
) -> Recipe:
    """The recipe that `raw` means, each key judged alone; `given` and `overridden` opened it."""
    recipe = _built(raw, base_dir=base_dir, stem=stem)
    return dataclasses.replace(
        recipe, origins=origins.of(recipe, _row(raw, base_dir)), notes=tuple(notes)
    )


def _earlier(source: Path | str | Mapping[str, Any] | Recipe) -> tuple[str, ...]:
    """The names that `stage:` may mean: a recipe that was loaded before has only right ones."""
    if isinstance(source, Recipe):
        return tuple(name for _, name in references(source))
    return () if isinstance(source, Mapping) else earlier_stages(Path(source).parent)


def read_source(
    source: Path | str | Mapping[str, Any] | Recipe,
) -> tuple[dict[str, Any], Path | None, str | None]:
    """Plain values that may be changed, where relative paths start, and the file's name."""
    if isinstance(source, Recipe):
        return to_mapping(source), source.base_dir, None
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), None, None
    path = Path(source)
    return text.read(path), path.parent, path.stem


def given(raw: dict[str, Any], origins: Origins) -> list[str]:
    """Check and expand the top level of `raw` in place; the notes of its aliases."""
    brought = {name: raw.pop(name) for name in list(raw) if name in aliases.ALIASES}
    for name, value in (*raw.items(), *brought.items()):
        text.check_texts(value, str(name))
    for name in raw:
        _known(str(name))
    for name in KEYS:
        if name in raw:
            raw[name] = _opened(name, raw[name])
            origins.put(name, raw[name], "recipe")
    notes, taken = [], {}
    for alias, value in brought.items():
        changes = aliases.expand(alias, value, given=brought)
        for key, new in changes.items():
            twin = taken.get(key)
            if twin is None and _has(raw, key):
                twin = key
            # adam_beta1 and adam_beta2 agree on the one key that both are part of.
            if twin is not None and {alias, twin} != {"adam_beta1", "adam_beta2"}:
                raise RecipeError(f"{alias} and {twin} both set {key}; give one of them")
            taken[key] = alias
            text.put(raw, key, new)
            origins.put(key, new, f"alias {alias}")
        if changes:
            notes.append(aliases.note(alias, changes))
    return notes


def overridden(raw: dict[str, Any], overrides: Sequence[str], origins: Origins) -> list[str]:
    """Lay `overrides` over `raw` in place; the notes of their aliases."""
    pairs = [text.split_override(override) for override in overrides]
    for key, value in pairs:
        text.check_texts(value, key)
    brought = {key: value for key, value in pairs if key in aliases.ALIASES}
    notes: list[str] = []
    spelled: dict[str, str] = {}
    for key, value in pairs:
        if key in aliases.ALIASES:
            changes = aliases.expand(key, value, given=brought)
            if changes:
                notes.append(aliases.note(key, changes))
        else:
            _known(key.partition(".")[0])
            if key.partition(".")[0] == "stages":
                raise RecipeError(f"{key}: this recipe has no stages")
            changes = {_indexed(raw, key): value}
        for target, new in changes.items():
            twin = spelled.setdefault(target, key)
            if twin != key and {twin, key} != {"adam_beta1", "adam_beta2"}:
                raise RecipeError(f"overrides {twin} and {key} both set {target}; give one")
            if "." not in target:
                new = _opened(target, new)
            text.put(raw, target, new)
            origin = f"alias {key}" if key in aliases.ALIASES else "override"
            origins.put(target, new, origin)
    return notes


def _known(name: str) -> None:
    if name in aliases.EXPLAINED:
        raise RecipeError(f"{name}: {aliases.EXPLAINED[name]}")
    if name not in KEYS:
        near = did_you_mean(name, (*KEYS, *aliases.ALIASES))
        # Without a near name the sections are the answer; TRL's forty names would bury them.
        raise RecipeError(f"{name}: no such key{near if '?' in near else did_you_mean(name, KEYS)}")


def _opened(name: str, value: Any) -> Any:
    """A word as the mapping that it stands for; data and reward always as lists."""
    if name in ("data", "reward"):
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return [_mapping(name, item) for item in items]
    return {} if value is None else _mapping(name, value)


def _mapping(name: str, value: Any) -> Any:
    if name == "method" and isinstance(value, Row):
        return spec(value)
    if isinstance(value, str) and name in _WORD_MEANS:
        return {_WORD_MEANS[name]: value}
    if not isinstance(value, Mapping):
        raise RecipeError(f"{name}: is a mapping of keys, not {value!r:.60}")
    return dict(value)


def _indexed(raw: dict[str, Any], key: str) -> str:
    """`data.max_operand` means the only source there is."""
    section, _, rest = key.partition(".")
    if section not in ("data", "reward") or not rest:
        return key
    first = rest.partition(".")[0]
    entries = raw.setdefault(section, [])
    if not entries and first in ("0", *_fields(section)):
        entries.append({})
    if first.isdigit():
        return key
    if len(entries) != 1:
        raise RecipeError(
            f"{key}: there are {len(entries)} entries in {section}; say which, as in "
            f"{section}.0.{rest}"
        )
    return f"{section}.0.{rest}"


def _fields(section: str) -> tuple[str, ...]:
    return tuple((DataSource if section == "data" else RewardPart).model_fields)


def _has(raw: Mapping[str, Any], key: str) -> bool:
    node: Any = raw
    for part in key.split("."):
        # A bare word says the kind: `ratio: token` is `ratio: {level: token}`.
        if isinstance(node, str) and part in ("kind", "place", "level"):
            return True
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _built(raw: Mapping[str, Any], *, base_dir: Path | None, stem: str | None) -> Recipe:
    if not raw.get("method"):
        raise RecipeError("method: is required; as in method: {name: rloo, group_size: 8}")
    row = resolve(raw["method"], base_dir=base_dir)
    sections: dict[str, Any] = {
        name: validated(section, raw.get(name), path=name) for name, section in SECTIONS.items()
    }
    recipe = Recipe(
        data=_entries(DataSource, raw.get("data"), "data"),
        reward=_entries(RewardPart, raw.get("reward"), "reward"),
        method=row,
        base_dir=base_dir,
        **sections,
    )
    _check_paths(recipe)
    return _auto(recipe, stem)


def _check_paths(recipe: Recipe) -> None:
    model, critic = recipe.model, recipe.critic
    paths = {
        "model.path": model.path,
        "model.template": model.template,
        "model.lora.path": None if model.lora is None else model.lora.path,
        "critic.path": critic.path,
        "critic.init": critic.init,
        "run.dir": recipe.run.dir,
        **{f"data.{i}.source": source.source for i, source in enumerate(recipe.data)},
        **{f"reward.{i}.use": part.use for i, part in enumerate(recipe.reward)},
    }
    for key, path in paths.items():
        text.check_path(path, key)


def _entries(section: type[Section], raw: Any, name: str) -> tuple[Any, ...]:
    own = set(section.model_fields) - {"options"}
    entries = []
    for index, given_item in enumerate(raw or []):
        # An override may have put anything in the place of an entry.
        item = _mapping(name, given_item)
        keys = {key: value for key, value in item.items() if key in own}
        keys["options"] = {key: value for key, value in item.items() if key not in own}
        entries.append(validated(section, keys, path=f"{name}.{index}"))
    return tuple(entries)


def _auto(recipe: Recipe, stem: str | None) -> Recipe:
    """Put in what the recipe alone decides; `tokens_per_microbatch` waits for the machine."""
    model, rollout, optim = recipe.model, recipe.rollout, recipe.optim
    run, row = recipe.run, recipe.method
    compute = model.dtype if model.compute == "auto" else model.compute
    reference = model.dtype if model.reference_dtype == "auto" else model.reference_dtype
    sampling = compute if compute == "bfloat16" else model.dtype
    group = row.group_size if isinstance(row, Method) else 1
    model = model.model_copy(update={"compute": compute, "reference_dtype": reference})
    rollout = rollout.model_copy(
        update={
            "dtype": sampling if rollout.dtype == "auto" else rollout.dtype,
            "rows": rollout.prompts_per_step * group if rollout.rows == "auto" else rollout.rows,
        }
    )
    if not isinstance(row, Method) and optim.batch_size is None:
        optim = optim.model_copy(update={"batch_size": BATCH_SIZE})
    if run.dir is None:
        run = run.model_copy(update={"dir": f"runs/{stem or row.name}"})
    return dataclasses.replace(recipe, model=model, rollout=rollout, optim=optim, run=run)


def _row(raw: Mapping[str, Any], base_dir: Path | None) -> Row:
    return base(raw["method"], base_dir=base_dir)
