"""One number per completion: a reward against its baseline, scaled.

Owns the dispatch from `baseline` and `scale` to their functions, and which groups are dead.
Refuses to own the mathematics (`objective/`), and one number per token (`credit`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.learner import custom
from surefoot.methods import Method
from surefoot.objective import batch as batches
from surefoot.objective import group as groups


@dataclass(frozen=True)
class Ground:
    """What a baseline or a scale may read."""

    reward_PG: Tensor
    valid_PG: Tensor
    length_PG: Tensor
    """Trained tokens."""
    greedy_P: Tensor
    history_P: Tensor | None
    """The average of earlier rewards that stands for each prompt."""
    part_PGK: Tensor
    weight_K: tuple[float, ...]


def compared(row: Method, ground: Ground) -> Tensor:
    """One number per completion: less the baseline, then scaled, [P, G]."""
    advantage_PG = BASELINES[row.baseline.kind](row.baseline, ground)
    return SCALES[row.scale.kind](row.scale, advantage_PG, ground)


def dead(row: Method, ground: Ground) -> Tensor:
    """Groups without spread; under `per_part`, without spread in any part."""
    if not (row.scale.kind == "group_std" and row.scale.per_part):
        return groups.dead_groups(ground.reward_PG, valid_PG=ground.valid_PG)
    dead_P = torch.ones(len(ground.valid_PG), dtype=torch.bool)
    for part_PG in ground.part_PGK.unbind(2):
        dead_P &= groups.dead_groups(part_PG, valid_PG=ground.valid_PG & ~part_PG.isnan())
    return dead_P


def _length_weighted(baseline: Any, ground: Ground) -> Tensor:
    return groups.length_weighted(ground.reward_PG, ground.length_PG, valid_PG=ground.valid_PG)[0]


def _history(baseline: Any, ground: Ground) -> Tensor:
    assert ground.history_P is not None, "a history baseline is given its book"
    return torch.where(ground.valid_PG, ground.reward_PG - ground.history_P[:, None], 0.0)


def _group_std(scale: Any, advantage_PG: Tensor, ground: Ground) -> Tensor:
    if scale.per_part:
        # Parts are centred and scaled each by its own group; the summed reward plays no part.
        return batches.part_scores(
            ground.part_PGK,
            ground.weight_K,
            valid_PG=ground.valid_PG,
            ddof=scale.ddof,
            eps=scale.eps,
        )
    return groups.scale_by_group_std(
        advantage_PG, ground.reward_PG, valid_PG=ground.valid_PG, ddof=scale.ddof, eps=scale.eps
    )


def _group_mean(scale: Any, advantage_PG: Tensor, ground: Ground) -> Tensor:
    return groups.scale_by_group_mean(
        advantage_PG, ground.reward_PG, valid_PG=ground.valid_PG, eps=scale.eps
    )


def _batch_std(scale: Any, advantage_PG: Tensor, ground: Ground) -> Tensor:
    measured_PG = ground.reward_PG if scale.of == "rewards" else advantage_PG
    return batches.scale_by_batch_std(
        advantage_PG, measured_PG, valid_PG=ground.valid_PG, ddof=scale.ddof, eps=scale.eps
    )


BASELINES: Mapping[str, Callable[[Any, Ground], Tensor]] = {
    "none": lambda _, ground: groups.no_baseline(ground.reward_PG, valid_PG=ground.valid_PG),
    "batch": lambda _, ground: groups.batch_mean(ground.reward_PG, valid_PG=ground.valid_PG),
    "group": lambda _, ground: groups.group_mean(ground.reward_PG, valid_PG=ground.valid_PG),
    "leave_one_out": lambda baseline, ground: groups.leave_one_out(
        ground.reward_PG, valid_PG=ground.valid_PG, center=baseline.center
    ),
    "length_weighted": _length_weighted,
    "greedy": lambda _, ground: groups.against_greedy(
        ground.reward_PG, ground.greedy_P, valid_PG=ground.valid_PG
    ),
    "history": _history,
    "use": lambda function, ground: custom.baseline(
        function, ground.reward_PG, valid_PG=ground.valid_PG, length_PG=ground.length_PG
    ),
}
SCALES: Mapping[str, Callable[[Any, Tensor, Ground], Tensor]] = {
    "none": lambda _, advantage_PG, ground: advantage_PG,
    "group_std": _group_std,
    "group_mean": _group_mean,
    "batch_std": _batch_std,
    "use": lambda function, advantage_PG, ground: custom.scale(
        function, advantage_PG, ground.reward_PG, valid_PG=ground.valid_PG
    ),
}
