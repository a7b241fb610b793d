"""Documents in rows: packed ones give the losses and gradients that each gives alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.hand import apart
from support.tiny import make_model

from surefoot.learner.documents import Document, document_passes, line_width
from surefoot.learner.scorer import Scorer
from surefoot.learner.supervised import nll_loss

LENGTHS = (7, 2, 12, 5, 3)


def document(row: int, length: int, *, trained: Sequence[bool] | None = None) -> Document:
    ids = tuple(8 + (31 * row + 5 * t) % 80 for t in range(length))
    flags = tuple(t > 0 for t in range(length)) if trained is None else tuple(trained)
    return Document(ids, flags, row)


def scorer_of(config: object = None, dtype: torch.dtype = torch.float64) -> Scorer:
    model = make_model(config, seed=0, dtype=dtype)  # type: ignore[arg-type]
    return Scorer(model, compute=dtype, head_dtype=dtype, temperature=1.0)


def gradient(
    scorer: Scorer, lines: Sequence[Sequence[Document]], *, budget: int
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimizer step over the lines."""
    scorer.model.zero_grad(set_to_none=True)
    tokens = sum(document.scored for line in lines for document in line)
    loss_of, total = nll_loss(scorer, tokens=tokens), 0.0
    for part in document_passes(lines, budget=budget):
        out = loss_of(part)
        out.loss.backward()  # type: ignore[no-untyped-call]
        total += float(out.loss.detach())
    found = [p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None]
    return total, torch.cat(found).clone()


def alone(scorer: Scorer, documents: Sequence[Document]) -> tuple[float, torch.Tensor]:
    """By the model's own forward, a document at a time."""
    scorer.model.zero_grad(set_to_none=True)
    tokens = sum(document.scored for document in documents)
    total = 0.0
    for one in documents:
        ids = torch.tensor([one.ids])
        logp = scorer.model(input_ids=ids).logits[0].log_softmax(-1)
        picked = logp[:-1].gather(1, ids[0, 1:, None])[:, 0]
        loss = -(picked * torch.tensor(one.trained[1:])).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    found = [p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None]
    return total, torch.cat(found).clone()


@pytest.mark.parametrize("budget", [1, 12, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_is_the_mean_of_separate_ones(packed: bool, budget: int) -> None:
    scorer = scorer_of()
    documents = [document(b, n) for b, n in enumerate(LENGTHS)]
    lines = [[documents[2], documents[1]], [documents[0], documents[3], documents[4]]]
    loss, found = gradient(scorer, lines if packed else [[d] for d in documents], budget=budget)
    want, separate = alone(scorer, documents)
    assert loss == pytest.approx(want, rel=1e-9)
    assert apart(found, separate) < 1e-6


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_do_not_see_each_other(attention: str) -> None:
    """Another first document changes nothing about the second."""
    scorer = scorer_of()
    scorer.model.set_attn_implementation(attention)
    second = document(1, 6)

    def second_of(first: Document) -> torch.Tensor:
        (part,) = document_passes([[first, second]], budget=100)
        with torch.no_grad():
            return scorer(part).logp_N[part.rows_N == 1]

    other = Document(tuple(reversed(document(0, 8).ids)), document(0, 8).trained, 0)
    assert torch.equal(second_of(document(0, 8)), second_of(other))


def test_only_trained_tokens_are_scored() -> None:
    flags = [False, False, True, False, True]
    (part,) = document_passes([[document(0, 5, trained=flags)]], budget=10)
    assert part.columns_N.tolist() == [2, 4]
    assert part.targets_N.tolist() == [document(0, 5).ids[2], document(0, 5).ids[4]]


def test_a_document_that_trains_nothing_is_not_forwarded() -> None:
    silent = document(0, 5, trained=[False] * 5)
    assert document_passes([[silent]], budget=10) == []
    (part,) = document_passes([[silent, document(1, 3)]], budget=10)
    assert part.tokens == 2


def test_passes_keep_to_the_budget_where_lines_allow() -> None:
    lines = [[document(b, n)] for b, n in enumerate((9, 5, 5, 5, 3))]
    parts = document_passes(lines, budget=8)
    # Two rows of four, and the row of two beside one of four, padded.
    assert [part.tokens for part in parts] == [8, 8, 8]
    assert max(map(line_width, lines)) == 8
