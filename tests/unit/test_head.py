"""The chunked head against torch's own log_softmax on the whole matrix, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tiny import architectures, llama_config, make_model
from torch import Tensor, nn
from transformers import CohereConfig, Gemma2Config, GraniteConfig, PreTrainedConfig

from surefoot.errors import ModelError
from surefoot.learner import head as module
from surefoot.learner.check import check_layouts
from surefoot.learner.head import Head, find_head, token_logp
from surefoot.learner.scorer import Scorer

ROWS, HIDDEN, VOCABULARY = 11, 6, 17
SIZES = {
    name: value
    for name, value in llama_config().to_dict().items()
    if name.startswith(("vocab", "hidden_s", "inter", "num_", "head_d", "max_pos"))
}
UNUSUAL: dict[str, tuple[PreTrainedConfig, float, float | None]] = {
    "cohere": (CohereConfig(**SIZES, logit_scale=0.25), 0.25, None),
    "granite": (GraniteConfig(**SIZES, logits_scaling=4.0), 0.25, None),
    "gemma2": (Gemma2Config(**SIZES, final_logit_softcapping=5.0), 1.0, 5.0),
    "llama": (llama_config(), 1.0, None),
}


def plain(h: Tensor, head: Head, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = h @ head.weight_VH.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("bias", "scale"), [(False, 1.0), (True, 1.0), (True, 0.25)])
@pytest.mark.parametrize("wants", ["logp", "entropy", "both"])
@pytest.mark.parametrize("kept", [0, 6, ROWS])
def test_values_and_gradients(
    temperature: float,
    softcap: float | None,
    bias: bool,
    scale: float,
    wants: str,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * VOCABULARY * 8)  # chunks of four rows
    monkeypatch.setattr(module, "_KEPT_BYTES", kept * VOCABULARY * 8)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = nn.Parameter(random(VOCABULARY, HIDDEN))
    shift = nn.Parameter(random(VOCABULARY)) if bias else None
    head = Head(weight, shift, scale, softcap, torch.float64)
    h = random(ROWS, HIDDEN).requires_grad_()
    targets = torch.arange(ROWS) % VOCABULARY
    leaves = [h, weight, *([shift] if shift is not None else [])]
    a, b = random(ROWS), random(ROWS)
    grads = []
    values = []
    for function in (
        lambda: token_logp(h, head, targets, temperature=temperature),
        lambda: plain(h, head, targets, temperature),
    ):
        logp, entropy = function()
        values.append((logp.detach(), entropy.detach()))
        loss = torch.zeros((), dtype=torch.float64)
        if wants != "entropy":
            loss = loss + (a * logp).sum()
        if wants != "logp":
            loss = loss + (b * entropy).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_a_hand_number() -> None:
    # Logits 0 and ln 3: probabilities 1/4 and 3/4.
    weight = nn.Parameter(torch.tensor([[0.0], [1.0986122886681098]], dtype=torch.float64))
    head = Head(weight, None, 1.0, None, torch.float64)
    h = torch.ones(2, 1, dtype=torch.float64)
    logp, entropy = token_logp(h, head, torch.tensor([0, 1]), temperature=1.0)
    assert logp.tolist() == pytest.approx([-1.3862943611, -0.2876820724])
    assert entropy.tolist() == pytest.approx([0.5623351446, 0.5623351446])


def scorer_of(model: Any) -> Scorer:
    return Scorer(model, compute=torch.float32, head_dtype=torch.float32, temperature=0.7)


@pytest.mark.parametrize("name", UNUSUAL)
def test_scale_and_cap_are_read_from_the_config(name: str) -> None:
    config, scale, softcap = UNUSUAL[name]
    model = make_model(config)
    head = find_head(model, dtype=torch.float64)
    assert (head.scale, head.softcap, head.bias_V) == (scale, softcap, None)
    assert head.weight_VH is model.lm_head.weight
    # The model's own logits, values and gradients: the check refuses what differs.
    assert "rows" in check_layouts(scorer_of(model), seed=0).allowed


def test_a_head_that_does_more_than_we_know_is_refused() -> None:
    model = make_model()
    forward = model.forward

    def doubled(**inputs: Any) -> Any:
        out = forward(**inputs)
        out.logits = 2 * out.logits
        return out

    model.forward = doubled
    with pytest.raises(ModelError, match=r"model\.path: .*LlamaForCausalLM.* head that surefoot"):
        check_layouts(scorer_of(model), seed=0)


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = make_model(architectures()["gpt2"])
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=r"model\.path: .*GPT2LMHeadModel is not a linear layer"):
        find_head(model, dtype=torch.float32)


def test_a_second_backward_pass_finds_the_same_gradient() -> None:
    """The kept softmax is overwritten by the first."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator).double())
    head = Head(weight, None, 1.0, None, torch.float64)
    h = torch.randn(ROWS, HIDDEN, generator=generator).double().requires_grad_()
    logp, _ = token_logp(h, head, torch.arange(ROWS) % VOCABULARY, temperature=0.7)
    first = torch.autograd.grad(logp.sum(), [h, weight], retain_graph=True)
    second = torch.autograd.grad(logp.sum(), [h, weight])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_nothing_is_kept_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kept_rows", lambda rows, head: pytest.fail("keeps memory"))
    weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))
    head = Head(weight, None, 1.0, None, torch.float32)
    with torch.no_grad():
        logp, _ = token_logp(torch.zeros(2, HIDDEN), head, torch.tensor([0, 1]), temperature=1.0)
    assert logp.grad_fn is None
    torch.testing.assert_close(logp, torch.full((2,), -math.log(VOCABULARY)))


@pytest.mark.parametrize("kept", [0, 6, ROWS])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("wants_entropy", [False, True])
def test_a_bfloat16_head_multiplies_in_it_and_sums_in_float32(
    kept: int, scale: float, wants_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * VOCABULARY * 4)
    monkeypatch.setattr(module, "_KEPT_BYTES", kept * VOCABULARY * 2)
    generator = torch.Generator().manual_seed(0)
    # Values that bfloat16 holds, so that only products and gradients are rounded.
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16().float())
    shift = nn.Parameter(torch.randn(VOCABULARY, generator=generator))
    h = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().float().requires_grad_()
    a = torch.randn(ROWS, generator=generator)
    targets = torch.arange(ROWS) % VOCABULARY
    leaves = [h, weight, shift]
    exact = plain(h, Head(weight, shift, scale, None, torch.float32), targets, 0.7)
    low = token_logp(h, Head(weight, shift, scale, None, torch.bfloat16), targets, temperature=0.7)
    assert [value.dtype for value in low] == [torch.float32] * 2
    for got, want in zip(low, exact, strict=True):
        assert float((got - want).detach().abs().max()) < 0.03
    losses = [(a * logp).sum() + wants_entropy * entropy.sum() for logp, entropy in (low, exact)]
    if not wants_entropy:
        losses[0] = (a * low[0]).sum()
    got, want = (torch.autograd.grad(loss, leaves) for loss in losses)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == other.dtype
        assert float((mine - other).norm() / other.norm()) < 0.01
