"""A key-value cache for decoding: grows in blocks, drops rows, and joins new ones.

Owns memory layout only. Rows end at the same column; shorter prompts are padded on the left, so
that a row's columns are contiguous and sliding windows stay right.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

_BLOCK = 128


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with spare columns, so that a token is written, not copied."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        if self.key_buffer is None or self.value_buffer is None:
            self._adopt(_spare(key_states, 0), _spare(value_states, 0), 0)
        elif self.used + added > self.key_buffer.shape[2]:
            self._adopt(_spare(self.key_buffer, added), _spare(self.value_buffer, added), self.used)
        assert self.key_buffer is not None and self.value_buffer is not None
        end = self.used + added
        self.key_buffer[:, :, self.used : end] = key_states
        self.value_buffer[:, :, self.used : end] = value_states
        self._adopt(self.key_buffer, self.value_buffer, end)
        return self.keys, self.values

    def _adopt(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.key_buffer, self.value_buffer, self.used = keys, values, used
        self.keys, self.values = keys[:, :, :used], values[:, :, :used]

    def select(self, rows: Tensor, *, first_column: int) -> None:
        """Keep `rows` (repeats allowed) and the columns from `first_column` on."""
        assert self.key_buffer is not None and self.value_buffer is not None
        keys = self.key_buffer[:, :, first_column:].index_select(0, rows)
        values = self.value_buffer[:, :, first_column:].index_select(0, rows)
        self._adopt(keys, values, self.used - first_column)


def _spare(states: Tensor, extra: int) -> Tensor:
    """A copy of a buffer with room for `extra` columns and a block."""
    wider = states.new_empty(
        states.shape[0], states.shape[1], states.shape[2] + extra + _BLOCK, states.shape[3]
    )
    wider[:, :, : states.shape[2]] = states
    return wider


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: transformers is renaming it."""
    names = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def new_cache(layers: int) -> Cache:
    return Cache(layers=[GrowingLayer() for _ in range(layers)])


def select(cache: Cache, rows: Tensor, *, first_column: int = 0) -> None:
    """Keep some rows of every layer, in the order given; repeats expand a prompt to its group."""
    for layer in cache.layers:
        assert isinstance(layer, GrowingLayer)
        layer.select(rows, first_column=first_column)


def join(caches: Sequence[Cache]) -> Cache:
    """Stack caches by rows, padding the shorter ones with zeros on the left."""
    if len(caches) == 1:
        return caches[0]
    used = max(_used(cache) for cache in caches)
    joined = new_cache(len(caches[0].layers))
    for index, layer in enumerate(joined.layers):
        parts = [cache.layers[index] for cache in caches]
        layer.update(
            torch.cat([_pad_left(part.keys, used) for part in parts]),
            torch.cat([_pad_left(part.values, used) for part in parts]),
        )
    return joined


def _used(cache: Cache) -> int:
    layer = cache.layers[0]
    assert isinstance(layer, GrowingLayer)
    return layer.used


def _pad_left(states: Tensor, columns: int) -> Tensor:
    missing = columns - states.shape[2]
    return states if missing == 0 else F.pad(states, (0, 0, missing, 0))
