"""Chains: what a stage takes over, what is refused before the first one begins, and real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.chains import FIRST, SECOND, make_chain, model_files, stage
from support.runs import make_recipe, rows_of, weights_of
from transformers import AutoModelForCausalLM

import surefoot
from surefoot.errors import (
    CheckpointError,
    RecipeError,
    RunDirectoryError,
    StoppedOnFinding,
    SurefootError,
)
from surefoot.loops import entry
from surefoot.loops.runs import Run, saved_recipe
from surefoot.loops.stages import stage_runs
from surefoot.methods import get
from surefoot.recipe import load
from surefoot.recipe.references import earlier_stages
from surefoot.recipe.stages import Chain, load_chain
from surefoot.recipe.text import parse
from surefoot.run.directory import RunDirectory


def written(*stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A chain as somebody would write it."""
    return {
        "data": {"source": "addition", "max_operand": 9, "eval_size": 4},
        "reward": "numeric",
        "method": {"name": "grpo", "group_size": 4, "kl": {"coef": 0.1}},
        "optim": {"learning_rate": 1e-5, "betas": [0.9, 0.95]},
        "run": {"steps": 5, "dir": "runs/x", "seed": 3},
        "stages": list(stages),
        **sections,
    }


def chain(source: dict[str, Any], *overrides: str) -> Chain:
    found = load_chain(source, overrides)
    assert found is not None
    return found


def refused(source: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_chain(source, overrides)
    return str(caught.value)


ONE: dict[str, Any] = {"name": "one"}
TWO: dict[str, Any] = {
    "name": "two",
    "model": {"path": "stage:one"},
    "method": "rloo",
    "optim": {"learning_rate": 2e-6},
    "run": {"steps": 7},
}


def test_a_stage_is_the_top_level_with_its_own_keys_laid_over_it() -> None:
    found = chain(written(ONE, TWO))
    assert found.dir == "runs/x"
    assert [stage.name for stage in found.stages] == ["one", "two"]
    one, two = (stage.recipe for stage in found.stages)
    assert (one.run.dir, two.run.dir) == ("runs/x/stages/01_one", "runs/x/stages/02_two")
    assert (one.optim.learning_rate, two.optim.learning_rate) == (1e-5, 2e-6)
    assert one.optim.betas == two.optim.betas == (0.9, 0.95)
    assert (one.run.steps, two.run.steps) == (5, 7)
    assert one.run.seed == two.run.seed == 3
    assert one.method.group_size == 4
    # A method that is named replaces the other one whole, its group size too.
    assert two.method == get("rloo")
    assert two.model.path == "stage:one"
    assert one.data == two.data and two.data[0].options == {"max_operand": 9}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"group_size": 6}, {"group_size": 6, "kl": 0.1}),
        ({"kl": {"coef": 0.2}}, {"group_size": 4, "kl": 0.2}),
        ({"kl": "none"}, {"group_size": 4, "kl": 0.0}),
        ({"kl": {"place": "reward_sequence"}}, {"group_size": 4, "kl": 0.03}),
    ],
)
def test_a_method_without_a_name_changes_single_fields(
    method: dict[str, Any], expected: dict[str, Any]
) -> None:
    two = chain(written(ONE, {"name": "two", "method": method})).stages[1].recipe
    assert two.method.name == "grpo"
    assert {"group_size": two.method.group_size, "kl": two.method.kl.coef} == expected


def test_data_and_rewards_are_replaced_whole() -> None:
    own = {"name": "two", "data": ["a.jsonl", "b.jsonl"], "reward": [{"use": "exact"}]}
    two = chain(written(ONE, own)).stages[1].recipe
    assert [source.source for source in two.data] == ["a.jsonl", "b.jsonl"]
    assert two.data[0].options == {}
    assert [part.use for part in two.reward] == ["exact"]


