"""Law 9, its part in credit: what a length-stopped completion counts as."""

from __future__ import annotations

import pytest
import torch
from support.hand import CAP, apart, credited, group, no_kl, row, stood, take_step

from surefoot.learner.batch import make_batch
from surefoot.methods import FAMILIES, Method, online_rows
from surefoot.records import Group, ScoreStatus, StopReason

FAILED = ScoreStatus.INFRA_ERROR
STOP, CUT, BROKEN = StopReason.STOP, StopReason.LENGTH, StopReason.ERROR
REDUCTIONS = tuple(FAMILIES["reduce"].kinds)


def advantages(method: Method, *groups: Group) -> list[list[float]]:
    batch = make_batch(groups)
    return credited(method, batch).advantage_PG.tolist()  # type: ignore[no-any-return]


@pytest.mark.fault(35)
@pytest.mark.parametrize("name", online_rows())
def test_by_default_the_score_counts(name: str) -> None:
    method = no_kl(name, group_size=4)
    assert method.truncated.kind == "score"
    scores = [1.0, 0.0, 1.0, 0.0]
    cut = group(scores, stops=[STOP, CUT, CUT, STOP])
    assert advantages(method, cut) == advantages(method, group(scores))


@pytest.mark.fault(35)
def test_mask_takes_it_out_of_the_baseline() -> None:
    """Hand numbers: 1, 0 and a cut 1."""
    cut = group([1.0, 0.0, 1.0], stops=[STOP, STOP, CUT])
    said = {"mask": [1.0, -1.0, 0.0], "score": [0.5, -1.0, 0.5]}
    for kind, want in said.items():
        method = no_kl("rloo", group_size=3, min_group=2, truncated=kind)
        assert advantages(method, cut) == [want]


@pytest.mark.fault(35)
def test_floor_replaces_the_raw_score() -> None:
    cut = group([1.0, 0.0, 1.0], stops=[STOP, STOP, CUT])
    method = no_kl("rloo", group_size=3, truncated={"kind": "floor", "value": -2.0})
    # 1 - (0 - 2)/2, 0 - (1 - 2)/2, -2 - (1 + 0)/2.
    assert advantages(method, cut) == [[2.0, 0.5, -2.5]]


def test_shaping_comes_after_the_floor() -> None:
    cut = group([1.0, 0.0], lengths=[2, CAP], stops=[STOP, CUT])
    method = no_kl(
        "dapo",
        group_size=2,
        scale="none",
        truncated={"kind": "floor", "value": -2.0},
        shaping=[{"kind": "overlong", "cache": 5}],
    )
    # Rewards 1 and -2 - 1: mean -1.
    assert advantages(method, cut) == [[2.0, -2.0]]


def test_floor_does_not_score_what_has_no_score() -> None:
    cut = group([1.0, 0.0, FAILED], stops=[STOP, STOP, CUT])
    method = no_kl("rloo", group_size=3, min_group=2, truncated={"kind": "floor", "value": -2.0})
    assert advantages(method, cut) == [[1.0, -1.0, 0.0]]


def test_masking_is_not_missing_so_two_samples_keep_a_group() -> None:
    """Six of eight may be cut although min_group is six valid scores."""
    method = no_kl("rloo", group_size=8, truncated="mask")
    scores = [1.0, 0.0] * 4
    two = group(scores, stops=[STOP, STOP] + [CUT] * 6)
    one = group(scores, index=1, stops=[STOP] + [CUT] * 7)
    batch = make_batch([two, one])
    standing = stood(method, batch)
    assert standing.dropped_P.tolist() == [False, True]
    assert standing.present_PG.sum(1).tolist() == [2, 0]
    assert advantages(method, two, one)[0] == [1.0, -1.0] + [0.0] * 6


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_mask_takes_it_out_of_numerators_and_denominators(name: str, reduce: str) -> None:
    """With it, or without it in the group at all: the same loss and gradient."""
    lengths = [2, 3, 5, 4]
    whole = group([1.0, 0.0, 0.5, 0.0], lengths=lengths)
    cut = group(
        [1.0, 0.0, 0.5, 0.0, 1.0],
        lengths=[*lengths, CAP],
        stops=[STOP, STOP, STOP, STOP, CUT],
    )
    changes = {"reduce": reduce, "truncated": "mask"}
    there = take_step(row(name, group_size=5, **changes), [cut])
    gone = take_step(row(name, group_size=4, **changes), [whole])
    assert float(gone.gradient.norm()) > 0
    assert apart(there.gradient, gone.gradient) < 1e-5
    assert there.report.loss == pytest.approx(gone.report.loss, rel=1e-6, abs=1e-8)


@pytest.mark.fault(19)
@pytest.mark.parametrize("kind", ["score", "mask", "floor"])
@pytest.mark.parametrize("name", online_rows())
def test_what_the_engine_failed_to_give_is_never_trained(name: str, kind: str) -> None:
    """Even if somebody scored it: stop reason error is absent, and is not truncation."""
    changes: dict[str, object] = {"truncated": kind}
    if name == "gdpo" and kind == "floor":
        # A floor replaces the whole score, which parts scaled apart do not read.
        changes["scale"] = {"per_part": False}
    if name == "maxrl" and kind == "floor":
        # It divides by the group's mean, and refuses a floor below 0.
        changes["truncated"] = {"kind": "floor", "value": 0.0}
    method = no_kl(name, group_size=4, **changes)
    broken = group([1.0, 0.0, 0.5, 1.0], stops=[STOP, STOP, STOP, BROKEN])
    missing = group([1.0, 0.0, 0.5, FAILED])
    assert advantages(method, broken) == advantages(method, missing)
    step = take_step(method, [broken])
    assert step.standing.present_PG.tolist() == [[True, True, True, False]]
    assert torch.equal(step.gradient, take_step(method, [missing]).gradient)
