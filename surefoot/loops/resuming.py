"""Whether a run may go on from its checkpoint, and what of it has changed since.

Owns the comparison of what a checkpoint belongs to with what is there now, and which of its parts
run.allow_change may name.
Refuses to own the comparison of recipes (`recipe/resume`) and the reading back (`state`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from surefoot.errors import CheckpointError, RunDirectoryError
from surefoot.loops.state import progress_of
from surefoot.recipe import Recipe, load
from surefoot.recipe.resume import Change, check_resume, with_length_of
from surefoot.run.checkpoint import Loaded, load_latest
from surefoot.run.directory import RunDirectory

DATA, TEMPLATE = "data", "template"
"""Parts of a checkpoint's identity that may be allowed to differ."""
_NAMED_BY = {DATA: "data", TEMPLATE: "model.template"}
"""The keys that allow it."""


def resumed(directory: RunDirectory, recipe: Recipe) -> tuple[Recipe, Loaded | None, list[Change]]:
    """The recipe with what the run had resolved, the checkpoint to go on from, what changed."""
    if not directory.recipe.is_file():
        if directory.has_checkpoint():
            raise RunDirectoryError(
                f"{directory.path} holds checkpoints and no {directory.recipe.name}, so nothing "
                "says what they are of; put the file back, or name another run.dir"
            )
        return recipe, None, []
    old = load(directory.recipe, base_dir=recipe.base_dir, outside=("data", "reward"))
    kept = old.optim.tokens_per_microbatch
    if recipe.optim.tokens_per_microbatch == "auto" and kept != "auto":
        recipe = recipe.with_auto({"optim.tokens_per_microbatch": kept})
    recipe = with_length_of(old, recipe)
    loaded = load_latest(directory) if directory.has_checkpoint() else None
    if loaded is None:
        return recipe, None, []
    changes = check_resume(old, recipe)
    if any(change.key == "optim.tokens_per_microbatch" for change in changes):
        # Another machine, perhaps: what is asked for is tried again.
        loaded.state["budget"] = 0
    return recipe, loaded, changes


def is_complete(checkpoint: Loaded, steps: int) -> bool:
    """Whether a run of so many steps has nothing left to do, the row of its last step included."""
    return checkpoint.step >= steps and progress_of(checkpoint).owed is None


def check_identity(
    checkpoint: Loaded, identity: Mapping[str, str], allow_change: Collection[str] = ()
) -> list[Change]:
    """What the run is made of that differs from the checkpoint's, if all of it is allowed to.

    Raises CheckpointError naming the first difference that is not, and the key that would allow it.
    """
    changes = []
    found = checkpoint.differences(identity)
    for key, (old, new) in found.items():
        names = {_NAMED_BY[key]} if key in _NAMED_BY else set()
        if key == DATA and TEMPLATE in found:
            # Another template makes other tokens of the same rows.
            names.add(_NAMED_BY[TEMPLATE])
        if not any(_covers(allowed, name) for allowed in allow_change for name in names):
            raise CheckpointError(_refusal(checkpoint, key, old, new))
        changes.append(Change(f"{key} (sha256)", _short(old), _short(new), learned=True))
    return changes


def _covers(allowed: str, name: str) -> bool:
    """A key names itself, and what it is a part of has changed with it."""
    return allowed == name or allowed.startswith(f"{name}.")


def _refusal(checkpoint: Loaded, key: str, old: object, new: object) -> str:
    mend = "Name a new run.dir, or restore what changed"
    if key in _NAMED_BY:
        mend += f"; to go on with it, add {_NAMED_BY[key]} to run.allow_change"
    return (
        f"checkpoint {checkpoint.path.name} belongs to another run: {key} was {_short(old)} and is "
        f"now {_short(new)}. {mend}"
    )


def _short(value: object) -> str:
    """A hash by its beginning, anything else as it is."""
    text = str(value)
    return text[:16] if len(text) == 64 else repr(value)
