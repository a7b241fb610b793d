"""One number per completion: baselines and scales from the rewards of a group or a batch.

Owns advantages per sample and the rule that decides which groups are dead.
Refuses to own how a number spreads over tokens (`credit`), and whether a group of one may be
trained on (the method row refuses it; here it simply has advantage 0).

A sample that is not valid has advantage exactly 0 and is in no statistic. Sums run over deviations
from the smallest reward, so that a near tie keeps all its digits. Everything is float64 and comes
back as float64: reward_PG may have any real dtype, and the rewards themselves are not changed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_mask, check_shapes


class _Group(NamedTuple):
    deviation_PG: Tensor  # reward minus the group's smallest, 0 where not valid
    range_P: Tensor  # largest minus smallest; 1 where dead
    count_P: Tensor  # valid samples
    live_PG: Tensor  # valid and in a group with spread


def dead_groups(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Say which groups have no spread: max - min = 0 over the valid rewards.

    Decided by the range and never by the std: eight float32 copies of 0.7 have std 6e-8.
    A gap of 1e-7 is a gap. Groups with one valid reward or none are dead.
    Shapes: reward_PG, valid_PG (bool) -> dead_P (bool).
    Errors: SurefootError if a valid reward is not finite.
    """
    low_P, high_P = _extremes(_checked(reward_PG, valid_PG), valid_PG)
    return ~(high_P > low_P)


