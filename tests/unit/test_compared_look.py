"""Held-out comparisons: the limits know which of them share a prompt, and are read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.loops.supervised import compared_look
from surefoot.run.read import evaluations, summary
from surefoot.statistics import wilson


def look(margins: list[float], prompts: list[tuple[int, ...]], step: int = 1):
    names = [f"p{i}" for i in range(len(margins))]
    return compared_look(step, margins, [0.0] * len(margins), names, prompts)


def test_comparisons_of_different_prompts_have_wilsons_limits() -> None:
    found = look([1.0, 2.0, -1.0, 3.0], [(1,), (2,), (3,), (4,)]).accuracy
    assert found is not None
    assert (found.n, found.correct) == (4, 3)
    assert (found.low, found.high) == pytest.approx(wilson(3, 4))


def test_comparisons_that_agree_within_a_prompt_count_as_one() -> None:
    """Four prompts of three equal verdicts: as wide as four trials, but for C/(C-1) over M/(M-1).

    p = 3/4; between = 4/3 · (3 · (3/4)² + (9/4)²) / 144 = 1/16; p(1-p)/11 = 3/176; d = 11/3, so
    12 comparisons count as 36/11.
    """
    margins = [1.0] * 9 + [-1.0] * 3
    found = look(margins, [(i // 3,) for i in range(12)]).accuracy
    assert found is not None
    assert found.accuracy == 0.75
    n, z = 36 / 11, 1.959964
    middle = 0.75 + z * z / (2 * n)
    reach = z * (0.75 * 0.25 / n + z * z / (4 * n * n)) ** 0.5
    whole = 1 + z * z / n
    assert found.low == pytest.approx((middle - reach) / whole, abs=1e-6)
    assert found.high == pytest.approx((middle + reach) / whole, abs=1e-6)
    assert found.low < wilson(9, 12)[0]


def test_the_limits_are_read_back_and_ties_at_the_start_are_no_baseline(tmp_path: Path) -> None:
    prompts = [(i // 3,) for i in range(12)]
    start, end = look([0.0] * 12, prompts, 0), look([1.0] * 9 + [-1.0] * 3, prompts, 5)
    rows = []
    for step, seen in ((0, start), (5, end)):
        assert seen.accuracy is not None
        rows.append({"step": step, **seen.metrics, **seen.accuracy.metrics()})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    groups = [{"step": s, **row} for s, seen in ((0, start), (5, end)) for row in seen.rows]
    text = "".join(json.dumps(row) + "\n" for row in groups)
    (tmp_path / "groups.jsonl").write_text(text, encoding="utf-8")
    assert evaluations(tmp_path) == [start.accuracy, end.accuracy]
    assert summary(tmp_path).difference is None
