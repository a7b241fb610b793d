"""A tiny random model learns an easy task in seconds, by every row and through the Python door.

Learning proves nothing about the mathematics; it proves that the parts are connected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
import surefoot.errors
from surefoot.loops.entry import evaluate, export
from surefoot.methods import online_rows

ROWS = [{"prompt": f"say {c}", "answer": c} for c in "abcdefgh"]


def capitals(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of capital letters: about a quarter for a random model."""
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


def recipe(model: Path, run: Path, method: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"source": "rows", "eval_size": 2},
        "method": {"group_size": 8, **method},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 6},
        "optim": {"learning_rate": 0.01},
        "run": {"dir": str(run), "steps": steps, "eval_every": steps, "trackers": []},
    }


@pytest.mark.parametrize("name", online_rows())
def test_every_row_learns_to_shout(name: str, tiny_model: Path, tmp_path: Path) -> None:
    method: dict[str, Any] = {"name": name}
    if name == "vapo":
        method["warmup"] = {"max_steps": 2}
    run = surefoot.train(
        recipe(tiny_model, tmp_path / "run", method, 20), rewards=[capitals], data=ROWS
    )
    rewards = [row["reward"] for row in run.metrics if "reward" in row]
    assert len(rewards) == 20
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    # A quarter by chance, and some rows learn within the first five steps.
    assert first < 0.6
    # 160 completions in five steps: chance moves their mean by about 0.02.
    assert last > first + 0.25


def test_evaluate_and_export_a_run(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = recipe(tiny_model, tmp_path / "run", {"name": "rloo"}, 2)
    given["data"] = {"source": str(data), "eval_size": 3}
    given["reward"] = [{"use": "regex", "pattern": "[A-Z][A-Z]"}]
    run = surefoot.train(given)
    looked = evaluate(str(run.path))
    assert looked.evaluation.step == 2
    assert looked.evaluation.n == 3
    assert looked.to_json()["eval/accuracy"] == run.metrics[-1]["eval/accuracy"]
    folder = export(run.path, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template is not None
    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    moved = [
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert any(moved)
    with pytest.raises(surefoot.errors.ModelError, match="not empty"):
        export(run.path, folder)
