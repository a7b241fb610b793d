"""Law 4: no silent group of one."""

from __future__ import annotations

import pytest
import torch
from support.hand import group, no_kl, take_step

from surefoot.errors import RecipeError
from surefoot.methods import Method, is_group_relative, online_rows, resolve
from surefoot.recipe import load
from surefoot.records import ScoreStatus, StopReason

FAILED = ScoreStatus.INFRA_ERROR
RELATIVE = [name for name, value in online_rows().items() if is_group_relative(value)]


def recipe(name: str, size: int) -> dict[str, object]:
    return {
        "data": {"source": "addition"},
        "reward": [{"use": "numeric"}],
        "method": {"name": name, "group_size": size},
        "run": {"steps": 1},
    }


def test_the_rows_concerned_are_there() -> None:
    assert {"rloo", "grpo", "dapo"} <= set(RELATIVE) and "reinforce" not in RELATIVE


@pytest.mark.parametrize("name", RELATIVE)
def test_one_sample_per_prompt_is_refused_with_the_mend(name: str) -> None:
    with pytest.raises(RecipeError, match=r"group_size.*2 or more.*baseline to batch or none"):
        load(recipe(name, 1))
    method = load(recipe(name, 2)).method
    assert isinstance(method, Method) and method.group_size == 2


@pytest.mark.parametrize("name", RELATIVE)
def test_by_the_alias_of_trl_too(name: str) -> None:
    written = recipe(name, 8)
    written["method"] = {"name": name}
    with pytest.raises(RecipeError, match="group_size"):
        load({**written, "num_generations": 1})


def test_rows_with_another_baseline_may_ask_once() -> None:
    load(recipe("reinforce", 1))
    method = resolve({"name": "reinforce", "group_size": 1, "baseline": "batch"})
    assert isinstance(method, Method) and not is_group_relative(method)


def test_a_row_of_ones_own_is_refused_as_well() -> None:
    with pytest.raises(RecipeError, match="nothing to compare with"):
        Method(name="mine", group_size=1, baseline=online_rows()["rloo"].baseline)  # type: ignore[union-attr]


@pytest.mark.parametrize("low", [0, 1, 9])
@pytest.mark.parametrize("name", RELATIVE)
def test_min_group_cannot_bring_a_group_of_one_back(name: str, low: int) -> None:
    with pytest.raises(RecipeError, match="min_group"):
        resolve({"name": name, "min_group": low})


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_that_comes_down_to_one_is_dropped(name: str) -> None:
    """By missing scores or by masked truncation: nobody trains on it."""
    method = no_kl(name, group_size=2, min_group=2, truncated="mask")
    missing = group([1.0, FAILED])
    cut = group([1.0, 0.0], index=1, stops=[StopReason.STOP, StopReason.LENGTH])
    step = take_step(method, [missing, cut])
    assert step.standing.dropped_P.tolist() == [True, True]
    assert step.metrics["groups/dropped"] == 2
    assert step.report.steps == 0 and torch.equal(step.gradient, torch.zeros_like(step.gradient))
