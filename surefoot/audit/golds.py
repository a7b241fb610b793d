"""Right answers and wrong ones that look right: what a grader accepts of each.

Owns the wrong answers made from a row's gold, and Youden's J = TPR - FPR with its interval.
Refuses to own the forms in which answers are shown (`forms.py`), and labelled solutions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from surefoot.audit.bench import Bench, Mark, gold_of
from surefoot.audit.forms import Form
from surefoot.audit.report import Finding, Severity, Table
from surefoot.records import Prompt, ScoreStatus
from surefoot.reward.figures import only_number, same_answer
from surefoot.statistics import Interval, clustered_share, independent_difference

WEAK = 0.5
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """True and false positive rate of a grader, and J, their difference, with intervals."""

    tpr: Interval
    fpr: Interval
    j: Interval
    right: int
    wrong: int

    def figures(self) -> dict[str, object]:
        named = {"tpr": self.tpr, "fpr": self.fpr, "j": self.j}
        counts: dict[str, object] = {"right": self.right, "wrong": self.wrong}
        return counts | {
            name: {"estimate": each.estimate, "low": each.low, "high": each.high}
            for name, each in named.items()
        }


def rates(clusters: Sequence[tuple[int, int, int, int]]) -> Rates | None:
    """J from counts by row: (right accepted, right, wrong accepted, wrong).

    Answers to one row may be judged alike, so their counts are clusters. None where no right or
    no wrong answer has a verdict.
    """
    right, wrong = sum(c[1] for c in clusters), sum(c[3] for c in clusters)
    if not right or not wrong:
        return None
    tpr = clustered_share([c[0] for c in clusters], [c[1] for c in clusters])
    fpr = clustered_share([c[2] for c in clusters], [c[3] for c in clusters])
    return Rates(tpr, fpr, independent_difference(tpr, fpr), right, wrong)


def judged(check: str, found: Rates, what: str) -> Finding:
    """How bad a J is: a low limit of 0 or less stops, one under a half asks for a change."""
    severity = Severity.OK
    mend = ""
    if found.j.low <= 0:
        severity = Severity.STOP
        mend = (
            "learning from this grader drifts or goes backwards; mend reward[0] (another `use`, or "
            "its options), or give rows whose answers it can read"
        )
    elif found.j.low < WEAK:
        severity = Severity.CHANGE
        mend = (
            "learning slows down about as 1/J; read the rows it gets wrong, and choose another "
            "reward[0].use or other options"
            if found.j.estimate < WEAK
            else "more rows would narrow the interval: raise --rows, or give more solutions"
        )
    text = (
        f"J = {shown(found.j)} on {what}: accepts {percent(found.tpr)} of {found.right} right "
        f"answers and {percent(found.fpr)} of {found.wrong} wrong ones"
    )
    return Finding(check, severity, text, mend, found.figures())


def shown(value: Interval) -> str:
    return f"{value.estimate:.3f} [{value.low:.3f}, {value.high:.3f}]"


def percent(value: Interval) -> str:
    return f"{value.estimate:.1%} [{value.low:.1%}, {value.high:.1%}]"


def distinct(golds: Sequence[str]) -> list[str]:
    """The golds without those that say the same as an earlier one."""
    found: list[str] = []
    for gold in golds:
        if not any(same_answer(gold, other) for other in found):
            found.append(gold)
    return found


def wrong_answers(gold: str, others: Sequence[str], *, place: int) -> dict[str, str]:
    """Answers that look like the gold and are not it, by kind.

    `others` are golds of other rows; the first after `place` that differs is taken.
    """
    made: dict[str, str] = {}
    for step in range(len(others)):
        other = others[(place + step) % len(others)]
        if not same_answer(other, gold):
            made["another row's gold"] = other
            break
    number = only_number(gold)
    if number is not None:
        made |= {name: written(change(number)) for name, change in _CHANGES.items()}
    elif digit := re.search(r"\d", gold):
        changed = str((int(digit[0]) + 1) % 10)
        made["one digit changed"] = gold[: digit.start()] + changed + gold[digit.end() :]
    return {name: answer for name, answer in made.items() if not same_answer(answer, gold)}


_CHANGES: Mapping[str, Callable[[Fraction], Fraction]] = {
    "off by one": lambda number: number + 1,
    "wrong sign": lambda number: -number,
    "ten times too large": lambda number: number * 10,
    "a hundredth": lambda number: number / 100,
}


def written(number: Fraction) -> str:
    """As digits: whole, a decimal where it ends, else a/b."""
    if number.denominator == 1:
        return str(number.numerator)
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest != 1:
        return f"{number.numerator}/{number.denominator}"
    places = 0
    while (number * 10**places).denominator != 1:
        places += 1
    digits = str(abs(number.numerator) * 10**places // number.denominator).rjust(places + 1, "0")
    return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"


@dataclass(slots=True)
class Golds:
    """What was tried and said: right answers by row, wrong ones by kind and row."""

    right: list[tuple[Prompt, Mark]] = field(default_factory=list)
    wrong: list[tuple[Prompt, str, str, Mark]] = field(default_factory=list)
    """(row, kind, answer, mark)."""

    def rates(self) -> Rates | None:
        counts = {prompt.id: [0, 0, 0, 0] for prompt, _ in self.right}
        for prompt, mark in self.right:
            _count(counts[prompt.id], mark, at=0)
        for prompt, _, _, mark in self.wrong:
            _count(counts[prompt.id], mark, at=2)
        return rates([(a, b, c, d) for a, b, c, d in counts.values()])


def _count(counts: list[int], mark: Mark, *, at: int) -> None:
    if mark.accepted is not None:
        counts[at] += mark.accepted
        counts[at + 1] += 1


def try_golds(bench: Bench, prompts: Sequence[Prompt], form: Form) -> Golds:
    """Show every row's gold, and wrong answers made from it, in one form."""
    rows = [(prompt, gold) for prompt in prompts if (gold := gold_of(prompt)) is not None]
    others = [gold for _, gold in rows]
    found = Golds()
    marks = bench.marks([(prompt, form.of(gold)) for prompt, gold in rows])
    found.right = [(prompt, mark) for (prompt, _), mark in zip(rows, marks, strict=True)]
    tries = [
        (prompt, kind, answer)
        for place, (prompt, gold) in enumerate(rows)
        for kind, answer in wrong_answers(gold, others, place=place + 1).items()
    ]
    marks = bench.marks([(prompt, form.of(answer)) for prompt, _, answer in tries])
    found.wrong = [(*tried, mark) for tried, mark in zip(tries, marks, strict=True)]
    return found


