"""What one rollout step's optimizer steps add up to.

Owns the sums, the fates of the optimizer steps, and the log-probabilities of the first forward.
Refuses to own the steps themselves (`update`), and what metrics are made of the sums (`loops`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.learner.batch import Batch, Minibatch
from surefoot.learner.layouts import Microbatch, Name


@dataclass(frozen=True)
class UpdateReport:
    """Sums over the optimizer steps of one rollout step."""

    steps: int
    """Optimizer steps applied."""
    skipped: int
    """Optimizer steps refused because of a non-finite loss or gradient."""
    applied: tuple[bool, ...]
    """The optimizer steps in order: True where applied, False where refused."""
    loss: float
    grad_norm: float
    """Mean over the applied steps, before clipping; nan if none."""
    sums: Mapping[str, float]
    forwarded: int
    """Positions forwarded with gradient, padding included."""
    bad_rows: tuple[int, ...]
    """Rows of the refused minibatches."""
    old_logp_BT: Tensor
    """Trainer log-probability at rollout weights where known, else 0 (see `known_BT`)."""
    known_BT: Tensor
    layouts: Mapping[Name, int]


class Tally:
    """Sums over the passes and optimizer steps of one rollout step.

    `old_logp_BT` is None where the first forward gives the old log-probabilities.
    """

    def __init__(
        self, batch: Batch, old_logp_BT: Tensor | None, passes: Sequence[Microbatch]
    ) -> None:
        self.old_BT = torch.zeros_like(batch.sampled_logp_BT)
        self.known_BT = torch.zeros_like(batch.mask_BT)
        if old_logp_BT is not None:
            self.old_BT = old_logp_BT
            # A log-probability of exactly 0 is known too.
            for part in passes:
                self.known_BT[part.rows_N, part.columns_N] = True
        self.sums: dict[str, float] = {}
        self.layouts: dict[Name, int] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.bad: list[int] = []
        self.fates: list[bool] = []
        self.forwarded = 0

    def first_forward(self, part: Microbatch, logp_N: Tensor) -> None:
        self.old_BT[part.rows_N, part.columns_N] = logp_N.detach().double().cpu()
        self.known_BT[part.rows_N, part.columns_N] = True

    def add(self, part: Microbatch, sums: Mapping[str, float]) -> None:
        self.add_sums(sums)
        self.forwarded += part.tokens
        self.layouts[part.layout] = self.layouts.get(part.layout, 0) + 1

    def add_sums(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            if name.endswith("_max"):
                self.sums[name] = max(self.sums.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def mark(self) -> tuple[dict[str, float], dict[Name, int], int]:
        """The sums as they are, for `back`."""
        return dict(self.sums), dict(self.layouts), self.forwarded

    def back(self, mark: tuple[dict[str, float], dict[Name, int], int]) -> None:
        """Forget the passes since a mark, which are done again."""
        self.sums, self.layouts, self.forwarded = dict(mark[0]), dict(mark[1]), mark[2]

    def applied(self, loss: float, norm: float) -> None:
        self.fates.append(True)
        self.losses.append(loss)
        self.norms.append(norm)

    def refused(self, minibatch: Minibatch) -> None:
        self.fates.append(False)
        self.bad.extend(minibatch.rows)

    def report(self) -> UpdateReport:
        count = len(self.losses)
        return UpdateReport(
            count,
            self.fates.count(False),
            tuple(self.fates),
            sum(self.losses) / count if count else math.nan,
            sum(self.norms) / count if count else math.nan,
            self.sums,
            self.forwarded,
            tuple(self.bad),
            self.old_BT,
            self.known_BT,
            self.layouts,
        )
