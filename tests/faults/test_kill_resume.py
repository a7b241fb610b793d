"""Killed, stopped or damaged: the same command goes on, and ends where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.runs import (
    alive,
    assert_same_run,
    command,
    descendants,
    kill,
    make_recipe,
    rows_of,
    start,
    train,
    train_afresh,
    wait_for_step,
)
from support.tiny import save_tiny

from surefoot.errors import Interrupted
from surefoot.loops import entry
from surefoot.rollout import LocalEngine

METHODS = {
    "grpo": {"name": "grpo", "epochs": 2, "minibatches": 2},
    "dapo": {"name": "dapo", "keep": {"kind": "informative", "max_rounds": 2}},
    "ppo": {
        "name": "ppo",
        "epochs": 2,
        "kl": {"controller": {"kind": "proportional", "target": 0.5, "horizon": 100}},
    },
    # Killed inside the warm-up, at its end, and after it.
    "ppo_warm": {"name": "ppo_warm", "warmup": {"max_steps": 5}},
    "vapo": {"name": "vapo", "credit": {"length_alpha": 1.0}, "warmup": {"max_steps": 6}},
    "reinforce_ma": {"name": "reinforce_ma", "baseline": {"scope": "task"}},
}


SECONDS: dict[str, float] = {}
"""How long an undisturbed run of a method takes here."""


@pytest.fixture(scope="module")
def finished(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """An undisturbed run of each method: its recipe and its run directory."""
    made = {}
    command("--version", cwd=tmp_path_factory.mktemp("warm")).communicate(timeout=200)
    for name, method in METHODS.items():
        recipe = make_recipe(tmp_path_factory.mktemp(name), tiny_model, method=method)
        # One of them in a process of its own, so that the forked ones are held to that.
        began = time.monotonic()
        done = train_afresh(recipe) if name == "grpo" else train(recipe)
        SECONDS[name] = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        made[name] = (recipe, recipe.parent / "run")
    return made


def test_the_undisturbed_runs_cross_an_epoch_and_clip(
    finished: dict[str, tuple[Path, Path]],
) -> None:
    rows = [json.loads(line) for line in rows_of(finished["grpo"][1], "metrics.jsonl")]
    assert rows[-1]["epoch"] >= 3
    assert rows[-1]["optimizer_steps"] == 4
    assert any(row.get("ratio/max", 1.0) > 1.0 for row in rows)
    assert len(rows) == 10  # the evaluation before the first step, and nine steps


@pytest.mark.parametrize("name", METHODS)
def test_kill_nine_within_given_steps(
    name: str, finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS[name])
    run = tmp_path / "run"
    rng = random.Random(f"{name}-kills")
    for step in (1, 5, 8):
        child = start(recipe)
        wait_for_step(run, step, child)
        time.sleep(rng.uniform(0.0, 0.15))
        kill(child)
        child.communicate(timeout=60)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished[name][1])
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "resumed" in kinds


def test_an_adaptive_coefficient_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    """The target is never reached, so every step halves the coefficient."""
    kl = {"coef": 0.5, "controller": {"kind": "doubling", "target": 1000.0}}
    method = {"name": "grpo", "kl": kl}
    whole = make_recipe(tmp_path / "whole", tiny_model, method=method, run__steps=5)
    assert train(whole).returncode == 0
    recipe = make_recipe(tmp_path / "killed", tiny_model, method=method, run__steps=5)
    run = tmp_path / "killed" / "run"
    child = start(recipe)
    wait_for_step(run, 3, child)
    kill(child)
    child.communicate(timeout=60)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, tmp_path / "whole" / "run")
    rows = [json.loads(line) for line in rows_of(run, "metrics.jsonl")]
    assert [row["kl/coef"] for row in rows if "kl/coef" in row] == [0.5 / 2**n for n in range(5)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "reinforce_ma"])
def test_kill_nine_at_random_moments(
    name: str, seed: int, finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """Before the first step, in one, while saving: wherever it falls, until the run is through."""
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS[name])
    rng = random.Random(f"{name}-{seed}")
    killed = 0
    for _ in range(5):
        child = start(recipe)
        time.sleep(rng.uniform(0.1, 0.8) * min(SECONDS.values()))
        kill(child)
        child.communicate(timeout=60)
        killed += child.returncode == -signal.SIGKILL
    assert killed >= 2
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", finished[name][1])


def test_nobody_survives_the_killed_process(tiny_model: Path, tmp_path: Path) -> None:
    """Reward workers die with the run, and its lock is free at once."""
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS["grpo"], run__steps=400)
    child = start(recipe)
    wait_for_step(tmp_path / "run", 1, child)
    family = descendants(child.pid)
    assert family
    kill(child)
    child.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in family if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_step_saves_and_says_75(
    number: int, finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS["grpo"])
    run = tmp_path / "run"
    child = start(recipe)
    wait_for_step(run, 3, child)
    kill(child, number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "same command" in err and "Traceback" not in err
    saved = sorted((run / "checkpoints").glob("step_??????"))
    assert int(saved[-1].name.removeprefix("step_")) >= 3
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished["grpo"][1])


def test_a_finished_run_is_left_alone(finished: dict[str, tuple[Path, Path]]) -> None:
    recipe, run = finished["grpo"]
    before = {file: file.stat().st_mtime_ns for file in run.glob("*.jsonl")}
    done = train(recipe)
    assert done.returncode == 0
    assert "complete at step 9" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in run.glob("*.jsonl")} == before


def test_a_flipped_bit_sets_the_checkpoint_aside_by_name(
    finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS["grpo"])
    run = tmp_path / "run"
    child = start(recipe)
    wait_for_step(run, 7, child)
    kill(child)
    child.communicate(timeout=60)
    newest = max((run / "checkpoints").glob("step_??????"))
    file = newest / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr
    assert (newest.parent / f"{newest.name}.corrupt").is_dir()
    assert_same_run(run, finished["grpo"][1])


def test_another_learning_rate_is_refused_unless_allowed(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS["grpo"], run__steps=2)
    assert train(recipe).returncode == 0
    more = ("run.steps=3", "optim.learning_rate=0.001")
    refused = train(recipe, *more)
    assert refused.returncode == 2
    assert "optim.learning_rate: 0.003 -> 0.001" in refused.stderr
    allowed = train(recipe, *more, "run.allow_change=[optim.learning_rate]")
    assert allowed.returncode == 0, allowed.stderr
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "optim.learning_rate: 0.003 -> 0.001" in events


def test_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    recipe = make_recipe(tmp_path, model, method=METHODS["grpo"], run__steps=2)
    assert train(recipe).returncode == 0
    save_tiny(tmp_path / "model", seed=1)
    refused = train(recipe, "run.steps=3")
    assert refused.returncode == 2
    said = " ".join(refused.stderr.split())
    assert "belongs to another run: model was" in said and "new run.dir" in said


def test_a_second_process_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=METHODS["grpo"], run__steps=400)
    child = start(recipe)
    try:
        wait_for_step(tmp_path / "run", 1, child)
        second = train(recipe)
        assert second.returncode == 2
        assert str(child.pid) in second.stderr
    finally:
        kill(child)
        child.communicate(timeout=60)


def test_a_signal_during_an_evaluation_loses_no_row(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the step have changed by then, so its row must not be left out."""
    runs = {}
    for name in ("whole", "stopped"):
        runs[name] = make_recipe(tmp_path / name, tiny_model, method=METHODS["dapo"], run__steps=5)
    entry.train(runs["whole"])
    sample = LocalEngine.sample
    told: list[int] = []

    def signal_in_evaluation(engine: LocalEngine, *args: Any, **kwargs: Any) -> Any:
        if kwargs["purpose"] == "eval" and engine.version == 4 and not told:
            told.append(engine.version)
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(engine, *args, **kwargs)

    monkeypatch.setattr(LocalEngine, "sample", signal_in_evaluation)
    with pytest.raises(Interrupted):
        entry.train(runs["stopped"])
    assert told == [4]
    run = tmp_path / "stopped" / "run"
    rows = [json.loads(line) for line in rows_of(run, "metrics.jsonl")]
    saved = max(int(p.name[5:]) for p in (run / "checkpoints").glob("step_??????"))
    assert [row["step"] for row in rows] == list(range(saved + 1))
    entry.train(runs["stopped"])
    assert_same_run(run, tmp_path / "whole" / "run")
