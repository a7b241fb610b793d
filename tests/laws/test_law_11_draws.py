"""Law 11: every draw is keyed, so scheduling cannot change what is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.tiny import architectures, make_model, make_tokenizer

from surefoot.records import Completion, Prompt
from surefoot.rollout import LocalEngine, Sampling

PROMPTS = [
    Prompt(f"p{i}", 40 + i, tuple(4 + (11 * i + 3 * t) % 90 for t in range(length)), "text")
    for i, length in enumerate((6, 3, 10, 6, 8))
]


def engine(*, rows: int = 100, seed: int = 3, name: str = "llama") -> LocalEngine:
    return LocalEngine(
        make_model(architectures()[name], seed=1),
        make_tokenizer(),
        settings=Sampling(temperature=0.9, max_new_tokens=14),
        stop_ids=(0, 2),
        dtype=torch.float32,
        rows=rows,
        seed=seed,
    )


Drawn = dict[tuple[str, int], tuple[int, ...]]


def drawn(
    tool: LocalEngine, prompts: Sequence[Prompt], size: int = 4, *, purpose: str = "rollout"
) -> Drawn:
    groups = tool.sample(prompts, size, purpose=purpose)
    return {(g.prompt.id, c.sample): c.ids for g in groups for c in g.completions}


@pytest.fixture(scope="module")
def whole() -> Drawn:
    return drawn(engine(), PROMPTS)


def test_samples_of_a_group_and_prompts_differ(whole: Drawn) -> None:
    assert len(set(whole.values())) == len(whole) == 20


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 19])
def test_the_row_budget_changes_no_token(whole: Drawn, rows: int) -> None:
    assert drawn(engine(rows=rows), PROMPTS) == whole


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_the_order_of_prompts_changes_no_token(whole: Drawn, order: tuple[int, ...]) -> None:
    assert drawn(engine(), [PROMPTS[i] for i in order]) == whole
    assert drawn(engine(rows=6), [PROMPTS[i] for i in order]) == whole


def test_nor_does_who_else_is_in_the_batch(whole: Drawn) -> None:
    tool = engine()
    apart: Drawn = {}
    for prompt in PROMPTS:
        apart |= drawn(tool, [prompt])
    assert apart == whole


def test_a_smaller_group_is_the_beginning_of_a_larger_one(whole: Drawn) -> None:
    assert drawn(engine(), PROMPTS, 2) == {key: v for key, v in whole.items() if key[1] < 2}


def test_what_was_sampled_before_is_forgotten(whole: Drawn) -> None:
    tool = engine()
    drawn(tool, PROMPTS[2:4], 7)
    drawn(tool, PROMPTS, purpose="eval")
    assert drawn(tool, PROMPTS) == whole


def changed(prompt: Prompt, **fields: Any) -> Prompt:
    values = {"id": prompt.id, "position": prompt.position, "ids": prompt.ids, "text": prompt.text}
    return Prompt(**{**values, **fields})


def test_the_key_is_the_position_not_the_row(whole: Drawn) -> None:
    """The next epoch meets the same row at another position, and draws anew."""
    later = drawn(engine(), [changed(p, position=p.position + 5) for p in PROMPTS])
    assert not any(later[key] == whole[key] for key in whole)
    renamed = drawn(engine(), [changed(p, text="other") for p in PROMPTS])
    assert renamed == whole


@pytest.mark.parametrize("other", [{"seed": 4}, {"purpose": "eval"}])
def test_another_seed_and_another_purpose_draw_anew(whole: Drawn, other: dict[str, Any]) -> None:
    tool = engine(seed=other.get("seed", 3))
    fresh = drawn(tool, PROMPTS, purpose=other.get("purpose", "rollout"))
    assert not any(fresh[key] == whole[key] for key in whole)


def test_greedy_draws_nothing() -> None:
    one = engine(seed=0).sample(PROMPTS, 2, purpose="eval", greedy=True)
    other = engine(seed=9).sample(PROMPTS, 2, purpose="other", greedy=True)
    assert one == other
    assert all(g.completions[0].ids == g.completions[1].ids for g in one)


@pytest.mark.parametrize("name", [n for n in architectures() if n != "llama"])
def test_on_every_architecture(name: str) -> None:
    want = drawn(engine(name=name), PROMPTS, 3)
    assert drawn(engine(name=name, rows=4), PROMPTS[::-1], 3) == want


def test_log_probabilities_agree_to_rounding(whole: Drawn) -> None:
    def logps(rows: int) -> list[Completion]:
        groups = engine(rows=rows).sample(PROMPTS, 4, purpose="rollout")
        return [c for group in groups for c in group.completions]

    for one, other in zip(logps(100), logps(3), strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-4)
