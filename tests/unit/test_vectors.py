"""The numeric vectors: one test per vector, one small adapter per kind.

SUREFOOT_VECTORS names another file of the same schema, to be run instead of the one here.
Besides the inputs as given, each vector runs with other values wherever values must not matter:
under a mask, and in the place of a missing reward.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from vector_adapters import ADAPTERS as ONLINE
from vector_preference import PREFERENCE
from vector_tools import NAN, Make

PATH = Path(os.environ.get("SUREFOOT_VECTORS", Path(__file__).parents[1] / "data" / "vectors.json"))
FILE = json.loads(PATH.read_text(encoding="utf-8"))

TOKEN_INPUTS = ("logp", "old_logp", "ref_logp", "rollout_logp", "loss", "advantages")
TOKEN_INPUTS += ("values", "old_values", "returns")

ADAPTERS = {**ONLINE, **PREFERENCE}
OWED: Mapping[str, str] = {
    kind: owner
    for owner, kinds in {
        "planner": "theory_p_all_same theory_p_all_same_beta_prior theory_std_ddof_factor"
        " theory_informative_per_rollout memory flops",
    }.items()
    for kind in kinds.split()
}


def assert_close(got: Any, want: Any, vector: Mapping[str, Any], where: str) -> None:
    """Compare as the README of the vectors says; every expected key must have been computed."""
    if isinstance(want, Mapping):
        for key, value in want.items():
            assert_close(got[key], value, vector, f"{where}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for index, (left, right) in enumerate(zip(got, want, strict=True)):
            assert_close(left, right, vector, f"{where}[{index}]")
    elif want is None:
        assert got is None or math.isnan(got), f"{where}: {got} where nothing is defined"
    elif vector["exact"] or isinstance(want, bool):
        assert got == want, f"{where}: {got} is not exactly {want}"
    else:
        error = abs(float(got) - want)
        assert error <= FILE["atol"] + FILE["rtol"] * abs(want), f"{where}: {got}, not {want}"


def poisoned(inputs: Mapping[str, Any], poison: float) -> dict[str, Any]:
    """The inputs with `poison` at every masked position of every token array."""
    mask = inputs["mask"]
    changed = dict(inputs)
    # Rewards are per token where there is a value for each of them, else per sample.
    for key in TOKEN_INPUTS + (("rewards",) if "values" in inputs else ()):
        if isinstance(inputs.get(key), list) and isinstance(inputs[key][0], list):
            changed[key] = [
                [x if ok else poison for x, ok in zip(row, oks, strict=True)]
                for row, oks in zip(inputs[key], mask, strict=True)
            ]
    return changed


def check(vector: Mapping[str, Any], inputs: Mapping[str, Any], missing: float) -> None:
    make = Make(getattr(torch, vector["dtype"]), missing)
    adapter = ADAPTERS[vector["kind"]]
    if vector["expected"].get("raises_or_zero"):
        try:
            got = adapter(make, **inputs)
        except ValueError:
            return
        assert all(x == 0.0 for row in got["advantages"] for x in row)
        return
    assert_close(adapter(make, **inputs), vector["expected"], vector, vector["name"])


@pytest.mark.parametrize("vector", FILE["vectors"], ids=lambda vector: vector["name"])
def test_vector(vector: Mapping[str, Any]) -> None:
    kind = vector["kind"]
    assert (kind in ADAPTERS) != (kind in OWED), f"{kind} must be in exactly one of the tables"
    if kind in OWED:
        pytest.skip(f"owed by {OWED[kind]}")
    inputs = vector["inputs"]
    for missing in (0.0, NAN, 1e9):
        check(vector, inputs, missing)
    if "mask" in inputs:
        for poison in (NAN, float("inf"), -1e30):
            check(vector, poisoned(inputs, poison), NAN)


def test_no_kind_is_both_computed_and_owed() -> None:
    assert not set(ADAPTERS) & set(OWED)
