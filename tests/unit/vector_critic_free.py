"""Adapters of the critic-free methods' kinds, as in `vector_adapters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vector_tools import Adapter, Make, cut, losses, mask_of, weights

from surefoot.objective import (
    batch,
    correction,
    credit,
    gates,
    group,
    kl,
    mismatch,
    policy,
    reduce,
    terms,
)
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


def gspo(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    eps_low: float,
    eps_high: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    sequence_BT = gates.sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    per_token_BT = _clipped(make, sequence_BT, advantages, mask_BT, eps_low, eps_high)
    return _sequence(per_token_BT, logp_BT, mask_BT) | {
        "seq_ratio": sequence_BT[:, 0].exp().tolist()
    }


def _clipped(
    make: Make, log_ratio_BT: Tensor, advantages: Any, mask_BT: Tensor, low: float, high: float
) -> Tensor:
    return policy.clipped(
        log_ratio_BT,
        advantage_BT=credit.broadcast(make(advantages), mask_BT=mask_BT),
        mask_BT=mask_BT,
        low=low,
        high=high,
        dual=None,
        cap=None,
    ).per_token_BT


def _sequence(per_token_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor) -> dict[str, Any]:
    """A loss of whole completions: it stands at every token, and at the first one too."""
    found = losses(per_token_BT, logp_BT, mask_BT, None)
    return {
        "seq_loss": per_token_BT[mask_BT & (mask_BT.cumsum(1) == 1)].tolist(),
        "loss": found["loss_seq_mean_token_mean"],
        "grad_logp": found["grad_logp_seq_mean_token_mean"],
    }


def gspo_token(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    eps_low: float,
    eps_high: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    token_BT = gates.sequence_token_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    clipped = policy.clipped(
        token_BT,
        advantage_BT=make(advantages),
        mask_BT=mask_BT,
        low=eps_low,
        high=eps_high,
        dual=None,
        cap=None,
    )
    return losses(clipped.per_token_BT, logp_BT, mask_BT, None)


def cispo(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    upper_cap: float,
    lower_cap: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    per_token_BT = gates.weighted(
        log_ratio_BT,
        logp_BT,
        advantage_BT=make(advantages),
        mask_BT=mask_BT,
        low=lower_cap,
        high=upper_cap,
    )
    return losses(per_token_BT, logp_BT, mask_BT, None)


def sapo(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    tau_pos: float,
    tau_neg: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    per_token_BT = gates.sigmoid(
        log_ratio_BT,
        advantage_BT=make(advantages),
        mask_BT=mask_BT,
        positive=tau_pos,
        negative=tau_neg,
    )
    return losses(per_token_BT, logp_BT, mask_BT, None)


def gmpo(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    log_clip_low: float,
    log_clip_high: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    out = gates.geometric(
        log_ratio_BT,
        advantage_BT=credit.broadcast(make(advantages), mask_BT=mask_BT),
        mask_BT=mask_BT,
        low=1 - math.exp(-log_clip_low),
        high=math.exp(log_clip_high) - 1,
    )
    return _sequence(out.per_token_BT, logp_BT, mask_BT) | {
        "geo_ratio": out.log_ratio_B.exp().tolist()
    }


def dppo(measure: Any) -> Adapter:
    def adapter(
        make: Make,
        *,
        logp: Any,
        behavior_logp: Any,
        mask: Any,
        advantages: Any,
        delta: float,
        is_cap: float,
    ) -> dict[str, Any]:
        logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
        out = gates.diverged(
            logp_BT,
            make(behavior_logp),
            advantage_BT=make(advantages),
            mask_BT=mask_BT,
            measure=measure,
            delta=delta,
            cap=is_cap,
        )
        ratio_BT = correction.apply(-make(advantages), out.weight_BT, mask_BT=out.keep_BT)
        weight_BT = weights("token_mean", mask_BT, None)[0]
        return losses(out.per_token_BT, logp_BT, mask_BT, None) | {
            "keep_mask": out.keep_BT.double().tolist(),
            "weights": out.weight_BT.tolist(),
            "loss_token_mean_ratio_form": reduce.weighted_sum(ratio_BT, weight_BT).item(),
        }

    return adapter


def _ratio(make: Make, old_logp: Any, rollout_logp: Any, mask: Any, level: str) -> Tensor:
    found = mismatch.mismatch(make(old_logp), make(rollout_logp), mask_BT=mask_of(mask))
    return found.token_ratio_BT if level == "token" else found.sequence_ratio_B


def tis(
    make: Make, *, old_logp: Any, rollout_logp: Any, mask: Any, cap: float, level: str
) -> dict[str, Any]:
    ratio = _ratio(make, old_logp, rollout_logp, mask, level)
    return {
        "ratio": ratio.tolist(),
        "weights": correction.truncate(ratio, high=cap).tolist(),
    }


def icepop(
    make: Make, *, old_logp: Any, rollout_logp: Any, mask: Any, low: float, high: float, level: str
) -> dict[str, Any]:
    ratio = _ratio(make, old_logp, rollout_logp, mask, level)
    return {
        "ratio": ratio.tolist(),
        "weights": correction.mask(ratio, low=low, high=high).tolist(),
    }


def geometric_mask(
    make: Make, *, old_logp: Any, rollout_logp: Any, mask: Any, low: float, high: float
) -> dict[str, Any]:
    found = mismatch.mismatch(make(old_logp), make(rollout_logp), mask_BT=mask_of(mask))
    keep_B = correction.inside(found.geometric_ratio_B, low=low, high=high)
    return {"geo_ratio": found.geometric_ratio_B.tolist(), "keep": keep_B.double().tolist()}


def decoupled_ppo(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    rollout_logp: Any,
    eps_low: float,
    eps_high: float,
    cap: float,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, _ = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    clipped = policy.clipped(
        log_ratio_BT,
        advantage_BT=make(advantages),
        mask_BT=mask_BT,
        low=eps_low,
        high=eps_high,
        dual=None,
        cap=None,
    )
    ratio_BT = _ratio(make, old_logp, rollout_logp, mask, "token")
    weight_BT = correction.truncate(ratio_BT, high=cap)
    per_token_BT = correction.apply(clipped.per_token_BT, weight_BT, mask_BT=mask_BT)
    return losses(per_token_BT, logp_BT, mask_BT, None)


def opsm(
    make: Make, *, logp: Any, old_logp: Any, mask: Any, advantages: Any, delta: float
) -> dict[str, Any]:
    is_stale_B, drift_B = terms.stale(
        make(logp),
        make(old_logp),
        advantage_B=make(advantages),
        mask_BT=mask_of(mask),
        delta=delta,
    )
    return {"seq_kl": drift_B.tolist(), "keep": (~is_stale_B).double().tolist()}


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


CRITIC_FREE: Mapping[str, Adapter] = {
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
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo("tv"),
    "dppo_kl": dppo("kl"),
    "tis": tis,
    "icepop": icepop,
    "geometric_mask": geometric_mask,
    "decoupled_ppo": decoupled_ppo,
    "opsm": opsm,
    "theory_effective_prompt_weight": theory_effective_prompt_weight,
    "theory_moving_average_task_shift": theory_moving_average_task_shift,
}
