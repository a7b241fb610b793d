"""Statistics over the whole step: scales and whitening that compare a prompt with the others.

Owns what needs every group at once: the spread of a batch, whitening by tokens or by sequences,
and scores that are normalised part by part first (GDPO).
Refuses to own what a group says of itself (`group`), and the history of earlier steps (`history`).

A group whose rewards are all equal has no spread of its own, but a place among the others: nothing
here treats it apart. Everything is float64; what is not valid has exactly 0 and is in no statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.group import group_normalized
from surefoot.objective.shapes import check_mask, check_shapes

_ROUNDING = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Whitened:
    """Whitened values (0 where not counted) and the statistics used; all float64."""

    value: Tensor
    mean: Tensor
    """0 without centering."""
    variance: Tensor
    """About that mean."""


def scale_by_batch_std(
    advantage_PG: Tensor, value_PG: Tensor, *, valid_PG: Tensor, ddof: int, eps: float
) -> Tensor:
    """Divide by the spread over the step: A / (std(value over all valid samples) + eps).

    `value` is what is measured: the rewards, or the advantages themselves (arXiv:2508.08221).
    Values that are all equal have no std, and the advantages stay as they are.
    Shapes: advantage_PG, value_PG, valid_PG (bool) -> advantage_PG (float64).
    """
    _check(ddof, eps)
    check_shapes(PG=(advantage_PG, value_PG, valid_PG))
    check_mask(valid_PG)
    value_N = value_PG.double()[valid_PG]
    spread = _spread(value_N, ddof)
    divisor = 1.0 if spread is None else spread + eps
    return torch.where(valid_PG, advantage_PG.double() / divisor, 0.0)


def part_scores(
    part_PGK: Tensor, weight_K: Sequence[float], *, valid_PG: Tensor, ddof: int, eps: float
) -> Tensor:
    """Score each reward part within its group, then add: sum over k of w_k z_k (arXiv:2601.05242).

    A part that is equal over a group adds exactly 0 there. A part that is NaN for a valid sample
    does not apply to it: it is left out of that part's statistics and adds 0.
    Shapes: part_PGK, valid_PG (bool) -> score_PG (float64).
    """
    check_shapes(PGK=(part_PGK,), PG=(valid_PG,))
    if part_PGK.shape[2] != len(weight_K):
        raise SurefootError(
            f"{part_PGK.shape[2]} reward parts have {len(weight_K)} weights; give one to each."
        )
    total_PG = torch.zeros(valid_PG.shape, dtype=torch.float64, device=part_PGK.device)
    for part_PG, weight in zip(part_PGK.unbind(2), weight_K, strict=True):
        applies_PG = valid_PG & ~torch.isnan(part_PG)
        total_PG += weight * group_normalized(part_PG, valid_PG=applies_PG, ddof=ddof, eps=eps)
    return total_PG


def whiten_tokens(
    advantage_BT: Tensor, *, mask_BT: Tensor, center: bool, ddof: int, eps: float
) -> Whitened:
    """Whiten with every valid token counted once: (A - mean) / sqrt(var + eps).

    Without `center` the second moment about 0 is the variance, and nothing is subtracted, so that
    an advantage of 0 stays 0 (arXiv:2501.03262 Eq. 5; the rest of the step leaks into it else).
    Advantages that are all equal become 0 with `center`.
    Shapes: advantage_BT, mask_BT (bool) -> Whitened, value [B, T].
    """
    check_shapes(BT=(advantage_BT, mask_BT))
    check_mask(mask_BT)
    return _whitened(advantage_BT, mask_BT, center=center, ddof=ddof, eps=eps)


def whiten_sequences(
    advantage_B: Tensor, *, present_B: Tensor, center: bool, ddof: int, eps: float
) -> Whitened:
    """The same with every present sequence counted once, whatever its length.

    Shapes: advantage_B, present_B (bool) -> Whitened, value [B].
    """
    check_shapes(B=(advantage_B, present_B))
    check_mask(present_B)
    return _whitened(advantage_B, present_B, center=center, ddof=ddof, eps=eps)


def _whitened(value: Tensor, counted: Tensor, *, center: bool, ddof: int, eps: float) -> Whitened:
    _check(ddof, eps)
    number = counted.sum().clamp(min=1)
    clean = torch.where(counted, value.double(), 0.0)
    mean = clean.new_zeros(())
    if center and bool(counted.any()):
        # Deviations from the smallest first, so that equal values have mean deviation 0 exactly.
        lowest = clean[counted].min()
        mean = lowest + (clean[counted] - lowest).sum() / number
        clean = torch.where(counted, clean - lowest - (mean - lowest), 0.0)
        # What is left of a value at the mean is the rounding of the sums, and depends on order.
        rounding = _ROUNDING * clean.abs().max()
        clean = torch.where(clean.abs() > rounding, clean, 0.0)
    # Over what counts alone, so that padding changes no digit.
    variance = clean[counted].square().sum() / (number - ddof).clamp(min=1)
    divisor = (variance + eps).sqrt()
    return Whitened(torch.where(divisor > 0, clean / divisor, 0.0), mean, variance)


def _spread(value_N: Tensor, ddof: int) -> Tensor | None:
    if value_N.numel() < 2 or not bool(value_N.max() > value_N.min()):
        return None
    unit = value_N.max() - value_N.min()
    deviation_N = (value_N - value_N.min()) / unit
    deviation_N = deviation_N - deviation_N.mean()
    freedom = max(value_N.numel() - ddof, 1)
    return unit * (deviation_N.square().sum() / freedom).sqrt()


def _check(ddof: int, eps: float) -> None:
    if ddof not in (0, 1) or eps < 0:
        raise SurefootError(
            f"A standard deviation needs ddof 0 or 1 and eps >= 0, not ddof={ddof}, eps={eps}."
        )
