"""Gradient checkpointing: a layer's activations are computed again in the backward pass.

Owns the wrapper around each layer's forward pass. The model stays in eval mode, so that dropout
stays off; the switch of transformers works in train mode alone.
Refuses to own which layouts go with it (`learner/check`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from surefoot.errors import ModelError


class _Recomputed:
    """Stands in for a layer's forward pass; a copy of the layer takes its own along."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        plain = partial(type(self.layer).forward, self.layer)
        # A second pass would write into a cache once more.
        cached = any(isinstance(value, Cache) for value in (*args, *inputs.values()))
        if cached or not torch.is_grad_enabled():
            return plain(*args, **inputs)
        # Nothing in a layer draws random numbers, since dropout is off.
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **inputs)


def recompute_activations(model: PreTrainedModel, *, key: str = "model.path") -> None:
    """Let every layer keep its inputs alone; gradients stay what they are."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    inner = {id(child) for layer in layers for child in layer.modules() if child is not layer}
    outer = [layer for layer in layers if id(layer) not in inner]
    if not outer:
        raise ModelError(
            f"model.gradient_checkpointing: {type(model).__name__} ({key}) has no layers that can "
            "be computed again; leave the key out"
        )
    for layer in outer:
        layer.forward = _Recomputed(layer)


def recomputes(model: nn.Module) -> bool:
    """Whether `recompute_activations` was called on it, or on what it is a copy of."""
    return any(isinstance(vars(module).get("forward"), _Recomputed) for module in model.modules())
