"""The names and signatures that other code may rely on; a change here is a change for users."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot import methods, recipe


def test_the_package_exports_these_names() -> None:
    assert sorted(surefoot.__all__) == [
        "Callback",
        "Completion",
        "Group",
        "Method",
        "ProcessReward",
        "Prompt",
        "Recipe",
        "Run",
        "STOP",
        "Score",
        "__version__",
        "reward_function",
        "train",
    ]
    assert surefoot.__version__ == "0.1.0"
    assert set(surefoot.__all__) <= set(dir(surefoot))


def test_records_and_recipe_are_the_rooms_own() -> None:
    from surefoot.records import Score

    assert surefoot.Score is Score
    assert surefoot.Recipe is recipe.Recipe
    assert surefoot.Method is methods.Method


def test_a_row_written_in_python_loads_no_torch() -> None:
    check = (
        "import sys, surefoot\n"
        "from surefoot.methods import GroupMean\n"
        "from surefoot.methods.custom import Custom\n"
        "surefoot.Method(name='mine', baseline=GroupMean(), scale=Custom('maths.py:f'))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        surefoot.trian  # noqa: B018


def fields(cls: type) -> str:
    return " ".join(field.name for field in dataclasses.fields(cls))


def test_the_fields_of_a_method_in_the_order_of_a_step() -> None:
    assert fields(methods.Method) == (
        "name group_size min_group greedy_sample keep truncated shaping kl baseline scale credit "
        "whiten ratio gate correction reduce terms epochs minibatches critic warmup"
    )
    assert fields(methods.Preference) == (
        "name data score reference link beta smoothing unbias margin weight nll desirable "
        "undesirable"
    )
    assert fields(methods.Supervised) == "name data loss train_on packing center normalize"


KINDS = {
    "keep": "all informative",
    "truncated": "score mask floor",
    "shaping": "overlong length",
    "kl": "none reward_token reward_sequence loss",
    "controller": "fixed proportional doubling",
    "baseline": "none batch group leave_one_out length_weighted greedy history use",
    "scale": "none group_std group_mean batch_std use",
    "credit": "broadcast reward_to_go process gae",
    "whiten": "none token sequence",
    "ratio": "none token sequence sequence_token geometric",
    "gate": "none clip weight sigmoid divergence use",
    "correction": "none truncate mask geometric_mask",
    "reduce": "token_mean sequence_mean sequence_sum constant prompt_mean",
    "terms": "entropy positive_nll stale_mask",
    "critic": "none critic",
    "warmup": "none value method",
}


def test_the_words_of_every_choice() -> None:
    assert {name: " ".join(f.kinds) for name, f in methods.FAMILIES.items()} == KINDS


def test_the_options_of_every_kind() -> None:
    options = {
        f"{name}.{kind}": " ".join(family.options(value))
        for name, family in methods.FAMILIES.items()
        for kind, value in family.kinds.items()
    }
    assert {key: words for key, words in options.items() if words} == {
        "keep.informative": "by max_rounds",
        "truncated.floor": "value",
        "shaping.overlong": "cache weight",
        "shaping.length": "weight",
        "kl.none": "coef measure_every",
        "kl.reward_token": "estimator coef controller measure_every",
        "kl.reward_sequence": "estimator coef controller measure_every",
        "kl.loss": "estimator coef controller measure_every",
        "controller.proportional": "target horizon unit",
        "controller.doubling": "target unit",
        "baseline.leave_one_out": "center",
        "baseline.history": "mode window decay init debias scope on_shift",
        "baseline.use": "use options",
        "scale.use": "use options",
        "gate.use": "use options",
        "scale.group_std": "ddof eps per_part",
        "scale.group_mean": "eps",
        "scale.batch_std": "of ddof eps",
        "credit.reward_to_go": "gamma",
        "credit.gae": "gamma lam critic_lam length_alpha bootstrap_truncated group_weight",
        "whiten.token": "center ddof eps",
        "whiten.sequence": "center ddof eps",
        "ratio.token": "to",
        "ratio.sequence": "to",
        "ratio.sequence_token": "to",
        "ratio.geometric": "to",
        "gate.clip": "low high dual cap",
        "gate.weight": "low high",
        "gate.sigmoid": "positive negative",
        "gate.divergence": "measure delta cap",
        "correction.truncate": "level high",
        "correction.mask": "level low high",
        "correction.geometric_mask": "low high",
        "reduce.constant": "length",
        "terms.entropy": "weight",
        "terms.positive_nll": "weight",
        "terms.stale_mask": "delta",
        "critic.critic": "loss_weight clip",
        "warmup.value": "window tolerance max_steps",
        "warmup.method": "method max_steps",
    }


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (methods.rows, ""),
        (methods.get, "name"),
        (methods.base, "spec *base_dir"),
        (methods.resolve, "spec *base_dir"),
        (methods.with_fields, "row changes"),
        (methods.as_mapping, "row"),
        (methods.describe, "row"),
        (methods.check_built, "row"),
        (methods.min_group, "row"),
        (methods.is_group_relative, "row"),
        (
            surefoot.train,
            "recipe overrides *rewards *data *eval_data *model *tokenizer *callbacks",
        ),
        (surefoot.Run.open, "path *rewards *data *eval_data"),
        (surefoot.Run.evaluate, "self"),
        (surefoot.Run.export, "self dest *merge"),
        (surefoot.Callback.on_step, "self step metrics"),
        (surefoot.Callback.on_evaluation, "self step evaluation"),
        (surefoot.Callback.on_checkpoint, "self step path"),
        (surefoot.Callback.on_end, "self run_path"),
        (methods.custom.bind, "row *base_dir"),
        (recipe.load, "source overrides *base_dir *outside"),
        (recipe.to_yaml, "recipe"),
        (recipe.to_mapping, "recipe"),
        (recipe.leaves, "recipe"),
        (recipe.batch_arithmetic, "recipe"),
        (recipe.difference, "old new"),
        (recipe.check_resume, "old new allow_change"),
        (recipe.Recipe.with_auto, "self values"),
    ],
)
def test_signatures(function: object, parameters: str) -> None:
    assert callable(function)
    found = inspect.signature(function).parameters.values()
    named = [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in found]
    assert " ".join(named) == parameters


def test_what_a_run_offers() -> None:
    public = {name for name in dir(surefoot.Run) if not name.startswith("_")}
    assert public == {
        "evaluate",
        "export",
        "metrics",
        "open",
        "policy",
        "samples",
        "summary",
        "table",
        "tokenizer",
    }


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("baseline", "f(reward_PG, *, valid_PG, length_PG, <options>)"),
        ("scale", "f(advantage_PG, reward_PG, *, valid_PG, <options>)"),
        ("gate", "f(log_ratio_BT, *, logp_BT, advantage_BT, mask_BT, <options>)"),
    ],
)
def test_the_contracts_of_a_users_functions(field: str, call: str) -> None:
    assert str(methods.custom.CONTRACTS[field]) == call
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert call.replace(", <options>", "") in page


def test_the_attributes_of_a_recipe() -> None:
    assert fields(recipe.Recipe) == (
        "model data reward method critic rollout optim run doctor judge stages origins notes "
        "base_dir"
    )


def test_the_accepted_trl_names() -> None:
    assert " ".join(sorted(recipe.ALIASES)) == (
        "adam_beta1 adam_beta2 adam_epsilon beta delta epsilon epsilon_high eval_steps "
        "gradient_checkpointing importance_sampling_level learning_rate loss_type "
        "lr_scheduler_type max_completion_length max_grad_norm max_steps min_p "
        "model_name_or_path num_generations num_iterations num_train_epochs output_dir report_to "
        "sapo_temperature_neg sapo_temperature_pos save_steps save_total_limit scale_rewards seed "
        "temperature top_k top_p warmup_steps weight_decay"
    )
