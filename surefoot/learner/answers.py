"""Prompts with answers that are given, not sampled: pairs, labels and rankings as rows of tokens.

Owns the [B, T] view of such a batch and its passes; a prompt is forwarded once for all its answers.
Refuses to own the losses (`preference`, `reward_model`), and groups that were sampled (`batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.learner.batch import Packing, scatter
from surefoot.learner.layouts import Bundle, Microbatch, microbatches
from surefoot.learner.scorer import Scorer

_UNREAD = 0
"""The id behind the last token of an answer, where the state after that token is wanted: nothing
reads it, since a layout never forwards the last token of a completion."""


@dataclass(frozen=True)
class Answers:
    """P prompts with K_p answers each, B answers in all; none is empty."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def first_P(self) -> list[int]:
        """The row of each prompt's first answer."""
        firsts, at = [], 0
        for own in self.answers:
            firsts.append(at)
            at += len(own)
        return firsts

    @property
    def rows(self) -> int:
        return sum(len(own) for own in self.answers)

    @property
    def length_B(self) -> Tensor:
        """Tokens of each answer."""
        return torch.tensor([len(ids) for own in self.answers for ids in own])

    @property
    def mask_BT(self) -> Tensor:
        """True at the tokens of the answers."""
        length_B = self.length_B
        return torch.arange(int(length_B.max()))[None] < length_B[:, None]


def answer_passes(batch: Answers, packing: Packing, *, after: bool = False) -> list[Microbatch]:
    """Lay the batch out; all answers of a prompt share a pass, because a loss compares them.

    `after`: the state after the last token of each answer is scored too, as token `length`.
    """
    more = (_UNREAD,) if after else ()
    bundles = [
        Bundle(prompt, tuple((*ids, *more) for ids in own), tuple(range(first, first + len(own))))
        for prompt, own, first in zip(batch.prompts, batch.answers, batch.first_P, strict=True)
    ]
    return microbatches(
        bundles,
        budget=packing.budget,
        allowed=packing.layouts,
        shape=packing.shape,
        whole=True,
    )


def logps(scorer: Scorer, batch: Answers, passes: Sequence[Microbatch]) -> Tensor:
    """Log-probabilities of every answer's tokens without gradient, float64 [B, T]; 0 elsewhere."""
    mask_BT = batch.mask_BT
    out_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    with torch.no_grad():
        for part in passes:
            out_BT[part.rows_N, part.columns_N] = scorer(part).logp_N.double().cpu()
    return out_BT


def spread(values_N: Tensor, part: Microbatch, width: int) -> Tensor:
    """A pass's values at its rows, in ascending order, [rows of the pass, width]."""
    return scatter(values_N, part, rows=part.row_list, width=width)