def test_origins_tell_a_stages_keys_from_those_of_the_top_level() -> None:
    two = chain(written(ONE, TWO), "run.seed=4", "stages.two.optim.eps=1e-7").stages[1].recipe
    expected = {
        "optim.learning_rate": "stage",
        "optim.betas": "recipe",
        "optim.eps": "override",
        "run.seed": "override",
        "run.dir": "auto",
        "method.name": "stage",
        "method.group_size": "row rloo",
        "rollout.temperature": "default",
    }
    assert {key: two.origins[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "key", "one", "two"),
    [
        ("run.seed=9", "run.seed", 9, 9),
        ("optim.learning_rate=3e-5", "optim.learning_rate", 3e-5, 2e-6),
        ("learning_rate=3e-5", "optim.learning_rate", 3e-5, 2e-6),
        ("stages.two.optim.learning_rate=3e-5", "optim.learning_rate", 1e-5, 3e-5),
        ("stages.1.learning_rate=3e-5", "optim.learning_rate", 1e-5, 3e-5),
        ("stages.0.run.seed=9", "run.seed", 9, 3),
        ("--stages.one.run.seed=9", "run.seed", 9, 3),
        ("method.group_size=6", "method.group_size", 6, get("rloo").group_size),
        ("stages.two.method.group_size=6", "method.group_size", 4, 6),
        ("stages.one.method=rloo", "method.name", "rloo", "rloo"),
        ("stages.two.data.eval_size=2", "data.0.eval_size", 4, 2),
    ],
)
def test_overrides_reach_all_stages_or_one(override: str, key: str, one: Any, two: Any) -> None:
    from surefoot.recipe import leaves

    found = chain(written(ONE, TWO), override)
    assert [leaves(stage.recipe)[key] for stage in found.stages] == [one, two]


def test_the_run_directory_is_the_chains() -> None:
    assert chain(written(ONE, TWO), "run.dir=elsewhere").stages[1].recipe.run.dir == (
        "elsewhere/stages/02_two"
    )
    assert chain(written(ONE, TWO, run={"steps": 5})).dir == "runs/one_two"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (written(ONE, {"name": "two", "optim": {"lr": 1.0}}), ["stages.1.optim.lr: no such key"]),
        (written(ONE, {"name": "two", "otpim": {}}), ["stages.1.otpim: no such key", "'optim'"]),
        (written(ONE, {"name": "two", "optim": {}}), ["stages.1.optim: is empty"]),
        (written(ONE, {"name": "two", "run": {"dir": "y"}}), ["stages.1.run.dir", "top level"]),
        (written(ONE, {"name": "two", "output_dir": "y"}), ["stages.1.run.dir", "top level"]),
        (written(ONE, {"name": "two", "stages": [ONE]}), ["stages.1.stages: a stage has no"]),
        (written(ONE, {"name": "one"}), ["stages.1.name", "earlier stage"]),
        (written(ONE, {"run": {"steps": 5}}), ["stages.1.name: is required"]),
        (written({"name": "Two"}), ["stages.0.name: 'Two'", "a-z"]),
        (written({"name": "12"}), ["stages.0.name", "no number"]),
        (written({"name": 12}), ["stages.0.name", "no number"]),
        ({**written(), "stages": ["sft"]}, ["stages.0: is a mapping"]),
        ({**written(), "stages": {"sft": {}}}, ["stages: is a list"]),
        (written(ONE, {"name": "two", "method": "grop"}), ["stages.1.method", "'grpo'"]),
        (written(ONE, {"name": "two", "run": {"steps": 0}}), ["stages.1.run.steps: 0"]),
        (written(ONE, {"name": "two", "data": "a.jsonl", "run": {"eval_every": 2}}),
         ["stages.1.run.eval_every: there is nothing to evaluate on"]),
        (written(ONE, {"name": "two", "learning_rate": 1.0, "optim": {"learning_rate": 1.0}}),
         ["stages.1: learning_rate and optim.learning_rate both set"]),
        # What stands at the top level is named as it stands.
        (written(ONE, optim={"lr": 1.0}), ["optim.lr: no such key"]),
        (written(ONE, otpim={}), ["otpim: no such key"]),
        (written({"name": "one", "method": "rloo"}, TWO),
         ["method.name: every stage sets its own method"]),
        (written({"name": "one", "optim": {"learning_rate": 1.0}}, TWO),
         ["optim.learning_rate: every stage sets its own value"]),
    ],
)  # fmt: skip
def test_every_stage_is_checked_before_the_first_begins(
    source: dict[str, Any], words: list[str]
) -> None:
    message = refused(source)
    for word in words:
        assert word in message
    if not words[0].startswith("stages"):
        assert not message.startswith("stages")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.tow.run.seed=1", ["there is no stage 'tow'", "'two'"]),
        ("stages.5.run.seed=1", ["there is no stage '5'"]),
        ("stages.two=1", ["stages.two", "write the key too"]),
        ("stages.two.optim.lr=1", ["stages.1.optim.lr: no such key"]),
        ("stages.two.run.dir=y", ["stages.1.run.dir", "top level"]),
        ("stages.two.model.path=stage:tow", ["stages.1.model.path", "'tow'", "earlier ones: one"]),
    ],
)
def test_a_bad_override_of_a_stage_is_named(override: str, words: list[str]) -> None:
    message = refused(written(ONE, TWO), override)
    for word in words:
        assert word in message


