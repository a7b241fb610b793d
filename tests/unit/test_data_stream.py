"""The keyed stream: each epoch a permutation, exact resume everywhere, weights as shares."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data import Lane, Span, Stream
from surefoot.errors import CheckpointError, RecipeError
from surefoot.records import Prompt


def rows(n, name="r"):
    return [Prompt(id=f"{name}{i}", position=0, ids=(1, i), text=f"{name}{i}") for i in range(n)]


def stream(*sizes, weights=None, spans=None, keep=None, seed=0, digest="h" * 64):
    """Sources a, b, ... of these sizes; spans are (first, end), keep is the window of each."""
    weights = weights or [1.0] * len(sizes)
    spans = spans or [(1, None)] * len(sizes)
    keep = keep or [None] * len(sizes)
    lanes = [
        Lane(rows(n, name), weight, Span(*span), window)
        for n, name, weight, span, window in zip(
            sizes, "abcdef", weights, spans, keep, strict=False
        )
    ]
    return Stream(lanes, seed=seed, hash=digest)


def ids(prompts):
    return [p.id for p in prompts]


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_each_epoch_is_a_permutation_and_epochs_differ(n):
    s = stream(n)
    epochs = [ids(s.take(n, step=1)) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(ids(rows(n, "a")))
    if n > 2:
        assert epochs[0] != epochs[1] != epochs[2]


def test_one_take_crosses_epochs():
    s = stream(3)
    taken = s.take(8, step=1)
    assert [p.position for p in taken] == list(range(8))
    assert sorted(ids(taken[:3])) == sorted(ids(taken[3:6])) == ["a0", "a1", "a2"]
    assert (s.epoch, s.position, len(s)) == (2, 8, 3)


def test_the_size_of_a_take_does_not_matter():
    whole = ids(stream(5, 3, weights=[2, 1]).take(40, step=1))
    for size in (1, 3, 7, 40):
        s = stream(5, 3, weights=[2, 1])
        parts = [prompt for _ in range(0, 40, size) for prompt in s.take(size, step=1)]
        assert ids(parts)[:40] == whole


@pytest.mark.parametrize("sizes", [(5,), (5, 3), (4, 1, 6)])
def test_resume_is_exact_at_every_cursor(sizes):
    reference = stream(*sizes, seed=3)
    whole = reference.take(30, step=1)
    walker = stream(*sizes, seed=3)
    for cut in range(31):
        cursor = json.loads(json.dumps(walker.cursor()))
        resumed = stream(*sizes, seed=3)
        resumed.restore(cursor)
        assert resumed.position == cut
        assert resumed.epoch == walker.epoch
        assert resumed.take(30 - cut, step=1) == whole[cut:]
        if cut < 30:
            walker.take(1, step=1)


def test_a_stream_can_go_back():
    s = stream(5)
    start = s.cursor()
    first = s.take(7, step=1)
    s.restore(start)
    assert s.take(7, step=1) == first


def test_seeds_differ_and_equal_seeds_agree():
    assert ids(stream(50, seed=1).take(50, step=1)) == ids(stream(50, seed=1).take(50, step=1))
    assert ids(stream(50, seed=1).take(50, step=1)) != ids(stream(50, seed=2).take(50, step=1))


def test_weights_are_shares_of_positions_and_not_of_rows():
    s = stream(3, 100, weights=[3, 1])
    share = sum(name.startswith("a") for name in ids(s.take(4000, step=1))) / 4000
    assert abs(share - 0.75) < 0.03  # 4.4 standard errors of 0.0068


def test_each_source_walks_through_its_own_permutations():
    taken = ids(stream(4, 6, weights=[1, 1]).take(400, step=1))
    for name, n in (("a", 4), ("b", 6)):
        own = [x for x in taken if x.startswith(name)]
        for start in range(0, len(own) - n, n):
            assert len(set(own[start : start + n])) == n


def test_sources_of_one_size_have_different_orders():
    taken = ids(stream(30, 30).take(60, step=1))
    first = [x[1:] for x in taken if x[0] == "a"]
    second = [x[1:] for x in taken if x[0] == "b"]
    assert first[:10] != second[:10]


def test_a_second_source_leaves_the_order_of_the_first():
    alone = ids(stream(9).take(9, step=1))
    mixed = [x for x in ids(stream(9, 9).take(60, step=1)) if x[0] == "a"]
    assert mixed[:9] == alone


def test_epoch_counts_the_source_passed_over_least():
    s = stream(2, 50, weights=[50, 1])
    s.take(60, step=1)
    assert s.cursor()["counts"][0] >= 4
    assert s.epoch == 0


def test_a_cursor_of_other_data_is_refused():
    cursor = stream(5).cursor()
    with pytest.raises(CheckpointError, match=r"had \[5\] rows, now they have \[6\]"):
        stream(6).restore(cursor)
    with pytest.raises(CheckpointError, match=r"had \[5\] rows, now they have \[5, 2\]"):
        stream(5, 2).restore(cursor)
    with pytest.raises(CheckpointError, match=r"its hash was hhhhhhhhhhhhhhhh, now it is other"):
        stream(5, digest="other").restore(cursor)


@pytest.mark.parametrize(
    "change",
    [{"counts": [3]}, {"counts": [-1], "position": -1}, {"counts": [1, 1], "position": 2}],
)
def test_a_damaged_cursor_is_refused_and_leaves_the_stream(change):
    s = stream(5)
    s.take(2, step=1)
    with pytest.raises(CheckpointError, match="damaged"):
        s.restore({**s.cursor(), **change})
    with pytest.raises(CheckpointError, match="lacks counts"):
        s.restore({key: value for key, value in s.cursor().items() if key != "counts"})
    assert s.position == 2


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_draws_nothing_is_refused(weight):
    with pytest.raises(RecipeError, match="weight"):
        stream(3, 3, weights=[1.0, weight])


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    takes=st.lists(st.integers(0, 9), max_size=6),
)
def test_any_walk_is_a_prefix_of_the_one_order(sizes, seed, takes):
    s = stream(*sizes, seed=seed)
    walked = [prompt for size in takes for prompt in s.take(size, step=1)]
    assert walked == stream(*sizes, seed=seed).take(sum(takes), step=1)
    assert s.position == sum(takes)
