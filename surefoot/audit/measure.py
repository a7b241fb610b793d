"""What measures rows in tokens: a model's tokenizer and template, without its weights.

Owns the loading of both. Refuses to own which rows are too long.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoTokenizer

from surefoot.audit.reading import Lengths
from surefoot.errors import RecipeError
from surefoot.models.load import context_of, resolve_directory, why_not
from surefoot.models.template import PromptTemplate
from surefoot.models.turns import ExampleTemplate

_KEY = "--model"


def lengths_of(model: str, *, max_tokens: int | None) -> Lengths:
    """Rows by the tokenizer of `model`, up to `max_tokens` or the model's context.

    A tokenizer without a chat template reads prompts as plain text. ModelError for a model that
    cannot be read, RecipeError for a limit over the context.
    """
    folder = resolve_directory(model, key=_KEY)
    try:
        context = context_of(AutoConfig.from_pretrained(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the libraries raise whatever their readers do
        raise RecipeError(why_not(model, error, key=_KEY)) from error
    if max_tokens is not None and max_tokens > context:
        raise RecipeError(
            f"--max-tokens is {max_tokens}, but {model} reads {context} tokens. Lower it."
        )
    template = PromptTemplate(
        tokenizer, template="auto" if tokenizer.chat_template else "none", max_context=context
    )
    return Lengths(ExampleTemplate(template), max_tokens or context)
