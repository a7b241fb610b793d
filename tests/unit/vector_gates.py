"""Adapters of the kinds that make a loss of a ratio, as in `vector_adapters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vector_tools import Adapter, Make, losses, mask_of, weights

from surefoot.objective import correction, credit, gates, mismatch, policy, reduce, terms


def ratio(make: Make, logp: Any, old_logp: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """logp (a leaf), log-ratio and mask."""
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    log_ratio_BT, clamped = policy.log_ratio(logp_BT, make(old_logp), mask_BT=mask_BT)
    assert clamped == 0
    return logp_BT, log_ratio_BT, mask_BT


def clip(
    log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, low: float, high: float
) -> Tensor:
    return policy.clipped(
        log_ratio_BT,
        advantage_BT=advantage_BT,
        mask_BT=mask_BT,
        low=low,
        high=high,
        dual=None,
        cap=None,
    ).per_token_BT


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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
    sequence_BT = gates.sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    advantage_BT = credit.broadcast(make(advantages), mask_BT=mask_BT)
    per_token_BT = clip(sequence_BT, advantage_BT, mask_BT, eps_low, eps_high)
    return _sequence(per_token_BT, logp_BT, mask_BT) | {
        "seq_ratio": sequence_BT[:, 0].exp().tolist()
    }


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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
    token_BT = gates.sequence_token_log_ratio(log_ratio_BT, mask_BT=mask_BT)
    clipped_BT = clip(token_BT, make(advantages), mask_BT, eps_low, eps_high)
    return losses(clipped_BT, logp_BT, mask_BT, None)


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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
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
    logp_BT, log_ratio_BT, mask_BT = ratio(make, logp, old_logp, mask)
    clipped_BT = clip(log_ratio_BT, make(advantages), mask_BT, eps_low, eps_high)
    ratio_BT = _ratio(make, old_logp, rollout_logp, mask, "token")
    weight_BT = correction.truncate(ratio_BT, high=cap)
    per_token_BT = correction.apply(clipped_BT, weight_BT, mask_BT=mask_BT)
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


GATES: Mapping[str, Adapter] = {
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
}
