"""docs/coming_from_trl.md says what the aliases and the installed TRL say, and its script runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe import ALIASES, leaves, load
from surefoot.recipe.aliases import EXPLAINED, keys_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "examples" / "trl_script.py"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs datasets"
)


def table(title: str) -> list[list[str]]:
    """The cells of the table under a heading of the page, without its two head lines."""
    lines = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    assert rows, title
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(cell: str) -> str:
    assert cell.startswith("`") and cell.endswith("`"), cell
    return cell.strip("`")


def test_every_accepted_name_stands_in_the_table_with_its_keys() -> None:
    found = {code(name): tuple(map(code, keys.split(", "))) for name, keys in table("Names")}
    assert found == {name: keys_of(name) for name in ALIASES}


def test_every_name_that_means_something_else_stands_in_the_table() -> None:
    found = {code(name): mend for name, mend in table("Names that are refused")}
    assert found == dict(EXPLAINED)


def recipe(**top: Any) -> dict[str, Any]:
    run = {} if "max_steps" in top else {"run": {"steps": 1}}
    method = "sapo" if any(name.startswith("sapo") for name in top) else "grpo"
    return {"method": method, "data": "addition", "reward": "numeric", **run, **top}


def trl_defaults() -> Iterator[tuple[str, Any]]:
    from trl import GRPOConfig

    for field in dataclasses.fields(GRPOConfig):
        if field.name in ALIASES:
            yield field.name, field.default


@needs_trl
def test_the_table_of_defaults_is_that_of_the_installed_trl() -> None:
    rows = {code(name): (code(theirs), ours) for name, theirs, ours in table("Defaults")}
    plain = leaves(load(recipe()))
    sapo = leaves(load({**recipe(), "method": "sapo"}))
    differing = set()
    for name, default in trl_defaults():
        keys, ours = keys_of(name), sapo if name.startswith("sapo") else plain
        if name == "save_total_limit":
            # The one null that has another meaning: TRL keeps all.
            differs = ours["run.keep"] is not None
        elif default is None:
            continue
        else:
            try:
                told = leaves(load(recipe(**{name: default})))
            except RecipeError:
                differs = True  # TRL's default is not even a value here.
            else:
                differs = told != ours
        if not differs:
            assert name not in rows, f"{name} does not differ any more"
            continue
        differing.add(name)
        assert rows[name][0] == str(default), name
        present = [ours[key] if key in ours else ours[f"{key}.kind"] for key in keys]
        words = "required" if name == "max_steps" else ", ".join(map(str, present))
        assert code(rows[name][1]) == words, name
    assert set(rows) == differing


def test_the_page_shows_the_script_as_it_is() -> None:
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```" in PAGE


@needs_datasets
def test_the_script_trains(tiny_model: Path, tmp_path: Path) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    changes = ["run.steps=2", f"run.dir={tmp_path / 'run'}", "rollout.prompts_per_step=2"]
    run = main(str(tiny_model), changes)
    rows = run.metrics
    assert [row["step"] for row in rows] == [1, 2]
    # A random model says no solution, and is paid for brevity: the second reward alone.
    for row in rows:
        assert 0 < row["rewards/brevity_reward/mean"] <= 0.5
        assert row["reward"] == pytest.approx(
            row["rewards/accuracy_reward/mean"] + row["rewards/brevity_reward/mean"]
        )
    assert rows[0]["learning_rate"] == 1e-5


@needs_trl
@needs_datasets
def test_the_script_uses_trls_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are fields of GRPOConfig, given to `train` beside `method` alone."""
    import surefoot

    seen: dict[str, Any] = {}
    monkeypatch.setattr(surefoot, "train", lambda recipe, *_, **__: seen.update(recipe))
    runpy.run_path(str(SCRIPT))["main"]()
    assert seen.pop("method") == "grpo"
    from trl import GRPOConfig

    assert set(seen) <= {field.name for field in dataclasses.fields(GRPOConfig)}