def gold_findings(found: Golds, form: Form) -> tuple[list[Finding], list[Table]]:
    """Golds at the maximum, wrong answers at the minimum, unscorable rows, and J."""
    findings = [*_unscorable(found)]
    values = [mark.first for _, mark in found.right] + [mark.first for *_, mark in found.wrong]
    known = [value for value in values if value is not None]
    if not known:
        text = "no right answer and no wrong one got a score, so nothing can be said of the grader"
        mend = "read the errors above; see that reward[0] can score the rows of data"
        return [*findings, Finding("golds", Severity.STOP, text, mend)], []
    top, bottom = max(known), min(known)
    findings.append(_right_at_top(found, form, top, bottom))
    if found.wrong:
        findings.append(_wrong_at_bottom(found, bottom))
    j = found.rates()
    if j is not None:
        what = f"the rows' golds and wrong answers made from them, each as '{form.name}'"
        findings.append(judged("youden", j, what))
    return findings, [_kinds(found, bottom)]


def _unscorable(found: Golds) -> list[Finding]:
    rows = [(p, m) for p, m in found.right if m.status is not ScoreStatus.SCORED]
    findings = []
    for status, words in (
        (ScoreStatus.UNSCORABLE, "cannot be scored: the grader calls the row itself bad"),
        (ScoreStatus.INFRA_ERROR, "make the grader fail on the right answer"),
    ):
        bad = [(prompt, mark) for prompt, mark in rows if mark.status is status]
        if not bad:
            continue
        share = len(bad) / len(found.right)
        named = ", ".join(prompt.id for prompt, _ in bad[:_NAMED])
        findings.append(
            Finding(
                "unscorable" if status is ScoreStatus.UNSCORABLE else "failures",
                Severity.STOP if share >= 0.5 else Severity.CHANGE,
                f"{len(bad)} of {len(found.right)} rows {words} (first: {named}; "
                f"{bad[0][1].detail})",
                "leave such rows out of data, mend their answers, or choose a reward[0].use that "
                "reads them",
                {"rows": [prompt.id for prompt, _ in bad]},
            )
        )
    return findings


