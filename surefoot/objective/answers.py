"""Scores of whole answers from the log-probabilities of their tokens.

Owns the scores (sum, mean, log odds), their difference to the reference, which pairs can be
compared, and how typical of the policy an answer is (WPO).
Refuses to own the losses made of them (`preference`) and the log-probabilities themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes

LOG_ODDS_LIMIT = 20.0
"""Nats. A mean probability within 2e-9 of 1, where the odds would go to infinity."""

_MEAN_LIMIT = -math.log1p(math.exp(-LOG_ODDS_LIMIT))

Score = Literal["sum", "mean", "log_odds"]
SCORES: tuple[str, ...] = ("sum", "mean", "log_odds")


@dataclass(frozen=True)
class Scored:
    """One score per answer, and where it could not be followed."""

    score_B: Tensor
    """Nats, float64; 0 in a row without valid tokens."""
    is_held_B: Tensor
    """Log odds held at the limit: no gradient there. All false for the other scores."""


def sequence_score(logp_BT: Tensor, *, mask_BT: Tensor, score: Score) -> Scored:
    """Score whole answers by the log-probabilities of their tokens.

    sum       sum_t logp_t                                                      arXiv:2305.18290
    mean      1/n sum_t logp_t                                                  arXiv:2405.14734
    log_odds  log(P / (1 - P)) = m - log(1 - e^m),  m = mean, P = e^m           arXiv:2403.07691
    At m = 0 the odds are infinite and so is their gradient; log odds are therefore held at 20
    (P within 2e-9 of 1), have no gradient there, and is_held_B says in which rows.
    Shapes: logp_BT (nats), mask_BT (bool, the trained tokens, EOS among them) -> Scored, float64.
    A row without valid tokens has score 0, which means nothing: leave it out by `present_pairs`.
    """
    check_shapes(BT=(logp_BT, mask_BT))
    check_mask(mask_BT)
    if score not in SCORES:
        raise SurefootError(f"There is no score {score!r}; choose from {', '.join(SCORES)}.")
    total_B = torch.where(mask_BT, logp_BT, 0.0).double().sum(1)
    is_held_B = torch.zeros_like(total_B).bool()
    if score == "sum":
        return Scored(total_B, is_held_B)
    length_B = mask_BT.sum(1)
    mean_B = total_B / length_B.clamp(min=1)
    if score == "mean":
        return Scored(mean_B, is_held_B)
    is_held_B = (length_B > 0) & (mean_B.detach() > _MEAN_LIMIT)
    held_B = mean_B.clamp(max=_MEAN_LIMIT)
    odds_B = held_B - torch.log(-torch.expm1(held_B))
    return Scored(torch.where(length_B > 0, odds_B, 0.0), is_held_B)


def present_pairs(chosen_mask_BT: Tensor, rejected_mask_BS: Tensor) -> Tensor:
    """Say which pairs can be compared: those whose two answers both have a trained token.

    Shapes: chosen_mask_BT, rejected_mask_BS (bool; S and T may differ) -> present_B (bool).
    """
    check_shapes(BT=(chosen_mask_BT,), BS=(rejected_mask_BS,))
    check_mask(chosen_mask_BT, rejected_mask_BS)
    return chosen_mask_BT.any(1) & rejected_mask_BS.any(1)


def against_reference(score_B: Tensor, ref_score_B: Tensor) -> Tensor:
    """Take the policy's score relative to that of the reference, which carries no gradient.

    s = score - ref_score; for the score `sum` that is log(pi / pi_ref). Exactly 0 at unchanged
    weights. Without a reference, give the score itself to the losses.
    Shapes: score_B, ref_score_B (nats) -> s_B (float64).
    """
    check_shapes(B=(score_B, ref_score_B))
    return score_B.double() - ref_score_B.detach().double()


def log_likelihood_weight(logp_BT: Tensor, log_collision_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Say how typical of the policy an answer is: mean_t (logp_t - c_t) (WPO, arXiv:2406.11827).

    c_t = log sum_v p_v^2, the mean probability of a token sampled at t ("sampled alignment"). The
    answers that the policy would have sampled itself have about 0, others less; single ones may
    be above 0.
    Shapes: logp_BT, log_collision_BT (nats), mask_BT (bool) -> log_weight_B (float64, constant; 0
    in a row without valid tokens).
    """
    check_shapes(BT=(logp_BT, log_collision_BT, mask_BT))
    check_mask(mask_BT)
    gap_BT = torch.where(mask_BT, (logp_BT - log_collision_BT).detach(), 0.0).double()
    return gap_BT.sum(1) / mask_BT.sum(1).clamp(min=1)


def likelihood_weights(
    chosen_log_weight_B: Tensor, rejected_log_weight_B: Tensor, *, present_B: Tensor
) -> Tensor:
    """Weigh a pair by how typical both its answers are: min(1, w_w w_l) (WPO, arXiv:2406.11827).

    The row's `weight: likelihood`. Multiply the losses of the pairs by it; the denominator stays
    the number of present pairs. The bound at 1 is that of the released code.
    Shapes: both from `log_likelihood_weight`, present_B (bool) -> weight_B (float64, constant, 0
    to 1; 0 where absent).
    """
    check_shapes(B=(chosen_log_weight_B, rejected_log_weight_B, present_B))
    check_mask(present_B)
    log_B = (chosen_log_weight_B + rejected_log_weight_B).detach().double()
    return torch.where(present_B, log_B.exp().clamp(max=1), 0.0)
