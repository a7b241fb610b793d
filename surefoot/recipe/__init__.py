"""What one run is: schema, YAML, overrides, origins, and what may change on resume.

Owns the key tree and its defaults (a row's fields belong to `methods/`).
Refuses to own what the values do, and everything that needs torch.
"""

from surefoot.recipe.aliases import ALIASES
from surefoot.recipe.arithmetic import batch_arithmetic
from surefoot.recipe.dump import to_yaml
from surefoot.recipe.load import load
from surefoot.recipe.recipe import Recipe, leaves, to_mapping
from surefoot.recipe.resume import Change, check_resume, difference
from surefoot.recipe.schema import (
    KEYS,
    SECTIONS,
    CriticModel,
    DataSource,
    Doctor,
    Judge,
    Lora,
    Model,
    Optim,
    RewardPart,
    Rollout,
    Run,
)

__all__ = [
    "ALIASES",
    "KEYS",
    "SECTIONS",
    "Change",
    "CriticModel",
    "DataSource",
    "Doctor",
    "Judge",
    "Lora",
    "Model",
    "Optim",
    "Recipe",
    "RewardPart",
    "Rollout",
    "Run",
    "batch_arithmetic",
    "check_resume",
    "difference",
    "leaves",
    "load",
    "to_mapping",
    "to_yaml",
]
