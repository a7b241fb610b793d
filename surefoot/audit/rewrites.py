"""The right answer in other words: what a grader refuses although it says the same.

Owns the rewrites of numbers, fractions, LaTeX and words, each true to its gold.
Refuses to own the forms around an answer (`forms.py`), and algebra: rewrites are of the writing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from surefoot.audit.bench import Bench, gold_of
from surefoot.audit.forms import Form
from surefoot.audit.golds import percent, written
from surefoot.audit.report import Finding, Severity, Table
from surefoot.records import Prompt
from surefoot.reward.figures import only_number
from surefoot.statistics import clustered_share

ROWS = 40
REFUSED = 0.1
"""Share of rewrites refused from which on a change is asked for."""
_FRACTION = re.compile(r"\\frac(?=\{)")
_WORDS = re.compile(r"[A-Za-z]{2,}")


def rewrites(gold: str) -> dict[str, str]:
    """Other writings of `gold`, by kind; those that would not differ are left out."""
    bare = gold.strip("$ ")
    made = {"with a full stop": f"{bare}.", "between dollar signs": f"${bare}$"}
    number = only_number(gold)
    if number is not None:
        made |= _numbers(number)
    else:
        made |= _texts(bare)
    return {kind: text for kind, text in made.items() if text != gold}


def _numbers(number: Fraction) -> dict[str, str]:
    digits = written(number)
    made: dict[str, str] = {"with a unit": f"{digits} units", "in bold": f"**{digits}**"}
    if number.denominator == 1:
        made["with decimals"] = f"{digits}.00"
        made["with an exponent"] = f"{digits}e0"
        if abs(number) >= 1000:
            made["with thousands commas"] = f"{number.numerator:,}"
    else:
        sign, over, under = "-" if number < 0 else "", abs(number.numerator), number.denominator
        made["as a/b"] = f"{sign}{over}/{under}"
        made["as \\frac"] = f"{sign}\\frac{{{over}}}{{{under}}}"
        if "/" not in digits:
            made["as a decimal"] = digits
            made["with one more digit"] = f"{digits}0"
    return made


def _texts(gold: str) -> dict[str, str]:
    made: dict[str, str] = {}
    if "\\" in gold:
        made["with \\dfrac"] = _FRACTION.sub(r"\\dfrac", gold)
        made["with \\left and \\right"] = gold.replace("(", "\\left(").replace(")", "\\right)")
        made["with thin spaces"] = gold.replace(",", ",\\,")
    elif _WORDS.fullmatch(gold.replace(" ", "")):
        made["in capitals"] = gold.upper()
        made["in small letters"] = gold.lower()
    return made


def rewrite_findings(
    bench: Bench, prompts: Sequence[Prompt], form: Form
) -> tuple[list[Finding], list[Table]]:
    """How many rewrites of accepted golds are refused, all together and by kind."""
    rows = [(prompt, gold) for prompt in prompts if (gold := gold_of(prompt)) is not None][:ROWS]
    right = bench.marks([(prompt, form.of(gold)) for prompt, gold in rows])
    # A gold that is refused itself says nothing about its rewrites.
    rows = [row for row, mark in zip(rows, right, strict=True) if mark.accepted]
    tries = [(prompt, kind, text) for prompt, gold in rows for kind, text in rewrites(gold).items()]
    marks = bench.marks([(prompt, form.of(text)) for prompt, _, text in tries])
    known = [
        (prompt.id, kind, text, mark.accepted)
        for (prompt, kind, text), mark in zip(tries, marks, strict=True)
        if mark.accepted is not None
    ]
    if not known:
        text = "skipped: no gold that is accepted has a rewrite with a verdict"
        return [Finding("rewrites", Severity.INFO, text)], []
    kinds = dict.fromkeys(kind for _, kind, _, _ in known)
    ids = dict.fromkeys(row for row, _, _, _ in known)
    refused = clustered_share(
        [sum(not yes for row, _, _, yes in known if row == id) for id in ids],
        [sum(row == id for row, *_ in known) for id in ids],
    )
    by_kind = {kind: [not yes for _, other, _, yes in known if other == kind] for kind in kinds}
    words = ", ".join(f"{kind} ({sum(no)} of {len(no)})" for kind, no in by_kind.items() if any(no))
    text = f"{percent(refused)} of {len(known)} rewrites that say the same are refused"
    text += f": {words}" if words else ""
    change = refused.estimate > REFUSED
    mend = (
        "right answers written differently would be punished: use math or numeric as reward[0].use "
        "for mathematics, or ask for one way of writing in model.system"
    )
    finding = Finding(
        "rewrites",
        Severity.CHANGE if change else Severity.OK,
        text,
        mend if change else "",
        {
            "refused": {"estimate": refused.estimate, "low": refused.low, "high": refused.high},
            "by_kind": {kind: [sum(no), len(no)] for kind, no in by_kind.items()},
        },
    )
    table = Table(
        "The right answer, written differently",
        ("rewrite", "an example", "refused", "tried"),
        tuple(
            (kind, next(t for _, k, t, _ in known if k == kind), str(sum(no)), str(len(no)))
            for kind, no in by_kind.items()
        ),
    )
    return [finding], [table]
