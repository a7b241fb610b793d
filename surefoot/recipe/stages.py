"""A recipe with `stages`: from one file to one recipe for each training of the chain.

Owns the laying of a stage's keys over the top level, overrides of one stage, and the check of all
stages before the first begins.
Refuses to own what one training is (`load.py`), `stage:NAME` (`references.py`), and running.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods import FAMILIES
from surefoot.methods.checks import did_you_mean
from surefoot.recipe import built, checks, text
from surefoot.recipe.dump import to_yaml
from surefoot.recipe.load import given, made, overridden, read_source
from surefoot.recipe.origins import Origins
from surefoot.recipe.recipe import Recipe, leaves
from surefoot.recipe.references import NAME, STAGES, check_kinds, check_names, folder_name
from surefoot.recipe.schema import KEYS

HEADER = (
    "# The stages of a chain, each resolved, one after another; after each value: where it came\n"
    "# from. `auto` values are resolved when a stage begins, in its own recipe.yaml.\n"
)
_KEY = re.compile(r"[a-z_]\w*(\.\w+)*(?=: )")
_WHOLE = ("data", "reward", "method")


@dataclass(frozen=True)
class Stage:
    """One training of a chain; the `run.dir` of its recipe lies in that of the chain."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Chain:
    """Trainings that follow each other, and the run directory that holds them."""

    dir: str
    stages: tuple[Stage, ...]

    def to_yaml(self) -> str:
        """The chain as YAML that `load_chain` reads back as an equal chain."""
        lines = ["run:", f"  dir: {text.dump(self.dir)}", "stages:"]
        for stage in self.stages:
            own = to_yaml(stage.recipe).splitlines()[1:]
            lines.append(f"  - name: {text.dump(stage.name)}")
            lines += [f"    {line}" for line in own if not line.startswith("  dir: ")]
        return HEADER + "\n".join(lines) + "\n"


def load_chain(
    source: Path | str | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    base_dir: Path | None = None,
) -> Chain | None:
    """The chain of a recipe with `stages`; None if it has none, so that `load` reads it.

    `key=value` is laid over the top level, `stages.NAME.key=value` over one stage. Every stage is
    judged. RecipeError names a key of a stage as `stages.1.optim.lr`, counted from 0.
    """
    if isinstance(source, Recipe):
        return None
    raw, place, stem = read_source(source)
    entries = raw.pop("stages", None)
    if not entries:
        return None
    names = _names(entries)
    over_all, over_one = _apart(overrides, names)
    top = Origins()
    notes = given(raw, top)
    notes += overridden(raw, over_all, top)
    where = _directory(raw, top, stem or "_".join(names))
    drafts = [_laid_over(raw, top, entry, f"stages.{index}") for index, entry in enumerate(entries)]
    _check_read(top, [draft.origins for draft in drafts])
    recipes: list[Recipe] = []
    for index, (name, draft) in enumerate(zip(names, drafts, strict=True)):
        with _named(index, draft.origins, top):
            notes_of = [*notes, *draft.notes, *overridden(draft.raw, over_one[name], draft.origins)]
            _put_directory(draft, str(Path(where, STAGES, folder_name(index, name))))
            recipes.append(
                made(draft.raw, draft.origins, notes_of, base_dir=base_dir or place, stem=None)
            )
    _check(names, recipes, drafts, top)
    return Chain(where, tuple(Stage(*pair) for pair in zip(names, recipes, strict=True)))


@dataclass(frozen=True)
class _Draft:
    """A stage before it is judged: the top level with the stage's keys laid over it."""

    raw: dict[str, Any]
    origins: Origins
    notes: list[str]


def _names(entries: Any) -> list[str]:
    if not isinstance(entries, list | tuple):
        raise RecipeError("stages: is a list of mappings, each with a name")
    names: list[str] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise RecipeError(f"stages.{index}: is a mapping with a name, not {entry!r:.60}")
        name = entry.get("name")
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            said = "is required" if name is None else f"{name!r:.60} cannot be used"
            raise RecipeError(
                f"stages.{index}.name: {said}; a name is made of a-z, 0-9 and _, and is no number"
            )
        if name in names:
            raise RecipeError(f"stages.{index}.name: {name!r} is the name of an earlier stage")
        names.append(name)
    return names


