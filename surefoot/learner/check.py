"""Is a layout right for this model? Compared with plain row-by-row forwarding, gradients too.

Owns the load-time check of every layout and the measurement of `ratio_noise`.
Refuses to own the layouts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot import draws
from surefoot.errors import ModelError
from surefoot.learner.layouts import NAMES, Bundle, Name, build
from surefoot.learner.scorer import Scorer
from surefoot.models.memory import out_of_memory
from surefoot.models.recompute import recomputes

_TOLERANCE = 1e-4
_PROMPT = 9
_LENGTHS = (6, 1, 4)


@dataclass(frozen=True)
class LayoutCheck:
    """Which layouts are right, why the others are off, and the noise between two right ones."""

    allowed: tuple[Name, ...]
    refused: Mapping[Name, str]
    ratio_noise: float
    """Root mean square difference (nats per token) of two layouts at equal weights, in the
    precision of training."""


def check_layouts(scorer: Scorer, *, seed: int) -> LayoutCheck:
    """Compare each layout with the model's own logits on one random group, in float32.

    Values and gradients must agree to 1e-4 (relative norm). A layout that fails is off for this
    model; if even row-by-row fails, the head is not one we compute right: ModelError.
    """
    bundle = _random_bundle(scorer, seed)
    exact = _exact_copy(scorer)
    want_logp, want_grad = _plain(exact, bundle)
    refused: dict[Name, str] = {}
    for name in NAMES:
        reason = _static_refusal(scorer, name)
        if reason is None:
            reason = _compared(exact, name, bundle, want_logp, want_grad)
        if reason is not None:
            refused[name] = reason
    exact.model.zero_grad(set_to_none=True)
    if "rows" in refused:
        raise ModelError(
            f"model.path: log-probabilities of {type(scorer.model).__name__} computed from its "
            f"hidden states do not match its own logits ({refused['rows']}); this model has a "
            "head that surefoot does not know"
        )
    allowed = tuple(name for name in NAMES if name not in refused)
    return LayoutCheck(allowed, refused, _noise(scorer, allowed, bundle))


def _random_bundle(scorer: Scorer, seed: int) -> Bundle:
    vocabulary = scorer.head.weight_VH.shape[0]
    ids = draws.bits(seed, "layout-check", range(_PROMPT + sum(_LENGTHS))) % vocabulary
    tokens = [int(token) for token in ids]
    completions, at = [], _PROMPT
    for length in _LENGTHS:
        completions.append(tuple(tokens[at : at + length]))
        at += length
    return Bundle(tuple(tokens[:_PROMPT]), tuple(completions), tuple(range(len(_LENGTHS))))


def _exact_copy(scorer: Scorer) -> Scorer:
    """The same weights in float32 without autocast; the scorer's own module where it is so."""
    dtype = scorer.model.dtype
    model = scorer.model
    if dtype not in (torch.float32, torch.float64):
        dtype = torch.float32
        model = copy.deepcopy(model).float()
    return Scorer(model, compute=dtype, head_dtype=dtype, temperature=scorer.temperature)


def _plain(scorer: Scorer, bundle: Bundle) -> tuple[Tensor, Tensor]:
    """Log-probabilities and gradient by the model's own forward, a row at a time."""
    parts = []
    for completion in bundle.completions:
        ids = torch.tensor([(*bundle.prompt, *completion)], device=scorer.device)
        logits = scorer.model(input_ids=ids).logits[0].float()
        logp = (logits / scorer.temperature).log_softmax(-1)
        start = len(bundle.prompt) - 1
        picked = logp[start:-1].gather(1, ids[0, start + 1 :, None])[:, 0]
        parts.append(picked)
    logp_N = torch.cat(parts)
    return logp_N.detach(), _gradient(scorer, logp_N)


def _compared(
    scorer: Scorer, name: Name, bundle: Bundle, want_logp: Tensor, want_grad: Tensor
) -> str | None:
    """Why a layout is wrong for this model, or None."""
    try:
        logp, grad = _through(scorer, name, bundle)
    except (ValueError, TypeError, RuntimeError, IndexError, MemoryError) as error:
        if out_of_memory(error):
            raise ModelError(
                "model.path: memory runs out at the model's first test, on "
                f"{_PROMPT + sum(_LENGTHS)} tokens; take a smaller model or a machine with more "
                "memory"
            ) from error
        # Some models cannot take a 4-D mask or explicit positions at all.
        return f"fails: {str(error).splitlines()[0]}"
    error_size = max(_distance(logp, want_logp), _distance(grad, want_grad))
    return None if error_size <= _TOLERANCE else f"differs from row by row by {error_size:.1e}"


def _through(scorer: Scorer, name: Name, bundle: Bundle) -> tuple[Tensor, Tensor]:
    part = build(name, [bundle])
    logp_N = scorer(part).logp_N
    order = torch.argsort(part.rows_N * 1000 + part.columns_N, stable=True)
    ordered_N = logp_N[order.to(logp_N.device)]
    return ordered_N.detach(), _gradient(scorer, ordered_N)


def _gradient(scorer: Scorer, logp_N: Tensor) -> Tensor:
    """Gradient of a fixed mixture of the log-probabilities, as one vector."""
    weights_N = torch.linspace(-1.0, 1.0, logp_N.shape[0], device=logp_N.device) + 0.1
    scorer.model.zero_grad(set_to_none=True)
    (logp_N * weights_N).sum().backward()
    grads = [p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None]
    out = torch.cat(grads).clone()
    scorer.model.zero_grad(set_to_none=True)
    return out


def _distance(got: Tensor, want: Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def has_windows(model: PreTrainedModel) -> bool:
    """Whether a window cuts off what lies far back, as the prompt does in a packed row."""
    config = model.config.get_text_config().to_dict()
    kinds = config.get("layer_types")
    if not kinds:
        return bool(config.get("sliding_window"))
    return any("sliding" in kind or "chunked" in kind for kind in kinds)


def _static_refusal(scorer: Scorer, name: Name) -> str | None:
    """Packed rows put completions far from their prompt, where a sliding window cuts them off; a
    cache holds the activations that are to be computed again."""
    if name == "prefix" and recomputes(scorer.model):
        return "model.gradient_checkpointing keeps no cache of the prompt"
    if name == "packed" and has_windows(scorer.model):
        return "this model has sliding-window layers"
    return None


def _noise(scorer: Scorer, allowed: tuple[Name, ...], bundle: Bundle) -> float:
    with torch.no_grad():
        values = []
        for name in allowed[-2:]:
            part = build(name, [bundle])
            logp_N = scorer(part).logp_N.double()
            order = torch.argsort(part.rows_N * 1000 + part.columns_N, stable=True)
            values.append(logp_N[order.to(logp_N.device)])
    if len(values) < 2:
        return 0.0
    return float((values[0] - values[1]).square().mean().sqrt())
