"""Law 9 on given data: an answer ends with one end token, which is trained; padding never is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.given import CASES, END, Given, given, is_judge, make_task, other_model
from support.hand import apart
from support.offline import FORMS
from support.tiny import make_model, make_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.data import KINDS, build_examples
from surefoot.learner.answers import Answers
from surefoot.learner.critic import ValueModel
from surefoot.learner.layouts import NAMES, Microbatch, Name
from surefoot.learner.scorer import Scorer
from surefoot.loops import supervised as supervised_loop
from surefoot.loops.preference import answers_of
from surefoot.loops.supervised import Comparison, compared_answers
from surefoot.methods import Preference, Supervised
from surefoot.models.template import PromptTemplate
from surefoot.models.turns import ExampleTemplate
from surefoot.objective import answers as scores
from surefoot.objective import preference, reward_model
from surefoot.recipe import load

ENDS = (0, 2)
"""Both end tokens of the tiny tokenizer; 2 pads too, and a layout fills up with 0."""


# --- which tokens a step trains ---


def whole_text(examples: Sequence[Any]) -> dict[tuple[int, int], int]:
    """(row, column) -> id of every trained token, by hand."""
    found: dict[tuple[int, int], int] = {}
    row = 0
    for example in examples:
        kind = type(example).__name__
        if kind == "Demonstration":
            found |= {(row, t): token for t, token in enumerate(example.ids) if example.trained[t]}
            row += 1
            continue
        own = (example.chosen, example.rejected) if kind == "Pair" else (example.completion,)
        for answer in own:
            found |= {(row, t): token for t, token in enumerate(answer)}
            row += 1
    return found


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", [n for n, r in CASES.items() if not is_judge(r)])
def test_the_trained_ids_are_the_given_ids_and_their_ends(
    name: str, layout: Name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = given(CASES[name].data)
    bench = make_task(CASES[name], examples, tmp_path, layouts=(layout,), budget=40)
    seen: list[Microbatch] = []
    forward = Scorer.forward

    def watch(scorer: Scorer, part: Microbatch, **options: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(part)
        return forward(scorer, part, **options)

    monkeypatch.setattr(Scorer, "forward", watch)
    bench.step(examples)
    told = [
        ((row, column), target)
        for part in seen
        for row, column, target in zip(
            part.rows_N.tolist(), part.columns_N.tolist(), part.targets_N.tolist(), strict=True
        )
    ]
    assert len(told) == len(dict(told)), "a token was scored twice"
    assert dict(told) == whole_text(examples)
    assert sum(target == END for _, target in told) >= len(examples)


# --- their gradient, against plain autograd on one text at a time, where nothing is padded ---


def own_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probabilities over the vocabulary at every token of the answer, [T, V]."""
    logits = model(input_ids=torch.tensor([(*prompt, *answer)])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def tables(model: PreTrainedModel, batch: Answers, *, ends: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logp, log sum p^2 and mask, [B, T]; without their ends if not `ends`."""
    logps, collisions = [], []
    for prompt, own in zip(batch.prompts, batch.answers, strict=True):
        for answer in own:
            kept = len(answer) if ends else len(answer) - 1
            every = own_logits(model, prompt, answer)
            logps.append(every[range(len(answer)), list(answer)][:kept])
            collisions.append((2 * every).logsumexp(-1)[:kept].detach())
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(len(one), dtype=torch.bool) for one in logps], batch_first=True)
    return pad(logps, batch_first=True), pad(collisions, batch_first=True), mask


def plain_preference(
    row: Preference, model: PreTrainedModel, other: PreTrainedModel, *, ends: bool
) -> Tensor:
    examples = given(row.data)
    batch = answers_of(examples)

    def relative(some: Answers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logp_BT, collision_BT, mask_BT = tables(model, some, ends=ends)
        score_B = scores.sequence_score(logp_BT, mask_BT=mask_BT, score=row.score).score_B
        if row.reference:
            ref_BT, _, _ = tables(other, some, ends=ends)
            ref_B = scores.sequence_score(ref_BT, mask_BT=mask_BT, score=row.score).score_B
            score_B = scores.against_reference(score_B, ref_B)
        return score_B, logp_BT, collision_BT, mask_BT

    score_B, logp_BT, collision_BT, mask_BT = relative(batch)
    if row.data == "labels":
        # The next label's answer behind each prompt.
        own = batch.answers
        zero_B = relative(Answers(batch.prompts, (*own[1:], own[0])))[0]
        every = torch.ones_like(zero_B).bool()
        out = preference.label_losses(
            score_B,
            desirable_B=torch.tensor([label.desirable for label in examples]),
            present_B=mask_BT.any(1),
            link=row.link,
            beta=row.beta,
            zero=preference.kto_zero(zero_B, present_B=every),
            desirable=row.desirable,
            undesirable=row.undesirable,
        )
        return out.loss_B.sum() / len(examples)
    present_B = scores.present_pairs(mask_BT[0::2], mask_BT[1::2])
    loss_B = preference.pair_losses(
        score_B[0::2],
        score_B[1::2],
        present_B=present_B,
        link=row.link,
        beta=row.beta,
        margin=row.margin,
        smoothing=row.smoothing,
        unbias=row.unbias,
    ).loss_B
    if row.weight == "likelihood":
        w_B = scores.log_likelihood_weight(logp_BT, collision_BT, mask_BT=mask_BT)
        loss_B = loss_B * w_B[0::2].add(w_B[1::2]).exp().clamp(max=1)
    for i in range(len(examples)):
        if row.nll and bool(present_B[i]):
            loss_B = loss_B.clone()
            loss_B[i] -= row.nll * logp_BT[2 * i][mask_BT[2 * i]].mean()
    return loss_B.sum() / len(examples)


def plain_imitation(row: Supervised, model: PreTrainedModel, *, ends: bool) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in given(row.data):
        logp = own_logits(model, example.ids[:1], example.ids[1:])
        for t, token in enumerate(example.ids):
            if example.trained[t] and (ends or token not in ENDS):
                total = total - logp[t - 1, token]
            count += example.trained[t]
    return total / count


def plain_comparison(row: Supervised, judge: ValueModel, *, ends: bool) -> Tensor:
    examples = given(row.data)
    batch = compared_answers(examples)
    rewards = []
    for prompt, own in zip(batch.prompts, batch.answers, strict=True):
        texts = [(*prompt, *(answer if ends else answer[:-1])) for answer in own]
        hidden = [judge.model(input_ids=torch.tensor([ids])).last_hidden_state for ids in texts]
        rewards.append(torch.stack([judge.head.of(one[0, -1:])[0] for one in hidden]))
    if row.data == "pairs":
        out = reward_model.bradley_terry(
            torch.stack([one[0] for one in rewards]),
            torch.stack([one[1] for one in rewards]),
            margin_B=torch.tensor([pair.margin or 0.0 for pair in examples]),
            present_B=torch.ones(len(examples), dtype=torch.bool),
            center=row.center,
        )
        return (out.loss_B + out.penalty_B).sum() / len(examples)
    table_PK = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True)
    valid_PK = torch.arange(table_PK.shape[1]) < torch.tensor([[len(one)] for one in rewards])
    rank_PK = torch.arange(table_PK.shape[1]).expand_as(table_PK)
    ranked = reward_model.ranking(table_PK, rank_PK=rank_PK, valid_PK=valid_PK, center=row.center)
    return (ranked.loss_P + ranked.penalty_P).sum() / len(examples)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_given_tokens_and_their_ends(name: str, tmp_path: Path) -> None:
    row = CASES[name]
    model, other = make_model(dtype=torch.float64), other_model(config=None)
    examples = given(row.data)
    bench = make_task(row, examples, tmp_path, model=model, reference=other)
    step = bench.step(examples)

    def plain(*, ends: bool) -> Tensor:
        bench.optimizer.clear()
        loss = _plain_loss(row, bench.task, model, other, ends=ends)
        loss.backward()
        assert not ends or float(loss.detach()) == pytest.approx(step.done.loss, rel=1e-7)
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in bench.optimizer.parameters
        ]
        return torch.cat([grad.flatten() for grad in grads]).double()

    assert apart(step.gradient, plain(ends=True)) < 1e-6
    assert apart(step.gradient, plain(ends=False)) > 1e-2


def _plain_loss(
    row: Given, task: Any, model: PreTrainedModel, other: PreTrainedModel, *, ends: bool
) -> Tensor:
    if isinstance(row, Preference):
        return plain_preference(row, model, other, ends=ends)
    if isinstance(task, Comparison):
        return plain_comparison(row, task.model, ends=ends)
    return plain_imitation(row, model, ends=ends)


# --- where the end tokens come from ---

TEXTS: dict[str, list[dict[str, object]]] = {
    "demonstrations": [{"prompt": "a", "completion": "bc"}, {"prompt": "d", "completion": "e"}],
    "pairs": [{"prompt": "a", "chosen": "bc", "rejected": "d"}],
    "labels": [{"prompt": "a", "completion": "bc", "label": True}],
    "rankings": [{"prompt": "a", "ranking": ["bc", "d", "ef"]}],
}


def answers_in(example: Any) -> list[tuple[int, ...]]:
    kind = type(example).__name__
    if kind == "Demonstration":
        return [tuple(t for t, on in zip(example.ids, example.trained, strict=True) if on)]
    if kind == "Pair":
        return [example.chosen, example.rejected]
    return list(example.completions) if kind == "Ranking" else [example.completion]


def built(row: Given, rows: list[dict[str, object]], template: str = "auto", **data: Any) -> Any:
    recipe = load(
        {
            "model": {"template": template},
            "data": {"source": "rows", **data},
            "method": row.name,
            "run": {"steps": 1},
        }
    )
    prompts = PromptTemplate(make_tokenizer(), template=template, max_context=512)
    # As a generation config that lists both would have it.
    encoder = ExampleTemplate(prompts, stops=ENDS)
    train_on = row.train_on if row.data == "demonstrations" else None  # type: ignore[union-attr]
    return build_examples(recipe, encoder, KINDS[row.data], train_on=train_on, rows=rows)


@pytest.mark.parametrize("template", ["auto", "none"])
@pytest.mark.parametrize("name", CASES)
def test_every_answer_ends_with_exactly_one_end_token(name: str, template: str) -> None:
    row = CASES[name]
    tokenizer = make_tokenizer()
    found = built(row, TEXTS[row.data], template)
    for example in found.stream.rows:
        for answer in answers_in(example):
            assert answer[-1] == END and not set(answer[:-1]) & set(ENDS)
            assert tokenizer.decode(answer[:-1]) in ("bc", "d", "e", "ef")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|><|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_brings_an_end_of_its_own_has_no_second_one(name: str, end: str) -> None:
    row = CASES[name]

    def ended(value: object) -> object:
        if isinstance(value, list):
            return [ended(item) for item in value]
        return f"{value}{end}" if isinstance(value, str) else value

    rows = [
        {key: value if key == "prompt" else ended(value) for key, value in one.items()}
        for one in TEXTS[row.data]
    ]
    plain, found = built(row, TEXTS[row.data]), built(row, rows, allow_control_tokens=True)
    for one, other in zip(plain.stream.rows, found.stream.rows, strict=True):
        for was, now in zip(answers_in(one), answers_in(other), strict=True):
            assert now[:-1] == was[:-1]
            assert now[-1] == (0 if end == "<|endoftext|>" else END)


@pytest.mark.parametrize("name", CASES)
def test_a_text_that_is_too_long_is_left_out_and_never_cut(name: str) -> None:
    """A cut answer would lose its end, and teach not to stop."""
    row = CASES[name]
    rows = [*FORMS[row.data], {**FORMS[row.data][0], "prompt": "say a, please", "id": "long"}]
    whole = built(row, rows)
    lengths = sorted(example.length for example in whole.stream.rows)
    limit = lengths[len(lengths) // 2]
    found = built(row, rows, max_tokens=limit)
    by_id = {example.id: answers_in(example) for example in whole.stream.rows}
    fitting = [example for example in whole.stream.rows if example.length <= limit]
    assert 0 < len(fitting) < len(whole.stream.rows)
    assert [answers_in(e) for e in found.stream.rows] == [by_id[e.id] for e in fitting]


def test_packed_rows_keep_the_ends_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token behind an end is another document's first, and is not foretold by it."""
    row = CASES["sft packed"]
    examples = given(row.data)
    bench = make_task(row, examples, tmp_path)
    seen: list[Microbatch] = []
    passes = supervised_loop.document_passes

    def watch(*inputs: Any, **options: Any) -> list[Microbatch]:
        seen.extend(passes(*inputs, **options))
        return seen

    monkeypatch.setattr(supervised_loop, "document_passes", watch)
    bench.step(examples)
    firsts = 0
    for part in seen:
        assert part.positions_RT is not None
        at_N = part.positions_RT.flatten()[part.places_N]
        assert torch.equal(at_N + 1, part.columns_N)
        firsts += int((part.columns_N == 0).sum())
    assert firsts == 0 and any(len(part.bundles) > len(part.ids_RT) for part in seen)  # type: ignore[arg-type]
