"""Combinations of keys that cannot work, and aliases whose meaning depends on others.

Owns every check that looks at more than one key of a recipe.
Refuses to own single values (`schema.py`), rows (`methods/`) and what is built (`built.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from surefoot.errors import RecipeError
from surefoot.methods import Method, Overlong, Preference, ProportionalKL, warming_row
from surefoot.methods.checks import did_you_mean
from surefoot.recipe.aliases import COUNTS_OPTIMIZER_STEPS
from surefoot.recipe.recipe import Recipe, leaves
from surefoot.recipe.schema import Section


def check(recipe: Recipe, *, outside: Collection[str], elsewhere: Collection[str] = ()) -> None:
    """Raise RecipeError for the first combination that cannot work.

    `outside` names the sections (data, reward) that Python objects will supply; `elsewhere` are the
    keys of other stages, which run.allow_change may name too.
    """
    _sections(recipe, outside)
    _sampling(recipe)
    _length(recipe)
    _evaluation(recipe, outside)
    _permissions(recipe, elsewhere)
    if isinstance(recipe.method, Method):
        _online(recipe, recipe.method)
        _critic(recipe)
    else:
        _offline(recipe)


def _sections(recipe: Recipe, outside: Collection[str]) -> None:
    if not recipe.data and "data" not in outside:
        raise RecipeError("data: is required; as in data: {source: addition, max_operand: 50}")
    if recipe.data and "data" not in outside and all(s.role == "eval" for s in recipe.data):
        raise RecipeError("data: every source has role eval; one must be for training")
    online = isinstance(recipe.method, Method)
    if online and not recipe.reward and "reward" not in outside:
        raise RecipeError("reward: is required; as in reward: [{use: numeric}]")
    if recipe.reward and all(part.weight == 0 for part in recipe.reward):
        raise RecipeError("reward: every weight is 0, so every score is; give one a weight")
    for index, source in enumerate(recipe.data):
        if source.until_step is not None and source.until_step <= source.from_step:
            raise RecipeError(f"data.{index}.until_step: must be above from_step")
        if source.role == "eval" and source.eval_size:
            raise RecipeError(
                f"data.{index}.eval_size: every row of a source with role eval is for "
                "evaluation; leave eval_size out"
            )


def _sampling(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        raise RecipeError(
            f"rollout.min_new_tokens: {rollout.min_new_tokens} is above max_new_tokens "
            f"({rollout.max_new_tokens})"
        )
    cut = {
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_p": rollout.min_p > 0,
        # Before the minimum no end-of-sequence id can be drawn, which cuts the distribution too.
        "min_new_tokens": rollout.min_new_tokens > 0,
    }
    for name, active in cut.items():
        if active and "truncated_sampling" not in recipe.run.allow:
            raise RecipeError(
                f"rollout.{name}: cuts the distribution that is sampled, but the gradient is that "
                "of the whole one; leave it at its default, or add truncated_sampling to run.allow"
            )
    if any(not text for text in rollout.stop):
        raise RecipeError("rollout.stop: an empty string stops every completion; remove it")
    if recipe.model.template == "none" and recipe.model.system is not None:
        raise RecipeError("model.system: nothing reads it because model.template is none")


def _length(recipe: Recipe) -> None:
    run, optim = recipe.run, recipe.optim
    if run.steps is not None and optim.warmup_steps > run.steps:
        raise RecipeError(
            f"optim.warmup_steps: {optim.warmup_steps} is above run.steps ({run.steps}), so the "
            "learning rate would never be reached"
        )


def _evaluation(recipe: Recipe, outside: Collection[str]) -> None:
    given = any(source.role == "eval" or source.eval_size for source in recipe.data)
    if recipe.run.eval_every and not given and "data" not in outside:
        raise RecipeError(
            "run.eval_every: there is nothing to evaluate on; set eval_size in data, add a source "
            "with role: eval, or set run.eval_every to 0"
        )


def _permissions(recipe: Recipe, elsewhere: Collection[str]) -> None:
    known = {*leaves(recipe), *elsewhere}
    prefixes = {key.rsplit(".", n)[0] for key in known for n in range(key.count(".") + 1)}
    for name in recipe.run.allow_change:
        if name not in known and name not in prefixes:
            raise RecipeError(
                f"run.allow_change: there is no key {name!r}{did_you_mean(name, known)}"
            )


def _online(recipe: Recipe, row: Method) -> None:
    run, optim, rollout = recipe.run, recipe.optim, recipe.rollout
    whole = {f"data.{i}.max_tokens": source.max_tokens for i, source in enumerate(recipe.data)}
    offline = {"run.epochs": run.epochs, "optim.batch_size": optim.batch_size, **whole}
    for key, value in offline.items():
        if value is not None:
            raise RecipeError(
                f"{key}: only supervised and preference methods read it; for {row.name} set "
                "run.steps, rollout.prompts_per_step and data.max_prompt_tokens"
            )
    if run.steps is None:
        raise RecipeError("run.steps: is required for an online method; as in run: {steps: 100}")
    name = _given_critic(recipe)
    if name and row.critic.kind == "none":
        raise RecipeError(
            f"critic.{name}: {row.name} has no critic that would read it; leave it out, or "
            "take a row with one, such as ppo"
        )
    # Raises where the row of a warm-up cannot lead to this one.
    warming_row(row)
    if row.minibatches > rollout.prompts_per_step:
        raise RecipeError(
            f"method.minibatches: {row.minibatches} optimizer steps cannot share "
            f"rollout.prompts_per_step ({rollout.prompts_per_step}) prompts; groups are never "
            "split between them"
        )
    for index, term in enumerate(row.shaping):
        cache = term.cache if isinstance(term, Overlong) else None
        if cache is not None and cache > rollout.max_new_tokens:
            raise RecipeError(
                f"method.shaping.{index}.cache: {cache} is above rollout.max_new_tokens "
                f"({rollout.max_new_tokens}), so that every completion would be penalised"
            )
    _controller(recipe, row)
    _optimizer_steps(recipe, row)
    _judge(recipe, row)


def _given_critic(recipe: Recipe) -> str | None:
    return _given(recipe.critic)


def _given(section: Section) -> str | None:
    """The first key of a section that differs from its default."""
    fields = type(section).model_fields
    given = (name for name, field in fields.items() if getattr(section, name) != field.default)
    return next(given, None)


def _judge(recipe: Recipe, row: Method) -> None:
    """The section `judge` and the rewards that ask it need each other."""
    judge = recipe.judge
    parts = {i: part for i, part in enumerate(recipe.reward) if part.use == "judge"}
    if not parts:
        if name := _given(judge):
            raise RecipeError(
                f"judge.{name}: no reward asks a judge, so nothing would read it; add one, as in "
                "reward: [{use: judge, rubric: ...}], or leave it out"
            )
        return
    for name, value in (("base_url", judge.base_url), ("model", judge.model)):
        if value is None:
            raise RecipeError(
                f"judge.{name}: is required by reward.{min(parts)}; as in judge: {{base_url: "
                "http://127.0.0.1:8000/v1, model: NAME}"
            )
    if judge.budget_usd is not None:
        for name, price in (
            ("price_per_million_input", judge.price_per_million_input),
            ("price_per_million_output", judge.price_per_million_output),
        ):
            if price is None:
                raise RecipeError(
                    f"judge.{name}: judge.budget_usd cannot be kept without it; set it to US "
                    "dollars per million tokens, or set judge.budget_calls instead"
                )
    for index, part in parts.items():
        if part.options.get("mode") == "pairwise":
            _pairwise(recipe, row, index)


def _pairwise(recipe: Recipe, row: Method, index: int) -> None:
    """An answer that stands alone has nothing to be compared with."""
    why = f"reward.{index}.mode: pairwise compares the answers to one prompt"
    if row.group_size < 2:
        raise RecipeError(f"{why}, and method.group_size is {row.group_size}; set it to 2 or more")
    if row.greedy_sample:
        raise RecipeError(
            f"{why}, and the greedy one that {row.name} takes as its baseline stands alone; take "
            "mode rubric, or another method"
        )
    if recipe.run.eval_every and index == 0:
        raise RecipeError(
            f"{why}, and an evaluation has one for each prompt; it counts as correct where the "
            "first reward gives 1, so put another reward first, or set run.eval_every to 0"
        )


def _offline(recipe: Recipe) -> None:
    """Keys of a method that samples nothing. Sections of others may stand: stages share them."""
    row = recipe.method
    if name := _given_critic(recipe):
        raise RecipeError(
            f"critic.{name}: {row.name} has no critic that would read it; leave it out, or take a "
            "row with one, such as ppo"
        )
    if isinstance(row, Preference) and row.data == "labels" and recipe.optim.batch_size == 1:
        raise RecipeError(
            f"optim.batch_size: 1 leaves {row.name} no answer to another prompt, from which its "
            "zero point is measured; set it to 2 or more"
        )


def _critic(recipe: Recipe) -> None:
    """A head on the policy's own layers leaves nothing to load or to cut."""
    critic = recipe.critic
    for name, value in (("path", critic.path), ("layers", critic.layers), ("init", critic.init)):
        if critic.share_trunk and value is not None:
            raise RecipeError(
                f"critic.{name}: share_trunk puts the value head on the policy's own layers, so "
                "nothing would read it; leave it out, or set critic.share_trunk to false"
            )


def _controller(recipe: Recipe, row: Method) -> None:
    """A step may change the coefficient by at most 0.2 completions / horizon of itself."""
    controller = row.kl.controller
    if not isinstance(controller, ProportionalKL):
        return
    completions = recipe.rollout.prompts_per_step * row.group_size
    least = completions // 5 + 1
    if controller.horizon < least:
        raise RecipeError(
            f"method.kl.controller.horizon: {controller.horizon} completions are fewer than a "
            f"fifth of a step's {completions}, so one step could take the coefficient to 0 or "
            f"below; set it to {least} or more (10000 is usual)"
        )


def _optimizer_steps(recipe: Recipe, row: Method) -> None:
    if row.epochs * row.minibatches == 1:
        return
    for alias in COUNTS_OPTIMIZER_STEPS:
        key = next((k for k, origin in recipe.origins.items() if origin == f"alias {alias}"), None)
        if key is not None:
            raise RecipeError(
                f"{alias}: counts optimizer steps in TRL and {row.name} makes "
                f"{row.epochs * row.minibatches} of them per rollout step here; set {key}, which "
                "counts rollout steps"
            )
