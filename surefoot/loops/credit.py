"""From rewards to advantages: the row's values applied in order, by the functions of objective/.

Owns the dispatch from `kl`, `credit` and `whiten` to their functions, and the order of all of them.
Refuses to own the mathematics, who is present (`standing`), one number per completion (`compare`),
the log-probabilities (`learner`) and the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.learner.batch import Batch
from surefoot.learner.loss import trains_everything
from surefoot.learner.update import Facts, Signal
from surefoot.loops.compare import Ground, compared, dead
from surefoot.loops.history import HistoryBook
from surefoot.loops.places import Steps
from surefoot.loops.standing import RIGHT, Standing, last_of
from surefoot.methods import Gae, Method, is_group_relative
from surefoot.objective import batch as batches
from surefoot.objective import credit as tokens
from surefoot.objective import group as groups
from surefoot.objective import kl, shaping, value


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
    advantage_PG = compared(row, ground)
    dead_P = dead(row, ground)
    if row.whiten.kind == "sequence":
        advantage_PG = _whiten_sequences(row.whiten, advantage_PG, present_PG)
    estimated = None
    if isinstance(row.credit, Gae):
        reward_BT = _paid(row, batch, shaped_PG, standing.steps, facts, mask_BT, trained_kl)
        estimated = _estimate(row.credit, reward_BT, facts, mask_BT)
        advantage_BT = _weighed(row, row.credit, estimated, advantage_PG, mask_BT)
    elif row.credit.kind == "process":
        advantage_BT, dead_P = _processed(row, standing, mask_BT)
    else:
        advantage_BT = _spread(row, batch, advantage_PG, standing.steps, facts, mask_BT, trained_kl)
    if row.whiten.kind == "token" and estimated is None:
        advantage_BT = _whiten_tokens(row.whiten, advantage_BT, mask_BT)
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
        _has_signal(row, _plain(ground, standing, batch, plain), standing, mask_BT),
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


def _plain(ground: Ground, standing: Standing, batch: Batch, plain: HistoryBook | None) -> Ground:
    """What the rewards alone are compared with, without any KL."""
    history_P = ground.history_P if plain is None else _history_of(plain, batch)
    return replace(ground, reward_PG=standing.reward_PG, history_P=history_P)


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


def _spread(
    row: Method,
    batch: Batch,
    advantage_PG: Tensor,
    steps: Steps | None,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> Tensor:
    """One number per token, [B, T]."""
    if row.credit.kind == "broadcast":
        return tokens.broadcast(advantage_PG.reshape(-1), mask_BT=mask_BT)
    reward_BT = _paid(row, batch, advantage_PG, steps, facts, mask_BT, trained_kl)
    gamma = float(row.credit.gamma)  # type: ignore[union-attr]
    return tokens.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=gamma)


def _paid(
    row: Method,
    batch: Batch,
    score_PG: Tensor,
    steps: Steps | None,
    facts: Facts,
    mask_BT: Tensor,
    trained_kl: dict[str, float],
) -> Tensor:
    """Token rewards: steps where they end, what is left of the score at the last token, and the
    divergence at each token where it is paid there."""
    kl_BT = torch.zeros_like(batch.sampled_logp_BT)
    if row.kl.place == "reward_token" and row.kl.coef != 0:
        kl_BT = _reward_kl(row, batch, facts, mask_BT)
        trained_kl[f"kl/reward_token_{row.kl.estimator}_token"] = _mean(kl_BT, mask_BT)
    last_B = last_of(score_PG, steps).reshape(-1)
    reward_BT = tokens.per_token_reward(last_B, kl_BT, mask_BT=mask_BT, coef=row.kl.coef)
    return reward_BT if steps is None else reward_BT + _stepped(steps, mask_BT)


def _stepped(steps: Steps, mask_BT: Tensor) -> Tensor:
    return tokens.step_rewards(
        steps.reward_BS, steps.end_BS, step_BS=steps.step_BS, mask_BT=mask_BT
    )


def _processed(row: Method, standing: Standing, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages from steps that are compared within the group, and the groups without spread.

    What of the reward is no step is one more, at the last token; so is the reward of a completion
    without any.
    """
    shape = standing.present_PG.shape
    present_B = standing.present_PG.reshape(-1)
    last_B = last_of(standing.reward_PG, standing.steps).reshape(-1)
    reward_BS, end_BS = last_B[:, None], (mask_BT.sum(1) - 1).clamp_min(0)[:, None]
    step_BS = present_B[:, None]
    if (steps := standing.steps) is not None:
        extra_B1 = step_BS & ((last_B != 0) | ~steps.step_BS.any(1))[:, None]
        reward_BS = torch.cat([steps.reward_BS, torch.where(extra_B1, reward_BS, 0.0)], 1)
        end_BS = torch.cat([steps.end_BS, end_BS], 1)
        step_BS = torch.cat([steps.step_BS & step_BS, extra_B1], 1)
    group_PN = reward_BS.reshape(shape[0], -1)
    valid_PN = step_BS.reshape(shape[0], -1)
    advantage_PN = groups.group_mean(group_PN, valid_PG=valid_PN)
    if row.scale.kind == "group_std":
        advantage_PN = groups.scale_by_group_std(
            advantage_PN, group_PN, valid_PG=valid_PN, ddof=row.scale.ddof, eps=row.scale.eps
        )
    advantage_BT = tokens.step_credit(
        advantage_PN.reshape(reward_BS.shape), end_BS, step_BS=step_BS, mask_BT=mask_BT
    )
    return advantage_BT, groups.dead_groups(group_PN, valid_PG=valid_PN)


