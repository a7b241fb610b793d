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


def saved(s):
    """The cursor as a checkpoint holds it."""
    return json.loads(json.dumps(s.cursor()))


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
    [
        {"counts": [3]},
        {"counts": [-1], "position": -1},
        {"counts": [1, 1], "position": 2},
        {"before": 1},
        {"before": -1, "counts": [3]},
    ],
)
def test_a_damaged_cursor_is_refused_and_leaves_the_stream(change):
    s = stream(5)
    s.take(2, step=1)
    with pytest.raises(CheckpointError, match="damaged"):
        s.restore({**s.cursor(), **change})
    with pytest.raises(CheckpointError, match="lacks counts"):
        s.restore({key: value for key, value in s.cursor().items() if key != "counts"})
    assert s.position == 2


def test_other_data_of_as_many_sources_goes_on_where_each_was():
    """Four of nine rows are walked over; of other nine the last five follow, then epoch 1."""
    old = stream(9, seed=3)
    old.take(4, step=2)
    s = stream(9, seed=3, digest="other")
    s.restore(saved(old), other_data=True)
    taken = s.take(14, step=3)
    assert [p.position for p in taken] == list(range(4, 18))
    assert ids(taken) == ids(stream(9, seed=3).take(18, step=1))[4:]


@pytest.mark.parametrize(
    ("sizes", "others", "counts"),
    [
        ((5, 3), (2, 7), 9),
        ((5, 3), (2, 7, 4), 0),
        ((5, 3), (4,), 0),
        ((4,), (5, 3), 0),
    ],
    ids=["as many sources", "more", "fewer", "more than one"],
)
def test_a_stream_of_other_data_can_be_resumed_again_and_again(sizes, others, counts):
    """`counts`: what of the nine walked over counts for the new sources."""
    old = stream(*sizes, seed=3)
    old.take(9, step=1)
    s = stream(*others, seed=3, digest="other")
    s.restore(saved(old), other_data=True)
    assert s.position == 9 and sum(s.cursor()["counts"]) == counts
    assert saved(s)["passed_over"] == 0
    assert [p.position for p in s.take(5, step=1)] == list(range(9, 14))
    first = saved(s)
    whole = s.take(30, step=2)
    assert [p.position for p in whole] == list(range(14, 44))
    second = stream(*others, seed=3, digest="other")
    second.restore(first)
    assert saved(second) == first
    assert second.take(11, step=2) == whole[:11]
    third = stream(*others, seed=3, digest="other")
    third.restore(saved(second))
    assert third.take(19, step=2) == whole[11:]
    assert saved(third) == saved(s)


def test_other_data_may_come_twice():
    """Two sources, then one, then three: the position goes on through all of them."""
    s, position = stream(5, 3), 0
    s.take(7, step=1)
    for sizes, more in (((4,), 6), ((2, 2, 9), 5)):
        position = s.position
        cursor = saved(s)
        s = stream(*sizes, digest="other")
        s.restore(cursor, other_data=True)
        taken = [p.position for p in s.take(more, step=1)]
        assert taken == list(range(position, position + more))
    again = stream(2, 2, 9, digest="other")
    again.restore(saved(s))
    assert again.position == 7 + 6 + 5 and sum(again.cursor()["counts"]) == 5
    assert again.take(9, step=1) == s.take(9, step=1)


def test_the_sources_of_other_data_are_drawn_by_the_position():
    """After nine positions of one source, the tenth is drawn as the tenth of the new ones."""
    old = stream(5, seed=3)
    old.take(9, step=1)
    s = stream(30, 30, seed=3, digest="other")
    s.restore(saved(old), other_data=True)
    sources = [id[0] for id in ids(s.take(20, step=1))]
    assert sources == [id[0] for id in ids(stream(30, 30, seed=3).take(29, step=1))][9:]


def test_rows_passed_over_in_other_sources_leave_the_count():
    """Two of four prompts fall outside, so that four more positions walk over two epochs."""
    old = stream(4, keep=[(0.2, 0.8)])
    seen = ids(old.take(4, step=1))
    old.observe(dict.fromkeys(seen[:2], (0, 4)))
    old.take(4, step=2)
    assert saved(old)["passed_over"] > 0
    position = old.position
    s = stream(3, 3, keep=[(0.2, 0.8), None])
    s.restore(saved(old), other_data=True)
    s.take(2, step=3)
    assert saved(s)["passed_over"] == 0
    again = stream(3, 3, keep=[(0.2, 0.8), None])
    again.restore(saved(s))
    assert again.position == position + 2
    assert again.take(8, step=4) == s.take(8, step=4)


def test_a_cursor_of_a_release_without_before_is_read():
    s = stream(5, 3, seed=3)
    s.take(9, step=1)
    old = {key: value for key, value in saved(s).items() if key != "before"}
    resumed = stream(5, 3, seed=3)
    resumed.restore(old)
    assert saved(resumed) == saved(s)
    assert resumed.take(7, step=1) == s.take(7, step=1)


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
