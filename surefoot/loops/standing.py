"""What is known of a step's completions before any log-probability: who is present, and the reward.

Owns the rules for missing and truncated completions (laws 5 and 9), and the dispatch from
`truncated` and `shaping` to their functions.
Refuses to own advantages (`credit`) and the mathematics (`objective/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import StoppedOnFinding
from surefoot.learner.batch import Batch
from surefoot.loops.keep import raw_scores, unscorable
from surefoot.loops.places import Steps
from surefoot.methods import Method, is_group_relative, min_group
from surefoot.objective import shaping
from surefoot.records import Group, Score, StopReason

RIGHT = 1.0
"""The score of a right answer, as evaluation counts it."""


@dataclass(frozen=True)
class Standing:
    """Scores, rewards and presence, [P, G] where nothing else is said."""

    score_PG: Tensor
    """Raw scores, float64; 0 where there is none."""
    scored_PG: Tensor
    """Valid raw score."""
    reward_PG: Tensor
    """After `truncated` and `shaping`."""
    present_PG: Tensor
    """In baselines, numerators and denominators."""
    dropped_P: Tensor
    """Groups left out whole: unscorable, too few valid scores, or nothing to compare with."""
    greedy_P: Tensor
    """Reward of the greedy completion, after `truncated` and `shaping`; NaN where there is none."""
    part_PGK: Tensor
    """Raw values of the reward's parts; NaN where a part does not apply."""
    weight_K: tuple[float, ...]
    steps: Steps | None = None
    """Process rewards of the completions that are present, whose sum is in `reward_PG`; None
    where no reward pays any."""


@dataclass(frozen=True)
class Made:
    """What `truncated` and `shaping` look at, [P, G]."""

    score_PG: Tensor
    valid_PG: Tensor
    truncated_PG: Tensor
    length_PG: Tensor
    """Tokens sampled."""


def stand(
    row: Method,
    batch: Batch,
    *,
    max_new_tokens: int,
    weights: Mapping[str, float],
    steps: Steps | None = None,
) -> Standing:
    """Apply the rules for missing and truncated completions (laws 5 and 9), then the shaping.

    `weights` are those of the reward's parts, by name. A floor for truncated completions takes the
    place of their process rewards too.
    """
    score_PG, scored_PG = raw_scores(batch.groups)
    stop_PG = [[c.stop for c in g.completions] for g in batch.groups]
    scored_PG = scored_PG & torch.tensor([[s is not StopReason.ERROR for s in r] for r in stop_PG])
    truncated_PG = cut_off(batch).reshape(score_PG.shape)
    length_PG = torch.tensor([[len(c.ids) for c in g.completions] for g in batch.groups])
    bad_P = torch.tensor([unscorable(g) for g in batch.groups])
    few_P = scored_PG.sum(1) < min_group(row)
    present_PG = scored_PG & ~(bad_P | few_P)[:, None]
    if row.truncated.kind == "mask":
        present_PG = present_PG & ~truncated_PG
    made = Made(score_PG, present_PG, truncated_PG, length_PG)
    reward_PG = _shaped(row, made, max_new_tokens)
    greedy_P = torch.full((len(batch.groups),), torch.nan, dtype=torch.float64)
    if row.greedy_sample:
        greedy_P = _greedy_rewards(row, batch.groups, max_new_tokens)
        present_PG = present_PG & ~greedy_P.isnan()[:, None]
    readable_PG = batch.mask_BT.any(1).reshape(score_PG.shape)
    present_PG = present_PG & readable_PG
    least = 2 if is_group_relative(row) else 1
    left_P = present_PG.sum(1) >= least
    present_PG = present_PG & left_P[:, None]
    if steps is not None:
        paid_PG = present_PG & ~truncated_PG if row.truncated.kind == "floor" else present_PG
        steps = steps.only(paid_PG.reshape(-1))
    return Standing(
        score_PG,
        scored_PG,
        reward_PG,
        present_PG,
        ~present_PG.any(1),
        greedy_P,
        _parts(batch.groups, list(weights)),
        tuple(weights.values()),
        steps,
    )


def cut_off(batch: Batch) -> Tensor:
    """Completions that the cap ended, [B]."""
    stops = [c.stop is StopReason.LENGTH for group in batch.groups for c in group.completions]
    return torch.tensor(stops)


