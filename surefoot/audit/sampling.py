"""Completions of the real model for a pilot, sampled as a run of the recipe would.

Owns what of a recipe a pilot reads, and the engine that it samples with.
Refuses to own what the completions say (`pilot.py`), and training: no weight moves here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data import build
from surefoot.recipe import Recipe, leaves
from surefoot.records import Group, Prompt

GROUP_BASELINES = frozenset({"group", "leave_one_out", "length_weighted"})
"""Baselines under which a group without spread teaches nothing (DESIGN law 3)."""
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a recipe the pilot and its findings read."""

    group_size: int
    baseline: str
    keep: str
    max_new_tokens: int

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        values = leaves(recipe)
        return cls(
            int(values["method.group_size"]),
            str(values["method.baseline.kind"]),
            str(values["method.keep.kind"]),
            recipe.rollout.max_new_tokens,
        )

    @property
    def samples(self) -> int:
        """Completions of a prompt in the pilot."""
        return max(self.group_size, SAMPLES)

    @property
    def relative(self) -> bool:
        return self.baseline in GROUP_BASELINES


def sample(recipe: Recipe, *, prompts: int, samples: int, rows: Any = None) -> list[Group]:
    """Load the recipe's model and sample the first prompts of its stream, as a run would."""
    # Here and not at the top: everything else of an audit runs without torch.
    from surefoot.models import load_model
    from surefoot.models.load import DTYPES
    from surefoot.rollout import LocalEngine, Sampling

    loaded = load_model(recipe)
    data = build(recipe, loaded.template, base_dir=recipe.base_dir, rows=rows)
    rollout = recipe.rollout
    engine = LocalEngine(
        loaded.model,
        loaded.template.tokenizer,
        settings=Sampling(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            min_new_tokens=rollout.min_new_tokens,
            stop=rollout.stop,
        ),
        stop_ids=loaded.stop_ids,
        dtype=DTYPES[rollout.dtype],
        rows=int(rollout.rows),
        seed=recipe.run.seed,
    )
    asked = first_rows(data.stream.take(min(prompts, len(data.stream)), step=1), prompts)
    return engine.sample(asked, samples, purpose="audit/pilot")


def first_rows(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """The first `most` different rows."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.id, prompt)
    return list(found.values())[:most]
