"""The row value `weight: likelihood`: from the head to the gradient, and beside TRL's own code."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.given import Bench, given, make_task, other_model
from support.hand import apart
from support.tiny import make_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import DPOTrainer

from surefoot.data import Pair
from surefoot.learner import head as module
from surefoot.learner.head import Head, token_logp, token_logp_and_collision
from surefoot.methods import Preference, get, with_fields

ROWS, HIDDEN, VOCABULARY = 11, 6, 17


def weighed(name: str = "dpo") -> Preference:
    row = with_fields(get(name), {"weight": "likelihood"})
    assert isinstance(row, Preference)
    return row


# The head.


def test_a_hand_number() -> None:
    """Probabilities 1/4 and 3/4: their squares sum to 10/16."""
    weight = nn.Parameter(torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64))
    head = Head(weight, None, 1.0, None, torch.float64)
    h = torch.ones(2, 1, dtype=torch.float64)
    logp_N, _, collision_N = token_logp_and_collision(
        h, head, torch.tensor([0, 1]), temperature=1.0
    )
    assert logp_N.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert collision_N.tolist() == pytest.approx([math.log(10 / 16)] * 2)


@pytest.mark.parametrize("kept", [0, 6, ROWS])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_chunks_agree_with_the_whole_matrix_and_leave_the_gradient_alone(
    kept: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * VOCABULARY * 8)  # chunks of four rows
    monkeypatch.setattr(module, "_KEPT_BYTES", kept * VOCABULARY * 8)
    generator = torch.Generator().manual_seed(0)
    # Logits of up to a hundred: p and p^2 underflow at most places.
    weight = nn.Parameter(20 * torch.randn(VOCABULARY, HIDDEN, generator=generator).double())
    head = Head(weight, None, 1.0, softcap, torch.float64)
    h = torch.randn(ROWS, HIDDEN, generator=generator).double().requires_grad_()
    targets = torch.arange(ROWS) % VOCABULARY
    logits = h @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp_NV = (logits / 0.7).log_softmax(-1)
    got = token_logp_and_collision(h, head, targets, temperature=0.7)
    plain = token_logp(h, head, targets, temperature=0.7)
    torch.testing.assert_close(got[2], (2 * logp_NV).logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert not got[2].requires_grad
    assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1])
    grads = [torch.autograd.grad(out[0].sum(), [h, weight]) for out in (got, plain)]
    assert all(map(torch.equal, *grads))


# A step.


def weight_of(model: PreTrainedModel, pair: Pair) -> float:
    """min(1, w_w w_l) of the model's own softmax, an answer at a time."""
    log_weight = 0.0
    for answer in (pair.chosen, pair.rejected):
        ids = torch.tensor([(*pair.prompt, *answer)])
        with torch.no_grad():
            p_TV = model(input_ids=ids).logits[0, len(pair.prompt) - 1 : -1].softmax(-1)
        picked = p_TV[range(len(answer)), list(answer)]
        log_weight += float((picked / p_TV.square().sum(-1)).log().mean())
    return min(1.0, math.exp(log_weight))


def bench_of(row: Preference, pairs: list[Pair], folder: Path) -> Bench:
    return make_task(row, pairs, folder, reference=other_model())


@pytest.mark.parametrize("name", ["dpo", "simpo", "ipo"])
def test_each_pair_counts_by_its_weight_and_the_weight_has_no_gradient(
    name: str, tmp_path: Path
) -> None:
    """Against one step a pair without weights: the mean of w loss, and of w gradient."""
    plain = get(name)
    assert isinstance(plain, Preference)
    bench = bench_of(weighed(name), given("pairs"), tmp_path)
    step = bench.step(given("pairs"))
    weights = [weight_of(bench.model, pair) for pair in given("pairs")]
    assert len(set(weights)) == 3 and min(weights) < 0.9
    alone = [bench_of(plain, [pair], tmp_path).step([pair]) for pair in given("pairs")]
    want = sum(w * one.done.loss for w, one in zip(weights, alone, strict=True)) / 3
    assert step.done.loss == pytest.approx(want, rel=1e-9)
    parts = [w * one.gradient / 3 for w, one in zip(weights, alone, strict=True)]
    assert apart(step.gradient, torch.stack(parts).sum(0)) < 1e-9
    assert step.done.sums["pair_weight"] == pytest.approx(sum(weights), rel=1e-9)


def test_the_likelihood_of_the_chosen_answer_is_not_weighed(tmp_path: Path) -> None:
    losses = {}
    for nll in (0.0, 2.0):
        row = with_fields(weighed(), {"nll": nll})
        assert isinstance(row, Preference)
        losses[nll] = bench_of(row, given("pairs"), tmp_path).step(given("pairs"))
    nll_loss = losses[2.0].metrics["nll_loss"]
    assert nll_loss is not None
    gap = losses[2.0].done.loss - losses[0.0].done.loss
    assert gap == pytest.approx(2.0 * float(nll_loss), rel=1e-9)
    assert losses[2.0].metrics["pair_loss"] == pytest.approx(losses[0.0].done.loss, rel=1e-9)


# TRL.


class Accelerator:
    device = torch.device("cpu")

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather


def trl_loss(model: PreTrainedModel, other: PreTrainedModel, pairs: list[Pair]) -> Tensor:
    """`DPOTrainer._compute_loss` with use_weighting, on the whole rows that it would be given."""
    texts = [(p.prompt, p.chosen) for p in pairs] + [(p.prompt, p.rejected) for p in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    completion, attention = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor((*prompt, *answer))
        attention[row, :end], completion[row, len(prompt) : end] = 1, 1

    def forward(of: PreTrainedModel) -> Any:
        def outputs(*, labels: Tensor, **_: Any) -> Any:
            logp = of(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
            shown = labels[:, 1:] != -100
            picked = logp.gather(-1, ids[:, 1:, None])[..., 0]
            zero = torch.zeros_like(picked)
            return SimpleNamespace(
                log_probs=torch.where(shown, picked, 0.0),
                log_sum_sq_probs=(2 * logp).logsumexp(-1),
                entropy=zero,
                mean_logits=zero,
                is_top1=zero.bool(),
            )

        return outputs

    trainer = SimpleNamespace(
        model=model,
        ref_model=forward(other),
        accelerator=Accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.1,
        label_smoothing=0.0,
        use_weighting=True,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    loss: Tensor = DPOTrainer._compute_loss(trainer, forward(model), inputs, False)
    return loss


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_trl_gives_the_same_loss_and_gradient_where_no_weight_is_held_at_one(
    tmp_path: Path,
) -> None:
    """TRL does not hold weights at 1, as the released code of the paper does."""
    model, other = make_model(dtype=torch.float64), make_model(seed=1, dtype=torch.float64)
    held = [weight_of(model, pair) == 1.0 for pair in given("pairs")]
    pairs = [pair for pair, is_held in zip(given("pairs"), held, strict=True) if not is_held]
    assert len(pairs) >= 2
    bench = make_task(weighed(), pairs, tmp_path, model=model, reference=other)
    step = bench.step(pairs)
    loss = trl_loss(model, other, pairs)
    bench.optimizer.clear()
    loss.backward()
    assert step.done.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    parameters = bench.optimizer.parameters
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert apart(step.gradient, torch.cat([g.flatten() for g in grads])) < 1e-6
