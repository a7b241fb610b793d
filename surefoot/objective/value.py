"""What a critic is for: advantages from values, the loss that trains it, and how good it is.

Owns generalised advantage estimation, the length-adaptive lambda, the value loss, the likelihood of
correct completions (VAPO), and the critic's health: explained variance, value-add, bias.
Refuses to own the critic itself, where token rewards come from (`credit`), whitening (`batch`) and
reductions (`reduce`).

A value V_t is what the critic expects from token t on, t included. "Next" is the next valid token:
masked ones are as if taken out, also inside a row, and get exactly 0. Health is measured against
Monte Carlo returns (lambda 1 and no bootstrap); returns of a smaller lambda contain V and flatter
it. NaN at a valid token is not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.group import batch_mean, leave_one_out
from surefoot.objective.shapes import check_mask, check_shapes

QUARTILES = 4


@dataclass(frozen=True)
class Estimated:
    """Advantages of the policy and targets of the critic; float64, constants, 0 where masked."""

    advantage_BT: Tensor
    """With the policy's lambda, not whitened."""
    return_BT: Tensor
    """With the critic's lambda."""


@dataclass(frozen=True)
class ValueLoss:
    """A loss per token, and the valid tokens whose gradient the clip removed."""

    per_token_BT: Tensor
    is_clipped_BT: Tensor


def gae(
    reward_BT: Tensor,
    value_BT: Tensor,
    *,
    mask_BT: Tensor,
    gamma: float,
    lam_B: Tensor,
    critic_lam_B: Tensor,
    bootstrap_B: Tensor,
) -> Estimated:
    """Estimate advantages and returns from token rewards and values (GAE, arXiv:1506.02438).

    R_t(lam) = r_t + gamma ((1 - lam) V_next + lam R_next(lam))
    A_t = R_t(lam) - V_t,  which is  sum over l of (gamma lam)^l (r + gamma V_next - V) at t + l
    After the last valid token both V_next and R_next are the bootstrap.
    lam 0 is the one-step TD error exactly, lam 1 the Monte Carlo return minus V exactly. The
    critic's target R(critic_lam) may have another lambda (arXiv:2503.01491).
    bootstrap_B: 0 where the completion ended; where it was cut off and is to go on, the value of
    the state after its last token.
    Shapes: reward_BT, value_BT (units of reward), mask_BT (bool), lam_B, critic_lam_B (0 to 1),
    bootstrap_B -> Estimated. A row without valid tokens: all 0, its bootstrap is not looked at.
    """
    check_shapes(BT=(reward_BT, value_BT, mask_BT), B=(lam_B, critic_lam_B, bootstrap_B))
    check_mask(mask_BT)
    if not 0 <= gamma <= 1:
        raise SurefootError(f"gamma discounts by a factor between 0 and 1, not {gamma}.")
    _check_lambda("lam_B", lam_B)
    _check_lambda("critic_lam_B", critic_lam_B)
    clean_BT = torch.where(mask_BT, value_BT.detach().double(), 0.0)
    rewards_BT = torch.where(mask_BT, reward_BT.detach().double(), 0.0)
    lam_2B = torch.stack([lam_B, critic_lam_B]).detach().double()
    value_B = bootstrap_B.detach().double()
    carried_2B = value_B.expand_as(lam_2B)
    backwards = []
    for t in reversed(range(mask_BT.shape[1])):
        mask_B = mask_BT[:, t]
        next_2B = (1 - lam_2B) * value_B + lam_2B * carried_2B
        carried_2B = torch.where(mask_B, rewards_BT[:, t] + gamma * next_2B, carried_2B)
        value_B = torch.where(mask_B, clean_BT[:, t], value_B)
        backwards.append(torch.where(mask_B, carried_2B, 0.0))
    if not backwards:
        return Estimated(torch.zeros_like(clean_BT), torch.zeros_like(clean_BT))
    policy_BT, critic_BT = torch.stack(backwards[::-1], dim=2).unbind(0)
    return Estimated(policy_BT - clean_BT, critic_BT)


