"""From a recipe to the working parts of a run.

Owns the order of construction: the grader first (it forks), then model, data, engine, learner;
and what comes as Python objects instead of by name (`Outside`).
Refuses to own any part's inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.data import Data, build
from surefoot.errors import DataError, RecipeError
from surefoot.learner import custom
from surefoot.learner.batch import Packing
from surefoot.learner.check import LayoutCheck, check_layouts
from surefoot.learner.optim import Optimizer
from surefoot.learner.reference import SharedReference
from surefoot.learner.scorer import Scorer
from surefoot.learner.update import Learner
from surefoot.loops.callbacks import Callbacks
from surefoot.loops.critics import make_critic, reads_source
from surefoot.loops.process import deterministic, total_memory
from surefoot.loops.spending import judge_setup
from surefoot.methods import Method, MethodWarmup, warming_row
from surefoot.methods.custom import bind
from surefoot.models import GivenModel, LoadedModel, load_model
from surefoot.models.load import DTYPES
from surefoot.models.lora import has_adapter
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
    """The recipe's, with the functions of its own loaded."""
    loaded: LoadedModel
    data: Data
    engine: Engine
    grader: Grader
    callbacks: Callbacks = field(default_factory=Callbacks)


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outside:
    """What comes as Python objects instead of by name in the recipe."""

    rewards: tuple[Callable[..., Any], ...] = ()
    rows: Rows | None = None
    eval_rows: Rows | None = None
    model: GivenModel | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        rewards = ("reward",) if self.rewards else ()
        return rewards + (("data",) if self.rows is not None else ())


def outside(
    rewards: Iterable[Callable[..., Any]] = (),
    data: Iterable[Mapping[str, Any]] | None = None,
    eval_data: Iterable[Mapping[str, Any]] | None = None,
    model: GivenModel | None = None,
) -> Outside:
    """What was passed to `train`, each iterable read once."""
    if callable(rewards) or isinstance(rewards, str):
        raise RecipeError("rewards: is one function; pass a list of them")
    if eval_data is not None and data is None:
        raise DataError("eval_data: needs data= beside it; name both in the recipe, or pass both")
    tested = None if eval_data is None else _rows(eval_data, "eval_data")
    return Outside(tuple(rewards), None if data is None else _rows(data, "data"), tested, model)


def _rows(given: Iterable[Mapping[str, Any]], name: str) -> Rows:
    if isinstance(given, Mapping):
        parts = ", ".join(f"{name}['{key}']" for key in list(given)[:3])
        raise DataError(f"{name}: is one mapping; pass rows, such as one of its parts ({parts})")
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise DataError(
            f"{name}: is a {type(given).__name__}; pass an iterable of rows, each a mapping of "
            "column names to values, or name a file in the recipe's data"
        )
    found = list(given)
    for index, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name}[{index}]: is a {type(row).__name__}, not a mapping of column names"
            )
    return [dict(row) for row in found]


def assemble(
    recipe: Recipe,
    given: Outside,
    *,
    interrupt: Callable[[], None],
    loaded: LoadedModel | None = None,
    kept: Path | None = None,
    run: Path | None = None,
) -> Parts:
    """Build the parts that sampling and scoring need; the learner is apart, evaluation has none.

    `loaded` is a model that is in memory already; `kept` is where the run keeps one that was
    passed from Python; `run` is the run directory in which a judge's cost is counted.
    """
    assert isinstance(recipe.method, Method)
    row = bind(recipe.method, base_dir=recipe.base_dir)
    custom.probe(row)
    grader = Grader(
        recipe.reward,
        base_dir=recipe.base_dir,
        functions=given.rewards,
        max_new_tokens=recipe.rollout.max_new_tokens,
        allow=recipe.run.allow,
        judge=judge_setup(recipe, run),
    )
    grader.interrupt = interrupt
    try:
        deterministic()
        if loaded is None:
            loaded = load_model(recipe, kept=kept)
        data = _data(recipe, loaded, given)
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
    return Parts(recipe, row, loaded, data, engine, grader)


def _data(recipe: Recipe, loaded: LoadedModel, given: Outside) -> Data:
    data = build(
        recipe,
        loaded.template,
        base_dir=recipe.base_dir,
        rows=given.rows,
        eval_rows=given.eval_rows,
    )
    if recipe.run.eval_every and not data.eval_prompts:
        raise RecipeError(
            "run.eval_every: there is nothing to evaluate on; pass eval_data=, set "
            "data.eval_size, or set run.eval_every to 0"
        )
    return data


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


def make_learner(parts: Parts, *, resumes: bool = False) -> tuple[Learner, LayoutCheck]:
    """Wrap the policy, check the layouts on it, and keep a reference if the row reads one.

    `resumes`: a checkpoint's weights follow.
    """
    recipe, row = parts.recipe, parts.row
    scorer = _scorer(parts, parts.loaded.model, recipe.model.compute)
    optimizer = Optimizer(scorer.model, recipe.optim, steps=int(recipe.run.steps or 0))
    check = check_layouts(scorer, seed=recipe.run.seed)
    first = warming_row(row)
    for each in filter(None, (first, row)):
        _lint_clip(recipe, each, check.ratio_noise)
    reference = None
    if keeps_reference(row) or (first is not None and keeps_reference(first)):
        reference = _reference(parts)
    critic = None
    later = isinstance(row.warmup, MethodWarmup)
    if row.critic.kind != "none" and not later:
        critic = make_critic(recipe, row, parts.loaded, scorer, resumes=resumes)
    elif later and reads_source(recipe):
        # Made again after the warm-up; what cannot be made is refused before it.
        make_critic(recipe, row, parts.loaded, scorer, resumes=resumes)
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
        critic=critic,
    )
    return learner, check


def _reference(parts: Parts) -> Scorer:
    """The policy as it is now: a frozen copy, or under an adapter its own module, switched."""
    section, model = parts.recipe.model, parts.loaded.model
    same = section.reference_dtype == section.dtype
    if same and has_adapter(model):
        return SharedReference(
            model,
            compute=DTYPES[section.compute],
            head_dtype=DTYPES[section.head_dtype],
            temperature=parts.recipe.rollout.temperature,
        )
    frozen = copy.deepcopy(model).to(DTYPES[section.reference_dtype])
    frozen.requires_grad_(False)
    frozen.eval()
    return _scorer(parts, frozen, section.compute if same else section.reference_dtype)


def keeps_reference(row: Method) -> bool:
    """A KL term reads the reference; with coefficient 0 it may still be measured."""
    return row.kl.coef != 0 or row.kl.measure_every > 0


def resolve_budget(recipe: Recipe, loaded: LoadedModel) -> Recipe:
    """Resolve `tokens_per_microbatch: auto` from the machine's total memory and the model.

    About a third of the memory goes to activations: per token and layer, 12 hidden-sized and 4
    feed-forward-sized numbers of 4 bytes.
    """
    if recipe.optim.tokens_per_microbatch != "auto":
        return recipe
    config = loaded.model.config.get_text_config()
    inner = config.to_dict().get("intermediate_size") or 4 * config.hidden_size
    per_token = config.num_hidden_layers * (12 * config.hidden_size + 4 * inner) * 4
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
