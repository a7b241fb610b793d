"""Gates beside the clip, and ratios of whole completions.

Owns the ratio levels (sequence, sequence-token, geometric mean) as log-ratios per token, and the
losses of CISPO, SAPO, GMPO and DPPO, one number per token, before any reduction.
Refuses to own the clip and the plain losses (`policy`), the reduction and the advantages.

A ratio of a completion stands at each of its valid tokens, so that the mean over them (reduction
sequence_mean) is the completion's own loss, and its gradient the mean over its tokens.
Advantages carry no gradient; masked tokens have loss 0 and gradient 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.policy import clean_advantage
from surefoot.objective.shapes import check_mask, check_shapes


@dataclass(frozen=True)
class Diverged:
    """The divergence-gated loss, and what it was made of; keep and weight carry no gradient."""

    per_token_BT: Tensor
    keep_BT: Tensor
    """Valid tokens that the gate lets through (bool)."""
    weight_BT: Tensor
    """min(p/q, cap); 0 where masked."""


@dataclass(frozen=True)
class Geometric:
    """The loss of the clipped geometric mean, and the tokens whose ratio was clipped."""

    per_token_BT: Tensor
    log_ratio_B: Tensor
    """Mean of the clipped log-ratios."""
    is_low_BT: Tensor
    is_high_BT: Tensor


def sequence_log_ratio(log_ratio_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """The mean log-ratio of each completion, at each of its tokens (arXiv:2507.18071 Eq. 7).

    Shapes: log_ratio_BT, mask_BT (bool) -> [B, T] in the dtype of log_ratio_BT; 0 where masked.
    """
    mean_B1 = _row_mean(log_ratio_BT, mask_BT)
    return torch.where(mask_BT, mean_B1, 0.0)


def sequence_token_log_ratio(log_ratio_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """The same value, whose gradient is that of the token alone (GSPO-token, Eq. 14).

    sg(mean log r) + log r_t - sg(log r_t).
    Shapes: log_ratio_BT, mask_BT (bool) -> [B, T] in the dtype of log_ratio_BT; 0 where masked.
    """
    clean_BT = torch.where(mask_BT, log_ratio_BT, 0.0)
    value_BT = sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT).detach()
    return value_BT + (clean_BT - clean_BT.detach())


def weighted(
    log_ratio_BT: Tensor,
    logp_BT: Tensor,
    *,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    low: float,
    high: float,
) -> Tensor:
    """Weigh the log-probability by a bounded ratio: -sg(clip(r, low, high)) A logp.

    The bounds are ratios, not distances from 1. A clipped token keeps its gradient
    (CISPO, arXiv:2506.13585 Eq. 4-5).
    Shapes: all [B, T], mask bool -> per_token_BT in the dtype of logp_BT.
    """
    check_shapes(BT=(log_ratio_BT, logp_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    if not 0 <= low <= 1 < high:
        raise SurefootError(f"Weights are held between low <= 1 and high > 1, not {low=}, {high=}.")
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=logp_BT)
    weight_BT = torch.where(mask_BT, log_ratio_BT, 0.0).detach().exp().clamp(low, high)
    return -weight_BT.to(logp_BT.dtype) * advantage_BT * torch.where(mask_BT, logp_BT, 0.0)


def sigmoid(
    log_ratio_BT: Tensor,
    *,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    positive: float,
    negative: float,
) -> Tensor:
    """Let the pull of a token fade with its distance: -(4/tau) sigmoid(tau (r - 1)) A.

    tau is `positive` where A > 0, else `negative` (SAPO, arXiv:2511.20347). At r = 1 the gradient
    is that of -r A; a larger tau fades sooner.
    Shapes: all [B, T], mask bool -> per_token_BT in the dtype of log_ratio_BT.
    """
    check_shapes(BT=(log_ratio_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    if positive <= 0 or negative <= 0:
        raise SurefootError(f"Temperatures are above 0, not {positive=}, {negative=}.")
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=log_ratio_BT)
    tau_BT = torch.where(advantage_BT > 0, positive, negative).to(log_ratio_BT.dtype)
    ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0).exp()
    return -(4.0 / tau_BT) * torch.sigmoid(tau_BT * (ratio_BT - 1.0)) * advantage_BT


def geometric(
    log_ratio_BT: Tensor, *, advantage_BT: Tensor, mask_BT: Tensor, low: float, high: float
) -> Geometric:
    """Weigh by the geometric mean of clipped ratios: -exp(mean of clipped log r) A.

    log r is held below log(1 + high) where A > 0 and above log(1 - low) where A < 0
    (GMPO, arXiv:2507.20673, whose bounds are +-0.4 in log r).
    Shapes: all [B, T], mask bool; A equal over each row -> Geometric, per_token_BT in the dtype of
    log_ratio_BT.
    """
    check_shapes(BT=(log_ratio_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    if not 0 <= low < 1 or high < 0:
        raise SurefootError(f"Ranges are distances from 1, low below 1, not {low=}, {high=}.")
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=log_ratio_BT)
    clean_BT = torch.where(mask_BT, log_ratio_BT, 0.0)
    bound_low, bound_high = math.log1p(-low), math.log1p(high)
    is_high_BT = mask_BT & (advantage_BT > 0) & (clean_BT > bound_high)
    is_low_BT = mask_BT & (advantage_BT < 0) & (clean_BT < bound_low)
    held_BT = torch.where(is_high_BT, bound_high, clean_BT)
    held_BT = torch.where(is_low_BT, bound_low, held_BT)
    mean_B1 = _row_mean(held_BT, mask_BT)
    per_token_BT = torch.where(mask_BT, -mean_B1.exp() * advantage_BT, 0.0)
    return Geometric(per_token_BT, mean_B1[:, 0], is_low_BT, is_high_BT)


def diverged(
    logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    *,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    measure: Literal["tv", "kl"],
    delta: float,
    cap: float,
) -> Diverged:
    """Drop tokens that have moved too far the way A pushes: -sg(w keep) A logp.

    p is the policy's probability of the token, q the sampler's, w = min(p/q, cap). A token is
    dropped if its update moves p away from q and |p - q| (tv) or KL(Bernoulli q, p) (kl) exceeds
    delta; it stays in every denominator (DPPO, arXiv:2602.04879 Eq. 13-14).
    Shapes: all [B, T], mask bool -> Diverged, per_token_BT in the dtype of logp_BT.
    """
    check_shapes(BT=(logp_BT, behavior_logp_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    if delta <= 0 or cap <= 1:
        raise SurefootError(f"delta is above 0 and cap above 1, not {delta=}, {cap=}.")
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=logp_BT)
    now_BT = torch.where(mask_BT, logp_BT, 0.0)
    log_p_BT = now_BT.detach().double()
    log_q_BT = torch.where(mask_BT, behavior_logp_BT, 0.0).detach().double()
    p_BT, q_BT = log_p_BT.exp(), log_q_BT.exp()
    apart_BT = (p_BT - q_BT).abs()
    if measure == "kl":
        rest_p_BT, rest_q_BT = -torch.expm1(log_p_BT), -torch.expm1(log_q_BT)
        # 0 log 0 = 0: a sampler that was certain leaves nothing in the second term.
        rest_BT = torch.xlogy(rest_q_BT, rest_q_BT) - torch.xlogy(rest_q_BT, rest_p_BT)
        apart_BT = q_BT * (log_q_BT - log_p_BT) + torch.where(rest_q_BT > 0, rest_BT, 0.0)
    elif measure != "tv":
        raise SurefootError(f"There is no divergence {measure!r}; choose tv or kl.")
    away_BT = ((advantage_BT > 0) & (p_BT > q_BT)) | ((advantage_BT < 0) & (p_BT < q_BT))
    keep_BT = mask_BT & ~(away_BT & (apart_BT > delta))
    weight_BT = torch.where(mask_BT, (log_p_BT - log_q_BT).exp().clamp_max(cap), 0.0)
    factor_BT = torch.where(keep_BT, weight_BT, 0.0).to(logp_BT.dtype)
    return Diverged(-factor_BT * advantage_BT * now_BT, keep_BT, weight_BT)


def _row_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    check_shapes(BT=(value_BT, mask_BT))
    check_mask(mask_BT)
    count_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask_BT, value_BT, 0.0).sum(1, keepdim=True) / count_B1