def test_an_override_that_no_stage_takes_says_where_to_write_it() -> None:
    own = {"name": "one", "optim": {"learning_rate": 1e-6}}
    source = written(own, TWO, optim={"eps": 1e-9})
    assert chain(source).stages[0].recipe.optim.eps == 1e-9
    message = refused(source, "optim.learning_rate=1e-5")
    assert "write stages.NAME.optim.learning_rate=VALUE" in message
    both = ("stages.one.optim.learning_rate=1e-7", "stages.two.optim.learning_rate=1e-7")
    assert [s.recipe.optim.learning_rate for s in chain(source, *both).stages] == [1e-7, 1e-7]


PPO = {"name": "ppo", "method": "ppo"}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"name": "one", "model": {"path": "stage:two"}}, TWO],
         ["stages.0.model.path", "none comes before"]),
        ([ONE, {**TWO, "model": {"path": "stage:two"}}], ["no earlier stage 'two'", "ones: one"]),
        ([ONE, {**PPO, "critic": {"init": "stage:one"}}],
         ["stages.1.critic.init", "stage one (grpo) saves no critic"]),
        ([ONE, {"name": "two", "reward": [{"use": "stage:one"}]}],
         ["stages.1.reward.0.use", "reward model is wanted"]),
        ([ONE, {"name": "rm", "method": "reward_model"}, {**TWO, "model": {"path": "stage:rm"}}],
         ["stages.2.model.path", "saves a reward model"]),
    ],
)  # fmt: skip
def test_a_stage_takes_what_an_earlier_one_saves(
    stages: list[dict[str, Any]], words: list[str]
) -> None:
    message = refused(written(*stages))
    for word in words:
        assert word in message


def test_what_an_earlier_stage_saves_may_be_named_before_it_exists() -> None:
    late = {**PPO, "name": "late", "critic": {"init": "stage:ppo", "path": "stage:ppo"}}
    assert chain(written(ONE, PPO, late)).stages[2].recipe.critic.init == "stage:ppo"
    judged = {"name": "two", "reward": [{"use": "stage:rm"}], "method": "rloo"}
    judge = {"name": "rm", "method": "reward_model", "data": "pairs.jsonl"}
    assert chain(written(ONE, judge, judged)).stages[2].recipe.reward[0].use == "stage:rm"


def test_keys_of_another_stage_may_be_allowed_to_change() -> None:
    source = written(ONE, {"name": "two", "method": {"gate": {"low": 0.1}}})
    chain(source, "run.allow_change=[method.gate.low]")
    assert "'method.gate.low'" in refused(source, "run.allow_change=[method.gate.lo]")


def test_an_alias_in_a_stage_sets_its_key_there_alone() -> None:
    own = {"name": "two", "num_generations": 6, "method": {"minibatches": 2}}
    found = chain(written(ONE, own))
    assert [stage.recipe.method.group_size for stage in found.stages] == [4, 6]
    assert found.stages[0].recipe.notes == ()
    assert found.stages[1].recipe.notes == ("num_generations is TRL's name for method.group_size",)
    # TRL counts optimizer steps, of which this stage makes two a rollout step.
    message = refused(written(ONE, {**own, "max_steps": 9}))
    assert message.startswith("stages.1.max_steps: counts optimizer steps")


