"""LoRA through PEFT: adapters put into a model in place, so that it stays a plain transformers one.

Owns which layers get one, what they start from, the weights that a plain model would have in their
place, and what the model was before training. The base is frozen.
Refuses to own PEFT's layers, files (`adapter`), and training.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot import draws
from surefoot.errors import ModelError
from surefoot.models import adapter
from surefoot.recipe import Lora

NAME = "default"
"""PEFT's name of the adapter that is trained."""
_BASE = ".base_layer"


@dataclass(frozen=True)
class AdapterIdentity:
    """What tells one adapter from another."""

    places: str
    """sha256 of the layers it lies in, its ranks and its scales."""
    start: str
    """sha256 of the weights that were given; empty for a fresh one."""


def add_adapter(
    model: PreTrainedModel,
    settings: Lora,
    *,
    seed: int,
    base_dir: Path | None,
    key: str = "model.lora",
) -> AdapterIdentity:
    """Freeze a model and put an adapter beside its linear layers, in place.

    A fresh one starts at zero (B = 0), with A drawn by a keyed draw; a given one (`settings.path`)
    as its files say. ModelError names `key` and the mend.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{key}: needs the package peft; run: pip install 'surefoot[lora]'")
    from peft import LoraConfig, inject_adapter_in_model

    given: Mapping[str, Tensor] | None = None
    if settings.path is not None:
        config, given = adapter.read(settings, base_dir, key=key)
    else:
        _refuse_rank(model, settings.rank, key)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=_whole(settings.alpha),  # type: ignore[arg-type]
            target_modules=_targets(model, settings.targets, key),
            lora_dropout=0.0,
        )
    config.inference_mode = False
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    what = "a fresh adapter" if given is None else f"the adapter {settings.path}"
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        said = str(error).split("\n")[0]
        raise ModelError(
            f"{key}: {what} does not fit {type(model).__name__} ({said}); name the model that it "
            "was made for as model.path, or other model.lora.targets"
        ) from error
    _refuse_other_layers(model, key)
    for weight in adapter_weights(model).values():
        # Steps of a small rate would be lost in bfloat16.
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    if given is None:
        _start_at_zero(model, seed)
    else:
        adapter.put(given, adapter_weights(model), where=f"{key}.path: {settings.path}")
    start = "" if given is None else _start_hash(model)
    return AdapterIdentity(_places_hash(model), start)


def _refuse_rank(model: nn.Module, rank: int, key: str) -> None:
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    full = max((min(layer.weight.shape) for layer in layers), default=rank)
    if rank > full:
        raise ModelError(
            f"{key}.rank: {rank} is more than the {full} that the largest layer of the model can "
            f"use; set it to {full} or less, or leave {key} out to train every weight"
        )


def same_kind(model: PreTrainedModel, settings: Lora) -> Lora:
    """Settings of a fresh adapter for another model, as the one of this model is."""
    if settings.path is None:
        return settings
    config: Any = model.peft_config[NAME]
    return Lora(rank=config.r, alpha=float(config.lora_alpha), targets=settings.targets)


def has_adapter(model: nn.Module) -> bool:
    """Whether some layer of a model has one."""
    return bool(_layers(model))


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters, by their names in the model."""
    return {
        f"{home}.{name}": parameter
        for home, layer in _layers(model).items()
        for name, parameter in layer.named_parameters()
        if not name.startswith("base_layer.")
    }


def make_trainable(model: nn.Module) -> None:
    """Let training move the adapter alone where there is one, else every weight."""
    if has_adapter(model):
        model.requires_grad_(False)
        for parameter in adapter_weights(model).values():
            parameter.requires_grad_(True)
    else:
        model.requires_grad_(True)


