"""Which of two answers is the better one, learned from the labels and asked of unseen prompts.

Owns the out-of-fold margins: positive where the scorer agrees with the label as written, by a model
that learned from no pair of that prompt; how the prompt's other pairs went is read as an input
(`features.records`). Refuses to own what follows from them (`flips.py`).

Labels may be wrong in training too: the loss is that of labels of which a given share is flipped
at random (robust logistic regression, doi 10.1007/978-3-642-33460-3_15).

Two layers. The words of both answers make one number: a logistic model without an intercept, since
exchanging the answers must change the sign, with a penalty for each word by how surely it tells
(below). That number, the shapes and the record make the margin in a second one.

A word w that n prompts tell apart has z = sum of x over sqrt(sum of x²), x summed within a prompt.
Its weight has prior variance 4 (z² - 1) (1 - lfdr(z)) / n: empirical Bayes, with the local false
discovery rate lfdr the count of |z| expected of words that say nothing over the count found
(Efron 2004, doi 10.1198/016214504000000089), plus twice the root of the expected count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse, stats
from scipy.special import expit

from surefoot import draws
from surefoot.audit import features
from surefoot.audit.features import Compared

Floats = NDArray[np.float64]
FOLDS = 5
# Words that fewer prompts tell apart cannot be learned from.
_RAREST = 8
_LEAST_Z = 1.5
# Penalties of the second layer, in units of one pair's information (1/4).
_SHAPE_PENALTY, _RECORD_PENALTY = 4.0, 0.4
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Design:
    """The pairs as numbers, in the order they are written in."""

    words: sparse.csr_matrix
    shapes: Floats
    units: Floats
    records: Floats
    prompts: NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Sequence[Compared]) -> Design:
        shapes = features.shapes(pairs)
        size = np.sqrt(np.mean(shapes**2, axis=0)) if len(shapes) else np.ones(shapes.shape[1])
        units = np.where(size > 0, size, 1.0)
        return cls(
            features.words(pairs),
            shapes / units,
            units,
            features.records(pairs),
            features.prompts_of(pairs),
        )

    @property
    def count(self) -> int:
        return len(self.prompts)


def out_of_fold(design: Design, *, flipped: float, seed: int) -> Floats:
    """The margin of every pair, by a scorer that was trained on other prompts.

    `flipped` is the share of wrong labels that training reckons with.
    """
    fold = _folds(design.prompts, seed)
    second = _second(design, _told(design, fold, flipped))
    margins = np.zeros(design.count)
    for out, rest in _splits(fold):
        weights = _second_weights(second[rest], design.shapes.shape[1], flipped)
        margins[out] = second[out] @ weights
    return margins


def transferred(train: Design, target: Design, *, seed: int) -> Floats:
    """The margins of `target` by a scorer trained on `train`, whose labels are taken as right.

    Records take no part: those of the target come from the very labels that are to be judged.
    """
    told = _told(train, _folds(train.prompts, seed), 0.0)
    second = _second(train, told)[:, :-1]
    weights = _second_weights(second, train.shapes.shape[1], 0.0)
    asked = target.words @ word_weights(train.words, train.prompts, 0.0)
    # The target's shapes in the units of the training ones.
    shapes = target.shapes * (target.units / train.units)
    found: Floats = np.column_stack([asked / _size(told), shapes]) @ weights
    return found


def _told(design: Design, fold: NDArray[np.int64], flipped: float) -> Floats:
    told = np.zeros(design.count)
    for out, rest in _splits(fold):
        weights = word_weights(design.words[rest], design.prompts[rest], flipped)
        told[out] = design.words[out] @ weights
    return told


def word_weights(words: sparse.csr_matrix, prompts: NDArray[np.int64], flipped: float) -> Floats:
    """The weight of every hashed word, most of them 0."""
    weights = np.zeros(words.shape[1])
    if words.shape[0] == 0:
        return weights
    owner = np.unique(prompts, return_inverse=True)[1]
    shape = (int(owner.max()) + 1, words.shape[0])
    gather = sparse.csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))), shape)
    by_prompt = (gather @ words).tocsr()
    told_apart = np.bincount(by_prompt.indices, minlength=words.shape[1])
    square = np.asarray(by_prompt.multiply(by_prompt).sum(axis=0)).ravel()
    z = np.asarray(by_prompt.sum(axis=0)).ravel() / np.sqrt(np.maximum(square, 1.0))
    common = told_apart >= _RAREST
    sure = np.zeros(len(z))
    sure[common] = 1.0 - _false_discovery(np.abs(z[common]), told_apart[common])
    kept = np.flatnonzero((sure > 0) & (np.abs(z) > _LEAST_Z))
    if len(kept) == 0:
        return weights
    information = np.asarray(abs(words[:, kept]).sum(axis=0)).ravel() / 4
    variance = np.maximum(z[kept] ** 2 - 1, 0.1) * sure[kept] / information
    weights[kept] = logistic(words[:, kept], 1.0 / variance, flipped)
    return weights


def logistic(
    rows: sparse.csr_matrix | Floats,
    penalty: Floats,
    flipped: float,
    *,
    least: Floats | None = None,
) -> Floats:
    """The w that minimises -sum log((1 - e) s(row·w) + e s(-row·w)) + sum penalty w² / 2.

    e is `flipped`, s the logistic function; no element of w is under its `least`. Not convex for
    e > 0, so a minimum near 0: it starts there.
    """
    turned = rows.T.tocsr() if sparse.issparse(rows) else rows.T

    def cost(weights: Floats) -> tuple[float, Floats]:
        sure = expit(rows @ weights)
        right = np.maximum((1 - 2 * flipped) * sure + flipped, 1e-300)
        loss = float(-np.log(right).sum() + 0.5 * np.sum(penalty * weights**2))
        slope = (1 - 2 * flipped) * sure * (1 - sure) / right
        return loss, penalty * weights - turned @ slope

    bounds = None if least is None else [(low, np.inf) for low in least]
    start = np.zeros(rows.shape[1])
    found = optimize.minimize(
        cost, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _ROUNDS}
    )
    weights: Floats = found.x
    return weights


def _false_discovery(size: Floats, told_apart: NDArray[np.int64]) -> Floats:
    """The share of words that say nothing among those with a |z| like each one's.

    Words are compared with words about as frequent: rare ones are many, and few of them tell.
    """
    share = np.ones(len(size))
    stratum = np.floor(np.log(told_apart) / np.log(4.0))
    for level in np.unique(stratum):
        those = np.flatnonzero(stratum == level)
        edges = np.append(np.arange(0.0, 5.01, 0.5), np.inf)
        found = np.histogram(size[those], edges)[0].astype(np.float64)
        expected = len(those) * 2 * np.diff(stats.norm.cdf(edges))
        expected += 2 * np.sqrt(expected)  # what chance may well bring: counts of few are uneven
        rate = np.minimum.accumulate(np.minimum(expected / np.maximum(found, 1e-9), 1.0))
        share[those] = rate[np.digitize(size[those], edges) - 1]
    return share


def _second(design: Design, told: Floats) -> Floats:
    return np.column_stack([told / _size(told), design.shapes, design.records])


def _second_weights(second: Floats, shapes: int, flipped: float) -> Floats:
    """Neither the words' number nor the record may count against what it says."""
    rest = second.shape[1] - 1 - shapes
    penalty = np.concatenate(
        [[0.25], np.full(shapes, _SHAPE_PENALTY / 4), np.full(rest, _RECORD_PENALTY / 4)]
    )
    least = np.concatenate([[0.0], np.full(shapes, -np.inf), np.zeros(rest)])
    return logistic(second, penalty, flipped, least=least)


def _size(values: Floats) -> float:
    size = float(np.sqrt(np.mean(values**2))) if len(values) else 0.0
    return size if size > 0 else 1.0


def _folds(prompts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    count = int(prompts.max()) + 1 if len(prompts) else 0
    order = draws.permutation(seed, "audit/folds", count)
    fold: NDArray[np.int64] = np.asarray(order)[prompts] % FOLDS
    return fold


def _splits(
    fold: NDArray[np.int64],
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    return [(np.flatnonzero(fold == k), np.flatnonzero(fold != k)) for k in range(FOLDS)]
