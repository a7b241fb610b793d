"""How far the policy is from its reference: estimators per token, from sampled tokens.

Owns the estimates. Refuses to own where they go (reward or loss), their coefficient and its
controller. With d = logp - ref_logp and tokens sampled from the policy:

estimator   value           mean                gradient as a loss, in expectation
k1          d               KL(policy || ref)   0: use it in the reward, never as a loss
k2          d²/2            biased, O(KL²)      grad KL(policy || ref), token by token
k3          exp(-d) - 1 + d KL(policy || ref)   grad KL(ref || policy)
k3_ratio    r k3            KL(policy || ref)   grad KL(policy || ref), also off-policy

Sources: Schulman 2020 (Approximating KL divergence); arXiv:2510.01555, 2506.09477, 2512.02556.
A loss per token misses what a token does to later ones; k1 in the reward, summed to the end, does
not. d is taken in float64 and nothing is clamped: where exp(-d) overflows, the result is infinite
and the step must be refused. Only r in k3_ratio has the limit of `policy.log_ratio`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.policy import log_ratio
from surefoot.objective.shapes import check_mask, check_shapes

Estimator = Literal["k1", "k2", "k3", "k3_ratio"]
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "k3_ratio")


def k1(logp_BT: Tensor, ref_logp_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Estimate by the log-ratio itself: d, of either sign.

    Shapes: logp_BT, ref_logp_BT, mask_BT (bool) -> kl_BT (nats) in the dtype of logp_BT; 0 where
    masked, as in all estimators here.
    """
    return _difference(logp_BT, ref_logp_BT, mask_BT).to(logp_BT.dtype)


def k2(logp_BT: Tensor, ref_logp_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Estimate by half the square: d²/2. Shapes as in `k1`."""
    return (_difference(logp_BT, ref_logp_BT, mask_BT).square() / 2).to(logp_BT.dtype)


def k3(logp_BT: Tensor, ref_logp_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Estimate without sign: exp(-d) - 1 + d >= 0. Shapes as in `k1`."""
    difference_BT = _difference(logp_BT, ref_logp_BT, mask_BT)
    return (torch.expm1(-difference_BT) + difference_BT).to(logp_BT.dtype)


def k3_ratio(
    logp_BT: Tensor, ref_logp_BT: Tensor, *, old_logp_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Weigh k3 by the ratio to the sampling policy: r k3, r = exp(logp - old_logp).

    Gradient flows through both factors (arXiv:2512.02556); old_logp_BT carries none.
    Shapes as in `k1`.
    """
    ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT=mask_BT)[0].exp()
    return ratio_BT * k3(logp_BT, ref_logp_BT, mask_BT=mask_BT)


def estimate(
    kind: Estimator,
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    *,
    mask_BT: Tensor,
    old_logp_BT: Tensor | None = None,
) -> Tensor:
    """Call the estimator named `kind`; only k3_ratio reads old_logp_BT, and needs it."""
    if kind == "k1":
        return k1(logp_BT, ref_logp_BT, mask_BT=mask_BT)
    if kind == "k2":
        return k2(logp_BT, ref_logp_BT, mask_BT=mask_BT)
    if kind == "k3":
        return k3(logp_BT, ref_logp_BT, mask_BT=mask_BT)
    if kind != "k3_ratio":
        raise SurefootError(f"There is no KL estimator {kind!r}; choose from {ESTIMATORS}.")
    if old_logp_BT is None:
        raise SurefootError("The KL estimator k3_ratio needs old_logp_BT; give it, or use k3.")
    return k3_ratio(logp_BT, ref_logp_BT, old_logp_BT=old_logp_BT, mask_BT=mask_BT)


def sequence_kl(logp_BT: Tensor, ref_logp_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Estimate for the whole completion: the sum of k1 over its valid tokens.

    Shapes: logp_BT, ref_logp_BT, mask_BT (bool) -> kl_B (nats per sequence) in the dtype of
    logp_BT; 0 for a row without valid tokens.
    """
    return _difference(logp_BT, ref_logp_BT, mask_BT).sum(1).to(logp_BT.dtype)


def proportional(coef: float, *, kl: float, target: float, horizon: int, count: int) -> float:
    """Move a coefficient towards a target divergence (arXiv:1909.08593).

    coef (1 + clip(kl / target - 1, -0.2, 0.2) count / horizon), count completions seen in the step.
    `kl` and `target` in the same unit, nats per sequence in the paper.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * count / horizon)


def doubling(coef: float, *, kl: float, target: float) -> float:
    """Halve a coefficient below target / 1.5, double it above 1.5 target (arXiv:1707.06347)."""
    if kl < target / 1.5:
        return coef / 2.0
    return coef * 2.0 if kl > 1.5 * target else coef


def _difference(logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """logp - ref_logp in float64; the reference carries no gradient."""
    check_shapes(BT=(logp_BT, ref_logp_BT, mask_BT))
    check_mask(mask_BT)
    policy_BT = torch.where(mask_BT, logp_BT.double(), 0.0)
    return policy_BT - torch.where(mask_BT, ref_logp_BT.double(), 0.0).detach()
