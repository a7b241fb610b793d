"""Every value of a row that is not its type's default says where it comes from."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.methods import FAMILIES, describe, online_rows

DOCS = Path(__file__).resolve().parents[2] / "docs"
FACTS: Mapping[str, Any] = runpy.run_path(str(DOCS / "method_facts.py"))["FACTS"]
CLAIMS: Mapping[str, Any] = runpy.run_path(str(DOCS / "claim_facts.py"))["CLAIMS"]


def leaves(shown: Mapping[str, Any]) -> dict[str, Any]:
    """`describe` as dotted keys: the kind under the field's own name, options below it."""
    return {key: value for field, told in shown.items() for key, value in _leaves(field, told)}


def _leaves(path: str, told: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(told, list):
        for index, item in enumerate(told):
            yield from _leaves(f"{path}.{index}", item)
    elif isinstance(told, Mapping):
        discriminator = FAMILIES[path.split(".")[0]].key
        for option, value in told.items():
            if option == discriminator:
                yield path, value
            else:
                yield from _leaves(f"{path}.{option}", value)
    else:
        yield path, told


def test_leaves() -> None:
    shown = {
        "kl": {"place": "loss", "coef": 0.1},
        "shaping": [{"kind": "overlong", "weight": 1.0}],
        "reduce": "constant",
    }
    assert leaves(shown) == {
        "kl": "loss",
        "kl.coef": 0.1,
        "shaping.0": "overlong",
        "shaping.0.weight": 1.0,
        "reduce": "constant",
    }


def test_the_tables_have_the_same_rows() -> None:
    assert set(FACTS) == set(online_rows())


@pytest.mark.parametrize("name", list(online_rows()))
def test_every_value_of_the_row_is_the_one_that_has_a_source(name: str) -> None:
    assert name in FACTS, f"docs/method_facts.py has no row {name}"
    told = {key: fact.value for key, fact in FACTS[name].fields.items()}
    assert leaves(describe(online_rows()[name])) == told


@pytest.mark.parametrize("name", list(FACTS))
def test_a_source_is_a_paper_or_our_reason(name: str) -> None:
    for key, fact in FACTS[name].fields.items():
        source = fact.source
        ours = source.startswith("ours")
        assert ours or any(mark in source for mark in ("arXiv", "Williams 1992")), (key, source)
        # A paper is no reason for what it leaves open, and neither is the word alone.
        assert not ours or len(source) > len("ours: because"), (key, source)


def test_the_rows_answer_claims_that_exist_and_no_false_one_is_left_out() -> None:
    answered = {claim for facts in FACTS.values() for claim in facts.claims}
    assert answered <= set(CLAIMS)
    assert list(CLAIMS) == [f"C{number}" for number in range(1, 33)]
    assert {key for key, claim in CLAIMS.items() if claim.verdict == "false"} <= answered
    verdicts = {claim.verdict for claim in CLAIMS.values()}
    assert verdicts == {"true", "false", "in part", "open", "owed"}
