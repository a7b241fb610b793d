"""From rewards to advantages: the row's values applied in order, by the functions of objective/.

Owns the dispatch from `kl`, `baseline`, `scale`, `credit` and `whiten` to their functions.
Refuses to own the mathematics, who is present (`standing`), the log-probabilities (`learner`) and
the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.learner import custom
from surefoot.learner.batch import Batch
from surefoot.learner.loss import trains_everything
from surefoot.learner.update import Facts, Signal
from surefoot.loops.history import HistoryBook
from surefoot.loops.standing import RIGHT, Standing
from surefoot.methods import Gae, Method, is_group_relative
from surefoot.objective import batch as batches
from surefoot.objective import credit as tokens
from surefoot.objective import group as groups
from surefoot.objective import kl, shaping, value


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
    history_P: Tensor | None
    """The average of earlier rewards that was subtracted, under a history baseline."""
    monte_carlo_BT: Tensor | None = None
    """Discounted returns of the token rewards: what a critic is judged by."""


def assign(
    row: Method,
    batch: Batch,
    standing: Standing,
    facts: Facts,
    *,
    book: HistoryBook | None = None,
    plain: HistoryBook | None = None,
) -> Credit:
    """Compute the advantages of a step; dead groups end at exactly 0 (law 3).

    A history baseline reads `book`, and changes nothing in it. `plain` is the history of the
    rewards without any KL, where they differ: it says whether the rewards are a signal.
    """
    shape = standing.present_PG.shape
    present_PG = standing.present_PG
    present_B = present_PG.reshape(-1)
    mask_BT = batch.mask_BT & present_B[:, None]
    trained_kl: dict[str, float] = {}
    shaped_PG = _charged(row, batch, standing, facts, mask_BT, trained_kl)
    history_P = None if book is None else _history_of(book, batch)
    ground = _ground(standing, shaped_PG, mask_BT, history_P)
    advantage_PG = _compared(row, ground)
    if row.whiten.kind == "sequence":
        advantage_PG = _whiten_sequences(row.whiten, advantage_PG, present_PG)
    estimated = None
    if isinstance(row.credit, Gae):
        estimated = _estimate(row, row.credit, batch, shaped_PG, facts, mask_BT, trained_kl)
        advantage_BT = estimated.advantage_BT
    else:
        advantage_BT = _spread(row, batch, advantage_PG, facts, mask_BT, trained_kl)
    if row.whiten.kind == "token":
        advantage_BT = _whiten_tokens(row.whiten, advantage_BT, mask_BT)
    if isinstance(row.credit, Gae):
        group_BT = tokens.broadcast(advantage_PG.reshape(-1), mask_BT=mask_BT)
        advantage_BT = _mixed(row.credit.group_weight, group_BT, advantage_BT)
    dead_P = _dead(row, ground)
    if is_group_relative(row) and estimated is None:
        dead_B = dead_P[:, None].expand(shape).reshape(-1)
        advantage_BT = torch.where(dead_B[:, None], 0.0, advantage_BT)
    active_B = present_B if trains_everything(row) else (advantage_BT != 0).any(1)
    return Credit(
        Signal(
            advantage_BT,
            present_B,
            None if estimated is None else estimated.return_BT,
            (standing.score_PG >= RIGHT).reshape(-1),
        ),
        active_B & present_B,
        dead_P & ~standing.dropped_P,
        shaped_PG,
        (advantage_BT.sum(1) / mask_BT.sum(1).clamp_min(1)).reshape(shape),
        _has_signal(
            row,
            replace(
                ground,
                reward_PG=standing.reward_PG,
                history_P=history_P if plain is None else _history_of(plain, batch),
            ),
        ),
        trained_kl,
        history_P,
        None if estimated is None else estimated.monte_carlo_BT,
    )


def _ground(
    standing: Standing, reward_PG: Tensor, mask_BT: Tensor, history_P: Tensor | None
) -> Ground:
    return Ground(
        reward_PG,
        standing.present_PG,
        mask_BT.sum(1).reshape(reward_PG.shape),
        standing.greedy_P,
        history_P,
        standing.part_PGK,
        standing.weight_K,
    )


def _history_of(book: HistoryBook, batch: Batch) -> Tensor:
    asked = [(group.prompt.id, group.prompt.task) for group in batch.groups]
    return torch.tensor(book.baselines(asked), dtype=torch.float64)


def _charged(
    row: Method,
    batch: Batch,
    standing: Standing,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> Tensor:
    """The rewards, less the divergence of the sequence where that is its place, [P, G]."""
    if row.kl.place != "reward_sequence" or row.kl.coef == 0:
        return standing.reward_PG
    present_PG = standing.present_PG
    kl_B = _reward_kl(row, batch, facts, mask_BT).sum(1)
    name = f"kl/reward_sequence_{row.kl.estimator}_sequence"
    trained_kl[name] = _mean(kl_B, present_PG.reshape(-1))
    reward_B = shaping.subtract_kl(standing.reward_PG.reshape(-1), kl_B, coef=row.kl.coef)
    return torch.where(present_PG, reward_B.reshape(present_PG.shape), 0.0)


def _compared(row: Method, ground: Ground) -> Tensor:
    """One number per completion: less the baseline, then scaled, [P, G]."""
    advantage_PG = BASELINES[row.baseline.kind](row.baseline, ground)
    return SCALES[row.scale.kind](row.scale, advantage_PG, ground)


def _spread(
    row: Method,
    batch: Batch,
    advantage_PG: Tensor,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> Tensor:
    """One number per token, [B, T]."""
    if row.credit.kind == "broadcast":
        return tokens.broadcast(advantage_PG.reshape(-1), mask_BT=mask_BT)
    reward_BT = _paid(row, batch, advantage_PG, facts, mask_BT, trained_kl)
    gamma = float(row.credit.gamma)  # type: ignore[union-attr]
    return tokens.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=gamma)


def _paid(
    row: Method,
    batch: Batch,
    score_PG: Tensor,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> Tensor:
    """Token rewards: the score at the last token, the divergence at each where it is paid there."""
    kl_BT = torch.zeros_like(batch.sampled_logp_BT)
    if row.kl.place == "reward_token" and row.kl.coef != 0:
        kl_BT = _reward_kl(row, batch, facts, mask_BT)
        trained_kl[f"kl/reward_token_{row.kl.estimator}_token"] = _mean(kl_BT, mask_BT)
    return tokens.per_token_reward(score_PG.reshape(-1), kl_BT, mask_BT=mask_BT, coef=row.kl.coef)


@dataclass(frozen=True)
class _Estimated:
    advantage_BT: Tensor
    return_BT: Tensor
    monte_carlo_BT: Tensor


def _estimate(
    row: Method,
    credit: Gae,
    batch: Batch,
    reward_PG: Tensor,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> _Estimated:
    """Advantages and the critic's targets from the rewards themselves, without any baseline."""
    assert facts.value_BT is not None, "credit gae is given the critic's values"
    reward_BT = _paid(row, batch, reward_PG, facts, mask_BT, trained_kl)
    length_B = mask_BT.sum(1)
    lam_B = torch.full(length_B.shape, credit.lam, dtype=torch.float64)
    if credit.length_alpha is not None:
        lam_B = value.length_adaptive_lambda(length_B, alpha=credit.length_alpha)
    critic_lam_B = lam_B
    if credit.critic_lam is not None:
        critic_lam_B = torch.full_like(lam_B, credit.critic_lam)
    out = value.gae(
        reward_BT,
        facts.value_BT,
        mask_BT=mask_BT,
        gamma=credit.gamma,
        lam_B=lam_B,
        critic_lam_B=critic_lam_B,
        bootstrap_B=torch.zeros_like(lam_B),
    )
    monte_carlo_BT = tokens.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=credit.gamma)
    return _Estimated(out.advantage_BT, out.return_BT, monte_carlo_BT)


