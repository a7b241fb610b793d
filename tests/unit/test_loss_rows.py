"""A row's ratio, gate, correction and stale mask reach its loss: hand numbers through the door."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from support.hand import no_kl

from surefoot.learner.loss import LossInputs, LossSums, microbatch_loss

# Two completions of two tokens and one padding column: ratios 2 and 1/2, then 4 and 1.
RATIOS = ((2.0, 0.5), (4.0, 1.0))
RHO = ((1.0, 4.0), (0.5, 0.5))
"""Trainer over sampler."""


def inputs(advantages: tuple[float, float] = (1.0, -1.0)) -> LossInputs:
    old = torch.full((2, 3), math.log(0.1), dtype=torch.float64)
    logp, sampled = old.clone(), old.clone()
    logp[:, :2] += torch.tensor(RATIOS, dtype=torch.float64).log()
    sampled[:, :2] -= torch.tensor(RHO, dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]] * 2)
    logp[:, 2], old[:, 2], sampled[:, 2] = math.nan, math.nan, math.nan
    return LossInputs(
        logp.requires_grad_(),
        torch.ones_like(logp),
        old,
        sampled,
        None,
        torch.tensor(advantages, dtype=torch.float64)[:, None].expand(2, 3),
        mask,
        torch.where(mask, 0.25, 0.0),
    )


def loss_of(name: str, given: LossInputs | None = None, **changes: Any) -> LossSums:
    return microbatch_loss(given or inputs(), no_kl(name, **changes))


def value(name: str, **changes: Any) -> float:
    return float(loss_of(name, **changes).loss.detach())


def test_sequence_ratio() -> None:
    """Geometric means 1 and 2, at both tokens of each; unclipped -1 and +2."""
    assert value("gspo", gate="none") == pytest.approx((2 * -1 + 2 * 2) / 4)
    held = loss_of("gspo", gate={"kind": "clip", "low": 0.2, "high": 0.2, "cap": 1.5})
    assert float(held.loss) == pytest.approx((2 * -1 + 2 * 1.5) / 4)
    assert held.sums["clip_cap"] == 2


def test_sequence_token_ratio_has_the_gradient_of_its_token() -> None:
    given = inputs()
    loss_of("gspo_token", given, gate="none").loss.backward()
    grad = given.logp_BT.grad
    assert grad is not None
    assert grad[:, :2].tolist() == [
        pytest.approx([-0.25, -0.25]),
        pytest.approx([0.5, 0.5]),
    ]
    assert float(grad[:, 2].abs().sum()) == 0.0


def test_geometric_mean_of_clipped_ratios() -> None:
    """A > 0: 2 is held at 1.25, mean sqrt(1.25 / 2). A < 0: nothing below 3/4 to hold, mean 2."""
    out = loss_of("gmpo", gate={"low": 0.25, "high": 0.25})
    assert float(out.loss) == pytest.approx((-2 * math.sqrt(0.625) + 2 * 2) / 4)
    assert (out.sums["clip_high"], out.sums["clip_low"]) == (1, 0)


def test_weight_gate() -> None:
    """-sg(min(r, 3)) A logp, logp = log(0.1 r)."""
    logp = [math.log(0.1 * r) for pair in RATIOS for r in pair]
    want = -(2 * logp[0] + 0.5 * logp[1] - 3 * logp[2] - 1 * logp[3]) / 4
    out = loss_of("cispo", gate={"high": 3.0})
    assert float(out.loss) == pytest.approx(want)
    assert (out.sums["clip_high"], out.sums["clip_low"]) == (1, 0)


def test_sigmoid_gate() -> None:
    def f(tau: float, ratio: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    want = (-f(1.0, 2.0) - f(1.0, 0.5) + f(1.05, 4.0) + f(1.05, 1.0)) / 4
    assert value("sapo") == pytest.approx(want)


def test_divergence_gate_compares_with_the_sampler() -> None:
    """p 0.2, 0.05, 0.4, 0.1 against q 0.1, 0.025, 0.2, 0.2: the last moves down by 0.1, A < 0;
    the first moves up by 0.1, A > 0."""
    out = loss_of("dppo", gate={"delta": 0.09})
    assert out.sums["gate_dropped"] == 2
    want = -(2.0 * math.log(0.05) - 2.0 * math.log(0.4)) / 4
    assert float(out.loss) == pytest.approx(want)
    assert out.sums["ratio"] == pytest.approx(2 + 2 + 2 + 0.5)


@pytest.mark.parametrize(
    ("correction", "weights", "dropped"),
    [
        ({"kind": "truncate", "high": 2.0}, (1.0, 2.0, 0.5, 0.5), 0),
        ({"kind": "truncate", "level": "sequence", "high": 2.0}, (2.0, 2.0, 0.25, 0.25), 0),
        ({"kind": "mask", "low": 0.4, "high": 2.0}, (1.0, 0.0, 0.5, 0.5), 1),
        ({"kind": "mask", "level": "sequence", "low": 0.3, "high": 5.0}, (4.0, 4.0, 0.0, 0.0), 2),
        ({"kind": "geometric_mask", "low": 0.6, "high": 2.5}, (1.0, 1.0, 0.0, 0.0), 2),
    ],
)
def test_corrections_weigh_the_policy_loss(
    correction: dict[str, Any], weights: tuple[float, ...], dropped: int
) -> None:
    per_token = (-2.0, -0.5, 4.0, 1.0)
    want = sum(w * loss for w, loss in zip(weights, per_token, strict=True)) / 4
    out = loss_of("dr_grpo", gate="none", correction=correction)
    assert float(out.loss) == pytest.approx(want)
    assert out.sums["correction"] == pytest.approx(sum(weights))
    assert out.sums["correction_dropped"] == dropped


def test_a_correction_leaves_other_terms_alone() -> None:
    """Entropy 1 at each of four tokens of weight 1/4."""
    changes: dict[str, Any] = {"gate": "none", "correction": {"kind": "mask", "high": 2.0}}
    terms = [{"kind": "entropy", "weight": 0.5}]
    assert value("dr_grpo", terms=terms, **changes) == pytest.approx(
        value("dr_grpo", **changes) - 0.5
    )


def test_a_stale_completion_has_no_policy_loss() -> None:
    """A < 0 and less likely by log 2 per token on average; A > 0 is never stale."""
    given = inputs()
    lower = given.old_logp_BT.clone()
    lower[:, :2] -= torch.tensor([[0.0, 2.0], [0.0, 2.0]], dtype=torch.float64) * math.log(2)
    given = dataclasses.replace(given, logp_BT=lower.requires_grad_())
    terms = [{"kind": "stale_mask", "delta": 0.6}]
    out = loss_of("dr_grpo", given, gate="none", epochs=2, terms=terms)
    assert float(out.loss) == pytest.approx(-(1.0 + 0.25) / 4)
    assert out.sums["stale"] == 2
    terms = [{"kind": "stale_mask", "delta": 0.7}]
    kept = loss_of("dr_grpo", given, gate="none", epochs=2, terms=terms)
    assert float(kept.loss) == pytest.approx(0.0)
    assert kept.sums["stale"] == 0
