"""Preference losses and reward models through a model: layouts, splits, references, positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.hand import apart
from support.tiny import make_model

from surefoot.data import Label, Pair
from surefoot.errors import Interrupted
from surefoot.learner.answers import Answers, answer_passes
from surefoot.learner.batch import Packing
from surefoot.learner.critic import ValueModel, value_backbone
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.preference import Asked, pass_loss, score_of
from surefoot.learner.scorer import Scorer
from surefoot.learner.supervised import all_rewards, comparison_loss
from surefoot.loops.preference import answers_of
from surefoot.loops.reference import reference_scores
from surefoot.methods import Preference, Supervised, get
from surefoot.objective.answers import sequence_score

PAIRED = ("dpo", "cdpo", "robust_dpo", "ipo", "ipo_avg", "hinge", "dpo_norm", "bco_pair")
PAIRED += ("apo_zero", "nca_pair", "simpo", "orpo")


def ids(row: int, length: int) -> tuple[int, ...]:
    return tuple(8 + (31 * row + 5 * t) % 80 for t in range(length))


def pairs(count: int = 3) -> list[Pair]:
    return [
        Pair(f"p{i}", ids(i, 4 + i), ids(10 + i, 3 + i), ids(20 + i, 6 - i)) for i in range(count)
    ]


def scorer_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> Scorer:
    model = make_model(None, seed=seed, dtype=dtype)  # type: ignore[arg-type]
    return Scorer(model, compute=dtype, head_dtype=dtype, temperature=1.0)


def packing_of(scorer: Scorer, *, budget: int = 1000, layouts: tuple[Name, ...] = NAMES) -> Packing:
    return Packing(budget, layouts, scorer.shape)


def never() -> None:
    """Nothing interrupts."""


def row_of(name: str) -> Preference:
    found = get(name)
    assert isinstance(found, Preference)
    return found


def own_logps(scorer: Scorer, batch: Answers) -> list[torch.Tensor]:
    """Token log-probabilities by the model's own forward, an answer at a time."""
    out = []
    for prompt, answers in zip(batch.prompts, batch.answers, strict=True):
        for answer in answers:
            whole = torch.tensor([(*prompt, *answer)])
            logp = scorer.model(input_ids=whole).logits[0].log_softmax(-1)
            start = len(prompt) - 1
            out.append(logp[start:-1].gather(1, whole[0, start + 1 :, None])[:, 0])
    return out


def step(
    row: Preference, scorer: Scorer, asked: Asked, packing: Packing
) -> tuple[float, torch.Tensor]:
    scorer.model.zero_grad(set_to_none=True)
    loss_of, total = pass_loss(row, scorer, asked), 0.0
    for part in answer_passes(asked.batch, packing):
        out = loss_of(part)
        out.loss.backward()  # type: ignore[no-untyped-call]
        total += float(out.loss.detach())
    found = [p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None]
    return total, torch.cat(found).clone()


@pytest.mark.parametrize("name", PAIRED)
def test_the_gradient_does_not_depend_on_split_and_layout(name: str) -> None:
    row, scorer, other = row_of(name), scorer_of(), scorer_of(seed=1)
    batch = answers_of(pairs())
    reference_B = score_of(row, other, batch, packing_of(other))
    asked = Asked(batch, reference_B if row.reference else None)
    want_loss, want = step(row, scorer, asked, packing_of(scorer, layouts=("rows",)))
    assert float(want.norm()) > 0
    for layout in NAMES:
        for budget in (1, 30, 1000):
            packing = packing_of(scorer, budget=budget, layouts=(layout,))
            loss, found = step(row, scorer, asked, packing)
            assert loss == pytest.approx(want_loss, rel=1e-9), (layout, budget)
            assert apart(found, want) < 1e-6, (layout, budget)