def no_baseline(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Use the reward itself: A = r, also in groups whose rewards are all equal (REINFORCE).

    Shapes: reward_PG, valid_PG -> advantage_PG (float64).
    """
    reward_PG = _checked(reward_PG, valid_PG)
    return torch.where(valid_PG, reward_PG, 0.0)


def batch_mean(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Subtract the mean over all valid rewards of the batch: A = r - mean(r).

    A group whose rewards are all equal keeps its signal: it differs from the batch.
    One valid reward in the whole batch, or rewards that are all equal: exactly 0.
    Shapes: reward_PG, valid_PG -> advantage_PG (float64).
    """
    reward_PG = _checked(reward_PG, valid_PG)
    whole = _group(reward_PG.reshape(1, -1), valid_PG.reshape(1, -1))
    return _centered(whole).reshape(reward_PG.shape)


def group_mean(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Subtract the mean of the group: A = r - mean(r of the group) (arXiv:2503.20783).

    Dead groups, and groups with fewer than two valid rewards: exactly 0.
    Shapes: reward_PG, valid_PG -> advantage_PG (float64), summing to 0 in each group.
    """
    return _centered(_group(_checked(reward_PG, valid_PG), valid_PG))


def leave_one_out(
    reward_PG: Tensor, *, valid_PG: Tensor, center: Literal["mean", "median"] = "mean"
) -> Tensor:
    """Subtract the centre of the *other* rewards of the group (arXiv:2402.14740).

    mean:   A_i = r_i - mean of the others = n/(n-1) (r_i - mean), n valid rewards
    median: A_i = r_i - median of the others; of an even number, the mean of the two middle ones
    Dead groups, and groups with fewer than two valid rewards: exactly 0.
    Shapes: reward_PG, valid_PG -> advantage_PG (float64).
    """
    reward_PG = _checked(reward_PG, valid_PG)
    group = _group(reward_PG, valid_PG)
    if center == "mean":
        count_P1 = group.count_P[:, None]
        total_P1 = group.deviation_PG.sum(1, keepdim=True)
        others_P1 = (count_P1 - 1).clamp(min=1)
        advantage_PG = (count_P1 * group.deviation_PG - total_P1) / others_P1
    elif center == "median":
        advantage_PG = _against_median_of_others(group, valid_PG)
    else:
        raise SurefootError(f"center is {center!r}; it must be 'mean' or 'median'.")
    return torch.where(group.live_PG, advantage_PG, 0.0)


def length_weighted(
    reward_PG: Tensor, length_PG: Tensor, *, valid_PG: Tensor
) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the group weighed by length: b = sum(n r) / sum(n) (arXiv:2505.23585).

    Dead groups: exactly 0. So are groups of empty completions, which have no gradient anyway.
    Shapes: reward_PG, length_PG (tokens), valid_PG (bool) -> advantage_PG, baseline_P (float64).
    """
    check_shapes(PG=(reward_PG, length_PG, valid_PG))
    group = _group(_checked(reward_PG, valid_PG), valid_PG)
    low_P, _ = _extremes(reward_PG.double(), valid_PG)
    weight_PG = torch.where(valid_PG, length_PG.double(), 0.0)
    total_P = weight_PG.sum(1)
    above_P = (weight_PG * group.deviation_PG).sum(1) / total_P.clamp(min=1)
    live_PG = group.live_PG & (total_P > 0)[:, None]
    advantage_PG = torch.where(live_PG, group.deviation_PG - above_P[:, None], 0.0)
    return advantage_PG, torch.where(valid_PG.any(1), low_P + above_P, 0.0)


def against_greedy(reward_PG: Tensor, greedy_P: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Subtract the reward of the prompt's greedy completion: A = r - r_greedy (arXiv:2310.10505).

    A prompt whose greedy completion has no reward (NaN) has nothing to compare with: exactly 0.
    Shapes: reward_PG, greedy_P, valid_PG (bool) -> advantage_PG (float64).
    """
    check_shapes(PG=(reward_PG, valid_PG), P=(greedy_P,))
    reward_PG = _checked(reward_PG, valid_PG)
    known_PG = valid_PG & torch.isfinite(greedy_P)[:, None]
    return torch.where(known_PG, reward_PG - greedy_P.double()[:, None], 0.0)


def scale_by_group_mean(
    advantage_PG: Tensor, reward_PG: Tensor, *, valid_PG: Tensor, eps: float
) -> Tensor:
    """Divide by the mean reward of the group: A / (mean(r) + eps) (MaxRL, arXiv:2602.02710).

    A group whose mean is not above 0 has no success to learn from: exactly 0.
    Shapes: advantage_PG, reward_PG, valid_PG (bool) -> advantage_PG (float64).
    """
    if eps < 0:
        raise SurefootError(f"eps is added to a mean and must be >= 0, not {eps}.")
    check_shapes(PG=(advantage_PG, reward_PG, valid_PG))
    reward_PG = torch.where(valid_PG, _checked(reward_PG, valid_PG), 0.0)
    mean_P1 = reward_PG.sum(1, keepdim=True) / valid_PG.sum(1, keepdim=True).clamp(min=1)
    divisor_P1 = torch.where(mean_P1 > 0, mean_P1 + eps, 1.0)
    return torch.where(valid_PG & (mean_P1 > 0), advantage_PG.double() / divisor_P1, 0.0)


def scale_by_group_std(
    advantage_PG: Tensor, reward_PG: Tensor, *, valid_PG: Tensor, ddof: int, eps: float
) -> Tensor:
    """Divide by the spread of the group's rewards: A / (std(r of the group) + eps).

    A dead group has no std, and its advantages stay as they are: 0 where the baseline is the group
    itself, and a signal of ordinary size (not 1/eps) under any other baseline.
    ddof: 1 sample std, 0 population std. eps: in units of reward.
    Shapes: advantage_PG, reward_PG, valid_PG -> advantage_PG (float64).
    """
    if ddof not in (0, 1) or eps < 0:
        raise SurefootError(
            f"A group std needs ddof 0 or 1 and eps >= 0, not ddof={ddof}, eps={eps}."
        )
    check_shapes(PG=(advantage_PG, reward_PG, valid_PG))
    group = _group(_checked(reward_PG, valid_PG), valid_PG)
    # In units of the range, so that squares of tiny gaps do not underflow.
    unit_PG = _centered(group) / group.range_P[:, None]
    freedom_P = (group.count_P - ddof).clamp(min=1)
    std_P = group.range_P * (unit_PG.square().sum(1) / freedom_P).sqrt()
    divisor_PG = torch.where(group.live_PG, std_P[:, None] + eps, 1.0)
    return torch.where(valid_PG, advantage_PG.double() / divisor_PG, 0.0)


def group_normalized(reward_PG: Tensor, *, valid_PG: Tensor, ddof: int, eps: float) -> Tensor:
    """Score within the group: A = (r - mean) / (std + eps) (arXiv:2402.03300 section 4.1.2).

    Dead groups, and groups with fewer than two valid rewards: exactly 0, with any eps.
    Shapes: reward_PG, valid_PG -> advantage_PG (float64).
    """
    advantage_PG = group_mean(reward_PG, valid_PG=valid_PG)
    return scale_by_group_std(advantage_PG, reward_PG, valid_PG=valid_PG, ddof=ddof, eps=eps)


def _checked(reward_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """Rewards as float64, or a refusal: a non-finite reward is a missing one, not a valid one."""
    check_shapes(PG=(reward_PG, valid_PG))
    check_mask(valid_PG)
    reward_PG = reward_PG.double()
    if not bool((torch.isfinite(reward_PG) | ~valid_PG).all()):
        raise SurefootError(
            "A reward that valid_PG calls valid is NaN or infinite; a reward that does not exist "
            "is a missing one: set valid_PG to false there."
        )
    return reward_PG


def _extremes(reward_PG: Tensor, valid_PG: Tensor) -> tuple[Tensor, Tensor]:
    infinity = float("inf")
    low_P = torch.where(valid_PG, reward_PG, infinity).amin(1)
    high_P = torch.where(valid_PG, reward_PG, -infinity).amax(1)
    return low_P, high_P


def _group(reward_PG: Tensor, valid_PG: Tensor) -> _Group:
    low_P, high_P = _extremes(reward_PG, valid_PG)
    live_P = high_P > low_P
    live_PG = valid_PG & live_P[:, None]
    return _Group(
        deviation_PG=torch.where(live_PG, reward_PG - low_P[:, None], 0.0),
        range_P=torch.where(live_P, high_P - low_P, 1.0),
        count_P=valid_PG.sum(1),
        live_PG=live_PG,
    )


def _centered(group: _Group) -> Tensor:
    mean_P = group.deviation_PG.sum(1) / group.count_P.clamp(min=1)
    return torch.where(group.live_PG, group.deviation_PG - mean_P[:, None], 0.0)


def _against_median_of_others(group: _Group, valid_PG: Tensor) -> Tensor:
    """Deviation minus the median of the others; only the values of live samples mean anything."""
    key_PG = torch.where(valid_PG, group.deviation_PG, float("inf"))
    sorted_PG, order_PG = key_PG.sort(dim=1, stable=True)
    rank_PG = order_PG.argsort(dim=1)
    # Taking out the sample itself shifts every later value of the sorted group by one place.
    middle = []
    for place_P in ((group.count_P - 2) // 2, (group.count_P - 1) // 2):
        place_P1 = place_P.clamp(min=0)[:, None]
        place_PG = torch.where(place_P1 < rank_PG, place_P1, place_P1 + 1)
        middle.append(sorted_PG.gather(1, place_PG.clamp(max=sorted_PG.shape[1] - 1)))
    below_PG, above_PG = middle
    return (group.deviation_PG - below_PG + (group.deviation_PG - above_PG)) / 2
