"""A plain Hugging Face directory from trained weights.

Owns what such a directory holds: weights, config, generation config, tokenizer, chat template.
Refuses to own checkpoints; a resume folder and a model folder are different things.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from surefoot.errors import ModelError
from surefoot.models.load import LoadedModel


def export_directory(
    loaded: LoadedModel, weights: Mapping[str, torch.Tensor], destination: Path
) -> Path:
    """Write `weights` (by parameter name) as a model directory that plain transformers loads.

    The directory appears whole or not at all; an existing non-empty one is refused.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ModelError(f"export: {destination} exists and is not empty; name a new directory")
    parameters = dict(loaded.model.named_parameters())
    if set(parameters) != set(weights):
        odd = sorted(set(parameters) ^ set(weights))[0]
        raise ModelError(f"export: the checkpoint and the model differ in parameter {odd}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return save_directory(loaded, destination)


def save_directory(loaded: LoadedModel, destination: Path) -> Path:
    """Write the model as it is in memory, whole or not at all; the model itself is not changed."""
    generation = loaded.model.generation_config
    ends = None if generation is None else generation.eos_token_id
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        if generation is not None:
            generation.eos_token_id = list(loaded.stop_ids)
        loaded.model.save_pretrained(staging)
        loaded.template.tokenizer.save_pretrained(staging)
        # mkdtemp makes a private folder; a model directory is as readable as its files.
        staging.chmod(0o755)
        if destination.exists():
            destination.rmdir()
        staging.rename(destination)
    finally:
        if generation is not None:
            generation.eos_token_id = ends
        shutil.rmtree(staging, ignore_errors=True)
    return destination
