"""Keyed draws: pure functions of their key, even, and different for different keys."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from surefoot import draws


def test_a_draw_is_a_function_of_its_key_alone() -> None:
    positions, tokens = np.arange(50)[:, None], np.arange(40)[None, :]
    whole = draws.uniform(3, "rollout", positions, 5, tokens)
    assert whole.shape == (50, 40)
    # One at a time, backwards, and after other draws.
    for position, token in [(49, 39), (0, 0), (17, 3)]:
        draws.uniform(9, "other", position)
        assert draws.uniform(3, "rollout", position, 5, token) == whole[position, token]
    assert np.array_equal(draws.uniform(3, "rollout", positions[::-1], 5, tokens), whole[::-1])


def test_known_values_stay_for_ever() -> None:
    """A change here changes every recorded run."""
    assert [int(b) for b in draws.bits(0, "rollout", [0, 1], 2, 3)] == [
        13969745078468018211,
        8951932755276020455,
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "rollout", 1, 2, 3), (1, "rollout", 1, 2, 3)),
        ((0, "rollout", 1, 2, 3), (0, "eval", 1, 2, 3)),
        ((0, "rollout", 1, 2, 3), (0, "rollout", 2, 1, 3)),
        ((0, "rollout", 1, 2, 3), (0, "rollout", 1, 3, 2)),
        ((0, "rollout", 1, 2), (0, "rollout", 1, 2, 0)),
        ((0, "rollout", 0), (0, "rollout", 0, 0)),
        # seed 1 with purpose "1/x" must not read like seed "1/1" with purpose "x".
        ((1, "1/x"), (11, "/x")),
    ],
)
def test_different_keys_give_different_bits(one: tuple, other: tuple) -> None:
    assert draws.bits(*one) != draws.bits(*other)


def test_no_two_keys_collide() -> None:
    made = draws.bits(
        0, "rollout", np.arange(100)[:, None, None], np.arange(10)[:, None], range(1000)
    )
    assert len(np.unique(made)) == 1_000_000


def test_uniforms_are_even_and_uncorrelated_along_every_coordinate() -> None:
    made = draws.uniform(
        0, "rollout", np.arange(60)[:, None, None], np.arange(8)[:, None], range(200)
    )
    assert stats.kstest(made.ravel(), "uniform").pvalue > 1e-3
    for axis in range(3):
        moved = np.moveaxis(made, axis, 0)
        pair = np.corrcoef(moved[:-1].ravel(), moved[1:].ravel())[0, 1]
        # The standard error of a correlation of 95 000 pairs is 0.0033.
        assert abs(pair) < 0.015


def test_seeds_are_unrelated() -> None:
    one, other = (draws.uniform(seed, "rollout", np.arange(20_000)) for seed in (0, 1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


# The largest of the 2^53 values rounds up: (2^53 - 1) + 0.5 has no float64 of its own.
TOP = 2**64 - 1


@pytest.mark.parametrize("word", [0, 1, TOP, 2**63, (2**53 - 2) << 11])
def test_uniforms_lie_strictly_inside(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "bits", lambda *key: np.array([word], dtype=np.uint64))
    value = float(draws.uniform(0, "rollout", 0)[0])
    assert 0.0 < value < 1.0


def test_permutation() -> None:
    made = draws.permutation(0, "stream", 100, 0)
    assert sorted(made.tolist()) == list(range(100))
    assert made.tolist() == draws.permutation(0, "stream", 100, 0).tolist()
    assert made.tolist() != list(range(100))
    others = [draws.permutation(0, "stream", 100, 1), draws.permutation(1, "stream", 100, 0)]
    for other in others:
        # 100 shuffled places agree in about 1.
        assert int((made == other).sum()) < 10
    assert draws.permutation(0, "stream", 0, 0).tolist() == []
    assert draws.permutation(0, "stream", 1, 0).tolist() == [0]


def test_every_permutation_of_three_is_as_likely() -> None:
    seen = [tuple(draws.permutation(0, "stream", 3, epoch).tolist()) for epoch in range(3000)]
    counts = np.unique(np.array(seen), axis=0, return_counts=True)[1]
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-3


def test_choice_is_in_proportion_and_never_takes_weight_zero() -> None:
    picked = [draws.choice(0, "mix", [0.0, 3.0, 0.0, 1.0, 0.0], step) for step in range(2000)]
    assert set(picked) == {1, 3}
    # 1500 expected; the standard deviation is 19.
    assert 1400 < picked.count(1) < 1600


@pytest.mark.parametrize("edge", [2.0**-54, 1 - 2.0**-53])
def test_choice_at_the_edges(edge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "uniform", lambda *key: np.array(edge))
    for weights in ([0.0, 1.0, 0.0], [0.0, 0.1, 0.2, 0.7, 0.0], [1e-300, 1.0]):
        assert weights[draws.choice(0, "mix", weights, 0)] > 0
