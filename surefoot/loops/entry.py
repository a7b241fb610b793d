"""The door to training: what the command line and Python scripts call.

Owns how a run begins, resumes and ends, and how Python objects take their place in a recipe.
Refuses to own the steps between (`online`), and runs that are over (`runs`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.errors import (
    DISK_REFUSES,
    Interrupted,
    ModelError,
    RecipeError,
    RunDirectoryError,
    Stop,
)
from surefoot.loops.assemble import Outside, outside
from surefoot.loops.callbacks import Callback, Callbacks, EndedByCallback
from surefoot.loops.desk import Desk
from surefoot.loops.process import tune_allocator
from surefoot.loops.resuming import DATA, check_identity, is_complete, resumed
from surefoot.loops.runs import EvalResult, Run, evaluate, export
from surefoot.loops.signals import Stopper
from surefoot.loops.stages import run_chain
from surefoot.loops.state import Progress, load_policy, progress_of
from surefoot.loops.work import Work, make_work
from surefoot.methods.registry import spec
from surefoot.methods.types import Row
from surefoot.models import OBJECT, LoadedModel, adopt, given_model, save_directory
from surefoot.recipe import Recipe, load, to_yaml
from surefoot.recipe.recipe import leaves
from surefoot.recipe.references import grounded
from surefoot.recipe.resume import Change
from surefoot.recipe.schema import DataSource
from surefoot.recipe.stages import load_chain
from surefoot.recipe.text import read, split_override
from surefoot.run.checkpoint import Loaded
from surefoot.run.directory import RunDirectory, environment
from surefoot.run.display import Display
from surefoot.run.ledger import Ledger
from surefoot.run.lock import RunLock
from surefoot.run.read import read_metrics
from surefoot.run.trackers import open_trackers

__all__ = ["EvalResult", "Run", "evaluate", "export", "train"]

Source = Path | str | Mapping[str, Any] | Recipe


def train(
    recipe: Source,
    overrides: Sequence[str] = (),
    *,
    rewards: Iterable[Callable[..., Any]] = (),
    data: Iterable[Mapping[str, Any]] | None = None,
    eval_data: Iterable[Mapping[str, Any]] | None = None,
    model: PreTrainedModel | Path | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Train as a recipe says; an existing run directory resumes.

    `rewards` are functions added to the recipe's. `data` and `eval_data` are rows, any iterable of
    mappings. `model` takes the place of model.path; an object is trained in place, and when this
    returns it holds the weights of the newest checkpoint. `method` of a mapping may be a row.
    Raises the errors of `surefoot.errors`; state is saved before every orderly stop. A callback
    that stops the run is no error: the run so far is returned. Of a recipe with `stages`, each is a
    run of its own, for callbacks too, and the last one is returned.
    """
    hooks = Callbacks(callbacks)
    given, laid = _given(rewards, data, eval_data, model, tokenizer, overrides)
    chain = load_chain(recipe, laid)
    with Stopper() as stopper, _disk_errors():
        run = partial(_run, given=given, hooks=hooks, stopper=stopper)
        if chain is not None:
            return run_chain(chain, given, hooks, stopper, run)
        return run(_plan(recipe, laid, given))


def _run(plan: Recipe, *, given: Outside, hooks: Callbacks, stopper: Stopper) -> Run:
    """One training, from its start or its newest checkpoint to its end."""
    stopper.grace = plan.run.grace
    stopper.computing()
    directory = RunDirectory(str(plan.run.dir)).create()
    with RunLock(directory):
        loaded = _run_locked(directory, plan, given, hooks, stopper)
    return Run(directory.path, given=given, loaded=loaded)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A disk that refuses what no run can do without is no bug."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_REFUSES:
            raise
        where = "" if error.filename is None else f": {error.filename}"
        raise RunDirectoryError(
            f"a disk refuses ({error.strerror}{where}); checkpoints are untouched. Free space, or "
            "name another run.dir, and send the same command again"
        ) from error


def _run_locked(
    directory: RunDirectory, plan: Recipe, given: Outside, hooks: Callbacks, stopper: Stopper
) -> LoadedModel | None:
    plan, checkpoint, changes = resumed(directory, plan)
    plan = grounded(plan, directory.path)
    loaded = _adopted(given, plan, directory, checkpoint)
    if checkpoint is not None and is_complete(checkpoint, int(plan.run.steps or 0)):
        sys.stderr.write(f"surefoot: {directory.path} is complete at step {checkpoint.step}\n")
        if loaded is not None and "policy" in checkpoint.names:
            load_policy(loaded.model, checkpoint)
    else:
        tune_allocator()
        job = _Job(directory, checkpoint, changes, given, hooks, stopper)
        loaded = job.train(plan, loaded)
    return loaded


