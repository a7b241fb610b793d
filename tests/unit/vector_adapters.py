"""One small adapter per kind of numeric vector: inputs in, everything that is expected out.

An adapter calls functions of the package and arranges what they return; it computes nothing that
the package could compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vector_gates import GATES
from vector_signal import SIGNAL
from vector_tools import MODES, NAN, Adapter, Make, cut, losses, mask_of, weights
from vector_value import VALUE

from surefoot.objective import (
    credit,
    group,
    kl,
    logprob,
    mismatch,
    policy,
    reduce,
    selection,
    shaping,
)


def group_normalized(make: Make, *, rewards: Any, ddof: int, eps: float) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    advantage_PG = group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=ddof, eps=eps)
    return {"advantages": cut(advantage_PG, rewards)}


def group_mean(make: Make, *, rewards: Any) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    return {"advantages": cut(group.group_mean(reward_PG, valid_PG=valid_PG), rewards)}


def leave_one_out(make: Make, *, rewards: Any) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    return {"advantages": cut(group.leave_one_out(reward_PG, valid_PG=valid_PG), rewards)}


def leave_one_out_median(make: Make, *, rewards: Any) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    advantage_PG = group.leave_one_out(reward_PG, valid_PG=valid_PG, center="median")
    return {"advantages": cut(advantage_PG, rewards)}


def leave_one_out_kl_in_reward(
    make: Make, *, rewards: Any, logp: Any, ref_logp: Any, mask: Any, beta: float
) -> dict[str, Any]:
    reward_PG, valid_PG = make.rewards(rewards)
    kl_B = kl.sequence_kl(make(logp), make(ref_logp), mask_BT=mask_of(mask))
    kl_PG = torch.zeros_like(reward_PG)
    kl_PG[torch.tensor([[i < len(r) for i in range(kl_PG.shape[1])] for r in rewards])] = kl_B
    shaped_B = shaping.subtract_kl(reward_PG.flatten(), kl_PG.flatten(), coef=beta)
    shaped_PG = shaped_B.reshape(reward_PG.shape)
    return {
        "seq_kl": kl_B.tolist(),
        "shaped_rewards": cut(torch.where(valid_PG, shaped_PG, NAN), rewards),
        "advantages": cut(group.leave_one_out(shaped_PG, valid_PG=valid_PG), rewards),
    }


def per_token_reward(
    make: Make, *, logp: Any, ref_logp: Any, mask: Any, beta: float, scores: Any
) -> dict[str, Any]:
    mask_BT = mask_of(mask)
    kl_BT = kl.k1(make(logp), make(ref_logp), mask_BT=mask_BT)
    reward_BT = credit.per_token_reward(make(scores), kl_BT, mask_BT=mask_BT, coef=beta)
    return {"kl": kl_BT.tolist(), "rewards": reward_BT.tolist()}


def ppo_clip(
    make: Make,
    *,
    logp: Any,
    old_logp: Any,
    mask: Any,
    advantages: Any,
    eps_low: float,
    eps_high: float,
    const_norm: float | None,
    dual_clip: float | None = None,
    delta: float | None = None,
    ref_logp: Any = None,
    beta: float = 0.0,
    kl_estimator: Any = None,
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    ratio_BT, clamped = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    assert clamped == 0
    per_token_BT = policy.clipped(
        ratio_BT,
        advantage_BT=make(advantages),
        mask_BT=mask_BT,
        low=eps_low,
        high=eps_high,
        dual=dual_clip,
        cap=delta,
    ).per_token_BT
    if ref_logp is not None:
        old_BT = make(old_logp)
        per_token_BT = per_token_BT + beta * kl.estimate(
            kl_estimator, logp_BT, make(ref_logp), mask_BT=mask_BT, old_logp_BT=old_BT
        )
    return losses(per_token_BT, logp_BT, mask_BT, const_norm)


def reinforce_loss(make: Make, *, logp: Any, mask: Any, advantages: Any) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    per_token_BT = policy.reinforce(logp_BT, advantage_BT=make(advantages), mask_BT=mask_BT)
    return losses(per_token_BT, logp_BT, mask_BT, None)


def aggregation(
    make: Make, *, loss: Any, mask: Any, group_ids: Any, const_norm: float
) -> dict[str, Any]:
    mask_BT = mask_of(mask)
    return {
        mode: reduce.weighted_sum(make(loss), weights(mode, mask_BT, const_norm, group_ids)[0])
        for mode in MODES
    }


def micro_batch(
    make: Make, *, loss: Any, mask: Any, micro_batches: Any, const_norm: float
) -> dict[str, Any]:
    loss_BT, mask_BT = make(loss), mask_of(mask)
    found: dict[str, Any] = {}
    for mode in list(MODES)[:4]:
        whole = weights(mode, mask_BT, const_norm)[1]
        parts = []
        for rows in micro_batches:
            weight_bT = reduce.token_weights(
                MODES[mode],
                mask_BT=mask_BT[rows],
                present_B=torch.ones(len(rows)).bool(),
                denominator=whole,
            )
            parts.append(reduce.weighted_sum(loss_BT[rows], weight_bT))
        sums = [(part * whole).item() for part in parts]
        found[mode] = {"sums": sums, "denominator": whole, "loss": sum(parts)}
    alone = []
    for rows in micro_batches:
        weight_bT, tokens = weights("token_mean", mask_BT[rows], None)
        alone.append(reduce.weighted_sum(loss_BT[rows], weight_bT) if tokens > 0 else NAN)
    found["wrong_mean_of_micro_batch_token_means"] = sum(alone) / len(alone)
    return found


def logprob_temperature(
    make: Make, *, logits: Any, tokens: Any, temperature: float
) -> dict[str, Any]:
    logits_NV = make(logits)
    scored = logprob.token_logp(logits_NV, torch.tensor(tokens), temperature=temperature)
    every = [
        logprob.token_logp(logits_NV, torch.full((len(logits),), v), temperature=temperature)
        for v in range(logits_NV.shape[1])
    ]
    return {
        "logp_all": torch.stack([each.logp_N for each in every], 1).tolist(),
        "logp": scored.logp_N.tolist(),
        "entropy": scored.entropy_N.tolist(),
    }


def kl_tokens(estimator: kl.Estimator) -> Adapter:
    def adapter(
        make: Make, *, logp: Any, ref_logp: Any, mask: Any, old_logp: Any = None
    ) -> dict[str, Any]:
        logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
        old_BT = None if old_logp is None else make(old_logp)
        kl_BT = kl.estimate(estimator, logp_BT, make(ref_logp), mask_BT=mask_BT, old_logp_BT=old_BT)
        (grad_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
        mean = reduce.weighted_sum(kl_BT.detach(), weights("token_mean", mask_BT, None)[0])
        return {
            "per_token": kl_BT.tolist(),
            "token_mean": mean.item(),
            "grad_logp": grad_BT.tolist(),
        }

    return adapter


def kl_expected_gradients(make: Make, *, policy_logits: Any, ref_logits: Any) -> dict[str, Any]:
    """Every outcome is one token of one row, weighed by its probability."""
    logits_V = make(policy_logits, grad=True)
    logp_1V = logits_V.log_softmax(0)[None]
    ref_1V = make(ref_logits).log_softmax(0)[None]
    p_1V, q_1V = logp_1V.exp(), ref_1V.exp()
    every_1V = torch.ones_like(p_1V).bool()
    frozen_1V = p_1V.detach()

    def grad(loss: Tensor) -> list[float]:
        return torch.autograd.grad(loss, logits_V, retain_graph=True)[0].tolist()

    kl_pq = (p_1V * kl.k1(logp_1V, ref_1V, mask_BT=every_1V)).sum()
    kl_qp = -(q_1V * kl.k1(logp_1V, ref_1V, mask_BT=every_1V)).sum()
    found: dict[str, Any] = {
        "p": p_1V[0].tolist(),
        "q": q_1V[0].tolist(),
        "kl_pq": kl_pq.item(),
        "kl_qp": kl_qp.item(),
        "grad_kl_pq": grad(kl_pq),
        "grad_kl_qp": grad(kl_qp),
    }
    log_ratio_1V, _ = policy.log_ratio(logp_1V, logp_1V.detach(), mask_BT=every_1V)
    for name in ("k1", "k2", "k3"):
        kl_1V = kl.estimate(name, logp_1V, ref_1V, mask_BT=every_1V)
        scored_1V = policy.reinforce(logp_1V, advantage_BT=-kl_1V, mask_BT=every_1V)
        attached_1V = (
            kl.k3_ratio(logp_1V, ref_1V, old_logp_BT=logp_1V.detach(), mask_BT=every_1V)
            if name == "k3"
            else log_ratio_1V.exp() * kl_1V
        )
        found |= {
            name: kl_1V[0].tolist(),
            f"mean_{name}": (frozen_1V * kl_1V).sum().item(),
            f"as_loss_{name}": grad((frozen_1V * kl_1V).sum()),
            f"in_reward_{name}": grad((frozen_1V * scored_1V).sum()),
            f"as_loss_attached_ratio_{name}": grad((frozen_1V * attached_1V).sum()),
        }
    return found


def kl_sequence_gradient(make: Make, *, params: Any) -> dict[str, Any]:
    """The four sequences of two binary tokens, each weighed by its probability."""
    theta = make(params, grad=True)
    sequences = [(0, 0), (0, 1), (1, 0), (1, 1)]
    sign = [-1.0, 1.0]
    logp_BT = torch.stack(
        [torch.stack([(sign[x] * theta[0]), (sign[y] * theta[1 + x])]) for x, y in sequences]
    )
    logp_BT = torch.nn.functional.logsigmoid(logp_BT)
    ref_BT = torch.full_like(logp_BT, math.log(0.5))
    every_BT = torch.ones_like(logp_BT).bool()
    p_B = logp_BT.sum(1).exp()
    kl_BT = kl.k1(logp_BT, ref_BT, mask_BT=every_BT).detach()
    reward_BT = credit.per_token_reward(make([0.0] * 4), kl_BT, mask_BT=every_BT, coef=1.0)
    return_BT = credit.reward_to_go(reward_BT, mask_BT=every_BT, gamma=1.0)
    in_reward_BT = policy.reinforce(logp_BT, advantage_BT=return_BT, mask_BT=every_BT)
    k2_BT = kl.k2(logp_BT, ref_BT, mask_BT=every_BT)

    def grad(loss: Tensor) -> list[float]:
        return torch.autograd.grad(loss, theta, retain_graph=True)[0].tolist()

    return {
        "kl": (p_B * kl.sequence_kl(logp_BT, ref_BT, mask_BT=every_BT)).sum().item(),
        "grad_full": grad((p_B.detach()[:, None] * in_reward_BT).sum()),
        "grad_tokenwise_k2_loss": grad((p_B.detach()[:, None] * k2_BT).sum()),
    }


def soft_overlong(
    make: Make, *, max_length: int, cache_length: int, lengths: Any
) -> dict[str, Any]:
    length_B = torch.tensor(lengths)
    penalty_B = shaping.soft_overlong(length_B, max_length=max_length, cache=cache_length)
    return {"rewards": penalty_B.tolist()}


def dynamic_sampling(make: Make, *, accuracy: Any, rewards: Any) -> dict[str, Any]:
    score_PG, valid_PG = make.rewards(accuracy)
    return {"keep": selection.informative(score_PG, valid_PG=valid_PG).tolist()}


def mismatch_metrics(make: Make, *, old_logp: Any, rollout_logp: Any, mask: Any) -> dict[str, Any]:
    found = mismatch.mismatch(make(old_logp), make(rollout_logp), mask_BT=mask_of(mask))
    return {
        "token_ratio": found.token_ratio_BT.tolist(),
        "seq_ratio": found.sequence_ratio_B.tolist(),
        "geo_ratio": found.geometric_ratio_B.tolist(),
        "k3_token": found.k3_BT.tolist(),
        "kl_k1": found.kl_k1.item(),
        "kl_k3": found.kl_k3.item(),
        "chi2_token": found.chi2.item(),
        "ess_token": found.effective_tokens.item(),
    }


def pass_at_k(make: Make, *, n: Any, c: Any, k: Any) -> dict[str, Any]:
    from surefoot import statistics

    pairs = zip(n, c, strict=True)
    return {"pass_at_k": [[statistics.pass_at_k(ni, ci, ki) for ki in k] for ni, ci in pairs]}


def theory_lone_failure(make: Make, *, G: Any) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for size in G:
        reward_PG, valid_PG = make.rewards([[1.0] * (size - 1) + [0.0]])
        z = [
            group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=ddof, eps=0.0)[0]
            for ddof in (0, 1)
        ]
        one_out = group.leave_one_out(reward_PG, valid_PG=valid_PG)[0]
        for key, value in (
            ("wrong_ddof0", z[0][-1]),
            ("wrong_ddof1", z[1][-1]),
            ("right_ddof0", z[0][0]),
            ("wrong_leave_one_out", one_out[-1]),
        ):
            found.setdefault(key, []).append(value.item())
    return found


def theory_aggregation_length_weights(
    make: Make, *, lengths: Any, const_norm: float
) -> dict[str, Any]:
    mask_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    weight = {mode: weights(mode, mask_BT, const_norm)[0] for mode in list(MODES)[:4]}
    found = {f"per_token_{mode}": w_BT.amax(1).tolist() for mode, w_BT in weight.items()}
    return found | {"per_sequence_token_mean": weight["token_mean"].sum(1).tolist()}


def theory_kl_gaussian(make: Make, *, mu: Any) -> dict[str, Any]:
    """Expectations over the policy N(0, 1) by Gauss-Hermite quadrature."""
    node_N, weight_N = (torch.tensor(each) for each in np.polynomial.hermite_e.hermegauss(120))
    weight_1N = (weight_N / weight_N.sum())[None]
    every_1N = torch.ones_like(weight_1N).bool()
    found: dict[str, Any] = {"kl": [], "bias_over_kl": [], "std_over_kl": []}
    for shift in mu:
        logp_1N, ref_1N = -(node_N[None] ** 2) / 2, -((node_N[None] - shift) ** 2) / 2
        values = [
            kl.estimate(name, logp_1N, ref_1N, mask_BT=every_1N) for name in ("k1", "k2", "k3")
        ]
        mean = [(weight_1N * each).sum() for each in values]
        spread = [
            (weight_1N * (each - m) ** 2).sum().sqrt() for each, m in zip(values, mean, strict=True)
        ]
        true = shift * shift / 2
        found["kl"].append(mean[0].item())
        found["bias_over_kl"].append([(m.item() - true) / true for m in mean])
        found["std_over_kl"].append([s.item() / true for s in spread])
    return found


ADAPTERS: Mapping[str, Adapter] = {
    "group_normalized": group_normalized,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "leave_one_out_median": leave_one_out_median,
    "leave_one_out_kl_in_reward": leave_one_out_kl_in_reward,
    "per_token_reward": per_token_reward,
    "ppo_clip": ppo_clip,
    "dual_clip": ppo_clip,
    "two_sided": ppo_clip,
    "grpo_loss": ppo_clip,
    "grpo_first_update": ppo_clip,
    "reinforce_loss": reinforce_loss,
    "aggregation": aggregation,
    "micro_batch": micro_batch,
    "logprob_temperature": logprob_temperature,
    "kl_k1": kl_tokens("k1"),
    "kl_k2": kl_tokens("k2"),
    "kl_k3": kl_tokens("k3"),
    "kl_k3_importance": kl_tokens("k3_ratio"),
    "kl_expected_gradients": kl_expected_gradients,
    "kl_sequence_gradient": kl_sequence_gradient,
    "soft_overlong": soft_overlong,
    "dynamic_sampling": dynamic_sampling,
    "mismatch_metrics": mismatch_metrics,
    "pass_at_k": pass_at_k,
    "theory_lone_failure": theory_lone_failure,
    "theory_aggregation_length_weights": theory_aggregation_length_weights,
    "theory_kl_gaussian": theory_kl_gaussian,
    **SIGNAL,
    **GATES,
    **VALUE,
}