def _right_at_top(found: Golds, form: Form, top: float, bottom: float) -> Finding:
    known = [(prompt, mark) for prompt, mark in found.right if mark.first is not None]
    missed = [(prompt, mark) for prompt, mark in known if mark.first != top]
    refused = [prompt for prompt, mark in known if not mark.accepted]
    figures = {
        "form": form.name,
        "top": top,
        "bottom": bottom,
        "rows": len(known),
        "below_top": [prompt.id for prompt, _ in missed],
        "refused": [prompt.id for prompt in refused],
    }
    if not missed and not refused:
        text = f"all {len(known)} golds score the most that was seen ({top:g}), as '{form.name}'"
        return Finding("golds", Severity.OK, text, "", figures)
    named = ", ".join(f"{p.id} ({gold_of(p)!r})" for p, _ in missed[:_NAMED])
    if len(refused) == len(known):
        text = (
            f"no gold of {len(known)} is accepted in any form that was tried; the most that the "
            f"first reward gave is {top:g}"
        )
        mend = (
            "show the form that the grader reads with --form 'A: {answer}', say from what value on "
            "an answer counts with --accept-at, or mend reward[0]"
        )
    else:
        text = (
            f"{len(refused)} of {len(known)} golds are refused and {len(missed)} score less than "
            f"{top:g}, as '{form.name}' (first: {named})"
        )
        mend = "mend these rows' answers, or choose a reward[0].use that reads them"
    severity = Severity.CHANGE if len(missed) > 0.01 * len(known) else Severity.INFO
    return Finding("golds", severity, text, mend, figures)


def _wrong_at_bottom(found: Golds, bottom: float) -> Finding:
    known = [item for item in found.wrong if item[3].first is not None]
    accepted = [item for item in known if item[3].accepted]
    above = [item for item in known if item[3].first != bottom]
    figures = {
        "answers": len(known),
        "above_bottom": len(above),
        "accepted": [
            {"row": prompt.id, "gold": gold_of(prompt), "kind": kind, "answer": answer}
            for prompt, kind, answer, _ in accepted[:50]
        ],
    }
    if accepted:
        prompt, kind, answer, _ = accepted[0]
        text = (
            f"{len(accepted)} of {len(known)} wrong answers are accepted (first: row {prompt.id}, "
            f"gold {gold_of(prompt)!r}, {kind}: {answer!r})"
        )
        mend = "make reward[0] compare the whole answer with the gold"
        severity = Severity.CHANGE if len(accepted) > 0.01 * len(known) else Severity.INFO
        return Finding("wrong answers", severity, text, mend, figures)
    if above:
        text = (
            f"no wrong answer of {len(known)} is accepted, but {len(above)} score more than the "
            f"least that was seen ({bottom:g}): the grader gives part of the score"
        )
        return Finding("wrong answers", Severity.INFO, text, "", figures)
    text = f"all {len(known)} wrong answers score the least that was seen ({bottom:g})"
    return Finding("wrong answers", Severity.OK, text, "", figures)


def _kinds(found: Golds, bottom: float) -> Table:
    rows = []
    for kind in dict.fromkeys(kind for _, kind, _, _ in found.wrong):
        marks = [mark for _, other, _, mark in found.wrong if other == kind]
        known = [mark for mark in marks if mark.accepted is not None]
        above = sum(mark.first != bottom for mark in known)
        words = "no verdict"
        if known:
            accepted = [int(bool(mark.accepted)) for mark in known]
            words = percent(clustered_share(accepted, [1] * len(known)))
        rows.append((kind, str(len(known)), words, str(above)))
    columns = ("wrong answer", "tried", "accepted", "above the least score")
    return Table("Wrong answers that look right", columns, tuple(rows))
