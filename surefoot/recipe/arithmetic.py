"""The batch arithmetic of a recipe, in prompts and in completions (DESIGN law 14).

Owns the sentences that are printed before training. Refuses to own the batches.
"""

from __future__ import annotations

from surefoot.methods import Informative, Method, min_group
from surefoot.recipe.recipe import Recipe


def batch_arithmetic(recipe: Recipe) -> tuple[str, ...]:
    """Lines that say what one step and the whole run consist of."""
    row = recipe.method
    if not isinstance(row, Method):
        return (f"{row.name}: no rollouts",)
    prompts, group = recipe.rollout.prompts_per_step, row.group_size
    completions = prompts * group
    lines = [
        f"step: {_n(prompts, 'prompt')} x {_n(group, 'completion')} = "
        f"{_n(completions, 'completion')} of at most {recipe.rollout.max_new_tokens:,} tokens"
    ]
    if row.greedy_sample:
        lines.append(f"and {_n(prompts, 'greedy completion')}, scored but not trained")
    if isinstance(row.keep, Informative):
        most = row.keep.max_rounds
        lines.append(
            f"sampling again for groups of equal scores: at most {_n(most, 'round')}, "
            f"{_n(prompts * most, 'prompt')}, {_n(completions * most, 'completion')} a step"
        )
    lines.append(_update(prompts, group, row))
    lines.append(f"a group needs {min_group(row)} of {group} valid scores")
    steps = recipe.run.steps
    if steps is not None:
        lines.append(
            f"run: {_n(steps, 'step')} = {_n(steps * prompts, 'prompt')}, "
            f"{_n(steps * completions, 'completion')}, "
            f"{_n(steps * row.epochs * row.minibatches, 'optimizer step')}"
        )
    return tuple(lines)


def _update(prompts: int, group: int, row: Method) -> str:
    total = row.epochs * row.minibatches
    whole, rest = divmod(prompts, row.minibatches)
    sizes = f"{_n(whole, 'prompt')} ({_n(whole * group, 'completion')})"
    if rest:
        sizes = (
            f"{whole:,} or {_n(whole + 1, 'prompt')} "
            f"({whole * group:,} or {_n((whole + 1) * group, 'completion')})"
        )
    return (
        f"update: {_n(row.epochs, 'epoch')} x {_n(row.minibatches, 'minibatch')} = "
        f"{_n(total, 'optimizer step')} of {sizes} each"
    )


def _n(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") and noun != "epoch" else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
