"""A run's parts, ready to train: what the door asks of an online and of an offline run alike.

Owns the choice between the two, and the online side of it.
Refuses to own the door itself (`entry`), the offline side (`offline_work`), and the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from surefoot.learner.check import LayoutCheck
from surefoot.loops.assemble import Outside, assemble, make_learner, resolve_budget
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.critics import critic_maker
from surefoot.loops.desk import Desk
from surefoot.loops.offline_work import OfflineWork
from surefoot.loops.online import OnlineLoop
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress, identity_of, restore
from surefoot.methods import Method
from surefoot.methods.custom import identities
from surefoot.models import LoadedModel, load_model
from surefoot.models.lora import described
from surefoot.recipe import Recipe, batch_arithmetic
from surefoot.run.checkpoint import Loaded


class Loop(Protocol):
    """The steps of a run."""

    @property
    def progress(self) -> Progress: ...
    def run(self) -> None: ...


class Work(Protocol):
    """Everything of a run but where it writes."""

    @property
    def recipe(self) -> Recipe:
        """With every `auto` resolved."""
        ...

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def check(self) -> LayoutCheck: ...

    @property
    def passed_rewards(self) -> list[str]:
        """Names of the rewards that came as Python functions."""
        ...

    def identity(self) -> dict[str, str]: ...
    def opening(self) -> list[str]: ...
    def restore(self, checkpoint: Loaded, *, other_data: bool) -> Progress: ...
    def loop(self, desk: Desk, progress: Progress, stopper: Stopper) -> Loop: ...
    def close(self) -> None: ...


def make_work(
    recipe: Recipe,
    given: Outside,
    hooks: Callbacks,
    *,
    interrupt: Callable[[], None],
    loaded: LoadedModel | None,
    kept: Path,
    resumes: bool,
) -> Work:
    """Build the parts of a run; `resumes`: a checkpoint's weights follow."""
    if isinstance(recipe.method, Method):
        return OnlineWork(
            recipe, given, hooks, interrupt=interrupt, loaded=loaded, kept=kept, resumes=resumes
        )
    model = load_model(recipe, kept=kept) if loaded is None else loaded
    return OfflineWork(recipe, given, model, hooks, interrupt=interrupt)


class OnlineWork:
    """The parts of a run over sampled completions."""

    def __init__(
        self,
        recipe: Recipe,
        given: Outside,
        hooks: Callbacks,
        *,
        interrupt: Callable[[], None],
        loaded: LoadedModel | None,
        kept: Path,
        resumes: bool,
    ) -> None:
        parts = assemble(
            recipe, given, interrupt=interrupt, loaded=loaded, kept=kept, run=kept.parent
        )
        self.parts = parts
        parts.callbacks = hooks
        try:
            parts.recipe = resolve_budget(recipe, parts.loaded)
            self.learner, self.check = make_learner(parts, resumes=resumes)
        except BaseException:
            parts.grader.close()
            raise

    @property
    def recipe(self) -> Recipe:
        return self.parts.recipe

    @property
    def loaded(self) -> LoadedModel:
        return self.parts.loaded

    @property
    def passed_rewards(self) -> list[str]:
        """The grader has them after the recipe's."""
        parts = self.parts
        return [reward.name for reward in parts.grader.rewards[len(parts.recipe.reward) :]]

    def identity(self) -> dict[str, str]:
        """What a checkpoint must agree with to be resumed."""
        parts = self.parts
        return {
            **identity_of(parts.loaded),
            "data": parts.data.hash,
            "method": parts.row.name,
            "passed rewards": ", ".join(self.passed_rewards) or "none",
            **identities(parts.row),
        }

    def opening(self) -> list[str]:
        """What the run says of itself before the first step."""
        recipe = self.recipe
        return [
            *recipe.notes,
            *self.parts.data.report.lines(),
            *batch_arithmetic(recipe),
            f"weights {recipe.model.dtype}, training in {recipe.model.compute}, sampling in "
            f"{recipe.rollout.dtype}, head in {recipe.model.head_dtype}",
            *described(self.parts.loaded.model),
            *(reward.note for reward in self.parts.grader.rewards if reward.note),
        ]

    def restore(self, checkpoint: Loaded, *, other_data: bool) -> Progress:
        """Put a checkpoint back into the learner and the stream (see `Stream.restore`)."""
        parts = self.parts
        progress = restore(
            checkpoint,
            self.learner,
            parts.data.stream,
            other_data=other_data,
            make_critic=critic_maker(parts.recipe, parts.row, parts.loaded, self.learner.scorer),
        )
        self.learner.limit(progress.budget)
        return progress

    def loop(self, desk: Desk, progress: Progress, stopper: Stopper) -> OnlineLoop:
        return OnlineLoop(self.parts, self.learner, desk, progress, stopper)

    def close(self) -> None:
        self.parts.grader.close()
