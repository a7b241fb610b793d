"""Adapters of the kinds that need a critic, as in `vector_adapters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vector_tools import Adapter, Make, mask_of, weights

from surefoot.objective import batch, reduce, value


def _gae(
    make: Make,
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: float,
    lam_B: Tensor,
    critic_lam_B: Tensor,
    bootstrap: Any,
) -> dict[str, Any]:
    got = value.gae(
        make(rewards),
        make(values),
        mask_BT=mask_of(mask),
        gamma=gamma,
        lam_B=lam_B,
        critic_lam_B=critic_lam_B,
        bootstrap_B=make(bootstrap),
    )
    return {"advantages": got.advantage_BT.tolist(), "returns": got.return_BT.tolist()}


def gae(
    make: Make, *, rewards: Any, values: Any, mask: Any, gamma: float, bootstrap: Any, lam: float
) -> dict[str, Any]:
    lam_B = torch.full((len(mask),), lam, dtype=torch.float64)
    return _gae(make, rewards, values, mask, gamma, lam_B, lam_B, bootstrap)


def end_of_gae(lam: float) -> Adapter:
    def adapter(
        make: Make, *, rewards: Any, values: Any, mask: Any, gamma: float, bootstrap: Any
    ) -> dict[str, Any]:
        return gae(
            make,
            rewards=rewards,
            values=values,
            mask=mask,
            gamma=gamma,
            bootstrap=bootstrap,
            lam=lam,
        )

    return adapter


def decoupled_gae(
    make: Make,
    *,
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: float,
    bootstrap: Any,
    alpha: float,
    lam_critic: float,
) -> dict[str, Any]:
    lam_B = value.length_adaptive_lambda(reduce.lengths(mask_of(mask)), alpha=alpha)
    critic_lam_B = torch.full_like(lam_B, lam_critic)
    found = _gae(make, rewards, values, mask, gamma, lam_B, critic_lam_B, bootstrap)
    return found | {"lam_policy": lam_B.tolist()}


def length_adaptive_lambda(make: Make, *, alpha: float, lengths: Any) -> dict[str, Any]:
    length_B = torch.tensor(lengths)
    return {
        "lambda_raw": value.raw_length_lambda(length_B, alpha=alpha).tolist(),
        "lambda_clamped": value.length_adaptive_lambda(length_B, alpha=alpha).tolist(),
    }


def positive_lm_loss(
    make: Make, *, logp: Any, mask: Any, correct: Any, mu: float
) -> dict[str, Any]:
    logp_BT, mask_BT = make(logp, grad=True), mask_of(mask)
    correct_B = torch.tensor(correct).bool()
    weight_BT = reduce.token_weights(
        "token_mean",
        mask_BT=mask_BT,
        present_B=correct_B,
        denominator=reduce.denominator(
            "token_mean", length_B=reduce.lengths(mask_BT), present_B=correct_B
        ),
    )
    per_token_BT = value.positive_nll(logp_BT, correct_B=correct_B, mask_BT=mask_BT)
    nll = reduce.weighted_sum(per_token_BT, weight_BT)
    (grad_BT,) = torch.autograd.grad(mu * nll, logp_BT)
    return {"nll": nll.item(), "weighted_loss": mu * nll.item(), "grad_logp": grad_BT.tolist()}


def whiten(
    make: Make, *, values: Any, mask: Any, ddof: int, eps: float, shift_mean: bool
) -> dict[str, Any]:
    """No row adds the mean back; the vectors' `shift_mean` false is arranged here."""
    mask_BT = mask_of(mask)
    got = batch.whiten_tokens(make(values), mask_BT=mask_BT, center=True, ddof=ddof, eps=eps)
    back = 0.0 if shift_mean else got.mean
    return {
        "mean": got.mean.item(),
        "var": got.variance.item(),
        "output": torch.where(mask_BT, got.value + back, 0.0).tolist(),
    }


def value_loss(
    make: Make, *, values: Any, old_values: Any, returns: Any, mask: Any, clip: float | None
) -> dict[str, Any]:
    value_BT, mask_BT = make(values, grad=True), mask_of(mask)
    old_BT, return_BT = make(old_values), make(returns)
    weight_BT, _ = weights("token_mean", mask_BT, None)
    got = value.value_loss(value_BT, old_BT, return_BT, mask_BT=mask_BT, clip=clip)
    plain = value.value_loss(value_BT, old_BT, return_BT, mask_BT=mask_BT, clip=None)
    loss = reduce.weighted_sum(got.per_token_BT, weight_BT)
    (grad_BT,) = torch.autograd.grad(loss, value_BT)
    return {
        "per_token_loss": got.per_token_BT.tolist(),
        "loss": loss.item(),
        "loss_unclipped": reduce.weighted_sum(plain.per_token_BT, weight_BT).item(),
        "clip_fraction": reduce.weighted_sum(got.is_clipped_BT.double(), weight_BT).item(),
        "grad_values": grad_BT.tolist(),
    }


def explained_variance(make: Make, *, values: Any, returns: Any, mask: Any) -> dict[str, Any]:
    got = value.explained_variance(make(values), make(returns), mask_BT=mask_of(mask))
    return {"explained_variance": got.item()}


VALUE: Mapping[str, Adapter] = {
    "gae": gae,
    "td": end_of_gae(0.0),
    "monte_carlo": end_of_gae(1.0),
    "decoupled_gae": decoupled_gae,
    "length_adaptive_lambda": length_adaptive_lambda,
    "positive_lm_loss": positive_lm_loss,
    "whiten": whiten,
    "value_loss": value_loss,
    "explained_variance": explained_variance,
}
