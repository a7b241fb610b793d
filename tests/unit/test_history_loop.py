"""A history baseline inside the loop, with a scripted engine of a set solve rate: 32 prompts, one
completion each, a task switch from 0.7 to 0.2 in the recipe, twenty seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loop import Bench, make_loop

from surefoot.records import Prompt

SWITCH, STEPS, PROMPTS = 9, 14, 32
RATES = {"first": 0.7, "second": 0.2}
SEEDS = range(20)


def sources(folder: Path, *, labelled: bool) -> list[dict[str, Any]]:
    made = []
    for name, interval in (("first", {"until_step": SWITCH}), ("second", {"from_step": SWITCH})):
        path = folder / f"{name}.jsonl"
        lines = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(64)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        made.append({"source": str(path), **interval, **({"task": name} if labelled else {})})
    return made


def run(folder: Path, model: Path, seed: int, *, labelled: bool) -> Bench:
    def judge(prompt: Prompt, sample: int, call: int) -> float:
        draw = np.random.default_rng([seed, prompt.position]).random()
        return float(draw < RATES[prompt.text.split()[0]])

    bench = make_loop(
        model,
        folder / f"run{seed}",
        method={
            "name": "reinforce_ma",
            "group_size": 1,
            "kl": {"coef": 0.0},
            "baseline": {"mode": "ema", "decay": 0.9, "on_shift": "reset"},
        },
        judge=judge,
        prompts=PROMPTS,
        steps=STEPS,
        sources=sources(folder, labelled=labelled),
    )
    bench.run()
    return bench


@pytest.mark.parametrize("labelled", [True, False])
def test_a_task_switch_is_reported_and_forgotten(
    labelled: bool, tmp_path: Path, tiny_model: Path
) -> None:
    for seed in SEEDS:
        bench = run(tmp_path, tiny_model, seed, labelled=labelled)
        (event,) = bench.events("history_shift")
        assert SWITCH <= event["at"] < SWITCH + 3, (seed, event)
        assert event["task"] == ("second" if labelled else None)
        # Two standard errors of a mean of 32 at this rate, of the history (one such step or
        # more, from its own mean) and of the step together.
        error = (0.2 * 0.8 / PROMPTS) ** 0.5
        rows = {row["step"]: row["advantage/mean"] for row in bench.metrics()}
        near = [abs(rows[step]) <= 2 * error for step in range(SWITCH, SWITCH + 5)]
        assert any(near), (seed, rows)
        assert abs(rows[SWITCH]) > 4 * error
