"""Faults that users of other libraries reported, each tried on ours where no law does it already.

docs/field_bugs.md names for every report the test that holds it off.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hand import CAP, group, no_kl, row, take_step
from support.hand import make_learner as hand_learner
from support.steps import batch_of, make_learner, update
from support.tiny import make_model, make_tokenizer
from tokenizers import processors
from torch import Tensor

from surefoot.learner.batch import make_batch
from surefoot.learner.scorer import Scorer
from surefoot.loops.standing import stand
from surefoot.methods import online_rows
from surefoot.models import PromptTemplate
from surefoot.objective import credit, kl
from surefoot.records import ScoreStatus

POLICY = (0.5, -0.3, 0.1, -1.0)
REFERENCE = (-0.2, 0.4, 0.3, -0.6)
"""Logits over four tokens."""


def logits(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def expected_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Over all tokens: probability times the gradient of the loss on that token's log-ratio."""
    theta_V = logits(POLICY)
    logp_V = theta_V.log_softmax(0)
    ref_V = logits(REFERENCE).log_softmax(0).detach()
    terms = loss(logp_V[:, None], ref_V[:, None])
    return torch.autograd.grad((logp_V.detach().exp() * terms[:, 0]).sum(), theta_V)[0]


def exact_gradient(*, forward: bool) -> Tensor:
    """Of KL(policy || reference), or with `forward` of KL(reference || policy), by definition."""
    theta_V = logits(POLICY)
    logp_V, ref_V = theta_V.log_softmax(0), logits(REFERENCE).log_softmax(0).detach()
    value = (ref_V.exp() * (ref_V - logp_V)) if forward else (logp_V.exp() * (logp_V - ref_V))
    return torch.autograd.grad(value.sum(), theta_V)[0]


@pytest.mark.parametrize(
    ("kind", "forward"), [("k1", None), ("k2", False), ("k3", True), ("k3_ratio", False)]
)
def test_the_expected_gradient_of_each_estimator(kind: Any, forward: bool | None) -> None:
    """k1 as a loss trains nothing on average, and k3 trains the other divergence."""
    mask_BT = torch.ones((4, 1), dtype=torch.bool)

    def loss(logp_BT: Tensor, ref_BT: Tensor) -> Tensor:
        return kl.estimate(kind, logp_BT, ref_BT, mask_BT=mask_BT, old_logp_BT=logp_BT.detach())

    want = torch.zeros(4).double() if forward is None else exact_gradient(forward=forward)
    torch.testing.assert_close(expected_gradient(loss), want, rtol=1e-12, atol=1e-12)
    other = exact_gradient(forward=forward is not True)
    assert float((want - other).norm()) > 0.01


