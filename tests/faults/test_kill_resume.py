"""Killed, stopped or damaged: the same command goes on, and ends where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import (
    REWARD,
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
    weights_of,
)
from support.tiny import architectures, save_tiny

from surefoot.errors import Interrupted
from surefoot.learner.batch import Batch, Plan
from surefoot.learner.update import Learner
from surefoot.loops import entry
from surefoot.rollout import LocalEngine
from surefoot.run.directory import RunDirectory
from surefoot.run.lock import RunLock

GRPO = {"name": "grpo", "epochs": 2, "minibatches": 2}
DAPO = {"name": "dapo", "keep": {"kind": "informative", "max_rounds": 2}}
METHODS = {
    "grpo": GRPO,
    # Killed inside the warm-up, at its end, and after it.
    "ppo_warm": {"name": "ppo_warm", "warmup": {"max_steps": 5}},
    "vapo": {"name": "vapo", "credit": {"length_alpha": 1.0}, "warmup": {"max_steps": 6}},
}


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
        done = train_afresh(recipe) if name == "grpo" else train(recipe)
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


@pytest.mark.fault(3)
@pytest.mark.parametrize("name", ["ppo_warm", "vapo"])
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


@pytest.mark.fault(3)
def test_nobody_survives_the_killed_process(tiny_model: Path, tmp_path: Path) -> None:
    """Reward workers die with the run, and its lock is free at once."""
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=400)
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


@pytest.mark.fault(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_a_step_saves_and_says_75(
    number: int, finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO)
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


@pytest.mark.fault(4)
def test_a_signal_during_an_evaluation_loses_no_row(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the step have changed by then, so its row must not be left out."""
    runs = {}
    for name in ("whole", "stopped"):
        runs[name] = make_recipe(tmp_path / name, tiny_model, method=DAPO, run__steps=5)
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


def test_a_finished_run_is_left_alone(finished: dict[str, tuple[Path, Path]]) -> None:
    recipe, run = finished["grpo"]
    before = {file: file.stat().st_mtime_ns for file in run.glob("*.jsonl")}
    done = train(recipe)
    assert done.returncode == 0
    assert "complete at step 9" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in run.glob("*.jsonl")} == before


# -- damage, foreign files -------------------------------------------------------------------------


def killed(recipe: Path, step: int) -> list[Path]:
    """Kill a run once the row of `step` is there; its checkpoints, newest first."""
    child = start(recipe)
    wait_for_step(recipe.parent / "run", step, child)
    kill(child)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    return sorted((recipe.parent / "run" / "checkpoints").glob("step_??????"), reverse=True)


