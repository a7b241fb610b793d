"""Law 2 on given data: one denominator for the whole step, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.given import CASES, GPT2, Step, given, make_task, other_model, renamed
from support.hand import apart
from transformers import PreTrainedConfig

from surefoot.learner.layouts import NAMES, Name

CUTS: tuple[tuple[int, tuple[Name, ...]], ...] = (
    (1, ("rows",)),
    (30, ("packed",)),
    (30, ("prefix",)),
    (17, NAMES),
    (10_000, ("packed",)),
    (10_000, ("prefix",)),
    (10_000, ("rows",)),
)


def take(
    name: str,
    folder: Path,
    *,
    budget: int = 10_000,
    layouts: tuple[Name, ...] = NAMES,
    config: PreTrainedConfig | None = GPT2,
    dtype: torch.dtype = torch.float64,
    copies: int = 1,
) -> Step:
    row = CASES[name]
    examples = [e for n in range(copies) for e in renamed(given(row.data), f"/{n}")]
    reference = other_model(config=config, dtype=dtype)
    bench = make_task(
        row,
        examples,
        folder,
        reference=reference,
        config=config,
        dtype=dtype,
        budget=budget,
        layouts=layouts,
    )
    return bench.step(examples)


def passes(step: Step) -> int:
    return sum(step.done.layouts.values())


@pytest.mark.fault(9)
@pytest.mark.parametrize("name", CASES)
def test_any_split_and_layout_gives_the_same_gradient(name: str, tmp_path: Path) -> None:
    whole = take(name, tmp_path)
    assert float(whole.gradient.norm()) > 1e-3
    counts = set()
    for budget, layouts in CUTS:
        cut = take(name, tmp_path, budget=budget, layouts=layouts)
        counts.add(passes(cut))
        assert apart(cut.gradient, whole.gradient) < 1e-9, (budget, layouts)
        assert cut.done.loss == pytest.approx(whole.done.loss, rel=1e-9), (budget, layouts)
        for key, value in whole.metrics.items():
            if key != "packing_efficiency":
                assert cut.metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    assert len(counts) > 1, "nothing was cut"


@pytest.mark.fault(9)
@pytest.mark.parametrize("name", CASES)
def test_float32_on_a_model_with_casts(name: str, tmp_path: Path) -> None:
    found = [
        take(name, tmp_path, budget=budget, layouts=layouts, config=None, dtype=torch.float32)
        for budget, layouts in (CUTS[4], CUTS[2], CUTS[0])
    ]
    assert apart(found[1].gradient, found[0].gradient) < 1e-5
    assert apart(found[2].gradient, found[0].gradient) < 1e-5


@pytest.mark.parametrize("budget", [40, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_every_example_twice_is_the_same_step(
    name: str, budget: int, tmp_path: Path
) -> None:
    """A sum instead of a mean would double, and a mean of passes would weigh them alike."""
    once = take(name, tmp_path)
    twice = take(name, tmp_path, budget=budget, copies=2)
    assert apart(once.gradient, twice.gradient) < 1e-9
    assert twice.done.loss == pytest.approx(once.done.loss, rel=1e-9)
