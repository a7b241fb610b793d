"""One score from the verdicts of all rewards, and the scores back at their completions.

Owns the weighted sum, and which state a sample is in where the rewards disagree.
Refuses to own the verdicts themselves (`grader.py`), and normalising over a group (`objective`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from surefoot.records import Group, Score, ScoreStatus, StopReason
from surefoot.reward.contract import PartScore
from surefoot.reward.resolve import Reward

NONE_APPLIES = "no part applies"


def combine(rewards: Sequence[Reward], verdicts: Mapping[str, PartScore]) -> Score:
    """One sample's score: the weighted sum over the rewards that apply to it.

    A reward whose grader failed makes the sample missing, and one whose row is at fault makes it
    unscorable; where no reward applies the sample is missing. `parts` keeps the values unweighted.
    """
    parts = {name: verdict.value for name, verdict in verdicts.items()}
    for status in (ScoreStatus.INFRA_ERROR, ScoreStatus.UNSCORABLE):
        details = [v.detail for v in verdicts.values() if v.status is status]
        if details:
            return Score(status, None, parts, "; ".join(details))
    weighted = [
        reward.weight * value for reward in rewards if (value := parts[reward.name]) is not None
    ]
    if not weighted:
        return Score(ScoreStatus.INFRA_ERROR, None, parts, NONE_APPLIES)
    total = sum(weighted)
    steps = _weighted_steps(rewards, verdicts)
    if not math.isfinite(total) or not all(math.isfinite(value) for _, value in steps):
        detail = f"the weighted sum of {parts}, or a step in it, is not finite"
        return Score(ScoreStatus.INFRA_ERROR, None, parts, detail)
    details = [f"{name}: {v.detail}" for name, v in verdicts.items() if v.detail]
    return Score(ScoreStatus.SCORED, total, parts, "; ".join(details), steps)


def _weighted_steps(
    rewards: Sequence[Reward], verdicts: Mapping[str, PartScore]
) -> tuple[tuple[int, float], ...]:
    """Of all rewards by ascending end, in the order of the rewards where two have the same."""
    steps = [
        (end, reward.weight * value)
        for reward in rewards
        if reward.weight != 0
        for end, value in verdicts[reward.name].steps
    ]
    return tuple(sorted(steps, key=lambda step: step[0]))


def put_back(groups: Sequence[Group], graded: Sequence[Score]) -> list[Group]:
    """Scores into their groups, in order; completions that the engine failed get a missing one."""
    left = iter(graded)
    scored = []
    for group in groups:
        scores = tuple(
            Score(ScoreStatus.INFRA_ERROR, detail=f"the engine failed: {completion.detail}")
            if completion.stop is StopReason.ERROR
            else next(left)
            for completion in group.completions
        )
        scored.append(group.scored(scores))
    return scored
