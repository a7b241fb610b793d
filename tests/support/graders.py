"""A stand-in for the grader of an audit, and rows and graders with known faults."""

from __future__ import annotations

import re
from collections.abc import Callable

from surefoot.audit.bench import Bench
from surefoot.audit.report import Finding
from surefoot.records import Group, Prompt, Score, ScoreStatus
from surefoot.reward.figures import numbers, only_number, value

GOLDS = [str(7 * n + 13) for n in range(30)]


class Plain:
    """A grader whose one reward is a plain function of a sample, called in this process."""

    class Reward:
        name = "plain"
        price: float | None = None
        identity: str | None = None

    def __init__(self, function: Callable[[Prompt, str], float | None]) -> None:
        self.function = function
        self.rewards = (self.Reward(),)

    def score(self, groups: list[Group]) -> list[Group]:
        return [
            group.scored(tuple(self._score(group.prompt, c.text) for c in group.completions))
            for group in groups
        ]

    def _score(self, prompt: Prompt, text: str) -> Score:
        try:
            number = self.function(prompt, text)
        except RuntimeError as error:
            return Score(ScoreStatus.INFRA_ERROR, None, {"plain": None}, str(error))
        if number is None:
            return Score(ScoreStatus.UNSCORABLE, None, {"plain": None}, "a bad row")
        return Score(ScoreStatus.SCORED, number, {"plain": number})


def bench(function: Callable[[Prompt, str], float | None], **settings: object) -> Bench:
    return Bench(Plain(function), **{"accept_at": 1.0, **settings})  # type: ignore[arg-type]


def prompts(golds: list[str | None] = GOLDS) -> list[Prompt]:  # type: ignore[assignment]
    return [
        Prompt(f"r{n}", n, (1,), f"Question {n}: how many?", gold, columns={"answer": gold})
        for n, gold in enumerate(golds)
    ]


def last_number(prompt: Prompt, text: str) -> float:
    found = numbers(text)
    return float(bool(found) and value(found[-1]) == only_number(str(prompt.answer)))


def exact(prompt: Prompt, text: str) -> float:
    return float(text == prompt.answer)


def anywhere(prompt: Prompt, text: str) -> float:
    return float(str(prompt.answer) in re.findall(r"-?\d+", text))


def of(findings: list[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)
