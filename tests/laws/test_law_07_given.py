"""Law 7 on given data: the reference is the policy as it was passed, so rewards start at zero."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.given import CASES, RELATIVE, Bench, Step, given, make_task
from support.offline import FORMS
from support.runs import assert_same_run
from support.tiny import architectures, make_model, save_tiny
from transformers import PreTrainedModel

import surefoot
from surefoot.errors import CheckpointError
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.preference import score_of
from surefoot.learner.scorer import Scorer
from surefoot.loops import offline_work
from surefoot.loops.preference import answers_of
from surefoot.methods import Preference
from surefoot.models.lora import adapter_weights, add_adapter, base_copy, merged_copy
from surefoot.recipe import Lora

LORA = {"rank": 4, "alpha": 8.0}
LOG2 = math.log(2.0)
PAIRS = {"sigmoid": LOG2, "hinge": 1.0, "bco": 2 * LOG2, "apo_zero": 1.0, "nca": 2 * LOG2}
"""The loss of a pair of answers that both have reward 0."""
LABELS = {"kto": 0.5, "bco": LOG2}
"""Of a label whose reward is the zero point."""


def at_start(row: Preference, step: Step) -> float:
    """The loss of the step if every reward is 0; half of the labels are good."""
    assert row.margin == 0 and row.nll == 0, "write down what this row starts at"
    if row.data == "labels":
        return LABELS[row.link] * (row.desirable + row.undesirable) / 2
    weight = step.done.sums["pair_weight"] / step.done.sums["pairs"]
    if row.link == "square":
        return weight / (4 * row.beta**2)
    return weight * PAIRS[row.link]


def relative(name: str) -> Preference:
    row = CASES[name]
    assert isinstance(row, Preference)
    return row


def assert_starts_at_zero(row: Preference, step: Step) -> None:
    told = {name: value for name, value in step.metrics.items() if name.startswith("rewards/")}
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins"} <= told.keys()
    # A tie is not in order, so none is accurate.
    assert set(told.values()) == {0.0}
    assert step.metrics.get("kl", 0.0) == 0.0
    assert step.done.loss == pytest.approx(at_start(row, step), rel=1e-14)
    assert float(step.gradient.norm()) > 0


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", RELATIVE)
def test_every_reward_starts_at_exactly_zero(name: str, layout: Name, tmp_path: Path) -> None:
    row = relative(name)
    examples = given(row.data)
    options: dict[str, Any] = {"config": None, "dtype": torch.float32, "layouts": (layout,)}
    for budget in (30, 10_000):
        bench = make_task(row, examples, tmp_path, budget=budget, **options)
        assert_starts_at_zero(row, bench.step(examples))


@pytest.mark.parametrize("architecture", architectures())
def test_whatever_the_model(architecture: str, tmp_path: Path) -> None:
    for name in ("dpo", "kto"):
        examples = given(relative(name).data)
        # Layouts that the load-time check would refuse for this model are not taken.
        bench = make_task(
            relative(name),
            examples,
            tmp_path,
            config=architectures()[architecture],
            dtype=torch.float32,
            layouts=("rows",),
        )
        assert_starts_at_zero(relative(name), bench.step(examples))


def scores(row: Preference, model: PreTrainedModel, examples: Sequence[Any], bench: Bench) -> Any:
    scorer = Scorer(model, compute=model.dtype, head_dtype=model.dtype, temperature=1.0)
    return score_of(row, scorer, answers_of(examples), bench.task.packing)


def assert_stays(
    row: Preference, bench: Bench, examples: Sequence[Any], start: PreTrainedModel
) -> None:
    """Two steps later, rewards are those of the policy now against the policy at its start."""
    for _ in range(2):
        bench.step(examples, moves=True)
    gap_B = scores(row, bench.model, examples, bench) - scores(row, start, examples, bench)
    step = bench.step(examples)
    if row.data == "pairs":
        chosen_B, rejected_B = gap_B[0::2], gap_B[1::2]
    else:
        good_B = torch.tensor([label.desirable for label in examples])
        chosen_B, rejected_B = gap_B[good_B], gap_B[~good_B]
    near = {"rel": 1e-4, "abs": 1e-5}
    want = row.beta * float(chosen_B.mean())
    assert abs(want) > 1e-4
    assert step.metrics["rewards/chosen"] == pytest.approx(want, **near)
    want = row.beta * float(rejected_B.mean())
    assert step.metrics["rewards/rejected"] == pytest.approx(want, **near)


@pytest.mark.parametrize("name", RELATIVE)
def test_the_reference_stays_where_it_was(name: str, tmp_path: Path) -> None:
    row = relative(name)
    examples = given(row.data)
    bench = make_task(row, examples, tmp_path)
    assert_stays(row, bench, examples, copy.deepcopy(bench.model))


@pytest.mark.parametrize("name", [n for n, r in CASES.items() if n not in RELATIVE])
def test_a_row_without_a_reference_asks_none(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        offline_work, "reference_scores", lambda *a, **k: pytest.fail("asked a reference")
    )
    row = CASES[name]
    run = train(tmp_path / "run", tiny_model, row, row.data, steps=1)
    assert run.metrics[0]["optimizer_steps"] == 1


@pytest.mark.parametrize("name", CASES)
def test_dropout_of_the_model_is_off(name: str, tmp_path: Path) -> None:
    config = copy.deepcopy(architectures()["gpt2"])
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.3
    examples = given(CASES[name].data)
    bench = make_task(CASES[name], examples, tmp_path, config=config)
    one, other = bench.step(examples), bench.step(examples)
    assert one.done.loss == other.done.loss
    assert torch.equal(one.gradient, other.gradient)


# --- under LoRA ---


def adapted(*, fresh: bool) -> PreTrainedModel:
    """The tiny model with an adapter at zero, or with one that has been trained before."""
    model = make_model()
    add_adapter(model, Lora(**LORA), seed=0, base_dir=None)
    if not fresh:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in adapter_weights(model).values():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.requires_grad_(False)
    for weight in adapter_weights(model).values():
        weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "given"])
@pytest.mark.parametrize("name", RELATIVE)
def test_an_adapter_starts_at_zero_and_leaves_its_start_behind(
    name: str, fresh: bool, tmp_path: Path
) -> None:
    row, model = relative(name), adapted(fresh=fresh)
    examples = given(row.data)
    bench = make_task(row, examples, tmp_path, model=model, dtype=torch.float32)
    assert_starts_at_zero(row, bench.step(examples))
    assert set(bench.optimizer.names) == set(adapter_weights(model))
    # What a fresh adapter starts from is the base; what a given one does, base and adapter.
    start = base_copy(model) if fresh else merged_copy(model, dtype=torch.float32)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert_stays(row, bench, examples, start)
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)


def capitals(completions: list[str], **_: Any) -> list[float]:
    """The share of capital letters."""
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "ppo"])
def test_online_under_lora_the_kl_starts_at_exactly_zero(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The KL in the reward of a sequence, and of a token; in the loss: unit/test_lora_runs."""
    run = surefoot.train(
        {
            "model": {"path": str(tiny_model), "lora": LORA},
            "method": {"name": name, "group_size": 4, "kl": {"coef": 0.1}},
            "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
            "optim": {"learning_rate": 0.02},
            "run": {"dir": str(tmp_path / "run"), "steps": 2, "trackers": []},
        },
        data=[{"prompt": f"say {c}"} for c in "abcd"],
        rewards=[capitals],
    )
    assert run.metrics[0]["kl"] == 0.0 and run.metrics[1]["kl"] > 0.0


