"""Evaluation on held-out prompts: one greedy completion each.

Owns what counts as correct: the first reward of the recipe gives at least 1.
Refuses to own intervals (`statistics`) and the file format (`run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.records import Group, Prompt, StopReason
from surefoot.reward import Grader
from surefoot.rollout import Engine
from surefoot.run.read import Evaluation


@dataclass(frozen=True)
class Evaluated:
    """One look at the held-out prompts."""

    groups: tuple[Group, ...]
    correct: tuple[bool | None, ...]
    """None where the completion has no valid score; counted as not correct in the share."""
    evaluation: Evaluation


def evaluate(engine: Engine, grader: Grader, prompts: Sequence[Prompt], *, step: int) -> Evaluated:
    """Answer every prompt greedily and score it."""
    assert prompts, "evaluation without prompts"
    groups = grader.score(engine.sample(prompts, 1, purpose="eval", greedy=True))
    first = grader.rewards[0].name
    correct: list[bool | None] = []
    for group in groups:
        assert group.scores is not None
        score = group.scores[0]
        part = score.parts.get(first) if score.valid else None
        correct.append(None if part is None else part >= 1.0)
    values = [g.scores[0].value for g in groups if g.scores and g.scores[0].value is not None]
    stopped = sum(g.completions[0].stop is StopReason.STOP for g in groups)
    evaluation = Evaluation.of(
        step,
        n=len(groups),
        correct=sum(bool(flag) for flag in correct),
        reward=sum(values) / len(values) if values else None,
        eos_share=stopped / len(groups),
    )
    return Evaluated(tuple(groups), tuple(correct), evaluation)
