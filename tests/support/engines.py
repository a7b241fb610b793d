"""A local engine on a tiny model, and prompts for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from support.tiny import make_model, make_tokenizer
from surefoot.records import Group, Prompt
from surefoot.rollout import LocalEngine, Sampling

TOKENIZER = make_tokenizer()


def make_prompt(text: str, position: int) -> Prompt:
    ids = tuple(TOKENIZER(text)["input_ids"])
    return Prompt(id=text, position=position, ids=ids, text=text)


PROMPTS = [make_prompt(text, i) for i, text in enumerate(["abc", "hello", "xyz", "a"])]


def make_engine(
    model: PreTrainedModel | None = None,
    *,
    rows: int = 64,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (0, 2),
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> LocalEngine:
    sampling = Sampling(**{"temperature": 1.0, "max_new_tokens": 12, **settings})
    return LocalEngine(
        make_model() if model is None else model,
        TOKENIZER,
        settings=sampling,
        stop_ids=stop_ids,
        dtype=dtype,
        rows=rows,
        seed=seed,
    )


def ids_of(groups: list[Group]) -> list[tuple[int, ...]]:
    return [c.ids for group in groups for c in group.completions]
