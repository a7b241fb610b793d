"""The norm before a product against the modules of transformers, in value and gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny import architectures, make_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from surefoot.learner.norms import norm_before_product, use_norm_before_product


def norm(size: int = 12) -> LlamaRMSNorm:
    module = LlamaRMSNorm(size, eps=1e-5)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2.0, size))
    return module


def through(forward: Any, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = forward(x)
    weights = torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape)
    (out.float() * weights).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, module.weight.grad.clone()  # type: ignore[union-attr, operator]


def test_by_hand() -> None:
    """Mean of squares of (3, 4) is 12.5; with weights 1 and 2 and eps 0."""
    module = LlamaRMSNorm(2, eps=0.0)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0]))
    out = norm_before_product(module, torch.tensor([[3.0, 4.0]]))
    assert out.tolist() == [pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_value_and_gradients_are_those_of_the_module(scale: float) -> None:
    module = norm()
    x = scale * torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    want = through(module, module, x)
    got = through(lambda x: norm_before_product(module, x), module, x)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.allclose(mine, theirs, rtol=2e-5, atol=1e-6 * float(theirs.abs().max()))


def test_gradients_by_differences() -> None:
    module = norm(5).double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm_before_product(module, x), (x, module.weight))


def test_under_autocast_it_is_the_module_rounded_once() -> None:
    module = norm()
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    module.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        got = norm_before_product(module, x)
        assert module(x).dtype is torch.float32 and got.dtype is torch.bfloat16
    apart = (got.double() - module(x).double()).abs() / module(x).double().abs()
    assert float(apart.max()) < 2**-8


def test_bfloat16_weights_and_inputs_stay_bfloat16() -> None:
    module = norm().to(torch.bfloat16)
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    got = through(lambda x: norm_before_product(module, x), module, x)
    wide = norm().double()
    exact = through(wide, wide, x.double())
    assert [t.dtype for t in got] == [torch.bfloat16] * 3
    assert torch.allclose(got[0].double(), exact[0], rtol=2**-7)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3"])
def test_a_model_says_the_same_and_keeps_its_final_norm(name: str) -> None:
    configs = architectures()
    model: Any = make_model(configs[name])
    other = copy.deepcopy(model)
    use_norm_before_product(other)
    ids = torch.arange(6)[None] + 5
    assert torch.allclose(model(ids).logits, other(ids).logits, atol=1e-5)
    changed = [n for n, m in other.named_modules() if "forward" in vars(m)]
    assert bool(changed) == (name in ("llama", "qwen3"))
    assert all("layernorm" in n for n in changed)
    # A copy reads its own weights.
    twin = copy.deepcopy(other)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.allclose(model(ids).logits, other(ids).logits, atol=1e-5)
    assert not torch.allclose(twin(ids).logits, other(ids).logits, atol=1e-3)
