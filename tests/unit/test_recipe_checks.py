"""Combinations of keys, the batch arithmetic, and what may change on resume."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe import batch_arithmetic, check_resume, difference, load


def minimal(**sections: Any) -> dict[str, Any]:
    return {
        "data": {"source": "addition", "eval_size": 10},
        "reward": {"use": "numeric"},
        "method": "grpo",
        "run": {"steps": 5},
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p", "truncated_sampling"]),
        ({"rollout": {"top_k": 5}}, ["rollout.top_k", "truncated_sampling"]),
        ({"rollout": {"min_p": 0.1}}, ["rollout.min_p", "truncated_sampling"]),
        ({"rollout": {"min_new_tokens": 9, "max_new_tokens": 8}}, ["min_new_tokens", "8"]),
        ({"rollout": {"stop": [""]}}, ["rollout.stop"]),
        ({"method": {"name": "grpo", "minibatches": 9}}, ["method.minibatches", "9", "8"]),
        ({"method": {"name": "grpo", "group_size": 1}}, ["method.group_size", "2 or more"]),
        (
            {"method": {"name": "dapo", "shaping": {"0": {"cache": 300}}}},
            ["method.shaping.0.cache", "256"],
        ),
        (
            {
                "method": {
                    "name": "grpo",
                    "kl": {"controller": {"kind": "proportional", "horizon": 9}},
                }
            },
            ["method.kl.controller.horizon", "64", "13 or more"],
        ),
        (
            {"method": {"name": "grpo", "terms": [{"kind": "stale_mask"}]}},
            ["method.terms", "epochs or minibatches"],
        ),
        (
            {"method": {"name": "maxrl", "shaping": [{"kind": "overlong"}]}},
            ["method.scale", "mean"],
        ),
        ({"method": {"name": "grpo", "group_size": float("nan")}}, ["group_size", "nan"]),
        ({"run": {}}, ["run.steps: is required"]),
        ({"run": {"steps": 5, "epochs": 1}}, ["run.epochs", "run.steps"]),
        ({"run": {"steps": 5}, "optim": {"batch_size": 4}}, ["optim.batch_size"]),
        ({"optim": {"warmup_steps": 6}}, ["optim.warmup_steps", "5"]),
        (
            {"data": {"source": "addition"}, "run": {"steps": 5, "eval_every": 1}},
            ["run.eval_every", "eval_size"],
        ),
        ({"data": {"source": "a.jsonl", "role": "eval"}}, ["role eval"]),
        (
            {"data": ["addition", {"source": "a.jsonl", "role": "eval", "eval_size": 3}]},
            ["data.1.eval_size"],
        ),
        ({"reward": [{"use": "numeric", "weight": 0}]}, ["every weight is 0"]),
        ({"model": {"template": "none", "system": "x"}}, ["model.system"]),
        (
            {"run": {"steps": 5, "allow_change": ["optim.learning_rat"]}},
            ["run.allow_change", "'optim.learning_rate'"],
        ),
    ],
)
def test_what_cannot_work_together_is_refused(sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(minimal(**sections))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"top_p": 0.9}, "run": {"steps": 5, "allow": ["truncated_sampling"]}},
        {"method": {"name": "grpo", "minibatches": 8}},
        {"run": {"steps": 5, "eval_every": 1}},
        {"run": {"steps": 5, "stop_without_signal": "never", "checkpoint_every": 0}},
        {"run": {"steps": 5, "allow_change": ["method.kl", "optim.learning_rate"]}},
        {"data": ["addition", {"source": "a.jsonl", "role": "eval"}],
         "run": {"steps": 5, "eval_every": 2}},
        {"reward": ["numeric", {"use": "length", "weight": 0}]},
    ],
)  # fmt: skip
def test_what_works_together_is_accepted(sections: dict[str, Any]) -> None:
    load(minimal(**sections))


def test_python_objects_may_stand_for_data_and_rewards() -> None:
    recipe = load({"method": "grpo", "run": {"steps": 1}}, outside=("data", "reward"))
    assert recipe.data == ()
    assert recipe.reward == ()


def test_the_batch_arithmetic_counts_prompts_and_completions() -> None:
    recipe = load(
        minimal(
            method={"name": "grpo", "group_size": 6, "epochs": 2, "minibatches": 4},
            rollout={"prompts_per_step": 8, "max_new_tokens": 1500},
            run={"steps": 100},
        )
    )
    assert batch_arithmetic(recipe) == (
        "step: 8 prompts x 6 completions = 48 completions of at most 1,500 tokens",
        "update: 2 epochs x 4 minibatches = 8 optimizer steps of 2 prompts (12 completions) each",
        "a group needs 5 of 6 valid scores",
        "run: 100 steps = 800 prompts, 4,800 completions, 800 optimizer steps",
    )


def test_uneven_minibatches_and_repeated_sampling_are_told() -> None:
    recipe = load(
        minimal(
            method={"name": "dapo", "group_size": 4, "minibatches": 3},
            rollout={"prompts_per_step": 8},
        )
    )
    text = "\n".join(batch_arithmetic(recipe))
    assert "at most 10 rounds, 80 prompts, 320 completions a step" in text
    assert "3 optimizer steps of 2 or 3 prompts (8 or 12 completions) each" in text


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    found = difference(load(old), load(new))
    return {change.key: (change.old, change.new, change.learned) for change in found}


def test_equal_recipes_do_not_differ() -> None:
    assert changes(minimal(), minimal(num_generations=8)) == {}


FREE = {
    "optim": {"tokens_per_microbatch": 100},
    "reward": {"use": "numeric", "timeout": 3.0, "retries": 4, "price": 0.1},
    "run": {
        "steps": 9,
        "eval_every": 2,
        "checkpoint_every": 3,
        "keep": 4,
        "trackers": [],
        "stop_without_signal": "never",
        "stop_at_failure_rate": 0.5,
        "dir": "runs/elsewhere",
    },
}


@pytest.mark.fault(9)
def test_bookkeeping_may_change_on_resume() -> None:
    old = minimal(optim={"tokens_per_microbatch": 50})
    new = minimal(**FREE)
    found = changes(old, new)
    assert set(found) == {
        "optim.tokens_per_microbatch",
        *(f"reward.0.{name}" for name in ("timeout", "retries", "price")),
        *(f"run.{name}" for name in FREE["run"]),
    }
    assert not any(learned for _, _, learned in found.values())
    assert len(check_resume(load(old), load(new))) == len(found)


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    "override",
    [
        "optim.learning_rate=1e-5",
        "method.group_size=4",
        "method.gate.high=0.3",
        "run.seed=1",
        "rollout.temperature=0.9",
        "rollout.max_new_tokens=8",
        "data.max_operand=9",
        "data.eval_size=9",
        "reward.weight=2",
        "model.dtype=bfloat16",
        "method=rloo",
    ],
)
def test_what_is_learned_may_not_change(override: str) -> None:
    old, new = load(minimal()), load(minimal(), [override])
    with pytest.raises(RecipeError) as caught:
        check_resume(old, new)
    message = str(caught.value)
    assert "run.allow_change" in message
    learned = [change for change in difference(old, new) if change.learned]
    assert learned
    for change in learned:
        assert str(change) in message


def test_named_changes_are_let_through() -> None:
    old = load(minimal())
    new = load(minimal(), ["optim.learning_rate=1e-5", "run.allow_change=[optim.learning_rate]"])
    keys = [change.key for change in check_resume(old, new)]
    assert keys == ["optim.learning_rate", "run.allow_change"]
    gate = load(minimal(), ["method.gate.high=0.3", "method.gate.low=0.1"])
    with pytest.raises(RecipeError):
        check_resume(old, gate)
    assert len(check_resume(old, gate, ("method.gate",))) == 2
    with pytest.raises(RecipeError):
        check_resume(old, gate, ("method.gat",))


def test_steps_are_learned_when_the_schedule_ends_with_them() -> None:
    cosine = {"optim": {"schedule": "cosine"}}
    assert changes(minimal(), minimal(run={"steps": 6}))["run.steps"] == (5, 6, False)
    found = changes(minimal(**cosine), minimal(**cosine, run={"steps": 6}))
    assert found["run.steps"] == (5, 6, True)


def test_auto_is_no_difference_once_it_is_resolved() -> None:
    new = load(minimal())
    old = new.with_auto({"optim.tokens_per_microbatch": 4096})
    assert difference(old, new) == []
