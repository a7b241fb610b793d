"""The numbers of the reward audit: dead groups, the Beta-binomial, noise, and clustered shares."""

from __future__ import annotations

import math

import pytest

from surefoot.audit.golds import rates
from surefoot.audit.noise import measure
from surefoot.audit.sampling import GROUP_BASELINES
from surefoot.audit.solve_rates import (
    BetaRates,
    dead,
    dead_by_subsets,
    fit,
    forecast,
    log_likelihood,
    needed_size,
)
from surefoot.errors import SurefootError
from surefoot.methods import types
from surefoot.statistics import Interval, clustered_share, independent_difference, wilson


@pytest.mark.parametrize(
    ("p", "shares"),
    [  # of groups of 2, 4, 8, 16
        (0.02, (0.96, 0.92, 0.85, 0.72)),
        (0.05, (0.905, 0.815, 0.66, 0.44)),
        (0.1, (0.82, 0.66, 0.43, 0.19)),
        (0.2, (0.68, 0.41, 0.17, 0.03)),
        (0.5, (0.5, 0.125, 0.0078, 0.00003)),
    ],
)
def test_dead_groups_of_one_solve_rate(p, shares):
    for size, share in zip((2, 4, 8, 16), shares, strict=True):
        assert dead(p, size) == pytest.approx(share, abs=0.005)
        assert dead(1 - p, size) == pytest.approx(dead(p, size))


def test_dead_groups_of_uniform_rates_by_hand():
    # The integral of p^G over (0, 1) is 1/(G+1), and both ends count.
    rates_of = BetaRates(1.0, 1.0)
    for size in (2, 4, 8, 64):
        assert rates_of.dead(size) == pytest.approx(2 / (size + 1))
    # Beta(2, 2) has density 6p(1-p): the integral of 6p^3(1-p) is 6/20.
    assert BetaRates(2.0, 2.0).all_right(2) == pytest.approx(0.3)
    assert BetaRates(2.0, 2.0).dead(2) == pytest.approx(0.6)


def test_the_mean_of_d_is_above_d_of_the_mean():
    # Rates near 0.02 and near 0.98 average one half, whose groups of 8 are hardly ever dead.
    spread = BetaRates(0.1, 0.1)
    assert spread.mean == 0.5
    assert dead(0.5, 8) < 0.01 < 0.7 < spread.dead(8)


def test_beta_binomial_of_uniform_rates_gives_every_count_alike():
    for solved in range(9):
        assert log_likelihood([solved], [8], BetaRates(1.0, 1.0)) == pytest.approx(-math.log(9))


def test_the_fit_finds_the_rates_that_the_counts_follow():
    # Under Beta(1, 1) all of 0..8 are alike; under Beta(2, 1) count k of 3 has weight k + 1.
    even = fit(list(range(9)) * 20, [8] * 180)
    assert (even.a, even.b) == pytest.approx((1.0, 1.0), rel=0.01)
    counts = [0] * 10 + [1] * 20 + [2] * 30 + [3] * 40
    rising = fit(counts, [3] * 100)
    assert (rising.a, rising.b) == pytest.approx((2.0, 1.0), rel=0.01)


def test_the_fit_of_prompts_that_all_behave_alike_or_are_certain():
    alike = fit([4] * 50, [8] * 50)
    assert alike.dead(8) < 0.02
    never = fit([0] * 50, [8] * 50)
    assert never.mean < 0.001 and never.dead(8) > 0.999
    split = fit([0] * 25 + [8] * 25, [8] * 50)
    assert split.mean == pytest.approx(0.5, abs=0.02) and split.dead(8) > 0.99


def test_the_forecast_holds_the_truth_of_known_rates():
    # Rates of Beta(1/2, 1/2): k of 8 with probability C(2k, k) C(16-2k, 8-k) / 4^8, and the mean of
    # p^G is C(2G, G) / 4^G, which makes 140/256 dead groups of 4 and 25740/65536 of 8.
    weights = [math.comb(2 * k, k) * math.comb(16 - 2 * k, 8 - k) / 4**8 for k in range(9)]
    solved = [k for k, weight in enumerate(weights) for _ in range(round(150 * weight))]
    rates_of, found = forecast(solved, [8] * len(solved), (4, 8), seed=0)
    assert (rates_of.a, rates_of.b) == pytest.approx((0.5, 0.5), rel=0.05)
    for each, truth in zip(found, (140 / 256, 25740 / 65536), strict=True):
        assert each.dead.estimate == pytest.approx(truth, abs=0.02)
        assert each.dead.low < truth < each.dead.high
        assert each.all_right == pytest.approx(each.all_wrong, rel=0.05)


