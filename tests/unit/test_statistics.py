"""Intervals and trends against published numbers, hand counts and coverage."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from surefoot import draws
from surefoot.errors import SurefootError
from surefoot.statistics import (
    bootstrap_interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    trend,
    wilson,
)


def paired(both, lost, gained, neither):
    """(before, after) with these counts; lost = right before only."""
    before = [True] * (both + lost) + [False] * (gained + neither)
    after = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return before, after


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published_examples(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_one_of_two_by_hand():
    # p = 1/2, z² = 3.841459: centre 1/2, half = sqrt(1/8 + z²/16) z / (1 + z²/2) = 0.405466
    low, high = wilson(1, 2)
    assert (low, high) == pytest.approx((0.094531, 0.905469), abs=1e-6)


def test_wilson_edges_are_exact_and_mirrored():
    assert wilson(0, 7)[0] == 0.0
    assert wilson(7, 7)[1] == 1.0
    low, high = wilson(2, 9)
    assert wilson(7, 9) == pytest.approx((1 - high, 1 - low))
    assert wilson(2, 9, confidence=0.99)[0] < low


@pytest.mark.parametrize(
    "call",
    [
        lambda: wilson(0, 0),
        lambda: wilson(3, 2),
        lambda: wilson(-1, 2),
        lambda: wilson(1, 2, confidence=1.0),
        lambda: paired_difference([], []),
        lambda: paired_difference([True], [True, False]),
        lambda: mean_interval([1.0]),
        lambda: mean_interval([1.0, math.nan]),
        lambda: mean_interval([[1.0, 2.0]]),
        lambda: bootstrap_interval([], seed=0),
        lambda: bootstrap_interval([1.0], seed=0, resamples=0),
        lambda: pass_at_k(3, 1, 4),
        lambda: pass_at_k(3, 1, 0),
        lambda: pass_at_k(3, 4, 1),
        lambda: trend([1.0, 2.0]),
        lambda: trend([1.0, 2.0, 3.0], [0.0, 1.0]),
        lambda: trend([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]),
        lambda: trend([1.0, 2.0, math.inf]),
        lambda: trend([1.0, 2.0, 3.0], confidence=0.0),
    ],
)
def test_what_has_no_answer_is_refused(call):
    with pytest.raises(SurefootError):
        call()


def test_paired_difference_published_example_with_correlation():
    # Altman et al. 2000, Statistics with Confidence, table 6.2: 14, 5, 0, 22. By hand:
    # phi = (14·22 - 41/2) / sqrt(19·22·14·27) = 0.7233
    interval = paired_difference(*paired(both=14, lost=0, gained=5, neither=22))
    assert interval.estimate == pytest.approx(5 / 41)
    assert (interval.low, interval.high) == pytest.approx((0.0115, 0.2265), abs=5e-5)


def test_paired_difference_published_example_where_the_correction_takes_phi_to_zero():
    # Airway hyper-responsiveness, 21 children (Fagerland et al. 2013): 1, 1, 7, 12
    interval = paired_difference(*paired(both=1, lost=7, gained=1, neither=12))
    assert interval.estimate == pytest.approx(-6 / 21)
    assert (interval.low, interval.high) == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_paired_difference_negative_correlation_is_not_corrected():
    # 1, 4, 4, 1: p = 1/2 twice, phi = (1 - 16)/25 = -0.6; Wilson of 5/10 is 0.5 ± 0.263407,
    # so the half width is 0.263407 sqrt(2 + 1.2) = 0.471197
    interval = paired_difference(*paired(both=1, lost=4, gained=4, neither=1))
    assert interval.estimate == 0.0
    assert interval.high == pytest.approx(0.471197, abs=2e-5)
    assert interval.low == -interval.high


def test_paired_difference_turns_its_sign_with_the_order():
    before, after = paired(both=5, lost=2, gained=9, neither=4)
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert back.estimate == -there.estimate
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


@pytest.mark.parametrize("counts", [(9, 0, 0, 0), (0, 0, 0, 9), (0, 9, 0, 0), (0, 0, 9, 0)])
def test_paired_difference_with_an_empty_margin_stays_in_range(counts):
    interval = paired_difference(*paired(*counts))
    assert -1 <= interval.low <= interval.estimate <= interval.high <= 1
    assert interval.high > interval.low


def test_paired_difference_takes_numpy():
    before, after = paired(both=14, lost=0, gained=5, neither=22)
    assert paired_difference(np.array(before), np.array(after)) == paired_difference(before, after)


def test_mean_interval_by_hand():
    # 1, 2, 3: s = 1, standard error 0.57735, t(2) = 4.302653
    interval = mean_interval([1, 2, 3])
    assert interval.estimate == 2.0
    assert (interval.low, interval.high) == pytest.approx((-0.484138, 4.484138), abs=1e-5)
    same = mean_interval([0.7] * 8)
    assert (same.low, same.estimate, same.high) == (0.7, 0.7, 0.7)


def test_bootstrap_is_a_function_of_its_arguments():
    values = np.sqrt(np.arange(20.0))
    one = bootstrap_interval(values, seed=1)
    assert one == bootstrap_interval(values, seed=1)
    assert one != bootstrap_interval(values, seed=2)
    assert one != bootstrap_interval(values, seed=1, purpose="other")
    assert bootstrap_interval([0, 1, 1, 3, 9], seed=1).estimate == pytest.approx(2.8)
    assert bootstrap_interval([0, 1, 1, 3, 9], np.median, seed=1).estimate == 1.0
    assert bootstrap_interval(values, lambda row: float(row.mean()), seed=1) == one


def test_bootstrap_of_two_values_has_the_binomial_tails():
    # Means of resamples of (0, 1) are 0, ½, 1 with chances ¼, ½, ¼
    wide = bootstrap_interval([0.0, 1.0], seed=0, confidence=0.6)
    narrow = bootstrap_interval([0.0, 1.0], seed=0, confidence=0.4)
    assert (wide.low, wide.high) == (0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    assert bootstrap_interval([4.0], seed=0).low == 4.0


def test_bootstrap_in_blocks_is_the_same(monkeypatch):
    values = np.arange(20.0)
    whole = bootstrap_interval(values, seed=3, resamples=300)
    monkeypatch.setattr("surefoot.statistics._BLOCK", 70)
    assert bootstrap_interval(values, seed=3, resamples=300) == whole


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_counts_the_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            share = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(n, c, k) == pytest.approx(float(share))


def test_pass_at_k_survives_large_counts():
    assert pass_at_k(5000, 1, 2500) == 0.5
    assert pass_at_k(5000, 0, 10) == 0.0
    assert pass_at_k(10, 8, 3) == 1.0


def test_trend_of_a_line_with_an_outlier():
    # 0, 2, 4, 6, 100: ten slopes, six of them 2, so the median is 2; all 10 pairs rise, and one
    # order of 5! = 120 rises throughout, one falls: p = 2/120
    found = trend([0, 2, 4, 6, 100])
    assert found.slope == 2.0
    assert found.p == pytest.approx(2 / 120)
    assert found.low <= 2.0 <= found.high
    assert trend([100, 6, 4, 2, 0]).slope == -2.0


def test_trend_uses_the_times():
    assert trend([0, 2, 4, 6], [0, 10, 20, 30]).slope == pytest.approx(0.2)


def test_trend_limits_widen_with_confidence():
    series = [0.0, 3.0, 1.0, 4.0, 2.0, 6.0, 5.0, 9.0, 7.0, 8.0]
    half, usual, sure = (trend(series, confidence=level) for level in (0.5, 0.95, 0.99))
    assert usual == trend(series)
    assert sure.low < usual.low < half.low <= usual.slope <= half.high < usual.high < sure.high


def test_trend_of_a_constant_is_none():
    found = trend([3.0] * 6)
    assert (found.slope, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_trend_of_noise_is_rarely_sure():
    series = draws.uniform(0, "noise", np.arange(200)[:, None], np.arange(12))
    false_alarms = sum(trend(row).p < 0.05 for row in series)
    assert false_alarms <= 20  # 10 expected, standard deviation 3.1


def test_intervals_cover_as_often_as_they_say():
    # 400 samples of 15 pairs; before and after share their item's difficulty
    shape = np.arange(400)[:, None], np.arange(15)
    item = draws.uniform(1, "item", *shape)
    before = 0.5 * item + 0.5 * draws.uniform(1, "before", *shape) < 0.4
    after = 0.5 * item + 0.5 * draws.uniform(1, "after", *shape) < 0.6
    # P((u + v)/2 < 0.4) = 0.8²/2 = 0.32; P(... < 0.6) = 1 - 0.32
    true_difference = 0.36
    covered = 0
    for b, a in zip(before, after, strict=True):
        interval = paired_difference(b, a)
        covered += interval.low <= true_difference <= interval.high
    assert 370 <= covered <= 399


def test_importing_statistics_and_data_does_not_import_torch():
    code = "import surefoot.statistics, surefoot.data, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