def _apart(
    overrides: Sequence[str], names: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides of the top level, and those of each stage without `stages.NAME`."""
    over_all: list[str] = []
    over_one: dict[str, list[str]] = {name: [] for name in names}
    for override in overrides:
        key, _ = text.split_override(override)
        head, _, rest = key.partition(".")
        if head != STAGES:
            over_all.append(override)
            continue
        stage, _, rest = rest.partition(".")
        if stage.isdigit() and int(stage) < len(names):
            stage = names[int(stage)]
        if stage not in names:
            raise RecipeError(f"{key}: there is no stage {stage!r}{did_you_mean(stage, names)}")
        if not rest:
            raise RecipeError(f"{key}: write the key too, as in stages.{stage}.run.steps=100")
        over_one[stage].append(f"{rest}={override.partition('=')[2]}")
    return over_all, over_one


def _directory(raw: dict[str, Any], origins: Origins, name: str) -> str:
    """The chain's run directory, which is no key of its stages."""
    run = raw.get("run", {})
    where = run.pop("dir", None)
    origins.forget("run.dir")
    if where is not None and not isinstance(where, str):
        raise RecipeError(f"run.dir: {where!r:.60}: should be a path")
    return where or f"runs/{name}"


def _laid_over(
    top: Mapping[str, Any], known: Origins, entry: Mapping[str, Any], path: str
) -> _Draft:
    own = {key: value for key, value in copy.deepcopy(dict(entry)).items() if key != "name"}
    if STAGES in own:
        raise RecipeError(f"{path}.stages: a stage has no stages of its own")
    for key, value in own.items():
        if key in KEYS and (value is None or value == {}):
            raise RecipeError(f"{path}.{key}: is empty; leave it out, or set a key of it")
    raw, origins, written = copy.deepcopy(dict(top)), known.copy(), Origins()
    try:
        notes = given(own, written)
        for key, value in own.items():
            _lay(raw, key, value, origins, written)
    except RecipeError as error:
        raise _moved(error, path, lambda key: False) from error
    return _Draft(raw, origins, notes)


def _lay(raw: dict[str, Any], key: str, value: Any, origins: Origins, written: Origins) -> None:
    """Mappings are laid over key by key; lists, and a method or a choice that is named, whole."""
    if isinstance(value, Mapping) and value and not _chooses(key, value):
        for name, item in value.items():
            _lay(raw, f"{key}.{name}", item, origins, written)
        return
    text.put(raw, key, value)
    origins.take(written, key)


def _chooses(key: str, value: Mapping[str, Any]) -> bool:
    if key == "method":
        return "name" in value or "use" in value
    family = FAMILIES.get(key.rpartition(".")[2]) if key.startswith("method.") else None
    return family is not None and family.key in value


def _check_read(top: Origins, stages: Sequence[Origins]) -> None:
    """Refuse a value of the top level that no stage takes."""
    for key, origin in top.written().items():
        if any(stage.stands(key, top) for stage in stages):
            continue
        if origin == "override":
            mend = f"write stages.NAME.{key}=VALUE for the stages that are meant"
        else:
            mend = "leave it out, or take it out of a stage"
        section = key.partition(".")[0]
        whole = section if section in _WHOLE else "value"
        raise RecipeError(
            f"{key}: every stage sets its own {whole}, so nothing would read this; {mend}"
        )


def _put_directory(draft: _Draft, where: str) -> None:
    run = draft.raw.setdefault("run", {})
    if run.get("dir") is not None:
        raise RecipeError(
            "run.dir: cannot be set for one stage, which lies inside the run directory of the "
            "chain; set run.dir at the top level"
        )
    run["dir"] = where
    draft.origins.put("run.dir", where, "auto")


def _check(
    names: Sequence[str], recipes: Sequence[Recipe], drafts: Sequence[_Draft], top: Origins
) -> None:
    """Everything that looks at more than one key, in every stage."""
    known = {key for recipe in recipes for key in leaves(recipe)}
    known |= {key.rsplit(".", n)[0] for key in known for n in range(key.count(".") + 1)}
    earlier: dict[str, Recipe] = {}
    for index, (name, recipe) in enumerate(zip(names, recipes, strict=True)):
        with _named(index, drafts[index].origins, top):
            check_names(recipe, tuple(earlier))
            check_kinds(recipe, earlier)
            checks.check(recipe, outside=(), elsewhere=known)
            built.check(recipe)
        earlier[name] = recipe


@contextmanager
def _named(index: int, origins: Origins, top: Origins) -> Iterator[None]:
    """Errors within say which stage they are about, unless the key stands at the top level."""
    try:
        yield
    except RecipeError as error:

        def shared(key: str) -> bool:
            written = origins.written()
            below = [k for k in written if k == key or k.startswith(f"{key}.")]
            return bool(below) and all(origins.stands(k, top) for k in below)

        raise _moved(error, f"stages.{index}", shared) from error


def _moved(error: RecipeError, path: str, shared: Callable[[str], bool]) -> RecipeError:
    lines = []
    for place, line in enumerate(str(error).splitlines()):
        key = _KEY.match(line)
        if key is not None and not shared(key[0]):
            line = f"{path}.{line}"
        elif key is None and place == 0:
            line = f"{path}: {line}"
        lines.append(line)
    return type(error)("\n".join(lines))
