"""How far the trainer's log-probabilities are from those of the engine that sampled.

Owns the measures of rho = exp(old_logp - sampled_logp). Refuses to own corrections that use rho,
and thresholds: a measure here is never clamped, an infinite one is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.objective.shapes import check_mask, check_shapes


@dataclass(frozen=True)
class Mismatch:
    """Everything is float64; per-token values are 0 where masked; scalars are tensors."""

    token_ratio_BT: Tensor
    """rho."""
    sequence_ratio_B: Tensor
    """Product of rho over the row; 1 for a row without valid tokens."""
    geometric_ratio_B: Tensor
    """Geometric mean of rho over the row; 1 for a row without valid tokens."""
    k3_BT: Tensor
    """rho - 1 - log rho."""
    kl_k1: Tensor
    """Mean of -log rho: KL(engine || trainer) from the engine's samples, nats per token."""
    kl_k3: Tensor
    """The same from k3."""
    chi2: Tensor
    """Mean of rho² - 1."""
    effective_tokens: Tensor
    """(sum rho)² / sum rho²: tokens that equally weighted ones would be worth."""


def mismatch(old_logp_BT: Tensor, sampled_logp_BT: Tensor, *, mask_BT: Tensor) -> Mismatch:
    """Measure trainer against engine over the valid tokens, at the weights that sampled.

    Shapes: old_logp_BT (trainer), sampled_logp_BT (engine), mask_BT (bool) -> Mismatch.
    Without any valid token the four scalars are NaN: there is nothing to measure.
    """
    check_shapes(BT=(old_logp_BT, sampled_logp_BT, mask_BT))
    check_mask(mask_BT)
    old_BT = torch.where(mask_BT, old_logp_BT.detach().double(), 0.0)
    log_rho_BT = old_BT - torch.where(mask_BT, sampled_logp_BT.detach().double(), 0.0)
    rho_BT = torch.where(mask_BT, log_rho_BT.exp(), 0.0)
    k3_BT = torch.expm1(log_rho_BT) - log_rho_BT
    tokens = mask_BT.sum().double()
    log_sequence_B = log_rho_BT.sum(1)
    return Mismatch(
        token_ratio_BT=rho_BT,
        sequence_ratio_B=log_sequence_B.exp(),
        geometric_ratio_B=(log_sequence_B / mask_BT.sum(1).clamp(min=1)).exp(),
        k3_BT=k3_BT,
        kl_k1=-log_rho_BT.sum() / tokens,
        kl_k3=k3_BT.sum() / tokens,
        chi2=torch.expm1(2.0 * log_rho_BT).sum() / tokens,
        effective_tokens=rho_BT.sum().square() / rho_BT.square().sum(),
    )
