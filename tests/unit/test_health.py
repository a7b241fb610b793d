"""The critic's health in a step's row: its intervals, what they are about, and when absent."""

from __future__ import annotations

import pytest
import torch
from support.hand import credited, group, no_kl, stood, take_step
from torch import Tensor

from surefoot.learner.batch import Batch, make_batch
from surefoot.learner.update import Facts
from surefoot.loops.health import critic_metrics
from surefoot.loops.metrics import Metrics
from surefoot.records import ScoreStatus

BOTH = ("critic/explained_variance", "critic/value_add")
LIMITS = [f"{name}_{end}" for name in BOTH for end in ("low", "high")]
# Enough groups of different kinds that two sets of draws differ in their extremes.
SCORES = (
    [1.0, 0.0, 0.0, 1.0],
    [0.0, 0.0, 1.0, 0.0],
    [1.0, 1.0, 0.0, 1.0],
    [0.0] * 4,
    [1.0] * 4,
    [0.5, 0.0, 0.0, 1.0],
    [0.0, 0.25, 0.0, 0.0],
    [1.0, 1.0, 1.0, 0.0],
)


def batch_of(*scores: list[float], length: int | None = None) -> Batch:
    return make_batch(
        [
            group(row, index=p, lengths=None if length is None else [length] * len(row))
            for p, row in enumerate(scores)
        ]
    )


def health(batch: Batch, value_BT: Tensor, *, seed: int = 0, step: int = 1) -> Metrics:
    size = len(batch.groups[0].completions)
    method = no_kl("ppo", group_size=size, min_group=1)
    report = take_step(method, batch).report
    facts = Facts(value_BT=value_BT)
    credit, standing = credited(method, batch, facts), stood(method, batch)
    return critic_metrics(batch, standing, credit, facts, report, seed=seed, step=step)


def guess(batch: Batch) -> Tensor:
    """Values between 0 and 1 that differ from token to token."""
    count = batch.mask_BT.numel()
    return (torch.arange(count).double() * 0.37 % 1).reshape(batch.mask_BT.shape)


def returns(batch: Batch) -> Tensor:
    """The score from every token on, because it is paid at the last."""
    scores = [score.value for g in batch.groups for score in g.scores or ()]
    return torch.tensor(scores).double()[:, None].expand(batch.mask_BT.shape)


def test_limits_lie_around_the_numbers() -> None:
    batch = batch_of(*SCORES)
    found = health(batch, guess(batch))
    for name in BOTH:
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]


def test_a_perfect_critic_is_certain() -> None:
    batch = batch_of(*SCORES)
    found = health(batch, returns(batch))
    assert [found[name] for name in ("critic/explained_variance", *LIMITS[:2])] == [1.0] * 3
    assert [found[name] for name in ("critic/value_add", *LIMITS[2:])] == [0.0] * 3


def test_a_critic_that_says_one_number_explains_nothing_with_certainty() -> None:
    batch = batch_of(*SCORES)
    found = health(batch, torch.full(batch.mask_BT.shape, 0.25).double())
    seen = [found[name] for name in ("critic/explained_variance", *LIMITS[:2])]
    assert seen == pytest.approx([0.0] * 3, abs=1e-12)


def test_groups_are_drawn_by_seed_and_step() -> None:
    batch = batch_of(*SCORES)
    value_BT = guess(batch)
    first = health(batch, value_BT)
    assert health(batch, value_BT) == first
    for other in (health(batch, value_BT, seed=1), health(batch, value_BT, step=2)):
        assert [other[name] for name in BOTH] == [first[name] for name in BOTH]
        assert [other[name] for name in LIMITS] != [first[name] for name in LIMITS]


def test_a_single_group_has_numbers_without_limits() -> None:
    batch = batch_of([1.0, 0.0, 0.5, 0.0])
    found = health(batch, guess(batch))
    assert set(BOTH) <= set(found) and not set(LIMITS) & set(found)


def test_one_group_that_differs_inside_has_no_limits_of_value_add() -> None:
    # Leave-one-out leaves nothing of the others; the returns still differ between groups.
    batch = batch_of([1.0, 0.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4, [1.0] * 4)
    found = health(batch, guess(batch))
    assert set(LIMITS) & set(found) == set(LIMITS[:2]) and "critic/value_add" in found


def test_equal_returns_have_no_health_at_all() -> None:
    batch = batch_of([0.7] * 4, [0.7] * 4)
    assert not {*BOTH, *LIMITS} & set(health(batch, guess(batch)))


def test_without_a_group_it_is_the_batch_mean_that_is_compared_with() -> None:
    # One token each: the variance left over that of the returns, on both sides.
    batch = batch_of(*([score] for score in (1.0, 0.0, 0.25, 0.0, 1.0, 0.5)), length=1)
    found = health(batch, guess(batch))
    assert found["critic/value_add"] == pytest.approx(1 - found["critic/explained_variance"])
    high = found["critic/explained_variance_high"]
    assert found["critic/value_add_low"] == pytest.approx(1 - high)
    low = found["critic/explained_variance_low"]
    assert found["critic/value_add_high"] == pytest.approx(1 - low)


def test_what_is_absent_is_not_looked_at() -> None:
    told = [[*row[:3], ScoreStatus.INFRA_ERROR] for row in SCORES]
    batch = batch_of(*told)  # type: ignore[arg-type]
    value_BT = guess(batch)
    absent_B = torch.arange(batch.rows) % 4 == 3
    poisoned_BT = torch.where(absent_B[:, None] | ~batch.mask_BT, torch.nan, value_BT)
    assert health(batch, poisoned_BT) == health(batch, value_BT)
    assert set(LIMITS) <= set(health(batch, value_BT))


def test_a_value_that_is_no_number_is_not_hidden_behind_limits() -> None:
    batch = batch_of(*SCORES)
    value_BT = guess(batch)
    value_BT[0, 0] = torch.nan
    assert not {*BOTH, *LIMITS} & set(health(batch, value_BT))
