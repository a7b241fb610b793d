"""Held-out comparisons that end no better than a coin are named, once; others are not."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.offline import make_offline_recipe
from support.tiny import write_rows

import surefoot
from surefoot.run.read import read_events


def run(folder: Path, model: Path, rows: list[dict[str, object]], *, held_out: int) -> list[str]:
    """The messages of kind `chance` of a reward model's run."""
    recipe = make_offline_recipe(folder, model, method={"name": "reward_model"}, rows="pairs")
    write_rows(folder / "rows.jsonl", rows)
    told = yaml.safe_load(recipe.read_text())
    told["data"]["eval_size"] = held_out
    told["optim"] |= {"batch_size": 12, "learning_rate": 0.01}
    told["run"] |= {"steps": 8, "eval_every": 4}
    recipe.write_text(yaml.safe_dump(told))
    surefoot.train(recipe)
    events = [row for row in read_events(folder / "run") if row["kind"] == "chance"]
    return [row["message"] for row in events]


def pairs(count: int, *, swapped: bool) -> list[dict[str, object]]:
    """The better answer ends with an exclamation mark; with `swapped`, in every other pair."""
    made: list[dict[str, object]] = []
    for i in range(count):
        good, bad = f"{i}!", f"{i}?"
        if swapped and i % 2:
            good, bad = bad, good
        made.append({"prompt": f"say {i}", "chosen": good, "rejected": bad, "id": str(i)})
    return made


def test_a_reward_model_that_learned_is_not_named(tiny_model: Path, tmp_path: Path) -> None:
    assert run(tmp_path, tiny_model, pairs(48, swapped=False), held_out=16) == []


def test_one_that_did_not_is_named_once(tiny_model: Path, tmp_path: Path) -> None:
    (told,) = run(tmp_path, tiny_model, pairs(48, swapped=True), held_out=16)
    assert "not shown to be better than chance" in told and "surefoot audit data" in told
