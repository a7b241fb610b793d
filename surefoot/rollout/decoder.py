"""One token of every live row, without the cost of calling a module for each small step.

Decoding a token is a few large matrix products between many small operations; through the modules
of transformers the small ones took as long as the products. For models whose blocks are those of
Llama this calls the operations directly, reads keys once for all query heads that share them, and
joins products that read the same input.

Owns the forward pass of one token a row. Which models qualify is read from their structure and
then checked against their own forward pass; all others decode through their modules.
Refuses to own prefill, the cache's memory and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surefoot.rollout.cache import cache_argument, new_cache

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose blocks are written out here."""
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-4}
"""For the rounding of a whole model, whose layers add up; a wrong block is further off."""
_PACKED_FOR = 32
"""Rows that the packed order is chosen for; it holds for any number of rows."""
_CHECKED_IDS = (
    (504, 1201, 330, 98, 7, 2044, 611, 905),
    (88, 3000, 412, 77, 1500, 23, 954, 2001),
)


class _Linears:
    """Linear layers with the same input; their outputs side by side.

    Packed, they are one product over a copy in the kernel's own order of the weights: for a few
    rows, bringing plain weights into that order took longer than the product. Joined, they are one
    product and the layers' weights become views of one matrix. Else they are multiplied apart.
    """

    def __init__(self, layers: Sequence[nn.Module], *, join: bool, pack: bool) -> None:
        # An adapter or a quantised layer is of another class.
        if any(type(layer) is not nn.Linear for layer in layers):
            raise TypeError(f"not plain linear layers: {layers}")
        self.layers: list[Any] = list(layers)
        alike = len({layer.bias is None for layer in self.layers}) == 1
        self.pack = pack and alike
        self.packed: tuple[Tensor, Tensor | None] | None = None
        if join and alike and len(layers) > 1 and not self.pack:
            self.parts = [(_joined(layers, "weight"), _joined(layers, "bias"))]
        else:
            self.parts = [(layer.weight, layer.bias) for layer in self.layers]
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights as they are now."""
        if not self.pack:
            return
        weights = [layer.weight.detach() for layer in self.layers]
        biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        packed = torch.ops.mkldnn._reorder_linear_weight(whole, _PACKED_FOR)
        self.packed = (packed, torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, *self.packed, "none", [], "")
            return out
        if len(self.parts) == 1:
            return F.linear(x, *self.parts[0])
        return torch.cat([F.linear(x, weight, bias) for weight, bias in self.parts], -1)


def _joined(layers: Sequence[nn.Module], name: str) -> Any:
    tensors = [getattr(layer, name) for layer in layers]
    if tensors[0] is None:
        return None
    whole = torch.cat([tensor.detach() for tensor in tensors])
    views = whole.split([len(tensor) for tensor in tensors])
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
    return whole


def _packs(model: PreTrainedModel) -> bool:
    """Whether oneDNN has a packed product for this model's weights here."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    fits = model.device.type == "cpu" and model.dtype is torch.bfloat16
    return bool(fits and known and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Norm:
    def __init__(self, module: nn.Module) -> None:
        if not type(module).__name__.endswith("RMSNorm"):
            raise TypeError(f"not a root mean square norm: {module}")
        self.weight: Any = module.weight
        self.eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class _Block:
    before_attention: _Norm
    queries_keys_values: _Linears
    query_norm: _Norm | None
    key_norm: _Norm | None
    scaling: float
    output: _Linears
    before_mlp: _Norm
    gate_up: _Linears
    activation: Callable[[Tensor], Tensor]
    down: _Linears


class TokenDecoder:
    """The blocks of a model; after a change of its weights, `refresh`."""

    def __init__(self, model: PreTrainedModel, *, join: bool, pack: bool) -> None:
        self.base: Any = model.base_model
        config = model.config
        self.heads = config.num_attention_heads
        self.shared = config.num_key_value_heads
        self.size = _head_size(config)
        self.blocks = [_block(layer, join=join, pack=pack) for layer in self.base.layers]
        self.norm = _Norm(self.base.norm)
        self.head = _Linears([model.get_output_embeddings()], join=False, pack=pack)

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow the model's weights where the decoder keeps a packed copy of them."""
        for block in self.blocks:
            for linears in (block.queries_keys_values, block.output, block.gate_up, block.down):
                linears.refresh()
        self.head.refresh()

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """What the model's output layer makes of hidden states, [B, V]."""
        return self.head(hidden_BH)

    def step(
        self, ids_B: Tensor, positions_B: Tensor, cache: Cache, visible_BC: Tensor | None
    ) -> Tensor:
        """Append one token to each row's cache; its hidden state after the final norm, [B, H].

        `visible_BC` is False at cache columns that are padding, the new column included; None if
        no column is.
        """
        batch, half = len(ids_B), self.size // 2
        x_BH = F.embedding(ids_B, self.base.embed_tokens.weight)
        cos, sin = self.base.rotary_emb(x_BH[:, None], positions_B[:, None])
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        mask = None if visible_BC is None else visible_BC[:, None, None]
        turned = self.heads + self.shared
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            projected = block.queries_keys_values(block.before_attention(x_BH))
            heads = projected.view(batch, turned + self.shared, self.size)
            rotary = heads[:, :turned]
            if block.query_norm is not None and block.key_norm is not None:
                queries = block.query_norm(rotary[:, : self.heads])
                rotary = torch.cat([queries, block.key_norm(rotary[:, self.heads :])], 1)
            rotary = rotary * cos + rotary.roll(half, -1) * sin
            keys, values = layer.update(rotary[:, self.heads :, None], heads[:, turned:, None])
            # Query heads that share keys stand where a sequence of queries would.
            out = F.scaled_dot_product_attention(
                rotary[:, : self.heads].reshape(batch, self.shared, -1, self.size),
                keys,
                values,
                attn_mask=mask,
                scale=block.scaling,
            )
            x_BH = x_BH + block.output(out.reshape(batch, -1))
            gate, up = block.gate_up(block.before_mlp(x_BH)).chunk(2, -1)
            x_BH = x_BH + block.down(block.activation(gate) * up)
        return self.norm(x_BH)


def find_decoder(model: PreTrainedModel, *, join: bool) -> TokenDecoder | None:
    """A decoder for this model, or None if it is not of the shape or does not agree with it.

    `join` lets weights be joined where they are not packed, which replaces their storage: only for
    a model that the caller owns alone.
    """
    if not _is_of_the_family(model):
        return None
    for pack in (True, False) if _packs(model) else (False,):
        try:
            decoder = TokenDecoder(model, join=join, pack=pack)
            agrees = _agrees(decoder, model)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            continue
        if agrees:
            return decoder
    return None


def _is_of_the_family(model: PreTrainedModel) -> bool:
    config = model.config
    kinds = getattr(config, "layer_types", None)
    windowed = set(kinds) != {"full_attention"} if kinds else bool(_window(config))
    hooked = any(module._forward_hooks for module in model.modules())
    return config.model_type in FAMILIES and not windowed and not hooked


def _window(config: Any) -> int | None:
    return getattr(config, "sliding_window", None)


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def _block(layer: Any, *, join: bool, pack: bool) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else _Norm(norm) for norm in norms)
    return _Block(
        _Norm(layer.input_layernorm),
        _Linears([attention.q_proj, attention.k_proj, attention.v_proj], join=join, pack=pack),
        query_norm,
        key_norm,
        float(attention.scaling),
        _Linears([attention.o_proj], join=join, pack=pack),
        _Norm(layer.post_attention_layernorm),
        _Linears([mlp.gate_proj, mlp.up_proj], join=join, pack=pack),
        mlp.act_fn,
        _Linears([mlp.down_proj], join=join, pack=pack),
    )


