"""Adapters of the kinds that make advantages and coefficients, as in `vector_adapters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vector_tools import Adapter, Make, cut, mask_of

from surefoot.objective import batch, credit, group, kl
from surefoot.objective.history import MovingAverage


def remax(make: Make, *, rewards: Any, greedy_rewards: Any) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    advantage_PG = group.against_greedy(reward_PG, make(greedy_rewards), valid_PG=valid_PG)
    return {"advantages": cut(advantage_PG, rewards)}


def opo(make: Make, *, rewards: Any, lengths: Any) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    length_PG, _ = make.rewards(lengths)
    advantage_PG, baseline_P = group.length_weighted(reward_PG, length_PG, valid_PG=valid_PG)
    return {"baselines": baseline_P.tolist(), "advantages": cut(advantage_PG, rewards)}


def _maxrl(make: Make, rewards: Any) -> Tensor:
    reward_PG, valid_PG = make.rewards(rewards)
    centered_PG = group.group_mean(reward_PG, valid_PG=valid_PG)
    return group.scale_by_group_mean(centered_PG, reward_PG, valid_PG=valid_PG, eps=0.0)


def maxrl(make: Make, *, rewards: Any) -> dict[str, Any]:
    return {"advantages": cut(_maxrl(make, rewards), rewards)}


def maxrl_success_weights(make: Make, *, rewards: Any) -> dict[str, Any]:
    """Of a success, (A + 1) / G is one over the number of successes."""
    weight = [
        [
            (a + 1) / sum(r is not None for r in row) if r == 1 else 0.0
            for a, r in zip(advantages, row, strict=True)
        ]
        for advantages, row in zip(cut(_maxrl(make, rewards), rewards), rewards, strict=True)
    ]
    return {"weights": weight}


def gdpo(make: Make, *, rewards: Any, weights: Any, ddof: int, eps: float) -> dict[str, Any]:
    parts = [make.rewards([[r[k] for r in row] for row in rewards]) for k in range(len(weights))]
    valid_PG = torch.stack([valid for _, valid in parts]).all(0)
    part_PGK = torch.stack([part for part, _ in parts], 2)
    score_PG = batch.part_scores(part_PGK, weights, valid_PG=valid_PG, ddof=ddof, eps=eps)
    return {
        "scores": cut(score_PG, rewards),
        "advantages": cut(_z(score_PG, valid_PG, ddof, eps), rewards),
    }


def _z(value_PG: Tensor, valid_PG: Tensor, ddof: int, eps: float) -> Tensor:
    centered_PG = group.batch_mean(value_PG, valid_PG=valid_PG)
    return batch.scale_by_batch_std(centered_PG, value_PG, valid_PG=valid_PG, ddof=ddof, eps=eps)


def lite_ppo(make: Make, *, rewards: Any, std_of: str, ddof: int, eps: float) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    centered_PG = group.group_mean(reward_PG, valid_PG=valid_PG)
    measured_PG = reward_PG if std_of == "rewards" else centered_PG
    advantage_PG = batch.scale_by_batch_std(
        centered_PG, measured_PG, valid_PG=valid_PG, ddof=ddof, eps=eps
    )
    return {"advantages": cut(advantage_PG, rewards)}


def batch_normalized(make: Make, *, rewards: Any, ddof: int, eps: float) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards([[r] for r in rewards])
    return {"advantages": _z(reward_PG, valid_PG, ddof, eps)[:, 0].tolist()}


def reinforce_pp(
    make: Make,
    *,
    rewards: Any,
    token_kl: Any,
    mask: Any,
    beta: float,
    gamma: float,
    ddof: int,
    eps: float,
) -> dict[str, Any]:
    mask_BT = mask_of(mask)
    reward_BT = credit.per_token_reward(make(rewards), make(token_kl), mask_BT=mask_BT, coef=beta)
    return_BT = credit.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=gamma)
    white = batch.whiten_tokens(return_BT, mask_BT=mask_BT, center=True, ddof=ddof, eps=eps)
    return {
        "returns": return_BT.tolist(),
        "token_mean": white.mean.item(),
        "token_var": white.variance.item(),
        "advantages": white.value.tolist(),
    }


def reinforce_pp_baseline(
    make: Make, *, rewards: Any, lengths: Any, weighting: str, ddof: int, eps: float
) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    length_PG, _ = make.rewards(lengths)
    centered_PG = group.group_mean(reward_PG, valid_PG=valid_PG)
    if weighting == "sequence":
        white_B = batch.whiten_sequences(
            centered_PG.flatten(),
            present_B=valid_PG.flatten(),
            center=True,
            ddof=ddof,
            eps=eps,
        ).value
        return {
            "centered": cut(centered_PG, rewards),
            "advantages": cut(white_B.reshape(reward_PG.shape), rewards),
        }
    width = int(torch.nan_to_num(length_PG.double()).max())
    token = torch.arange(max(width, 1))[None]
    mask_BT = (token < torch.nan_to_num(length_PG).reshape(-1, 1)) & valid_PG.reshape(-1, 1)
    spread_BT = credit.broadcast(centered_PG.flatten(), mask_BT=mask_BT)
    white_BT = batch.whiten_tokens(
        spread_BT, mask_BT=mask_BT, center=weighting == "token", ddof=ddof, eps=eps
    ).value
    first_PG = white_BT[:, 0].reshape(reward_PG.shape)
    return {"centered": cut(centered_PG, rewards), "advantages": cut(first_PG, rewards)}


def moving_average(
    make: Make,
    *,
    reward_batches: Any,
    mode: Any,
    decay: float,
    init: float | None,
    debias: bool,
    window: int | None,
) -> dict[str, Any]:
    history = MovingAverage(mode=mode, decay=decay, init=init, debias=debias, window=window)
    baselines, advantages = [], []
    for rewards in reward_batches:
        baselines.append(history.baseline(rewards))
        advantages.append([reward - baselines[-1] for reward in rewards])
        history.update(rewards)
    return {"baselines": baselines, "advantages": advantages}


def process_supervision(
    make: Make, *, step_rewards: Any, step_ends: Any, lengths: Any, ddof: int, eps: float
) -> dict[str, Any]:
    reward_GS, step_GS = make.rewards(step_rewards)
    flat_1N, valid_1N = reward_GS.reshape(1, -1), step_GS.reshape(1, -1)
    z_GS = group.group_normalized(flat_1N, valid_PG=valid_1N, ddof=ddof, eps=eps)
    z_GS = z_GS.reshape(reward_GS.shape)
    width = step_GS.shape[1]
    end_GS = torch.tensor([[*ends, *[0] * (width - len(ends))] for ends in step_ends])
    mask_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    token_BT = credit.step_credit(z_GS, end_GS, step_BS=step_GS, mask_BT=mask_BT)
    ends = [[row[end] for end in e] for row, e in zip(token_BT.tolist(), step_ends, strict=True)]
    return {
        "normalized": cut(z_GS, step_rewards),
        "step_advantages": ends,
        "token_advantages": [row[:n] for row, n in zip(token_BT.tolist(), lengths, strict=True)],
    }


def theory_effective_prompt_weight(make: Make, *, p: Any, G: int) -> dict[str, Any]:
    """E[A grad log pi] over the 2^G outcomes: d log pi is 1/p at a success, -1/(1-p) else."""
    reward_PG, valid_PG = make.rewards([[1.0] * k + [0.0] * (G - k) for k in range(G + 1)])
    mean_PG = group.group_mean(reward_PG, valid_PG=valid_PG)
    kinds = {
        "group_mean": mean_PG,
        "leave_one_out": group.leave_one_out(reward_PG, valid_PG=valid_PG),
        "maxrl": group.scale_by_group_mean(mean_PG, reward_PG, valid_PG=valid_PG, eps=0.0),
    }
    for ddof in (0, 1):
        kinds[f"group_normalized_ddof{ddof}"] = group.group_normalized(
            reward_PG, valid_PG=valid_PG, ddof=ddof, eps=0.0
        )
    found: dict[str, Any] = {name: [] for name in kinds}
    for rate in p:
        chance_P = torch.tensor(
            [math.comb(G, k) * rate**k * (1 - rate) ** (G - k) for k in range(G + 1)]
        )
        slope_PG = torch.where(reward_PG == 1, 1 / rate, -1 / (1 - rate))
        for name, advantage_PG in kinds.items():
            found[name].append((chance_P.double() @ (advantage_PG * slope_PG).mean(1)).item())
    return found | {"inverse_sqrt_p_1_minus_p": [(x * (1 - x)) ** -0.5 for x in p]}


def theory_moving_average_task_shift(
    make: Make, *, mean_rewards: Any, decay: float, init: float
) -> dict[str, Any]:
    """Rewards of 0 and 1 with these means, in batches so large that the mean is exact."""
    history = MovingAverage(mode="ema", decay=decay, init=init)
    found: dict[str, Any] = {
        "mean_advantages": [],
        "second_moments": [],
        "half_life_steps": history.half_life,
    }
    for mean in mean_rewards:
        gap = mean - history.baseline([mean])
        found["mean_advantages"].append(gap)
        found["second_moments"].append(mean * (1 - mean) + gap * gap)
        history.update([mean])
    return found


def adaptive_kl(
    make: Make, *, init: float, target: float, horizon: int, n_steps: int, kl_sequence: Any
) -> dict[str, Any]:
    coef, found = init, []
    for divergence in kl_sequence:
        coef = kl.proportional(coef, kl=divergence, target=target, horizon=horizon, count=n_steps)
        found.append(coef)
    return {"beta": found}


def adaptive_kl_ppo(make: Make, *, init: float, target: float, kl_sequence: Any) -> dict[str, Any]:
    coef, found = init, []
    for divergence in kl_sequence:
        coef = kl.doubling(coef, kl=divergence, target=target)
        found.append(coef)
    return {"beta": found}


SIGNAL: Mapping[str, Adapter] = {
    "adaptive_kl": adaptive_kl,
    "adaptive_kl_ppo": adaptive_kl_ppo,
    "remax": remax,
    "opo": opo,
    "maxrl": maxrl,
    "maxrl_success_weights": maxrl_success_weights,
    "gdpo": gdpo,
    "lite_ppo": lite_ppo,
    "batch_normalized": batch_normalized,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "moving_average": moving_average,
    "process_supervision": process_supervision,
    "theory_effective_prompt_weight": theory_effective_prompt_weight,
    "theory_moving_average_task_shift": theory_moving_average_task_shift,
}
