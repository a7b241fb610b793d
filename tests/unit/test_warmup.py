"""Warm-ups: when they are over, what is trained meanwhile, and what the run says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand import row
from support.loop import make_loop

from surefoot.errors import RecipeError
from surefoot.loops.state import Progress
from surefoot.loops.warmup import active, on_returns, still_warming, warm
from surefoot.methods import Gae, Method, warming_row
from surefoot.records import Prompt


def warming(**rule: Any) -> Method:
    return row("vapo", warmup={"window": 3, "tolerance": 0.1, "max_steps": 5, **rule})


def test_it_is_over_when_a_window_is_flat() -> None:
    progress, method = Progress(), warming()
    told = [warm(method, progress, float(x)) for x in (0.0, 0.5, 0.7, 0.75, 0.78)]
    # 0.7, 0.75, 0.78 differ by 0.08.
    assert told[:4] == [None] * 4 and told[4] is not None and "flat for 3 steps" in told[4]
    assert progress.warm and progress.warmed == 5
    assert not still_warming(method, progress)


def test_the_bound_ends_it() -> None:
    progress, method = Progress(), warming()
    told = [warm(method, progress, float(x)) for x in (0.0, 1.0, 0.0, 1.0, 0.0)]
    assert told[:4] == [None] * 4 and "max_steps" in str(told[4])


def test_a_step_that_explains_nothing_is_left_out_of_the_window() -> None:
    progress, method = Progress(), warming(max_steps=50)
    for explained in (0.5, None, 0.5):
        assert warm(method, progress, explained) is None
    assert progress.warm_trail == [0.5, 0.5] and progress.warmed == 3
    assert warm(method, progress, 0.5) is not None


def test_rows_without_it_do_not_warm() -> None:
    assert not still_warming(row("ppo"), Progress())
    assert still_warming(warming(), Progress())


def test_the_target_is_the_return() -> None:
    credit = on_returns(row("ppo")).credit
    assert isinstance(credit, Gae) and credit.critic_lam == 1.0 and credit.lam == 0.95


def test_the_policy_stays_until_the_critic_is_warm(tiny_model: Path, tmp_path: Path) -> None:
    def judge(prompt: Prompt, sample: int, call: int) -> float:
        return float(int(prompt.text.split()[1]) % 2)

    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={
            "name": "vapo",
            "group_size": 2,
            "warmup": {"window": 2, "tolerance": 1e-9, "max_steps": 3},
        },
        judge=judge,
        rows=4,
        prompts=4,
        rate=0.01,
        steps=3,
    )
    model = bench.parts.loaded.model
    start = [p.detach().clone() for p in model.parameters()]
    bench.run()
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    rows = bench.metrics()
    assert [r["warmup_steps"] for r in rows] == [1, 2, 3]
    assert rows[2]["critic/loss"] < rows[0]["critic/loss"]
    (event,) = bench.events("warmup")
    assert "warm after 3 steps" in event["message"]
    # Completions of 2 to 5 tokens are shorter than 20.
    (short,) = bench.events("short_completions")
    assert "length_alpha=1.0" in short["message"]


def test_afterwards_both_train(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={
            "name": "vapo",
            "group_size": 2,
            "credit": {"length_alpha": 1.0},
            "warmup": {"max_steps": 1},
        },
        judge=lambda prompt, sample, call: float(sample),
        steps=2,
    )
    start = [p.detach().clone() for p in bench.parts.loaded.model.parameters()]
    bench.run()
    moved = zip(start, bench.parts.loaded.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in moved)
    assert "warmup_steps" not in bench.metrics()[1]
    assert bench.events("short_completions") == []


def by_method(**rule: Any) -> dict[str, Any]:
    return {"name": "ppo_warm", "group_size": 4, "warmup": {"max_steps": 2, **rule}}


def graded(prompt: Prompt, sample: int, call: int) -> float:
    return float((sample + call) % 2)


def test_another_row_trains_first_and_its_policy_becomes_the_critic(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(tiny_model, tmp_path / "run", method=by_method(), judge=graded, steps=2)
    assert bench.learner.critic is None
    start = [p.detach().clone() for p in bench.parts.loaded.model.parameters()]
    bench.run()
    policy = bench.parts.loaded.model
    assert not all(torch.equal(a, b) for a, b in zip(start, policy.parameters(), strict=True))
    critic = bench.learner.critic
    assert critic is not None and not bool(critic.model.head.weight.any())
    layers = dict(policy.base_model.named_parameters())
    own = dict(critic.model.model.named_parameters())
    assert set(own) == set(layers) and all(torch.equal(own[name], layers[name]) for name in own)
    rows = bench.metrics()
    assert [r["warmup_steps"] for r in rows] == [1, 2]
    assert not any(name.startswith("critic/") for r in rows for name in r)
    (event,) = bench.events("warmup")
    assert "grpo has warmed the policy for 2 steps" in event["message"]


def test_then_the_row_itself_trains(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(tiny_model, tmp_path / "run", method=by_method(), judge=graded, steps=4)
    bench.run()
    rows = bench.metrics()
    assert ["critic/loss" in r for r in rows] == [False, False, True, True]
    # k3 in the loss is grpo's, k1 per token is ppo's.
    assert ["kl/reward_token_k1_token" in r for r in rows] == [False, False, True, True]
    assert rows[3]["critic/loss"] != rows[2]["critic/loss"]


def test_the_first_row_keeps_its_own_values_and_takes_over_the_budgets() -> None:
    method = row("ppo_warm", group_size=5, epochs=2, minibatches=3, truncated="mask")
    first = warming_row(method)
    assert first is not None
    assert (first.group_size, first.epochs, first.minibatches) == (5, 2, 3)
    assert first.truncated.kind == "mask" and first.critic.kind == "none"
    assert (first.name, first.kl.place, first.kl.coef) == ("grpo", "loss", 0.04)
    assert active(method, Progress()) == first
    assert active(method, Progress(warm=True)) is method


def test_a_row_without_kl_warms_without() -> None:
    first = warming_row(row("ppo_warm", kl={"coef": 0.0}))
    assert first is not None and (first.kl.place, first.kl.coef) == ("none", 0.0)


@pytest.mark.parametrize(
    ("method", "why"),
    [("ppo", "a critic"), ("reinforce_ma", "a history"), ("grop", "did you mean 'grpo'")],
)
def test_rows_that_cannot_come_first(method: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        warming_row(row("ppo_warm", warmup={"method": method}))
