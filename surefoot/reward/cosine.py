"""The built-in reward `cosine`: correctness, scaled by length along half a cosine.

Owns the schedule (arXiv 2502.03373, C.1) and the choice of the rule that says what is correct.
Refuses to own that rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.records import ScoreStatus, StopReason
from surefoot.reward.contract import PartScore, RewardSample, scored
from surefoot.reward.maths import MATHS, require_math_verify
from surefoot.reward.options import fill, nearest
from surefoot.reward.rules import RULES, BuiltIn, Hired, Rule

CHECKERS: dict[str, BuiltIn] = MATHS | {
    name: RULES[name] for name in ("exact", "numeric", "regex", "boxed")
}


@dataclass(frozen=True, slots=True)
class CosineOptions:
    """Values at no length and at `max_len` tokens, for correct and for wrong completions.

    `max_value_correct` and `min_value_wrong` are the values of the shortest completions,
    `min_value_correct` and `max_value_wrong` those at `max_len`. `exceed_value`, if set, is the
    value of every completion that is longer or was cut off there. `checker` is the built-in reward
    that says what is correct (its value is at least 1), with `checker_options`.
    """

    max_len: int | None = None
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    exceed_value: float | None = None
    checker: str = "math"
    checker_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_len is None:
            raise ValueError("max_len is not set; set it to rollout.max_new_tokens")
        if self.max_len < 1:
            raise ValueError(f"max_len is {self.max_len}; it is a number of tokens from 1 on")
        correct = ("min_value_correct", self.min_value_correct, self.max_value_correct)
        wrong = ("min_value_wrong", self.min_value_wrong, self.max_value_wrong)
        for name, low, high in (correct, wrong):
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"{name} is {low} and its max is {high}; min is at most max")
        if self.min_value_correct < self.max_value_wrong:
            raise ValueError(
                f"min_value_correct is {self.min_value_correct}, and max_value_wrong "
                f"{self.max_value_wrong}; no wrong completion is worth more than a correct one"
            )
        if self.exceed_value is not None and not math.isfinite(self.exceed_value):
            raise ValueError(f"exceed_value is {self.exceed_value}; it is a finite number")
        if self.checker not in CHECKERS:
            raise ValueError(f"there is no checker {self.checker!r}; {self._nearest()}")
        fill(CHECKERS[self.checker].schema, self.checker_options, reward=self.checker)

    def _nearest(self) -> str:
        return nearest(self.checker, CHECKERS)


def cosine(options: CosineOptions) -> Rule:
    """low + (high - low)·(1 + cos(π·min(n / max_len, 1))) / 2 of n sampled tokens.

    A correct completion falls from `max_value_correct` to `min_value_correct`, a wrong one rises
    from `min_value_wrong` to `max_value_wrong`. What the checker cannot score is not scored here.
    """
    if options.checker == "math":
        require_math_verify("cosine")
    checker = CHECKERS[options.checker]
    check = checker.make(fill(checker.schema, options.checker_options, reward=options.checker))

    def rule(sample: RewardSample) -> PartScore:
        verdict = check(sample)
        if verdict.status is not ScoreStatus.SCORED:
            return verdict
        assert verdict.value is not None
        return scored(_scaled(options, sample, correct=verdict.value >= 1.0))

    return rule


def _scaled(options: CosineOptions, sample: RewardSample, *, correct: bool) -> float:
    assert options.max_len is not None
    n = len(sample.ids)
    cut = n == options.max_len and sample.stop is StopReason.LENGTH
    if options.exceed_value is not None and (cut or n > options.max_len):
        return options.exceed_value
    start, end = options.min_value_wrong, options.max_value_wrong
    if correct:
        start, end = options.max_value_correct, options.min_value_correct
    # Without the min the cosine would rise again past max_len.
    height = 0.5 * (1.0 + math.cos(math.pi * min(n / options.max_len, 1.0)))
    return end + (start - end) * height


def _hire(options: CosineOptions) -> Hired | None:
    """Where the checker runs; a sample at the checker's CPU limit is a wrong one of its length."""
    checker = CHECKERS[options.checker]
    filled = fill(checker.schema, options.checker_options, reward=options.checker)
    hired = checker.hire(filled)
    if hired is None or hired.at_limit is None:
        return hired
    checked = hired.at_limit

    def at_limit(sample: RewardSample) -> PartScore:
        return scored(_scaled(options, sample, correct=False), checked(sample).detail)

    return Hired(hired.warm, hired.recycle, at_limit)


COSINE: dict[str, BuiltIn] = {"cosine": BuiltIn(CosineOptions, cosine, _hire, cap="max_len")}
