"""The policy losses per token: REINFORCE, ratios, and the gate that clips them.

Owns losses to be minimised, one number per token, before any reduction.
Refuses to own the reduction (`reduce`), the advantages (`group`, `credit`), and which log-prob is
the old one: that is the row's choice.

Advantages carry no gradient. Masked tokens have loss 0 and gradient 0; mask an absent row whole,
for a NaN advantage at a valid token is not hidden, in the loss or in the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) is 5e8: far outside every trust region, and still finite in every dtype's sums."""


@dataclass(frozen=True)
class Clipped:
    """A clipped loss, and the valid tokens whose gradient the gate really removed."""

    per_token_BT: Tensor
    is_low_BT: Tensor
    """A < 0 and r < 1 - low."""
    is_high_BT: Tensor
    """A > 0 and r > 1 + high (or > cap, where that is less)."""
    is_capped_BT: Tensor
    """A < 0 and r beyond the bound that dual or cap sets; all false without both."""


def log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, *, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Compare now with then: log r = logp - old_logp, held within +-20 nats.

    The limit keeps exp(log r) finite; beyond it there is no gradient, and the count says how many
    valid tokens were there. NaN at a valid token stays NaN.
    Shapes: logp_BT, old_logp_BT, mask_BT (bool) -> log_ratio_BT in the dtype of logp_BT, 0 where
    masked; count (int64 scalar tensor).
    """
    check_shapes(BT=(logp_BT, old_logp_BT, mask_BT))
    check_mask(mask_BT)
    now_BT = torch.where(mask_BT, logp_BT, 0.0)
    then_BT = torch.where(mask_BT, old_logp_BT, 0.0).detach()
    raw_BT = now_BT - then_BT
    count = (raw_BT.detach().abs() > LOG_RATIO_LIMIT).sum()
    return raw_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).to(logp_BT.dtype), count


def reinforce(logp_BT: Tensor, *, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Weigh the log-probability by the advantage: loss_t = -A_t logp_t (Williams 1992).

    Shapes: logp_BT, advantage_BT, mask_BT (bool) -> per_token_BT in the dtype of logp_BT.
    """
    check_shapes(BT=(logp_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=logp_BT)
    return -advantage_BT * torch.where(mask_BT, logp_BT, 0.0)


def unclipped(log_ratio_BT: Tensor, *, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Weigh the ratio by the advantage, with no gate: loss_t = -r_t A_t.

    Shapes: log_ratio_BT, advantage_BT, mask_BT (bool) -> per_token_BT in the dtype of log_ratio_BT.
    """
    check_shapes(BT=(log_ratio_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=log_ratio_BT)
    return -advantage_BT * torch.where(mask_BT, log_ratio_BT, 0.0).exp()


def clipped(
    log_ratio_BT: Tensor,
    *,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    low: float,
    high: float,
    dual: float | None,
    cap: float | None,
) -> Clipped:
    """Stop pushing a ratio once it has moved far enough the way the advantage pushes it.

    loss_t = -min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)     (arXiv:1707.06347, 2505.07291)
    A < 0 with dual: -max(that minimum, dual A)                    (arXiv:1912.09729)
    low != high is the clip-higher of arXiv:2503.14476. None switches dual or cap off.
    Shapes: log_ratio_BT, advantage_BT, mask_BT (bool) -> Clipped, per_token_BT in the dtype of
    log_ratio_BT. On a bound exactly the gradient is still there.
    """
    check_shapes(BT=(log_ratio_BT, advantage_BT, mask_BT))
    check_mask(mask_BT)
    _check_bounds(low, high, dual, cap)
    advantage_BT = clean_advantage(advantage_BT, mask_BT, like=log_ratio_BT)
    ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0).exp()
    # A > 0: the minimum is A min(r, cap, 1 + high). A < 0: it is A max(min(r, cap), clip(r)), that
    # is r held between 1 - low and max(cap, 1 + high), and dual holds it from above once more.
    above = 1.0 + high
    above_positive = above if cap is None else min(above, cap)
    bounds = [] if cap is None else [max(above, cap)]
    above_negative = min(bounds if dual is None else [*bounds, dual], default=float("inf"))
    is_low_BT = mask_BT & (advantage_BT < 0) & (ratio_BT < 1.0 - low)
    is_high_BT = mask_BT & (advantage_BT > 0) & (ratio_BT > above_positive)
    is_capped_BT = mask_BT & (advantage_BT < 0) & (ratio_BT > above_negative)
    held_BT = torch.where(is_low_BT, 1.0 - low, ratio_BT)
    held_BT = torch.where(is_high_BT, above_positive, held_BT)
    held_BT = torch.where(is_capped_BT, above_negative, held_BT)
    return Clipped(-advantage_BT * held_BT, is_low_BT, is_high_BT, is_capped_BT)


def clean_advantage(advantage_BT: Tensor, mask_BT: Tensor, *, like: Tensor) -> Tensor:
    """Advantages as constants in the dtype of `like`, 0 where masked."""
    return torch.where(mask_BT, advantage_BT, 0.0).detach().to(like.dtype)


def _check_bounds(low: float, high: float, dual: float | None, cap: float | None) -> None:
    if low < 0 or high < 0:
        raise SurefootError(f"Clip ranges are distances from 1 and >= 0, not {low=}, {high=}.")
    if dual is not None and dual <= 1:
        raise SurefootError(f"dual is a ratio above 1 (3 is usual), not {dual}.")
    if cap is not None and cap <= 1:
        raise SurefootError(f"cap is a ratio above 1 (4 is usual), not {cap}.")
