"""How often prompts are solved, and how many groups of a size would be dead.

Owns the Beta-binomial of the solve rates, its fit, and the forecast of dead groups from it.
Refuses to own sampling and what solved means (`pilot.py`).

A group of G samples of a prompt with solve rate p has no spread with probability
D(p) = p^G + (1-p)^G. Over prompts whose rates follow Beta(a, b) that is
E[D] = B(a+G, b)/B(a, b) + B(a, b+G)/B(a, b), which is never less than D of the mean rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import betaln, gammaln

from surefoot import draws
from surefoot.statistics import Interval, wilson

SIZES = (2, 4, 8, 16, 32, 64)
_BOUND = 7.0
"""Of log a and log b: rates of 0 or 1 alone, and rates that are all the same, lie at it."""
_RESAMPLES = 200


def dead(p: float, size: int) -> float:
    """D(p): the probability that `size` samples of one solve rate are all right or all wrong."""
    return p**size + (1 - p) ** size


@dataclass(frozen=True, slots=True)
class BetaRates:
    """Solve rates of prompts that follow Beta(a, b)."""

    a: float
    b: float

    @property
    def mean(self) -> float:
        return self.a / (self.a + self.b)

    def all_right(self, size: int) -> float:
        """E[p^G]: every sample of a group is right."""
        return math.exp(float(betaln(self.a + size, self.b) - betaln(self.a, self.b)))

    def all_wrong(self, size: int) -> float:
        """E[(1-p)^G]."""
        return math.exp(float(betaln(self.a, self.b + size) - betaln(self.a, self.b)))

    def dead(self, size: int) -> float:
        return min(self.all_right(size) + self.all_wrong(size), 1.0)


def log_likelihood(solved: Sequence[int], tried: Sequence[int], rates: BetaRates) -> float:
    """Beta-binomial: log C(n, k) + log B(a+k, b+n-k) - log B(a, b), summed over prompts."""
    k, n = np.asarray(solved, dtype=np.float64), np.asarray(tried, dtype=np.float64)
    ways = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    terms = ways + betaln(rates.a + k, rates.b + n - k) - betaln(rates.a, rates.b)
    return float(terms.sum())


def fit(solved: Sequence[int], tried: Sequence[int], *, near: BetaRates | None = None) -> BetaRates:
    """The Beta of the greatest likelihood, log a and log b from -7 to 7; searched from `near`."""
    assert len(solved) == len(tried) and len(solved) > 0, (len(solved), len(tried))
    pairs, count = np.unique(np.stack([solved, tried], axis=1), axis=0, return_counts=True)
    k, n = pairs.astype(np.float64).T
    share = count / count.sum()

    def lack(point: NDArray[np.float64]) -> float:
        a, b = np.exp(point)
        return -float(share @ (betaln(a + k, b + n - k) - betaln(a, b)))

    # A little off the ends, where the mean has no logarithm.
    mean = float((share @ k + 0.01) / (share @ n + 0.02))
    starts = [(mean * size, (1 - mean) * size) for size in (0.5, 10.0)]
    if near is not None:
        starts = [(near.a, near.b)]
    ends = [
        minimize(
            lack,
            np.log(start).clip(-_BOUND, _BOUND),
            method="L-BFGS-B",
            bounds=[(-_BOUND, _BOUND)] * 2,
        )
        for start in starts
    ]
    a, b = np.exp(min(ends, key=lambda end: float(end.fun)).x)
    return BetaRates(float(a), float(b))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The share of dead groups to expect at one group size."""

    size: int
    dead: Interval
    all_right: float
    all_wrong: float


def forecast(
    solved: Sequence[int], tried: Sequence[int], sizes: Sequence[int], *, seed: int
) -> tuple[BetaRates, list[Forecast]]:
    """Fit, forecast for every size, and percentile limits from prompts drawn with replacement.

    Where every sample is right, or wrong, resamples are all alike and would claim certainty. There
    the low limit is the least of two worlds that the pilot does not exclude: all prompts have one
    rate, at the limit of Wilson's interval over samples; or prompts of rate 1/2 hide among the
    rest, as many as the limit over prompts allows.
    """
    counts = np.stack([np.asarray(solved), np.asarray(tried)], axis=1)
    rates = fit(solved, tried)
    found = np.empty((_RESAMPLES, len(sizes)))
    for round_ in range(_RESAMPLES):
        uniforms = draws.uniform(seed, "audit/forecast", round_, np.arange(len(counts)))
        drawn = counts[(uniforms * len(counts)).astype(np.int64)]
        again = fit(drawn[:, 0].tolist(), drawn[:, 1].tolist(), near=rates)
        found[round_] = [again.dead(size) for size in sizes]
    forecasts = []
    certain = sum(solved) in (0, sum(tried))
    for place, size in enumerate(sizes):
        estimate = rates.dead(size)
        low, high = np.quantile(found[:, place], [0.025, 0.975])
        if certain:
            hidden = wilson(0, len(tried))[1] * (1 - dead(0.5, size))
            low = min(dead(wilson(0, sum(tried))[1], size), 1 - hidden)
        limits = Interval(estimate, min(float(low), estimate), max(float(high), estimate))
        forecasts.append(Forecast(size, limits, rates.all_right(size), rates.all_wrong(size)))
    return rates, forecasts


def dead_by_subsets(groups: Sequence[Sequence[float]], size: int) -> float | None:
    """Share of dead groups of `size`, from larger groups of any scores; None where none is as big.

    Of n scores a random subset of G is all equal with probability sum_v C(n_v, G) / C(n, G), where
    n_v counts the value v: unbiased for groups of G, and nothing is assumed about the scores.
    """
    shares = []
    for scores in groups:
        if len(scores) >= size:
            values = list(scores)
            equal = sum(math.comb(values.count(value), size) for value in set(values))
            shares.append(equal / math.comb(len(values), size))
    return sum(shares) / len(shares) if shares else None


def needed_size(rates: BetaRates, most: float, *, limit: int = 64) -> int | None:
    """The smallest group size with a forecast of dead groups under `most`; None up to `limit`."""
    return next((size for size in range(2, limit + 1) if rates.dead(size) < most), None)
