"""Baselines and scales: hand numbers, dead groups, missing samples, symmetries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective import group, selection

NAN = float("nan")


def normalized(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    return group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=1e-4)


def median(reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    return group.leave_one_out(reward_PG, valid_PG=valid_PG, center="median")


RELATIVE = [group.group_mean, group.leave_one_out, median, normalized]
EVERY = [*RELATIVE, group.no_baseline, group.batch_mean]


def rewards(*rows: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rewards and which are valid: NaN is a missing one."""
    reward_PG = torch.tensor(rows, dtype=dtype)
    return reward_PG, ~reward_PG.isnan()


def close(got: Tensor, want: list[list[float]]) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_hand_numbers_of_one_group() -> None:
    # r = 3 1 2 6: mean 3; deviations 0 -2 -1 3; squares sum to 14.
    reward_PG, valid_PG = rewards([3.0, 1.0, 2.0, 6.0])
    close(group.group_mean(reward_PG, valid_PG=valid_PG), [[0, -2, -1, 3]])
    # Means of the others: 9/3 = 3, 11/3, 10/3, 6/3 = 2.
    close(group.leave_one_out(reward_PG, valid_PG=valid_PG), [[0, -8 / 3, -4 / 3, 4]])
    # Medians of the others: of {1,2,6} 2, of {3,2,6} 3, of {3,1,6} 3, of {3,1,2} 2.
    close(median(reward_PG, valid_PG=valid_PG), [[1, -2, -1, 4]])
    sample = math.sqrt(14 / 3) + 0.5
    close(
        group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=0.5),
        [[0, -2 / sample, -1 / sample, 3 / sample]],
    )
    population = math.sqrt(14 / 4)
    close(
        group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=0, eps=0.0),
        [[0, -2 / population, -1 / population, 3 / population]],
    )


def test_median_of_an_even_number_of_others() -> None:
    # r = 0 1 4 9 16. Others of 0: {1,4,9,16}, middle 4 and 9, median 6.5; of 1: {0,4,9,16} 6.5;
    # of 4: {0,1,9,16} 5; of 9: {0,1,4,16} 2.5; of 16: {0,1,4,9} 2.5.
    reward_PG, valid_PG = rewards([0.0, 1.0, 4.0, 9.0, 16.0])
    close(median(reward_PG, valid_PG=valid_PG), [[-6.5, -5.5, -1.0, 6.5, 13.5]])


def test_batch_baselines_keep_the_signal_of_a_group_without_spread() -> None:
    # Batch 1 1 1 | 0 1 missing: mean 4/5.
    reward_PG, valid_PG = rewards([1.0, 1.0, 1.0], [0.0, 1.0, NAN])
    close(group.batch_mean(reward_PG, valid_PG=valid_PG), [[0.2, 0.2, 0.2], [-0.8, 0.2, 0.0]])
    close(group.no_baseline(reward_PG, valid_PG=valid_PG), [[1, 1, 1], [0, 1, 0]])


def test_a_scale_uses_the_rewards_and_not_the_advantages() -> None:
    # Batch mean 2.5 of 1 3 | 2 4; each group has sample std sqrt(2).
    reward_PG, valid_PG = rewards([1.0, 3.0], [2.0, 4.0])
    advantage_PG = group.batch_mean(reward_PG, valid_PG=valid_PG)
    scaled = group.scale_by_group_std(advantage_PG, reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0)
    root = math.sqrt(2)
    close(scaled, [[-1.5 / root, 0.5 / root], [-0.5 / root, 1.5 / root]])


def test_a_group_without_std_is_not_scaled() -> None:
    # Batch mean of 1 1 | 0 0 is 1/2: no division by eps = 0 may touch it.
    reward_PG, valid_PG = rewards([1.0, 1.0], [0.0, 0.0])
    advantage_PG = group.batch_mean(reward_PG, valid_PG=valid_PG)
    scaled = group.scale_by_group_std(advantage_PG, reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0)
    close(scaled, [[0.5, 0.5], [-0.5, -0.5]])


