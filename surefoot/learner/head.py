"""The LM head on chosen positions: log-probability and entropy of one token each, in chunks.

Owns the only place where logits of the whole vocabulary exist, a chunk at a time, in
`model.head_dtype`. Refuses to own which positions are scored, and every loss.

The backward pass needs the softmax of every chunk. On CPU, where the product that makes it costs
a quarter of the head's time, it is kept up to a bound of memory; beyond the bound, and elsewhere,
it is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError

_CHUNK_BYTES = 48 << 20
_KEPT_BYTES = 1 << 30


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
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        head,
        temperature,
        torch.is_grad_enabled(),
    )


def _chunks(rows: int, head: Head) -> list[slice]:
    width = head.weight_VH.shape[0] * head.dtype.itemsize
    size = max(1, _CHUNK_BYTES // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _kept_rows(rows: int, head: Head) -> int:
    """How many of the rows keep their softmax for the backward pass."""
    if head.softcap is not None or head.weight_VH.device.type != "cpu":
        return 0
    return min(rows, _KEPT_BYTES // (head.weight_VH.shape[0] * head.dtype.itemsize))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, *, out: Tensor
) -> Tensor:
    """Scaled and capped logits of a chunk, before the temperature, written to `out`."""
    logits = torch.mm(hidden, weight.T, out=out)
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
        is_trained: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden_NH.shape[0]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden = hidden_NH.detach().to(head.dtype)
            weight = weight_VH.detach().to(head.dtype)
            bias = None if bias_V is None else bias_V.detach().to(head.dtype)
            logp_N = hidden.new_empty(rows)
            entropy_N, top_N, total_N = (torch.empty_like(logp_N) for _ in range(3))
            kept = _kept_rows(rows, head) if is_trained else 0
            kept_KV = hidden.new_empty(kept, weight.shape[0])
            # Two buffers serve every chunk: fresh ones would cost as much as the arithmetic.
            chunks = _chunks(rows, head)
            size = chunks[0].stop if chunks else 0
            logits_CV, spare_CV = hidden.new_empty(2, size, weight.shape[0])
            for part in chunks:
                count = part.stop - part.start
                logits = _logits(hidden[part], weight, bias, head, out=logits_CV[:count])
                if temperature != 1.0:
                    logits /= temperature
                top = logits.amax(1, keepdim=True)
                logits -= top
                picked = logits.gather(1, targets_N[part, None])[:, 0]
                is_kept = part.stop <= kept_KV.shape[0]
                weights = kept_KV[part] if is_kept else spare_CV[:count]
                total = torch.exp(logits, out=weights).sum(1)
                normalizer = total.log()
                # sum p (log p): the products of weights and shifted logits, over the total.
                cross = logits.mul_(weights).sum(1)
                logp_N[part] = picked - normalizer
                entropy_N[part] = normalizer - cross / total
                top_N[part], total_N[part] = top[:, 0], total
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, top_N, total_N, entropy_N)
        ctx.head, ctx.temperature, ctx.kept_KV = head, temperature, kept_KV
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, top_N, total_N, entropy_N = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        # What is kept becomes the gradient in place, so a second backward pass finds none; an
        # entropy's gradient needs the logits themselves.
        kept_KV, ctx.kept_KV = ctx.kept_KV, ctx.kept_KV[:0]
        if grad_entropy_N is not None:
            kept_KV = kept_KV[:0]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            hidden, weight = hidden_NH.to(head.dtype), weight_VH.to(head.dtype)
            bias = None if bias_V is None else bias_V.to(head.dtype)
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight)
            grad_bias = None if bias is None else torch.zeros_like(bias)
            chunks = _chunks(hidden.shape[0], head)
            again = [part for part in chunks if part.stop > kept_KV.shape[0]]
            size = max((part.stop - part.start for part in again), default=0)
            logits_CV = hidden.new_empty(size, weight.shape[0])
            for part in chunks:
                grad_logp = None if grad_logp_N is None else grad_logp_N[part]
                if part.stop <= kept_KV.shape[0]:
                    assert grad_logp is not None
                    grad = kept_KV[part].mul_((-grad_logp / total_N[part])[:, None])
                    grad.scatter_add_(1, targets_N[part, None], grad_logp[:, None])
                else:
                    out = logits_CV[: part.stop - part.start]
                    logits = _logits(hidden[part], weight, bias, head, out=out)
                    slope = None
                    if head.softcap is not None:
                        slope = 1.0 - (logits / head.softcap).square()
                    if temperature != 1.0:
                        logits /= temperature
                    normalizer = total_N[part].log().add_(top_N[part])
                    grad = _grad_logits(
                        logits.sub_(normalizer[:, None]),
                        targets_N[part],
                        grad_logp,
                        None if grad_entropy_N is None else grad_entropy_N[part],
                        entropy_N[part],
                    )
                    if slope is not None:
                        grad *= slope
                if head.scale != temperature:
                    grad *= head.scale / temperature
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