# --- whole runs ---


def train(
    folder: Path,
    model: Path,
    method: Any,
    data: str,
    *,
    steps: int,
    lora: Any = None,
) -> surefoot.Run:
    return surefoot.train(
        {
            "model": {"path": str(model), "lora": lora},
            "method": method,
            "optim": {"learning_rate": 0.02, "batch_size": 4},
            "run": {"dir": str(folder), "steps": steps, "checkpoint_every": 2, "trackers": []},
        },
        data=FORMS[data],
    )


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_on_resume_the_model_that_was_passed_is_asked_not_the_checkpoint(
    name: str, lora: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of scores is gone, as on another machine."""
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    data = relative(name).data
    train(tmp_path / "cut", tiny_model, name, data, steps=2, lora=lora)
    shutil.rmtree(tmp_path / "cache" / "reference")
    train(tmp_path / "cut", tiny_model, name, data, steps=4, lora=lora)
    shutil.rmtree(tmp_path / "cache" / "reference")
    whole = train(tmp_path / "whole", tiny_model, name, data, steps=4, lora=lora)
    assert_same_run(tmp_path / "cut", whole.path)
    first = whole.metrics[0]
    assert first["rewards/chosen"] == 0.0 != whole.metrics[-1]["rewards/chosen"]


@pytest.mark.fault(8)
def test_another_model_at_the_same_place_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    train(tmp_path / "run", model, "dpo", "pairs", steps=2)
    save_tiny(model, seed=1)
    with pytest.raises(CheckpointError, match="belongs to another run: model was"):
        train(tmp_path / "run", model, "dpo", "pairs", steps=4)


def test_two_given_adapters_of_one_base_are_two_references(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    for rate in ("0.02", "0.04"):
        made = surefoot.train(
            {
                "model": {"path": str(tiny_model), "lora": LORA},
                "method": "sft",
                "optim": {"learning_rate": float(rate), "batch_size": 5},
                "run": {"dir": str(tmp_path / f"sft{rate}"), "steps": 1, "trackers": []},
            },
            data=FORMS["demonstrations"],
        )
        given_ = {"path": str(made.export(tmp_path / f"adapter{rate}"))}
        run = train(tmp_path / f"dpo{rate}", tiny_model, "dpo", "pairs", steps=1, lora=given_)
        assert run.metrics[0]["rewards/chosen"] == run.metrics[0]["rewards/rejected"] == 0.0
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 2
