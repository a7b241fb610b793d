"""The norm before a product, on CPU: fewer passes over memory than the modules take.

Under autocast the module of transformers gives float32, which each of the two or three linear
layers behind it rounds to the compute precision on its own, and each rounds its gradient back. Here
the norm is rounded once, as it is computed; the products see the same numbers.

Owns the function and which modules it stands in for: the norms before attention and before the
feed-forward part of the families whose norms feed linear layers alone.
Refuses to own the final norm, whose float32 the LM head reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose norms are x / sqrt(mean(x^2) + eps) * weight, before a product."""
_NAMES = ("input_layernorm", "post_attention_layernorm")


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        (gradient,) = gradients
        size, exact = x.shape[-1], inverse.dtype
        wide = weight.to(exact)
        along = (gradient * x.to(exact)).reshape(-1, size)
        inverse_N = inverse.reshape(-1)
        of_weight = torch.mv(along.t(), inverse_N) if ctx.needs_input_grad[1] else None
        share = torch.mv(along, wide).mul_(inverse_N.pow(3) / size).reshape(inverse.shape)
        of_x = (gradient * wide).mul_(inverse).addcmul_(x.to(exact), share, value=-1.0)
        weight_gradient = None if of_weight is None else of_weight.to(weight.dtype)
        return of_x.to(x.dtype), weight_gradient, None, None


def norm_before_product(norm: Any, x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of a norm, in the precision of the product behind it.

    Shapes: x [..., H] -> [..., H], in autocast's precision if that is on, else in that of x.
    """
    out = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        out = torch.get_autocast_dtype(x.device.type)
    made: Tensor = _RootMeanSquare.apply(x, norm.weight, norm.variance_epsilon, out)
    return made


def use_norm_before_product(model: PreTrainedModel) -> None:
    """Let the norms of a CPU model of these families compute so; its weights stay where they are.

    A model whose norms are named or built in another way keeps its own.
    """
    if model.device.type != "cpu" or model.config.model_type not in FAMILIES:
        return
    layers: Any = getattr(model.base_model, "layers", ())
    for layer in layers:
        for name in _NAMES:
            norm = getattr(layer, name, None)
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                norm.forward = partial(norm_before_product, norm)
