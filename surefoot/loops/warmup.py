"""Warming the critic: it learns the returns of a policy that stays what it is.

Owns when the warm-up of a row is over, and what the critic regresses on meanwhile.
Refuses to own the training of the critic (`learner/critic`).
"""

from __future__ import annotations

import dataclasses
import math

from surefoot.loops.state import Progress
from surefoot.methods import Gae, Method, ValueWarmup


def still_warming(row: Method, progress: Progress) -> bool:
    return isinstance(row.warmup, ValueWarmup) and not progress.warm


def on_returns(row: Method) -> Method:
    """The row with Monte Carlo returns as the critic's target (arXiv:2503.01491)."""
    assert isinstance(row.credit, Gae)
    return dataclasses.replace(row, credit=dataclasses.replace(row.credit, critic_lam=1.0))


def warm(row: Method, progress: Progress, explained: object) -> str | None:
    """Count a step; over when the explained variance has been flat for a window, or at the bound.

    Returns what to say when it is over. A step whose returns are all equal explains nothing, and
    is left out of the trail.
    """
    rule = row.warmup
    assert isinstance(rule, ValueWarmup)
    progress.warmed += 1
    if isinstance(explained, float) and math.isfinite(explained):
        progress.warm_trail = [*progress.warm_trail, explained][-rule.window :]
    trail = progress.warm_trail
    flat = len(trail) == rule.window and max(trail) - min(trail) < rule.tolerance
    if not flat and progress.warmed < rule.max_steps:
        return None
    progress.warm = True
    last = f"{trail[-1]:.2f}" if trail else "unknown"
    why = f"flat for {rule.window} steps" if flat else "method.warmup.max_steps is reached"
    return (
        f"the critic is warm after {progress.warmed} steps ({why}); explained variance {last}; "
        "the policy trains from here on"
    )
