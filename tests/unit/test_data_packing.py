"""Packed rows: every document once and whole, none over the limit, none seen by another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data import Demonstration, PackedRow, pack
from surefoot.errors import DataError


def documents(*lengths):
    """Documents whose ids are all their own number."""
    return [
        Demonstration(f"d{number}", (number,) * length, (False,) + (True,) * (length - 1))
        for number, length in enumerate(lengths)
    ]


def test_the_longest_go_first_and_the_fullest_row_that_fits_is_taken():
    rows = pack(documents(3, 5, 2, 4, 6), row_tokens=8)
    # 6 opens a row (2 left), 5 another (3 left), 4 a third (4 left); 3 fills the second one, and
    # 2 the first.
    assert [row.sources for row in rows] == [(0, 1), (2, 4), (3,)]
    first = rows[0]
    assert first.ids == (0, 0, 0, 1, 1, 1, 1, 1)
    assert first.positions == (0, 1, 2, 0, 1, 2, 3, 4)
    assert first.documents == (0, 0, 0, 1, 1, 1, 1, 1)
    assert first.trained == (False, True, True, False, True, True, True, True)


def test_equal_lengths_keep_their_order():
    rows = pack(documents(4, 4, 4, 4), row_tokens=8)
    assert [row.sources for row in rows] == [(0, 1), (2, 3)]


def test_a_document_that_no_row_takes_is_refused():
    assert len(pack(documents(8), row_tokens=8)) == 1
    with pytest.raises(
        DataError, match=r"demonstration d1 has 9 tokens, more than the 8 of a pack"
    ):
        pack(documents(2, 9), row_tokens=8)
    assert pack([], row_tokens=8) == []


def test_a_row_that_trains_a_first_id_is_a_bug():
    with pytest.raises(AssertionError, match="a first id is trained"):
        PackedRow((1, 2, 3), (False, True, True), (0, 1, 0), (0, 0, 1), (0, 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 20), max_size=40), st.integers(20, 50))
def test_every_document_stands_whole_in_one_row(lengths, row_tokens):
    given_documents = documents(*lengths)
    rows = pack(given_documents, row_tokens=row_tokens)
    assert rows == pack(given_documents, row_tokens=row_tokens)
    placed = sorted(source for row in rows for source in row.sources)
    assert placed == list(range(len(lengths)))
    for row in rows:
        assert len(row.ids) <= row_tokens
        start = 0
        for number, source in enumerate(row.sources):
            document = given_documents[source]
            end = start + document.length
            assert row.ids[start:end] == document.ids
            assert row.trained[start:end] == document.trained
            assert row.positions[start:end] == tuple(range(document.length))
            assert set(row.documents[start:end]) == {number}
            start = end
        assert start == len(row.ids)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=40))
def test_no_two_rows_could_have_been_one(lengths):
    rows = pack(documents(*lengths), row_tokens=30)
    sizes = sorted(len(row.ids) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 30
