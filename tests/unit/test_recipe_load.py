"""Loading a recipe: schema, YAML dialect, overrides, aliases, origins, and the way back."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import NotBuiltError, RecipeError
from surefoot.methods import KL, Clip, Method, Overlong, get
from surefoot.recipe import KEYS, SECTIONS, leaves, load, to_mapping, to_yaml
from surefoot.recipe.text import parse

EXAMPLE = """
model:   {path: smollm2-135m, dtype: float32, compute: bfloat16}
data:    {source: addition, max_operand: 50, eval_size: 100}
reward:  [{use: numeric, weight: 1.0}]
method:  {name: rloo, group_size: 8, kl: {coef: 0.0}}
rollout: {engine: local, prompts_per_step: 8, temperature: 1.0, max_new_tokens: 16}
optim:   {learning_rate: 1e-5, schedule: constant, max_grad_norm: 1.0, tokens_per_microbatch: auto}
run:     {dir: runs/addition, steps: 60, eval_every: 20, checkpoint_every: 20, seed: 0}
"""


def minimal(**sections: Any) -> dict[str, Any]:
    return {
        "data": {"source": "addition"},
        "reward": {"use": "numeric"},
        "method": "grpo",
        "run": {"steps": 5},
        **sections,
    }


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(source: Any, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        load(source, overrides)
    return str(caught.value)


def test_the_example_of_the_design(tmp_path: Path) -> None:
    recipe = load(write(tmp_path / "addition.yaml", EXAMPLE))
    assert recipe.optim.learning_rate == 1e-5
    assert recipe.model.compute == "bfloat16"
    assert recipe.data[0].options == {"max_operand": 50}
    assert recipe.reward[0].use == "numeric"
    assert recipe.method == Method(
        name="rloo",
        kl=KL("reward_sequence", estimator="k1", coef=0.0, measure_every=10),
        baseline=get("rloo").baseline,
        reduce=get("rloo").reduce,
    )
    assert recipe.base_dir == tmp_path
    assert recipe.notes == ()


def test_the_whole_key_tree_is_known() -> None:
    tree = {
        "model": "path revision dtype compute head_dtype reference_dtype gradient_checkpointing "
        "lora template system",
        "critic": "path layers share_trunk init learning_rate",
        "rollout": "engine dtype prompts_per_step temperature top_p top_k min_p max_new_tokens "
        "min_new_tokens stop rows ahead urls",
        "optim": "learning_rate schedule warmup_steps betas eps weight_decay max_grad_norm "
        "tokens_per_microbatch batch_size offload",
        "run": "dir steps epochs seed eval_every checkpoint_every keep grace samples trackers "
        "stop_without_signal stop_at_failure_rate stop_at_mismatch allow allow_change",
        "doctor": "action",
        "judge": "base_url model api_key_env temperature max_tokens concurrency timeout deadline "
        "price_per_million_input price_per_million_output budget_calls budget_usd",
    }
    assert {name: " ".join(s.model_fields) for name, s in SECTIONS.items()} == tree
    assert set(KEYS) == {*tree, "data", "reward", "method", "stages"}
    source = load(minimal()).data[0]
    assert " ".join(type(source).model_fields) == (
        "source split columns task weight from_step until_step max_prompt_tokens max_tokens "
        "eval_size keep_solve_rate role options"
    )
    part = load(minimal()).reward[0]
    assert " ".join(type(part).model_fields) == "use weight name timeout price retries options"


def test_every_key_has_a_description() -> None:
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_the_defaults() -> None:
    recipe = load(minimal())
    model, rollout, optim, run = recipe.model, recipe.rollout, recipe.optim, recipe.run
    assert (model.dtype, model.compute, model.head_dtype, model.reference_dtype) == (
        ("float32",) * 4
    )
    assert (rollout.dtype, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) == (
        "float32",
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (rollout.prompts_per_step, rollout.max_new_tokens, rollout.rows) == (8, 256, 64)
    assert (optim.learning_rate, optim.schedule, optim.warmup_steps) == (1e-6, "constant", 0)
    assert (optim.betas, optim.eps, optim.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert (optim.max_grad_norm, optim.tokens_per_microbatch) == (1.0, "auto")
    assert (run.seed, run.eval_every, run.checkpoint_every, run.keep) == (0, 0, 50, 2)
    assert (run.trackers, run.stop_without_signal) == (("tensorboard",), 10)
    assert run.dir == "runs/grpo"


def test_auto_follows_the_keys_it_names(tmp_path: Path) -> None:
    recipe = load(minimal(model={"dtype": "bfloat16"}, method={"name": "rloo", "group_size": 3}))
    assert (recipe.model.compute, recipe.model.reference_dtype) == ("bfloat16", "bfloat16")
    assert recipe.rollout.dtype == "bfloat16"
    assert recipe.rollout.rows == 24
    mixed = load(minimal(model={"compute": "bfloat16"}))
    assert (mixed.model.reference_dtype, mixed.rollout.dtype) == ("float32", "bfloat16")
    text = "{data: addition, reward: numeric, method: grpo, run: {steps: 5}}"
    named = load(write(tmp_path / "first_look.yaml", text))
    assert named.run.dir == "runs/first_look"
    assert named.origins["run.dir"] == "auto"


def test_with_auto_puts_in_what_the_machine_decides() -> None:
    recipe = load(minimal())
    resolved = recipe.with_auto({"optim.tokens_per_microbatch": 4096, "rollout.rows": 16})
    assert resolved.optim.tokens_per_microbatch == 4096
    assert resolved.rollout.rows == 16
    assert resolved.origins["optim.tokens_per_microbatch"] == "auto"
    assert recipe.optim.tokens_per_microbatch == "auto"
    for values in ({"optim.learning_rate": 1.0}, {"optim.nothing": 1}, {"rollout.rows": 0}):
        with pytest.raises(RecipeError):
            recipe.with_auto(values)
    with pytest.raises(RecipeError, match="holds 7"):
        load(minimal(rollout={"rows": 7})).with_auto({"rollout.rows": 8})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (minimal(modle={}), ["modle", "'model'"]),
        (minimal(optim={"learning_rat": 1.0}), ["optim.learning_rat", "'learning_rate'"]),
        (minimal(model={"lora": {"rnak": 4}}), ["model.lora.rnak", "'rank'"]),
        (minimal(optim={"learning_rate": "fast"}), ["optim.learning_rate", "'fast'"]),
        (minimal(optim={"learning_rate": 0}), ["optim.learning_rate", "greater than 0"]),
        (minimal(optim={"learning_rate": math.inf}), ["optim.learning_rate"]),
        (minimal(optim={"schedule": "cosin"}), ["optim.schedule", "cosine"]),
        (minimal(rollout={"rows": "many"}), ["rollout.rows", "'auto'", "integer"]),
        (minimal(rollout={"temperature": True}), ["rollout.temperature"]),
        (minimal(run={"steps": True}), ["run.steps"]),
        (minimal(run={"steps": 2.5}), ["run.steps"]),
        (minimal(run={"steps": 5, "allow": ["anything"]}), ["run.allow", "truncated_sampling"]),
        (minimal(run={"steps": 5, "trackers": ["wandbb"]}), ["run.trackers", "wandb"]),
        (minimal(run={"steps": 5, "checkpoint_every": -1}), ["run.checkpoint_every"]),
        (minimal(run={"steps": 5, "eval_every": -1}), ["run.eval_every"]),
        (minimal(run={"steps": 5, "stop_without_signal": "nevr"}), ["never"]),
        (minimal(run=[1]), ["run: is a mapping"]),
        (minimal(data=[{"max_operand": 3}]), ["data.0.source: is required"]),
        (minimal(reward=[{"weight": 1.0}]), ["reward.0.use: is required"]),
        (minimal(data={"source": "addition", "role": "test"}), ["data.0.role"]),
        (minimal(method={"name": "grpo", "gate": {"lo": 1}}), ["method.gate.lo", "'low'"]),
        (minimal(method=None), ["method: is required"]),
        ({"method": "grpo"}, ["data: is required"]),
        ({"method": "grpo", "data": "addition", "run": {"steps": 1}}, ["reward: is required"]),
    ],
)
def test_a_bad_key_is_named(source: dict[str, Any], words: list[str]) -> None:
    message = refused(source)
    for word in words:
        assert word in message


def test_all_bad_keys_of_a_section_are_listed_at_once() -> None:
    message = refused(minimal(optim={"lr": 1.0, "eps": -1.0, "schedule": "x"}))
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "optim.schedule",
        "optim.eps",
        "optim.lr",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.e-5", 1e-5),
        ("-.5", -0.5),
        ("1E3", 1000.0),
        ("007", 7),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("none", "none"),
        ("null", None),
        ("~", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("'1e-5'", "1e-5"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_the_yaml_dialect(text: str, value: Any) -> None:
    found = parse(text, where="test")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", ["line 2", "'a' is given twice"]),
        ("a: [1", ["line", "YAML"]),
        ("? [a]\n: 1", ["line 1", "YAML"]),
        ("a: !!python/object/apply:os.getcwd []", ["YAML"]),
        ("- 1\n- 2", ["a mapping of sections"]),
        ("", ["is empty"]),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refused(write(tmp_path / "broken.yaml", text))
    for word in ["broken.yaml", *words]:
        assert word in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml: there is no such recipe" in refused(tmp_path / "nowhere.yaml")


def test_overrides() -> None:
    recipe = load(
        minimal(method={"name": "dapo", "gate": "clip"}),
        (
            "optim.learning_rate=1e-5",
            "data.0.max_operand=20",
            "data.eval_size=3",
            "method.gate.low=0.1",
            "method.shaping.0.cache=16",
            "rollout.stop=[A, B]",
            "reward.weight=2",
            "model.system=a=b",
            "--run.seed=7",
        ),
    )
    assert recipe.optim.learning_rate == 1e-5
    assert recipe.data[0].options == {"max_operand": 20}
    assert recipe.data[0].eval_size == 3
    # The word `clip` is the kind that dapo has, so its own upper bound stays.
    assert recipe.method.gate == Clip(low=0.1, high=0.28)
    assert recipe.method.shaping == (Overlong(cache=16),)
    assert recipe.rollout.stop == ("A", "B")
    assert recipe.reward[0].weight == 2.0
    assert recipe.model.system == "a=b"
    assert recipe.run.seed == 7


def test_an_override_of_a_whole_section_replaces_it() -> None:
    recipe = load(minimal(method={"name": "rloo", "group_size": 3}), ["method=grpo"])
    assert recipe.method == get("grpo")
    assert recipe.origins["method.group_size"] == "row grpo"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.learning_rate", ["key.sub=value"]),
        ("=3", ["key.sub=value"]),
        ("optim..eps=1", ["key.sub=value"]),
        ("optm.eps=1", ["optm", "'optim'"]),
        ("optim.esp=1", ["optim.esp", "'eps'"]),
        ("data.3.task=x", ["data.3", "1 entries"]),
        ("data.0.source=[", ["data.0.source=["]),
        ("max_prompt_length=3", ["max_prompt_tokens"]),
    ],
)
def test_a_bad_override_is_named(override: str, words: list[str]) -> None:
    message = refused(minimal(), (override,))
    for word in words:
        assert word in message


def test_an_override_without_an_index_needs_one_entry() -> None:
    message = refused(minimal(data=["addition", "other.jsonl"]), ("data.task=x",))
    assert "data.0.task" in message


def test_origins_say_where_every_value_came_from() -> None:
    recipe = load(
        minimal(
            method={"name": "dapo", "group_size": 4, "gate": {"low": 0.1}, "baseline": "batch",
                    "scale": "none", "reduce": {"kind": "constant"}},
            learning_rate=1e-5,
            model={"compute": "auto"},
        ),
        ["run.seed=3", "beta=0.0"],
    )  # fmt: skip
    expected = {
        "method.name": "recipe",
        "method.group_size": "recipe",
        "method.gate.low": "recipe",
        "method.gate.high": "row dapo",
        "method.gate.kind": "row dapo",
        "method.baseline.kind": "recipe",
        "method.reduce.kind": "recipe",
        "method.reduce.length": "default",
        "method.kl.coef": "alias beta",
        "method.shaping.0.weight": "row dapo",
        "method.epochs": "row dapo",
        "optim.learning_rate": "alias learning_rate",
        "optim.eps": "default",
        "run.seed": "override",
        "model.compute": "auto",
        "rollout.rows": "auto",
        "data.0.source": "recipe",
        "data.0.weight": "default",
    }
    assert {key: recipe.origins[key] for key in expected} == expected
    assert set(recipe.origins) == set(leaves(recipe))


def test_aliases_set_our_keys_and_say_so() -> None:
    recipe = load(
        minimal(
            num_generations=4,
            max_completion_length=32,
            epsilon=0.1,
            epsilon_high=0.3,
            delta=4.0,
            loss_type="dr_grpo",
            scale_rewards=False,
            adam_beta2=0.95,
            lr_scheduler_type="constant_with_warmup",
            report_to="none",
            top_k=None,
            output_dir="runs/x",
            min_p=None,
        )
    )
    assert recipe.method.group_size == 4
    assert recipe.method.gate == Clip(low=0.1, high=0.3, cap=4.0)
    assert recipe.method.reduce.kind == "constant"
    assert recipe.method.scale.kind == "none"
    assert recipe.rollout.max_new_tokens == 32
    assert recipe.optim.betas == (0.9, 0.95)
    assert recipe.run.trackers == ()
    assert recipe.run.dir == "runs/x"
    assert "num_generations is TRL's name for method.group_size" in recipe.notes
    assert any("whole optimizer step" in note for note in recipe.notes)


def test_epsilon_alone_sets_both_bounds_as_in_trl() -> None:
    assert load(minimal(method="dapo", epsilon=0.1)).method.gate == Clip(low=0.1, high=0.1)
    assert load(minimal(epsilon_high=0.3)).method.gate == Clip(low=0.2, high=0.3)
    both = load(minimal(), ["epsilon=0.1", "epsilon_high=0.4"])
    assert both.method.gate == Clip(low=0.1, high=0.4)


def test_both_betas_agree() -> None:
    assert load(minimal(adam_beta1=0.8, adam_beta2=0.9)).optim.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("value", "kind"), [("grpo", "sequence_mean"), ("dapo", "token_mean"), ("bnpo", "token_mean")]
)
def test_loss_types(value: str, kind: str) -> None:
    assert load(minimal(loss_type=value)).method.reduce.kind == kind


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"per_device_train_batch_size": 8}, ["counts completions", "rollout.prompts_per_step"]),
        ({"gradient_accumulation_steps": 8}, ["rollout.prompts_per_step"]),
        ({"max_prompt_length": 8}, ["max_prompt_tokens", "cuts"]),
        ({"mask_truncated_completions": True}, ["method.truncated"]),
        ({"loss_type": "cispo"}, ["loss_type", "method.gate"]),
        ({"lr_scheduler_type": "polynomial"}, ["optim.schedule"]),
        ({"learning_rate": 1e-5, "optim": {"learning_rate": 1e-5}}, ["both", "give one"]),
        ({"epsilon": 0.2, "method": {"name": "grpo", "gate": {"high": 0.2}}}, ["epsilon"]),
        (
            {"importance_sampling_level": "token", "method": {"name": "grpo", "ratio": "token"}},
            ["importance_sampling_level", "method.ratio.level", "give one"],
        ),
        ({"scale_rewards": "sometimes"}, ["method.scale"]),
        ({"method": {"name": "dapo"}, "beta": 0.1}, ["method.kl.coef", "kl.place"]),
        ({"method": "rloo", "epsilon": 0.2}, ["method.gate.low", "none reads no options"]),
        ({"learning_rat": 1e-5}, ["'learning_rate'"]),
        (
            {"method": {"name": "grpo", "minibatches": 2}, "eval_steps": 5,
             "data": {"source": "addition", "eval_size": 4}},
            ["eval_steps", "optimizer steps", "run.eval_every"],
        ),
    ],
)  # fmt: skip
def test_aliases_with_another_meaning_are_explained(
    extra: dict[str, Any], words: list[str]
) -> None:
    message = refused(minimal(**extra))
    for word in words:
        assert word in message


def test_two_spellings_of_one_override_are_refused() -> None:
    message = refused(minimal(), ("learning_rate=1e-5", "optim.learning_rate=1e-5"))
    assert "both set optim.learning_rate" in message


def test_an_override_beats_an_alias_of_the_recipe() -> None:
    recipe = load(minimal(learning_rate=1e-5), ["optim.learning_rate=2e-5"])
    assert recipe.optim.learning_rate == 2e-5
    assert recipe.origins["optim.learning_rate"] == "override"


def round_trip(recipe: Any) -> Any:
    return load(parse(to_yaml(recipe), where="resolved"))


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "dapo"])
def test_the_resolved_recipe_is_loadable_again(name: str) -> None:
    recipe = load(
        minimal(
            method={"name": name, "kl": {"measure_every": 3}},
            data=[
                {"source": "addition", "max_operand": 7, "columns": {"prompt": "question"}},
                {"source": "a: b.jsonl", "role": "eval", "config": {"x": [1, {"y": 1e-7}]}},
            ],
            model={"system": "1e-5 #no: 'yes'\nline \u2603 \U0001f600"},
            rollout={"stop": ["\n\n", "null", "- x"]},
        )
    )
    assert round_trip(recipe) == recipe
    assert load(to_mapping(recipe)) == recipe
    assert "# row " + name in to_yaml(recipe)


@settings(max_examples=50, deadline=None)
@given(
    rate=st.floats(min_value=1e-300, max_value=1e300),
    coef=st.floats(min_value=0, max_value=1e6),
    text=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
)
def test_values_round_trip_exactly(rate: float, coef: float, text: str) -> None:
    recipe = load(
        minimal(
            optim={"learning_rate": rate},
            method={"name": "grpo", "kl": {"coef": coef}},
            model={"system": text},
        )
    )
    again = round_trip(recipe)
    assert again.optim.learning_rate == rate
    assert again.method.kl.coef == coef
    assert again.model.system == text


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "\u2028", "a\u2028 b", "\u2029", "Größe 数"])
def test_line_breaks_of_other_alphabets_round_trip(text: str) -> None:
    recipe = load(minimal(model={"system": text}, rollout={"stop": [text]}))
    again = round_trip(recipe)
    assert again.model.system == text
    assert again.rollout.stop == (text,)


def test_a_users_row_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from surefoot.methods import Method, GroupMean\n"
        "ROW = Method(name='mine', baseline=GroupMean(), group_size=3)\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "{data: addition, reward: numeric, method: {use: 'mine.py:ROW'}, run: {steps: 1}}"
    )
    recipe = load(path)
    assert recipe.method.name == "mine"
    assert recipe.origins["method.group_size"] == "row mine"
    (tmp_path / "mine.py").unlink()
    assert round_trip(recipe) == load(to_mapping(recipe))
    assert round_trip(recipe).method == recipe.method


def test_a_recipe_is_loaded_as_it_is_or_changed_by_overrides() -> None:
    recipe = load(minimal())
    assert load(recipe) is recipe
    changed = load(recipe, ["run.seed=4"])
    assert changed.run.seed == 4
    assert load(changed, ["run.seed=0"]) == recipe


def test_the_source_is_not_changed() -> None:
    source = minimal(num_generations=4)
    before = dict(source)
    load(source, ["optim.eps=1e-6", "data.max_operand=3"])
    assert source == before
    assert source["data"] == {"source": "addition"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"template": "mine.jinja"}}, "model.template"),
        ({"rollout": {"engine": "vllm"}}, "rollout.engine"),
        ({"rollout": {"ahead": 1}}, "rollout.ahead"),
        ({"rollout": {"urls": ["http://x"]}}, "rollout.urls"),
        ({"optim": {"offload": True}}, "optim.offload"),
        ({"doctor": {"action": "stop"}}, "doctor.action"),
    ],
)
def test_later_features_are_refused_by_name(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(NotBuiltError) as caught:
        load(minimal(**sections))
    assert key in str(caught.value)


# -- text that would never end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: " + "[" * 5000, "line 1: lists and mappings are nested more than 50 deep"),
        ("data: d\nmethod: " + "{a: " * 500, "line 2: lists and mappings are nested more than 50"),
        ("a: 1\nmodel: &m {path: x, system: *m}", "line 2: the anchor here has an alias to itself"),
        ("run: {steps: " + "9" * 5000 + "}", "line 1: a number of 5000 digits cannot be read"),
    ],
    ids=["lists", "mappings", "within itself", "digits"],
)
def test_yaml_without_end_is_refused_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(write(tmp_path / "r.yaml", text))


def test_aliases_that_multiply_are_refused_before_they_are_laid_out(tmp_path: Path) -> None:
    laughs = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in pairwise("abcdefghi")]
    message = refused(write(tmp_path / "r.yaml", "\n".join(laughs)))
    assert "more than 100,000 values, an alias counted as all that its anchor stands for" in message
    few = parse("a: &a [1, 2]\nb: *a\nc: {<<: {d: *a}}", where="here")
    assert few == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}


def test_a_list_too_long_for_a_recipe_is_not_put_down_to_aliases(tmp_path: Path) -> None:
    """A mapping, its key and its list are three values more than the items."""
    assert len(parse(f"a: [{'x,' * 99_997}]", where="here")["a"]) == 99_997
    message = refused(write(tmp_path / "r.yaml", f"a: [{'x,' * 99_998}]"))
    assert "r.yaml: it holds more than 100,000 values" in message


@pytest.mark.parametrize(("text", "what"), [("a\0b", "NUL"), ("a\ud800", "half of a surrogate")])
def test_texts_that_no_file_can_hold_are_refused_by_their_key(text: str, what: str) -> None:
    for sections, key in (
        ({"model": {"system": text}}, "model.system"),
        ({"rollout": {"stop": ["x", text]}}, "rollout.stop.1"),
        ({"data": [{"source": "addition", "columns": {"prompt": text}}]}, "data.0.columns.prompt"),
        ({"model_name_or_path": text}, "model_name_or_path"),
    ):
        message = refused(minimal(**sections))
        assert message.startswith(f"{key}: has {what}") and "at character 2" in message
    assert what in refused(minimal(), (f"model.system={json.dumps(text)}",))


@pytest.mark.parametrize("path", ["x" * 256, "é" * 128, "a/" * 2100])
def test_paths_too_long_to_ask_for_are_refused_by_their_key(path: str) -> None:
    for sections, key in (
        ({"model": {"path": path}}, "model.path"),
        ({"model": {"lora": {"path": path}}}, "model.lora.path"),
        ({"data": {"source": path}}, "data.0.source"),
        ({"reward": {"use": path}}, "reward.0.use"),
        ({"run": {"steps": 5, "dir": path}}, "run.dir"),
        ({"method": "ppo", "critic": {"init": path}}, "critic.init"),
    ):
        message = refused(minimal(**sections))
        assert message.startswith(f"{key}: ") and "too long for a path" in message
    with pytest.raises(RecipeError, match="too long for a path"):
        load(path)


def test_an_entry_of_a_list_is_a_mapping_or_a_word() -> None:
    assert load(minimal(), ("reward.0=exact",)).reward[0].use == "exact"
    assert "reward: is a mapping of keys, not None" in refused(minimal(), ("reward.0=null",))
