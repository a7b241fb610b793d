"""The same completions scored again: how much of a reward's spread is the grader's own chance.

Owns the noise, the share of the variance that is real (ICC), and the signal-to-noise of a group.
Refuses to own where the completions come from (pilot, solutions, or golds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.audit.bench import Bench
from surefoot.audit.report import Finding, Severity, Table
from surefoot.records import Group
from surefoot.statistics import Interval, bootstrap_interval

REPEATS = 3
GROUPS = 40
WEAK_SNR = 2.0
_POOR, _USELESS = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Noise:
    """Scores of one list per completion, `groups` telling which completions compete.

    `std` is the standard deviation of one completion's scores about their mean; `icc` is the share
    of the variance that is not noise; `snr` has, for every group with two completions or more, the
    spread of its mean scores over `std` (None: there is no noise).
    """

    std: float
    icc: Interval | None
    group_std: tuple[float, ...]
    snr: tuple[float, ...] | None
    completions: int


def measure(scores: Sequence[Sequence[float]], groups: Sequence[int], *, seed: int = 0) -> Noise:
    """The noise of `scores[i]`, the repeated scores of completion i (two or more each).

    The one-way analysis of variance: noise² is the mean variance inside completions (ddof 1), and
    ICC = s² / (s² + noise²), where s² is the variance of the completions' means less noise² / k,
    and not below 0 (Shrout and Fleiss 1979, ICC(1,1)). Its interval draws groups, because the
    completions of a group belong together.
    """
    table = np.asarray(scores, dtype=np.float64)
    owner = np.asarray(groups)
    noise = _noise(table)
    names = np.unique(owner)
    means = table.mean(axis=1)
    spread = tuple(
        float(means[owner == name].std(ddof=1)) for name in names if (owner == name).sum() > 1
    )
    icc = None
    if table.min() < table.max() and len(table) > 1:
        members = [np.flatnonzero(owner == name) for name in names]

        def of_groups(drawn: NDArray[np.float64]) -> float:
            rows = np.concatenate([members[int(place)] for place in drawn])
            return _icc(table[rows])

        found = bootstrap_interval(
            np.arange(len(names)), of_groups, seed=seed, purpose="audit/icc", resamples=500
        )
        icc = Interval(_icc(table), found.low, found.high)
    snr = None if noise == 0 else tuple(each / noise for each in spread)
    return Noise(noise, icc, spread, snr, len(table))


def _noise(table: NDArray[np.float64]) -> float:
    # Equal repeats are no noise at all, whatever rounding says of their mean.
    if bool((table.max(axis=1) == table.min(axis=1)).all()):
        return 0.0
    return float(np.sqrt(table.var(axis=1, ddof=1).mean()))


def _icc(table: NDArray[np.float64]) -> float:
    noise2 = _noise(table) ** 2
    if noise2 == 0:
        return 1.0
    between = float(table.mean(axis=1).var(ddof=1)) if len(table) > 1 else 0.0
    real = max(between - noise2 / table.shape[1], 0.0)
    return real / (real + noise2)


def noise_findings(
    bench: Bench, groups: Sequence[Group], what: str, *, seed: int
) -> tuple[list[Finding], list[Table]]:
    """Score every group three times in all, and say how far the grader agrees with itself."""
    groups = groups[:GROUPS]
    rounds = [bench.graded(_anew(bench, groups, again)) for again in range(REPEATS)]
    scores: list[list[float]] = []
    owner: list[int] = []
    lost = 0
    for place, group in enumerate(groups):
        for index in range(len(group.completions)):
            again = [graded[place].scores for graded in rounds]
            values = [each[index].value for each in again if each is not None]
            known = [value for value in values if value is not None]
            if len(known) == REPEATS:
                scores.append(known)
                owner.append(place)
            else:
                lost += bool(known)
    findings = []
    if lost:
        text = f"{lost} completions have a score in one call and none in another"
        mend = "find what fails now and then (reward.timeout, a service that is overloaded)"
        findings.append(Finding("sometimes missing", Severity.CHANGE, text, mend))
    if not scores:
        text = f"skipped: none of the completions ({what}) has a score each time"
        return [*findings, Finding("noise", Severity.INFO, text)], []
    found = measure(scores, owner, seed=seed)
    return [*findings, _finding(found, what)], _table(found)


def _anew(bench: Bench, groups: Sequence[Group], again: int) -> list[Group]:
    """The groups as questions that no kept score answers, where scores are kept at all."""
    if not any(reward.identity is not None for reward in bench.grader.rewards):
        return list(groups)
    # A kept score is found by all that a reward is sent, columns that it does not read included.
    mark = {"audit_round": again}
    return [
        replace(group, prompt=replace(group.prompt, columns={**group.prompt.columns, **mark}))
        for group in groups
    ]


def _finding(found: Noise, what: str) -> Finding:
    figures = {
        "noise_std": found.std,
        "completions": found.completions,
        "median_group_std": float(np.median(found.group_std)) if found.group_std else None,
        "icc": None if found.icc is None else found.icc.estimate,
    }
    if found.std == 0:
        text = f"{found.completions} completions ({what}) score the same {REPEATS} times: no noise"
        return Finding("noise", Severity.OK, text, "", figures)
    weak = 0.0
    if found.snr:
        weak = sum(each < WEAK_SNR for each in found.snr) / len(found.snr)
        figures |= {"median_snr": float(np.median(found.snr)), "share_weak": weak}
    icc = found.icc
    assert icc is not None
    text = (
        f"scoring {found.completions} completions ({what}) again moves a score by "
        f"{found.std:.3g}; {icc.estimate:.0%} [{icc.low:.0%}, {icc.high:.0%}] of the variance is "
        "real"
    )
    if found.snr:
        text += f", and {weak:.0%} of the groups spread less than {WEAK_SNR:g} times the noise"
    mend = (
        "average several scores of a completion, or use a steadier reward; without one take the "
        "spread out of the advantage (method.scale: none or batch_std), so that noise is not "
        "blown up in groups that tie"
    )
    severity = Severity.INFO
    if icc.high < _USELESS:
        severity = Severity.STOP
    elif icc.estimate < _POOR or weak > 0.5:
        severity = Severity.CHANGE
    return Finding("noise", severity, text, "" if severity is Severity.INFO else mend, figures)


def _table(found: Noise) -> list[Table]:
    if not found.group_std:
        return []
    points = (0.1, 0.5, 0.9)
    rows = [("spread of a group", *(f"{q:.3g}" for q in np.quantile(found.group_std, points)))]
    if found.snr is not None:
        rows.append(("spread over noise", *(f"{q:.3g}" for q in np.quantile(found.snr, points))))
    columns = ("per group", "10th percentile", "median", "90th percentile")
    return [Table("Signal and noise of groups", columns, tuple(rows))]
