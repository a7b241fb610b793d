"""A supervised or preference run, from its recipe to a loop that is ready.

Owns the order of construction, the number of steps, and what a checkpoint of each task gives back.
Refuses to own the steps (`offline`), and runs over sampled completions (`work`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from surefoot.data import KINDS, Examples, build_examples
from surefoot.errors import RecipeError
from surefoot.learner.batch import Packing
from surefoot.learner.check import LayoutCheck, check_layouts
from surefoot.learner.critic import ValueModel, value_backbone
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.loops.assemble import Outside, resolve_budget
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.desk import Desk
from surefoot.loops.offline import OfflineLoop, Task
from surefoot.loops.preference import PreferenceTask
from surefoot.loops.process import deterministic
from surefoot.loops.reference import ReferenceScores, reference_scores
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, identity_of, load_weights, progress_of
from surefoot.loops.supervised import Comparison, Imitation
from surefoot.methods import Preference, Supervised
from surefoot.models import LoadedModel
from surefoot.models.load import DTYPES
from surefoot.models.lora import described
from surefoot.models.turns import ExampleTemplate
from surefoot.recipe import Recipe
from surefoot.run.checkpoint import Loaded

_KNOWN = 64
"""Examples whose answers a normalised reward model is measured on."""
_EVAL_BATCH = 32


class OfflineWork:
    """The parts of a run on given data."""

    def __init__(
        self,
        recipe: Recipe,
        given: Outside,
        loaded: LoadedModel,
        callbacks: Callbacks,
        *,
        interrupt: Callable[[], None],
    ) -> None:
        assert isinstance(recipe.method, Preference | Supervised)
        if given.rewards:
            raise RecipeError(
                f"rewards: {recipe.method.name} samples nothing, so no reward is asked; leave "
                "rewards= out"
            )
        deterministic()
        self.row = recipe.method
        self.loaded = loaded
        self.callbacks = callbacks
        self.interrupt = interrupt
        train_on = self.row.train_on if self.row.data == "demonstrations" else None  # type: ignore[union-attr]
        self.examples: Examples[Any] = build_examples(
            recipe,
            ExampleTemplate(loaded.template, stops=loaded.stop_ids),
            KINDS[self.row.data],
            train_on=train_on,
            base_dir=recipe.base_dir,
            rows=given.rows,
            eval_rows=given.eval_rows,
        )
        self.recipe = resolve_budget(_with_steps(recipe, len(self.examples.stream)), loaded)
        if self.recipe.run.eval_every and not self.examples.eval_rows:
            raise RecipeError(
                "run.eval_every: there is nothing to evaluate on; pass eval_data=, set "
                "data.eval_size, or set run.eval_every to 0"
            )
        self.scorer = Scorer(
            loaded.model,
            compute=DTYPES[recipe.model.compute],
            head_dtype=DTYPES[recipe.model.head_dtype],
            temperature=1.0,
        )
        self.check: LayoutCheck = check_layouts(self.scorer, seed=recipe.run.seed)
        self.task: Task = self._task()

    @property
    def passed_rewards(self) -> list[str]:
        return []

    def identity(self) -> dict[str, str]:
        """What a checkpoint must agree with to be resumed."""
        return {
            **identity_of(self.loaded),
            "data": self.examples.hash,
            "method": self.row.name,
        }

    def opening(self) -> list[str]:
        """What the run says of itself before the first step."""
        recipe = self.recipe
        count, batch = len(self.examples.stream), int(recipe.optim.batch_size or 0)
        steps = int(recipe.run.steps or 0)
        return [
            *recipe.notes,
            *self.examples.report.lines(),
            f"step: {batch} of {count:,} {self.row.data}; run: {steps:,} steps = "
            f"{steps * batch / count:.2f} epochs",
            f"weights {recipe.model.dtype}, training in {recipe.model.compute}, head in "
            f"{recipe.model.head_dtype}",
            *described(self.loaded.model),
        ]

    def restore(self, checkpoint: Loaded, *, other_data: bool) -> Progress:
        """Put a checkpoint back into the task and the stream (see `Stream.restore`)."""
        task = self.task
        if isinstance(task, Comparison):
            load_weights(task.model, checkpoint, "reward_model")
        else:
            load_weights(self.loaded.model, checkpoint, "policy")
        if "optimizer" in checkpoint.names:
            task.optimizer.restore(checkpoint.tensors("optimizer"))
        progress = progress_of(checkpoint)
        self.examples.stream.restore(progress.cursor, other_data=other_data)
        task.limit(progress.budget)
        return progress

    def loop(self, desk: Desk, progress: Progress, stopper: Stopper) -> OfflineLoop:
        return OfflineLoop(
            self.recipe, self.task, self.examples.stream, desk, progress, stopper, self.callbacks
        )

    def close(self) -> None:
        """Nothing runs beside an offline run."""

    def _task(self) -> Task:
        """The weights of the task are those that the model was loaded with: restore comes after."""
        recipe, row, held_out = self.recipe, self.row, self.examples.eval_rows
        packing = self._packing()
        steps = int(recipe.run.steps or 0)
        if isinstance(row, Preference):
            reference = self._reference(packing) if row.reference else None
            optimizer = Optimizer(self.loaded.model, recipe.optim, steps=steps)
            return PreferenceTask(row, self.scorer, optimizer, packing, held_out, reference)
        if row.loss == "nll":
            if row.packing and "packed" not in self.check.allowed:
                raise RecipeError(
                    f"method.packing: {self.loaded.source} cannot hold several documents in a row "
                    f"({self.check.refused['packed']}); set method.packing to false"
                )
            optimizer = Optimizer(self.loaded.model, recipe.optim, steps=steps)
            return Imitation(row, self.scorer, optimizer, packing, held_out)
        model = ValueModel(
            value_backbone(self.loaded.model, layers=None), compute=DTYPES[recipe.model.compute]
        )
        # A standard sequence classifier has no bias on its score, and a comparison reads none.
        model.head.bias.requires_grad_(False)
        optimizer = Optimizer(model, recipe.optim, steps=steps)
        known = next(self._batches(_KNOWN)) if row.normalize else []
        return Comparison(row, model, optimizer, packing, held_out, known)

    def _packing(self) -> Packing:
        budget = self.recipe.optim.tokens_per_microbatch
        assert isinstance(budget, int), "resolved before the task is made"
        return Packing(budget, self.check.allowed, self.scorer.shape)

    def _reference(self, packing: Packing) -> ReferenceScores:
        recipe = self.recipe
        held_out = self.examples.eval_rows
        batches: list[Sequence[Any]] = list(self._batches(int(recipe.optim.batch_size or 0)))
        batches += [
            held_out[start : start + _EVAL_BATCH] for start in range(0, len(held_out), _EVAL_BATCH)
        ]
        assert isinstance(self.row, Preference)
        return reference_scores(
            self.row,
            self.scorer,
            batches,
            packing,
            interrupt=self.interrupt,
            identity={
                "model": self.loaded.hash,
                "data": self.examples.hash,
                "compute": recipe.model.compute,
                "head": recipe.model.head_dtype,
                "seed": recipe.run.seed,
                "batch_size": recipe.optim.batch_size,
            },
        )

    def _batches(self, size: int) -> Iterator[Sequence[Any]]:
        """The batches of the first epoch, as training will take them; the stream stays at 0."""
        stream = self.examples.stream
        start = stream.cursor()
        taken = 0
        batches = []
        while taken < len(stream):
            batches.append(stream.take(size, step=1 + taken // size))
            taken += size
        stream.restore(start)
        # With several sources an epoch of the stream need not hold every row of each.
        seen = {example.id for batch in batches for example in batch}
        left = [example for example in stream.rows if example.id not in seen]
        batches += [left[at : at + size] for at in range(0, len(left), size)]
        yield from batches


def _with_steps(recipe: Recipe, examples: int) -> Recipe:
    """Resolve run.epochs into steps; one epoch where neither is given, the shorter of both."""
    given, batch = recipe.run.steps, int(recipe.optim.batch_size or 0)
    epochs = recipe.run.epochs
    if given is not None and epochs is None:
        return recipe
    steps = -(-examples * (epochs or 1) // batch)
    if given is not None and given <= steps:
        return recipe
    run = recipe.run.model_copy(update={"steps": steps})
    origins = {**recipe.origins, "run.steps": "auto"}
    return dataclasses.replace(recipe, run=run, origins=origins)
