"""Which labels of preference pairs are probably flipped, and how many in all.

Owns the estimate of the share of flipped labels with its interval, and each pair's probability of
being flipped. Refuses to own the scorer (`scorer.py`), and to guess: a signal too weak to tell is
reported as such.

The model: a pair's clean label is predicted with probability s(a m), s the logistic function, m
the out-of-fold margin and a its scale; the label as written is the clean one with probability
1 - e, whatever the pair. So a pair as written has likelihood (1 - e) s(a m) + e s(-a m). e and a
maximise it. e is told from a by the pairs of which the scorer is sure: with growing m the share
that agrees tends to 1 - e, not to 1 (anchor points: arXiv 1411.7718). The interval draws whole
prompts anew, with the margins as they are.

Exchanging all answers changes no likelihood but for the sign of every margin, which the scorer
learns from the same labels: 0 % and 100 % flipped look alike, and e ends at a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from surefoot import draws
from surefoot.audit.features import Compared
from surefoot.audit.scorer import Design, out_of_fold
from surefoot.statistics import Interval, wilson

Floats = NDArray[np.float64]

FEWEST = 100
"""Pairs below which nothing is estimated."""
WIDEST = 0.30
"""An interval of the rate wider than this is no estimate."""
RESAMPLES = 200
BUDGET = 0.025
"""Share of the clean pairs that a removal may cost, by the model's own probabilities.

