"""Prompts outside the solve-rate window: passed over, looked at again, exact in a cursor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from data_stand_ins import Spec, Words, recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_stream import ids, rows, stream

from surefoot.data import Lane, Span, Stream, build
from surefoot.errors import CheckpointError

MIDDLE = (0.25, 0.75)


def windowed(n, *, seed=0, bounds=MIDDLE):
    return stream(n, keep=[bounds], seed=seed)


def first_epoch(s, n, outcomes):
    """Take every row once, and observe `outcomes`; the order of the epoch."""
    order = ids(s.take(n, step=1))
    s.observe(outcomes)
    return order


def test_never_tried_and_inside_are_taken_outside_is_passed_over():
    s = windowed(6)
    order = first_epoch(
        s, 6, {"a0": (0, 4), "a1": (4, 4), "a2": (1, 4), "a3": (3, 4), "a4": (0, 0)}
    )
    assert sorted(order) == [f"a{i}" for i in range(6)]
    # Both bounds lie inside; a4 had no score and a5 was not observed, so neither was tried.
    assert sorted(ids(s.take(4, step=2))) == ["a2", "a3", "a4", "a5"]


def test_passing_over_leaves_the_order_of_the_others():
    s, plain = windowed(20, seed=4), stream(20, seed=4)
    gone = {"a3", "a8", "a11"}
    first_epoch(s, 20, dict.fromkeys(gone, (0, 8)))
    plain.take(20, step=1)
    left = [name for name in ids(plain.take(60, step=2)) if name not in gone]
    assert ids(s.take(51, step=2)) == left
    assert [p.position for p in s.take(2, step=3)] == [71, 72]


def test_a_prompt_is_passed_over_three_times_and_asked_again_the_fourth():
    s = windowed(3)
    first_epoch(s, 3, {"a0": (0, 4)})
    epochs = [sorted(ids(s.take(2, step=step))) for step in (2, 3, 4)]
    assert epochs == [["a1", "a2"]] * 3
    assert sorted(ids(s.take(3, step=5))) == ["a0", "a1", "a2"]
    # Its old counts are gone: 1 of 4 is inside, where 1 of 8 would be outside.
    s.observe({"a0": (1, 4)})
    assert sorted(ids(s.take(3, step=6))) == ["a0", "a1", "a2"]
    s.observe({"a0": (0, 4)})
    assert sorted(ids(s.take(2, step=7))) == ["a1", "a2"]


def test_counts_add_up_while_a_prompt_is_inside():
    s = windowed(2)
    first_epoch(s, 2, {"a0": (2, 4)})
    s.take(2, step=2)
    s.observe({"a0": (4, 4)})  # 6 of 8: the upper bound, still inside
    assert sorted(ids(s.take(2, step=3))) == ["a0", "a1"]
    s.observe({"a0": (4, 4)})  # 10 of 12
    assert ids(s.take(2, step=4)) == ["a1", "a1"]


def test_what_a_step_passed_over_is_counted_over_its_takes():
    s = windowed(4)
    first_epoch(s, 4, {"a0": (0, 4), "a1": (0, 4)})
    s.take(2, step=2)
    s.take(2, step=2)
    # Two epochs with two of four left; the last rows of the second may not have been reached.
    assert s.passed_over in (3, 4) and s.passed_over == sum(s.cursor()["counts"]) - 8
    s.take(0, step=3)
    assert (s.passed_over, s.refills) == (0, 0)


def test_when_nothing_is_left_all_are_taken_again_and_counted():
    s = windowed(3)
    first_epoch(s, 3, dict.fromkeys(["a0", "a1", "a2"], (4, 4)))
    assert sorted(ids(s.take(3, step=2))) == ["a0", "a1", "a2"]
    assert (s.refills, s.passed_over) == (1, 0)
    s.take(3, step=3)
    assert s.refills == 0
    s.observe(dict.fromkeys(["a0", "a1", "a2"], (4, 4)))
    s.take(1, step=3)
    assert s.refills == 1


def test_only_sources_with_a_window_keep_counts():
    s = stream(3, 3, keep=[MIDDLE, None])
    taken = ids(s.take(12, step=1))
    s.observe(dict.fromkeys(taken, (0, 4)))
    assert s.cursor()["solved"][1] is None
    later = ids(s.take(40, step=2))
    assert {name for name in later if name[0] == "b"} == {"b0", "b1", "b2"}
    assert s.refills == 1


def test_equal_rows_share_their_counts():
    twins = [replace(row, id="same") for row in rows(2)] + rows(1, "x")
    s = Stream([Lane(twins, 1.0, Span(1, None), MIDDLE)], seed=0, hash="h")
    s.take(3, step=1)
    s.observe({"same": (0, 4)})
    assert ids(s.take(3, step=2)) == ["x0"] * 3
    assert sorted(ids(s.take(3, step=3))) == ["same", "same", "x0"]


def test_the_cursor_is_short_text_that_people_can_read():
    s = windowed(5)
    first_epoch(s, 5, {"a0": (0, 8), "a3": (4, 8)})
    s.take(4, step=2)
    cursor = s.cursor()
    assert cursor["solved"] == ["0:0/8-1 3:4/8"]
    assert (cursor["position"], cursor["counts"], cursor["passed_over"]) == (9, [10], 1)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    scores=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    cut=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_resume_is_exact_whatever_was_solved(sizes, scores, cut, seed):
    def fresh():
        return stream(*sizes, keep=[MIDDLE] * len(sizes), seed=seed)

    def one_step(s, step):
        taken = s.take(3, step=step)
        s.observe({p.id: (scores[step - 1], 4) for p in taken})
        return taken, s.passed_over, s.refills

    walker = fresh()
    for step in range(1, cut + 1):
        one_step(walker, step)
    resumed = fresh()
    resumed.restore(json.loads(json.dumps(walker.cursor())))
    for step in range(cut + 1, 11):
        assert one_step(resumed, step) == one_step(walker, step)
    assert resumed.cursor() == walker.cursor()


def test_a_step_that_is_undone_leaves_no_trace():
    s = windowed(4)
    first_epoch(s, 4, {"a0": (0, 4)})
    before = s.cursor()
    taken = s.take(5, step=2)
    s.observe(dict.fromkeys(ids(taken), (4, 4)))
    s.restore(before)
    assert s.cursor() == before
    assert s.take(5, step=2) == taken


@pytest.mark.parametrize("text", ["9:0/4", "0:5/4", "0:0/0", "x", "0:1/4;1:1/4"])
def test_damaged_counts_are_refused(text):
    s = windowed(3)
    with pytest.raises(CheckpointError, match=r"solve count .*damaged"):
        s.restore({**s.cursor(), "solved": [text]})


def test_a_window_may_be_added_changed_or_removed_on_resume():
    plain = stream(3)
    plain.take(3, step=1)
    s = windowed(3)
    s.restore(plain.cursor())
    s.take(3, step=2)
    s.observe({"a0": (1, 4)})
    narrow = windowed(3, bounds=(0.5, 1.0))
    narrow.restore(s.cursor())
    assert sorted(ids(narrow.take(2, step=3))) == ["a1", "a2"]
    plain.restore(narrow.cursor())
    assert plain.position == 8


def test_the_window_of_a_recipe_reaches_the_stream():
    data = build(
        recipe(Spec("rows", keep_solve_rate=(0.1, 0.9))),
        Words(),
        rows=[{"prompt": text, "id": text} for text in ("x", "y")],
    )
    data.stream.take(2, step=1)
    data.stream.observe({"x": (0, 8), "y": (4, 8)})
    assert ids(data.stream.take(3, step=2)) == ["y"] * 3
