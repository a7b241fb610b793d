"""Law 5: missing is missing; a sample without a score is as if it were not there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.hand import apart, credited, group, no_kl, row, stood, take_step

from surefoot.learner.batch import make_batch
from surefoot.methods import FAMILIES, Method, is_group_relative, min_group, online_rows
from surefoot.records import Group, ScoreStatus

FAILED = ScoreStatus.INFRA_ERROR
REDUCTIONS = tuple(FAMILIES["reduce"].kinds)


def advantages(method: Method, *groups: Group) -> list[list[float]]:
    batch = make_batch(groups)
    return credited(method, batch).advantage_PG.tolist()  # type: ignore[no-any-return]


def test_the_baseline_is_made_of_the_others() -> None:
    """Hand numbers: 1, missing, 0, 0."""
    scores = [1.0, FAILED, 0.0, 0.0]
    said = {
        "reinforce": [1.0, 0.0, 0.0, 0.0],
        # Against the mean of the two others: 0, 1/2, 1/2.
        "rloo": [1.0, 0.0, -0.5, -0.5],
        # Deviations 2/3, -1/3, -1/3; sample std of (1, 0, 0) is 1/sqrt(3).
        "grpo": [x / (1 / math.sqrt(3) + 1e-4) for x in (2 / 3, 0.0, -1 / 3, -1 / 3)],
    }
    for name, want in said.items():
        method = no_kl(name, group_size=4)
        assert advantages(method, group(scores))[0] == pytest.approx(want, abs=1e-12), name


def test_the_batch_mean_leaves_them_out_too() -> None:
    method = no_kl("reinforce", group_size=3, min_group=1, baseline="batch")
    found = advantages(method, group([1.0, FAILED, 0.0]), group([0.5, FAILED, FAILED], index=1))
    assert found == [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_the_rest_of_the_group_is_as_if_it_were_not_there(name: str, reduce: str) -> None:
    """The whole step, with KL: missing beside four others, against a group of four."""
    whole = group([1.0, 0.0, 0.5, 0.0], lengths=[2, 3, 5, 4])
    other = group([0.0, 1.0, 1.0, 0.0], index=1, lengths=[3, 3, 2, 4])
    completions, scores = list(whole.completions), list(whole.scores or ())
    lost = group([0.0] * 5, index=3, lengths=[6] * 5)
    completions.insert(2, lost.completions[4])
    scores.insert(2, group([FAILED]).scores[0])  # type: ignore[index]
    torn = replace(whole, completions=tuple(completions), scores=tuple(scores))
    more = [*other.completions, lost.completions[1]]
    torn_other = replace(other, completions=tuple(more), scores=(*other.scores, scores[2]))  # type: ignore[misc]
    there = take_step(row(name, group_size=5, reduce=reduce), [torn, torn_other])
    gone = take_step(row(name, group_size=4, reduce=reduce), [whole, other])
    assert apart(there.gradient, gone.gradient) < 1e-5
    assert float(gone.gradient.norm()) > 0
    assert there.report.loss == pytest.approx(gone.report.loss, rel=1e-6, abs=1e-8)
    kept = there.credit.advantage_PG[there.standing.present_PG]
    assert torch.allclose(kept, gone.credit.advantage_PG.reshape(-1), rtol=0, atol=1e-12)
    assert float(there.credit.advantage_PG[0, 2]) == 0.0
    assert there.metrics["completions/absent"] == 2


@pytest.mark.parametrize(("size", "least"), [(2, 2), (3, 3), (4, 3), (6, 5), (8, 6), (16, 12)])
@pytest.mark.parametrize("name", online_rows())
def test_by_default_three_quarters_must_be_there(name: str, size: int, least: int) -> None:
    method = no_kl(name, group_size=size)
    assert min_group(method) == least
    for valid in range(size + 1):
        scores = [0.0, 1.0] * size
        told = [scores[i] if i < valid else FAILED for i in range(size)]
        standing = stood(method, make_batch([group(told)]))
        assert bool(standing.dropped_P[0]) == (valid < least), (valid, least)


def test_one_sample_is_enough_where_nothing_is_compared() -> None:
    assert min_group(no_kl("reinforce", group_size=1)) == 1
    assert min_group(no_kl("rloo", group_size=2)) == 2
    assert min_group(no_kl("rloo", group_size=8, min_group=2)) == 2


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_a_dropped_group_is_in_no_denominator(name: str, reduce: str) -> None:
    method = row(name, group_size=4, reduce=reduce)
    whole = group([1.0, 0.0, 0.5, 0.0])
    few = group([1.0, FAILED, FAILED, 0.0], index=1)
    alone, beside = take_step(method, [whole]), take_step(method, [whole, few])
    assert apart(alone.gradient, beside.gradient) < 1e-5
    assert beside.metrics["groups/dropped"] == 1 and alone.metrics["groups/dropped"] == 0
    assert beside.metrics["frac_reward_zero_std"] == 0.0


@pytest.mark.parametrize("name", online_rows())
def test_a_whole_step_of_missing_scores_trains_nothing(name: str) -> None:
    step = take_step(row(name, group_size=4), [group([FAILED] * 4), group([FAILED] * 4, index=1)])
    assert step.report.steps == 0 and not step.credit.signal_found
    assert float(step.gradient.norm()) == 0
    # Not known is absent, never 0.
    for key in ("frac_reward_zero_std", "advantage/mean", "loss", "kl"):
        assert key not in step.metrics


def test_a_missing_score_is_never_a_zero() -> None:
    """The mistake this law is about: 0 for missing would push the others up."""
    method = no_kl("rloo", group_size=4)
    missing = advantages(method, group([1.0, 1.0, 1.0, FAILED]))
    zero = advantages(method, group([1.0, 1.0, 1.0, 0.0]))
    assert missing == [[0.0] * 4] and zero[0][0] == pytest.approx(1 / 3)
    assert is_group_relative(method)
