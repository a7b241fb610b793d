"""Intervals, trends and the bootstrap: how sure a number is.

Owns the statistics that reports, comparisons and findings quote, each with its source.
Refuses to own what is measured and what is concluded from it; missing values are the caller's to
drop, because only the caller knows why they are missing.

Every function refuses an empty sample with `SurefootError` instead of returning a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from surefoot import draws
from surefoot.errors import SurefootError

_BLOCK = 1 << 20  # bootstrap indices drawn at once: bounds memory, never changes what is drawn


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with its confidence limits, all in the unit of the estimate."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope per unit of time with its confidence limits, and the p-value of no trend."""

    slope: float
    low: float
    high: float
    p: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion, as fractions in [0, 1].

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), without continuity correction
    (Wilson 1927; Newcombe 1998, doi 10.1002/(SICI)1097-0258(19980430)17:8<857, method 3).
    With no success the low limit is exactly 0, with only successes the high limit is exactly 1.
    n = 0, or successes outside 0..n, is a SurefootError.
    """
    if n < 1:
        raise SurefootError(f"an interval for a proportion needs at least one trial, not {n}")
    if not 0 <= successes <= n:
        raise SurefootError(f"{successes} successes of {n} trials: give a count between 0 and {n}")
    z = _normal_quantile(confidence)
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def paired_difference(
    before: Sequence[bool], after: Sequence[bool], confidence: float = 0.95
) -> Interval:
    """Newcombe's interval for the change of a proportion measured twice on the same items.

    The estimate is mean(after) - mean(before). With the Wilson limits l, u of both proportions,
    the distances a = p_after - l_after, b = u_before - p_before (and c, d likewise for the high
    side) are joined as sqrt(a² - 2 phi a b + b²). phi is the correlation of the paired table
    with its numerator reduced by n/2, but not below 0 when it was positive; it is 0 when a
    margin of the table is empty (Newcombe 1998, Stat. Med. 17:2635, method 10).

    `before[i]` and `after[i]` belong to the same item. Unequal lengths, or none, is a
    SurefootError. Two identical samples still have a width unless the table's corrected
    correlation is 1.
    """
    n = len(before)
    if n != len(after):
        raise SurefootError(
            f"a paired difference needs the same items twice: {n} before, {len(after)} after"
        )
    if n == 0:
        raise SurefootError("a paired difference needs at least one pair")
    pairs = [(bool(b), bool(a)) for b, a in zip(before, after, strict=True)]
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    after_share, before_share = (both + gained) / n, (both + lost) / n
    after_low, after_high = wilson(both + gained, n, confidence)
    before_low, before_high = wilson(both + lost, n, confidence)
    phi = _corrected_phi(both, gained, lost, neither)
    estimate = (gained - lost) / n
    down = _joined(after_share - after_low, before_high - before_share, phi)
    up = _joined(after_high - after_share, before_share - before_low, phi)
    return Interval(estimate, estimate - down, estimate + up)


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Student's t interval for a mean: m ± t_{n-1} s / sqrt(n), s with ddof 1.

    Fewer than two values, or a non-finite one, is a SurefootError. Equal values give an interval
    of width 0, which says that the sample has no spread, not that the mean is certain.
    """
    sample = _finite(values, "values")
    if len(sample) < 2:
        raise SurefootError(f"an interval for a mean needs two values or more, not {len(sample)}")
    mean = float(sample.mean())
    if sample.min() == sample.max():
        return Interval(float(sample[0]), float(sample[0]), float(sample[0]))
    error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
    half = float(stats.t.ppf(_upper(confidence), len(sample) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def bootstrap_interval(
    values: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], float] | None = None,
    *,
    seed: int,
    purpose: str = "bootstrap",
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of a statistic (Efron 1979); the mean unless one is given.

    Resample r takes element floor(n · u(seed, purpose, r, i)) for each i, with keyed uniforms:
    the same arguments give the same interval everywhere. One value gives width 0. No value, a
    non-finite one, or fewer than 1 resample is a SurefootError.
    """
    sample = _finite(values, "values")
    n = len(sample)
    if n == 0:
        raise SurefootError("a bootstrap needs at least one value")
    if resamples < 1:
        raise SurefootError(f"a bootstrap needs at least one resample, not {resamples}")
    tail = 1 - _upper(confidence)
    estimates = np.empty(resamples)
    block = max(1, _BLOCK // n)
    for start in range(0, resamples, block):
        rows = np.arange(start, min(start + block, resamples))
        uniforms = draws.uniform(seed, purpose, rows[:, None], np.arange(n))
        drawn = sample[(uniforms * n).astype(np.int64)]
        if statistic is None:
            estimates[rows] = drawn.mean(axis=1)
        else:
            estimates[rows] = [statistic(row) for row in drawn]
    low, high = np.quantile(estimates, [tail, 1 - tail])
    estimate = sample.mean() if statistic is None else statistic(sample)
    return Interval(float(estimate), float(low), float(high))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, unbiased: 1 - C(n-c, k) / C(n, k).

    `n` samples were drawn, `c` of them right (arXiv 2107.03374). Computed with whole numbers, so
    no overflow and no rounding before the last division. k outside 1..n, or c outside 0..n, is
    a SurefootError.
    """
    if not 1 <= k <= n:
        raise SurefootError(f"pass@{k} of {n} samples: k must lie between 1 and the samples drawn")
    if not 0 <= c <= n:
        raise SurefootError(f"{c} right of {n} samples: give a count between 0 and {n}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def trend(values: ArrayLike, times: ArrayLike | None = None, confidence: float = 0.95) -> Trend:
    """Theil-Sen slope with its limits, and the Mann-Kendall p-value of no monotonic trend.

    `times` defaults to 0, 1, 2, …; the slope is per unit of it. The p-value is that of Kendall's
    tau between times and values: exact for short series without ties, else by the normal
    approximation with ties corrected (Mann 1945; Sen 1968). A constant series has slope 0, p 1.
    Fewer than three values, unequal lengths, equal times or a non-finite value is a SurefootError.
    """
    series = _finite(values, "values")
    moments = np.arange(len(series), dtype=np.float64) if times is None else _finite(times, "times")
    if len(series) < 3:
        raise SurefootError(f"a trend needs three values or more, not {len(series)}")
    if len(series) != len(moments):
        raise SurefootError(f"{len(series)} values, but {len(moments)} times: give one for each")
    if moments.min() == moments.max():
        raise SurefootError("all times are equal: a trend needs at least two different times")
    _upper(confidence)  # refuses a confidence outside (0, 1), which theilslopes would take
    if series.min() == series.max():
        return Trend(0.0, 0.0, 0.0, 1.0)
    slope, _, low, high = stats.theilslopes(series, moments, alpha=confidence)
    p = stats.kendalltau(moments, series).pvalue
    return Trend(float(slope), float(low), float(high), float(p))


def _corrected_phi(both: int, gained: int, lost: int, neither: int) -> float:
    n = both + gained + lost + neither
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if margins == 0:
        return 0.0
    cross = both * neither - gained * lost
    numerator = max(cross - n / 2, 0.0) if cross > 0 else float(cross)
    return numerator / math.sqrt(margins)


def _joined(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(first * first - 2 * phi * first * second + second * second, 0.0))


def _upper(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise SurefootError(f"confidence {confidence} must lie strictly between 0 and 1")
    return (1 + confidence) / 2


def _normal_quantile(confidence: float) -> float:
    return float(stats.norm.ppf(_upper(confidence)))


def _finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise SurefootError(f"{name} must be one list of numbers, not {sample.ndim}-dimensional")
    bad = np.flatnonzero(~np.isfinite(sample))
    if len(bad):
        raise SurefootError(f"{name}[{bad[0]}] is not a finite number: drop missing values first")
    return sample
