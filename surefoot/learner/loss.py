"""The loss of one micro-batch, assembled from the values of a row.

Owns the dispatch from a row's ratio, gate, KL and terms to the functions of `objective/`.
Refuses to own the mathematics (there), the advantages (`loops/credit`) and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.methods import Method
from surefoot.objective import kl, policy, terms
from surefoot.objective.reduce import weighted_sum


@dataclass(frozen=True)
class LossInputs:
    """Rows of one micro-batch; every tensor is [b, T] and aligned.

    `weight_BT` are the token weights of the whole optimizer step, so the sum over micro-batches
    is the loss of the step. `mask_BT` is True where a token is trained.
    """

    logp_BT: Tensor
    entropy_BT: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    weight_BT: Tensor


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch (differentiable), and sums over its trained tokens for metrics."""

    loss: Tensor
    sums: Mapping[str, float]


def _no_gate(
    inputs: LossInputs, row: Method, log_ratio_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return policy.unclipped(
        log_ratio_BT, advantage_BT=inputs.advantage_BT, mask_BT=inputs.mask_BT
    ), {}


def _clip(
    inputs: LossInputs, row: Method, log_ratio_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    gate: Any = row.gate
    out = policy.clipped(
        log_ratio_BT,
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
        low=gate.low,
        high=gate.high,
        dual=gate.dual,
        cap=gate.cap,
    )
    flags = {"clip_low": out.is_low_BT, "clip_high": out.is_high_BT, "clip_cap": out.is_capped_BT}
    return out.per_token_BT, flags


Gate = Callable[[LossInputs, Method, Tensor], tuple[Tensor, dict[str, Tensor]]]
GATES: Mapping[str, Gate] = {"none": _no_gate, "clip": _clip}
RATIOS: frozenset[str] = frozenset({"none", "token"})


def microbatch_loss(inputs: LossInputs, row: Method) -> LossSums:
    """Sum weight x (policy loss + KL + terms) over the micro-batch's trained tokens."""
    mask_BT = inputs.mask_BT
    sums: dict[str, Tensor] = {"tokens": mask_BT.sum()}
    log_ratio_BT, clamped = policy.log_ratio(inputs.logp_BT, inputs.old_logp_BT, mask_BT=mask_BT)
    if row.ratio.level == "none":
        per_token_BT = policy.reinforce(
            inputs.logp_BT, advantage_BT=inputs.advantage_BT, mask_BT=mask_BT
        )
    else:
        per_token_BT, flags = GATES[row.gate.kind](inputs, row, log_ratio_BT)
        sums.update({name: flag.sum() for name, flag in flags.items()})
    sums["clamped"] = clamped
    ratio_BT = torch.where(mask_BT, log_ratio_BT.detach(), 0.0).exp()
    sums["ratio"] = torch.where(mask_BT, ratio_BT, 0.0).sum()
    sums["ratio_max"] = torch.where(mask_BT, ratio_BT, 0.0).max()
    if row.kl.place == "loss" and row.kl.coef != 0:
        assert inputs.ref_logp_BT is not None
        kl_BT = kl.estimate(
            row.kl.estimator,
            inputs.logp_BT,
            inputs.ref_logp_BT,
            mask_BT=mask_BT,
            old_logp_BT=inputs.old_logp_BT,
        )
        per_token_BT = per_token_BT + row.kl.coef * kl_BT
        sums["kl_trained"] = torch.where(mask_BT, kl_BT.detach(), 0.0).sum()
    for term in row.terms:
        per_token_BT = per_token_BT + TERMS[term.kind](inputs, term)
    sums["entropy"] = torch.where(mask_BT, inputs.entropy_BT.detach(), 0.0).sum()
    loss = weighted_sum(per_token_BT, inputs.weight_BT)
    return LossSums(loss, {name: float(value) for name, value in sums.items()})


def _entropy(inputs: LossInputs, term: Any) -> Tensor:
    bonus_BT = terms.entropy_bonus(inputs.entropy_BT, mask_BT=inputs.mask_BT)
    return float(term.weight) * bonus_BT


TERMS: Mapping[str, Callable[[LossInputs, Any], Tensor]] = {"entropy": _entropy}


def trains_everything(row: Method) -> bool:
    """Whether every trained token has a coefficient even where its advantage is 0."""
    weighted_kl = row.kl.place == "loss" and row.kl.coef != 0
    return weighted_kl or any(term.weight != 0 for term in row.terms if term.kind == "entropy")