def last_of(reward_PG: Tensor, steps: Steps | None) -> Tensor:
    """What of the rewards is no step, and is paid at the last token, [P, G].

    A remainder of the steps' rounding is nothing.
    """
    if steps is None:
        return reward_PG
    left_PG = reward_PG - steps.total_B.reshape(reward_PG.shape)
    size_PG = steps.reward_BS.abs().sum(1).reshape(reward_PG.shape)
    return torch.where(left_PG.abs() <= 1e-12 * size_PG, 0.0, left_PG)


def check_rewards(row: Method, batch: Batch, standing: Standing) -> None:
    """Stop where a row cannot work with a reward.

    `group_mean` divides by the mean of a group, and a scale by group or batch would have to scale
    each step as well where steps are paid token by token.
    """
    by_token = standing.steps is not None and row.credit.kind == "reward_to_go"
    if by_token and row.scale.kind != "none":
        raise StoppedOnFinding(
            f"a reward pays single steps, and method.scale {row.scale.kind} ({row.name}) divides "
            "one number per completion; set method.scale to none, or method.credit to process"
        )
    bad_PG = standing.present_PG & (standing.reward_PG < 0)
    if row.scale.kind != "group_mean" or not bool(bad_PG.any()):
        return
    p, g = (int(place) for place in bad_PG.nonzero()[0])
    raise StoppedOnFinding(
        f"row {batch.groups[p].prompt.id} was rewarded {float(standing.reward_PG[p, g]):g}, but "
        f"method.scale group_mean ({row.name}) divides by the mean reward of a group, so rewards "
        "must be 0 or more: shift them, or set method.scale to group_std"
    )


def _shaped(row: Method, made: Made, max_new_tokens: int) -> Tensor:
    reward_PG = made.score_PG
    if row.truncated.kind == "floor":
        reward_PG = torch.where(made.truncated_PG, float(row.truncated.value), reward_PG)
    for shape in row.shaping:
        reward_PG = reward_PG + SHAPINGS[shape.kind](shape, made, max_new_tokens)
    return reward_PG


def _greedy_rewards(row: Method, batch: Sequence[Group], max_new_tokens: int) -> Tensor:
    """By the rules of the others, so that it can be compared with them; NaN without a score."""
    found = []
    for group in batch:
        assert group.greedy is not None and group.greedy_score is not None, group.prompt.id
        found.append((group.greedy, group.greedy_score))
    values = [score.value if score.valid else math.nan for _, score in found]
    score_P1 = torch.tensor(values, dtype=torch.float64)[:, None]
    truncated_P1 = torch.tensor([[c.stop is StopReason.LENGTH] for c, _ in found])
    length_P1 = torch.tensor([[len(c.ids)] for c, _ in found])
    made = Made(score_P1, ~score_P1.isnan(), truncated_P1, length_P1)
    reward_P1 = _shaped(row, made, max_new_tokens)
    absent_P1 = score_P1.isnan()
    if row.truncated.kind == "mask":
        absent_P1 = absent_P1 | truncated_P1
    return torch.where(absent_P1, torch.nan, reward_P1)[:, 0]


def _parts(batch: Sequence[Group], names: Sequence[str]) -> Tensor:
    table = [
        [[_part(score, name) for name in names] for score in group.scores or ()] for group in batch
    ]
    return torch.tensor(table, dtype=torch.float64).reshape(
        len(batch), len(batch[0].completions), len(names)
    )


def _part(score: Score, name: str) -> float:
    value = score.parts.get(name)
    return math.nan if value is None else value


def _overlong(shape: Any, made: Made, max_new_tokens: int) -> Tensor:
    # A fifth of the cap is the paper's ratio: 4096 of 20480 tokens.
    cache = max(1, max_new_tokens // 5) if shape.cache is None else shape.cache
    penalty_B = shaping.soft_overlong(
        made.length_PG.reshape(-1), max_length=max_new_tokens, cache=cache
    )
    return float(shape.weight) * penalty_B.reshape(made.length_PG.shape)


def _length(shape: Any, made: Made, max_new_tokens: int) -> Tensor:
    return float(shape.weight) * shaping.shorter_is_better(
        made.length_PG, right_PG=made.score_PG >= RIGHT, valid_PG=made.valid_PG
    )


SHAPINGS: Mapping[str, Callable[[Any, Made, int], Tensor]] = {
    "overlong": _overlong,
    "length": _length,
}