def test_dpo_by_the_models_own_forward() -> None:
    """-log sigmoid(0.1 ((w - w_ref) - (l - l_ref))), a mean over the pairs."""
    scorer, other = scorer_of(), scorer_of(seed=1)
    batch = answers_of(pairs())
    reference_B = score_of(row_of("dpo"), other, batch, packing_of(other))
    loss, _ = step(row_of("dpo"), scorer, Asked(batch, reference_B), packing_of(scorer))
    own = [float(x.detach().sum()) for x in own_logps(scorer, batch)]
    theirs = [float(x.detach().sum()) for x in own_logps(other, batch)]
    gaps = [a - b for a, b in zip(own, theirs, strict=True)]
    margins = [0.1 * (gaps[i] - gaps[i + 1]) for i in range(0, len(gaps), 2)]
    want = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    assert loss == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_unchanged_weights_the_loss_is_log_two_exactly(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    row, scorer = row_of("dpo"), scorer_of(dtype=dtype)
    batches = [pairs()[:2], pairs()[2:]]
    packing = packing_of(scorer)
    known = reference_scores(
        row, scorer, batches, packing, identity={}, interrupt=never, folder=tmp_path
    )
    for batch in batches:
        asked = Asked(answers_of(batch), known.of(batch))
        assert step(row, scorer, asked, packing)[0] == math.log(2.0)


def test_the_reference_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, scorer = row_of("dpo"), scorer_of()
    packing = packing_of(scorer)
    first = reference_scores(
        row, scorer, [pairs()], packing, identity={"m": 1}, interrupt=never, folder=tmp_path
    )
    changed = scorer_of(seed=5)
    again = reference_scores(
        row, changed, [pairs()], packing, identity={"m": 1}, interrupt=never, folder=tmp_path
    )
    assert torch.equal(first.of(pairs()), again.of(pairs()))
    other = reference_scores(
        row, changed, [pairs()], packing, identity={"m": 2}, interrupt=never, folder=tmp_path
    )
    assert not torch.equal(first.of(pairs()), other.of(pairs()))


def test_other_data_with_the_same_ids_are_asked(tmp_path: Path) -> None:
    row, scorer = row_of("dpo"), scorer_of()
    packing = packing_of(scorer)
    other = [Pair(p.id, p.prompt, p.rejected, p.chosen) for p in pairs()]
    for data, given in (("first", pairs()), ("second", other)):
        known = reference_scores(
            row,
            scorer,
            [given],
            packing,
            identity={"data": data},
            interrupt=never,
            folder=tmp_path,
        )
        own_B = score_of(row, scorer, answers_of(given), packing)
        assert torch.equal(known.of(given), own_B)


def test_a_damaged_file_of_scores_is_asked_again(tmp_path: Path) -> None:
    row, scorer = row_of("dpo"), scorer_of()
    packing = packing_of(scorer)
    first = reference_scores(
        row, scorer, [pairs()], packing, identity={}, interrupt=never, folder=tmp_path
    )
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    again = reference_scores(
        row, scorer, [pairs()], packing, identity={}, interrupt=never, folder=tmp_path
    )
    assert torch.equal(first.of(pairs()), again.of(pairs()))


def test_a_full_cache_does_not_hide_why_the_asking_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, scorer = row_of("dpo"), scorer_of()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    def interrupt() -> None:
        raise Interrupted("asked to stop")

    monkeypatch.setattr("surefoot.loops.reference.atomic_write_bytes", full)
    with pytest.raises(Interrupted, match="asked to stop"):
        reference_scores(
            row,
            scorer,
            [pairs()],
            packing_of(scorer),
            identity={},
            interrupt=interrupt,
            folder=tmp_path,
        )


def test_an_interrupted_asking_goes_on_where_it_was(tmp_path: Path) -> None:
    row, scorer = row_of("kto"), scorer_of()
    packing = packing_of(scorer)
    batches = [labels()[:2], labels()[2:]]
    calls = iter((None, KeyboardInterrupt()))

    def interrupt() -> None:
        stop = next(calls)
        if stop is not None:
            raise stop

    with pytest.raises(KeyboardInterrupt):
        reference_scores(
            row, scorer, batches, packing, identity={}, interrupt=interrupt, folder=tmp_path
        )
    # Other weights: what was kept is not asked again, and what was not is.
    changed = scorer_of(seed=5)
    mixed = reference_scores(
        row, changed, batches, packing, identity={}, interrupt=never, folder=tmp_path
    )
    for batch, asked in zip(batches, (scorer, changed), strict=True):
        own_B = score_of(row, asked, answers_of(batch), packing)
        assert torch.equal(mixed.of(batch), own_B)
        crossed = mixed.mismatched(batch)
        assert torch.equal(crossed.score_B, score_of(row, asked, crossed.batch, packing))


def labels() -> list[Label]:
    return [Label(f"l{i}", ids(i, 4), ids(10 + i, 3 + i), i % 2 == 0) for i in range(4)]


def test_kto_by_hand() -> None:
    """Scores against the reference of 1, -1, 0.5, 0 and zero 0.25 at beta 0.1: sigmoid(-side)."""
    row, scorer = row_of("kto"), scorer_of()
    batch = answers_of(labels())
    told = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    reference_B = score_of(row, scorer, batch, packing_of(scorer)) - told
    desirable = torch.tensor([True, False, True, False])
    asked = Asked(batch, reference_B, desirable, torch.tensor(0.25, dtype=torch.float64))
    loss, _ = step(row, scorer, asked, packing_of(scorer))
    sides = [0.1 * 0.75, 0.1 * 1.25, 0.1 * 0.25, 0.1 * 0.25]
    want = sum(1 / (1 + math.exp(side)) for side in sides) / 4
    assert loss == pytest.approx(want, rel=1e-9)


def test_other_answers_stand_behind_other_prompts(tmp_path: Path) -> None:
    row, scorer = row_of("kto"), scorer_of()
    given = labels()
    known = reference_scores(
        row, scorer, [given], packing_of(scorer), identity={}, interrupt=never, folder=tmp_path
    )
    crossed = known.mismatched(given)
    assert crossed.batch.prompts == tuple(label.prompt for label in given)
    answers = [own[0] for own in crossed.batch.answers]
    assert answers == [given[(i + 1) % 4].completion for i in range(4)]
    want = [float(x.detach().sum()) for x in own_logps(scorer, crossed.batch)]
    assert crossed.score_B.tolist() == pytest.approx(want, rel=1e-9)


def value_model(dtype: torch.dtype = torch.float64) -> ValueModel:
    backbone = value_backbone(make_model(None, seed=3, dtype=dtype), layers=None)  # type: ignore[arg-type]
    model = ValueModel(backbone, compute=dtype)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("layout", NAMES)
def test_a_reward_is_read_after_the_last_token(layout: Name) -> None:
    model, batch = value_model(), answers_of(pairs())
    packing = Packing(1000, (layout,), model.shape)
    got = all_rewards(model, batch, answer_passes(batch, packing, after=True)).tolist()
    want = []
    for prompt, own in zip(batch.prompts, batch.answers, strict=True):
        for answer in own:
            whole = torch.tensor([(*prompt, *answer)])
            hidden = model.model(input_ids=whole).last_hidden_state[0, -1]
            want.append(float(model.head(hidden).detach()))
    assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("data", ["pairs", "rankings"])
def test_a_reward_models_gradient_does_not_depend_on_the_split(data: str) -> None:
    found = get("reward_model")
    assert isinstance(found, Supervised)
    row = Supervised("reward_model", data=data, loss="bradley_terry", center=0.01)  # type: ignore[arg-type]
    answers: Sequence[tuple[tuple[int, ...], ...]] = [
        (ids(10, 3), ids(20, 5)),
        (ids(11, 4), ids(21, 2)),
    ]
    if data == "rankings":
        answers = [(*answers[0], ids(30, 4)), answers[1]]
    batch = Answers((ids(0, 4), ids(1, 6)), tuple(answers))
    margin_P = torch.tensor([0.5, 0.0], dtype=torch.float64)
    results = []
    for budget in (1, 1000):
        model = value_model()
        packing = Packing(budget, NAMES, model.shape)
        loss_of, total = comparison_loss(row, model, batch, margin_P=margin_P), 0.0
        for part in answer_passes(batch, packing, after=True):
            out = loss_of(part)
            out.loss.backward()  # type: ignore[no-untyped-call]
            total += float(out.loss.detach())
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results.append((total, torch.cat(grads)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    assert apart(results[0][1], results[1][1]) < 1e-6


def test_bradley_terry_by_hand() -> None:
    """Two pairs: -log sigmoid(r_w - r_l - m) + 0.01 (r_w + r_l)^2, a mean over both."""
    model, batch = value_model(), answers_of(pairs(2))
    packing = Packing(1000, NAMES, model.shape)
    passes = answer_passes(batch, packing, after=True)
    rewards = all_rewards(model, batch, passes).tolist()
    row = Supervised("reward_model", data="pairs", loss="bradley_terry", center=0.01)
    margin_P = torch.tensor([0.5, 0.0], dtype=torch.float64)
    loss_of = comparison_loss(row, model, batch, margin_P=margin_P)
    got = sum(float(loss_of(part).loss.detach()) for part in passes)
    want = 0.0
    for (win, lose), margin in zip((rewards[:2], rewards[2:]), (0.5, 0.0), strict=True):
        want += math.log1p(math.exp(-(win - lose - margin))) + 0.01 * (win + lose) ** 2
    assert got == pytest.approx(want / 2, rel=1e-9)


def test_scores_are_those_of_the_objective() -> None:
    scorer, batch = scorer_of(), answers_of(pairs())
    for name in ("dpo", "simpo", "orpo"):
        row = row_of(name)
        got = score_of(row, scorer, batch, packing_of(scorer))
        own = own_logps(scorer, batch)
        for score, logp in zip(got.tolist(), own, strict=True):
            mask = torch.ones(1, len(logp), dtype=torch.bool)
            want = sequence_score(logp.detach()[None], mask_BT=mask, score=row.score).score_B
            assert score == pytest.approx(float(want), rel=1e-9)
