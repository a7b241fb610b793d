"""The chunked head against torch's own log_softmax on the whole matrix, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from surefoot.learner import head as module
from surefoot.learner.head import Head, token_logp

ROWS, HIDDEN, VOCABULARY = 11, 6, 17


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
def test_values_and_gradients(
    temperature: float,
    softcap: float | None,
    bias: bool,
    scale: float,
    wants: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * VOCABULARY * 8)  # chunks of four rows
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
