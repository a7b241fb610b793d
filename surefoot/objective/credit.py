"""One number per token: how the number of a completion reaches the tokens that earned it.

Owns spreading, token rewards and returns. Refuses to own baselines and scales (`group`), and the
estimate of the divergence that is charged per token (`kl`).

Masked tokens are as if taken out: what follows them continues, and they get exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.objective.shapes import check_mask, check_shapes


def broadcast(advantage_B: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Give every valid token the advantage of its completion: A_t = A.

    Shapes: advantage_B, mask_BT (bool) -> advantage_BT in the dtype of advantage_B; 0 where masked.
    """
    check_shapes(B=(advantage_B,), BT=(mask_BT,))
    check_mask(mask_BT)
    return torch.where(mask_BT, advantage_B[:, None], 0.0)


def per_token_reward(score_B: Tensor, kl_BT: Tensor, *, mask_BT: Tensor, coef: float) -> Tensor:
    """Charge the divergence at each token and pay the score at the last one (arXiv:1909.08593).

    r_t = -coef kl_t, plus the score at the last valid token
    Shapes: score_B, kl_BT (nats), mask_BT (bool) -> reward_BT in the wider of both dtypes; 0 where
    masked. A row without valid tokens has nowhere to put its score: all 0.
    """
    check_shapes(B=(score_B,), BT=(kl_BT, mask_BT))
    check_mask(mask_BT)
    remaining_BT = mask_BT.flip(1).cumsum(1).flip(1)
    last_BT = mask_BT & (remaining_BT == 1)
    reward_BT = torch.where(mask_BT, -coef * kl_BT, 0.0)
    return torch.where(last_BT, reward_BT + score_B[:, None], reward_BT)


def reward_to_go(reward_BT: Tensor, *, mask_BT: Tensor, gamma: float) -> Tensor:
    """Sum what is still to come: R_t = r_t + gamma R_next, over the valid tokens.

    A masked token neither earns nor discounts. A row without valid tokens: all 0.
    Shapes: reward_BT, mask_BT (bool) -> return_BT in the dtype of reward_BT; 0 where masked.
    """
    check_shapes(BT=(reward_BT, mask_BT))
    check_mask(mask_BT)
    clean_BT = torch.where(mask_BT, reward_BT.double(), 0.0)
    carried_B = clean_BT.new_zeros(clean_BT.shape[0])
    backwards = []
    for reward_B, mask_B in zip(
        reversed(clean_BT.unbind(1)), reversed(mask_BT.unbind(1)), strict=True
    ):
        carried_B = torch.where(mask_B, reward_B + gamma * carried_B, carried_B)
        backwards.append(torch.where(mask_B, carried_B, 0.0))
    if not backwards:
        return torch.zeros_like(reward_BT)
    return torch.stack(backwards[::-1], dim=1).to(reward_BT.dtype)


def step_rewards(reward_BS: Tensor, end_BS: Tensor, *, step_BS: Tensor, mask_BT: Tensor) -> Tensor:
    """Pay the reward of each step at the token it ends in: r_t = sum of the steps that end at t.

    `end` counts valid tokens from 0. Steps that end in the same token are added up.
    Shapes: reward_BS (units of reward), end_BS (int64), step_BS (bool: the step exists), mask_BT
    (bool) -> reward_BT in the dtype of reward_BS; 0 where masked. A step that ends beyond the last
    valid token is paid nowhere, which is an error of the caller.
    """
    check_shapes(BS=(reward_BS, end_BS, step_BS), BT=(mask_BT,))
    check_mask(step_BS, mask_BT)
    place_BT = mask_BT.cumsum(1) - 1
    here_BTS = step_BS[:, None] & mask_BT[:, :, None] & (end_BS[:, None] == place_BT[:, :, None])
    return torch.where(here_BTS, reward_BS[:, None], 0.0).sum(2)


def step_credit(reward_BS: Tensor, end_BS: Tensor, *, step_BS: Tensor, mask_BT: Tensor) -> Tensor:
    """Give a token the rewards of all steps that end at it or after it (arXiv:2402.03300 4.1.3).

    `end` counts valid tokens from 0: a step that ends at token e pays tokens 0 to e.
    Shapes: reward_BS (normalised already), end_BS (int64), step_BS (bool: the step exists),
    mask_BT (bool) -> advantage_BT in the dtype of reward_BS; 0 where masked.
    """
    check_shapes(BS=(reward_BS, end_BS, step_BS), BT=(mask_BT,))
    check_mask(step_BS, mask_BT)
    place_BT = mask_BT.cumsum(1) - 1
    paid_BTS = step_BS[:, None] & (end_BS[:, None] >= place_BT[:, :, None])
    reward_BTS = torch.where(paid_BTS, reward_BS[:, None], 0.0)
    return torch.where(mask_BT, reward_BTS.sum(2), 0.0)
