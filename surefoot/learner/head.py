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

    Shapes: hidden_NH, targets_N (int64) -> logp_N, entropy_N (nats), in the head's dtype but at
    least float32. Both are differentiable; an entropy that no loss reads costs nothing in the
    backward pass.
    """
    logp_N, entropy_N, _ = _scored(hidden_NH, head, targets_N, temperature, collision=False)
    return logp_N, entropy_N


def token_logp_and_collision(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logp`, with log sum_v p_v^2 of each distribution: log_collision_N, a constant."""
    logp_N, entropy_N, log_collision_N = _scored(
        hidden_NH, head, targets_N, temperature, collision=True
    )
    assert log_collision_N is not None
    return logp_N, entropy_N, log_collision_N


def _scored(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature: float, *, collision: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _TokenLogp.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        head,
        temperature,
        torch.is_grad_enabled(),
        collision,
    )


def _wide(head: Head) -> torch.dtype:
    """Precision of the softmax."""
    return torch.promote_types(head.dtype, torch.float32)


def _chunks(start: int, rows: int, head: Head) -> list[slice]:
    width = head.weight_VH.shape[0] * _wide(head).itemsize
    size = max(1, _CHUNK_BYTES // width)
    return [slice(at, min(at + size, rows)) for at in range(start, rows, size)]


def _kept_rows(rows: int, head: Head) -> int:
    """How many of the rows keep their softmax for the backward pass."""
    if head.softcap is not None or head.weight_VH.device.type != "cpu":
        return 0
    return min(rows, _KEPT_BYTES // (head.weight_VH.shape[0] * head.dtype.itemsize))


class _Product:
    """Logits of a chunk before the temperature, in the precision of the softmax.

    One buffer serves every chunk: fresh memory would cost as much as the arithmetic.
    """

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, head: Head):
        self.hidden = hidden_NH.detach().to(head.dtype)
        self.weight = weight_VH.detach().to(head.dtype)
        self.bias = None if bias_V is None else bias_V.detach().to(_wide(head))
        self.head = head
        self.buffer: Tensor | None = None

    def of(self, part: slice, *, out: Tensor) -> Tensor:
        """Writes to `out` [C, V]."""
        if out.dtype == self.head.dtype:
            torch.mm(self.hidden[part], self.weight.T, out=out)
        else:
            if self.buffer is None or len(self.buffer) < len(out):
                self.buffer = self.hidden.new_empty(out.shape)
            narrow = self.buffer[: len(out)]
            out.copy_(torch.mm(self.hidden[part], self.weight.T, out=narrow))
        if self.bias is not None:
            out += self.bias
        if self.head.scale != 1.0:
            out *= self.head.scale
        if self.head.softcap is not None:
            out.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return out


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
        wants_collision: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, words = hidden_NH.shape[0], weight_VH.shape[0]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            product = _Product(hidden_NH, weight_VH, bias_V, head)
            logp_N = hidden_NH.new_empty(rows, dtype=_wide(head))
            entropy_N, top_N, total_N = (torch.empty_like(logp_N) for _ in range(3))
            collision_N = torch.empty_like(logp_N) if wants_collision else None
            kept = _kept_rows(rows, head) if is_trained else 0
            kept_KV = product.hidden.new_empty(kept, words)
            chunks = [*_chunks(0, kept, head), *_chunks(kept, rows, head)]
            size = max((part.stop - part.start for part in chunks), default=0)
            logits_CV, weights_CV = logp_N.new_empty(2, size, words)
            for part in chunks:
                count = part.stop - part.start
                logits = product.of(part, out=logits_CV[:count])
                if temperature != 1.0:
                    logits /= temperature
                top = logits.amax(1, keepdim=True)
                logits -= top
                picked = logits.gather(1, targets_N[part, None])[:, 0]
                is_kept = part.stop <= kept
                direct = is_kept and kept_KV.dtype == logits.dtype
                weights = kept_KV[part] if direct else weights_CV[:count]
                total = torch.exp(logits, out=weights).sum(1)
                if is_kept and not direct:
                    kept_KV[part] = weights
                normalizer = total.log()
                # sum p (log p): the products of weights and shifted logits, over the total.
                cross = logits.mul_(weights).sum(1)
                logp_N[part] = picked - normalizer
                entropy_N[part] = normalizer - cross / total
                if collision_N is not None:
                    # The greatest weight is 1, so the norm is no less.
                    norm = torch.linalg.vector_norm(weights, dim=1)
                    collision_N[part] = 2.0 * (norm.log() - normalizer)
                top_N[part], total_N[part] = top[:, 0], total
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, top_N, total_N, entropy_N)
        ctx.head, ctx.temperature, ctx.kept_KV = head, temperature, kept_KV
        ctx.set_materialize_grads(False)
        if collision_N is not None:
            ctx.mark_non_differentiable(collision_N)
        return logp_N, entropy_N, collision_N

    @staticmethod
    def backward(
        ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None, _: None
    ) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, top_N, total_N, entropy_N = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        # An entropy's gradient needs the logits themselves.
        kept_KV = ctx.kept_KV if grad_entropy_N is None else ctx.kept_KV[:0]
        rows, kept = hidden_NH.shape[0], kept_KV.shape[0]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            product = _Product(hidden_NH, weight_VH, bias_V, head)
            sums = _Sums(product, bias_V, scale=head.scale / temperature)
            if kept:
                assert grad_logp_N is not None
                sums.add_softmax(kept_KV, total_N[:kept], targets_N[:kept], grad_logp_N[:kept])
            chunks = _chunks(kept, rows, head)
            size = max((part.stop - part.start for part in chunks), default=0)
            logits_CV = top_N.new_empty(size, weight_VH.shape[0])
            for part in chunks:
                logits = product.of(part, out=logits_CV[: part.stop - part.start])
                slope = None
                if head.softcap is not None:
                    slope = 1.0 - (logits / head.softcap).square()
                if temperature != 1.0:
                    logits /= temperature
                normalizer = total_N[part].log().add_(top_N[part])
                grad = _grad_logits(
                    logits.sub_(normalizer[:, None]),
                    targets_N[part],
                    None if grad_logp_N is None else grad_logp_N[part],
                    None if grad_entropy_N is None else grad_entropy_N[part],
                    entropy_N[part],
                )
                if slope is not None:
                    grad *= slope
                sums.add(part, grad)
        return (
            sums.hidden_NH.to(hidden_NH.dtype),
            sums.weight_VH.to(weight_VH.dtype),
            None if sums.bias_V is None or bias_V is None else sums.bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
            None,
        )


