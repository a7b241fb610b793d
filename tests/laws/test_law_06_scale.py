"""Law 6: the scale is explicit: what a row says is what divides, and nothing else does."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.errors import RecipeError
from surefoot.loops.credit import BASELINES, SCALES
from surefoot.methods import Method, rows, with_fields


def advantages(row: Method, rewards: list[float]) -> list[float]:
    reward_PG = torch.tensor([rewards], dtype=torch.float64)
    valid_PG = torch.ones_like(reward_PG, dtype=torch.bool)
    centered_PG = BASELINES[row.baseline.kind](row.baseline, reward_PG, valid_PG)
    scaled_PG = SCALES[row.scale.kind](row.scale, centered_PG, reward_PG, valid_PG)
    return scaled_PG[0].tolist()


def changed(name: str, **fields: object) -> Method:
    row = with_fields(rows()[name], fields)
    assert isinstance(row, Method)
    return row


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_group_std_is_ddof_1_and_eps_1e_4_unless_the_row_says_otherwise(name: str) -> None:
    # Rewards 1 0 0 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so 0.75 / (0.5 + 1e-4).
    got = advantages(changed(name), [1.0, 0.0, 0.0, 0.0])
    assert got == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], rel=1e-12)
    # Population variance 3/16.
    got = advantages(changed(name, scale={"ddof": 0, "eps": 0.0}), [1.0, 0.0, 0.0, 0.0])
    assert got == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-12)
    got = advantages(changed(name, scale="none"), [1.0, 0.0, 0.0, 0.0])
    assert got == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_rows_without_a_scale_keep_the_rewards_unit(name: str) -> None:
    one = advantages(changed(name), [3.0, 1.0, 1.0, 7.0])
    ten = advantages(changed(name), [30.0, 10.0, 10.0, 70.0])
    assert ten == pytest.approx([10 * value for value in one])
    assert max(abs(value) for value in one) > 1.0


@pytest.mark.parametrize("gap", [1e-3, 1e-6])
def test_a_near_tie_is_held_by_eps(gap: float) -> None:
    # Two rewards: deviations gap/2, sample std gap/sqrt(2).
    got = advantages(changed("grpo"), [0.5, 0.5 + gap])
    want = (gap / 2) / (gap / math.sqrt(2) + 1e-4)
    assert got == pytest.approx([-want, want], rel=1e-6)


def test_dividing_by_a_group_that_is_not_the_baseline_is_refused() -> None:
    with pytest.raises(RecipeError, match="scale"):
        changed("reinforce", scale="group_std", group_size=8)
