"""The same completions against other rows' references: does the reward read the answer at all?

Owns the exchange of references, and the share of the reward that is left after it.
Refuses to own where the completions come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.audit.bench import Bench, gold_of
from surefoot.audit.report import Finding, Severity
from surefoot.records import Group, Prompt
from surefoot.reward.figures import same_answer
from surefoot.statistics import Interval, bootstrap_interval

GROUPS = 100
_SOME, _MOST = 0.1, 0.9


def exchanged(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Each group beside itself with the answer and columns of the next row of another gold."""
    rows = [(group, gold) for group in groups if (gold := gold_of(group.prompt)) is not None]
    found = []
    for place, (group, gold) in enumerate(rows):
        for step in range(1, len(rows)):
            other, other_gold = rows[(place + step) % len(rows)]
            if not same_answer(gold, other_gold):
                swapped = _with_reference(group.prompt, other.prompt)
                found.append((group, replace(group, prompt=swapped, scores=None)))
                break
    return found


def _with_reference(prompt: Prompt, other: Prompt) -> Prompt:
    # A reward may read the reference from any column, so all of them go along.
    return replace(prompt, answer=other.answer, columns=other.columns)


def shuffled_findings(bench: Bench, groups: Sequence[Group], what: str, *, seed: int) -> Finding:
    """Mean first reward with the wrong reference over that with the right one, both above least."""
    pairs = exchanged(groups)[:GROUPS]
    if len(pairs) < 2:
        text = "skipped: there are not two rows with different golds"
        return Finding("shuffled reference", Severity.INFO, text)
    graded = bench.graded([group for pair in pairs for group in pair])
    means: list[tuple[float, float]] = []
    values: list[float] = []
    for right, wrong in zip(graded[::2], graded[1::2], strict=True):
        sides = [
            [mark.first for mark in bench.read(side) if mark.first is not None]
            for side in (right, wrong)
        ]
        if all(sides):
            means.append((_mean(sides[0]), _mean(sides[1])))
            values += [*sides[0], *sides[1]]
    if not means:
        text = f"skipped: none of the completions ({what}) has a score with both references"
        return Finding("shuffled reference", Severity.INFO, text)
    least = min(values)
    own = _mean([right for right, _ in means]) - least
    if own <= 0:
        text = (
            f"skipped: no completion ({what}) scores more than {least:g} with its own reference, "
            "so there is nothing that another one could take away"
        )
        return Finding("shuffled reference", Severity.INFO, text)
    return _judged(means, least, what, seed)


def _judged(means: Sequence[tuple[float, float]], least: float, what: str, seed: int) -> Finding:
    def ratio(drawn: Sequence[int]) -> float:
        right = _mean([means[int(i)][0] for i in drawn]) - least
        wrong = _mean([means[int(i)][1] for i in drawn]) - least
        # A resample without any reward on the right side: what is left is all of it, or nothing.
        return wrong / right if right > 0 else float(wrong > 0)

    places = range(len(means))
    drawn = bootstrap_interval(
        list(places),
        lambda sample: ratio([int(place) for place in sample]),
        seed=seed,
        purpose="audit/shuffled",
        resamples=500,
    )
    left = Interval(ratio(list(places)), drawn.low, drawn.high)
    text = (
        f"with another row's reference {len(means)} rows ({what}) keep {left.estimate:.1%} "
        f"[{left.low:.1%}, {left.high:.1%}] of their reward"
    )
    figures = {"left": left.estimate, "low": left.low, "high": left.high, "rows": len(means)}
    if left.estimate >= _MOST:
        mend = "the first reward does not read the row's answer: see its columns and data.columns"
        return Finding("shuffled reference", Severity.STOP, text, mend, figures)
    if left.estimate > _SOME:
        mend = (
            "much is earned whatever the answer is: look for partial credit, a format reward in "
            "first place, or answers that repeat across rows (reward, data)"
        )
        return Finding("shuffled reference", Severity.CHANGE, text, mend, figures)
    return Finding("shuffled reference", Severity.OK, text, "", figures)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
