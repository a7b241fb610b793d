"""Where paths start, and what is said of a path or a key that cannot be meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.tiny import save_tiny

from surefoot.errors import ModelError, RecipeError
from surefoot.models import load_model
from surefoot.models.load import resolve_directory
from surefoot.recipe import load

RECIPE = """
model: {path: tiny}
data: {source: addition, max_operand: 9}
reward: numeric
method: rloo
run: {steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipes" / "first.yaml"
    path.parent.mkdir()
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_a_model_beside_the_recipe_is_found_from_anywhere(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(recipe.parent / "tiny")
    monkeypatch.chdir("/")
    loaded = load_model(load(recipe))
    assert loaded.source == "tiny"
    assert loaded.template.max_context == 512


def test_the_recipes_directory_comes_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "tiny", there / "tiny"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.chdir(here)
    assert Path(resolve_directory("tiny", there)) == there / "tiny"
    assert Path(resolve_directory("tiny")).resolve() == here / "tiny"
    (there / "tiny" / "config.json").unlink()
    (there / "tiny").rmdir()
    assert Path(resolve_directory("tiny", there)).resolve() == here / "tiny"
    # What is nowhere a directory may be a Hugging Face id.
    assert resolve_directory("someone/model", there) == "someone/model"


def test_a_home_directory_is_spelled_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_directory("~/tiny") == str(tmp_path / "tiny")
    with pytest.raises(ModelError, match="no directory ~/other"):
        resolve_directory("~/other")


def test_a_run_directory_in_place_of_a_recipe_says_what_to_send(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=r"run directory.*first/recipe\.yaml"):
        load(run)
    with pytest.raises(RecipeError, match="is a directory; name a recipe"):
        load(tmp_path)
    assert os.listdir(run) == ["recipe.yaml"]


def test_an_unknown_section_far_from_every_name_is_answered_with_the_sections(
    recipe: Path,
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(recipe, ["qqq.x=1"])
    said = str(caught.value)
    assert "choose from critic, data, doctor" in said
    assert "adam_beta1" not in said
    # A near alias is still named.
    with pytest.raises(RecipeError, match="did you mean 'num_generations'"):
        load(recipe, ["num_generation=4"])
