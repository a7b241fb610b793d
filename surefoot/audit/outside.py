"""What the labels of pairs are compared with from outside: scores, golds, trusted pairs.

Owns the agreement of the labels with each of these, and the word "swapped", which nothing else may
say: exchanging every label changes no likelihood, so labels alone cannot tell.
Refuses to own the scorer (`scorer.py`) and how an answer is compared with a gold (the rewards').
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from surefoot.audit.features import Compared
from surefoot.audit.flips import FEWEST, agreeing
from surefoot.audit.pairs import Seen
from surefoot.audit.report import Finding, Severity
from surefoot.audit.scorer import Design, out_of_fold, transferred
from surefoot.reward.figures import numbers, only_number, value
from surefoot.statistics import Interval

Floats = NDArray[np.float64]
# Share of rows of a column that must be numbers before it is read as golds.
_MOSTLY = 0.9


@dataclass(frozen=True, slots=True)
class Outside:
    """One signal: its name, and of each pair a number: above 0 it agrees with the label, below
    0 it says the opposite, 0 is a tie, and NaN says nothing.

    `sure` says whether a single pair may be judged by it; a scorer's margin may not.
    """

    name: str
    leads: Floats
    sure: bool


def signals(pairs: Sequence[Seen], trusted: Sequence[Seen] | None) -> Iterator[Outside]:
    """Every signal that the rows, and trusted pairs, give."""
    scores = [_difference(pair.row.score_chosen, pair.row.score_rejected) for pair in pairs]
    if not np.all(np.isnan(scores)):
        yield Outside("scores beside the pairs", np.array(scores), True)
    margins = np.array([_number(pair.row.form.margin) for pair in pairs])
    if not np.all(np.isnan(margins)):
        yield Outside("the column margin", margins, True)
    if (golds := _golds(pairs)) is not None:
        yield Outside("the column answer", golds, True)
    if trusted is not None:
        yield from _by_trusted(pairs, trusted)


def compared(pairs: Sequence[Seen]) -> list[Compared]:
    return [Compared(pair.prompt, pair.key, pair.chosen, pair.rejected) for pair in pairs]


def agreement(signal: Outside, pairs: Sequence[Seen]) -> Interval | None:
    """The share of labels that the signal agrees with, of those it speaks of; None if of none."""
    speaks = np.flatnonzero(~np.isnan(signal.leads) & (signal.leads != 0))
    if len(speaks) == 0:
        return None
    keys = [pairs[place].key for place in speaks]
    numbers_of = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    prompts = np.array([numbers_of[key] for key in keys], dtype=np.int64)
    return agreeing(signal.leads[speaks], prompts)


def judged(signal: Outside, pairs: Sequence[Seen]) -> Finding:
    """Swapped where the upper limit of the agreement is under a half."""
    found = agreement(signal, pairs)
    if found is None:
        return Finding("swapped", Severity.INFO, f"{signal.name}: nothing but ties")
    speaks = int(np.sum(~np.isnan(signal.leads) & (signal.leads != 0)))
    text = (
        f"{signal.name}: agrees with {found.estimate:.1%} [{found.low:.1%}, {found.high:.1%}] of "
        f"{speaks} labels"
    )
    figures = {"agreement": found.estimate, "low": found.low, "high": found.high, "pairs": speaks}
    if found.high < 0.5:
        mend = (
            "chosen and rejected are exchanged: map the columns the other way, or --fix-flips swap"
        )
        return Finding("swapped", Severity.STOP, f"swapped. {text}", mend, figures)
    if found.low <= 0.5:
        mend = "no better than chance: check what the signal measures, and give more pairs"
        return Finding("swapped", Severity.CHANGE, text, mend, figures)
    against = int(np.sum(signal.leads < 0))
    if against and signal.sure:
        mend = f"{against} labels say the opposite of it: --fix takes them out"
        return Finding("swapped", Severity.CHANGE, text, mend, figures)
    return Finding("swapped", Severity.OK, f"not swapped. {text}", "", figures)


def unknown(pairs: Sequence[Seen]) -> Finding:
    """What to say where nothing stands beside the labels."""
    text = (
        f"nothing outside the labels of {len(pairs)} pairs says which answer is better, so a set "
        "with every label exchanged would look the same"
    )
    mend = (
        "give --trusted FILE (pairs that you checked), or scores: --column score_chosen=NAME "
        "--column score_rejected=NAME, or golds: --column answer=NAME"
    )
    return Finding("swapped", Severity.INFO, text, mend)


def _by_trusted(pairs: Sequence[Seen], trusted: Sequence[Seen]) -> Iterator[Outside]:
    """Pairs that are in both files, and a scorer that learned from the trusted ones."""
    known: dict[tuple[bytes, str, str], float] = {}
    for pair in trusted:
        known[pair.key, pair.chosen, pair.rejected] = 1.0
        known[pair.key, pair.rejected, pair.chosen] = -1.0
    same = np.array([known.get((p.key, p.chosen, p.rejected), np.nan) for p in pairs])
    if not np.all(np.isnan(same)):
        yield Outside("the same pairs in the trusted file", same, True)
    train = Design.of(compared(trusted))
    prompts = len(set(train.prompts.tolist()))
    if prompts < FEWEST:
        return
    able = agreeing(out_of_fold(train, flipped=0.0, seed=0), train.prompts)
    if able.low <= 0.5:
        return
    target = Design.of(compared(pairs))
    name = f"a scorer that learned from {len(trusted)} trusted pairs (right on {able.estimate:.0%})"
    yield Outside(name, transferred(train, target, seed=0), False)


def too_few(trusted: Sequence[Seen]) -> Finding:
    text = (
        f"{len(trusted)} trusted pairs neither are among the pairs nor let a scorer learn what is "
        "better"
    )
    mend = f"give pairs of {FEWEST} prompts or more, or pairs of the file itself"
    return Finding("trusted", Severity.CHANGE, text, mend)


def _golds(pairs: Sequence[Seen]) -> Floats | None:
    """Whose last number is the gold, where the column answer holds numbers."""
    golds = [None if p.row.answer is None else only_number(p.row.answer) for p in pairs]
    if sum(gold is not None for gold in golds) < _MOSTLY * len(pairs):
        return None
    return np.array(
        [
            np.nan if gold is None else _right(pair.chosen, gold) - _right(pair.rejected, gold)
            for pair, gold in zip(pairs, golds, strict=True)
        ]
    )


def _right(text: str, gold: Fraction) -> float:
    found = numbers(text)
    return float(bool(found) and value(found[-1]) == gold)


def _difference(one: float | None, other: float | None) -> float:
    return float("nan") if one is None or other is None else one - other


def _number(found: float | None) -> float:
    return float("nan") if found is None else found