@pytest.mark.parametrize("advantage", RELATIVE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 64])
def test_equal_rewards_give_exactly_zero(
    advantage: Callable[..., Tensor], dtype: torch.dtype, size: int
) -> None:
    # In float32, eight copies of 0.7 have std 6e-8 and a mean that is not 0.7.
    values = [0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 1.1, -1e9, 1 / 3]
    reward_PG, valid_PG = rewards(*([value] * size for value in values), dtype=dtype)
    assert torch.equal(advantage(reward_PG, valid_PG=valid_PG), torch.zeros(9, size).double())
    assert group.dead_groups(reward_PG, valid_PG=valid_PG).all()


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-4, 1.0])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_give_exactly_zero_with_any_eps(ddof: int, eps: float) -> None:
    reward_PG, valid_PG = rewards([0.7] * 8, [0.7] + [NAN] * 7, [NAN] * 8, dtype=torch.float32)
    got = group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=ddof, eps=eps)
    assert torch.equal(got, torch.zeros(3, 8).double())


def test_dead_is_decided_by_the_range_of_the_valid_rewards() -> None:
    reward_PG, valid_PG = rewards(
        [0.5, 0.5, 0.5], [0.5, 0.5, 0.5 + 1e-7], [0.5, NAN, 0.5], [NAN, 1.0, NAN], [NAN] * 3
    )
    assert group.dead_groups(reward_PG, valid_PG=valid_PG).tolist() == [True, False] + [True] * 3
    kept = selection.informative(reward_PG, valid_PG=valid_PG)
    assert kept.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("gap", [1e-7, 1e-12, 2.0**-53])
def test_a_near_tie_keeps_its_digits(gap: float) -> None:
    # 0.5 0.5 0.5 0.5+g: mean of the others 0.5 for the odd one, 0.5 + g/3 for the rest.
    gap = (0.5 + gap) - 0.5
    reward_PG, valid_PG = rewards([0.5, 0.5, 0.5, 0.5 + gap])
    got = group.leave_one_out(reward_PG, valid_PG=valid_PG)
    assert got[0, 3].item() == gap
    torch.testing.assert_close(got[0, 0].item(), -gap / 3, rtol=1e-12, atol=0.0)
    # The z-score of one odd reward of four is 3/2 at any gap: (n-1)/sqrt(n).
    z = group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0)
    torch.testing.assert_close(z[0].tolist(), [-0.5, -0.5, -0.5, 1.5], rtol=1e-12, atol=0.0)


def test_a_tiny_gap_does_not_underflow() -> None:
    # Squares of 1e-200 are 0 in float64; the z-score of two rewards is still +-1/sqrt(2).
    reward_PG, valid_PG = rewards([0.0, 1e-200])
    z = group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0)
    torch.testing.assert_close(z[0, 1].item(), math.sqrt(0.5), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [0.0, 0.35 + 1e-6, 0.35 + 1e-7])
def test_no_advantage_exceeds_what_one_odd_reward_can_reach(dtype: torch.dtype, odd: float) -> None:
    reward_PG, valid_PG = rewards([0.35] * 7 + [odd], dtype=dtype)
    z = group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=0, eps=0.0)
    assert z.abs().max() <= math.sqrt(7) * (1 + 1e-12)
    assert z.abs().max() >= math.sqrt(7) * (1 - 1e-12)


@pytest.mark.parametrize("advantage", EVERY)
def test_a_missing_sample_is_as_if_it_were_not_there(advantage: Callable[..., Tensor]) -> None:
    full_PG, _ = rewards([0.1, NAN, 0.9, 0.4, NAN], [0.3, 0.2, NAN, 0.2, NAN])
    valid_PG = ~full_PG.isnan()
    short_PG, all_PG = rewards([0.1, 0.9, 0.4], [0.3, 0.2, 0.2])
    want_PG = advantage(short_PG, valid_PG=all_PG)
    for junk in (NAN, float("inf"), -1e30, 0.0, 0.9):
        got_PG = advantage(torch.where(valid_PG, full_PG, junk), valid_PG=valid_PG)
        torch.testing.assert_close(got_PG[valid_PG].reshape(2, 3), want_PG, rtol=1e-12, atol=1e-15)
        assert torch.equal(got_PG[~valid_PG], torch.zeros(4).double())


