"""The critic's health as columns of a step's row: how much it foresees, and how sure that is.

Owns which tokens and completions each number is about, and the 95 % intervals, for which whole
groups are drawn again: the completions of one prompt are not independent.
Refuses to own the formulas (`objective/value`) and the bootstrap (`statistics`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.learner.batch import Batch
from surefoot.learner.update import Facts, UpdateReport
from surefoot.loops.credit import Credit
from surefoot.loops.metrics import Metrics
from surefoot.loops.standing import Standing
from surefoot.objective import group, value
from surefoot.statistics import Interval, variance_ratio_interval


def critic_metrics(
    batch: Batch,
    standing: Standing,
    credit: Credit,
    facts: Facts,
    report: UpdateReport,
    *,
    seed: int,
    step: int,
) -> Metrics:
    """The critic before this step's update, against Monte Carlo returns.

    `critic/explained_variance` over tokens; `critic/value_add` is the variance of the return that
    the critic leaves at the first token over that which leave-one-out leaves (1 and above: not
    worth its memory); both with `_low` and `_high`, absent where the step's groups cannot tell.
    `critic/bias/q1` to `q4` by position, in standard deviations of the returns. `seed` and `step`
    are the key of the groups that are drawn again.
    """
    assert facts.value_BT is not None and credit.monte_carlo_BT is not None
    value_BT, return_BT = facts.value_BT, credit.monte_carlo_BT
    present_PG = standing.present_PG
    mask_BT = batch.mask_BT & present_PG.reshape(-1)[:, None]
    out: Metrics = {}
    explained = value.explained_variance(value_BT, return_BT, mask_BT=mask_BT)
    if explained.isfinite():
        out["critic/explained_variance"] = float(explained)
        owner_BT = batch.group_B[:, None].expand(mask_BT.shape)
        left = _interval(
            (return_BT - value_BT)[mask_BT], return_BT[mask_BT], owner_BT[mask_BT], seed, step
        )
        if left is not None:
            out["critic/explained_variance_low"] = 1.0 - left.high
            out["critic/explained_variance_high"] = 1.0 - left.low
    value_PG, return_PG = _at_first(mask_BT, present_PG, value_BT, return_BT)
    out.update(_value_add(value_PG, return_PG, present_PG, seed, step))
    bias_Q = value.bias_by_quartile(value_BT, return_BT, mask_BT=mask_BT)
    for q, bias in enumerate(bias_Q, 1):
        if bias.isfinite():
            out[f"critic/bias/q{q}"] = float(bias)
    sums = report.sums
    if sums.get("value_tokens"):
        out["critic/loss"] = sums["value_loss"] / sums["value_tokens"]
        out["critic/clip_ratio"] = sums["value_clipped"] / sums["value_tokens"]
        out["critic/grad_norm"] = sums["value_norm"] / sums["value_steps"]
    return out


def _value_add(
    value_PG: Tensor, return_PG: Tensor, present_PG: Tensor, seed: int, step: int
) -> Metrics:
    grouped = present_PG.shape[1] > 1
    found = value.value_add(
        value_PG,
        return_PG,
        valid_PG=present_PG,
        against="leave_one_out" if grouped else "batch_mean",
    )
    if not found.isfinite():
        return {}
    out: Metrics = {"critic/value_add": float(found)}
    # The variance of what a mean of the batch leaves is that of the returns.
    left_PG, counted_PG = return_PG, present_PG
    if grouped:
        left_PG = group.leave_one_out(return_PG, valid_PG=present_PG)
        counted_PG = present_PG & (present_PG.sum(1, keepdim=True) > 1)
    owner_PG = torch.arange(len(return_PG))[:, None].expand(return_PG.shape)
    interval = _interval(
        (return_PG - value_PG)[counted_PG], left_PG[counted_PG], owner_PG[counted_PG], seed, step
    )
    if interval is not None:
        out["critic/value_add_low"] = interval.low
        out["critic/value_add_high"] = interval.high
    return out


def _at_first(mask_BT: Tensor, shape_PG: Tensor, *values: Tensor) -> list[Tensor]:
    """The values at each completion's first trained token, [P, G]."""
    first_B1 = mask_BT.long().argmax(1)[:, None]
    return [value_BT.gather(1, first_B1)[:, 0].reshape(shape_PG.shape) for value_BT in values]


def _interval(
    left_N: Tensor, whole_N: Tensor, owner_N: Tensor, seed: int, step: int
) -> Interval | None:
    return variance_ratio_interval(
        left_N.numpy(), whole_N.numpy(), owner_N.numpy(), seed=seed, purpose="critic", place=step
    )