@pytest.mark.fault(7)
def test_damaged_checkpoints_are_set_aside_by_name(
    finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """A flipped bit in the newest, half a file in the one before it: the third is whole."""
    changes = {"run__checkpoint_every": 1, "run__keep": 3}
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, **changes)
    newest, older, whole = killed(recipe, 5)
    file = newest / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    file = older / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    for path, name in ((newest, "policy.safetensors"), (older, "optimizer.safetensors")):
        assert f"checkpoint {path.name} is set aside: {name}" in said
        assert path.with_name(f"{path.name}.corrupt").is_dir()
    assert f"resuming after step {int(whole.name.removeprefix('step_'))}" in said
    assert_same_run(tmp_path / "run", finished["grpo"][1])


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.mark.fault(11)
def test_a_pickle_in_a_checkpoint_is_never_opened(
    finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """A foreign file is refused by name; in the place of a tensor file it is damage."""
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO)
    newest, *_ = killed(recipe, 5)
    gone_off = tmp_path / "gone_off"
    bomb = pickle.dumps(Bomb(gone_off))
    pickle.loads(bomb).close()
    assert gone_off.exists(), "it does go off"
    gone_off.unlink()
    (newest / "optimizer.pt").write_bytes(bomb)
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    refused = train(recipe)
    assert refused.returncode == 2
    assert "optimizer.pt" in refused.stderr and "Traceback" not in refused.stderr
    assert newest.is_dir() and (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
    (newest / "optimizer.pt").unlink()
    (newest / "policy.safetensors").write_bytes(bomb)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert newest.with_name(f"{newest.name}.corrupt").is_dir()
    assert_same_run(tmp_path / "run", finished["grpo"][1])
    assert not gone_off.exists()


# -- another configuration -------------------------------------------------------------------------


@pytest.mark.fault(8)
def test_another_learning_rate_is_refused_unless_allowed(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=2)
    assert train(recipe).returncode == 0
    more = ("run.steps=3", "optim.learning_rate=0.001")
    refused = train(recipe, *more)
    assert refused.returncode == 2
    assert "optim.learning_rate: 0.003 -> 0.001" in refused.stderr
    allowed = train(recipe, *more, "run.allow_change=[optim.learning_rate]")
    assert allowed.returncode == 0, allowed.stderr
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "optim.learning_rate: 0.003 -> 0.001" in events


@pytest.mark.fault(8)
def test_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    recipe = make_recipe(tmp_path, model, method=GRPO, run__steps=2)
    assert train(recipe).returncode == 0
    save_tiny(tmp_path / "model", seed=1)
    refused = train(recipe, "run.steps=3")
    assert refused.returncode == 2
    said = " ".join(refused.stderr.split())
    assert "belongs to another run: model was" in said and "new run.dir" in said


@pytest.mark.fault(9)
@pytest.mark.parametrize(("before", "after"), [(10_000, 40), (40, 10_000)])
def test_another_micro_batch_leads_to_the_same_weights(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 2 over a whole run, in float64 on a model without float32 casts."""
    model = save_tiny(tmp_path / "model", config=architectures()["gpt2"])
    changes = {
        "model__dtype": "float64",
        "model__head_dtype": "float64",
        "run__eval_every": 0,
        "run__checkpoint_every": 1,
    }
    update, passes = Learner.update, []

    def counted(learner: Learner, batch: Batch, plan: Plan, *rest: Any, **named: Any) -> Any:
        passes.append(len(plan.passes))
        return update(learner, batch, plan, *rest, **named)

    monkeypatch.setattr(Learner, "update", counted)
    method = {**GRPO, "kl": {"coef": 0.1}}
    recipes = [
        make_recipe(tmp_path / name, model, method=method, **changes) for name in ("one", "two")
    ]
    whole, cut = ([f"optim.tokens_per_microbatch={budget}"] for budget in (before, after))
    entry.train(recipes[0], [*whole, "run.steps=5"])
    undisturbed, passes[:] = tuple(passes), ()
    entry.train(recipes[1], [*whole, "run.steps=2"])
    entry.train(recipes[1], [*cut, "run.steps=5"])
    assert tuple(passes[:2]) == undisturbed[:2]
    pairs = list(zip(passes[2:], undisturbed[2:], strict=True))
    assert all(mine > theirs if after < before else mine < theirs for mine, theirs in pairs), pairs
    want, got = (recipe.parent / "run" for recipe in recipes)
    # Adam divides by the gradient's own size, so rounding grows from step to step.
    assert distance(weights_of(got), weights_of(want)) < 1e-9
    for name in ("groups.jsonl", "samples.jsonl"):
        mine, theirs = ([json.loads(row) for row in rows_of(run, name)] for run in (got, want))
        assert [row["text"] for row in mine if "text" in row] == [
            row["text"] for row in theirs if "text" in row
        ]
        assert len(mine) == len(theirs) > 0


def distance(got: dict[str, bytes], want: dict[str, bytes]) -> float:
    """Norm of the difference of the policies, relative to the norm of what is wanted."""
    names = [name for name in want if name.startswith("policy")]
    assert names and got.keys() == want.keys()
    mine, theirs = (np.concatenate([np.frombuffer(w[n]) for n in names]) for w in (got, want))
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


SLOW = REWARD.replace(
    "    text = sample.text\n",
    """    text = sample.text
    if (pathlib.Path(__file__).parent / "slow").exists():
        time.sleep(0.15)
""",
).replace("import surefoot\n", "import pathlib\nimport time\n\nimport surefoot\n")


@pytest.mark.fault(9)
def test_more_reward_workers_on_one_core_change_nothing(
    finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """The more workers the slower the reward, whatever the machine; it has the same scores."""
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO)
    (tmp_path / "reward.py").write_text(SLOW, encoding="utf-8")
    killed(recipe, 3)
    (tmp_path / "slow").touch()
    child = start(recipe)
    os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
    most = 0
    while child.poll() is None:
        most = max(most, len(descendants(child.pid)))
        if most >= 4:
            (tmp_path / "slow").unlink(missing_ok=True)
        time.sleep(0.02)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert most >= 4, "the nursery and at least three workers"
    assert_same_run(tmp_path / "run", finished["grpo"][1])


# -- two processes ---------------------------------------------------------------------------------


@pytest.mark.fault(10)
def test_a_second_process_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=400)
    child = start(recipe)
    try:
        wait_for_step(tmp_path / "run", 1, child)
        second = train(recipe)
        assert second.returncode == 2
        assert f"process {child.pid} on {socket.gethostname()}" in second.stderr
    finally:
        kill(child)
        child.communicate(timeout=60)


@pytest.mark.fault(10)
def test_a_lock_that_nobody_holds_is_taken_over(
    finished: dict[str, tuple[Path, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """Left by a process that was killed, or by one that ran before the machine was started anew."""
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO)
    run = tmp_path / "run"
    for step in (2, 5):  # the second one finds the first one's lock
        child = start(recipe)
        wait_for_step(run, step, child)
        kill(child)
        child.communicate(timeout=60)
        left = json.loads((run / "run.lock").read_text())
        assert left["pid"] == child.pid
    with RunLock(RunDirectory(tmp_path / "ours").create()):
        ours = json.loads((tmp_path / "ours" / "run.lock").read_text())
    assert (ours["pid"], ours["boot"]) == (os.getpid(), left["boot"])
    (run / "run.lock").write_text(json.dumps(ours))
    refused = train(recipe)
    assert refused.returncode == 2 and f"process {os.getpid()} on" in refused.stderr
    (run / "run.lock").write_text(json.dumps({**ours, "boot": "another"}))
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished["grpo"][1])