Times 1 - 2e at the upper limit of e: the noisier the labels that it learned from, the less the
scorer's probabilities can be trusted. Half the five per cent promised at most.
"""
LEAST_SUSPECT = 1 / 3
"""A pair less likely flipped than this is never a suspect."""
TRAINED_FOR = (0.0, 0.1, 0.2, 0.3, 0.4)
_RATES = np.arange(0.0, 0.5001, 0.01)
_SCALES = np.geomspace(0.15, 12.0, 28)
_BLOCK = 1000


@dataclass(frozen=True, slots=True)
class Flips:
    """What out-of-fold scoring says of the labels.

    `agreement` is the share of labels that the scorer agrees with. `rate` is the estimated share of
    flipped labels, and None where the signal is too weak; `weak` says why. `margins` and
    `probabilities` (of being flipped; 0 without a rate) have one value a pair.
    """

    agreement: Interval
    rate: Interval | None
    weak: str
    margins: Floats
    probabilities: Floats

    def suspects(self) -> NDArray[np.int64]:
        """The pairs that are likeliest flipped, the surest first, within a cost of clean pairs.

        The clean pairs expected among them are at most a share of all clean pairs expected.
        """
        if self.rate is None:
            return np.zeros(0, dtype=np.int64)
        order = np.argsort(-self.probabilities, kind="stable")
        clean = 1.0 - self.probabilities[order]
        budget = BUDGET * max(1 - 2 * self.rate.high, 0.0)
        fits = np.cumsum(clean) <= budget * clean.sum()
        likely = self.probabilities[order] >= LEAST_SUSPECT
        chosen: NDArray[np.int64] = order[fits & likely]
        return chosen


def find(pairs: Sequence[Compared], *, seed: int = 0) -> Flips:
    """Score every pair out of fold, and estimate the share of flipped labels.

    The scorer is trained for several shares of wrong labels; of these the margins count that make
    the labels of unseen prompts likeliest.
    """
    nothing = np.zeros(len(pairs))
    prompts = len({pair.key for pair in pairs})
    if prompts < FEWEST:
        why = f"{prompts} prompts are too few to learn from; {FEWEST} are needed"
        return Flips(Interval(0.5, 0.0, 1.0), None, why, nothing, nothing)
    design = Design.of(pairs)
    tried = [out_of_fold(design, flipped=share, seed=seed) for share in TRAINED_FOR]
    return judged(max(tried, key=likelihood), design.prompts, seed=seed)


def judged(margins: Floats, prompts: NDArray[np.int64], *, seed: int) -> Flips:
    """The rate and each pair's probability, from margins and the number of each pair's prompt."""
    agreement = agreeing(margins, prompts)
    nothing = np.zeros(len(margins))
    if agreement.low <= 0.5:
        why = (
            f"the scorer agrees with {_share(agreement)} of the labels of prompts it did not learn "
            "from, which is no more than chance"
        )
        return Flips(agreement, None, why, margins, nothing)
    rate, scale = estimated(margins, prompts, seed=seed)
    if rate.high - rate.low > WIDEST:
        why = (
            f"any share of flipped labels between {rate.low:.0%} and {rate.high:.0%} fits: the "
            f"scorer agrees with {_share(agreement)} of the labels, and is sure of too few pairs"
        )
        return Flips(agreement, None, why, margins, nothing)
    return Flips(agreement, rate, "", margins, probability(margins, rate.estimate, scale))


def agreeing(margins: Floats, prompts: NDArray[np.int64]) -> Interval:
    """The share of positive margins; pairs of one prompt count as one observation between them.

    A margin of 0 agrees by half. Wilson's limits, with as many trials as there are prompts.
    """
    agree = (margins > 0) + 0.5 * (margins == 0)
    size = np.bincount(prompts)
    trials = int(np.count_nonzero(size))
    share = float(agree.mean())
    low, high = wilson(round(share * trials), trials)
    return Interval(share, low, high)


def estimated(margins: Floats, prompts: NDArray[np.int64], *, seed: int) -> tuple[Interval, float]:
    """(the share of flipped labels with its bootstrap interval, the scale of the margins)."""
    size = float(np.sqrt(np.mean(margins**2))) or 1.0
    order = np.argsort(prompts, kind="stable")
    sorted_prompts = np.unique(prompts[order], return_inverse=True)[1]
    count = int(sorted_prompts.max()) + 1
    uniforms = draws.uniform(seed, "audit/flips", np.arange(RESAMPLES)[:, None], np.arange(count))
    drawn = (uniforms * count).astype(np.int64)
    times = np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(np.float64)
    whole = np.zeros(len(_RATES) * len(_SCALES))
    again = np.zeros((RESAMPLES, len(whole)))
    for start in range(0, len(order), _BLOCK):
        part = order[start : start + _BLOCK]
        likely = _likelihoods(margins[part] / size)
        whole += likely.sum(axis=0)
        again += times[:, sorted_prompts[start : start + _BLOCK]] @ likely
    best = int(whole.argmax())
    rates = _RATES[again.argmax(axis=1) // len(_SCALES)]
    low, high = np.quantile(rates, [0.025, 0.975])
    rate = float(_RATES[best // len(_SCALES)])
    interval = Interval(rate, min(float(low), rate), max(float(high), rate))
    return interval, float(_SCALES[best % len(_SCALES)]) / size


def likelihood(margins: Floats) -> float:
    """The log-likelihood of the labels at the best e and a."""
    size = float(np.sqrt(np.mean(margins**2))) or 1.0
    blocks = (margins[start : start + _BLOCK] for start in range(0, len(margins), _BLOCK))
    whole: Floats = sum(
        (_likelihoods(block / size).sum(axis=0) for block in blocks),
        np.zeros(len(_RATES) * len(_SCALES)),
    )
    return float(whole.max())


def probability(margins: Floats, rate: float, scale: float) -> Floats:
    """Of each pair, the probability that its label is flipped."""
    if rate <= 0:
        return np.zeros(len(margins))
    found: Floats = expit(logit(rate) - scale * margins)
    return found


def _likelihoods(margins: Floats) -> Floats:
    """log((1 - e) s(a m) + e s(-a m)) of each margin (rows) at each e and a (columns)."""
    sure = expit(margins[:, None] * _SCALES)
    rates = _RATES[None, :, None]
    mixed = sure[:, None, :] * (1 - 2 * rates) + rates
    found: Floats = np.log(mixed).reshape(len(margins), -1)
    return found


def _share(value: Interval) -> str:
    return f"{value.estimate:.1%} [{value.low:.1%}, {value.high:.1%}]"