def raw_length_lambda(length_B: Tensor, *, alpha: float) -> Tensor:
    """Compute 1 - 1/(alpha l) as it stands: below 0 where l < 1/alpha (arXiv:2504.05118 Eq. 5).

    Shapes: length_B (valid tokens), alpha (> 0) -> raw_B (float64; -inf at length 0).
    """
    check_shapes(B=(length_B,))
    if not alpha > 0:
        raise SurefootError(f"alpha is a share of the length and > 0 (0.05 is usual), not {alpha}.")
    return 1 - 1 / (alpha * length_B.double())


def length_adaptive_lambda(length_B: Tensor, *, alpha: float) -> Tensor:
    """Look ahead over a share alpha of the completion: lam = 1 - 1/(alpha l), held in [0, 1].

    The paper is silent about completions shorter than 1/alpha; here they get lam 0, one-step TD.
    Shapes: length_B (valid tokens), alpha (> 0) -> lam_B (float64; 0 at length 0).
    """
    return raw_length_lambda(length_B, alpha=alpha).clamp(0, 1)


def value_loss(
    value_BT: Tensor,
    old_value_BT: Tensor,
    return_BT: Tensor,
    *,
    mask_BT: Tensor,
    clip: float | None,
) -> ValueLoss:
    """Regress values on returns, pessimistically once they have moved (arXiv:1909.08593, code).

    loss_t = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2);  without clip
    1/2 (V - R)^2. A token is clipped where the second square is the larger one: V has then left
    the range towards R, and has no gradient. Old values and returns are constants.
    Shapes: value_BT, old_value_BT, return_BT, mask_BT (bool), clip (units of reward, > 0, or None)
    -> ValueLoss, per_token_BT in the dtype of value_BT; 0 where masked.
    """
    check_shapes(BT=(value_BT, old_value_BT, return_BT, mask_BT))
    check_mask(mask_BT)
    if clip is not None and not clip > 0:
        raise SurefootError(f"clip is a distance from the old value and > 0, not {clip}.")
    now_BT = torch.where(mask_BT, value_BT, 0.0).double()
    target_BT = torch.where(mask_BT, return_BT.detach().double(), 0.0)
    error_BT = now_BT - target_BT
    is_clipped_BT = torch.zeros_like(mask_BT)
    if clip is not None:
        then_BT = torch.where(mask_BT, old_value_BT.detach().double(), 0.0)
        held_BT = now_BT.detach().clamp(then_BT - clip, then_BT + clip) - target_BT
        # Not `>`: an old value that is NaN must reach the loss.
        is_clipped_BT = ~(held_BT.square() <= error_BT.detach().square())
        error_BT = torch.where(is_clipped_BT, held_BT, error_BT)
    return ValueLoss((0.5 * error_BT.square()).to(value_BT.dtype), is_clipped_BT)


