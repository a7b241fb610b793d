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
