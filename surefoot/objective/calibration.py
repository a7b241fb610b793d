"""Are the judgements of a preference or reward model good? Health of margins, never trained on.

Owns accuracy, calibration error, the correlation with length, and the test for displacement.
Refuses to own the margins (`preference`, `reward_model`), and what a run does about them.

A margin is the reward of the chosen answer less that of the rejected one. What is not valid is
never looked at. Results are float64 constants: NaN where nothing is defined, and where a valid
margin is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes

Correlation = Literal["spearman", "pearson"]


@dataclass(frozen=True)
class PairMeans:
    """Mean scores of the present pairs of one step; NaN without any."""

    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True)
class Displacement:
    """What has changed between two steps, in units of the scores; float64 scalar tensors."""

    chosen: Tensor
    rejected: Tensor
    margin: Tensor
    is_displaced: Tensor
    """Bool scalar: the chosen answers became rarer while the margin grew."""


def accuracy(margin_N: Tensor, *, valid_N: Tensor) -> Tensor:
    """Count the pairs in the right order: the share of margin > 0.

    A tie is not in order, so a policy at its reference has accuracy 0, not 1/2.
    Shapes: margin_N, valid_N (bool) -> float64 scalar tensor; NaN without a valid pair.
    """
    margin_M = _valid(margin_N, valid_N)
    return _unless_nan(margin_M, (margin_M > 0).double().mean())


def expected_calibration_error(margin_N: Tensor, *, valid_N: Tensor, bins: int) -> Tensor:
    """Say how far sigmoid(margin) is from the truth (arXiv:1706.04599).

    ECE = sum_b n_b/N |right_b - confidence_b|
    The model prefers one answer with confidence sigmoid(|margin|), in [1/2, 1], which is cut into
    `bins` bins of equal width; right_b is the share of pairs in the right order, and a tie counts
    as half a pair. 0 is calibrated; 1/2 is always sure and right half the time. With few pairs in
    a bin it is biased upwards.
    Shapes: margin_N (logits), valid_N (bool), bins (>= 1) -> float64 scalar tensor; NaN without a
    valid pair.
    """
    if bins < 1:
        raise SurefootError(f"bins cuts the confidences and is at least 1, not {bins}.")
    margin_M = _valid(margin_N, valid_N)
    confidence_M = torch.sigmoid(margin_M.abs())
    right_M = 0.5 * (1 + margin_M.sign())
    place_M = torch.nan_to_num((2 * confidence_M - 1) * bins).long().clamp(max=bins - 1)
    gap_bins = margin_M.new_zeros(bins).index_add(0, place_M, right_M - confidence_M)
    return gap_bins.abs().sum() / margin_M.numel()


def length_correlation(
    value_N: Tensor, length_N: Tensor, *, valid_N: Tensor, kind: Correlation
) -> Tensor:
    """Say whether a judge pays for length: the correlation of rewards, or margins, with lengths.

    For margins take the difference of the two lengths. pearson: of the values; spearman: of their
    ranks, ties sharing their mean rank.
    Shapes: value_N, length_N (tokens), valid_N (bool) -> float64 scalar tensor in [-1, 1]; NaN
    with fewer than two valid values, or where either side is constant.
    """
    check_shapes(N=(value_N, length_N, valid_N))
    value_M, length_M = _valid(value_N, valid_N), _valid(length_N, valid_N)
    if kind == "spearman":
        value_M, length_M = _ranks(value_M), _ranks(length_M)
    elif kind != "pearson":
        raise SurefootError(f"kind is {kind!r}; it must be 'spearman' or 'pearson'.")
    if not (_has_spread(value_M) and _has_spread(length_M)):
        return torch.full((), float("nan"), dtype=torch.float64, device=value_N.device)
    value_M, length_M = _unit(value_M), _unit(length_M)
    return (value_M * length_M).sum().clamp(-1, 1)


def pair_means(chosen_B: Tensor, rejected_B: Tensor, *, present_B: Tensor) -> PairMeans:
    """Summarise a step for `displacement`: the mean scores of its present pairs.

    Shapes: chosen_B, rejected_B (scores, or s), present_B (bool) -> PairMeans, float64 constants.
    """
    check_shapes(B=(chosen_B, rejected_B, present_B))
    return PairMeans(_valid(chosen_B, present_B).mean(), _valid(rejected_B, present_B).mean())


def displacement(before: PairMeans, after: PairMeans, *, tolerance: float) -> Displacement:
    """Test for likelihood displacement: the chosen answers get rarer while the margin grows.

    displaced = (chosen after - before < -tolerance) and (margin after - before > tolerance)
    It happens because only the difference of the two answers is trained (arXiv:2410.08847).
    Give it the same pairs twice, or scores relative to the reference: other pairs are longer.
    Shapes: two pair means, tolerance (in units of the scores, >= 0) -> Displacement. Where a
    mean is NaN the changes are NaN and nothing is displaced.
    """
    if not tolerance >= 0:
        raise SurefootError(f"tolerance is a change of scores and >= 0, not {tolerance}.")
    chosen, rejected = after.chosen - before.chosen, after.rejected - before.rejected
    margin = chosen - rejected
    return Displacement(chosen, rejected, margin, (chosen < -tolerance) & (margin > tolerance))


def _valid(value_N: Tensor, valid_N: Tensor) -> Tensor:
    check_shapes(N=(value_N, valid_N))
    check_mask(valid_N)
    return value_N.detach().double()[valid_N]


def _unless_nan(given_M: Tensor, result: Tensor) -> Tensor:
    """NaN is neither right nor wrong, but comparisons call it wrong."""
    return torch.where(given_M.isnan().any(), float("nan"), result)


def _has_spread(value_M: Tensor) -> bool:
    return value_M.numel() > 0 and bool(value_M.max() > value_M.min())


def _unit(value_M: Tensor) -> Tensor:
    """Centred, and of length 1; in units of the range first, so that tiny spreads count."""
    centred_M = (value_M - value_M.min()) / (value_M.max() - value_M.min())
    centred_M = centred_M - centred_M.mean()
    return centred_M / centred_M.square().sum().sqrt()


def _ranks(value_M: Tensor) -> Tensor:
    """Mean ranks from 0; all NaN if a value is."""
    _, place_M, count_U = value_M.unique(return_inverse=True, return_counts=True)
    last_U = count_U.cumsum(0) - 1
    return _unless_nan(value_M, (last_U - (count_U.double() - 1) / 2)[place_M])
