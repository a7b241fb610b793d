"""Loading a causal language model, its tokenizer and its template; and their identity.

Owns the path from `model.path` to a module in `model.dtype`, and the hash by which a resumed run
knows its reference again. Refuses pickled weights, and remote code unless allowed by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.alias import ALIASES, alias_directory
from surefoot.models.lora import add_adapter
from surefoot.models.recompute import recompute_activations
from surefoot.models.template import PromptTemplate, stop_ids
from surefoot.recipe import Recipe

OBJECT = "object"
"""As model.path: the model that was passed from Python, kept in the run directory."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for training: eval mode, gradients on, with its template and stop ids.

    Under model.lora its base is frozen, and only the adapter has gradients.
    """

    model: PreTrainedModel
    template: PromptTemplate
    stop_ids: tuple[int, ...]
    source: str
    """What a resumed run loads again: a directory, an id, an alias, or `object`."""
    hash: str
    """sha256 over the weights in memory, the config and the template; and over the adapter."""
    beneath: str | None = None
    """sha256 of what an adapter's weights mean: its base, places and scales; None without one."""


def load_model(recipe: Recipe, *, kept: Path | None = None) -> LoadedModel:
    """Load the policy that a recipe names. ModelError names the path and the mend.

    `kept` is where the run keeps a model that was passed from Python (model.path `object`).
    """
    section = recipe.model
    transformers.utils.logging.disable_progress_bar()
    if section.path == OBJECT:
        folder = _kept(kept)
    else:
        folder = resolve_directory(section.path, recipe.base_dir)
    remote = "remote_code" in recipe.run.allow
    where = {"revision": section.revision, "trust_remote_code": remote}
    try:
        config = AutoConfig.from_pretrained(folder, **where)
        tokenizer = AutoTokenizer.from_pretrained(folder, **where)
        # Wrong shapes are let through here only to be refused below, by name.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[section.dtype],
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,
        )
    except Exception as error:  # the libraries raise whatever their readers do
        raise ModelError(why_not(section.path, error)) from error
    check_whole(section.path, info)
    template = PromptTemplate(
        tokenizer, template=section.template, max_context=context_of(model.config)
    )
    return as_asked(wrap_model(model, template, source=section.path), recipe)


def wrap_model(model: PreTrainedModel, template: PromptTemplate, *, source: str) -> LoadedModel:
    """Make a model that is already in memory ready for training."""
    model.requires_grad_(True)
    # Dropout is off unless asked for (law 7): the ratio must start at exactly 1.
    model.eval()
    ends = stop_ids(model.config, model.generation_config, template)
    if not ends:
        raise ModelError(
            f"model.path: {source} names no end-of-sequence id in its config, generation config, "
            "tokenizer or template; add eos_token_id to its generation_config.json"
        )
    return LoadedModel(model, template, ends, source, identity(model))


def as_asked(loaded: LoadedModel, recipe: Recipe) -> LoadedModel:
    """With the adapter and the recomputed activations that a recipe asks for, in place."""
    section = recipe.model
    if section.gradient_checkpointing:
        recompute_activations(loaded.model)
    if section.lora is None:
        return loaded
    own = add_adapter(loaded.model, section.lora, seed=recipe.run.seed, base_dir=recipe.base_dir)
    beneath = _joined(loaded.hash, own.places)
    whole = _joined(beneath, own.start) if own.start else beneath
    return dataclasses.replace(loaded, hash=whole, beneath=beneath)


def _joined(*hashes: str) -> str:
    return hashlib.sha256("/".join(hashes).encode()).hexdigest()


def identity(model: PreTrainedModel) -> str:
    """sha256 of every parameter's bytes and the config: the same model, or not."""
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        flat = parameter.detach().contiguous().view(torch.uint8).reshape(-1)
        digest.update(flat.cpu().numpy())
    return digest.hexdigest()


def resolve_directory(path: str, base_dir: Path | None = None, *, key: str = "model.path") -> str:
    """Aliases and relative paths become directories, anything else is a Hugging Face id.

    A relative path starts at `base_dir` (the recipe's directory), then at the working directory.
    A directory with pickled weights alone is refused (law 16). `key` is what the recipe calls it.
    """
    if path in ALIASES:
        return str(alias_directory(path))
    wanted = Path(path).expanduser()
    tried = [base_dir / wanted, wanted] if base_dir is not None else [wanted]
    folder = next((place for place in tried if place.is_dir()), None)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ModelError(f"{key}: {path} holds no config.json, so it is no model directory")
        weights = list(folder.glob("*.safetensors"))
        pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
        if not weights and pickles:
            raise ModelError(
                f"{key}: {path} holds only pickled weights ({pickles[0]}), and nothing is "
                "unpickled here; save the model again as safetensors"
            )
        return str(folder)
    if path.startswith((".", "/", "~")):
        raise ModelError(
            f"{key}: there is no directory {path}; a relative path starts at the recipe's "
            "directory, then at the working directory"
        )
    return path


def _kept(folder: Path | None) -> str:
    if folder is None or not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: {OBJECT} stands for a model that is passed from Python, and none is kept "
            "here; pass model=, or name a directory or a Hugging Face id"
        )
    return str(folder)


def why_not(path: str, error: Exception, *, key: str = "model.path") -> str:
    """What to say of files that transformers does not load."""
    first = str(error).strip().split("\n")[0]
    return (
        f"{key}: cannot load {path!r} ({first}); give a model directory, a Hugging Face id "
        f"that this machine has or can reach, or the alias {ALIASES[0]}"
    )


def check_whole(path: str, info: Mapping[str, Any], *, key: str = "model.path") -> None:
    """Refuse a model some of whose weights would be random, because its files lack them."""
    lacking = sorted(info["missing_keys"]) + sorted(entry[0] for entry in info["mismatched_keys"])
    if lacking:
        raise ModelError(
            f"{key}: the files of {path} do not hold {len(lacking)} of the weights that its "
            f"config.json describes, in their shape ({lacking[0]} is the first); save or download "
            "the model again, so that config and weights belong together"
        )


def context_of(config: transformers.PretrainedConfig) -> int:
    """The most tokens that a model attends over; without a limit in its config, very many."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = config.to_dict().get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 30
