"""Loss terms beside the policy loss.

Owns losses per token, to be multiplied by their weight and reduced like the policy loss.
Refuses to own the weight, and terms that need a critic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.objective.shapes import check_mask, check_shapes


def entropy_bonus(entropy_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Reward an undecided policy: loss_t = -H_t (arXiv:1707.06347 Eq. 9).

    Shapes: entropy_BT (nats), mask_BT (bool) -> per_token_BT in the dtype of entropy_BT; 0 where
    masked.
    """
    check_shapes(BT=(entropy_BT, mask_BT))
    check_mask(mask_BT)
    return -torch.where(mask_BT, entropy_BT, 0.0)


def stale(
    logp_BT: Tensor, old_logp_BT: Tensor, *, advantage_B: Tensor, mask_BT: Tensor, delta: float
) -> tuple[Tensor, Tensor]:
    """Say which completions are bad and have drifted: A < 0 and mean(old - logp) > delta nats.

    Their loss is to be taken out, from no denominator (off-policy sequence mask, arXiv:2512.02556).
    Shapes: logp_BT, old_logp_BT, mask_BT (bool), advantage_B -> is_stale_B (bool), drift_B
    (float64, nats per token; 0 for a row without valid tokens).
    """
    check_shapes(BT=(logp_BT, old_logp_BT, mask_BT), B=(advantage_B,))
    check_mask(mask_BT)
    gap_BT = old_logp_BT.detach().double() - logp_BT.detach().double()
    drift_B = torch.where(mask_BT, gap_BT, 0.0).sum(1) / mask_BT.sum(1).clamp(min=1)
    return (advantage_B < 0) & (drift_B > delta), drift_B
