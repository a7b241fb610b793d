"""A critic that was saved: as the start of another run, put back at resume, and made later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.critics import body, kept, made, recipe, values
from support.loop import Bench, make_loop
from support.runs import assert_same_run, kill, make_recipe, start, train, wait_for_step
from support.tiny import llama_config, make_model

from surefoot.errors import CheckpointError
from surefoot.learner.scorer import Scorer
from surefoot.loops import entry
from surefoot.loops.critics import critic_maker, make_critic
from surefoot.loops.state import restore, tensors
from surefoot.methods import Method
from surefoot.models import load_model
from surefoot.run.checkpoint import Loaded, load_latest
from surefoot.run.directory import RunDirectory


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short real runs: a critic of one layer, one on the policy's layers, and none."""
    out = {}
    for name, method, overrides in (
        ("one", "ppo", ["critic.layers=1"]),
        ("shared", "ppo", ["critic.share_trunk=true"]),
        ("none", "grpo", []),
    ):
        folder = tmp_path_factory.mktemp(name)
        path = make_recipe(
            folder, tiny_model, method={"name": method}, run__steps=2, run__eval_every=0
        )
        entry.train(path, overrides)
        out[name] = folder / "run"
    return out


def newest(run: Path) -> Loaded:
    found = load_latest(RunDirectory(run), rename_damaged=False)
    assert found is not None
    return found


