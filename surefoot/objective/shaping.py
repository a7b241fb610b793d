"""What is added to a score before the baseline sees it.

Owns the length penalty of DAPO and the sequence penalty of the divergence.
Refuses to own the score itself, and which of these a method uses.
"""

from __future__ import annotations

from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_shapes


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
