"""A run whose completions are executed: the code reward under the real loop, by the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.reward.sandbox import Tier
from surefoot.reward.sandbox_probe import isolation

ROOT = Path(__file__).resolve().parents[2]

needs_namespaces = pytest.mark.skipif(
    isolation().tier is not Tier.NAMESPACES, reason="this machine has no namespaces for us"
)


def capitals(completions: list[str], **_: Any) -> list[float]:
    """So that a random model, whose programs all fail, has something to learn from."""
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


@needs_namespaces
def test_three_steps_of_a_random_model_whose_programs_all_fail(
    tiny_model: Path, tmp_path: Path
) -> None:
    tests = [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16\n"}]
    recipe = {
        "model": {"path": str(tiny_model)},
        "data": {"source": "rows", "eval_size": 2},
        "reward": [{"use": "code", "fraction": True, "weight": 10.0}],
        "method": {"name": "rloo", "group_size": 4},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
        "run": {"dir": str(tmp_path / "run"), "steps": 3, "eval_every": 3, "trackers": []},
    }
    rows = [{"prompt": f"say {c}", "tests": tests} for c in "abcdefgh"]
    run = surefoot.train(recipe, rewards=[capitals], data=rows)
    steps = [row for row in run.metrics if "rewards/code/mean" in row]
    assert len(steps) == 3
    assert all(row["rewards/code/mean"] == 0.0 for row in steps)
    assert all(row["rewards/code/missing"] == 0.0 for row in steps)


@needs_namespaces
@pytest.mark.slow
def test_the_example_trains_three_steps(tmp_path: Path) -> None:
    from surefoot.recipe import load

    overrides = [f"run.dir={tmp_path / 'run'}", "run.steps=3", "run.eval_every=3"]
    run = surefoot.train(load(ROOT / "examples" / "code.yaml", overrides))
    steps = [row for row in run.metrics if "rewards/code/mean" in row]
    assert len(steps) == 3
    assert all(row["rewards/code/missing"] == 0.0 for row in steps)
