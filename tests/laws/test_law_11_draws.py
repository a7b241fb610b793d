"""Law 11: every draw is keyed, so batch, order and row budget change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines import PROMPTS, ids_of, make_engine

from surefoot import draws


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 12, 64])
def test_any_row_budget_draws_the_same_tokens(rows: int) -> None:
    want = ids_of(make_engine(rows=100).sample(PROMPTS, 4, purpose="rollout"))
    assert ids_of(make_engine(rows=rows).sample(PROMPTS, 4, purpose="rollout")) == want


def test_order_and_company_of_prompts_do_not_matter() -> None:
    together = make_engine().sample(PROMPTS, 4, purpose="rollout")
    backwards = make_engine().sample(PROMPTS[::-1], 4, purpose="rollout")
    alone = [make_engine().sample([prompt], 4, purpose="rollout")[0] for prompt in PROMPTS]
    assert ids_of(together) == ids_of(backwards[::-1]) == ids_of(alone)


def test_a_larger_group_begins_with_the_smaller_one() -> None:
    small = make_engine().sample(PROMPTS, 2, purpose="rollout")
    large = make_engine().sample(PROMPTS, 5, purpose="rollout")
    for a, b in zip(small, large, strict=True):
        assert [c.ids for c in a.completions] == [c.ids for c in b.completions[:2]]


def test_seed_purpose_position_and_sample_all_enter() -> None:
    base = ids_of(make_engine().sample(PROMPTS, 4, purpose="rollout"))
    assert ids_of(make_engine(seed=1).sample(PROMPTS, 4, purpose="rollout")) != base
    assert ids_of(make_engine().sample(PROMPTS, 4, purpose="other")) != base
    assert len(set(base)) > 8


def test_greedy_takes_the_most_likely_token_and_draws_nothing() -> None:
    one = make_engine(seed=0).sample(PROMPTS, 2, purpose="eval", greedy=True)
    two = make_engine(seed=9).sample(PROMPTS, 2, purpose="other", greedy=True)
    assert ids_of(one) == ids_of(two)
    assert one[0].completions[0].ids == one[0].completions[1].ids


def test_uniforms_are_uniform_and_independent_of_shape() -> None:
    grid = draws.uniform(3, "t", np.arange(200)[:, None], np.arange(50))
    assert grid.shape == (200, 50)
    assert grid[17, 31] == draws.uniform(3, "t", 17, 31)
    assert grid.min() > 0.0 and grid.max() < 1.0
    # 10,000 uniforms: mean 0.5 +- 0.0029, a tenth of them in each tenth +- 0.003.
    assert abs(float(grid.mean()) - 0.5) < 0.012
    counts, _ = np.histogram(grid, bins=10, range=(0, 1))
    assert np.abs(counts - 1000).max() < 130
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05


def test_permutations_are_permutations_and_differ() -> None:
    orders = [tuple(draws.permutation(0, "p", 9, k)) for k in range(20)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert len(set(orders)) == 20


def test_choice_follows_its_weights() -> None:
    picks = [draws.choice(0, "c", [1.0, 0.0, 3.0], k) for k in range(4000)]
    assert picks.count(1) == 0
    # A quarter of 4000, standard deviation 27.
    assert abs(picks.count(0) - 1000) < 110