def _given(
    rewards: Iterable[Callable[..., Any]],
    data: Iterable[Mapping[str, Any]] | None,
    eval_data: Iterable[Mapping[str, Any]] | None,
    model: PreTrainedModel | Path | str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    overrides: Sequence[str],
) -> tuple[Outside, list[str]]:
    """The Python objects, and the overrides with what `model` means laid over them."""
    laid = list(overrides)
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise ModelError(
                "tokenizer: belongs to a model that is passed as an object; a path or an id brings "
                "its own"
            )
        if model is not None:
            laid.append(_model_override(str(model), overrides))
        return outside(rewards, data, eval_data), laid
    held = given_model(model, tokenizer)
    laid.append(_model_override(OBJECT, overrides))
    return outside(rewards, data, eval_data, held), laid


def _model_override(path: str, overrides: Sequence[str]) -> str:
    for key, _ in map(split_override, overrides):
        if key in ("model", "model.path", "model_name_or_path"):
            raise RecipeError(f"model= and the override {key} both name the model; give one")
    # JSON is YAML; a path may hold what YAML would read as something else.
    return f"model.path={json.dumps(path)}"


def _plan(source: Source, overrides: Sequence[str], given: Outside) -> Recipe:
    """The recipe of this run, with the places of rows and model that came as objects."""
    if isinstance(source, Mapping) and isinstance(source.get("method"), Row):
        source = {**source, "method": spec(source["method"])}
    laid = list(overrides)
    if given.rows is not None and not _names_data(source, overrides):
        laid.insert(0, "data.source=rows")
    recipe = load(source, laid, outside=given.sections)
    if given.model is not None and recipe.model.dtype != given.model.dtype:
        if recipe.origins.get("model.dtype") != "default":
            raise ModelError(
                f"model.dtype: {recipe.model.dtype}, but the model that was passed is in "
                f"{given.model.dtype}; leave the key out, or convert the model with model.to()"
            )
        laid.append(f"model.dtype={given.model.dtype}")
        recipe = load(source, laid, outside=given.sections)
    return recipe if given.eval_rows is None else _with_eval_rows(recipe)


def _names_data(source: Source, overrides: Sequence[str]) -> bool:
    keys = [split_override(override)[0] for override in overrides]
    if any(key in ("data", "data.source", "data.0.source") for key in keys):
        return True
    if isinstance(source, Recipe):
        return bool(source.data)
    return bool((source if isinstance(source, Mapping) else read(Path(source))).get("data"))


def _with_eval_rows(recipe: Recipe) -> Recipe:
    """Add the source of `eval_data`, which reads its rows as the training rows are read."""
    if any(entry.source == "rows" and entry.role == "eval" for entry in recipe.data):
        return recipe
    first = next((entry for entry in recipe.data if entry.source == "rows"), None)
    changes = {
        "role": "eval",
        "eval_size": 0,
        "from_step": 0,
        "until_step": None,
        "keep_solve_rate": None,
    }
    start = DataSource(source="rows") if first is None else first
    recipe = dataclasses.replace(recipe, data=(*recipe.data, start.model_copy(update=changes)))
    added = f"data.{len(recipe.data) - 1}."
    origins = {key: "eval_data" for key in leaves(recipe) if key.startswith(added)}
    return dataclasses.replace(recipe, origins={**recipe.origins, **origins})


def _adopted(
    given: Outside, recipe: Recipe, directory: RunDirectory, checkpoint: Loaded | None
) -> LoadedModel | None:
    """The model object, ready; a copy is kept so that the run can be read without the object."""
    if given.model is None:
        return None
    loaded = adopt(given.model, recipe)
    if checkpoint is None:
        shutil.rmtree(directory.reference, ignore_errors=True)
        save_directory(loaded, directory.reference)
    elif checkpoint.identity.get("model") != loaded.hash:
        raise ModelError(
            f"model: this is not the model that the run in {directory.path} began with (a model "
            "that was trained in place is another one); load that model again, leave model= out "
            f"and set model.path to {OBJECT}, which takes the run's own copy, or name another "
            "run.dir"
        )
    return loaded


