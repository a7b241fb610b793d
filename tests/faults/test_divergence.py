"""Weights that are of no use are never the newest checkpoint (fault row 12)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offline import make_offline_recipe
from support.runs import make_recipe, train

from surefoot.errors import EXIT_FINDING, NotSaved, StoppedOnFinding
from surefoot.loops import entry
from surefoot.rollout.sampling import draw
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.read import read_events, read_metrics

pytestmark = pytest.mark.fault(12)
CHANGE = "run.allow_change=[optim.learning_rate]"


def newest_is_good(run: Path) -> int:
    found = load_latest(RunDirectory(run), rename_damaged=False)
    assert found is not None
    weights = found.tensors(found.names[found.names.index("policy")])
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    return found.step


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [True, False])
def test_nothing_is_drawn_from_what_is_no_distribution(odd: float, greedy: bool) -> None:
    logits = torch.zeros(3, 300)
    logits[1, 7] = odd
    uniform = None if greedy else torch.full((3,), 0.5)
    with pytest.raises(NotSaved, match="not finite, so nothing can be sampled"):
        draw(logits, uniform)
    logits[1, 7] = float("-inf")
    ids, logps = draw(logits, uniform)
    assert ids.tolist()[1] != 7 and bool(logps.isfinite().all())


@pytest.mark.parametrize("rate", ["1e9", "1e30", "1e38"])
def test_a_run_that_diverges_keeps_a_checkpoint_from_before(
    rate: str, tiny_model: Path, tmp_path: Path
) -> None:
    """With a checkpoint after every step: those of refused steps retire none that is better."""
    recipe = make_recipe(tmp_path, tiny_model, method={"name": "rloo"}, run__checkpoint_every=1)
    assert train(recipe, "run.steps=3").returncode == 0
    run = tmp_path / "run"
    stopped = train(recipe, "run.steps=9", f"optim.learning_rate={rate}", CHANGE)
    assert stopped.returncode == EXIT_FINDING, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert [e for e in read_events(run) if e["kind"] == "stopped"]
    assert newest_is_good(run) >= 3
    steps = RunDirectory(run).checkpoint_steps()
    assert steps[0] == 3
    if steps != [3]:
        assert "delete the newest of the checkpoints" in stopped.stderr
    for step in steps[1:]:
        shutil.rmtree(RunDirectory(run).step_path(step))
    done = train(recipe, "run.steps=9", CHANGE)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(run)] == list(range(10))


@pytest.mark.parametrize("every", [1, 0])
def test_a_weight_that_is_no_number_is_saved_by_no_run(
    every: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken after a step that was itself in order, as by a bad memory cell."""
    settings: dict[str, Any] = {"method": {"name": "sft"}, "rows": "demonstrations"}
    recipe = make_offline_recipe(tmp_path, tiny_model, **settings, run__eval_every=0)
    entry.train(recipe, ["run.steps=2"])
    from surefoot.learner.optim import Optimizer

    step, taken = Optimizer.step, []

    def breaks(optimizer: Optimizer, **named: Any) -> None:
        step(optimizer, **named)
        taken.append(1)
        if len(taken) == 2:
            with torch.no_grad():
                optimizer.parameters[3].view(-1)[5] = float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", breaks)
        with pytest.raises(StoppedOnFinding, match="not finite"):
            entry.train(recipe, ["run.steps=8", f"run.checkpoint_every={every}"])
    assert newest_is_good(tmp_path / "run") == (3 if every else 2)
    entry.train(recipe, ["run.steps=8"])
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, 9))
