"""The one module that turns tokens into log-probabilities, for training and for scoring.

Owns the forward pass of every layout, in `model.compute` over `model.dtype` weights, the LM head at
scored positions only (no tensor of shape [B, T, V] exists), and the value head.
Refuses to own sampling (the engine), the critic (`critic`), losses and the choice of layout.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from surefoot.learner.attention import use_short_attention
from surefoot.learner.head import find_head, token_logp, token_logp_and_collision
from surefoot.learner.layouts import Microbatch, Shape
from surefoot.learner.norms import use_norm_before_product


@dataclass(frozen=True)
class Scored:
    """Log-probability and entropy (nats) of each scored token of a pass, shape N."""

    logp_N: Tensor
    entropy_N: Tensor
    value_N: Tensor | None = None
    """V of the state before each token, in units of reward, where a value head is attached."""
    log_collision_N: Tensor | None = None
    """log sum_v p_v^2 of each token's distribution, constant, where it was asked for."""


class ValueHead(nn.Linear):
    """One number per state of a backbone, in float32 at least; starts at zero."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        wide = torch.promote_types(backbone.dtype, torch.float32)
        size = backbone.config.get_text_config().hidden_size
        super().__init__(size, 1, device=backbone.device, dtype=wide)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def of(self, hidden_NH: Tensor) -> Tensor:
        """V of each state, shape N."""
        out: Tensor = self(hidden_NH.to(self.weight.dtype))
        return out[:, 0]


class Backbone(nn.Module):
    """A model without its head: hidden states at the scored positions of a laid-out micro-batch."""

    def __init__(self, model: PreTrainedModel, *, compute: torch.dtype) -> None:
        super().__init__()
        use_short_attention(model)
        use_norm_before_product(model)
        self.model = model
        self.compute = compute
        parameters = inspect.signature(model.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def shape(self) -> Shape:
        """Counts for the cost of a layout."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads * (
            config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        )
        embeddings = self.model.get_input_embeddings().weight.numel()
        total = sum(p.numel() for p in self.model.parameters())
        return Shape(total - embeddings, config.num_hidden_layers * heads)

    def hidden(self, batch: Microbatch) -> Tensor:
        """The state from which each scored token was drawn, [N, H]."""
        with self._autocast():
            return self._prefix(batch) if batch.layout == "prefix" else self._block(batch)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute == self.model.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute)

    def _block(self, batch: Microbatch) -> Tensor:
        assert batch.ids_RT is not None and batch.positions_RT is not None
        mask = None if batch.mask_RTT is None else self._mask(batch.mask_RTT)
        hidden = self.model.base_model(
            input_ids=batch.ids_RT.to(self.device),
            attention_mask=mask,
            position_ids=batch.positions_RT.to(self.device),
            use_cache=False,
        ).last_hidden_state
        return hidden.flatten(0, 1)[batch.places_N.to(self.device)]

    def _mask(self, mask_RTT: Tensor) -> Tensor:
        """The mask as the model's attention takes it: eager adds it to the scores as it is."""
        mask = mask_RTT[:, None].to(self.device)
        if self.model.config._attn_implementation != "eager":
            return mask
        dtype = self.model.dtype
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return added.masked_fill(~mask, torch.finfo(dtype).min)

    def _prefix(self, batch: Microbatch) -> Tensor:
        caches: list[Cache] = []
        last_states: list[Tensor] = []
        for block in batch.prompts:
            cache = Cache(layers=[DynamicLayer() for _ in range(self._layers)])
            hidden = self._base(block.to(self.device), cache, None, None)
            last_states.append(hidden[:, -1])
            caches.append(cache)
        lengths = torch.tensor([len(bundle.prompt) for bundle in batch.bundles])
        longest = int(lengths.max())
        states = [torch.cat(last_states)]
        for part in batch.slices:
            width = part.ids_BT.shape[1]
            start_B = lengths[part.bundle_B]
            cache = _gather(caches, part.bundle_B, longest)
            column = torch.arange(longest + width)
            # Prompts end at column `longest`; shorter ones are padded on the left.
            mask = (column >= longest - start_B[:, None]) & (
                column < longest + part.length_B[:, None]
            )
            positions = start_B[:, None] + torch.arange(width)
            hidden = self._base(part.ids_BT.to(self.device), cache, mask, positions)
            states.append(hidden.flatten(0, 1))
        return torch.cat(states)[batch.places_N.to(self.device)]

    @property
    def _layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    def _base(
        self, ids_BT: Tensor, cache: Cache, mask_BT: Tensor | None, positions_BT: Tensor | None
    ) -> Tensor:
        hidden: Tensor = self.model.base_model(
            input_ids=ids_BT,
            attention_mask=None if mask_BT is None else mask_BT.long().to(self.device),
            position_ids=None if positions_BT is None else positions_BT.to(self.device),
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state
        return hidden


class Scorer(Backbone):
    """Wraps a policy (or a reference) from the start; `forward` takes a laid-out micro-batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute: torch.dtype,
        head_dtype: torch.dtype,
        temperature: float,
    ) -> None:
        super().__init__(model, compute=compute)
        self.temperature = temperature
        self.head = find_head(model, dtype=head_dtype)
        self.value_head: ValueHead | None = None
        """That of a critic which shares the trunk."""

    def forward(self, batch: Microbatch, *, collision: bool = False) -> Scored:
        """Score the micro-batch's tokens under softmax(logits / temperature)."""
        targets_N = batch.targets_N.to(self.device)
        hidden_NH = self.hidden(batch)
        heat = self.temperature
        collision_N = None
        if collision:
            logp_N, entropy_N, collision_N = token_logp_and_collision(
                hidden_NH, self.head, targets_N, temperature=heat
            )
        else:
            logp_N, entropy_N = token_logp(hidden_NH, self.head, targets_N, temperature=heat)
        value_N = None if self.value_head is None else self.value_head.of(hidden_NH)
        return Scored(logp_N, entropy_N, value_N, collision_N)

    def values(self, batch: Microbatch) -> Tensor:
        """The value head alone: a gradient reaches the head, never the policy."""
        assert self.value_head is not None
        with torch.no_grad():
            hidden_NH = self.hidden(batch)
        return self.value_head.of(hidden_NH)


def _gather(blocks: list[Cache], bundle_B: Tensor, longest: int) -> Cache:
    """A cache whose row i holds the prompt of bundle_B[i], padded on the left; with gradient."""
    merged = Cache(layers=[DynamicLayer() for _ in range(len(blocks[0].layers))])
    for index, layer in enumerate(merged.layers):
        parts = [cache.layers[index] for cache in blocks]
        keys = torch.cat([_pad_left(part.keys, longest) for part in parts])
        values = torch.cat([_pad_left(part.values, longest) for part in parts])
        rows = bundle_B.to(keys.device)
        layer.update(keys[rows], values[rows])
    return merged


def _pad_left(states: Tensor, longest: int) -> Tensor:
    missing = longest - states.shape[2]
    return states if missing == 0 else F.pad(states, (0, 0, missing, 0))
