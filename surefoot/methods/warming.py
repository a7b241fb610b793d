"""The row that a method warm-up trains with before the row itself.

Owns which values it keeps of its own and which it takes over.
Refuses to own when the warm-up is over (`loops/warmup`).
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.errors import RecipeError
from surefoot.methods.registry import get
from surefoot.methods.signal import KL
from surefoot.methods.types import Method
from surefoot.methods.update import MethodWarmup


def warming_row(row: Method) -> Method | None:
    """The row of the warm-up; None where there is none. RecipeError if it cannot lead to `row`.

    Budgets (group_size, min_group, epochs, minibatches) and what the reward is made of (truncated,
    shaping) are those of `row`, so that a step costs and pays the same before and after. A row
    without any KL has none here either.
    """
    if not isinstance(row.warmup, MethodWarmup):
        return None
    first = get(row.warmup.method)
    if not isinstance(first, Method):
        raise RecipeError(
            f"method.warmup.method: {first.name} does not train on sampled completions; take grpo "
            "or rloo"
        )
    if first.critic.kind != "none" or first.baseline.kind == "history":
        carried = "a critic" if first.critic.kind != "none" else "a history of rewards"
        raise RecipeError(
            f"method.warmup.method: {first.name} carries {carried} of its own, which {row.name} "
            "could not go on with; take a row without one, such as grpo"
        )
    own = first.kl
    if row.kl.coef == 0:
        own = KL(measure_every=row.kl.measure_every)
    return replace(
        first,
        group_size=row.group_size,
        min_group=row.min_group,
        truncated=row.truncated,
        shaping=row.shaping,
        epochs=row.epochs,
        minibatches=row.minibatches,
        kl=own,
    )
