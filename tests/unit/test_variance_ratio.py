"""The interval of a ratio of variances: clusters kept whole, known coverage, and when it is absent.

Data are simulated so that the true ratio is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from surefoot.errors import SurefootError
from surefoot.statistics import Interval, variance_ratio_interval

GROUP, TOKENS = 4, 5


def normal(prompts: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int]]:
    """Returns that share a prompt's part and a completion's part, and a critic that sees half.

    Left is u/2 + e - n, the whole u + e, with variances u 1, e 1, n 1/4: 1.5 / 2.
    """
    rng = np.random.default_rng([5, prompts, seed])
    shape = (prompts, GROUP, TOKENS)
    u = np.broadcast_to(rng.normal(size=(prompts, 1, 1)), shape)
    e = np.broadcast_to(rng.normal(size=(prompts, GROUP, 1)), shape)
    noise = rng.normal(scale=0.5, size=shape)
    return (u / 2 + e - noise).ravel(), (u + e).ravel(), owners(prompts)


def binary(prompts: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int]]:
    """Returns 1 or 0, with rate p 0.2 or 0.8 by the prompt, and a critic p/2 + 1/4 + n.

    The whole has variance 1/4; left is (r - p) + (p - 1/2)/2 - n, with variances 0.16, 0.0225 and
    0.01: 0.1925.
    """
    rng = np.random.default_rng([6, prompts, seed])
    shape = (prompts, GROUP, TOKENS)
    p = rng.choice([0.2, 0.8], size=(prompts, 1, 1))
    r = np.broadcast_to(rng.random((prompts, GROUP, 1)) < p, shape).astype(float)
    critic = p / 2 + 0.25 + rng.normal(scale=0.1, size=shape)
    return (r - critic).ravel(), r.ravel(), owners(prompts)


def owners(prompts: int) -> list[int]:
    return np.repeat(np.arange(prompts), GROUP * TOKENS).tolist()


def interval(left: object, whole: object, clusters: object, **changes: int) -> Interval | None:
    given = {"seed": 0, "place": 1, **changes}
    return variance_ratio_interval(left, whole, clusters, purpose="test", **given)


def covered(found: Interval | None, truth: float) -> bool:
    assert found is not None
    return found.low <= truth <= found.high


@pytest.mark.parametrize(
    ("batch", "prompts", "truth"),
    [(binary, 8, 0.77), (binary, 16, 0.77), (normal, 16, 0.75), (normal, 32, 0.75)],
)
def test_it_covers_the_truth_about_as_often_as_it_says(
    batch: Any, prompts: int, truth: float
) -> None:
    hits = [covered(interval(*batch(prompts, seed)), truth) for seed in range(300)]
    assert 0.89 <= np.mean(hits) <= 0.99


def test_values_taken_as_independent_would_not() -> None:
    hits = []
    for seed in range(100):
        left, whole, owner = normal(32, seed)
        hits.append(covered(interval(left, whole, range(len(owner)), resamples=200), 0.75))
    assert np.mean(hits) < 0.7


def test_two_clusters_by_hand() -> None:
    # Twice the first: 1 / 4. Twice the second: 0 / 4. Both: 0.75 / 29. With two clusters the
    # limits are the extremes.
    found = interval([0, 2, 0, 0], [0, 4, 10, 14], ["a", "a", "b", "b"])
    assert found is not None
    assert (found.low, found.high) == (0.0, 0.25)
    assert found.estimate == pytest.approx(0.75 / 29)


def test_clusters_of_unequal_size_weigh_by_their_values() -> None:
    found = interval([3, 0, 0, 1, 1], [4, 0, 0, 1, 5], [7, 2, 2, 2, 7])
    # left mean 1, squares 11/5: 1.2; whole mean 2, squares 42/5: 4.4.
    assert found is not None and found.estimate == pytest.approx(1.2 / 4.4)


def test_the_order_of_values_and_the_names_of_clusters_do_not_matter() -> None:
    left, whole, owner = normal(6, 0)
    shuffled = np.random.default_rng(0).permutation(len(owner))
    names = np.array([f"p{o}" for o in owner])
    one = interval(left, whole, owner)
    other = interval(left[shuffled], whole[shuffled], names[shuffled])
    assert one is not None and other is not None
    assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-12)


def test_it_is_a_function_of_its_key() -> None:
    left, whole, owner = normal(8, 1)
    state = np.random.get_state()[1].tolist()
    first = interval(left, whole, owner)
    assert interval(left, whole, owner) == first
    assert interval(left, whole, owner, seed=1) != first
    assert interval(left, whole, owner, place=2) != first
    assert np.random.get_state()[1].tolist() == state


def test_tiny_gaps_count_as_large_ones_do() -> None:
    left, whole, owner = normal(8, 2)
    # A power of two changes no digit; the square of 2^-600 is 0.
    assert interval(left * 2.0**-600, whole * 2.0**-600, owner) == interval(left, whole, owner)


def test_left_equal_to_whole_is_one_and_a_perfect_critic_is_zero() -> None:
    left, whole, owner = normal(8, 3)
    same = interval(whole, whole, owner)
    none = interval(0 * left, whole, owner)
    assert same == Interval(1.0, 1.0, 1.0) and none == Interval(0.0, 0.0, 0.0)


@pytest.mark.parametrize("prompts", [2, 3, 8, 64])
def test_one_cluster_with_spread_says_nothing_and_two_do(prompts: int) -> None:
    owner = np.repeat(np.arange(prompts), 4)
    whole = np.full(len(owner), 0.7)
    left = np.linspace(0, 1, len(owner))
    assert interval(left, whole, owner) is None
    whole[0] = 1.0
    assert interval(left, whole, owner) is None
    whole[-1] = 1.0
    assert interval(left, whole, owner) is not None


def test_one_cluster_says_nothing() -> None:
    assert interval([1, 2, 3], [4, 5, 7], [0, 0, 0]) is None
    assert interval([], [], []) is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SurefootError, match="2 values left, 3 of the whole, 3 clusters"):
        interval([1, 2], [1, 2, 3], [0, 1, 2])
    with pytest.raises(SurefootError, match=r"left\[1\] is not a finite number"):
        interval([1, np.nan], [1, 2], [0, 1])
    with pytest.raises(SurefootError, match="at least one resample"):
        interval([1, 2], [1, 2], [0, 1], resamples=0)