def _mixed(weight: float, group_BT: Tensor, gae_BT: Tensor) -> Tensor:
    """w group + (1 - w) gae; at 0 and 1 exactly the one or the other."""
    if weight in (0.0, 1.0):
        return group_BT if weight else gae_BT
    return weight * group_BT + (1.0 - weight) * gae_BT


def _dead(row: Method, ground: Ground) -> Tensor:
    """Groups without spread; under `per_part`, without spread in any part."""
    if not (row.scale.kind == "group_std" and row.scale.per_part):
        return groups.dead_groups(ground.reward_PG, valid_PG=ground.valid_PG)
    dead_P = torch.ones(len(ground.valid_PG), dtype=torch.bool)
    for part_PG in ground.part_PGK.unbind(2):
        dead_P &= groups.dead_groups(part_PG, valid_PG=ground.valid_PG & ~part_PG.isnan())
    return dead_P


def needs_facts(row: Method) -> bool:
    """Whether the advantages themselves need the learner: KL in the reward, or a critic."""
    return kl_in_reward(row) or row.critic.kind != "none"


def kl_in_reward(row: Method) -> bool:
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


def _has_signal(row: Method, ground: Ground) -> bool:
    """Whether the rewards alone give a completion an advantage, whitening included.

    A scale may leave none (rewards below 0 under `group_mean`), and so does centering equal ones.
    """
    present = _compared(row, ground)[ground.valid_PG]
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
CREDITS: frozenset[str] = frozenset({"broadcast", "reward_to_go", "gae"})
WHITENS: frozenset[str] = frozenset({"none", "token", "sequence"})
