"""The built-in rules: exact, numeric, regex, boxed, length.

Owns their options and what each of them scores; every value lies in [0, 1]. Owns what a built-in
is, too.
Refuses to own algebraic equality (`maths.py`), the form of a text (`form.py`), code execution and
models. Soft overlong punishment is a shaping of the method row, not a reward. All rules but `regex`
take linear time and run in the run's own process; a user's pattern can take exponential time, so
`regex` runs in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from surefoot.reward.contract import PartScore, RewardSample, scored, unscorable
from surefoot.reward.figures import (
    last_boxed,
    numbers,
    only_number,
    plain_answer,
    same_answer,
    value,
)

Rule = Callable[[RewardSample], PartScore]


@dataclass(frozen=True, slots=True)
class Hired:
    """How a rule runs in a worker process.

    `warm` does slow imports once, before workers are forked. After `recycle` samples a worker is
    replaced, for libraries that leak. `at_limit` is the verdict on a sample whose text used up the
    CPU time that the rule allows itself (`limits.py`); without it such an end is a failure.
    """

    warm: Callable[[], None] | None = None
    recycle: int | None = None
    at_limit: Rule | None = None


def here(options: Any) -> Hired | None:
    """The rule runs in the run's own process."""
    return None


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in reward: its option schema, how filled options become a rule, and where it runs.

    `cap` names the option that stands for the most new tokens of a rollout where it is not set.
    """

    schema: type[Any]
    make: Callable[[Any], Rule]
    hire: Callable[[Any], Hired | None] = here
    cap: str | None = None


def _yes(holds: bool) -> PartScore:
    return scored(1.0 if holds else 0.0)


def gold_of(sample: RewardSample) -> str | None:
    return None if sample.answer is None or not sample.answer.strip() else sample.answer


NO_ANSWER = "the row has no answer; set data.columns.answer, or leave such rows out"


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """`collapse_spaces`: runs of white space count as one space, and none at the ends."""

    ignore_case: bool = False
    collapse_spaces: bool = True


def exact(options: ExactOptions) -> Rule:
    """1 where the whole text is the answer, else 0; a row without an answer is unscorable."""

    def normal(text: str) -> str:
        text = " ".join(text.split()) if options.collapse_spaces else text
        return text.casefold() if options.ignore_case else text

    def rule(sample: RewardSample) -> PartScore:
        gold = gold_of(sample)
        if gold is None:
            return unscorable(NO_ANSWER)
        return _yes(normal(sample.text) == normal(gold))

    return rule


@dataclass(frozen=True, slots=True)
class NumericOptions:
    """`which` number of the text counts; `tolerance` is absolute, and 0 means exactly equal."""

    which: Literal["last", "first", "only"] = "last"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance is {self.tolerance}; it is a finite number from 0 on")


def numeric(options: NumericOptions) -> Rule:
    """1 where the chosen number equals the answer, else 0.

    Read are signs, thousands commas, decimals, exponents, and fractions a/b or \\frac{a}{b}; units
    and currency signs are not. `only`: the whole text must be one number. Compared exactly, as
    rationals. A row whose answer is not one number is unscorable.
    """
    tolerance = Fraction(str(options.tolerance))

    def chosen(text: str) -> Fraction | None:
        if options.which == "only":
            return only_number(text)
        found = numbers(text)
        if not found:
            return None
        return value(found[-1] if options.which == "last" else found[0])

    def rule(sample: RewardSample) -> PartScore:
        gold = gold_of(sample)
        if gold is None:
            return unscorable(NO_ANSWER)
        target = only_number(gold)
        if target is None:
            return unscorable(f"the row's answer {gold[:60]!r} is not a number")
        number = chosen(sample.text)
        return _yes(number is not None and abs(number - target) <= tolerance)

    return rule


@dataclass(frozen=True, slots=True)
class RegexOptions:
    """`group` is compared with the row's answer; without it a match is enough.

    `which` match of a search gives the group.
    """

    pattern: str
    match: Literal["search", "full"] = "search"
    group: int | str | None = None
    which: Literal["last", "first"] = "last"
    ignore_case: bool = False

    def __post_init__(self) -> None:
        try:
            pattern = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regex: {error}") from None
        known = self.group is None or self.group in pattern.groupindex
        if not known and self.group not in range(pattern.groups + 1):
            raise ValueError(f"pattern {self.pattern!r} has no group {self.group!r}")


def regex(options: RegexOptions) -> Rule:
    """1 where the pattern is found (`search`) or is the whole text without outer space (`full`).

    With `group`, its text must also be the row's answer, white space and (asked for) case aside.
    """
    flags = re.IGNORECASE if options.ignore_case else re.NOFLAG
    pattern = re.compile(options.pattern, flags)

    def find(text: str) -> re.Match[str] | None:
        if options.match == "full":
            return pattern.fullmatch(text.strip())
        if options.which == "first" or options.group is None:
            return pattern.search(text)
        last = None
        for last in pattern.finditer(text):  # noqa: B007
            pass
        return last

    def normal(text: str | None) -> str:
        text = " ".join((text or "").split())
        return text.casefold() if options.ignore_case else text

    def rule(sample: RewardSample) -> PartScore:
        gold = gold_of(sample)
        if options.group is not None and gold is None:
            return unscorable(NO_ANSWER)
        found = find(sample.text)
        if found is None or options.group is None:
            return _yes(found is not None)
        return _yes(normal(found[options.group]) == normal(gold))

    return rule


@dataclass(frozen=True, slots=True)
class BoxedOptions:
    ignore_case: bool = False


def boxed(options: BoxedOptions) -> Rule:
    """1 where the last \\boxed{...} with balanced braces holds the answer, else 0.

    Compared as numbers where both are numbers, else as text without spacing. The row's answer may
    itself be boxed.
    """

    def rule(sample: RewardSample) -> PartScore:
        gold = gold_of(sample)
        if gold is None:
            return unscorable(NO_ANSWER)
        inner = last_boxed(gold)
        gold = gold if inner is None else inner
        if not plain_answer(gold):
            return unscorable(f"the row's answer {gold[:60]!r} is empty")
        answer = last_boxed(sample.text)
        if answer is None:
            return scored(0.0)
        if options.ignore_case:
            answer, gold = answer.casefold(), gold.casefold()
        return _yes(same_answer(answer, gold))

    return rule


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Exactly one of the two, in tokens."""

    target: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if (self.target is None) == (self.max is None):
            raise ValueError("length takes one of target and max, in tokens")
        if min(self.target or 1, self.max or 1) < 1 or 0 in (self.target, self.max):
            raise ValueError("target and max are numbers of tokens from 1 on")


def length(options: LengthOptions) -> Rule:
    """How well the number of sampled tokens n (end-of-sequence id included) fits.

    target: max(0, 1 - |n - target| / target), 1 at the target, 0 at nothing and at twice it.
    max: 1 up to max, then falling linearly to 0 at twice max.
    """

    def rule(sample: RewardSample) -> PartScore:
        n = len(sample.ids)
        if options.target is not None:
            return scored(max(0.0, 1.0 - abs(n - options.target) / options.target))
        assert options.max is not None
        return scored(min(1.0, max(0.0, 2.0 - n / options.max)))

    return rule


RULES: dict[str, BuiltIn] = {
    "exact": BuiltIn(ExactOptions, exact),
    "numeric": BuiltIn(NumericOptions, numeric),
    "regex": BuiltIn(RegexOptions, regex, lambda options: Hired()),
    "boxed": BuiltIn(BoxedOptions, boxed),
    "length": BuiltIn(LengthOptions, length),
}