@pytest.mark.parametrize("advantage", EVERY)
def test_order_of_samples_and_of_groups_does_not_matter(advantage: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    reward_PG = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    valid_PG = torch.rand(5, 7, generator=generator) < 0.8
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(7, generator=generator)
    want_PG = advantage(reward_PG, valid_PG=valid_PG)[rows][:, columns]
    got_PG = advantage(reward_PG[rows][:, columns], valid_PG=valid_PG[rows][:, columns])
    torch.testing.assert_close(got_PG, want_PG, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("advantage", [*RELATIVE, group.batch_mean])
def test_a_constant_added_to_every_reward_does_not_matter(advantage: Callable[..., Tensor]) -> None:
    reward_PG, valid_PG = rewards([0.25, 0.5, 1.0, NAN], [2.0, 2.0, 8.0, 0.0])
    want_PG = advantage(reward_PG, valid_PG=valid_PG)
    torch.testing.assert_close(advantage(reward_PG + 64.0, valid_PG=valid_PG), want_PG)


def test_scaling_the_rewards() -> None:
    reward_PG, valid_PG = rewards([0.25, 0.5, 1.0, NAN], [2.0, 2.0, 8.0, 0.0])
    for advantage in (*EVERY[:3], group.no_baseline, group.batch_mean):
        torch.testing.assert_close(
            advantage(8 * reward_PG, valid_PG=valid_PG), 8 * advantage(reward_PG, valid_PG=valid_PG)
        )
    torch.testing.assert_close(
        group.group_normalized(8 * reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0),
        group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=0.0),
    )


@pytest.mark.parametrize("advantage", [group.group_mean, group.leave_one_out, normalized])
def test_advantages_of_a_group_sum_to_zero(advantage: Callable[..., Tensor]) -> None:
    reward_PG, valid_PG = rewards([0.1, 0.7, NAN, 0.3], [1.0, 0.0, 0.0, 0.0])
    sums = advantage(reward_PG, valid_PG=valid_PG).sum(1)
    torch.testing.assert_close(sums, torch.zeros(2).double(), rtol=0.0, atol=1e-12)


def test_leave_one_out_is_the_centered_reward_times_n_over_n_minus_one() -> None:
    reward_PG, valid_PG = rewards([0.1, 0.7, NAN, 0.3], [1.0, 0.0, 0.0, 0.5])
    factor = torch.tensor([[3 / 2], [4 / 3]]).double()
    torch.testing.assert_close(
        group.leave_one_out(reward_PG, valid_PG=valid_PG),
        factor * group.group_mean(reward_PG, valid_PG=valid_PG),
    )


def test_groups_do_not_see_each_other() -> None:
    reward_PG, valid_PG = rewards([0.1, 0.7, 0.3], [5.0, 1.0, NAN], [0.2, 0.2, 0.2])
    for advantage in RELATIVE:
        whole_PG = advantage(reward_PG, valid_PG=valid_PG)
        for row in range(3):
            alone_PG = advantage(reward_PG[row : row + 1], valid_PG=valid_PG[row : row + 1])
            assert torch.equal(whole_PG[row : row + 1], alone_PG)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_valid_reward_that_is_not_finite_is_refused(bad: float) -> None:
    reward_PG = torch.tensor([[1.0, bad]])
    with pytest.raises(SurefootError, match="valid_PG"):
        group.group_mean(reward_PG, valid_PG=torch.ones(1, 2).bool())


def test_wrong_shapes_masks_and_options_are_refused() -> None:
    reward_PG, valid_PG = rewards([1.0, 0.0])
    with pytest.raises(SurefootError, match="Axis G is 2 in one argument and 3"):
        group.group_mean(reward_PG, valid_PG=torch.ones(1, 3).bool())
    with pytest.raises(SurefootError, match=r"PG = \(2,\), \(1, 2\)"):
        group.group_mean(reward_PG[0], valid_PG=valid_PG)
    with pytest.raises(SurefootError, match="bool"):
        group.group_mean(reward_PG, valid_PG=torch.ones(1, 2))
    with pytest.raises(SurefootError, match="center"):
        group.leave_one_out(reward_PG, valid_PG=valid_PG, center="mode")  # type: ignore[arg-type]
    with pytest.raises(SurefootError, match="ddof"):
        group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=2, eps=0.0)
    with pytest.raises(SurefootError, match="eps"):
        group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=-1.0)