def described(model: nn.Module) -> list[str]:
    """A line on what is trained, for a model with an adapter."""
    layers = _layers(model)
    if not layers:
        return []
    trained = sum(parameter.numel() for parameter in adapter_weights(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    ranks = sorted({layer.r[NAME] for layer in layers.values()})
    return [
        f"LoRA of rank {', '.join(map(str, ranks))} on {len(layers)} layers: {trained:,} of "
        f"{total:,} parameters are trained ({trained / total:.2%})"
    ]


# -- the plain model -------------------------------------------------------------------------------


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as a model without adapters has it: its name, and its merged value.

    A merged one has the wider precision of base and adapter.
    """
    layers = _layers(model)
    own = set(adapter_weights(model)) if layers else set()
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        home = owner.removesuffix(_BASE)
        if name in own:
            continue
        if home != owner and home in layers:
            value = _merged(layers[home]) if last == "weight" else parameter.detach()
            yield f"{home}.{last}", value
        else:
            yield name, parameter.detach()


def moving_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As much of `plain_weights` as training changes."""
    layers = _layers(model)
    if not layers:
        yield from plain_weights(model)
    for home, layer in layers.items():
        yield f"{home}.weight", _merged(layer)


@torch.no_grad()
def merged_copy(model: PreTrainedModel, *, dtype: torch.dtype) -> PreTrainedModel:
    """A plain copy with the adapter added to the weights, and its parameters rounded to `dtype`.

    Buffers stay exact, such as rotary frequencies.
    """
    made = _without_layers(model, merged=True)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made


def base_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A plain copy of the model that the adapter was added to."""
    return _without_layers(model, merged=False)


def _without_layers(model: PreTrainedModel, *, merged: bool) -> PreTrainedModel:
    made = copy.deepcopy(model)
    for home, layer in _layers(made).items():
        base = layer.get_base_layer()
        if merged:
            base.weight.data = _merged(layer)
        parent, _, child = home.rpartition(".")
        setattr(made.get_submodule(parent), child, base)
    if "peft_config" in vars(made):
        del made.peft_config
    made.requires_grad_(True)
    return made


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """W + alpha / r * B A, as the layer's own weight lies."""
    base: Tensor = layer.get_base_layer().weight
    delta: Tensor = layer.get_delta_weight(NAME)
    return base.to(torch.promote_types(base.dtype, delta.dtype)) + delta


# -- the reference ---------------------------------------------------------------------------------


class StartingAdapter:
    """The adapter as it is when this is made; the frozen base is shared with the one that trains.

    Only without gradients: no graph may be waiting for its backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = tuple(_layers(model).values())
        self._weights = tuple(adapter_weights(model).values())
        at_zero = all(not bool(layer.lora_B[NAME].weight.any()) for layer in self._layers)
        self._kept = None if at_zero else [weight.detach().clone() for weight in self._weights]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes as it did; afterwards it is what it was before, whatever happens."""
        if self._kept is None:
            _switch(self._layers, on=False)
            try:
                yield
            finally:
                _switch(self._layers, on=True)
            return
        now = [weight.data for weight in self._weights]
        try:
            for weight, kept in zip(self._weights, self._kept, strict=True):
                weight.data = kept
            yield
        finally:
            for weight, data in zip(self._weights, now, strict=True):
                weight.data = data


def _switch(layers: Sequence[Any], *, on: bool) -> None:
    for layer in layers:
        layer.enable_adapters(on)


# -- which layers, and their start -----------------------------------------------------------------


def _layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by their names. Without PEFT in this process there are none."""
    if "peft.tuners.lora" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _targets(model: PreTrainedModel, words: Sequence[str], key: str) -> list[str]:
    """Names that PEFT matches with the ends of module names: those given, or all linear layers'."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    last = sorted({name.rpartition(".")[2] for name in linear})
    for word in words:
        hit = [name for name in modules if name == word or name.endswith(f".{word}")]
        if not hit:
            near = difflib.get_close_matches(word, last, n=3) or last
            raise ModelError(
                f"{key}.targets: {type(model).__name__} has no module {word!r}; did you mean "
                f"{' or '.join(repr(name) for name in near)}?"
            )
        if not set(hit) <= linear:
            raise ModelError(
                f"{key}.targets: {word!r} is no linear layer, or the LM head, which takes no "
                f"adapter; choose from {', '.join(last)}"
            )
    if words:
        return list(words)
    ends = {name for name in modules if name.rpartition(".")[2] in last}
    return last if ends == linear else sorted(linear)


def _refuse_other_layers(model: PreTrainedModel, key: str) -> None:
    """A given adapter may name what no plain weight could be merged from, or no head computes."""
    head = model.get_output_embeddings()
    for name, layer in _layers(model).items():
        if layer is head or not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
            raise ModelError(
                f"{key}.path: the adapter changes {name}, which is no linear layer inside the "
                "model; merge it into the model with PEFT, and train that"
            )


@torch.no_grad()
def _start_at_zero(model: nn.Module, seed: int) -> None:
    """B = 0 and A uniform in ±1 / sqrt(inputs), PEFT's own start, as a pure function of its key."""
    for home, layer in _layers(model).items():
        first, second = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        uniform = draws.uniform(seed, f"lora/{home}", np.arange(first.numel()))
        bound = 1.0 / math.sqrt(first.shape[1])
        first.copy_(torch.from_numpy(bound * (2.0 * uniform - 1.0)).reshape(first.shape))
        second.zero_()


def _whole(alpha: float) -> float:
    """Readers of PEFT's files expect a whole number where it is one."""
    return int(alpha) if alpha.is_integer() else alpha


def _places_hash(model: nn.Module) -> str:
    facts = [[home, layer.r[NAME], layer.scaling[NAME]] for home, layer in _layers(model).items()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _start_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in adapter_weights(model).items():
        digest.update(name.encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
