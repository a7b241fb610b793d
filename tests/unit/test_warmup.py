"""The warm-up of a critic: when it is over, what is trained meanwhile, and what the run says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.hand import row
from support.loop import make_loop

from surefoot.loops.state import Progress
from surefoot.loops.warmup import on_returns, still_warming, warm
from surefoot.methods import Gae, Method
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
    assert [r["critic/warmup_steps"] for r in rows] == [1, 2, 3]
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
    assert "critic/warmup_steps" not in bench.metrics()[1]
    assert bench.events("short_completions") == []
