"""Tensors for the vector adapters, and the reductions that many kinds share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.objective import reduce

Adapter = Callable[..., dict[str, Any]]
NAN = float("nan")

MODES = {
    "token_mean": "token_mean",
    "seq_mean_token_mean": "sequence_mean",
    "seq_mean_token_sum": "sequence_sum",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt_mean",
}


class Make:
    """Tensors in the dtype of a vector; `missing` is what a null reward is filled with."""

    def __init__(self, dtype: torch.dtype, missing: float) -> None:
        self.dtype = dtype
        self.missing = missing

    def __call__(self, values: Sequence[Any], *, grad: bool = False) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, requires_grad=grad)

    def rewards(self, groups: Sequence[Sequence[float | None]]) -> tuple[Tensor, Tensor]:
        """Groups of different sizes, filled up with samples that are not valid."""
        width = max(len(rewards) for rewards in groups)
        rows = [[*rewards, *[None] * (width - len(rewards))] for rewards in groups]
        valid = [[x is not None and not math.isnan(x) for x in row] for row in rows]
        filled = [
            [x if ok else self.missing for x, ok in zip(row, oks, strict=True)]
            for row, oks in zip(rows, valid, strict=True)
        ]
        return self(filled), torch.tensor(valid)


def mask_of(mask: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(mask).bool()


def cut(advantage_PG: Tensor, groups: Sequence[Sequence[Any]]) -> list[list[float]]:
    pairs = zip(advantage_PG.tolist(), groups, strict=True)
    return [row[: len(rewards)] for row, rewards in pairs]


def weights(
    mode: str, mask_BT: Tensor, const_norm: float | None, group_ids: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The token weights of a whole step in which every row is present, and its denominator."""
    length_B = reduce.lengths(mask_BT)
    present_B = torch.ones_like(length_B).bool()
    group_B = None if group_ids is None else torch.tensor(group_ids)
    whole = reduce.denominator(
        MODES[mode], length_B=length_B, present_B=present_B, group_B=group_B, constant=const_norm
    )
    group_length_B = (
        None
        if group_B is None
        else reduce.group_lengths(length_B, present_B=present_B, group_B=group_B)
    )
    weight_BT = reduce.token_weights(
        MODES[mode],
        mask_BT=mask_BT,
        present_B=present_B,
        denominator=whole,
        group_length_B=group_length_B,
    )
    return weight_BT, whole


def losses(
    per_token_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor, const_norm: float | None
) -> dict[str, Any]:
    """Every loss_<mode> and grad_logp_<mode>."""
    found: dict[str, Any] = {"per_token_loss": per_token_BT.tolist()}
    for mode in list(MODES)[:4]:
        if const_norm is None and MODES[mode] == "constant":
            continue
        loss = reduce.weighted_sum(per_token_BT, weights(mode, mask_BT, const_norm)[0])
        (grad_BT,) = torch.autograd.grad(loss, logp_BT, retain_graph=True)
        found |= {f"loss_{mode}": loss.item(), f"grad_logp_{mode}": grad_BT.tolist()}
    return found
