"""Attention for short rows on CPU, where the fused kernel's backward pass is slow.

Owns one attention function, registered with transformers under `NAME`: float32 scores by batched
matrix products over key-value heads. On the shapes of short completions the fused kernel took 2 to
7 times as long, forward and backward in bfloat16 (bench/results/attention.txt); for long queries
it is called instead. The choice depends on shapes alone, so passes with and without gradient agree.
Refuses to own masks: they come as transformers makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "surefoot_cpu"
_LONGEST_QUERY = 256
_LOWEST = torch.finfo(torch.float32).min


class _Bias:
    """The additive mask of the last call, expanded to the heads: all layers share one mask."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.heads = 0
        self.groups = 0
        self.bias: Tensor | None = None

    def of(self, mask_B1QK: Tensor, heads: int, groups: int, dtype: torch.dtype) -> Tensor:
        known = self.bias is not None and self.bias.dtype == dtype
        shape = (heads, groups)
        if not known or self.mask is not mask_B1QK or (self.heads, self.groups) != shape:
            batch, _, rows, columns = mask_B1QK.shape
            bias = mask_B1QK
            if mask_B1QK.dtype == torch.bool:
                bias = torch.zeros(mask_B1QK.shape).masked_fill_(~mask_B1QK, _LOWEST)
            # Finite, so that padding which sees nothing (beyond a sliding window) gives no NaN:
            # weight 0 times NaN would reach the rows that are read.
            wide = (
                bias.to(dtype)
                .clamp_min(_LOWEST)[:, :, None]
                .expand(batch, heads, groups, rows, columns)
            )
            self.bias = wide.reshape(batch * heads, groups * rows, columns)
            self.mask, self.heads, self.groups = mask_B1QK, heads, groups
        assert self.bias is not None
        return self.bias


_bias = _Bias()


def short_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T * scaling + mask) v, as transformers calls it.

    Shapes: query [B, H, Q, D], key and value [B, H_kv, K, D], attention_mask bool or additive
    [B, 1, Q, K] -> output [B, Q, H, D].
    """
    rows = query.shape[2]
    plain = dropout == 0.0 and options.get("position_bias") is None
    mask = attention_mask
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if mask is None and rows > 1 and causal:
        columns = key.shape[2]
        ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        mask = ones.tril_(columns - rows).expand(query.shape[0], 1, -1, -1)
    if not plain or mask is None or not 1 < rows <= _LONGEST_QUERY or mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    batch, heads, _, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    scale = size**-0.5 if scaling is None else scaling
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = (query.to(exact) * scale).reshape(batch * shared, groups * rows, size)
    k = key.to(exact).reshape(batch * shared, -1, size)
    v = value.to(exact).reshape(batch * shared, -1, value.shape[3])
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.baddbmm(_bias.of(mask, shared, groups, exact), q, k.transpose(1, 2))
        out = torch.bmm(scores.softmax(-1), v)
    out = out.reshape(batch, heads, rows, -1).transpose(1, 2)
    return out.to(query.dtype).contiguous(), None


def use_short_attention(model: PreTrainedModel) -> None:
    """Switch a CPU model that would use the fused kernel to `short_attention`."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, short_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
