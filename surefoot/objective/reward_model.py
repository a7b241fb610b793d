"""Reward models: losses from comparisons, the centre of the rewards, and their scale.

Owns the Bradley-Terry loss of pairs and of whole rankings, the squared sum that centres rewards,
and the gain and bias that fix their mean and variance.
Refuses to own which token the reward is read at, health (`calibration`), and every denominator.

A reward model knows differences only: a constant added to every reward of a prompt changes no
comparison. What is absent (false in the mask) has loss 0 and gradient 0 and is not looked at; NaN
in a present reward is not hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes


@dataclass(frozen=True)
class Judged:
    """Losses of pairs, the penalty to add to them, and their facts; 0 (false) where absent."""

    loss_B: Tensor
    penalty_B: Tensor
    margin_B: Tensor
    """Chosen less rejected reward, float64, a constant; the target margin is not in it."""
    is_correct_B: Tensor
    """margin > 0; a tie is not correct."""


@dataclass(frozen=True)
class Ranked:
    """Losses of rankings, the penalty to add to them, and their facts."""

    loss_P: Tensor
    penalty_P: Tensor
    pairs_P: Tensor
    """Comparisons in the ranking, int64; with 0 the ranking is absent: loss and penalty are 0."""
    correct_P: Tensor
    """Comparisons whose rewards are in order, int64."""


class Gain(NamedTuple):
    """score -> gain score + bias; float64 scalar tensors, constants."""

    gain: Tensor
    bias: Tensor


def bradley_terry(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    margin_B: Tensor,
    present_B: Tensor,
    center: float,
) -> Judged:
    """Make the chosen answer win: loss = -log sigmoid(r_w - r_l - m) (arXiv:2203.02155).

    m asks for a larger difference where the judge was surer (arXiv:2307.09288; 0 otherwise).
    penalty = center (r_w + r_l)^2 holds the rewards around 0 (arXiv:2312.09244; 0.01 is usual).
    Shapes: chosen_B, rejected_B, margin_B (rewards, >= 0, constants), present_B (bool) -> Judged,
    losses and penalties in the dtype of chosen_B.
    """
    check_shapes(B=(chosen_B, rejected_B, margin_B, present_B))
    check_mask(present_B)
    _check_center(center)
    target_B = torch.where(present_B, margin_B.detach(), 0.0).double()
    if bool((target_B < 0).any()):
        row = int((target_B < 0).nonzero()[0])
        raise SurefootError(
            f"margin_B is {target_B[row].item()} in row {row}, but a margin asks the chosen answer "
            "to win by so much and is at least 0."
        )
    winner_B = torch.where(present_B, chosen_B, 0.0).double()
    loser_B = torch.where(present_B, rejected_B, 0.0).double()
    gap_B = winner_B - loser_B
    loss_B = torch.where(present_B, -logsigmoid(gap_B - target_B), 0.0)
    penalty_B = center * (winner_B + loser_B).square()
    margin_B = gap_B.detach()
    dtype = chosen_B.dtype
    return Judged(loss_B.to(dtype), penalty_B.to(dtype), margin_B, margin_B > 0)


def ranking(reward_PK: Tensor, *, rank_PK: Tensor, valid_PK: Tensor, center: float) -> Ranked:
    """Put all answers of a prompt in order: the mean of the pair losses (arXiv:2203.02155 Eq. 1).

    loss_p = 1/n_p sum over pairs with rank_i < rank_j of -log sigmoid(r_i - r_j)
    penalty_p = center/n_p sum over the same pairs of (r_i + r_j)^2
    n_p = C(K, 2) without ties, so a ranking counts once however long it is, and its answers are
    run through the model once. Ties are no pairs: equal ranks say nothing.
    Shapes: reward_PK, rank_PK (any numbers, less is better), valid_PK (bool) -> Ranked, losses and
    penalties in the dtype of reward_PK.
    """
    check_shapes(PK=(reward_PK, rank_PK, valid_PK))
    check_mask(valid_PK)
    _check_center(center)
    clean_PK = torch.where(valid_PK, reward_PK, 0.0).double()
    both_PKK = valid_PK[:, :, None] & valid_PK[:, None, :]
    better_PKK = both_PKK & (rank_PK[:, :, None] < rank_PK[:, None, :])
    gap_PKK = clean_PK[:, :, None] - clean_PK[:, None, :]
    sum_PKK = clean_PK[:, :, None] + clean_PK[:, None, :]
    pairs_P = better_PKK.sum((1, 2))
    share_P = 1 / pairs_P.clamp(min=1).double()
    loss_P = share_P * torch.where(better_PKK, -logsigmoid(gap_PKK), 0.0).sum((1, 2))
    penalty_P = center * share_P * torch.where(better_PKK, sum_PKK.square(), 0.0).sum((1, 2))
    correct_P = (better_PKK & (gap_PKK.detach() > 0)).sum((1, 2))
    dtype = reward_PK.dtype
    return Ranked(loss_P.to(dtype), penalty_P.to(dtype), pairs_P, correct_P)


def normalization(score_N: Tensor, *, valid_N: Tensor, mean: float, std: float) -> Gain:
    """Find the gain and bias that give reference answers this mean and std (arXiv:1909.08593).

    gain = std / std(scores) (ddof 0),  bias = mean - gain mean(scores);  usual: mean 0, std 1.
    A positive gain and a bias change no comparison, but the loss of the model: fold them in after
    training only.
    Shapes: score_N, valid_N (bool), std (> 0) -> Gain.
    Errors: SurefootError for scores that are not finite, or that are all equal.
    """
    check_shapes(N=(score_N, valid_N))
    check_mask(valid_N)
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise SurefootError(f"The mean must be finite and the std above 0, not {mean} and {std}.")
    score_M = score_N.detach().double()[valid_N]
    wrong = int((~score_M.isfinite()).sum())
    if wrong:
        raise SurefootError(
            f"{wrong} of {score_M.numel()} reference scores are not finite; mark them as not valid "
            "or mend the reward model."
        )
    if score_M.numel() < 2 or not bool(score_M.max() > score_M.min()):
        raise SurefootError(
            f"The {score_M.numel()} reference scores are all equal, so no gain gives them std "
            f"{std}; give different reference answers, or train the reward model first."
        )
    center = score_M.mean()
    gain = std / (score_M - center).square().mean().sqrt()
    return Gain(gain, mean - gain * center)


def normalized(score_N: Tensor, gain: Gain) -> Tensor:
    """Apply a gain and bias: gain score + bias. Shapes: score_N -> score_N in its own dtype."""
    check_shapes(N=(score_N,))
    return (gain.gain * score_N.double() + gain.bias).to(score_N.dtype)


def _check_center(center: float) -> None:
    if not (math.isfinite(center) and center >= 0):
        raise SurefootError(f"center weighs the squared sum and is at least 0, not {center}.")
