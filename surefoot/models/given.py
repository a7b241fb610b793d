"""A model that is passed as a Python object: what is asked of it, and how it becomes ours.

Owns the checks, the tokenizer that belongs to it, and making its config say what a saved one says.
Refuses to own loading by path (`load.py`), and copying: the object itself is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from surefoot.errors import ModelError
from surefoot.models.load import DTYPES, OBJECT, LoadedModel, as_asked, context_of, wrap_model
from surefoot.models.lora import has_adapter
from surefoot.models.template import PromptTemplate
from surefoot.recipe import Recipe


@dataclass(frozen=True)
class GivenModel:
    """A loaded model, its tokenizer, and the recipe's word for the dtype of its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: str


def given_model(model: object, tokenizer: PreTrainedTokenizerBase | None) -> GivenModel:
    """Check what was passed as `model=` and `tokenizer=`; ModelError says what to pass instead."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model: is a {type(model).__name__}; pass a transformers PreTrainedModel, a model "
            "directory, a Hugging Face id or an alias"
        )
    if has_adapter(model):
        raise ModelError(
            "model: has an adapter (as one that was trained in place has); pass the base model "
            "again, and name an adapter to start from in model.lora.path"
        )
    named = list(model.named_parameters())
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if frozen:
        raise ModelError(
            f"model: {len(frozen)} of {len(named)} parameters are frozen ({frozen[0]} is the "
            "first), and this version trains every one; call model.requires_grad_(True)"
        )
    found = {parameter.dtype for _, parameter in named}
    words = [word for word, dtype in DTYPES.items() if found == {dtype}]
    if not words:
        present = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ModelError(
            f"model: its weights are {present}; they must all be one of {', '.join(DTYPES)}, as "
            "after model.to(torch.float32)"
        )
    if any(parameter.is_meta for _, parameter in named):
        raise ModelError("model: its weights are on the meta device; load them first")
    return GivenModel(model, _tokenizer(model, tokenizer), words[0])


def adopt(given: GivenModel, recipe: Recipe) -> LoadedModel:
    """Make the object ready for training, in place; it has the hash that its saved copy has."""
    model = given.model
    # What save_pretrained would write: else the hash of the object and of its copy would differ.
    model.config.architectures = [type(model).__name__]
    model.config.dtype = given.dtype
    template = PromptTemplate(
        given.tokenizer, template=recipe.model.template, max_context=context_of(model.config)
    )
    return as_asked(wrap_model(model, template, source=OBJECT), recipe)


def _tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        home = str(model.name_or_path)
        if not home or not Path(home).is_dir():
            raise ModelError(
                "tokenizer: a model that is passed as an object needs its tokenizer, because "
                f"{home or 'the model'!r} names no local directory; pass tokenizer="
            )
        return AutoTokenizer.from_pretrained(home)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"tokenizer: is a {type(tokenizer).__name__}; pass a transformers tokenizer"
        )
    return tokenizer