@dataclasses.dataclass(frozen=True)
class _Job:
    """One process's share of a run, from its parts to the last thing written."""

    directory: RunDirectory
    checkpoint: Loaded | None
    changes: list[Change]
    given: Outside
    hooks: Callbacks
    stopper: Stopper

    def train(self, recipe: Recipe, loaded: LoadedModel | None) -> LoadedModel | None:
        """Train to the end; the model, if it holds the weights of the newest checkpoint."""
        directory = self.directory
        work = make_work(
            recipe,
            self.given,
            self.hooks,
            interrupt=self.stopper.check,
            loaded=loaded,
            kept=directory.reference,
            resumes=self.checkpoint is not None,
        )
        try:
            identity = work.identity()
            progress = Progress()
            if self.checkpoint is not None:
                allowed = work.recipe.run.allow_change
                found = check_identity(self.checkpoint, identity, allowed)
                self.changes.extend(found)
                other_data = any(change.key.startswith(DATA) for change in found)
                progress = work.restore(self.checkpoint, other_data=other_data)
                self.hooks.started(_shown(directory))
            directory.write_recipe(to_yaml(work.recipe))
            directory.write_environment(self._facts(work, identity))
            desk = self._desk(work.recipe, identity)
            try:
                self._open(work, desk)
                loop = work.loop(desk, progress, self.stopper)
                loop.run()
                self.hooks.ended(directory.path)
            except Interrupted as stop:
                first = stop.__context__
                if isinstance(first, Stop) and not isinstance(first, EndedByCallback):
                    # A callback answered the checkpoint of another stop, whose reason counts.
                    raise first from None
                if not self.hooks.stopped:
                    raise
                desk.display.note(str(stop))
                self.hooks.ended(directory.path)
            finally:
                desk.display.close()
                desk.trackers.finish()
                for trouble in desk.trackers.troubles():
                    desk.ledger.event("tracker", trouble)
                desk.ledger.close()
        finally:
            work.close()
        newest = directory.checkpoint_steps()
        # A checkpoint that the disk refused leaves the model ahead of what a reader would load.
        return work.loaded if newest[-1:] == [loop.progress.step] else None

    def _facts(self, work: Work, identity: Mapping[str, str]) -> dict[str, Any]:
        given = self.given
        return {
            **environment(),
            "identity": identity,
            "source": work.loaded.source,
            "base_dir": _relative(work.recipe.base_dir, self.directory.path),
            "passed": {
                "rewards": work.passed_rewards,
                "data": given.rows is not None,
                "eval_data": given.eval_rows is not None,
            },
        }

    def _desk(self, recipe: Recipe, identity: dict[str, str]) -> Desk:
        found = self.checkpoint
        resume_step = None if found is None else found.step
        written = -1 if found is None else progress_of(found).written
        kept = recipe.run.samples
        ledger = Ledger(
            self.directory,
            resume_step=resume_step,
            written=written,
            seed=recipe.run.seed,
            samples_per_step=None if kept == "all" else kept,
        )
        trackers = open_trackers(
            recipe.run.trackers,
            self.directory,
            config={"recipe": to_yaml(recipe)},
            resume_step=None if found is None else written,
        )
        return Desk(self.directory, ledger, trackers, Display(int(recipe.run.steps or 0)), identity)

    def _open(self, work: Work, desk: Desk) -> None:
        """Say what the run is before its first step."""
        check = work.check
        opening = work.opening()
        for line in opening:
            desk.display.note(line)
        desk.ledger.event("opened", "; ".join(opening))
        if self.checkpoint is not None:
            desk.display.note(f"resuming after step {self.checkpoint.step}")
        desk.ledger.event(
            "layouts",
            f"layouts: {', '.join(check.allowed)}; ratio noise {check.ratio_noise:.2g}",
            {
                "allowed": list(check.allowed),
                "refused": dict(check.refused),
                "ratio_noise": check.ratio_noise,
            },
        )
        for change in self.changes:
            desk.display.note(f"changed since the run began: {change}")
            desk.ledger.event("changed", f"resumed with another recipe: {change}")
        for skipped in self.checkpoint.skipped if self.checkpoint is not None else ():
            text = f"checkpoint {skipped.name} is set aside: {skipped.reason}"
            desk.display.note(text)
            desk.ledger.event("checkpoint_skipped", text)


def _shown(directory: RunDirectory) -> int | None:
    """The last step of the ledger, before the rows after the checkpoint are cut."""
    steps = [int(row["step"]) for row in read_metrics(directory.path)]
    return max(steps, default=None)


def _relative(base_dir: Path | None, run: Path) -> str:
    """Where relative paths of the recipe start, seen from the run directory (it may be moved)."""
    return os.path.relpath(base_dir or Path(), run)
