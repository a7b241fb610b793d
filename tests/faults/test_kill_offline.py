"""Supervised and preference runs: learned from, killed and resumed, exported."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offline import FORMS, make_offline_recipe
from support.runs import assert_same_run, command, kill, start, train, wait_for_step
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import surefoot
from surefoot.loops.runs import export
from surefoot.run.read import read_events, read_metrics

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "sft": ({"name": "sft", "packing": True}, "demonstrations"),
    "dpo": ({"name": "dpo"}, "pairs"),
    "orpo": ({"name": "orpo"}, "pairs"),
    "kto": ({"name": "kto"}, "labels"),
    "reward_model": ({"name": "reward_model", "normalize": True}, "pairs"),
    "ranking": ({"name": "reward_model", "data": "rankings", "center": 0.0}, "rankings"),
}


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directory of an undisturbed run of each."""
    made = {}
    command("--version", cwd=tmp_path_factory.mktemp("warm")).communicate(timeout=200)
    for name, (method, rows) in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        done = train(make_offline_recipe(folder, tiny_model, method=method, rows=rows))
        assert done.returncode == 0, done.stderr
        made[name] = folder / "run"
    return made


def metric(run: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run) if row.get(name) is not None]


@pytest.mark.parametrize("name", RUNS)
def test_it_learns(name: str, finished: dict[str, Path]) -> None:
    run = finished[name]
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(10))
    assert rows[-1]["epoch"] >= 3, "eight rows, three a step"
    losses = metric(run, "loss")
    assert sum(losses[-3:]) < sum(losses[:3])


def test_sft_lowers_perplexity_on_held_out_rows(finished: dict[str, Path]) -> None:
    seen = metric(finished["sft"], "eval/perplexity")
    assert len(seen) == 4 and seen[-1] < seen[0]
    assert metric(finished["sft"], "packing_efficiency")[0] > 0.8


def test_dpo_begins_at_log_two_with_equal_rewards(finished: dict[str, Path]) -> None:
    first = read_metrics(finished["dpo"])[1]
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=0)
    assert first["rewards/chosen"] == first["rewards/margins"] == 0.0
    assert metric(finished["dpo"], "rewards/margins")[-1] > 0


def test_kto_tells_good_from_bad(finished: dict[str, Path]) -> None:
    first = read_metrics(finished["kto"])[1]
    told = [value for name, value in first.items() if name.startswith(("rewards/ch", "rewards/re"))]
    assert told and set(told) == {0.0}
    # A step whose labels are all good, or all bad, has no margin.
    assert metric(finished["kto"], "rewards/margins")[-1] > 0
    assert all(value >= 0 for value in metric(finished["kto"], "kl"))


@pytest.mark.fault(3)
@pytest.mark.parametrize("name", ["orpo", "kto", "reward_model", "ranking"])
def test_kill_nine_within_given_steps(
    name: str, finished: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    method, rows = RUNS[name]
    recipe = make_offline_recipe(tmp_path, tiny_model, method=method, rows=rows)
    rng = random.Random(f"{name}-kills")
    for step in (1, 6):
        child = start(recipe)
        wait_for_step(tmp_path / "run", step, child)
        time.sleep(rng.uniform(0.0, 0.05))
        kill(child)
        child.communicate(timeout=60)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", finished[name])
    assert any(event["kind"] == "resumed" for event in read_events(tmp_path / "run"))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_export_is_a_plain_model(
    name: str, finished: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    folder = export(finished[name], tmp_path / "model")
    got = AutoModelForCausalLM.from_pretrained(folder)
    was = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(got.model.norm.weight, was.model.norm.weight)


def test_a_reward_model_is_a_plain_classifier_and_a_reward(
    finished: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    folder = export(finished["reward_model"], tmp_path / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1

    def said(prompt: str, answer: str) -> float:
        turns = [{"role": "user", "content": prompt}]
        start_ = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(f"{start_}{answer}{tokenizer.eos_token}", return_tensors="pt").input_ids
        return float(model(input_ids=ids).logits[0, 0].detach())

    margins = [
        said(str(row["prompt"]), str(row["chosen"]))
        - said(str(row["prompt"]), str(row["rejected"]))
        for row in FORMS["pairs"]
    ]
    assert sum(margin > 0 for margin in margins) >= 7
    rewarded = surefoot.train(
        {
            "model": {"path": str(tiny_model)},
            "reward": [{"use": "model", "path": str(folder)}],
            "method": {"name": "rloo", "group_size": 4, "kl": {"coef": 0.0}},
            "rollout": {"prompts_per_step": 2, "max_new_tokens": 4},
            "run": {"dir": str(tmp_path / "rl"), "steps": 1, "trackers": []},
        },
        data=[{"prompt": f"say {c}"} for c in "abc"],
    )
    assert rewarded.metrics[0]["reward_std"] > 0


def test_a_normalised_reward_model_has_mean_0_and_std_1(
    finished: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """On the answers that it was measured on: those of the rows it was trained on."""
    from surefoot.records import StopReason
    from surefoot.reward.contract import RewardSample
    from surefoot.reward.resolve import resolve

    folder = export(finished["reward_model"], tmp_path / "judge")
    (part,) = resolve([_Use("model", {"path": str(folder)})])
    held_out = {row["prompt"] for row in _eval_rows(finished["reward_model"])}
    samples = [
        RewardSample(
            prompt=str(row["prompt"]),
            text=str(row[side]),
            ids=(),
            answer=None,
            task="default",
            columns={},
            stop=StopReason.STOP,
            messages=({"role": "user", "content": str(row["prompt"])},),
        )
        for row in FORMS["pairs"]
        if row["id"] not in held_out
        for side in ("chosen", "rejected")
    ]
    assert part.scorer is not None and len(samples) == 16
    values = torch.tensor([verdict.value for verdict in part.scorer(samples)])
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(values.std(correction=0)) == pytest.approx(1.0, abs=1e-4)


class _Use:
    weight, name, timeout, price, retries = 1.0, None, 10.0, None, 1

    def __init__(self, use: str, options: dict[str, Any]) -> None:
        self.use, self.options = use, options


def _eval_rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "groups.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] == 0]


def test_python_rows_and_a_length_in_epochs(tiny_model: Path, tmp_path: Path) -> None:
    run = surefoot.train(
        {
            "model": {"path": str(tiny_model)},
            "method": "dpo",
            "optim": {"learning_rate": 1e-3, "batch_size": 4},
            "run": {"dir": str(tmp_path / "run"), "epochs": 2, "trackers": []},
        },
        data=FORMS["pairs"],
    )
    assert run.metrics[-1]["step"] == 5, "ten rows twice, four a step"
    again = surefoot.train(tmp_path / "run" / "recipe.yaml", data=FORMS["pairs"])
    assert again.metrics == run.metrics


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critic__layers": 1}, "critic.layers"),
        ({"method": {"name": "kto"}, "rows": "labels", "optim__batch_size": 1}, "batch_size"),
        ({"method": {"name": "kto", "weight": "likelihood"}, "rows": "labels"}, "or weight"),
    ],
)
def test_what_cannot_work_is_refused(
    changes: dict[str, Any], said: str, tiny_model: Path, tmp_path: Path
) -> None:
    method = changes.pop("method", {"name": "dpo"})
    rows = changes.pop("rows", "pairs")
    recipe = make_offline_recipe(tmp_path, tiny_model, method=method, rows=rows, **changes)
    done = train(recipe)
    assert done.returncode == 2 and said in done.stderr
