"""A chain of trainings: one after another, each from what an earlier one saved.

Owns which stage is next, what a complete stage leaves behind, and what may change in one.
Refuses to own training (`entry`) and what a stage means (`recipe/stages`).
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from surefoot.errors import CheckpointError, RecipeError, RunDirectoryError, SurefootError
from surefoot.loops.assemble import Outside
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.runs import Run, export_whole
from surefoot.loops.signals import Stopper
from surefoot.recipe import Recipe, check_resume, load
from surefoot.recipe.resume import with_length_of
from surefoot.recipe.stages import Chain, Stage
from surefoot.run.directory import RunDirectory
from surefoot.run.files import fsync_directory
from surefoot.run.ledger import Ledger
from surefoot.run.lock import RunLock
from surefoot.run.read import latest_step

_PART = "model.part"
"""The model directory while it is written."""
_LENGTH = ("run.steps", "run.epochs")
"""A run may be made longer; a stage that others started from may not."""


def run_chain(
    chain: Chain,
    given: Outside,
    hooks: Callbacks,
    stopper: Stopper,
    run: Callable[[Recipe], Run],
) -> Run:
    """Train every stage that is not complete; `run` trains one. The run of the last that was begun.

    Nothing begins before all complete stages were compared with the recipe. A callback that ends a
    stage ends the chain.
    """
    _refuse_objects(given)
    directory = RunDirectory(chain.dir).create_chain()
    with RunLock(directory):
        changes = _compared(directory, chain)
        directory.write_recipe(chain.to_yaml())
        ledger = Ledger(directory, resume_step=None)
        try:
            for change in changes:
                _say(change)
                ledger.event("changed", change)
            for number, stage in enumerate(chain.stages, 1):
                title = f"stage {number} of {len(chain.stages)}, {stage.name}"
                one = RunDirectory(str(stage.recipe.run.dir))
                if one.model.is_dir():
                    _say(f"{title}: complete, skipped")
                    continue
                stopper.check()
                if not _train(stage, title, one, ledger, hooks, run):
                    break
        finally:
            ledger.close()
    return Run(one.path)


def stage_runs(chain: Path | str) -> list[Run]:
    """The run of every stage that was begun in the run directory of a chain, in order."""
    return [Run(path) for path in RunDirectory(chain).stage_paths()]


def _train(
    stage: Stage,
    title: str,
    directory: RunDirectory,
    ledger: Ledger,
    hooks: Callbacks,
    run: Callable[[Recipe], Run],
) -> bool:
    """Train one stage and save its model; False if a callback ended it before its last step."""
    facts = {"stage": stage.name}
    _say(title)
    ledger.event("stage_began", title, {**facts, "resumes": directory.has_checkpoint()})
    # Each stage counts its steps from the start.
    hooks.started(None)
    try:
        run(stage.recipe)
    except SurefootError as stop:
        ledger.event("stage_stopped", f"{title}: {stop}", facts)
        raise
    # The parts of a run refer to each other; two models at once may not fit.
    gc.collect()
    if hooks.stopped:
        ledger.event("stage_stopped", f"{title}: ended by a callback", facts)
        return False
    _save_model(directory)
    ledger.event("stage_ended", f"{title}: complete", facts)
    return True


def _save_model(directory: RunDirectory) -> None:
    """Put the model of the last step in place, whole; its presence says that a stage is complete.

    It is read from the checkpoint, so that it is the same whichever process saves it.
    """
    steps = directory.checkpoint_steps()
    if not steps or steps[-1] < (latest_step(directory.path) or 0):
        raise CheckpointError(
            f"{directory.path}: the last step could not be saved, so the next stage has nothing to "
            "start from; make room on the disk and send the same command again"
        )
    part = directory.path / _PART
    for left in [part, *directory.path.glob(f".{_PART}-*")]:
        shutil.rmtree(left, ignore_errors=True)
    export_whole(directory.path, part, steps[-1])
    _sync(part)
    try:
        part.rename(directory.model)
    except OSError as error:
        raise RunDirectoryError(
            f"{directory.model} cannot be put in place ({error.strerror}); move what lies there "
            "elsewhere, and send the same command again"
        ) from error
    fsync_directory(directory.path)


def _sync(folder: Path) -> None:
    """Force every file of a flat directory onto the disk, and their names."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    fsync_directory(folder)


def _compared(directory: RunDirectory, chain: Chain) -> list[str]:
    """What changed in complete stages although it alters what they learned: allowed, or refused."""
    planned = {Path(str(stage.recipe.run.dir)).name for stage in chain.stages}
    for path in directory.stage_paths():
        if path.name not in planned:
            raise RunDirectoryError(
                f"run.dir {directory.path} holds a stage {path.name}, which the recipe does not "
                "have at that place; set stages back, or name another run.dir"
            )
    told: list[str] = []
    for index, stage in enumerate(chain.stages):
        one = RunDirectory(str(stage.recipe.run.dir))
        if not one.model.is_dir():
            continue
        where = f"stages.{index} ({stage.name}), which is complete"
        base = stage.recipe.base_dir
        old = load(one.recipe, base_dir=base, outside=("data", "reward"))
        # The stage wrote down how many steps its epochs were.
        new = with_length_of(old, stage.recipe)
        try:
            changes = check_resume(old, new)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from error
        for change in changes:
            if change.key in _LENGTH and change.key not in new.run.allow_change:
                raise RecipeError(
                    f"{where}: {change} would train it anew, and others may have started from it; "
                    f"set it back, name another run.dir, or add {change.key} to run.allow_change, "
                    "and the stage stays as it is"
                )
            if change.learned or change.key in _LENGTH:
                told.append(f"{where}, stays as it is: {change}")
    return told


def _refuse_objects(given: Outside) -> None:
    passed = {
        "rewards": bool(given.rewards),
        "data": given.rows is not None,
        "eval_data": given.eval_rows is not None,
        "model": given.model is not None,
    }
    for name, present in passed.items():
        if present:
            raise RecipeError(
                f"{name}: an object cannot be passed to a recipe with stages, because it does not "
                "say which stage takes it; name files in the stages, as in "
                "reward: [{use: rewards.py:right}]"
            )


def _say(text: str) -> None:
    sys.stderr.write(f"surefoot: {text}\n")
