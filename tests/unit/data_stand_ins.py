"""Stand-ins for the data tests: a recipe with just the keys that the room reads, and an encoder.

The encoder's ids are countable by hand: one id per word, plus three for a template (start, role,
generation prompt) per message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spec:
    source: str
    split: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    weight: float = 1.0
    from_step: int = 0
    until_step: int | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    eval_size: int = 0
    keep_solve_rate: tuple[float, float] | None = None
    role: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelPart:
    system: str | None = None
    template: str = "auto"


@dataclass(frozen=True)
class RolloutPart:
    max_new_tokens: int = 16


@dataclass(frozen=True)
class RunPart:
    seed: int = 0
    steps: int | None = None


@dataclass(frozen=True)
class Recipe:
    data: tuple[Spec, ...]
    model: ModelPart = ModelPart()
    rollout: RolloutPart = RolloutPart()
    run: RunPart = RunPart()


@dataclass(frozen=True)
class Words:
    """One id per word; with a template, three more per message."""

    max_context: int = 1000
    has_template: bool = True
    control: str = "<|end|>"

    def encode(self, messages: Sequence[Mapping[str, str]] | str) -> tuple[int, ...]:
        if isinstance(messages, str):
            assert not self.has_template or messages
            return tuple(_word_id(word) for word in messages.split())
        assert self.has_template
        ids: list[int] = []
        for message in messages:
            ids += [1, _word_id(message["role"]), 2]
            ids += [_word_id(word) for word in message["content"].split()]
        return tuple(ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"[{m['role']}] {m['content']} " for m in messages)

    def literal(self, text: str) -> bool:
        return self.control not in text


def _word_id(word: str) -> int:
    return 10 + sum(map(ord, word)) % 9000


def recipe(
    *specs: Spec,
    seed: int = 0,
    system: str | None = None,
    new: int = 16,
    steps: int | None = None,
) -> Recipe:
    return Recipe(specs, ModelPart(system), RolloutPart(new), RunPart(seed, steps))


def write_lines(path: Path, *rows: Any) -> str:
    """JSON lines; a str row is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