def test_the_saved_chain_can_be_loaded_again() -> None:
    source = written(ONE, {**TWO, "rollout": {"stop": ["\n", "dir: x"]}}, learning_rate=1e-5)
    del source["optim"]
    found = chain(source)
    again = chain(parse(found.to_yaml(), where="saved"))
    assert again == found
    assert "# stage" in found.to_yaml() and "# alias learning_rate" in found.to_yaml()


def test_one_training_is_told_from_a_chain() -> None:
    single = written()
    assert load_chain(single) is None
    assert load_chain(load(single)) is None
    with pytest.raises(RecipeError, match="is a chain of several trainings"):
        load(written(ONE))
    with pytest.raises(RecipeError, match=r"stages\.one\.run\.seed: this recipe has no stages"):
        load(single, ["stages.one.run.seed=1"])
    with pytest.raises(RecipeError, match=r"model\.path: stage:one .* none comes before"):
        load({**single, "model": {"path": "stage:one"}})


def test_stages_are_found_by_their_directories(tmp_path: Path) -> None:
    for name in ("01_a", "02_b_2", "10_c", "x_d", "notes"):
        (tmp_path / "stages" / name).mkdir(parents=True)
    assert earlier_stages(tmp_path / "stages" / "10_c") == ("a", "b_2")
    assert earlier_stages(tmp_path / "stages" / "01_a") == ()
    assert earlier_stages(tmp_path) == ()
    paths = RunDirectory(tmp_path).stage_paths()
    assert [path.name for path in paths] == ["01_a", "02_b_2", "10_c"]


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose chain is complete."""
    recipe = make_chain(tmp_path_factory.mktemp("chain"), tiny_model, steps=3)
    run = entry.train(recipe)
    assert run.path == stage(recipe.parent / "run", "second")
    return recipe


def test_a_stage_saves_a_plain_model_of_its_last_step(trained: Path) -> None:
    run = trained.parent / "run"
    for name in ("first", "second"):
        place = stage(run, name)
        saved = AutoModelForCausalLM.from_pretrained(place / "model").state_dict()
        policy = load_file(place / "checkpoints" / "step_000003" / "policy.safetensors")
        assert all(torch.equal(saved[key], weight) for key, weight in policy.items())
    first, second = (model_files(run, name) for name in ("first", "second"))
    assert first["model.safetensors"] != second["model.safetensors"]


def test_the_second_stage_starts_where_the_first_one_ended(trained: Path) -> None:
    run = trained.parent / "run"
    looks = []
    for name in ("first", "second"):
        rows = [json.loads(line) for line in rows_of(stage(run, name), "metrics.jsonl")]
        looks.append([row["eval/reward"] for row in rows if row.get("eval/reward") is not None])
    assert looks[0][0] != looks[0][-1]
    assert looks[1][0] == looks[0][-1]


def test_the_chains_own_files(trained: Path) -> None:
    run = trained.parent / "run"
    kinds = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["stage"]) for row in kinds] == [
        ("stage_began", "first"),
        ("stage_ended", "first"),
        ("stage_began", "second"),
        ("stage_ended", "second"),
    ]
    again = load_chain(run / "recipe.yaml", base_dir=trained.parent)
    assert again == load_chain(trained)
    assert not (run / "checkpoints").exists()
    assert (stage(run, "second") / "recipe.yaml").read_text().count("path: stage:first") == 1


def test_a_complete_chain_is_left_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.parent / "run"
    watched = [*run.glob("stages/*/*.jsonl"), *run.glob("stages/*/model/*")]
    before = {file: file.stat().st_mtime_ns for file in watched}
    entry.train(trained)
    said = capsys.readouterr().err
    assert "stage 1 of 2, first: complete, skipped" in said
    assert "stage 2 of 2, second: complete, skipped" in said
    assert {file: file.stat().st_mtime_ns for file in watched} == before


@pytest.mark.parametrize("key", ["optim.learning_rate", "run.steps"])
def test_a_changed_key_of_a_complete_stage_is_refused_unless_allowed(
    key: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained.parent, tmp_path / "copy")
    recipe, here = tmp_path / "copy" / "recipe.yaml", f"run.dir={tmp_path}/copy/run"
    change = f"stages.first.{key}={'0.01' if key.startswith('optim') else '5'}"
    with pytest.raises(RecipeError) as caught:
        entry.train(recipe, [here, change])
    assert "stages.0 (first), which is complete" in str(caught.value)
    assert f"{key}: " in str(caught.value) and "run.allow_change" in str(caught.value)
    before = model_files(tmp_path / "copy" / "run", "first")
    entry.train(recipe, [here, change, f"run.allow_change=[{key}]"])
    assert model_files(tmp_path / "copy" / "run", "first") == before
    events = (tmp_path / "copy" / "run" / "events.jsonl").read_text()
    assert '"kind": "changed"' in events and f"{key}: " in events


def test_a_moved_chain_is_read_and_resumed_where_it_lies(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.parent, tmp_path / "moved")
    run = tmp_path / "moved" / "run"
    second = stage(run, "second")
    assert saved_recipe(RunDirectory(second)).model.path == str(stage(run, "first") / "model")
    third = {"name": "third", "model": {"path": "stage:second"}, "method": FIRST["method"]}
    recipe = make_chain(tmp_path / "moved", Path("unused"), FIRST, SECOND, third, steps=3)
    # The stages that are complete began with another word for the same model.
    source = load(stage(run, "first") / "recipe.yaml", base_dir=recipe.parent).model.path
    longer = entry.train(recipe, [f"model.path={source}"])
    assert longer.path == stage(run, "third")
    assert "stage 2 of 3, second: complete, skipped" in capsys.readouterr().err
    assert [part.path.name for part in stage_runs(run)] == ["01_first", "02_second", "03_third"]


def test_a_chain_is_read_by_its_last_complete_stage(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.parent / "run"
    second = stage(run, "second")
    opened = surefoot.Run.open(run)
    assert opened.path == second
    assert "last complete one, 02_second" in capsys.readouterr().err
    exported = entry.export(run, tmp_path / "out")
    assert {f.name: f.read_bytes() for f in exported.iterdir()} == model_files(run, "second")
    seen = entry.evaluate(str(run))
    assert seen.target == str(second)
    assert seen.evaluation == entry.evaluate(str(second)).evaluation == opened.evaluate().evaluation
    shutil.copytree(trained.parent, tmp_path / "copy")
    for name in ("first", "second"):
        shutil.rmtree(stage(tmp_path / "copy" / "run", name) / "model")
    with pytest.raises(RunDirectoryError, match="none is complete; name one of them"):
        surefoot.Run.open(tmp_path / "copy" / "run")


def test_a_model_that_is_gone_is_saved_again(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained.parent, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    shutil.rmtree(stage(run, "first") / "model")
    with pytest.raises(RecipeError, match="stage first is not complete"):
        entry.export(stage(run, "second"), tmp_path / "out")
    entry.train(tmp_path / "copy" / "recipe.yaml", [f"run.dir={run}"])
    assert model_files(run, "first") == model_files(trained.parent / "run", "first")


def test_other_stages_than_the_directory_holds_are_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained.parent, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    recipe = make_chain(tmp_path / "other", Path("unused"), {**FIRST, "name": "warm"}, SECOND)
    with pytest.raises(RecipeError, match="no earlier stage 'first'; earlier ones: warm"):
        entry.train(recipe, [f"run.dir={run}"])
    with pytest.raises(RunDirectoryError, match="a stage 01_first, which the recipe does not have"):
        entry.train(recipe, [f"run.dir={run}", "stages.second.model.path=stage:warm"])


def test_a_run_and_a_chain_do_not_share_a_directory(
    trained: Path, tiny_model: Path, tmp_path: Path
) -> None:
    single = make_recipe(tmp_path, tiny_model, method={"name": "rloo"}, run__steps=1)
    with pytest.raises(RunDirectoryError, match="holds a chain of stages"):
        entry.train(single, [f"run.dir={trained.parent / 'run'}"])
    entry.train(single)
    with pytest.raises(RunDirectoryError, match="holds a run without stages"):
        entry.train(trained, [f"run.dir={tmp_path / 'run'}"])


def test_objects_are_refused_because_they_name_no_stage(trained: Path) -> None:
    with pytest.raises(RecipeError, match="data: an object cannot be passed"):
        entry.train(trained, data=[{"prompt": "x"}])
    with pytest.raises(RecipeError, match="rewards: an object cannot be passed"):
        entry.train(trained, rewards=[len])
    model = AutoModelForCausalLM.from_pretrained(stage(trained.parent / "run", "first") / "model")
    tokenizer = Run.open(stage(trained.parent / "run", "first")).tokenizer
    with pytest.raises(RecipeError, match="model: an object cannot be passed"):
        entry.train(trained, model=model, tokenizer=tokenizer)


class Watch(surefoot.Callback):
    """Remembers the steps, and ends the run at one of them."""

    def __init__(self, end_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.end_at = end_at

    def on_step(self, step: int, metrics: Any) -> Any:
        self.steps.append(step)
        return surefoot.STOP if len(self.steps) == self.end_at else None


def test_a_callback_sees_each_stage_and_may_end_the_chain(
    trained: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_chain(tmp_path, tiny_model, steps=3)
    watch = Watch(end_at=2)
    stopped = entry.train(recipe, callbacks=[watch])
    assert stopped.path == stage(tmp_path / "run", "first")
    assert watch.steps == [1, 2]
    assert not (stopped.path / "model").exists()
    assert not (tmp_path / "run" / "stages" / "02_second").exists()
    watch = Watch()
    entry.train(recipe, callbacks=[watch])
    assert watch.steps == [3, 1, 2, 3]
    assert weights_of(stage(tmp_path / "run", "second")) == (
        weights_of(stage(trained.parent / "run", "second"))
    )


def test_a_critic_goes_on_in_a_later_stage(tiny_model: Path, tmp_path: Path) -> None:
    """As if its run directory and its model had been named in a recipe of its own."""
    ppo = {"name": "ppo", "group_size": 2}
    recipe = make_chain(
        tmp_path / "chain",
        tiny_model,
        {"name": "early", "method": ppo},
        {
            "name": "late",
            "model": {"path": "stage:early"},
            "critic": {"init": "stage:early"},
            "method": ppo,
        },
        steps=2,
    )
    run = entry.train(recipe)
    early = stage(tmp_path / "chain" / "run", "early")
    alone = make_recipe(tmp_path / "alone", early / "model", method=ppo, run__steps=2)
    entry.train(alone, [f"critic.init={early}"])
    assert weights_of(run.path) == weights_of(tmp_path / "alone" / "run")
    fresh = make_recipe(tmp_path / "fresh", early / "model", method=ppo, run__steps=2)
    entry.train(fresh)
    assert weights_of(run.path) != weights_of(tmp_path / "fresh" / "run")


def test_a_stage_that_fails_is_named_in_the_events(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_chain(tmp_path, tiny_model, steps=1)
    with pytest.raises(SurefootError, match=r"nowhere\.jsonl"):
        entry.train(recipe, ["stages.second.data.source=nowhere.jsonl"])
    rows = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows][-3:] == ["stage_ended", "stage_began", "stage_stopped"]
    assert "nowhere.jsonl" in rows[-1]["message"]


@pytest.mark.fault(5)
def test_a_last_step_that_the_disk_refused_ends_the_chain(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.loops import desk

    save = desk.save

    def full(directory: RunDirectory, step: int, *args: Any, **kwargs: Any) -> Path:
        if step == 3:
            raise CheckpointError("the disk is full")
        return save(directory, step, *args, **kwargs)

    recipe = make_chain(tmp_path, tiny_model, steps=3)
    monkeypatch.setattr(desk, "save", full)
    with pytest.raises(StoppedOnFinding, match="no checkpoint can be written: the disk is full"):
        entry.train(recipe)
    assert not (stage(tmp_path / "run", "first") / "model").exists()
    monkeypatch.undo()
    entry.train(recipe)
    assert (stage(tmp_path / "run", "second") / "model").is_dir()
