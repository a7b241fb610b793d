"""The table of what is built is the dispatch tables, no more and no less."""

from __future__ import annotations

import pytest

from surefoot.learner import loss
from surefoot.loops import compare, control, credit, standing
from surefoot.methods import BUILT, FAMILIES, Method, check_built, online_rows
from surefoot.objective import kl, reduce


@pytest.mark.parametrize(
    ("field", "dispatched"),
    [
        ("baseline", set(compare.BASELINES)),
        ("scale", set(compare.SCALES)),
        ("shaping", set(standing.SHAPINGS)),
        ("credit", set(credit.CREDITS)),
        ("gate", set(loss.GATES)),
        ("ratio", set(loss.RATIOS)),
        ("terms", {*loss.TERMS, "positive_nll", "stale_mask"}),
        ("correction", {"none", *loss.CORRECTIONS}),
        ("whiten", set(credit.WHITENS)),
        ("kl.controller", {"fixed", *control.CONTROLLERS}),
        ("reduce", set(reduce.KINDS)),
        ("kl.estimator", set(kl.ESTIMATORS)),
    ],
)
def test_built_is_what_is_dispatched(field: str, dispatched: set[str]) -> None:
    assert BUILT[field] == dispatched


@pytest.mark.parametrize("name", online_rows())
def test_every_row_of_this_build_is_built(name: str) -> None:
    check_built(online_rows()[name])
    assert isinstance(online_rows()[name], Method)


def test_every_kind_that_is_built_is_one_that_can_be_written() -> None:
    for field, family in FAMILIES.items():
        if field in BUILT:
            known = set(family.kinds)
            assert BUILT[field] <= known, (field, BUILT[field] - known)
