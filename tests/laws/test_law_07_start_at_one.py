"""Law 7: at unchanged weights the ratio is exactly one and the KL to the reference exactly zero."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from support.steps import batch_of, distance, make_learner, update
from support.tiny import architectures, make_model

from surefoot.learner.layouts import NAMES, Name
from surefoot.methods import Method, NoGate, Ratio, online_rows, with_fields

LENGTHS = [[3, 8, 1, 6], [5, 5, 2, 7]]
RATIOS = [
    name
    for name, value in online_rows().items()
    if isinstance(value, Method) and value.ratio.level != "none"
]


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_the_ratio_starts_at_exactly_one(architecture: str, layout: Name) -> None:
    row = dataclasses.replace(online_rows()["grpo"], epochs=2)
    config = copy.deepcopy(architectures()[architecture])
    if architecture == "gpt2":
        # Dropout in a model's config stays off unless it is asked for.
        config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.1
    model = make_model(config)
    learner = make_learner(model, row, budget=30, layouts=(layout,), reference=copy.deepcopy(model))
    batch = batch_of(LENGTHS)
    plan = learner.plan(batch, torch.ones(8, dtype=torch.bool), step=1)
    facts = learner.score(batch, plan, old=True, reference=True)
    assert facts.old_logp_BT is not None and facts.ref_logp_BT is not None
    assert torch.equal(facts.old_logp_BT, facts.ref_logp_BT)
    for part in plan.passes:
        again_N = learner.scorer(part).logp_N.detach().double()
        assert torch.equal(again_N, facts.old_logp_BT[part.rows_N, part.columns_N])


@pytest.mark.parametrize("name", RATIOS)
def test_the_first_of_two_epochs_is_at_one_and_the_second_is_not(name: str) -> None:
    row = with_fields(online_rows()[name], {"epochs": 2, "ratio": {"to": "old"}})
    assert isinstance(row, Method)
    model = make_model()
    learner = make_learner(model, row, reference=copy.deepcopy(model), learning_rate=0.05)
    out = update(learner, batch_of(LENGTHS), torch.linspace(-1, 1, 8))
    assert len(out.gradients) == 2
    assert out.report.sums["ratio_max"] > 1.0
    assert not torch.equal(out.gradients[0], out.gradients[1])
    assert (out.report.sums.get("kl_trained", 0.0) > 0.0) == (row.kl.place == "loss")
    # At a ratio of 1 the first is the gradient of the log-probabilities, whatever the gate.
    bare = dataclasses.replace(row, ratio=Ratio(), gate=NoGate(), epochs=1)
    plain = make_learner(make_model(), bare, reference=make_model())
    first = update(plain, batch_of(LENGTHS), torch.linspace(-1, 1, 8)).gradients[0]
    assert distance(out.gradients[0], first) < 1e-5


@pytest.mark.parametrize("name", online_rows())
def test_one_step_alone_reads_its_old_logps_from_the_first_forward(name: str) -> None:
    row = with_fields(online_rows()[name], {"ratio": {"to": "old"}} if name in RATIOS else {})
    assert isinstance(row, Method)
    model = make_model()
    learner = make_learner(model, row, reference=copy.deepcopy(model))
    batch = batch_of(LENGTHS)
    out = update(learner, batch, torch.linspace(-1, 1, 8))
    assert torch.equal(out.report.known_BT, batch.mask_BT)
    tokens = out.report.sums["tokens"]
    assert out.report.sums["ratio"] == tokens
    assert out.report.sums["ratio_max"] == 1.0


def test_a_lower_precision_reference_is_close() -> None:
    model = make_model(spread=0.05)
    reference = copy.deepcopy(model).to(torch.bfloat16)
    learner = make_learner(model, online_rows()["grpo"], reference=reference)
    batch = batch_of(LENGTHS)
    plan = learner.plan(batch, torch.ones(8, dtype=torch.bool), step=1)
    facts = learner.score(batch, plan, old=True, reference=True)
    assert facts.old_logp_BT is not None and facts.ref_logp_BT is not None
    gap = (facts.ref_logp_BT - facts.old_logp_BT)[batch.mask_BT]
    k3 = torch.expm1(gap) - gap
    assert 0.0 < float(k3.mean()) < 2e-3
