"""Weights for samples that another program drew: rho = old / sampled, trainer over engine.

Owns truncation (TIS), masking (IcePop) and the geometric mask. Refuses to own rho (`mismatch`) and
the loss that a weight multiplies. No weight carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes


def truncate(ratio: Tensor, *, high: float) -> Tensor:
    """Hold the weight at its bound: min(rho, high) (truncated importance sampling).

    Shapes: ratio of any shape, per token or per sequence -> the same, detached.
    """
    _check(0.0, high)
    return ratio.detach().clamp_max(high)


def mask(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Take what lies outside out whole: rho inside [low, high], else 0 (arXiv:2510.18855).

    Shapes: ratio of any shape, per token or per sequence -> the same, detached.
    """
    return torch.where(inside(ratio, low=low, high=high), ratio.detach(), 0.0)


def inside(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Which ratios lie in [low, high]; with geometric means per sequence: the geometric mask.

    NaN lies nowhere. Shapes: ratio of any shape -> bool of the same.
    """
    _check(low, high)
    return (ratio >= low) & (ratio <= high)


def apply(per_token_BT: Tensor, weight_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Multiply losses by weights: sg(w) loss (arXiv:2110.00641). A masked token is not looked at.

    Shapes: per_token_BT, weight_BT, mask_BT (bool) -> per_token_BT in its own dtype.
    """
    check_shapes(BT=(per_token_BT, weight_BT, mask_BT))
    check_mask(mask_BT)
    factor_BT = torch.where(mask_BT, weight_BT, 0.0).detach().to(per_token_BT.dtype)
    return factor_BT * torch.where(mask_BT, per_token_BT, 0.0)


def _check(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise SurefootError(f"Bounds hold 1 between them, not {low=}, {high=}.")
