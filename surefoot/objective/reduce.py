"""From losses per token to one number: every reduction as token weights.

Owns who counts in which denominator. Refuses to own the losses, and the splitting of a step.

    loss = sum over tokens of weight x per_token

The denominator is that of the whole optimizer step (all micro-batches, all ranks) and is computed
once, so the weights of a micro-batch are the rows of the weights of the whole batch. A sequence is
*present* or *absent*: an absent one (missing score, masked truncation, padding) is in no numerator
and no denominator; a present one counts, also when it is empty, clipped or has advantage 0.

With n_i valid tokens in row i and B present rows:

kind           loss                                            denominator
token_mean     sum of all tokens / N                           N = sum n_i        arXiv:2503.14476
sequence_mean  1/B sum_i (row sum / n_i)                       B                  arXiv:2402.03300
sequence_sum   1/B sum_i row sum                               B                  arXiv:2402.14740
constant       1/B sum_i (row sum / constant)                  B constant         arXiv:2503.20783
prompt_mean    token mean within each group, then their mean   groups with tokens
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes

Kind = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"]
KINDS: tuple[str, ...] = (
    "token_mean",
    "sequence_mean",
    "sequence_sum",
    "constant",
    "prompt_mean",
)


def lengths(mask_BT: Tensor) -> Tensor:
    """Count the valid tokens of each row. Shapes: mask_BT (bool) -> length_B (int64)."""
    check_shapes(BT=(mask_BT,))
    check_mask(mask_BT)
    return mask_BT.sum(1)


def denominator(
    kind: Kind,
    *,
    length_B: Tensor,
    present_B: Tensor,
    group_B: Tensor | None = None,
    constant: float | None = None,
) -> Tensor:
    """Compute the denominator of a step from all its rows (the table above).

    Over ranks the results may be summed, for prompt_mean as long as no group lies on two ranks.
    Shapes: length_B (tokens), present_B (bool), group_B (any integer ids; prompt_mean only),
    constant (tokens; constant only) -> float64 scalar tensor, 0 where nothing counts.
    """
    _check_kind(kind)
    check_shapes(B=(length_B, present_B))
    check_mask(present_B)
    if kind == "token_mean":
        return torch.where(present_B, length_B, 0).sum().double()
    if kind == "prompt_mean":
        if group_B is None:
            raise SurefootError("prompt_mean needs group_B: the group that each row belongs to.")
        check_shapes(B=(length_B, group_B))
        groups = group_B[present_B & (length_B > 0)].unique().numel()
        return torch.tensor(float(groups), dtype=torch.float64, device=length_B.device)
    rows = present_B.sum().double()
    if kind != "constant":
        return rows
    if constant is None or constant <= 0:
        raise SurefootError(f"The constant reduction needs constant > 0 tokens, not {constant}.")
    return rows * constant


def group_lengths(length_B: Tensor, *, present_B: Tensor, group_B: Tensor) -> Tensor:
    """Count the present tokens of the group that each row belongs to (for prompt_mean).

    Give it the rows of the whole step, and each micro-batch its rows of the result.
    Shapes: length_B, present_B (bool), group_B -> group_length_B (int64).
    """
    check_shapes(B=(length_B, present_B, group_B))
    check_mask(present_B)
    ids, place_B = group_B.unique(return_inverse=True)
    total = length_B.new_zeros(ids.shape[0])
    return total.index_add(0, place_B, torch.where(present_B, length_B, 0))[place_B]


def token_weights(
    kind: Kind,
    *,
    mask_BT: Tensor,
    present_B: Tensor,
    denominator: Tensor,
    group_length_B: Tensor | None = None,
) -> Tensor:
    """Weigh each token of some rows of a step whose denominator is known.

    Masked tokens, absent rows and a step with nothing present: exactly 0.
    Shapes: mask_BT (bool), present_B (bool), denominator (scalar), group_length_B (prompt_mean
    only, from `group_lengths`) -> weight_BT (float64).
    """
    _check_kind(kind)
    check_shapes(BT=(mask_BT,), B=(present_B,))
    check_mask(mask_BT, present_B)
    divisor_B = denominator.double().expand(present_B.shape)
    if kind == "sequence_mean":
        divisor_B = divisor_B * mask_BT.sum(1)
    elif kind == "prompt_mean":
        if group_length_B is None:
            raise SurefootError("prompt_mean needs group_length_B; compute it by group_lengths.")
        check_shapes(B=(present_B, group_length_B))
        divisor_B = divisor_B * group_length_B
    counted_BT = mask_BT & (present_B & (divisor_B > 0))[:, None]
    return torch.where(counted_BT, 1.0 / divisor_B[:, None], 0.0)


def weighted_sum(per_token_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """Sum weight x per_token; a token of weight 0 is not looked at, so NaN there stays there.

    Shapes: per_token_BT, weight_BT -> float64 scalar tensor, differentiable in per_token_BT.
    """
    check_shapes(BT=(per_token_BT, weight_BT))
    clean_BT = torch.where(weight_BT != 0, per_token_BT, 0.0)
    return (clean_BT.double() * weight_BT.double()).sum()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise SurefootError(f"There is no reduction {kind!r}; choose from {KINDS}.")
