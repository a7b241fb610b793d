"""Warming up: steps before the row itself trains, with the critic alone or with another row.

Owns which row trains a step, what the critic regresses on meanwhile, and when the warm-up is over.
Refuses to own the training of the critic (`learner/critic`), and how it is made (`critics`).
"""

from __future__ import annotations

import dataclasses
import math

from surefoot.loops.state import Progress
from surefoot.methods import Gae, Method, MethodWarmup, ValueWarmup, warming_row


def active(row: Method, progress: Progress) -> Method:
    """The row that trains the next step: that of a method warm-up until it is over."""
    first = None if progress.warm else warming_row(row)
    return row if first is None else first


def holds_critic(row: Method, progress: Progress) -> bool:
    """Whether there is a critic by now: after a method warm-up the policy initialises it."""
    return active(row, progress).critic.kind != "none"


def still_warming(row: Method, progress: Progress) -> bool:
    """Whether the critic trains alone, under a policy that stays what it is."""
    return isinstance(row.warmup, ValueWarmup) and not progress.warm


def on_returns(row: Method) -> Method:
    """The row with Monte Carlo returns as the critic's target (arXiv:2503.01491)."""
    assert isinstance(row.credit, Gae)
    return dataclasses.replace(row, credit=dataclasses.replace(row.credit, critic_lam=1.0))


def warm(row: Method, progress: Progress, explained: object) -> str | None:
    """Count a step of the warm-up of `row`; what to say when it is over, else None.

    A value warm-up is over when the explained variance has been flat for a window, or at the bound.
    A step whose returns are all equal explains nothing, and is left out of the trail.
    """
    progress.warmed += 1
    if isinstance(row.warmup, MethodWarmup):
        return _method(row.warmup, row.name, progress)
    assert isinstance(row.warmup, ValueWarmup)
    return _value(row.warmup, progress, explained)


def _method(rule: MethodWarmup, name: str, progress: Progress) -> str | None:
    if progress.warmed < rule.max_steps:
        return None
    progress.warm = True
    return (
        f"{rule.method} has warmed the policy for {progress.warmed} steps; from here on {name} "
        "trains it, with a critic that starts from its layers"
    )


def _value(rule: ValueWarmup, progress: Progress, explained: object) -> str | None:
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
