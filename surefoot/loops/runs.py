"""A run as a Python object: what its directory holds, its policy, and a new look at it.

Owns reading a run back, from its newest checkpoint or a named one: policy, evaluation, export.
Refuses to own training (`entry`) and the layout of the directory (`run/`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.errors import CheckpointError, RecipeError, RunDirectoryError
from surefoot.loops.assemble import Outside, Parts, assemble, outside
from surefoot.loops.evaluate import evaluate as look
from surefoot.loops.export import export_checkpoint
from surefoot.loops.resuming import check_identity
from surefoot.loops.state import load_policy, needed_of
from surefoot.methods import Method
from surefoot.models import LoadedModel, load_model
from surefoot.recipe import Recipe, load
from surefoot.recipe.references import grounded
from surefoot.run.checkpoint import Loaded, load_latest, load_step
from surefoot.run.directory import RunDirectory
from surefoot.run.display import summary_table
from surefoot.run.read import (
    Evaluation,
    RunSummary,
    read_environment,
    read_metrics,
    read_samples,
    summary,
)


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


class Run:
    """A run that ended or stopped: files are read when asked for, the policy is loaded once."""

    def __init__(
        self, path: Path, *, given: Outside | None = None, loaded: LoadedModel | None = None
    ) -> None:
        self.path = path
        self._given = Outside() if given is None else given
        self._loaded = loaded

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        rewards: Iterable[Callable[..., Any]] = (),
        data: Iterable[Mapping[str, Any]] | None = None,
        eval_data: Iterable[Mapping[str, Any]] | None = None,
    ) -> Self:
        """The run in a directory.

        `evaluate` needs again what `train` was passed as Python objects: `rewards`, `data`.
        """
        directory = existing(Path(path))
        return cls(directory.path, given=outside(rewards, data, eval_data))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a step."""
        return read_metrics(self.path)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The completions that were kept."""
        return read_samples(self.path)

    @property
    def summary(self) -> RunSummary:
        """Accuracy before and after, and totals."""
        return summary(self.path)

    def table(self) -> str:
        """The closing table: accuracy before and after, and where the time went."""
        return summary_table(self.summary)

    @property
    def policy(self) -> PreTrainedModel:
        """The trained model: the weights of the newest checkpoint, bit for bit."""
        return self._model().model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, with its chat template."""
        return self._model().template.tokenizer

    def evaluate(self) -> EvalResult:
        """Answer the held-out prompts with the policy, greedily, and score them."""
        directory = existing(self.path)
        recipe = _answering(saved_recipe(directory, given=self._given), str(self.path))
        found = checkpoint_of(directory, None)
        parts = assemble(recipe, self._given, interrupt=_never, loaded=self._model())
        return EvalResult(str(self.path), _looked(parts, found.step, str(self.path)))

    def export(self, dest: Path | str, *, merge: bool = False) -> Path:
        """Write the policy as a Hugging Face directory; returns it.

        Under model.lora that is an adapter, or with `merge` a plain model.
        """
        return export(self.path, dest, merge=merge)

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            directory = existing(self.path)
            checkpoint = checkpoint_of(directory, None)
            recipe = saved_recipe(directory, given=self._given, reads_only_model=True)
            loaded = load_model(recipe, kept=directory.reference)
            check_identity(checkpoint, needed_of(loaded))
            load_policy(loaded.model, checkpoint)
            self._loaded = loaded
        return self._loaded


def evaluate(
    target: str, overrides: Sequence[str] = (), *, checkpoint: int | None = None
) -> EvalResult:
    """Evaluate a run's checkpoint (default the newest), or a recipe's untrained model."""
    place = RunDirectory(target).path
    if not place.is_dir():
        recipe = _answering(load(target, overrides), target)
        parts = assemble(recipe, Outside(), interrupt=_never)
        return EvalResult(target, _looked(parts, 0, target))
    directory = existing(place)
    if directory.path != place:
        target = str(directory.path)
    found = checkpoint_of(directory, checkpoint)
    recipe = _answering(saved_recipe(directory, overrides), target)
    parts = assemble(recipe, Outside(), interrupt=_never, kept=directory.reference)
    return EvalResult(target, _looked(parts, found.step, target, found))


def export(
    run: Path | str, dest: Path | str, checkpoint: int | None = None, *, merge: bool = False
) -> Path:
    """Write what a run trained as a plain Hugging Face directory: weights, tokenizer, template.

    A reward model becomes a sequence classifier, everything else a causal language model; or under
    model.lora, without `merge`, an adapter. Plain transformers must say what the run's model says.
    """
    directory = existing(Path(run))
    found = checkpoint_of(directory, checkpoint)
    recipe = saved_recipe(directory, reads_only_model=True)
    return export_checkpoint(directory, found, recipe, Path(dest), merge=merge)


