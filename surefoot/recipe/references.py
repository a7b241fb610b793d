"""`stage:NAME` in a recipe: where it may stand, and the directory that it means.

Owns the names of a chain's directories, and putting what a stage saved in the place of its name.
Refuses to own merging (`stages.py`), and what a stage saves (`loops/stages`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import RecipeError
from surefoot.methods import Method, Supervised
from surefoot.recipe.recipe import Recipe, to_mapping

STAGES = "stages"
"""Where a chain keeps its stages, inside its run directory."""
MODEL = "model"
"""Where a complete stage keeps the model that it trained, inside its own directory."""
NAME = re.compile(r"[a-z0-9_]*[a-z_][a-z0-9_]*")
_FOLDER = re.compile(rf"(\d{{2,}})_({NAME.pattern})")
_PREFIX = "stage:"


def folder_name(index: int, name: str) -> str:
    """The directory of the stage at `index`, counted from 0: 01_sft is the first."""
    return f"{index + 1:02d}_{name}"


def folders(home: Path) -> list[tuple[int, str, Path]]:
    """The stages that have a directory in `home`, in order: index, name, directory."""
    if not home.is_dir():
        return []
    matches = ((_FOLDER.fullmatch(entry.name), entry) for entry in home.iterdir())
    found = [(int(match[1]) - 1, match[2], entry) for match, entry in matches if match]
    return sorted(entry for entry in found if entry[2].is_dir())


def earlier_stages(run: Path) -> tuple[str, ...]:
    """The stages before the one that lies in the directory `run`; none if it is no stage."""
    run = _absolute(run)
    match = _FOLDER.fullmatch(run.name)
    if match is None or run.parent.name != STAGES:
        return ()
    return tuple(name for index, name, _ in folders(run.parent) if index < int(match[1]) - 1)


def references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every `stage:NAME` of a recipe: its key, and NAME."""
    plain = to_mapping(recipe)
    written = {
        "model.path": plain["model"]["path"],
        "critic.path": plain["critic"]["path"],
        "critic.init": plain["critic"]["init"],
    }
    written.update({f"reward.{i}.use": part["use"] for i, part in enumerate(plain["reward"])})
    for key, value in written.items():
        if value is not None and value.startswith(_PREFIX):
            yield key, value.removeprefix(_PREFIX)


def check_names(recipe: Recipe, earlier: tuple[str, ...]) -> None:
    """Refuse a `stage:NAME` whose NAME is not among the stages before this one."""
    for key, name in references(recipe):
        if name in earlier:
            continue
        if earlier:
            raise RecipeError(
                f"{key}: there is no earlier stage {name!r}; earlier ones: {', '.join(earlier)}"
            )
        raise RecipeError(
            f"{key}: {_PREFIX}{name} takes what an earlier stage saved, and none comes before; "
            "name a directory"
        )


def check_kinds(recipe: Recipe, earlier: Mapping[str, Recipe]) -> None:
    """Refuse a `stage:NAME` whose stage does not save what the key takes. All names are known."""
    for key, name in references(recipe):
        other = earlier[name]
        judge = isinstance(other.method, Supervised) and other.method.loss == "bradley_terry"
        if key == "model.path" and judge:
            wanted = "a reward model, and a language model is wanted"
        elif key.startswith("reward.") and not judge:
            wanted = "a language model, and a reward model is wanted"
        elif key == "critic.init" and not _saves_critic(other):
            wanted = "no critic of its own; take a stage whose row has one, such as ppo"
        else:
            continue
        raise RecipeError(f"{key}: stage {name} ({other.method.name}) saves {wanted}")


def _saves_critic(recipe: Recipe) -> bool:
    row = recipe.method
    return isinstance(row, Method) and row.critic.kind != "none" and not recipe.critic.share_trunk


def grounded(recipe: Recipe, run: Path) -> Recipe:
    """`recipe` of the run in directory `run`, with directories where it says `stage:NAME`.

    model.path and critic.path become the model that the stage saved, critic.init the stage's run
    directory, reward.use the reward `model` on that directory. What was written stays in `stages`,
    so that the recipe is written and compared as it was.
    """
    found = dict(references(recipe))
    if not found:
        return recipe
    written: dict[str, Any] = {}
    changes: dict[str, dict[str, str]] = {"model": {}, "critic": {}}
    reward = list(recipe.reward)
    plain = to_mapping(recipe)
    for key, name in found.items():
        place = _place(key, name, run)
        section, _, rest = key.partition(".")
        if section == "reward":
            index = int(rest.partition(".")[0])
            written[f"reward.{index}"] = plain["reward"][index]
            part = recipe.reward[index]
            options = {**part.options, "path": str(place / MODEL)}
            new = {"use": "model", "name": part.name or name, "options": options}
            reward[index] = part.model_copy(update=new)
        else:
            written[key] = f"{_PREFIX}{name}"
            changes[section][rest] = str(place if key == "critic.init" else place / MODEL)
    return dataclasses.replace(
        recipe,
        model=recipe.model.model_copy(update=changes["model"]),
        critic=recipe.critic.model_copy(update=changes["critic"]),
        reward=tuple(reward),
        stages=written,
    )


def _place(key: str, name: str, run: Path) -> Path:
    home = _absolute(run).parent
    place = next((folder for _, other, folder in folders(home) if other == name), None)
    if place is None:
        raise RecipeError(
            f"{key}: {_PREFIX}{name} is a directory beside {run}, and it is not there; put it "
            "back, or train the chain again"
        )
    if not (place / MODEL).is_dir():
        raise RecipeError(
            f"{key}: stage {name} is not complete: {place} holds no {MODEL} yet; train the chain "
            "to the end of that stage"
        )
    return place


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
