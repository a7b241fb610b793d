"""Gradient checkpointing: the same gradients from fewer kept numbers, with dropout off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offline import FORMS
from support.steps import batch_of, distance, make_learner, update
from support.tiny import architectures, make_model
from transformers import PreTrainedModel

import surefoot
from surefoot.errors import ModelError
from surefoot.learner.check import check_layouts
from surefoot.learner.critic import ValueModel, value_backbone
from surefoot.learner.documents import Document, document_passes
from surefoot.learner.layouts import Bundle, Name, build
from surefoot.learner.scorer import Scorer
from surefoot.learner.supervised import nll_loss
from surefoot.methods import online_rows
from surefoot.models.lora import adapter_weights, add_adapter
from surefoot.models.recompute import recompute_activations, recomputes
from surefoot.recipe import Lora
from surefoot.run.read import read_events

LENGTHS = [[3, 8, 1, 6], [5, 5, 2, 7]]


def pair(architecture: str = "llama", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same float64 model twice; the second computes its activations again."""
    config = copy.deepcopy(architectures()[architecture])
    for name, value in changes.items():
        setattr(config, name, value)
    plain = make_model(config, dtype=torch.float64)
    again = copy.deepcopy(plain)
    recompute_activations(again)
    return plain, again


def scorer_of(model: PreTrainedModel) -> Scorer:
    return Scorer(model, compute=model.dtype, head_dtype=model.dtype, temperature=1.0)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [(name, layout) for name in ("llama", "gpt2", "qwen3") for layout in ("packed", "rows")]
    + [("bloom", "rows"), ("gemma3", "rows")],
)
def test_an_online_step_has_the_same_gradient(architecture: str, layout: Name) -> None:
    found = []
    for model in pair(architecture):
        learner = make_learner(
            model, online_rows()["grpo"], layouts=(layout,), reference=copy.deepcopy(model)
        )
        found.append(update(learner, batch_of(LENGTHS), torch.linspace(-1, 1, 8)).gradients[0])
    assert distance(found[1], found[0]) < 1e-9


def test_a_critic_has_the_same_gradient() -> None:
    part = build("rows", [Bundle((5, 6, 7), ((8, 9), (10, 11, 12)), (0, 1))])
    found = []
    for model in pair():
        critic = ValueModel(value_backbone(model, layers=None), compute=torch.float64)
        torch.nn.init.ones_(critic.head.weight)
        critic(part).square().sum().backward()
        found.append(gradient(critic))
    assert distance(found[1], found[0]) < 1e-9


def test_packed_documents_have_the_same_gradient() -> None:
    lines = [
        [
            Document((5, 6, 7, 8), (False, True, True, True), 0),
            Document((9, 10, 11), (False, True, True), 1),
        ]
    ]
    found = []
    for model in pair():
        (part,) = document_passes(lines, budget=1000)
        nll_loss(scorer_of(model), tokens=5)(part).loss.backward()
        found.append(gradient(model))
    assert distance(found[1], found[0]) < 1e-9


def test_an_adapter_has_the_same_gradient() -> None:
    part = build("packed", [Bundle((5, 6, 7), ((8, 9), (10, 11, 12)), (0, 1))])
    found = []
    for model in pair():
        add_adapter(model, Lora(rank=2), seed=0, base_dir=None)
        with torch.no_grad():
            for weight in adapter_weights(model).values():
                weight.add_(0.1)
        scorer_of(model)(part).logp_N.sum().backward()
        found.append(gradient(model))
    assert found[0].abs().max() > 0
    assert distance(found[1], found[0]) < 1e-9


def kept_bytes(model: PreTrainedModel, run: Callable[[], torch.Tensor]) -> int:
    """What the graph of a forward pass holds for its backward pass, the weights left out."""
    own = {p.data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().sum().backward()
    return sum(seen.values())


def test_activations_are_not_kept_but_computed_again() -> None:
    ids = torch.arange(4, 68)[None]
    sizes, calls = [], []
    for model in pair():
        count = [0]
        model.model.layers[0].mlp.gate_proj.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        forward = model.model
        sizes.append(kept_bytes(model, lambda f=forward: f(ids, use_cache=False).last_hidden_state))
        calls.append(count[0])
    assert calls == [1, 2]
    assert sizes[1] < 0.35 * sizes[0]


def test_dropout_stays_off_and_the_model_in_eval_mode() -> None:
    plain, again = pair("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    part = build("rows", [Bundle((5, 6, 7), ((8, 9), (10, 11, 12)), (0, 1))])
    one, other = (scorer_of(model)(part).logp_N for model in (plain, again))
    assert torch.equal(one, other)
    assert not any(module.training for module in again.modules())


def test_a_copy_computes_with_its_own_weights() -> None:
    _, again = pair()
    other = copy.deepcopy(again)
    assert recomputes(other) and recomputes(again) and not recomputes(make_model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    out = again.model(torch.tensor([[5, 6, 7]]), use_cache=False).last_hidden_state
    assert bool(out.any())
    out.sum().backward()
    assert all(parameter.grad is None for parameter in other.parameters())


def test_the_prefix_layout_is_off_and_the_others_are_right() -> None:
    plain, again = pair()
    assert check_layouts(scorer_of(plain), seed=0).allowed == ("packed", "prefix", "rows")
    check = check_layouts(scorer_of(again), seed=0)
    assert check.allowed == ("packed", "rows")
    assert "gradient_checkpointing" in check.refused["prefix"]


def test_a_model_without_such_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.models.recompute.GradientCheckpointingLayer", torch.nn.GRU)
    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing: LlamaForCausalLM"):
        recompute_activations(make_model())


@pytest.mark.parametrize(
    ("method", "rows"), [("sft", "demonstrations"), ("dpo", "pairs"), ("reward_model", "pairs")]
)
def test_an_offline_run_learns_the_same(
    method: str, rows: str, tiny_model: Path, tmp_path: Path
) -> None:
    losses = []
    for again in ("false", "true"):
        run = surefoot.train(
            {
                "model": {"path": str(tiny_model), "dtype": "float64", "head_dtype": "float64"},
                "method": method,
                "optim": {"learning_rate": 0.003, "batch_size": 3},
                "run": {"dir": str(tmp_path / again), "steps": 4, "trackers": []},
            },
            [f"model.gradient_checkpointing={again}"],
            data=FORMS[rows],
        )
        losses.append([row["loss"] for row in run.metrics])
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
    assert losses[0][-1] != losses[0][0]


@pytest.mark.parametrize("name", ["rloo", "ppo"])
def test_an_online_run_learns(name: str, tiny_model: Path, tmp_path: Path) -> None:
    run = surefoot.train(
        {
            "model": {"path": str(tiny_model), "gradient_checkpointing": True},
            "method": {"name": name, "group_size": 4},
            "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
            "optim": {"learning_rate": 0.003},
            "run": {"dir": str(tmp_path / "run"), "steps": 2, "trackers": []},
        },
        rewards=[_length],
        data=[{"prompt": f"say {c}"} for c in "abcd"],
    )
    assert all(row["optimizer_steps"] >= 1 for row in run.metrics)
    (event,) = [e for e in read_events(run.path) if e["kind"] == "layouts"]
    assert "prefix" not in event["allowed"]


def _length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]
