"""What is added to a score before the baseline sees it.

Owns the length penalties and the sequence penalty of the divergence.
Refuses to own the score itself, and which of these a method uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes


def soft_overlong(length_B: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Fade in a penalty for length before the limit (arXiv:2503.14476 Eq. 13).

    0 up to max_length - cache, then down in a straight line to -1 at max_length, -1 above.
    Shapes: length_B, max_length, cache (tokens; max_length is the generation limit) -> penalty_B
    (float64, units of score, to be added).
    """
    check_shapes(B=(length_B,))
    if not 1 <= cache <= max_length:
        raise SurefootError(
            f"The overlong cache is {cache} tokens, but must lie in 1..{max_length} (the limit)."
        )
    over_B = length_B.double() - (max_length - cache)
    return -(over_B / cache).clamp(0.0, 1.0)


def subtract_kl(reward_B: Tensor, sequence_kl_B: Tensor, *, coef: float) -> Tensor:
    """Charge a completion its whole divergence: r - coef KL (arXiv:2402.14740 Eq. 3).

    A missing reward (NaN) stays missing.
    Shapes: reward_B, sequence_kl_B (nats, from `kl.sequence_kl`) -> reward_B (float64).
    """
    check_shapes(B=(reward_B, sequence_kl_B))
    return reward_B.double() - coef * sequence_kl_B.detach().double()


def shorter_is_better(length_PG: Tensor, *, right_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """Compare lengths within a group (arXiv:2501.12599 section 2.3.3).

    x = 0.5 - (n - shortest) / (longest - shortest); a right completion gains x in [-0.5, 0.5], a
    wrong one min(0, x), so that a short wrong answer is worth nothing more than another.
    Groups whose valid lengths are all equal, and what is not valid: exactly 0.
    Shapes: length_PG (tokens), right_PG (bool), valid_PG (bool) -> bonus_PG (float64).
    """
    check_shapes(PG=(length_PG, right_PG, valid_PG))
    check_mask(valid_PG)
    infinity = float("inf")
    length_PG = length_PG.double()
    short_P1 = torch.where(valid_PG, length_PG, infinity).amin(1, keepdim=True)
    range_P1 = torch.where(valid_PG, length_PG, -infinity).amax(1, keepdim=True) - short_P1
    spread_P1 = range_P1 > 0
    bonus_PG = 0.5 - (length_PG - short_P1) / torch.where(spread_P1, range_P1, 1.0)
    bonus_PG = torch.where(right_PG, bonus_PG, bonus_PG.clamp(max=0.0))
    return torch.where(valid_PG & spread_P1, bonus_PG, 0.0)
