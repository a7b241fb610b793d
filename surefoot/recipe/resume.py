"""What changed between two recipes, and whether a run may go on with it.

Owns the list of keys that may change on resume (DESIGN 6).
Refuses to own the decision to resume: `loops/` asks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from surefoot.errors import RecipeError
from surefoot.recipe.recipe import Recipe, leaves
from surefoot.recipe.text import dump

_FREE = re.compile(
    r"optim\.tokens_per_microbatch|rollout\.urls|reward\.\d+\.(timeout|retries|price)|doctor\.action"
    r"|judge\.(budget_(calls|usd)|price_per_million_(in|out)put|timeout|deadline|concurrency"
    r"|api_key_env)"
    r"|run\.(dir|eval_every|checkpoint_every|keep|grace|samples|trackers|stop_without_signal"
    r"|stop_at_failure_rate|stop_at_mismatch|allow|allow_change)"
)


@dataclass(frozen=True)
class Change:
    """One key that differs; `learned` says that it alters what the run learns.

    A key that one of the recipes does not have is None there.
    """

    key: str
    old: Any
    new: Any
    learned: bool

    def __str__(self) -> str:
        return f"{self.key}: {dump(self.old)} -> {dump(self.new)}"


def with_length_of(old: Recipe, new: Recipe) -> Recipe:
    """The new recipe with the steps that its epochs were in the run of the old one."""
    if new.run.steps is not None or new.run.epochs != old.run.epochs:
        return new
    run = new.run.model_copy(update={"steps": old.run.steps})
    return dataclasses.replace(new, run=run)


def difference(old: Recipe, new: Recipe) -> list[Change]:
    """Every key whose value differs, in the order of the recipe.

    `auto` on one side is no difference: it is resolved once, and the run keeps what it became.
    """
    before, after = leaves(old), leaves(new)
    keys = [*before, *(key for key in after if key not in before)]
    changes = []
    for key in keys:
        left, right = before.get(key), after.get(key)
        if (key in before and key in after and left == right) or "auto" in (left, right):
            continue
        changes.append(Change(key, left, right, _learned(key, old, new)))
    return changes


def _learned(key: str, old: Recipe, new: Recipe) -> bool:
    if key == "run.steps":
        return not old.optim.schedule == new.optim.schedule == "constant"
    return _FREE.fullmatch(key) is None


def check_resume(
    old: Recipe, new: Recipe, allow_change: Collection[str] | None = None
) -> list[Change]:
    """The changes, if a run of `old` may go on as `new`; else RecipeError printing them.

    `allow_change` names keys (or parents of keys) that may differ although they alter what is
    learned; None = the new recipe's run.allow_change.
    """
    allowed = new.run.allow_change if allow_change is None else tuple(allow_change)
    changes = difference(old, new)
    refused = [
        change
        for change in changes
        if change.learned
        and not any(change.key == name or change.key.startswith(f"{name}.") for name in allowed)
    ]
    if refused:
        listed = "\n".join(f"  {change}" for change in refused)
        names = ", ".join(change.key for change in refused)
        raise RecipeError(
            f"this run cannot go on with another recipe, because these keys alter what is "
            f"learned:\n{listed}\nset them back, name another run.dir, or add them to "
            f"run.allow_change: [{names}]"
        )
    return changes
