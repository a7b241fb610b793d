"""Runs of an adapter, killed and resumed: the same bytes of the adapter as without the kills."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.offline import make_offline_recipe
from support.runs import (
    assert_same_run,
    command,
    kill,
    make_recipe,
    start,
    train,
    wait_for_step,
    weights_of,
)

from surefoot.run.read import read_events, read_metrics

RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    # The reference is the base under the adapter, and is asked at every step.
    "grpo": ({"name": "grpo", "epochs": 2, "kl": {"coef": 0.1}}, None),
    "dpo": ({"name": "dpo"}, "pairs"),
    "sft": ({"name": "sft", "packing": True}, "demonstrations"),
}


def recipe_of(name: str, folder: Path, model: Path) -> Path:
    method, rows = RUNS[name]
    changes = {
        "model__lora": {"rank": 4, "alpha": 8.0},
        "optim__learning_rate": 0.02,
        "run__steps": 6,
    }
    if rows is None:
        return make_recipe(folder, model, method=method, **changes)
    return make_offline_recipe(folder, model, method=method, rows=rows, **changes)


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directory of an undisturbed run of each."""
    made = {}
    command("--version", cwd=tmp_path_factory.mktemp("warm")).communicate(timeout=200)
    for name in RUNS:
        recipe = recipe_of(name, tmp_path_factory.mktemp(name), tiny_model)
        done = train(recipe)
        assert done.returncode == 0, done.stderr
        made[name] = recipe.parent / "run"
    return made


@pytest.mark.fault(3)
@pytest.mark.parametrize("name", RUNS)
def test_kill_nine_within_given_steps(
    name: str,
    finished: dict[str, Path],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(name, tmp_path, tiny_model)
    run = tmp_path / "run"
    rng = random.Random(f"{name}-lora-kills")
    for turn, step in enumerate((1, 4)):
        # Another machine: what the reference said is not there, and is asked of the base again.
        child = start(recipe, SUREFOOT_CACHE=str(tmp_path / f"cache{turn}"))
        wait_for_step(run, step, child)
        time.sleep(rng.uniform(0.0, 0.05))
        kill(child)
        child.communicate(timeout=60)
    done = train(recipe, SUREFOOT_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert any(event["kind"] == "resumed" for event in read_events(run))
    assert_same_run(run, finished[name])
    names = weights_of(run).keys()
    assert names and all(".lora_" in tensor for tensor in names)


def test_the_adapters_moved_away_from_their_start(finished: dict[str, Path]) -> None:
    assert all(any(map(any, weights_of(run).values())) for run in finished.values())
    first, last = (
        [row for row in read_metrics(finished["dpo"]) if "rewards/margins" in row][i]
        for i in (0, -1)
    )
    assert first["rewards/margins"] == 0.0 != last["rewards/margins"]
    kls = [row["kl"] for row in read_metrics(finished["grpo"]) if "kl" in row]
    assert kls[0] < 1e-3 < kls[-1]