def test_a_pilot_that_solved_nothing_is_not_certain():
    # Wilson's limit for 0 of 512 samples is z²/(512 + z²) = 0.007447: groups of 8 are dead with
    # probability 0.94196 at that rate, and that is less than with prompts of rate 1/2 hidden.
    _, (eight, large) = forecast([0] * 64, [8] * 64, (8, 64), seed=0)
    assert eight.dead.low == pytest.approx(0.94196, abs=1e-4)
    assert eight.dead.high == pytest.approx(1.0, abs=1e-3)
    assert large.dead.low == pytest.approx((1 - 0.007447) ** 64, abs=1e-3)


def test_the_group_size_that_is_needed():
    # 2/(G+1) falls under 0.3 at G = 6: 2/6 is 0.333, 2/7 is 0.286.
    assert needed_size(BetaRates(1.0, 1.0), 0.3) == 6
    assert needed_size(BetaRates(0.001, 10.0), 0.3) is None


def test_dead_groups_of_any_scores_by_counting_subsets():
    # Of 0, 0, 1, 1 two of six pairs are equal, and no four.
    assert dead_by_subsets([[0.0, 0.0, 1.0, 1.0]], 2) == pytest.approx(1 / 3)
    assert dead_by_subsets([[0.0, 0.0, 1.0, 1.0]], 4) == 0.0
    assert dead_by_subsets([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3]], 3) == 0.5
    assert dead_by_subsets([[0.5, 0.5]], 3) is None


def test_the_baselines_of_dead_groups_are_those_of_the_rows():
    assert GROUP_BASELINES == types.GROUP_BASELINES


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0000),
    ],
)
def test_difference_of_independent_shares_published_examples(first, second, low, high):
    shares = [Interval(k / n, *wilson(k, n)) for k, n in (first, second)]
    found = independent_difference(*shares)
    assert found.estimate == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_a_share_of_single_trials_is_wilsons():
    found = clustered_share([1] * 81 + [0] * 182, [1] * 263)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert clustered_share([1, 0, 0], [1, 1, 0]).estimate == 0.5


def test_a_share_of_clusters_that_agree_inside_by_hand():
    # Two clusters of two, all and none: the design effect is 0.25 / (0.25 / 3) = 3, so 4/3 trials
    # count: half = 1.671959 / 3.881094 = 0.430796.
    found = clustered_share([2, 0], [2, 2])
    assert (found.low, found.high) == pytest.approx((0.069204, 0.930796), abs=1e-5)
    # Clusters that balance inside count in full, never as more than their trials.
    even = clustered_share([1, 1], [2, 2])
    assert (even.low, even.high) == pytest.approx(wilson(2, 4))


def test_a_share_without_a_success_counts_clusters():
    found = clustered_share([0] * 20, [5] * 20)
    assert found.low == 0.0
    assert found.high == pytest.approx(wilson(0, 20)[1])


@pytest.mark.parametrize(
    ("successes", "trials"), [([], []), ([0], [0]), ([3], [2]), ([1], [1, 1]), ([1], [0])]
)
def test_a_share_of_nothing_is_refused(successes, trials):
    with pytest.raises(SurefootError):
        clustered_share(successes, trials)


def test_j_of_counts_by_row():
    # Ten rows: every right answer accepted, of twenty wrong ones those of two rows.
    found = rates([(1, 1, 2, 2)] * 2 + [(1, 1, 0, 2)] * 8)
    assert found is not None
    assert (found.tpr.estimate, found.fpr.estimate) == (1.0, 0.2)
    assert found.j.estimate == pytest.approx(0.8)
    assert found.j.low < 0.8 < found.j.high <= 1.0
    assert rates([(1, 1, 0, 0)]) is None


def test_noise_by_hand():
    # Two completions scored 0, 2 and 4, 6: variance inside 2 each, of the means (1, 5) 8; real
    # variance 8 - 2/2 = 7, so 7/9 of it is real. The group's spread over the noise is 2.
    found = measure([[0.0, 2.0], [4.0, 6.0]], [0, 0])
    assert found.std == pytest.approx(math.sqrt(2))
    assert found.icc is not None and found.icc.estimate == pytest.approx(7 / 9)
    assert found.group_std == pytest.approx((math.sqrt(8),))
    assert found.snr == pytest.approx((2.0,))


def test_equal_scores_are_no_noise_and_no_spread():
    found = measure([[0.7] * 3, [0.7] * 3], [0, 0])
    assert (found.std, found.icc, found.snr) == (0.0, None, None)
    steady = measure([[0.1] * 3, [0.9] * 3], [0, 1])
    assert steady.std == 0.0 and steady.icc is not None and steady.icc.estimate == 1.0
