"""Which layouts a critic's own backbone takes, where it is no copy of the policy.

Owns the comparison of every layout with the backbone's states row by row, gradients too.
Refuses to own the policy's check (`check`), and where the backbone comes from (`models`).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from surefoot import draws
from surefoot.errors import ModelError
from surefoot.learner.check import has_windows
from surefoot.learner.layouts import NAMES, Bundle, Name, build
from surefoot.learner.scorer import Backbone

_TOLERANCE = 1e-4
_PROMPT = 9
_LENGTHS = (6, 1, 4)


def check_backbone(backbone: Backbone, *, vocabulary: int, seed: int) -> tuple[Name, ...]:
    """The layouts that give a foreign backbone's own states, row by row; its gradients too.

    Compared on one random group in float32 at least, to 1e-4 (relative norm). ModelError if even
    `rows` differs, which forwards no token after the last state that is read.
    """
    ids = [int(i) for i in draws.bits(seed, "critic-check", range(_PROMPT + sum(_LENGTHS)))]
    tokens = iter(token % vocabulary for token in ids)
    prompt = tuple(next(tokens) for _ in range(_PROMPT))
    completions = tuple(tuple(next(tokens) for _ in range(length)) for length in _LENGTHS)
    bundle = Bundle(prompt, completions, tuple(range(len(_LENGTHS))))
    model = backbone.model
    if model.dtype not in (torch.float32, torch.float64):
        model = copy.deepcopy(model).float()
    exact = Backbone(model, compute=model.dtype)
    want = _attempt(exact, None, bundle)
    allowed = tuple(
        name
        for name in NAMES
        if not (name == "packed" and has_windows(model))
        and _near(_attempt(exact, name, bundle), want)
    )
    if "rows" not in allowed:
        raise ModelError(
            f"critic.path: the states of {type(model).__name__} depend on tokens that come later, "
            "or it is no decoder at all, so that it cannot say what is to be expected; take a "
            "causal language model, or a reward model made from one"
        )
    return allowed


def _attempt(exact: Backbone, name: Name | None, bundle: Bundle) -> tuple[Tensor, Tensor] | None:
    """States in a layout (None: by the model itself, a row at a time) and a gradient through them;
    None where the model cannot be called so."""
    try:
        states_NH = _alone(exact, bundle) if name is None else _through(exact, name, bundle)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        return None
    count, size = states_NH.shape
    mixture_NH = torch.outer(torch.linspace(-1.0, 1.0, count), torch.linspace(-1.0, 1.0, size))
    exact.model.zero_grad(set_to_none=True)
    (states_NH * (mixture_NH + 0.1).to(states_NH)).sum().backward()
    grads = [p.grad.flatten() for p in exact.model.parameters() if p.grad is not None]
    exact.model.zero_grad(set_to_none=True)
    return states_NH.detach(), torch.cat(grads)


def _alone(exact: Backbone, bundle: Bundle) -> Tensor:
    states = []
    for completion in bundle.completions:
        ids = torch.tensor([(*bundle.prompt, *completion)], device=exact.device)
        hidden = exact.model.base_model(input_ids=ids).last_hidden_state[0]
        states.append(hidden[len(bundle.prompt) - 1 : -1])
    return torch.cat(states)


def _through(exact: Backbone, name: Name, bundle: Bundle) -> Tensor:
    part = build(name, [bundle])
    order_N = torch.argsort(part.rows_N * 1000 + part.columns_N, stable=True)
    return exact.hidden(part)[order_N.to(exact.device)]


def _near(got: tuple[Tensor, Tensor] | None, want: tuple[Tensor, Tensor] | None) -> bool:
    if got is None or want is None:
        return False
    return all(
        one.shape == other.shape and bool((one - other).norm() <= _TOLERANCE * other.norm())
        for one, other in zip(got, want, strict=True)
    )