class _Sums:
    """Gradients by hidden states, weight and bias, added up chunk by chunk in wide precision."""

    def __init__(self, product: _Product, bias_V: Tensor | None, *, scale: float) -> None:
        wide = _wide(product.head)
        self.product = product
        self.scale = scale
        """A bias enters before the scale, as the product does, so it shares this factor."""
        self.hidden_NH = torch.empty_like(product.hidden)
        self.weight_VH = torch.zeros_like(product.weight, dtype=wide)
        self.bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)

    def add(self, part: slice, grad_CV: Tensor) -> None:
        """`grad_CV` is the gradient by the tempered logits of these rows; it may be changed."""
        if self.scale != 1.0:
            grad_CV *= self.scale
        narrow, hidden = grad_CV.to(self.product.head.dtype), self.product.hidden[part]
        torch.mm(narrow, self.product.weight, out=self.hidden_NH[part])
        self._add_product(narrow, hidden)
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)

    def add_softmax(
        self, weights_KV: Tensor, total_K: Tensor, targets_K: Tensor, grad_K: Tensor
    ) -> None:
        """The first rows, g (1[v = target] - w_v / total) by their logits, without that matrix.

        Both terms are products with a factor for each row, which small matrices can take.
        """
        rows = slice(0, len(weights_KV))
        hidden_KH = self.product.hidden[rows]
        hit_K1 = (grad_K * self.scale)[:, None]
        share_K1 = -hit_K1 / total_K[:, None]
        softmax_KH = weights_KV @ self.product.weight
        target_KH = self.product.weight[targets_K]
        self.hidden_NH[rows] = share_K1 * softmax_KH + hit_K1 * target_KH
        self._add_product(weights_KV, (share_K1 * hidden_KH).to(hidden_KH.dtype))
        self.weight_VH.index_add_(0, targets_K, hit_K1 * hidden_KH)
        if self.bias_V is not None:
            wide = self.bias_V.dtype
            self.bias_V += (weights_KV.T @ share_K1.to(weights_KV.dtype))[:, 0].to(wide)
            self.bias_V.index_add_(0, targets_K, hit_K1[:, 0])

    def _add_product(self, left_CV: Tensor, right_CH: Tensor) -> None:
        if self.weight_VH.dtype == left_CV.dtype:
            self.weight_VH.addmm_(left_CV.T, right_CH)
        else:
            self.weight_VH += left_CV.T @ right_CH


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
