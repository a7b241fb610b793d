"""From records to advantages: the row's values applied in order, by the functions of objective/.

Owns who is present, what a truncated completion counts as, and the dispatch from `truncated`,
`shaping`, `kl`, `baseline`, `scale`, `credit` and `whiten` to their functions.
Refuses to own the mathematics, the log-probabilities (`learner`) and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.learner.batch import Batch
from surefoot.learner.loss import trains_everything
from surefoot.learner.update import Facts, Signal
from surefoot.loops.keep import raw_scores, unscorable
from surefoot.methods import Method, is_group_relative, min_group
from surefoot.objective import batch as batches
from surefoot.objective import credit as tokens
from surefoot.objective import group as groups
from surefoot.objective import kl, shaping
from surefoot.records import StopReason


@dataclass(frozen=True)
class Standing:
    """What is known of a step's completions before any log-probability, [P, G]."""

    score_PG: Tensor
    """Raw scores, float64; 0 where there is none."""
    scored_PG: Tensor
    """Valid raw score."""
    reward_PG: Tensor
    """After `truncated` and `shaping`."""
    present_PG: Tensor
    """In baselines, numerators and denominators."""
    dropped_P: Tensor
    """Groups left out whole: unscorable, or too few valid scores."""


@dataclass(frozen=True)
class Ground:
    """What a baseline or a scale may read, [P, G]."""

    reward_PG: Tensor
    valid_PG: Tensor
    length_PG: Tensor
    """Trained tokens."""


@dataclass(frozen=True)
class Credit:
    """Advantages per token, and what they were made of."""

    signal: Signal
    forwarded_B: Tensor
    """Completions with a coefficient on some token: the only ones worth a forward pass."""
    dead_P: Tensor
    shaped_PG: Tensor
    advantage_PG: Tensor
    """One number per completion (the mean over its trained tokens)."""
    signal_found: bool
    """Whether the rewards alone, without any KL, give some completion an advantage."""
    trained_kl: Mapping[str, float]
    """The KL term that enters the reward, by its name and unit."""


def stand(row: Method, batch: Batch, *, max_new_tokens: int) -> Standing:
    """Apply the rules for missing and truncated completions (laws 5 and 9), then the shaping."""
    score_PG, scored_PG = raw_scores(batch.groups)
    finished = [[c.stop is not StopReason.ERROR for c in g.completions] for g in batch.groups]
    scored_PG = scored_PG & torch.tensor(finished)
    truncated_PG = torch.tensor(
        [[c.stop is StopReason.LENGTH for c in g.completions] for g in batch.groups]
    )
    bad_P = torch.tensor([unscorable(g) for g in batch.groups])
    few_P = scored_PG.sum(1) < min_group(row)
    present_PG = scored_PG & ~(bad_P | few_P)[:, None]
    reward_PG = score_PG
    if row.truncated.kind == "mask":
        present_PG = present_PG & ~truncated_PG
    elif row.truncated.kind == "floor":
        reward_PG = torch.where(truncated_PG, float(row.truncated.value), reward_PG)
    readable_PG = batch.mask_BT.any(1).reshape(score_PG.shape)
    present_PG = present_PG & readable_PG
    least = 2 if is_group_relative(row) else 1
    left_P = present_PG.sum(1) >= least
    present_PG = present_PG & left_P[:, None]
    length_PG = torch.tensor([[len(c.ids) for c in g.completions] for g in batch.groups])
    for shape in row.shaping:
        reward_PG = reward_PG + SHAPINGS[shape.kind](shape, length_PG, max_new_tokens)
    dropped_P = ~present_PG.any(1)
    return Standing(score_PG, scored_PG, reward_PG, present_PG, dropped_P)


def assign(row: Method, batch: Batch, standing: Standing, facts: Facts) -> Credit:
    """Compute the advantages of a step; dead groups end at exactly 0 (law 3)."""
    shape = standing.present_PG.shape
    present_PG = standing.present_PG
    present_B = present_PG.reshape(-1)
    mask_BT = batch.mask_BT & present_B[:, None]
    trained_kl: dict[str, float] = {}
    shaped_PG = standing.reward_PG
    if row.kl.place == "reward_sequence" and row.kl.coef != 0:
        kl_BT = _reward_kl(row, batch, facts, mask_BT)
        kl_B = kl_BT.sum(1)
        trained_kl[f"kl/reward_sequence_{row.kl.estimator}_sequence"] = _mean(kl_B, present_B)
        shaped_B = shaping.subtract_kl(shaped_PG.reshape(-1), kl_B, coef=row.kl.coef)
        shaped_PG = torch.where(present_PG, shaped_B.reshape(shape), 0.0)
    length_PG = mask_BT.sum(1).reshape(shape)
    ground = Ground(shaped_PG, present_PG, length_PG)
    advantage_PG = BASELINES[row.baseline.kind](row.baseline, ground)
    advantage_PG = SCALES[row.scale.kind](row.scale, advantage_PG, ground)
    if row.whiten.kind == "sequence":
        advantage_PG = _whiten_sequences(row.whiten, advantage_PG, present_PG)
    if row.credit.kind == "broadcast":
        advantage_BT = tokens.broadcast(advantage_PG.reshape(-1), mask_BT=mask_BT)
    else:
        kl_BT = torch.zeros_like(batch.sampled_logp_BT)
        if row.kl.place == "reward_token" and row.kl.coef != 0:
            kl_BT = _reward_kl(row, batch, facts, mask_BT)
            trained_kl[f"kl/reward_token_{row.kl.estimator}_token"] = _mean(kl_BT, mask_BT)
        reward_BT = tokens.per_token_reward(
            advantage_PG.reshape(-1), kl_BT, mask_BT=mask_BT, coef=row.kl.coef
        )
        gamma = float(row.credit.gamma)  # type: ignore[union-attr]
        advantage_BT = tokens.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=gamma)
    if row.whiten.kind == "token":
        advantage_BT = _whiten_tokens(row.whiten, advantage_BT, mask_BT)
    dead_P = groups.dead_groups(shaped_PG, valid_PG=present_PG)
    if is_group_relative(row):
        dead_B = dead_P[:, None].expand(shape).reshape(-1)
        advantage_BT = torch.where(dead_B[:, None], 0.0, advantage_BT)
    active_B = present_B if trains_everything(row) else (advantage_BT != 0).any(1)
    length_B = mask_BT.sum(1).clamp_min(1)
    return Credit(
        Signal(advantage_BT, present_B),
        active_B & present_B,
        dead_P & ~standing.dropped_P,
        shaped_PG,
        (advantage_BT.sum(1) / length_B).reshape(shape),
        _has_signal(row, Ground(standing.reward_PG, present_PG, length_PG)),
        trained_kl,
    )


