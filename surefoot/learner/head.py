"""The LM head on chosen positions: log-probability and entropy of one token each, in chunks.

Owns the only place where logits of the whole vocabulary exist, a chunk at a time, in
`model.head_dtype`. Refuses to own which positions are scored, and every loss.

The backward pass computes a chunk's logits again instead of keeping them: at vocabulary size a
kept chunk costs more memory traffic than the product that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into logits: weight, bias, and the scalar tricks of some models.

    logits = cap(scale * (h W^T + b)) with cap(x) = softcap * tanh(x / softcap).
    """

    weight_VH: nn.Parameter
    bias_V: nn.Parameter | None
    scale: float
    softcap: float | None
    dtype: torch.dtype


def find_head(model: PreTrainedModel, *, dtype: torch.dtype) -> Head:
    """Read the head of a causal language model; the load-time layout check proves it right."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"model.path: the output layer of {type(model).__name__} is not a linear layer; only "
            "causal language models with a linear LM head can be trained"
        )
    config = model.config.get_text_config().to_dict()
    scale = float(config.get("logit_scale") or 1.0)
    if config.get("logits_scaling"):
        scale = scale / float(config["logits_scaling"])
    return Head(layer.weight, layer.bias, scale, config.get("final_logit_softcapping"), dtype)


def token_logp(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, softmax(logits/temperature).

    Shapes: hidden_NH, targets_N (int64) -> logp_N, entropy_N in the head's dtype (nats). Both are
    differentiable; an entropy that no loss reads costs nothing in the backward pass.
    """
    return _TokenLogp.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_NH, head.weight_VH, head.bias_V, targets_N, head, temperature
    )


def _chunks(rows: int, head: Head) -> list[slice]:
    width = head.weight_VH.shape[0] * head.dtype.itemsize
    size = max(1, _CHUNK_BYTES // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    """Scaled and capped logits of a chunk, before the temperature."""
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias
    if head.scale != 1.0:
        logits *= head.scale
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits


class _TokenLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden = hidden_NH.detach().to(head.dtype)
            weight = weight_VH.detach().to(head.dtype)
            bias = None if bias_V is None else bias_V.detach().to(head.dtype)
            logp_N = hidden.new_empty(hidden.shape[0])
            entropy_N, normalizer_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
            for part in _chunks(hidden.shape[0], head):
                logits = _logits(hidden[part], weight, bias, head)
                if temperature != 1.0:
                    logits /= temperature
                top = logits.amax(1, keepdim=True)
                logits -= top
                picked = logits.gather(1, targets_N[part, None])[:, 0]
                weights = logits.exp()
                total = weights.sum(1)
                normalizer = total.log()
                # sum p (log p): the products of weights and shifted logits, over the total.
                cross = torch.linalg.vecdot(weights, logits)
                logp_N[part] = picked - normalizer
                entropy_N[part] = normalizer - cross / total
                normalizer_N[part] = normalizer + top[:, 0]
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N)
        ctx.head, ctx.temperature = head, temperature
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden, weight = hidden_NH.to(head.dtype), weight_VH.to(head.dtype)
            bias = None if bias_V is None else bias_V.to(head.dtype)
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight)
            grad_bias = None if bias is None else torch.zeros_like(bias)
            for part in _chunks(hidden.shape[0], head):
                logits = _logits(hidden[part], weight, bias, head)
                slope = None
                if head.softcap is not None:
                    slope = 1.0 - (logits / head.softcap).square()
                if temperature != 1.0:
                    logits /= temperature
                grad = _grad_logits(
                    logits.sub_(normalizer_N[part, None]),
                    targets_N[part],
                    None if grad_logp_N is None else grad_logp_N[part],
                    None if grad_entropy_N is None else grad_entropy_N[part],
                    entropy_N[part],
                )
                if head.scale != temperature:
                    grad *= head.scale / temperature
                if slope is not None:
                    grad *= slope
                torch.mm(grad, weight, out=grad_hidden[part])
                grad_weight.addmm_(grad.T, hidden[part])
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        # A bias enters before the scale, as the product does, so it shares the scaled gradient.
        return (
            grad_hidden.to(hidden_NH.dtype),
            grad_weight.to(weight_VH.dtype),
            None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _grad_logits(
    logp_NV: Tensor,
    targets_N: Tensor,
    grad_logp_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    entropy_N: Tensor,
) -> Tensor:
    """Gradient of g . logp + e . entropy by the tempered logits; overwrites `logp_NV`.

    d logp / d z_v = 1[v = target] - p_v and d H / d z_v = -p_v (log p_v + H).
    """
    if grad_entropy_N is None:
        assert grad_logp_N is not None
        grad_NV = logp_NV.exp_().mul_(-grad_logp_N[:, None])
    else:
        probability_NV = logp_NV.exp()
        slope_NV = logp_NV.add_(entropy_N[:, None]).mul_(-grad_entropy_N[:, None])
        if grad_logp_N is not None:
            slope_NV.sub_(grad_logp_N[:, None])
        grad_NV = slope_NV.mul_(probability_NV)
    if grad_logp_N is not None:
        grad_NV.scatter_add_(1, targets_N[:, None], grad_logp_N[:, None])
    return grad_NV
