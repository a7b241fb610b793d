"""A pilot with the real model: what it already solves, and what a group would learn from.

Owns the findings on solve rates, dead groups, truncation and the parts of the score.
Refuses to own the samples (`sampling.py`) and the forecast (`solve_rates.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from surefoot.audit.bench import Bench, gold_of
from surefoot.audit.report import Finding, Severity, Table
from surefoot.audit.sampling import Plan
from surefoot.audit.solve_rates import (
    SIZES,
    BetaRates,
    Forecast,
    dead_by_subsets,
    forecast,
    needed_size,
)
from surefoot.records import Group, StopReason
from surefoot.statistics import Interval, clustered_share

MOST_DEAD = 0.3
_HOPELESS = 0.9
_SATURATED, _STARVED = 0.95, 0.02
_TRUNCATED = 0.05


@dataclass(frozen=True, slots=True)
class Scored:
    """The pilot's groups with scores, reduced to numbers; a prompt without any score is left out.

    `values` are the weighted sums of each prompt, `first` the first reward's values, `accepted` its
    verdicts; `answered` says whether the rows have answers.
    """

    values: tuple[tuple[float, ...], ...]
    first: tuple[float, ...]
    accepted: tuple[tuple[bool, ...], ...]
    truncated: tuple[tuple[int, int], ...]
    parts: dict[str, list[float]]
    missing: int
    completions: int
    answered: bool

    @property
    def solved(self) -> list[int]:
        return [sum(each) for each in self.accepted]

    @property
    def tried(self) -> list[int]:
        return [len(each) for each in self.accepted]

    @property
    def binary(self) -> bool:
        """Whether a score says no more than solved or not, so that one rate says all."""
        pairs = {
            pair
            for group in zip(self.accepted, self.values, strict=True)
            for pair in zip(*group, strict=True)
        }
        return len(pairs) == len({accepted for accepted, _ in pairs})

    @property
    def graded(self) -> bool:
        """Whether the first reward is a scale on which nothing says what solved is."""
        return len(set(self.first)) > 2 and not (self.answered and any(self.solved))


def reduce(bench: Bench, graded: Sequence[Group]) -> Scored:
    values, first, accepted, truncated = [], [], [], []
    parts: dict[str, list[float]] = {reward.name: [] for reward in bench.grader.rewards}
    missing = completions = 0
    for group in graded:
        assert group.scores is not None
        marks = bench.read(group)
        known = [m for m in marks if m.value is not None and m.accepted is not None]
        completions += len(marks)
        missing += len(marks) - len(known)
        stops = [completion.stop is StopReason.LENGTH for completion in group.completions]
        truncated.append((sum(stops), len(stops)))
        for score in group.scores:
            for name, part in score.parts.items():
                if score.valid and part is not None:
                    parts[name].append(part)
        first += [mark.first for mark in known if mark.first is not None]
        if known:
            values.append(tuple(m.value for m in known if m.value is not None))
            accepted.append(tuple(bool(m.accepted) for m in known))
    return Scored(
        tuple(values),
        tuple(first),
        tuple(accepted),
        tuple(truncated),
        parts,
        missing,
        completions,
        any(gold_of(group.prompt) is not None for group in graded),
    )


def pilot_findings(
    bench: Bench, graded: Sequence[Group], plan: Plan, *, seed: int
) -> tuple[list[Finding], list[Table], dict[str, Any]]:
    """What the pilot says about a run of this recipe, its tables, and its pictures."""
    found = reduce(bench, graded)
    findings = [_truncation(found, plan), *_missing(found)]
    if not found.values:
        text = f"none of {found.completions} completions of the model has a score"
        mend = "see golds and odd inputs; a run would stop at run.stop_at_failure_rate"
        return [*findings, Finding("pilot", Severity.STOP, text, mend)], [], {}
    sizes = tuple(sorted({*SIZES, plan.group_size} - {1}))
    rates, forecasts = forecast(found.solved, found.tried, sizes, seed=seed)
    share = clustered_share(found.solved, found.tried)
    findings.append(_scale(found) if found.graded else _solved(found, rates, share))
    if found.binary:
        here = next((each for each in forecasts if each.size == plan.group_size), None)
        if here is not None:
            findings.append(_dead(here, rates, plan))
        tables = [_forecasts(forecasts)]
    else:
        findings.append(_dead_graded(found, plan))
        tables = [_graded(found, sizes)]
    tables += _parts(bench, found)
    return findings, tables, {} if found.graded else {"solve rates": _picture(found)}


def _missing(found: Scored) -> list[Finding]:
    if not found.missing:
        return []
    text = f"{found.missing} of {found.completions} completions of the model have no score"
    mend = "mend the reward for what the model really writes (see samples with --json), or the rows"
    severity = Severity.CHANGE if found.missing > 0.01 * found.completions else Severity.INFO
    return [Finding("pilot scores", severity, text, mend)]


def _truncation(found: Scored, plan: Plan) -> Finding:
    share = clustered_share([cut for cut, _ in found.truncated], [n for _, n in found.truncated])
    text = (
        f"{_shares(share)} of {found.completions} completions are cut off at "
        f"{plan.max_new_tokens} tokens"
    )
    figures = {"share": share.estimate, "low": share.low, "high": share.high}
    if share.estimate <= _TRUNCATED:
        return Finding("truncation", Severity.OK, text, "", figures)
    mend = (
        f"raise rollout.max_new_tokens above {plan.max_new_tokens}, ask for shorter answers in "
        "model.system, or leave cut-off answers out with method.truncated: mask"
    )
    return Finding("truncation", Severity.CHANGE, text, mend, figures)


def _solved(found: Scored, rates: BetaRates, share: Interval) -> Finding:
    prompts = len(found.solved)
    never = sum(k == 0 for k in found.solved)
    always = sum(k == n for k, n in zip(found.solved, found.tried, strict=True))
    text = (
        f"the model solves {_shares(share)} of {sum(found.tried)} samples of {prompts} prompts; "
        f"{never} prompts never, {always} always"
    )
    starved = float(stats.beta.cdf(_STARVED, rates.a, rates.b))
    figures = {
        "solve_rate": share.estimate,
        "low": share.low,
        "high": share.high,
        "never": never,
        "always": always,
        "beta": [rates.a, rates.b],
        "share_below_0.02": starved,
    }
    if share.estimate > _SATURATED:
        mend = (
            "there is little left to learn: take harder data, or pass over what is solved with "
            "data.keep_solve_rate: [0.0, 0.9]"
        )
        return Finding("saturation", Severity.CHANGE, text, mend, figures)
    if starved > 0.5:
        mend = (
            f"{starved:.0%} of the prompts would be solved less than once in 50: begin with "
            "supervised training (stages), easier data, or a reward with partial credit"
        )
        return Finding("starvation", Severity.CHANGE, text, mend, figures)
    return Finding("solve rate", Severity.OK, text, "", figures)


def _scale(found: Scored) -> Finding:
    low, high = min(found.first), max(found.first)
    text = (
        f"the first reward lies between {low:.3g} and {high:.3g}, with mean "
        f"{np.mean(found.first):.3g}; nothing says from what value on a prompt is solved, so no "
        "solve rate is told"
    )
    figures = {"mean": float(np.mean(found.first)), "least": low, "most": high}
    return Finding("solve rate", Severity.INFO, text, "", figures)


def _dead(here: Forecast, rates: BetaRates, plan: Plan) -> Finding:
    text = (
        f"with group_size {here.size} about {_shares(here.dead)} of the groups are dead "
        f"({here.all_right:.0%} all right, {here.all_wrong:.0%} all wrong)"
    )
    if plan.keep == "informative" and here.dead.estimate < 1:
        text += f"; sampling again costs {1 / (1 - here.dead.estimate):.2g} times the rollouts"
    needed = needed_size(rates, MOST_DEAD)
    figures = {
        "group_size": here.size,
        "dead": here.dead.estimate,
        "low": here.dead.low,
        "high": here.dead.high,
        "all_right": here.all_right,
        "all_wrong": here.all_wrong,
        "needed_group_size": needed,
    }
    if not plan.relative:
        text += f"; baseline {plan.baseline} learns from such groups too"
        return Finding("dead groups", Severity.INFO, text, "", figures)
    severity = Severity.OK
    if here.dead.low >= _HOPELESS:
        severity = Severity.STOP
    elif here.dead.estimate >= MOST_DEAD:
        severity = Severity.CHANGE
    mend = "" if severity is Severity.OK else _dead_mend(here, needed)
    return Finding("dead groups", severity, text, mend, figures)


def _dead_mend(here: Forecast, needed: int | None) -> str:
    mends = []
    if needed is not None:
        mends.append(f"method.group_size: {needed} would bring dead groups under {MOST_DEAD:.0%}")
    else:
        mends.append(f"no group size up to 64 brings dead groups under {MOST_DEAD:.0%}")
    if here.all_right >= here.all_wrong / 2:
        mends.append(
            "pass over what is always solved with data.keep_solve_rate: [0.1, 0.9], or take "
            "harder data"
        )
    if here.all_wrong >= here.all_right / 2:
        mends.append("for what is never solved: easier data, a warm start, partial credit")
    return "; ".join(mends)


def _dead_graded(found: Scored, plan: Plan) -> Finding:
    size = plan.group_size
    share = None if size < 2 else dead_by_subsets(found.values, size)
    figures = {"group_size": size, "dead": share}
    if share is None:
        text = f"dead groups of {size}: cannot be told, the pilot's prompts have too few scores"
        return Finding("dead groups", Severity.INFO, text, "", figures)
    text = (
        f"with group_size {size} {share:.1%} of the pilot's groups have no spread; the score has "
        "more than two values, so larger groups are not forecast"
    )
    if not plan.relative:
        return Finding("dead groups", Severity.INFO, text, "", figures)
    severity = Severity.OK
    if share >= _HOPELESS:
        severity = Severity.STOP
    elif share >= MOST_DEAD:
        severity = Severity.CHANGE
    mend = (
        "raise method.group_size, pass over prompts with data.keep_solve_rate: [0.1, 0.9], or give "
        "reward more grades between wrong and right"
    )
    return Finding("dead groups", severity, text, "" if severity is Severity.OK else mend, figures)


def _forecasts(forecasts: Sequence[Forecast]) -> Table:
    rows = tuple(
        (
            str(each.size),
            f"{each.dead.estimate:.1%}",
            f"{each.dead.low:.1%} to {each.dead.high:.1%}",
            f"{each.all_right:.1%}",
            f"{each.all_wrong:.1%}",
            _cost(each),
        )
        for each in forecasts
    )
    columns = (
        "group size",
        "dead",
        "95 % interval",
        "all right",
        "all wrong",
        "samples a live group",
    )
    return Table("Dead groups to expect", columns, rows)


def _cost(each: Forecast) -> str:
    """Samples drawn for one group that is not dead."""
    live = 1 - each.dead.estimate
    return f"{each.size / live:.1f}" if live > 0.001 else "over a thousand groups"


def _graded(found: Scored, sizes: Sequence[int]) -> Table:
    rows = tuple(
        (str(size), "not sampled" if share is None else f"{share:.1%}")
        for size in sizes
        for share in (dead_by_subsets(found.values, size),)
    )
    return Table("Groups without spread", ("group size", "dead"), rows)


def _parts(bench: Bench, found: Scored) -> list[Table]:
    """Of several rewards: how much of the spread each of them brings."""
    rewards = bench.grader.rewards
    if len(rewards) < 2:
        return []
    spread = {
        reward.name: reward.weight**2 * float(np.var(values)) if values else 0.0
        for reward in rewards
        for values in (found.parts[reward.name],)
    }
    total = sum(spread.values())
    rows = []
    for reward in rewards:
        values = found.parts[reward.name]
        mean = f"{np.mean(values):.3g}" if values else "none"
        share = f"{spread[reward.name] / total:.1%}" if total else "none"
        rows.append((reward.name, f"{reward.weight:g}", mean, str(len(values)), share))
    columns = ("reward", "weight", "mean", "scores", "share of the variance")
    return [Table("Parts of the score", columns, tuple(rows))]


def _picture(found: Scored) -> dict[str, Any]:
    shares = [k / n for k, n in zip(found.solved, found.tried, strict=True)]
    counts, edges = np.histogram(shares, bins=10, range=(0.0, 1.0))
    return {
        "title": "Solve rates of the pilot's prompts",
        "caption": "prompts by the share of their samples that the first reward accepts",
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }


def _shares(value: Interval) -> str:
    return f"{value.estimate:.1%} [{value.low:.1%}, {value.high:.1%}]"
