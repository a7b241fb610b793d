"""From a recipe to the working parts of a run.

Owns the order of construction: the grader first (it forks), then model, data, engine, learner.
Refuses to own any part's inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data import Data, build
from surefoot.errors import RecipeError
from surefoot.learner.batch import Packing
from surefoot.learner.check import LayoutCheck, check_layouts
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.learner.update import Learner
from surefoot.loops.process import deterministic, total_memory
from surefoot.methods import Method
from surefoot.models import LoadedModel, load_model
from surefoot.models.load import DTYPES
from surefoot.recipe import Recipe
from surefoot.reward import Grader
from surefoot.rollout import Engine, LocalEngine, Sampling

_MEMORY_SHARE = 0.35
_LEAST_BUDGET, _MOST_BUDGET = 256, 16384


@dataclass
class Parts:
    """Everything a step calls."""

    recipe: Recipe
    row: Method
    loaded: LoadedModel
    data: Data
    engine: Engine
    grader: Grader


@dataclass(frozen=True)
class Outside:
    """What comes as Python objects instead of by name in the recipe."""

    rewards: tuple[Callable[..., Any], ...] = ()
    rows: Sequence[Mapping[str, Any]] | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        rewards = ("reward",) if self.rewards else ()
        return rewards + (("data",) if self.rows is not None else ())


def outside(
    rewards: Iterable[Callable[..., Any]], rows: Iterable[Mapping[str, Any]] | None
) -> Outside:
    return Outside(tuple(rewards), None if rows is None else [dict(row) for row in rows])


def assemble(recipe: Recipe, given: Outside, *, interrupt: Callable[[], None]) -> Parts:
    """Build the parts that sampling and scoring need; the learner is apart, evaluation has none."""
    assert isinstance(recipe.method, Method)
    grader = Grader(recipe.reward, base_dir=recipe.base_dir, functions=given.rewards)
    try:
        deterministic()
        loaded = load_model(recipe)
        data = build(recipe, loaded.template, base_dir=recipe.base_dir, rows=given.rows)
        engine = LocalEngine(
            loaded.model,
            loaded.template.tokenizer,
            settings=sampling(recipe),
            stop_ids=loaded.stop_ids,
            dtype=DTYPES[recipe.rollout.dtype],
            rows=int(recipe.rollout.rows),
            seed=recipe.run.seed,
            interrupt=interrupt,
        )
    except BaseException:
        grader.close()
        raise
    return Parts(recipe, recipe.method, loaded, data, engine, grader)


def sampling(recipe: Recipe) -> Sampling:
    """The engine's settings: only what the recipe says, never a model's own defaults (law 8)."""
    rollout = recipe.rollout
    return Sampling(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        min_new_tokens=rollout.min_new_tokens,
        stop=rollout.stop,
    )


def make_learner(parts: Parts) -> tuple[Learner, LayoutCheck]:
    """Wrap the policy, check the layouts on it, and keep a reference if the row reads one."""
    recipe, row = parts.recipe, parts.row
    scorer = _scorer(parts, parts.loaded.model, recipe.model.compute)
    optimizer = Optimizer(scorer.model, recipe.optim, steps=int(recipe.run.steps or 0))
    check = check_layouts(scorer, seed=recipe.run.seed)
    _lint_clip(recipe, row, check.ratio_noise)
    reference = None
    if keeps_reference(row):
        frozen = copy.deepcopy(parts.loaded.model).to(DTYPES[recipe.model.reference_dtype])
        frozen.requires_grad_(False)
        frozen.eval()
        same = recipe.model.reference_dtype == recipe.model.dtype
        compute = recipe.model.compute if same else recipe.model.reference_dtype
        reference = _scorer(parts, frozen, compute)
    length = row.reduce.length if row.reduce.kind == "constant" else None
    budget = recipe.optim.tokens_per_microbatch
    assert isinstance(budget, int), "resolved before the learner is made"
    learner = Learner(
        scorer,
        optimizer,
        row,
        reference=reference,
        packing=Packing(budget, check.allowed, scorer.shape),
        constant=float(length or recipe.rollout.max_new_tokens),
        seed=recipe.run.seed,
    )
    return learner, check


def keeps_reference(row: Method) -> bool:
    """A KL term reads the reference; with coefficient 0 it may still be measured."""
    return row.kl.place != "none" and (row.kl.coef != 0 or row.kl.measure_every > 0)


def resolve_budget(recipe: Recipe, loaded: LoadedModel) -> Recipe:
    """Resolve `tokens_per_microbatch: auto` from the machine's total memory and the model.

    About a third of the memory goes to activations: per token and layer, 20 hidden-sized and 6
    feed-forward-sized numbers of 4 bytes.
    """
    if recipe.optim.tokens_per_microbatch != "auto":
        return recipe
    config = loaded.model.config.get_text_config()
    inner = config.to_dict().get("intermediate_size") or 4 * config.hidden_size
    per_token = config.num_hidden_layers * (20 * config.hidden_size + 6 * inner) * 4
    budget = int(_MEMORY_SHARE * total_memory() / per_token)
    budget = min(max(budget, _LEAST_BUDGET), _MOST_BUDGET)
    return recipe.with_auto({"optim.tokens_per_microbatch": budget})


def _scorer(parts: Parts, model: Any, compute: str) -> Scorer:
    return Scorer(
        model,
        compute=DTYPES[compute],
        head_dtype=DTYPES[parts.recipe.model.head_dtype],
        temperature=parts.recipe.rollout.temperature,
    )


def _lint_clip(recipe: Recipe, row: Method, noise: float) -> None:
    """A clip range below the noise of equal weights clips at random (DESIGN section 5)."""
    if row.gate.kind != "clip" or row.epochs * row.minibatches == 1:
        return
    narrow = min(row.gate.low, row.gate.high)
    if narrow < noise and "clip_below_noise" not in recipe.run.allow:
        raise RecipeError(
            f"method.gate: the clip range {narrow:g} is below {noise:.2g}, the rms difference of "
            f"log-probabilities between two layouts of the same tokens at equal weights in "
            f"{recipe.model.compute}; set model.compute to float32, widen the range, or add "
            "clip_below_noise to run.allow"
        )
