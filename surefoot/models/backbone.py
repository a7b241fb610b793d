"""A critic's backbone from another model than the policy: what is loaded, and what must fit.

Owns loading the model without its head (causal, base or reward model), and the comparison of its
tokenizer, embedding and context with those of the policy.
Refuses to own the value head and its training (`learner/critic`).
"""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from surefoot.errors import ModelError
from surefoot.models.load import (
    DTYPES,
    LoadedModel,
    check_whole,
    context_of,
    resolve_directory,
    why_not,
)
from surefoot.recipe import Recipe

_KEY = "critic.path"
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "tekken.json")


def load_backbone(recipe: Recipe, policy: LoadedModel) -> PreTrainedModel:
    """Load the model that critic.path names, without its head, in the policy's dtype.

    A language model's or a reward model's head is left in its file. ModelError names the path, what
    is wrong and the mend; so where its tokenizer would read the policy's ids as other tokens.
    """
    path = str(recipe.critic.path)
    folder = resolve_directory(path, recipe.base_dir, key=_KEY)
    if Path(folder).is_dir() and not any(any(Path(folder).glob(p)) for p in _TOKENIZER_FILES):
        raise ModelError(
            f"{_KEY}: {path} holds no tokenizer, so it cannot be told whether it reads the same "
            "ids as the policy; save the tokenizer that it was trained with beside it"
        )
    remote = "remote_code" in recipe.run.allow
    told = transformers.utils.logging.get_verbosity()
    try:
        # A head that stays in its file is no news; what is missing is refused below.
        transformers.utils.logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
        model, info = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[recipe.model.dtype],
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=remote,
        )
    except Exception as error:  # the libraries raise whatever their readers do
        raise ModelError(why_not(path, error, key=_KEY)) from error
    finally:
        transformers.utils.logging.set_verbosity(told)
    check_whole(path, info, key=_KEY)
    _check_tokens(path, tokenizer, policy)
    _check_size(path, model, recipe, policy)
    # Dropout is off, as in the policy.
    model.eval()
    return model


def _check_tokens(path: str, tokenizer: Tokenizer, policy: LoadedModel) -> None:
    """Every id of the policy's tokenizer must be the same token; more of them do no harm."""
    here = _tokens(policy.template.tokenizer)
    there = _tokens(tokenizer)
    for id, token in sorted(here.items()):
        if there.get(id) != token:
            said = f"{there[id]!r}" if id in there else "no token"
            raise ModelError(
                f"{_KEY}: {path} has another tokenizer than model.path {policy.source}: id {id} is "
                f"{said} there and {token!r} here, and a critic reads the policy's ids; name a "
                "model with the policy's tokenizer, or leave critic.path out, so that the critic "
                "starts as a copy of the policy"
            )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {id: token for token, id in tokenizer.get_vocab().items()}


def _check_size(path: str, model: PreTrainedModel, recipe: Recipe, policy: LoadedModel) -> None:
    """Embedding rows for every id that may be drawn, positions for the longest completion."""
    rows = model.get_input_embeddings().weight.shape[0]
    drawn = policy.model.get_output_embeddings().weight.shape[0]
    if rows < drawn:
        raise ModelError(
            f"{_KEY}: {path} has {rows} embedding rows, and the policy may draw ids up to "
            f"{drawn - 1}; call resize_token_embeddings({drawn}) on it and save it again"
        )
    context = policy.template.max_context
    cap = recipe.rollout.max_new_tokens
    prompts = [source.max_prompt_tokens for source in recipe.data] or [None]
    longest = max(context if limit is None else min(context, limit + cap) for limit in prompts)
    if context_of(model.config) < longest:
        raise ModelError(
            f"{_KEY}: {path} attends over {context_of(model.config)} tokens, and a prompt with its "
            f"completion may have {longest}; set data.max_prompt_tokens to "
            f"{context_of(model.config) - cap} or less, or name a model with a longer context"
        )