def positive_nll(logp_BT: Tensor, *, correct_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Imitate what was right: loss_t = -logp_t in correct completions, else 0 (arXiv:2504.05118).

    Its mean is over the tokens of the correct completions of the whole step (Eq. 9), so reduce it
    with their own denominator: `reduce.denominator` and `reduce.token_weights` of kind token_mean
    with present_B = correct_B. No correct completion: loss 0. Correct is said by the raw score.
    Shapes: logp_BT (nats), correct_B (bool), mask_BT (bool) -> per_token_BT in the dtype of
    logp_BT; 0 where masked or not correct.
    """
    check_shapes(BT=(logp_BT, mask_BT), B=(correct_B,))
    check_mask(mask_BT, correct_B)
    return -torch.where(mask_BT & correct_B[:, None], logp_BT, 0.0)


def explained_variance(value_BT: Tensor, return_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Say how much of the returns the critic foresees: 1 - Var(R - V) / Var(R).

    1 is a perfect critic, 0 is as good as a constant, below 0 is worse than one. Blind to a
    constant error: see `bias_by_quartile`. Every valid token counts once.
    Shapes: value_BT, return_BT, mask_BT (bool) -> float64 scalar tensor; NaN where nothing is
    defined: no valid token, or returns that are all equal.
    """
    value_N, return_N = _valid(value_BT, return_BT, mask_BT)
    return 1 - _variance_left(return_N - value_N, return_N)


def value_add(
    value_PG: Tensor,
    return_PG: Tensor,
    *,
    valid_PG: Tensor,
    against: Literal["leave_one_out", "batch_mean"],
) -> Tensor:
    """Compare the critic with a baseline that costs nothing: Var(R - V) / Var(R - b).

    V and R are those of the first trained token, and b is the mean of the other returns of the
    group (leave_one_out) or the mean of the batch, over the same samples. Below 1 the critic takes
    more variance out than b does; at 1 and above b alone would do.
    A sample alone in its group has no leave-one-out baseline and counts on neither side.
    Shapes: value_PG, return_PG, valid_PG (bool) -> float64 scalar tensor; NaN where b leaves
    nothing (equal returns) or nothing counts.
    """
    check_shapes(PG=(value_PG, return_PG, valid_PG))
    check_mask(valid_PG)
    if against == "leave_one_out":
        left_PG = leave_one_out(return_PG, valid_PG=valid_PG)
        valid_PG = valid_PG & (valid_PG.sum(1, keepdim=True) > 1)
    elif against == "batch_mean":
        left_PG = batch_mean(return_PG, valid_PG=valid_PG)
    else:
        raise SurefootError(f"against is {against!r}; it must be 'leave_one_out' or 'batch_mean'.")
    value_N, return_N = _valid(value_PG, return_PG, valid_PG)
    return _variance_left(return_N - value_N, left_PG[valid_PG])


def bias_by_quartile(value_BT: Tensor, return_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Say where in a completion the critic is off: mean(V - R) / std(R), by position.

    Token p (from 0) of a row with n valid tokens is in quartile floor(4 p / n). The std is that of
    the whole batch (ddof 0), so the quartiles compare. Above 0: the critic expects too much.
    Shapes: value_BT, return_BT, mask_BT (bool) -> bias_Q (float64, Q = 4, in stds of the returns);
    NaN in a quartile without tokens, and everywhere if the returns are all equal.
    """
    value_N, return_N = _valid(value_BT, return_BT, mask_BT)
    place_BT = mask_BT.cumsum(1) - 1
    quartile_BT = QUARTILES * place_BT // mask_BT.sum(1, keepdim=True).clamp(min=1)
    quartile_N = quartile_BT[mask_BT]
    error_N = value_N - return_N
    error_Q = torch.stack([error_N[quartile_N == q].mean() for q in range(QUARTILES)])
    std = _variance(return_N).sqrt() if _has_spread(return_N) else float("nan")
    return error_Q / std


def _check_lambda(name: str, lam_B: Tensor) -> None:
    wrong_B = ~((lam_B >= 0) & (lam_B <= 1))
    if bool(wrong_B.any()):
        row = int(wrong_B.nonzero()[0])
        raise SurefootError(
            f"{name} is {lam_B[row].item()} in row {row}, but a lambda lies between 0 (one-step "
            "TD) and 1 (Monte Carlo)."
        )


def _valid(value: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    check_shapes(BT=(value, returns, mask))
    check_mask(mask)
    return value.detach().double()[mask], returns.detach().double()[mask]


def _has_spread(value_N: Tensor) -> bool:
    return value_N.numel() > 0 and bool(value_N.max() > value_N.min())


def _variance_left(left_N: Tensor, whole_N: Tensor) -> Tensor:
    """Var(left) / Var(whole), both in units of the range of `whole`, so that tiny gaps count."""
    if not _has_spread(whole_N):
        return torch.full((), float("nan"), dtype=torch.float64, device=whole_N.device)
    unit = whole_N.max() - whole_N.min()
    return _variance(left_N / unit) / _variance(whole_N / unit)


def _variance(value_N: Tensor) -> Tensor:
    deviation_N = value_N - value_N.min()
    return (deviation_N - deviation_N.mean()).square().mean()
