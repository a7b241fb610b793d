"""Law 6: scale is explicit: the group's spread by ddof 1 and eps 1e-4, unless the row says so."""

from __future__ import annotations

import math

import pytest
import torch
from support.hand import credited, group, no_kl

from surefoot.learner.batch import make_batch
from surefoot.methods import GroupStd, Method, describe, online_rows
from surefoot.records import Group, ScoreStatus

WHITENED = {
    "reinforce_pp": "token",
    "reinforce_pp_baseline": "sequence",
    "gdpo": "sequence",
    "ppo": "token",
    "vapo": "token",
    "ppo_warm": "token",
    "grpo_critic": "token",
}
SCALED = [
    name
    for name, row in online_rows().items()
    if row.scale.kind == "group_std" and name not in WHITENED  # type: ignore[union-attr]
]
# A greedy score or a history stays what it is when a step's rewards grow.
PLAIN = [
    name
    for name, row in online_rows().items()
    if row.scale.kind == "none"  # type: ignore[union-attr]
    and name not in WHITENED
    and row.baseline.kind not in ("greedy", "history")  # type: ignore[union-attr]
]


def advantages(method: Method, *groups: Group) -> list[list[float]]:
    batch = make_batch(groups)
    return credited(method, batch).advantage_PG.tolist()  # type: ignore[no-any-return]


def test_the_rows_concerned() -> None:
    assert {"grpo", "dapo"} <= set(SCALED) and {"reinforce", "rloo"} <= set(PLAIN)
    assert online_rows()["gdpo"].scale == GroupStd(ddof=1, eps=1e-4, per_part=True)  # type: ignore[union-attr]
    for name in SCALED:
        assert online_rows()[name].scale == GroupStd(ddof=1, eps=1e-4, per_part=False)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SCALED)
def test_the_defaults_by_hand(name: str) -> None:
    # 3, 1, 1, -1: mean 1, squares 4 + 0 + 0 + 4 over 3.
    std = math.sqrt(8 / 3)
    want = [2 / (std + 1e-4), 0.0, 0.0, -2 / (std + 1e-4)]
    found = advantages(no_kl(name, group_size=4), group([3.0, 1.0, 1.0, -1.0]))
    assert found[0] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", SCALED)
def test_a_row_that_says_otherwise(name: str) -> None:
    scores = group([3.0, 1.0, 1.0, -1.0])
    # Population spread sqrt(8/4), and an eps that is felt.
    method = no_kl(name, group_size=4, scale={"ddof": 0, "eps": 0.5})
    top = 2 / (math.sqrt(2) + 0.5)
    assert advantages(method, scores)[0] == pytest.approx([top, 0, 0, -top], rel=1e-12)
    assert describe(method)["scale"] == {"kind": "group_std", "ddof": 0, "eps": 0.5}
    none = no_kl(name, group_size=4, scale="none")
    assert advantages(none, scores) == [[2.0, 0.0, 0.0, -2.0]]


@pytest.mark.parametrize("name", SCALED)
def test_the_spread_is_that_of_the_valid_scores(name: str) -> None:
    torn = group([2.0, ScoreStatus.INFRA_ERROR, 0.0, 1.0])
    # 2, 0, 1: mean 1, squares 2 over 2.
    want = [1 / 1.0001, 0.0, -1 / 1.0001, 0.0]
    assert advantages(no_kl(name, group_size=4), torn)[0] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", SCALED)
def test_each_group_has_its_own_spread(name: str) -> None:
    """Scores a hundred times as far apart, shifted by a thousand: nearly the same advantages."""
    near, far = group([0.5, 0.25]), group([1050.0, 1025.0], index=1)
    method = no_kl(name, group_size=2, scale={"eps": 0.0})
    first, second = advantages(method, near, far)
    assert first == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert second == pytest.approx(first)
    assert advantages(method, near) == [first]


@pytest.mark.parametrize("name", PLAIN)
def test_rows_without_scale_follow_the_rewards(name: str) -> None:
    """Ten times the reward is ten times the advantage: nothing is normalised behind one's back."""
    method = no_kl(name, group_size=4)
    one, ten = (
        torch.tensor(advantages(method, group([3.0 * k, k, k, -k])), dtype=torch.float64)
        for k in (1.0, 10.0)
    )
    assert float(one.abs().max()) > 0
    assert torch.allclose(ten, 10 * one, rtol=1e-12)


def test_the_spread_of_the_step_by_hand() -> None:
    """lite_ppo: 2, 0 and 1, 1 around their group means, over the deviation of 2, 0, 1, 1."""
    one, other = group([2.0, 0.0]), group([1.0, 1.0], index=1)
    std = math.sqrt(2 / 3)
    top = 1 / (std + 1e-4)
    method = no_kl("lite_ppo", group_size=2)
    assert advantages(method, one, other) == [pytest.approx([top, -top]), [0.0, 0.0]]
    # Of the centered rewards 1, -1, 0, 0 it is the same sum of squares.
    centered = no_kl("lite_ppo", group_size=2, scale={"of": "centered"})
    assert advantages(centered, one, other)[0] == pytest.approx([top, -top])


def test_the_mean_of_the_group_by_hand() -> None:
    """maxrl: one success of four is worth 3, of two 1; nothing is learned from none."""
    groups = [
        group(scores, index=i) for i, scores in enumerate(([1, 0, 0, 0], [1, 1, 0, 0], [0] * 4))
    ]
    found = advantages(no_kl("maxrl", group_size=4, scale={"eps": 0.0}), *groups)
    assert found == [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", online_rows())
def test_a_row_whitens_only_if_it_says_so(name: str) -> None:
    row = online_rows()[name]
    assert isinstance(row, Method) and row.whiten.kind == WHITENED.get(name, "none")


@pytest.mark.parametrize("name", [n for n in WHITENED if online_rows()[n].critic.kind == "none"])
def test_whitening_by_hand(name: str) -> None:
    # 3, 1, 1, -1 in completions of equal length: mean 1, and 8 / 4 for the population.
    four = group([3.0, 1.0, 1.0, -1.0], lengths=[3, 3, 3, 3])
    found = advantages(no_kl(name, group_size=4), four)
    assert found[0] == pytest.approx([math.sqrt(2), 0, 0, -math.sqrt(2)])


def test_whitening_over_the_step_moves_no_dead_group_of_a_group_relative_row() -> None:
    """With lengths that differ, the step's mean is not 0; equal rewards stay at 0 all the same."""
    for weight in ("sequence", "token"):
        method = no_kl("reinforce_pp_baseline", group_size=2, whiten=weight)
        found = advantages(method, group([1.0, 1.0]), group([1.0, 0.0], index=1))
        assert found[0] == [0.0, 0.0] and found[1][0] > 0 > found[1][1]
