"""A run on given data whose gradient is exactly zero: no step is made, it is counted, it stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from support.offline import make_offline_recipe
from support.tiny import write_rows

import surefoot
from surefoot.errors import StoppedOnFinding
from surefoot.run.read import read_metrics


def won(folder: Path, model: Path, **run: object) -> Path:
    """Hinge without a reference: a chosen answer much shorter than the rejected one has won."""
    method = {"name": "hinge", "reference": False, "beta": 1.0}
    recipe = make_offline_recipe(folder, model, method=method, rows="pairs")
    rows = [{"prompt": f"say {c}", "chosen": c, "rejected": c * 30, "id": c} for c in "abcdefghij"]
    write_rows(folder / "rows.jsonl", rows)
    told = yaml.safe_load(recipe.read_text())
    told["optim"]["weight_decay"] = 0.1
    told["run"] |= {"eval_every": 0, **run}
    recipe.write_text(yaml.safe_dump(told))
    return recipe


@pytest.mark.fault(16, 17)
def test_steps_without_a_gradient_leave_the_weights_and_stop(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoppedOnFinding, match=r"4 steps in a row .* run\.stop_without_signal"):
        surefoot.train(won(tmp_path, tiny_model, stop_without_signal=4))
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert [row["steps_without_signal"] for row in rows] == [1, 2, 3, 4]
    assert [(row["optimizer_steps"], row["skipped_steps"]) for row in rows] == [(0, 0)] * 4
    assert [row["grad_norm"] for row in rows] == [0.0] * 4
    saved = tmp_path / "run" / "checkpoints" / "step_000004" / "policy.safetensors"
    old, new = load_file(tiny_model / "model.safetensors"), load_file(saved)
    assert all(new[name].equal(old[name]) for name in new.keys() & old.keys())
    assert new.keys() & old.keys()


def test_never_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    run = surefoot.train(won(tmp_path, tiny_model, stop_without_signal="never"))
    assert run.metrics[-1]["steps_without_signal"] == 9
