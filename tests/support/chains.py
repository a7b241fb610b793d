"""Whole chains of tiny trainings: their recipes, and what must be equal afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.runs import assert_same_run, make_recipe

FIRST: dict[str, Any] = {"name": "first", "method": {"name": "rloo", "group_size": 4}}
SECOND: dict[str, Any] = {
    "name": "second",
    "model": {"path": "stage:first"},
    "method": {"name": "grpo", "group_size": 4, "epochs": 2, "minibatches": 2},
}


def make_chain(
    folder: Path, model: Path, *stages: dict[str, Any], steps: int = 6, **changes: Any
) -> Path:
    """A recipe of `stages` (default FIRST and SECOND), each of so many steps; returns it."""
    path = make_recipe(folder, model, method={"name": "rloo"}, run__steps=steps, **changes)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    del recipe["method"]
    recipe["stages"] = list(stages or (FIRST, SECOND))
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def stage(run: Path, name: str) -> Path:
    """The directory of a stage, whatever its place."""
    found = list((run / "stages").glob(f"*_{name}"))
    assert len(found) == 1, (name, found)
    return found[0]


def model_files(run: Path, name: str) -> dict[str, bytes]:
    """What a stage saved, byte for byte."""
    folder = stage(run, name) / "model"
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def assert_same_chain(got: Path, want: Path) -> None:
    """Every stage has the same rows, checkpoints and model, and nothing half-written lies about."""
    names = [place.name for place in sorted((want / "stages").iterdir())]
    assert [place.name for place in sorted((got / "stages").iterdir())] == names
    for name in names:
        mine, theirs = got / "stages" / name, want / "stages" / name
        assert_same_run(mine, theirs)
        assert {f.name for f in mine.iterdir()} == {f.name for f in theirs.iterdir()}
        stem = name.partition("_")[2]
        assert model_files(got, stem) == model_files(want, stem)