def needs_facts(row: Method) -> bool:
    """Whether the advantages themselves need log-probabilities: KL in the reward."""
    return row.kl.place in ("reward_token", "reward_sequence") and row.kl.coef != 0


def _reward_kl(row: Method, batch: Batch, facts: Facts, mask_BT: Tensor) -> Tensor:
    assert facts.old_logp_BT is not None and facts.ref_logp_BT is not None
    return kl.estimate(
        row.kl.estimator,
        facts.old_logp_BT,
        facts.ref_logp_BT,
        mask_BT=mask_BT,
        old_logp_BT=facts.old_logp_BT,
    )


def _mean(values: Tensor, mask: Tensor) -> float:
    count = int(mask.sum())
    return float(torch.where(mask, values, 0.0).sum()) / count if count else 0.0


def _overlong(shape: Any, length_PG: Tensor, max_new_tokens: int) -> Tensor:
    # A fifth of the cap is the paper's ratio: 4096 of 20480 tokens.
    cache = max(1, max_new_tokens // 5) if shape.cache is None else shape.cache
    penalty_B = shaping.soft_overlong(length_PG.reshape(-1), max_length=max_new_tokens, cache=cache)
    return float(shape.weight) * penalty_B.reshape(length_PG.shape)


def _has_signal(row: Method, ground: Ground) -> bool:
    """Whether the rewards alone give a completion an advantage, whitening included.

    A scale may leave none (rewards below 0 under `group_mean`), and so does centering equal ones.
    """
    advantage_PG = BASELINES[row.baseline.kind](row.baseline, ground)
    advantage_PG = SCALES[row.scale.kind](row.scale, advantage_PG, ground)
    present = advantage_PG[ground.valid_PG]
    if row.whiten.kind != "none" and row.whiten.center and present.numel():
        present = present - present[0]
    return bool((present != 0).any())


def _whiten_tokens(whiten: Any, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return batches.whiten_tokens(
        advantage_BT, mask_BT=mask_BT, center=whiten.center, ddof=whiten.ddof, eps=whiten.eps
    ).value


def _whiten_sequences(whiten: Any, advantage_PG: Tensor, valid_PG: Tensor) -> Tensor:
    white = batches.whiten_sequences(
        advantage_PG.reshape(-1),
        present_B=valid_PG.reshape(-1),
        center=whiten.center,
        ddof=whiten.ddof,
        eps=whiten.eps,
    )
    return white.value.reshape(advantage_PG.shape)


def _length_weighted(baseline: Any, ground: Ground) -> Tensor:
    return groups.length_weighted(ground.reward_PG, ground.length_PG, valid_PG=ground.valid_PG)[0]


def _group_std(scale: Any, advantage_PG: Tensor, ground: Ground) -> Tensor:
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


SHAPINGS: Mapping[str, Callable[[Any, Tensor, int], Tensor]] = {"overlong": _overlong}
BASELINES: Mapping[str, Callable[[Any, Ground], Tensor]] = {
    "none": lambda _, ground: groups.no_baseline(ground.reward_PG, valid_PG=ground.valid_PG),
    "batch": lambda _, ground: groups.batch_mean(ground.reward_PG, valid_PG=ground.valid_PG),
    "group": lambda _, ground: groups.group_mean(ground.reward_PG, valid_PG=ground.valid_PG),
    "leave_one_out": lambda baseline, ground: groups.leave_one_out(
        ground.reward_PG, valid_PG=ground.valid_PG, center=baseline.center
    ),
    "length_weighted": _length_weighted,
}
SCALES: Mapping[str, Callable[[Any, Tensor, Ground], Tensor]] = {
    "none": lambda _, advantage_PG, ground: advantage_PG,
    "group_std": _group_std,
    "group_mean": _group_mean,
    "batch_std": _batch_std,
}
CREDITS: frozenset[str] = frozenset({"broadcast", "reward_to_go"})
WHITENS: frozenset[str] = frozenset({"none", "token", "sequence"})