@pytest.mark.parametrize("how", ["run", "checkpoint", "relative", "moved"])
def test_a_saved_critic_comes_back_whole(
    how: str, runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    run = runs["one"]
    saved = newest(run)
    where = {"run": str(run), "checkpoint": str(saved.path), "relative": "run"}
    if how == "moved":
        shutil.copytree(saved.path, tmp_path / saved.path.name)
        where["moved"] = str(tmp_path / saved.path.name)
    asked = replace(
        recipe(tiny_model, critic={"init": where[how], "layers": 1}), base_dir=run.parent
    )
    critic = made(asked)
    weights = saved.tensors("critic")
    parameters = dict(critic.model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    assert any(value != 0 for value in values(critic))
    assert critic.optimizer.state() == {}
    # The weights of a checkpoint follow: those of the saved critic are not needed any more.
    gone = replace(asked, critic=asked.critic.model_copy(update={"init": "gone"}))
    assert values(made(gone, resumes=True)) == [0.0] * 5


def test_a_run_starts_from_it(runs: dict[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    path = make_recipe(
        tmp_path, tiny_model, method={"name": "ppo"}, run__steps=1, run__eval_every=0
    )
    run = entry.train(path, ["critic.layers=1", f"critic.init={runs['one']}"])
    # A head of zeros explains exactly nothing.
    assert run.metrics[0]["critic/explained_variance"] != 0.0
    first = newest(runs["one"]).tensors("critic")
    assert not torch.equal(newest(run.path).tensors("critic")["head.weight"], first["head.weight"])


@pytest.mark.parametrize(
    ("run", "layers", "said"),
    [
        ("one", None, r"critic\.init: .*differ in parameter model\.layers\.1\..*critic\.layers"),
        ("shared", 1, r"critic\.init: .*critic\.share_trunk"),
        ("none", 1, r"critic\.init: .* holds no critic; name a run of a row with one"),
        ("elsewhere", 1, r"critic\.init: there is no directory"),
    ],
)
def test_what_is_no_such_critic_is_refused(
    run: str, layers: int | None, said: str, runs: dict[str, Path], tiny_model: Path
) -> None:
    critic = {"init": str(runs.get(run, Path(run))), "layers": layers}
    with pytest.raises(CheckpointError, match=said):
        made(recipe(tiny_model, critic=critic))


def test_another_width_is_refused_by_name(
    runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    folder = kept(make_model(llama_config(intermediate_size=64)), tmp_path / "critic")
    critic = {"init": str(runs["one"]), "layers": 1, "path": str(folder)}
    with pytest.raises(CheckpointError, match=r"critic\.init: .*mlp\.\w+\.weight has shape"):
        made(recipe(tiny_model, critic=critic))


def test_a_damaged_or_empty_one_is_refused(
    runs: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    saved = newest(runs["one"]).path
    copy = shutil.copytree(saved, tmp_path / saved.name)
    with (copy / "critic.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x01\x02\x03\x04")
    (tmp_path / "empty").mkdir()
    for place, said in (
        (copy, r"is damaged \(critic\.safetensors"),
        (tmp_path / "empty", "no che"),
    ):
        with pytest.raises(CheckpointError, match=said):
            made(recipe(tiny_model, critic={"init": str(place), "layers": 1}))


# Made later, put back, resumed.


def loop(tiny_model: Path, run: Path, *, method: str) -> Bench:
    bench = make_loop(
        tiny_model,
        run,
        method={"name": method, "group_size": 2},
        judge=lambda prompt, sample, call: float(sample),
    )
    bench.run()
    return bench


def test_a_late_critic_comes_back_iff_the_checkpoint_has_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    with_one = loop(tiny_model, tmp_path / "with", method="ppo")
    without = loop(tiny_model, tmp_path / "without", method="grpo")
    parts, learner = with_one.parts, with_one.learner
    want = {name: dict(part) for name, part in tensors(learner).items()}
    want = {n: {k: t.clone() for k, t in part.items()} for n, part in want.items()}
    assert {"critic", "critic_optimizer"} <= want.keys()
    maker = partial(make_critic, parts.recipe, parts.row, parts.loaded, learner.scorer)
    # Without one so far: it is made, at its weights and moments.
    learner.critic = None
    restore(newest(with_one.path), learner, parts.data.stream, make_critic=maker)
    got = tensors(learner)
    assert got.keys() == want.keys()
    for name, part in want.items():
        assert got[name].keys() == part.keys()
        assert all(torch.equal(got[name][key], part[key]) for key in part), name
    # The other way round it is left out, but only of a row that may have none yet.
    early = newest(without.path)
    with pytest.raises(CheckpointError, match="holds no critic"):
        restore(early, learner, parts.data.stream)
    restore(early, learner, parts.data.stream, make_critic=maker)
    assert learner.critic is None
    restore(early, learner, parts.data.stream, make_critic=maker)
    assert learner.critic is None
    shared = replace(
        parts.recipe, critic=parts.recipe.critic.model_copy(update={"share_trunk": True})
    )
    learner.critic = make_critic(shared, parts.row, parts.loaded, learner.scorer)
    restore(early, learner, parts.data.stream, make_critic=maker)
    assert learner.critic is None and learner.scorer.value_head is None


def test_a_late_critic_is_a_copy_of_the_policy_as_it_is_then(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = loop(tiny_model, tmp_path / "run", method="grpo")
    start = {k: v.clone() for k, v in load_model(bench.parts.recipe).model.named_parameters()}
    row = recipe(tiny_model).method
    assert isinstance(row, Method)
    critic = make_critic(bench.parts.recipe, row, bench.parts.loaded, bench.learner.scorer)
    policy = dict(bench.parts.loaded.model.base_model.named_parameters())
    copied = body(critic)
    assert copied.keys() == policy.keys()
    assert all(torch.equal(copied[name], policy[name]) for name in policy)
    assert all(copied[name] is not policy[name] for name in policy)
    assert not torch.equal(copied["norm.weight"], start["model.norm.weight"])
    assert critic.optimizer.steps == bench.parts.recipe.run.steps


def test_only_a_warm_up_with_another_row_makes_it_later(tiny_model: Path) -> None:
    asked = recipe(tiny_model)
    policy = load_model(asked)
    scorer = Scorer(policy.model, compute=torch.float32, head_dtype=torch.float32, temperature=1.0)
    assert isinstance(asked.method, Method)
    assert critic_maker(asked, asked.method, policy, scorer) is None


def test_a_shared_trunk_trains_and_goes_on_byte_for_byte(tiny_model: Path, tmp_path: Path) -> None:
    method = {"name": "ppo", "epochs": 2}
    shares = "critic.share_trunk=true"
    whole = make_recipe(tmp_path / "whole", tiny_model, method=method)
    done = train(whole, shares)
    assert done.returncode == 0, done.stderr
    killed = make_recipe(tmp_path / "killed", tiny_model, method=method)
    run = tmp_path / "killed" / "run"
    child = start(killed, shares)
    wait_for_step(run, 3, child)
    kill(child)
    child.communicate(timeout=60)
    assert newest(run).step < 9
    done = train(killed, shares)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, tmp_path / "whole" / "run")
    assert sorted(newest(run).tensors("critic")) == ["head.bias", "head.weight"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["critic/loss"] > 0 for row in metrics if row["step"])