@torch.no_grad()
def _agrees(decoder: TokenDecoder, model: PreTrainedModel) -> bool:
    """The last token of two short rows, the second padded by two columns, by both ways."""
    ids = torch.tensor(_CHECKED_IDS, device=model.device) % model.config.vocab_size
    visible = torch.ones_like(ids)
    visible[1, :2] = 0
    positions = (visible.cumsum(1) - 1).clamp_min(0)

    def read(columns: slice, cache: Cache) -> Tensor:
        inputs = {
            "input_ids": ids[:, columns],
            "position_ids": positions[:, columns],
            "attention_mask": visible[:, : columns.stop],
            cache_argument(model): cache,
        }
        hidden: Tensor = model.base_model(**inputs, use_cache=True).last_hidden_state
        return hidden[:, -1]

    layers, last = model.config.num_hidden_layers, ids.shape[1] - 1
    theirs, ours = new_cache(layers), new_cache(layers)
    read(slice(0, last), theirs)
    want = read(slice(last, last + 1), theirs)
    read(slice(0, last), ours)
    got = decoder.step(ids[:, last], positions[:, last], ours, visible.bool())
    output: Any = model.get_output_embeddings()
    apart = max(_apart(got, want), _apart(decoder.logits(want), output(want)))
    return apart <= _TOLERANCE[model.dtype]


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative norm of the difference."""
    return float((one.double() - other.double()).norm() / other.double().norm())
