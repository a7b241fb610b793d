"""The doors: train, evaluate, export. What the command line and Python scripts call.

Owns how a run begins, resumes and ends. Refuses to own the steps between (`online`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import CheckpointError, RunDirectoryError
from surefoot.loops.assemble import Outside, Parts, assemble, make_learner, outside, resolve_budget
from surefoot.loops.evaluate import evaluate as look
from surefoot.loops.online import Desk, OnlineLoop
from surefoot.loops.process import tune_allocator
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, load_policy, restore
from surefoot.models import export_directory, load_model
from surefoot.recipe import Recipe, batch_arithmetic, check_resume, load, to_yaml
from surefoot.recipe.resume import Change
from surefoot.run.checkpoint import Loaded, load_latest, load_step
from surefoot.run.directory import RunDirectory, environment
from surefoot.run.display import Display, summary_table
from surefoot.run.ledger import Ledger
from surefoot.run.lock import RunLock
from surefoot.run.read import Evaluation, RunSummary, read_metrics, read_samples, summary
from surefoot.run.trackers import open_trackers

Source = Path | str | Mapping[str, Any] | Recipe


@dataclass(frozen=True)
class Run:
    """A finished run, read from its directory."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return read_samples(self.path)

    @property
    def summary(self) -> RunSummary:
        return summary(self.path)

    def table(self) -> str:
        """The closing table: accuracy before and after, and where the time went."""
        return summary_table(self.summary)


@dataclass(frozen=True)
class EvalResult:
    """An evaluation outside a run."""

    target: str
    evaluation: Evaluation

    def to_json(self) -> dict[str, Any]:
        seen = self.evaluation
        return {
            "target": self.target,
            "step": seen.step,
            **seen.metrics(),
            "accuracy_low": seen.low,
            "accuracy_high": seen.high,
        }

    def table(self) -> str:
        seen = self.evaluation
        eos = "-" if seen.eos_share is None else f"{seen.eos_share:.0%}"
        reward = "-" if seen.reward is None else f"{seen.reward:.2f}"
        return (
            f"{self.target}, step {seen.step}: accuracy {seen.accuracy:.2f} "
            f"[{seen.low:.2f}, {seen.high:.2f}] of {seen.n}, reward {reward}, ended with EOS {eos}"
        )


def train(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    rewards: Iterable[Callable[..., Any]] = (),
    data: Iterable[Mapping[str, Any]] | None = None,
) -> Run:
    """Train as a recipe says; an existing run directory resumes.

    `rewards` are functions added to the recipe's, `data` rows for the source `rows`. Raises the
    errors of `surefoot.errors`; state is saved before every orderly stop.
    """
    given = outside(rewards, data)
    recipe = load(source, overrides, outside=given.sections)
    directory = RunDirectory(str(recipe.run.dir)).create()
    with RunLock(directory), Stopper() as stopper:
        recipe, loaded, changes = _resumed(directory, recipe)
        if loaded is not None and loaded.step >= int(recipe.run.steps or 0):
            sys.stderr.write(f"surefoot: {directory.path} is complete at step {loaded.step}\n")
        else:
            tune_allocator()
            _train(directory, recipe, loaded, changes, given, stopper)
    return Run(directory.path)


def _resumed(directory: RunDirectory, recipe: Recipe) -> tuple[Recipe, Loaded | None, list[Change]]:
    """The recipe with what the run had resolved, the checkpoint to go on from, what changed."""
    if not directory.recipe.is_file():
        return recipe, None, []
    old = load(directory.recipe, base_dir=recipe.base_dir, outside=("data", "reward"))
    kept = old.optim.tokens_per_microbatch
    if recipe.optim.tokens_per_microbatch == "auto" and kept != "auto":
        recipe = recipe.with_auto({"optim.tokens_per_microbatch": kept})
    loaded = load_latest(directory) if directory.has_checkpoint() else None
    changes = check_resume(old, recipe) if loaded is not None else []
    return recipe, loaded, changes


