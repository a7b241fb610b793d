"""One step's completions as tensors, and the order in which they are forwarded.

Owns the [B, T] view of a list of groups and the plan: minibatches of micro-batches, laid out once
per step and reused by the old-log-probability pass, the reference pass and every epoch.
Refuses to own rewards and losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from surefoot import draws
from surefoot.learner.layouts import Bundle, Microbatch, Name, Shape, microbatches
from surefoot.records import Group


@dataclass(frozen=True)
class Batch:
    """B = sum of the groups' completions, in order; T = the longest of them, in tokens."""

    groups: tuple[Group, ...]
    mask_BT: Tensor
    """True at sampled tokens whose sampled log-probability is finite (law 2)."""
    sampled_logp_BT: Tensor
    """float64, 0 outside the mask."""
    group_B: Tensor
    bad_logps: int
    """Tokens dropped because the engine's log-probability was not finite."""

    @property
    def rows(self) -> int:
        return self.mask_BT.shape[0]


def make_batch(groups: Sequence[Group]) -> Batch:
    """Lay the groups' completions out as rows, prompt by prompt."""
    completions = [c for group in groups for c in group.completions]
    width = max(1, max(len(c.ids) for c in completions))
    logps = np.zeros((len(completions), width))
    mask = np.zeros(logps.shape, dtype=bool)
    for row, completion in enumerate(completions):
        logps[row, : len(completion.ids)] = completion.logps
        mask[row, : len(completion.ids)] = True
    finite = mask & np.isfinite(logps)
    owner = [g for g, group in enumerate(groups) for _ in group.completions]
    return Batch(
        tuple(groups),
        torch.from_numpy(finite),
        torch.from_numpy(np.where(finite, logps, 0.0)),
        torch.tensor(owner),
        int(mask.sum() - finite.sum()),
    )


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step: all of them (for denominators) and those forwarded."""

    rows: tuple[int, ...]
    passes: tuple[Microbatch, ...]


@dataclass(frozen=True)
class Plan:
    """A step's minibatches, in the order of the first epoch."""

    minibatches: tuple[Minibatch, ...]

    @property
    def passes(self) -> list[Microbatch]:
        return [part for minibatch in self.minibatches for part in minibatch.passes]

    def only(self, forwarded_B: Tensor) -> Plan:
        """Without the passes that hold no forwarded row; denominators stay as they are."""
        wanted = forwarded_B.tolist()
        return Plan(
            tuple(
                replace(
                    minibatch,
                    passes=tuple(
                        part for part in minibatch.passes if any(wanted[r] for r in part.row_list)
                    ),
                )
                for minibatch in self.minibatches
            )
        )


@dataclass(frozen=True)
class Packing:
    """What the plan of a step depends on besides its tokens."""

    budget: int
    layouts: tuple[Name, ...]
    shape: Shape


def make_plan(
    batch: Batch,
    *,
    forwarded_B: Tensor,
    minibatches: int,
    packing: Packing,
    seed: int,
    step: int,
) -> Plan:
    """Split a step's groups into minibatches (keyed by seed and step) and lay them out.

    Groups stay whole, because they share a prompt. Completions with forwarded_B False are left
    out of every pass; their rows still count in their minibatch's denominators.
    """
    order = draws.permutation(seed, "minibatches", len(batch.groups), step)
    parts = np.array_split(order, min(minibatches, len(batch.groups)))
    first_row = _first_rows(batch)
    wanted = forwarded_B.tolist()
    made: list[Minibatch] = []
    for part in parts:
        rows: list[int] = []
        for g in sorted(int(index) for index in part):
            rows.extend(range(first_row[g], first_row[g + 1]))
        passes = _passes(batch, [row for row in rows if wanted[row]], packing)
        made.append(Minibatch(tuple(rows), passes))
    return Plan(tuple(made))


def laid_again(batch: Batch, minibatch: Minibatch, packing: Packing) -> Minibatch:
    """The same rows of one optimizer step in other pieces; its gradient stays (law 2)."""
    rows = sorted(row for part in minibatch.passes for row in part.row_list)
    return replace(minibatch, passes=_passes(batch, rows, packing))


def _passes(batch: Batch, rows: Sequence[int], packing: Packing) -> tuple[Microbatch, ...]:
    """Lay out rows in ascending order, those of one group together."""
    first_row = _first_rows(batch)
    bundles: list[Bundle] = []
    for g, own in itertools.groupby(rows, key=lambda row: int(batch.group_B[row])):
        chosen = tuple(own)
        group = batch.groups[g]
        ids = tuple(group.completions[row - first_row[g]].ids for row in chosen)
        bundles.append(Bundle(group.prompt.ids, ids, chosen))
    if not bundles:
        return ()
    made = microbatches(
        bundles, budget=packing.budget, allowed=packing.layouts, shape=packing.shape
    )
    return tuple(made)


def _first_rows(batch: Batch) -> list[int]:
    """The first row of each group, and the number of rows."""
    return np.cumsum([0] + [len(group.completions) for group in batch.groups]).tolist()


def scatter(values_N: Tensor, part: Microbatch, *, rows: Sequence[int], width: int) -> Tensor:
    """Put a pass's values at their places among `rows` ([len(rows), width], 0 elsewhere)."""
    place = {row: i for i, row in enumerate(rows)}
    index_N = torch.tensor([place[row] for row in part.rows_N.tolist()])
    columns_N = part.columns_N
    out = values_N.new_zeros(len(rows), width)
    return out.index_put((index_N.to(values_N.device), columns_N.to(values_N.device)), values_N)
