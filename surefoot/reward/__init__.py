"""How completions are scored: contracts, built-in rules, killable workers, and the grader.

Owns everything between a completion and its three-valued score.
Refuses to own advantages, and what a run does about missing scores.
"""

from __future__ import annotations

from surefoot.reward.contract import RewardSample, reward_function
from surefoot.reward.grader import Grader
from surefoot.reward.resolve import BUILT_INS, FunctionPart, Reward, resolve

__all__ = [
    "BUILT_INS",
    "FunctionPart",
    "Grader",
    "Reward",
    "RewardSample",
    "resolve",
    "reward_function",
]