def _train(
    directory: RunDirectory,
    recipe: Recipe,
    checkpoint: Loaded | None,
    changes: Sequence[Change],
    given: Outside,
    stopper: Stopper,
) -> None:
    parts = assemble(recipe, given, interrupt=stopper.check)
    try:
        recipe = parts.recipe = resolve_budget(recipe, parts.loaded)
        learner, check = make_learner(parts)
        identity = _identity(parts)
        progress = Progress()
        if checkpoint is not None:
            checkpoint.check_identity(identity)
            progress = restore(checkpoint, learner, parts.data.stream)
            learner.limit(progress.budget)
        directory.write_recipe(to_yaml(recipe))
        facts = {
            **environment(),
            "identity": identity,
            "source": parts.loaded.source,
            "base_dir": _relative(recipe.base_dir, directory.path),
        }
        directory.write_environment(facts)
        resume_step = None if checkpoint is None else checkpoint.step
        ledger = Ledger(directory, resume_step=resume_step, seed=recipe.run.seed)
        trackers = open_trackers(
            recipe.run.trackers,
            directory,
            config={"recipe": to_yaml(recipe)},
            resume_step=resume_step,
        )
        display = Display(int(recipe.run.steps or 0))
        desk = Desk(directory, ledger, trackers, display, identity)
        for line in _opening(parts, checkpoint):
            display.note(line)
        ledger.event(
            "layouts",
            f"layouts: {', '.join(check.allowed)}; ratio noise {check.ratio_noise:.2g}",
            {
                "allowed": list(check.allowed),
                "refused": dict(check.refused),
                "ratio_noise": check.ratio_noise,
            },
        )
        for change in changes:
            display.note(f"changed since the run began: {change}")
            ledger.event("changed", f"resumed with another recipe: {change}")
        for skipped in checkpoint.skipped if checkpoint is not None else ():
            text = f"checkpoint {skipped.name} is set aside: {skipped.reason}"
            display.note(text)
            ledger.event("checkpoint_skipped", text)
        try:
            OnlineLoop(parts, learner, desk, progress, stopper).run()
        finally:
            display.close()
            trackers.finish()
            ledger.close()
    finally:
        parts.grader.close()


def _relative(base_dir: Path | None, run: Path) -> str:
    """Where relative paths of the recipe start, seen from the run directory (it may be moved)."""
    return os.path.relpath(base_dir or Path(), run)


def _base_dir(directory: RunDirectory) -> Path:
    try:
        facts = json.loads(directory.environment.read_text(encoding="utf-8"))
        return directory.path / str(facts["base_dir"])
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{directory.environment}: cannot be read ({error}); this is no run directory, or it "
            "is damaged"
        ) from error


def _identity(parts: Parts) -> dict[str, str]:
    return {
        "model": parts.loaded.hash,
        "template": parts.loaded.template.identity,
        "data": parts.data.hash,
        "method": parts.row.name,
    }


def _opening(parts: Parts, checkpoint: Loaded | None) -> list[str]:
    """What a run says of itself before the first step."""
    recipe = parts.recipe
    lines = list(recipe.notes)
    lines.extend(parts.data.report.lines())
    lines.extend(batch_arithmetic(recipe))
    lines.append(
        f"weights {recipe.model.dtype}, training in {recipe.model.compute}, sampling in "
        f"{recipe.rollout.dtype}, head in {recipe.model.head_dtype}"
    )
    if checkpoint is not None:
        lines.append(f"resuming after step {checkpoint.step}")
    return lines


def evaluate(
    target: str, overrides: Sequence[str] = (), *, checkpoint: int | None = None
) -> EvalResult:
    """Evaluate a run's checkpoint (default the newest), or a recipe's untrained model."""
    place = Path(target)
    loaded: Loaded | None = None
    if place.is_dir():
        directory = _existing(place)
        loaded = _checkpoint(directory, checkpoint)
        recipe = load(directory.recipe, overrides, base_dir=_base_dir(directory))
    else:
        recipe = load(target, overrides)
    parts = assemble(recipe, Outside(), interrupt=lambda: None)
    try:
        if loaded is not None:
            load_policy(parts.loaded.model, loaded)
        step = 0 if loaded is None else loaded.step
        if not parts.data.eval_prompts:
            raise RunDirectoryError(
                f"{target}: the recipe names no rows for evaluation; set data.eval_size"
            )
        parts.engine.load(parts.loaded.model, version=step)
        seen = look(parts.engine, parts.grader, parts.data.eval_prompts, step=step)
    finally:
        parts.grader.close()
    return EvalResult(target, seen.evaluation)


def export(run: Path | str, dest: Path | str, checkpoint: int | None = None) -> Path:
    """Write a run's policy as a plain Hugging Face directory: weights, tokenizer, template."""
    directory = _existing(Path(run))
    loaded = _checkpoint(directory, checkpoint)
    recipe = load(directory.recipe, base_dir=_base_dir(directory))
    model = load_model(recipe)
    return export_directory(model, loaded.tensors("policy"), Path(dest))


def _existing(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    if not directory.recipe.is_file():
        raise RunDirectoryError(f"{path} is no run directory: it holds no recipe.yaml")
    return directory


def _checkpoint(directory: RunDirectory, step: int | None) -> Loaded:
    if step is not None:
        return load_step(directory, step)
    loaded = load_latest(directory, rename_damaged=False)
    if loaded is None:
        raise CheckpointError(f"{directory.path} holds no checkpoint yet")
    return loaded
