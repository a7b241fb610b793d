"""Rows that sample nothing: every value says where it comes from, as in `test_row_sources`."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from typing import Any

import pytest
from test_row_sources import DOCS, leaves

from surefoot.methods import Method, Preference, describe, rows

NAMES = [name for name, row in rows().items() if not isinstance(row, Method)]


@pytest.fixture(scope="module")
def facts() -> Mapping[str, Any]:
    found: Mapping[str, Any] = runpy.run_path(str(DOCS / "method_facts.py"))["GIVEN"]
    return found


def test_the_tables_have_the_same_rows(facts: Mapping[str, Any]) -> None:
    assert list(facts) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_the_row_is_the_one_that_has_a_source(
    name: str, facts: Mapping[str, Any]
) -> None:
    row = rows()[name]
    want = leaves(describe(row))
    if isinstance(row, Preference):
        want["beta"] = row.beta
    assert {key: fact.value for key, fact in facts[name].fields.items()} == want


@pytest.mark.parametrize("name", NAMES)
def test_a_source_is_a_paper_or_our_reason(name: str, facts: Mapping[str, Any]) -> None:
    assert any(mark in facts[name].paper for mark in ("arXiv", "Mitchell 2023"))
    for key, fact in facts[name].fields.items():
        assert "arXiv" in fact.source or len(fact.source) > len("ours: because"), (key, fact)
        assert "arXiv" in fact.source or fact.source.startswith("ours"), (key, fact)
