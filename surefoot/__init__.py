"""surefoot: post-training of language models with reinforcement learning and preferences.

Owns the public names. They are loaded when first used, so that `import surefoot` stays light
and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.loops.callbacks import STOP, Callback
    from surefoot.loops.entry import train
    from surefoot.loops.runs import Run
    from surefoot.methods import Method
    from surefoot.recipe import Recipe
    from surefoot.records import Completion, Group, ProcessReward, Prompt, Score
    from surefoot.reward import reward_function

__version__ = "0.1.0"

_HOMES = {
    "train": "surefoot.loops.entry",
    "Run": "surefoot.loops.runs",
    "Callback": "surefoot.loops.callbacks",
    "STOP": "surefoot.loops.callbacks",
    "Method": "surefoot.methods",
    "reward_function": "surefoot.reward",
    "Recipe": "surefoot.recipe",
    "Completion": "surefoot.records",
    "Group": "surefoot.records",
    "ProcessReward": "surefoot.records",
    "Prompt": "surefoot.records",
    "Score": "surefoot.records",
}

__all__ = [
    "STOP",
    "Callback",
    "Completion",
    "Group",
    "Method",
    "ProcessReward",
    "Prompt",
    "Recipe",
    "Run",
    "Score",
    "__version__",
    "reward_function",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
