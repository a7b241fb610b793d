"""A plain Hugging Face directory from trained weights.

Owns what such a directory holds: weights (or an adapter), config, generation config, tokenizer,
chat template; and that it appears whole or not at all.
Refuses to own checkpoints; a resume folder and a model folder are different things.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.errors import DISK_REFUSES, ModelError, SurefootError
from surefoot.models import adapter, lora
from surefoot.models.load import LoadedModel

_OS_ERROR = re.compile(r"\(os error (\d+)\)")

Finish = Callable[[Path], None]
"""Called with the directory before it appears; what it raises leaves nothing behind."""


def export_directory(
    loaded: LoadedModel,
    weights: Mapping[str, torch.Tensor],
    destination: Path,
    *,
    finish: Finish | None = None,
) -> Path:
    """Write trained `weights` (by parameter name) as a directory that plain transformers loads.

    An adapter is added to the weights of its model. An existing non-empty directory is refused.
    """
    check_destination(destination)
    put_weights(loaded.model, weights)
    with appearing(destination) as folder:
        _save(_plain(loaded.model), loaded, folder)
        if finish is not None:
            finish(folder)
    return destination


def export_adapter(
    loaded: LoadedModel,
    weights: Mapping[str, torch.Tensor],
    destination: Path,
    *,
    base: str,
    revision: str | None,
    finish: Finish | None = None,
) -> Path:
    """Write an adapter's trained `weights` as a directory that plain PEFT loads over `base`."""
    check_destination(destination)
    put_weights(loaded.model, weights)
    with appearing(destination) as folder:
        configs: Any = loaded.model.peft_config
        adapter.write(
            folder,
            configs[lora.NAME],
            lora.adapter_weights(loaded.model),
            base=base,
            revision=revision,
        )
        loaded.template.tokenizer.save_pretrained(folder)
        if finish is not None:
            finish(folder)
    return destination


@torch.no_grad()
def put_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy trained weights into a model: all that training moves, and no other."""
    parameters = lora.adapter_weights(model) or dict(model.named_parameters())
    if set(parameters) != set(weights):
        odd = sorted(set(parameters) ^ set(weights))[0]
        raise ModelError(f"export: the checkpoint and the model differ in parameter {odd}")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def check_destination(destination: Path) -> None:
    """Refuse a place that holds something already."""
    try:
        full = destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    except OSError as error:
        raise _unwritable(destination, error.strerror or str(error)) from error
    if full:
        raise ModelError(f"export: {destination} exists and is not empty; name a new directory")


def _unwritable(destination: Path, reason: str) -> ModelError:
    return ModelError(
        f"{str(destination)!r:.200} cannot be written ({reason}); name another directory, or make "
        "room"
    )


def _refusal(error: Exception) -> str | None:
    """Why the disk refused, where this error says that it did."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and not isinstance(error, SurefootError):
        # safetensors and tokenizers tell a refused write in words, in errors of their own.
        told = _OS_ERROR.search(str(error))
        number = int(told[1]) if told is not None else None
    return os.strerror(number) if number in DISK_REFUSES else None


def save_directory(loaded: LoadedModel, destination: Path) -> Path:
    """Write the model as it was passed, an adapter left out; the model itself is not changed."""
    model = lora.base_copy(loaded.model) if lora.has_adapter(loaded.model) else loaded.model
    with appearing(destination) as folder:
        _save(model, loaded, folder)
    return destination


@contextmanager
def appearing(destination: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `destination` at the end, in the place of an empty one.

    After an error nothing is left of it.
    """
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    except OSError as error:
        raise _unwritable(destination, error.strerror or str(error)) from error
    try:
        yield staging
        _put_in_place(staging, destination)
    except Exception as error:  # the libraries raise whatever their writers do
        reason = _refusal(error)
        if reason is None:
            raise
        raise _unwritable(destination, reason) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, destination: Path) -> None:
    try:
        # mkdtemp makes a private folder; a model directory is as readable as its files.
        staging.chmod(0o755)
        if destination.exists():
            destination.rmdir()
        staging.rename(destination)
    except OSError as error:
        raise _unwritable(destination, error.strerror or str(error)) from error


def save_whole(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    destination: Path,
    *,
    finish: Finish | None = None,
) -> Path:
    """Write a model and its tokenizer."""
    with appearing(destination) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if finish is not None:
            finish(folder)
    return destination


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    return lora.merged_copy(model, dtype=model.dtype) if lora.has_adapter(model) else model


def _save(model: PreTrainedModel, loaded: LoadedModel, folder: Path) -> None:
    """With every stop id in the generation config, which is put back afterwards."""
    generation = model.generation_config
    ends = None if generation is None else generation.eos_token_id
    try:
        if generation is not None:
            generation.eos_token_id = list(loaded.stop_ids)
        model.save_pretrained(folder)
        loaded.template.tokenizer.save_pretrained(folder)
    finally:
        if generation is not None:
            generation.eos_token_id = ends