def test_the_charge_in_the_reward_has_the_gradient_of_the_whole_sequence() -> None:
    """Two tokens, the second drawn from logits that depend on the first: sum over all 9 of them of
    probability x return-to-go of k1 x gradient of the log-probability."""
    draw = torch.Generator().manual_seed(3)
    first_V, after_VV = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((3,), (3, 3))
    )
    ref_V, ref_VV = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((3,), (3, 3)))
    ref_V, ref_VV = ref_V.log_softmax(0), ref_VV.log_softmax(1)
    now_V, now_VV = first_V.log_softmax(0), after_VV.log_softmax(1)
    exact = (now_V.exp() * (now_V - ref_V)).sum()
    exact = exact + (now_V.exp()[:, None] * now_VV.exp() * (now_VV - ref_VV)).sum()
    want = torch.autograd.grad(exact, (first_V, after_VV), retain_graph=True)

    pairs = list(itertools.product(range(3), range(3)))
    logp_BT = torch.stack([torch.stack([now_V[a], now_VV[a, b]]) for a, b in pairs])
    ref_BT = torch.stack([torch.stack([ref_V[a], ref_VV[a, b]]) for a, b in pairs])
    mask_BT = torch.ones((9, 2), dtype=torch.bool)
    kl_BT = kl.estimate("k1", logp_BT.detach(), ref_BT, mask_BT=mask_BT)
    zero_B = torch.zeros(9, dtype=torch.float64)
    reward_BT = credit.per_token_reward(zero_B, kl_BT, mask_BT=mask_BT, coef=1.0)
    to_go_BT = credit.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=1.0)
    chance_B = logp_BT.detach().sum(1).exp()
    loss = -(chance_B[:, None] * to_go_BT * logp_BT).sum()
    got = torch.autograd.grad(loss, (first_V, after_VV))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_groups_that_end_up_uneven_are_still_groups() -> None:
    """4, 3 and 4 valid scores: never one statistic over all eleven of them."""
    missing = ScoreStatus.INFRA_ERROR
    groups = [
        group([1.0, 0.0, 0.0, 0.0]),
        group([0.5, 0.5, 0.5, missing], index=1),
        group([0.0, 0.0, 1.0, 1.0], index=2),
    ]
    step = take_step(no_kl("grpo", group_size=4), groups)
    found = step.credit.advantage_PG
    assert found[1].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert found[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    assert found.sum(1).tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitened_advantages_have_mean_zero_and_variance_one(name: str) -> None:
    """Over tokens for the one, over completions for the other; lengths differ."""
    groups = [
        group([1.0, 0.0, 0.5, 0.0], lengths=[9, 2, 5, 3]),
        group([1.0, 1.0, 0.0, 0.25], index=1, lengths=[1, 8, 2, 6]),
    ]
    batch = make_batch(groups)
    method = no_kl(name, group_size=4)
    standing = stand(method, batch, max_new_tokens=CAP, weights={"r": 1.0})
    step = take_step(method, groups)
    values = step.credit.signal.advantage_BT[batch.mask_BT]
    if name == "reinforce_pp_baseline":
        values = step.credit.advantage_PG[standing.present_PG]
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(values.square().mean()) == pytest.approx(1.0, rel=1e-6)


def test_the_reported_kl_term_is_the_trained_one() -> None:
    """With equal rewards the loss is the KL term alone: coefficient times its reported mean."""
    method = row(
        "grpo",
        group_size=2,
        reduce="token_mean",
        kl={"place": "loss", "estimator": "k3", "coef": 0.25},
    )
    step = take_step(method, [group([1.0, 1.0]), group([0.0, 0.0], index=1)])
    reported = step.metrics["kl/loss_k3_token"]
    assert reported > 0.01
    assert step.report.loss == pytest.approx(0.25 * reported, rel=1e-6)
    assert step.metrics["kl"] == pytest.approx(reported, rel=1e-6)


class Counting(Scorer):
    """A scorer that counts its forward passes."""

    calls = 0

    def forward(self, batch: Any) -> Any:
        Counting.calls += 1
        return super().forward(batch)


@pytest.mark.parametrize(
    ("name", "changes", "passes"),
    [
        # One optimizer step needs one forward pass; the old log-probabilities are its own.
        ("dr_grpo", {}, 1),
        ("grpo", {}, 2),
        ("grpo", {"kl": {"coef": 0.0}}, 1),
        ("dr_grpo", {"epochs": 2}, 3),
    ],
)
def test_no_pass_is_made_twice(name: str, changes: dict[str, Any], passes: int) -> None:
    model = make_model()
    learner = make_learner(model, row(name, **changes), reference=copy.deepcopy(model))
    for scorer in (learner.scorer, learner.reference):
        assert scorer is not None
        scorer.__class__ = Counting
    Counting.calls = 0
    update(learner, batch_of([[3, 5], [4, 2]]), torch.tensor([1.0, -1.0, 0.5, -0.5]))
    plan = learner.plan(batch_of([[3, 5], [4, 2]]), torch.ones(4, dtype=torch.bool), step=1)
    assert Counting.calls == passes * len(plan.passes)


def test_clipping_is_alive_from_the_second_optimizer_step_on() -> None:
    """One step per rollout: every ratio is 1 and nothing is clipped. With four it is counted."""
    groups = [group([1.0, 0.0, 1.0, 0.0], lengths=[5, 4, 6, 3])]
    shares = []
    for epochs in (1, 4):
        method = no_kl("grpo", group_size=4, epochs=epochs)
        step = take_step(method, groups, learner=hand_learner(method, rate=0.05))
        shares.append(step.metrics["clip_ratio/region_mean"])
    assert shares[0] == 0.0
    assert shares[1] > 0.0


def test_a_tokenizer_that_adds_its_own_beginning_adds_none_to_a_prompt() -> None:
    """The template writes what it wants; a second beginning would be one the model never saw."""
    tokenizer = make_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    assert tokenizer("a")["input_ids"][0] == begin, "the trap is set"
    template = PromptTemplate(tokenizer, template="auto", max_context=512)
    ids = template.encode([{"role": "user", "content": "a"}])
    # The user's turn, and the assistant's that is begun.
    assert ids.count(begin) == 2
    # Plain text for a base model gets the tokenizer's own beginning, once.
    assert PromptTemplate(tokenizer, template="none", max_context=512).encode("a").count(begin) == 1


@pytest.mark.parametrize("name", list(online_rows()))
def test_no_advantage_grows_out_of_rounding(name: str) -> None:
    """Seven of 0.35 and one of 0: sums of squares in float32 once made 2154 of it."""
    method = no_kl(name)
    scores = [0.35] * 7 + [0.0]
    other = [0.2, 0.9, 0.4, 0.6, 0.3, 0.8, 0.5, 0.7]
    step = take_step(method, [group(scores), group(other, index=1)])
    largest = float(step.credit.advantage_PG.abs().max())
    assert 0.0 < largest <= math.sqrt(16)