@dataclass(frozen=True)
class _Estimated:
    advantage_BT: Tensor
    return_BT: Tensor
    monte_carlo_BT: Tensor


def _estimate(credit: Gae, reward_BT: Tensor, facts: Facts, mask_BT: Tensor) -> _Estimated:
    """Advantages and the critic's targets from the rewards themselves, without any baseline."""
    assert facts.value_BT is not None, "credit gae is given the critic's values"
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
        bootstrap_B=torch.zeros_like(lam_B) if facts.bootstrap_B is None else facts.bootstrap_B,
    )
    monte_carlo_BT = tokens.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=credit.gamma)
    return _Estimated(out.advantage_BT, out.return_BT, monte_carlo_BT)


def _weighed(
    row: Method, credit: Gae, estimated: _Estimated, advantage_PG: Tensor, mask_BT: Tensor
) -> Tensor:
    """The critic's part, whitened, beside that of the group.

    A dead group's own part is exactly 0 under every baseline that is the group.
    """
    gae_BT = estimated.advantage_BT
    if row.whiten.kind == "token":
        gae_BT = _whiten_tokens(row.whiten, gae_BT, mask_BT)
    group_BT = tokens.broadcast(advantage_PG.reshape(-1), mask_BT=mask_BT)
    return _mixed(credit.group_weight, group_BT, gae_BT)


def _mixed(weight: float | None, group_BT: Tensor, gae_BT: Tensor) -> Tensor:
    """w group + (1 - w) gae; at 0 (or without a group part) and 1 exactly the one or the other."""
    if weight is None or weight in (0.0, 1.0):
        return group_BT if weight else gae_BT
    return weight * group_BT + (1.0 - weight) * gae_BT


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


def _has_signal(row: Method, ground: Ground, standing: Standing, mask_BT: Tensor) -> bool:
    """Whether the rewards alone give a completion an advantage, whitening included.

    A scale may leave none (rewards below 0 under `group_mean`), and so does centering equal ones.
    """
    if row.credit.kind == "process":
        return bool((_processed(row, standing, mask_BT)[0] != 0).any())
    compared_PG = compared(row, ground)
    if isinstance(row.credit, Gae):
        if row.credit.group_weight and bool((compared_PG != 0).any()):
            return True
        if row.credit.group_weight == 1.0:
            return False
        compared_PG = ground.reward_PG
    present = compared_PG[ground.valid_PG][:, None]
    if standing.steps is not None and row.credit.kind != "broadcast":
        # Completions of one reward differ in where they earn it.
        paid_BT = _stepped(standing.steps, mask_BT)
        present = torch.cat([present, paid_BT[standing.present_PG.reshape(-1)]], 1)
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


CREDITS: frozenset[str] = frozenset({"broadcast", "reward_to_go", "process", "gae"})
WHITENS: frozenset[str] = frozenset({"none", "token", "sequence"})
