"""Character models: one token a character, the same weights each time, and the two aliases."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.loops.entry import evaluate
from surefoot.models import LoadedModel, load_model
from surefoot.models.alias import alias_directory
from surefoot.models.characters import PRINTABLE, make_tokenizer
from surefoot.recipe import load

ROOT = Path(surefoot.__file__).resolve().parents[1]
RL = ROOT / "examples" / "study_rl.yaml"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    return tmp_path


def loaded(name: str) -> LoadedModel:
    return load_model(load(RL, [f"model.path={name}"]))


def parameters(found: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in found.model.parameters())


def test_every_printable_character_is_one_token_and_comes_back() -> None:
    tokenizer = make_tokenizer(PRINTABLE, unknown=True)
    ids = tokenizer(PRINTABLE)["input_ids"]
    assert ids == list(range(1, 97))
    assert tokenizer.decode(ids) == PRINTABLE
    assert len(tokenizer) == 98


def test_another_character_is_unknown_or_an_error() -> None:
    assert make_tokenizer("ab", unknown=True)("aéb")["input_ids"] == [1, 3, 2]
    # The library's own class is Exception.
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer("ab")("aéb")


def test_the_untrained_model_is_made_once_and_always_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded("characters-1m")
    assert [place.name for place in cache.iterdir()] == ["characters-1m-1"]
    assert 1_000_000 <= parameters(first) <= 3_000_000
    assert first.stop_ids == (0,) and first.source == "characters-1m"
    again = cache / "again"
    again.mkdir()
    monkeypatch.setenv("SUREFOOT_CACHE", str(again))
    assert loaded("characters-1m").hash == first.hash
    monkeypatch.setattr("surefoot.models.characters.save_study", lambda folder: pytest.fail("made"))
    assert loaded("characters-1m").hash == first.hash


def test_a_model_that_could_not_be_written_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> Any:
        (folder / "config.json").write_text("{")
        raise OSError("no space left")

    monkeypatch.setattr("surefoot.models.characters.save_study", full)
    with pytest.raises(OSError, match="no space left"):
        alias_directory("characters-1m")
    assert list(cache.iterdir()) == []


def test_the_study_model_needs_no_cache_and_is_small(cache: Path) -> None:
    found = loaded("study")
    assert list(cache.iterdir()) == []
    assert 1_000_000 <= parameters(found) <= 3_000_000
    files = list(alias_directory("study").iterdir())
    assert sum(file.stat().st_size for file in files) < 6_000_000


def test_the_study_model_is_part_of_an_installed_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["surefoot"]
    carried = {file for pattern in globs for file in (ROOT / "surefoot").glob(pattern)}
    assert set(alias_directory("study").iterdir()) <= carried


def test_the_study_model_adds_as_often_as_its_card_says() -> None:
    card = (alias_directory("study") / "README.md").read_text(encoding="utf-8")
    said = re.search(r"(\d+) of (\d+) held-out sums", card)
    assert said is not None
    seen = evaluate(str(RL)).evaluation
    assert seen.n == int(said[2]) == 200
    assert 0.2 <= seen.accuracy <= 0.4
    # Rounding of another processor may turn an answer that hangs in the balance.
    assert abs(seen.correct - int(said[1])) <= 4