def export_whole(run: Path | str, dest: Path | str, checkpoint: int) -> Path:
    """Likewise, an adapter always merged: what a later stage starts from."""
    recipe = saved_recipe(existing(Path(run)), reads_only_model=True)
    return export(run, dest, checkpoint, merge=recipe.model.lora is not None)


def _answering(recipe: Recipe, target: str) -> Recipe:
    """`recipe`, if its method samples answers that can be scored."""
    if not isinstance(recipe.method, Method):
        raise RecipeError(
            f"{target}: {recipe.method.name} learns from given answers, and only training looks at "
            "its held-out rows: set run.eval_every, and read eval/ in metrics.jsonl. To score what "
            "its model answers, export it, and name it as model.path in a recipe of a method that "
            "samples, such as rloo"
        )
    return recipe


def _looked(parts: Parts, step: int, target: str, found: Loaded | None = None) -> Evaluation:
    """Evaluate with the weights in memory, or with those of the checkpoint `found`."""
    try:
        if found is not None:
            check_identity(found, needed_of(parts.loaded))
            load_policy(parts.loaded.model, found)
        if not parts.data.eval_prompts:
            raise RunDirectoryError(
                f"{target}: the recipe names no rows for evaluation; set data.eval_size"
            )
        parts.engine.load(parts.loaded.model, version=step)
        return look(parts.engine, parts.grader, parts.data.eval_prompts, step=step).evaluation
    finally:
        parts.grader.close()


def _never() -> None:
    """What interrupts an evaluation."""


def existing(path: Path) -> RunDirectory:
    """The run directory at `path`, of a chain that of its last complete stage.

    RunDirectoryError if there is none.
    """
    directory = RunDirectory(path)
    if directory.is_chain:
        return _last_complete(directory)
    if not directory.recipe.is_file():
        raise RunDirectoryError(f"{path} is no run directory: it holds no recipe.yaml")
    return directory


def _last_complete(chain: RunDirectory) -> RunDirectory:
    begun = [RunDirectory(path) for path in chain.stage_paths()]
    complete = [stage for stage in begun if stage.model.is_dir()]
    if not complete:
        names = ", ".join(str(stage.path) for stage in begun) or "none was begun"
        raise RunDirectoryError(
            f"{chain.path} is a chain of stages, and none is complete; name one of them ({names})"
        )
    sys.stderr.write(
        f"surefoot: {chain.path} is a chain of stages; this is its last complete one, "
        f"{complete[-1].path.name}\n"
    )
    return complete[-1]


def saved_recipe(
    directory: RunDirectory,
    overrides: Sequence[str] = (),
    *,
    given: Outside | None = None,
    reads_only_model: bool = False,
) -> Recipe:
    """The recipe of a run; what Python objects supplied must be given again, or not be read."""
    facts = _facts(directory)
    given = Outside() if given is None else given
    if not reads_only_model:
        _check_given(directory, facts, given)
    recipe = load(
        directory.recipe,
        overrides,
        base_dir=directory.path / facts["base_dir"],
        outside=("data", "reward") if reads_only_model else given.sections,
    )
    return grounded(recipe, directory.path)


def _facts(directory: RunDirectory) -> dict[str, Any]:
    facts = read_environment(directory.path)
    passed = facts.get("passed", {})
    whole = isinstance(facts.get("base_dir"), str) and isinstance(passed, dict)
    names = passed.get("rewards", []) if whole else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunDirectoryError(
            f"{directory.environment}: is damaged: `base_dir` and `passed` do not say what a run "
            "writes there; restore a copy"
        )
    return {"base_dir": facts["base_dir"], "passed": passed}


def _check_given(directory: RunDirectory, facts: Mapping[str, Any], given: Outside) -> None:
    passed = facts["passed"]
    wanted = list(passed.get("rewards", []))
    if len(wanted) != len(given.rewards):
        raise RunDirectoryError(
            f"{directory.path} was trained with rewards passed from Python "
            f"({', '.join(wanted) or 'none'}), and {len(given.rewards)} were passed now; open it "
            "with surefoot.Run.open(path, rewards=[...])"
        )
    for key, rows in (("data", given.rows), ("eval_data", given.eval_rows)):
        if passed.get(key, False) and rows is None:
            raise RunDirectoryError(
                f"{directory.path} was trained on rows passed from Python; open it with "
                f"surefoot.Run.open(path, ..., {key}=rows)"
            )


def checkpoint_of(directory: RunDirectory, step: int | None) -> Loaded:
    """The checkpoint of a step, default the newest whole one; names on disk stay as they are."""
    if step is not None:
        return load_step(directory, step)
    loaded = load_latest(directory, rename_damaged=False)
    if loaded is None:
        raise CheckpointError(f"{directory.path} holds no checkpoint yet")
    return loaded
