"""Recipes of supervised and preference runs on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.tiny import write_rows

LETTERS = "abcdefghij"
FORMS: dict[str, list[dict[str, object]]] = {
    "demonstrations": [
        {"prompt": f"say {c}", "completion": c * (2 + i % 3), "id": c}
        for i, c in enumerate(LETTERS)
    ],
    "pairs": [
        {"prompt": f"say {c}", "chosen": c * (2 + i % 3), "rejected": "no" + c, "id": c}
        for i, c in enumerate(LETTERS)
    ],
    "labels": [
        {"prompt": f"say {c}", "completion": c if i % 2 else "no", "label": i % 2 == 1, "id": c}
        for i, c in enumerate(LETTERS)
    ],
    "rankings": [
        {"prompt": f"say {c}", "ranking": [c * 2, c + "x", "no" + c], "id": c} for c in LETTERS
    ],
}


def make_offline_recipe(
    folder: Path, model: Path, *, method: dict[str, Any], rows: str, **changes: Any
) -> Path:
    """Write a recipe and its data (ten rows, two of them held out); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", FORMS[rows])
    recipe: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"source": "rows.jsonl", "eval_size": 2},
        "method": method,
        "optim": {"learning_rate": 0.003, "batch_size": 3},
        "run": {
            "dir": str(folder / "run"),
            "steps": 9,
            "eval_every": 4,
            "checkpoint_every": 2,
            "trackers": [],
            "seed": 3,
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        recipe.setdefault(section, {})[name] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
