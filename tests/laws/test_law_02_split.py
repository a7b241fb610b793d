"""Law 2: denominators are global, so the gradient does not know how a step was cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.steps import batch_of, distance, make_learner, update
from support.tiny import architectures, make_model

from surefoot.learner import update as module
from surefoot.learner.batch import make_batch
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.update import Learner
from surefoot.methods import Method, online_rows, with_fields
from surefoot.records import Group

LENGTHS = [[1, 9, 4, 6], [12, 2, 3, 3], [5, 5, 5, 5]]
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean")
GPT2 = architectures()["gpt2"]  # no float32 casts inside: exact in float64


def with_reduction(name: str, reduce: str) -> Method:
    """The row with another reduction."""
    row = with_fields(online_rows()[name], {"reduce": reduce})
    assert isinstance(row, Method)
    return row


def advantages(*, zeros: bool) -> torch.Tensor:
    values = torch.linspace(-1.0, 1.3, 12, dtype=torch.float64)
    if zeros:
        values[4:8] = 0.0
        values[9] = 0.0
    return values


@pytest.mark.fault(9)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_any_split_and_layout_gives_the_same_gradient(name: str, reduce: str) -> None:
    row, batch = with_reduction(name, reduce), batch_of(LENGTHS)
    reference = make_model(GPT2, seed=1, dtype=torch.float64)

    def gradient(budget: int, layouts: tuple[Name, ...]) -> torch.Tensor:
        model = make_model(GPT2, dtype=torch.float64)
        learner = make_learner(
            model,
            row,
            budget=budget,
            layouts=layouts,
            reference=reference,
        )
        out = update(learner, batch, advantages(zeros=False))
        assert len(out.gradients) == 1
        return out.gradients[0]

    whole = gradient(10_000, NAMES)
    assert float(whole.norm()) > 1e-3
    for budget, layouts in [
        (1, ("rows",)),
        (30, ("packed",)),
        (30, ("prefix",)),
        (17, NAMES),
        (10_000, ("packed",)),
        (10_000, ("prefix",)),
        (10_000, ("rows",)),
    ]:
        assert distance(gradient(budget, layouts), whole) < 1e-9, (budget, layouts)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_skipping_what_has_no_coefficient_changes_nothing(name: str, reduce: str) -> None:
    """With a KL in its loss a row skips nothing: it is measured here without."""
    row, batch = with_reduction(name, reduce), batch_of(LENGTHS)
    row = dataclasses.replace(row, kl=dataclasses.replace(row.kl, coef=0.0))
    values = advantages(zeros=True)
    outs = []
    for forwarded in (torch.ones(12, dtype=torch.bool), values != 0):
        learner = make_learner(make_model(GPT2, dtype=torch.float64), row)
        outs.append(update(learner, batch, values, forwarded_B=forwarded))
    everything, skipped = outs
    assert skipped.report.forwarded < everything.report.forwarded
    assert distance(skipped.gradients[0], everything.gradients[0]) < 1e-9
    assert skipped.report.loss == pytest.approx(everything.report.loss, abs=1e-12)


@pytest.mark.fault(9)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_every_one_of_several_steps_is_split_alike(name: str, reduce: str) -> None:
    """Minibatches and epochs, a clip that bites, an entropy bonus: still no split is seen."""
    row = with_fields(
        with_reduction(name, reduce),
        {"epochs": 2, "minibatches": 2, "terms": [{"kind": "entropy", "weight": 0.1}]},
    )
    reference = make_model(GPT2, seed=1, dtype=torch.float64)

    def gradients(budget: int, layouts: tuple[Name, ...]) -> tuple[list[torch.Tensor], float]:
        learner = make_learner(
            make_model(GPT2, dtype=torch.float64),
            row,  # type: ignore[arg-type]
            budget=budget,
            layouts=layouts,
            reference=reference,
            learning_rate=0.05,
        )
        out = update(learner, batch_of(LENGTHS), advantages(zeros=False))
        return out.gradients, out.report.sums["clip_low"] + out.report.sums["clip_high"]

    whole, clipped = gradients(10_000, NAMES)
    assert len(whole) == 4
    assert clipped > 0
    for budget, layouts in [(20, ("packed",)), (25, ("prefix",)), (1, ("rows",))]:
        cut, cut_clipped = gradients(budget, layouts)
        assert cut_clipped == clipped
        # AdamW divides by the gradient's own size, so rounding grows from step to step.
        for step, (got, want) in enumerate(zip(cut, whole, strict=True)):
            assert distance(got, want) < 1e-9 * 10**step, (budget, layouts, step)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_minibatch_has_denominators_of_its_own(reduce: str) -> None:
    """With weights that stand still, each does what its groups do as a batch alone."""
    row = dataclasses.replace(with_reduction("dapo", reduce), minibatches=2)
    alone = dataclasses.replace(row, minibatches=1)
    batch, values = batch_of(LENGTHS), advantages(zeros=False)

    def learner(method: Method) -> Learner:
        return make_learner(make_model(GPT2, dtype=torch.float64), method, learning_rate=1e-30)

    plan = learner(row).plan(batch, torch.ones(12, dtype=torch.bool), step=1)
    out = update(learner(row), batch, values)
    assert sorted(len(minibatch.rows) for minibatch in plan.minibatches) == [4, 8]
    for minibatch, gradient in zip(plan.minibatches, out.gradients, strict=True):
        chosen = torch.tensor(minibatch.rows)
        groups = [batch.groups[g] for g in sorted(set(batch.group_B[chosen].tolist()))]
        want = update(learner(alone), make_batch(groups), values[chosen]).gradients[0]
        assert distance(gradient, want) < 1e-9


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_an_absent_row_is_in_no_denominator(reduce: str) -> None:
    row = with_reduction("grpo", reduce)
    row = dataclasses.replace(row, kl=dataclasses.replace(row.kl, coef=0.0))
    values = advantages(zeros=False)
    present = torch.ones(12, dtype=torch.bool)
    present[[1, 10]] = False
    learner = make_learner(make_model(GPT2, dtype=torch.float64), row)
    absent = update(learner, batch_of(LENGTHS), values, present_B=present)
    left = [[1, 4, 6], [12, 2, 3, 3], [5, 5, 5]]
    # The same tokens without the two rows: rebuilt from the full batch, so ids agree.
    full = batch_of(LENGTHS).groups
    kept = [[0, 2, 3], [0, 1, 2, 3], [0, 1, 3]]
    groups = [
        Group(g.prompt, tuple(g.completions[i] for i in keep))
        for g, keep in zip(full, kept, strict=True)
    ]
    assert [[len(c.ids) for c in g.completions] for g in groups] == left
    learner = make_learner(make_model(GPT2, dtype=torch.float64), row)
    without = update(learner, make_batch(groups), values[present])
    assert distance(absent.gradients[0], without.gradients[0]) < 1e-9


@pytest.mark.fault(9)
@pytest.mark.parametrize("name", online_rows())
def test_float32_on_a_model_with_casts(name: str) -> None:
    row, batch = online_rows()[name], batch_of(LENGTHS)
    reference = make_model(seed=1)
    grads = []
    for budget, layouts in [(10_000, ("packed",)), (25, ("prefix",)), (1, ("rows",))]:
        learner = make_learner(
            make_model(),
            row,
            budget=budget,
            layouts=layouts,
            reference=reference,
        )
        grads.append(update(learner, batch, advantages(zeros=False)).gradients[0])
    assert distance(grads[1], grads[0]) < 1e-5
    assert distance(grads[2], grads[0]) < 1e-5


def test_a_second_minibatch_sees_ratios_other_than_one() -> None:
    row = dataclasses.replace(online_rows()["grpo"], minibatches=2)
    row = dataclasses.replace(row, kl=dataclasses.replace(row.kl, coef=0.0))
    batch = batch_of(LENGTHS[:2])
    seen: list[tuple[float, float]] = []
    learner = make_learner(make_model(), row, learning_rate=0.05)
    original = module.microbatch_loss

    def spy(inputs: module.LossInputs, row: Method) -> object:
        gap = torch.where(inputs.mask_BT, inputs.logp_BT - inputs.old_logp_BT, 0.0)
        seen.append((float(gap.detach().abs().max()), float(inputs.mask_BT.sum())))
        return original(inputs, row)

    module.microbatch_loss = spy  # type: ignore[assignment]
    try:
        out = update(learner, batch, advantages(zeros=False)[:8])
    finally:
        module.microbatch_loss = original
    assert len(out.gradients) == 2
    assert seen[0][0] == 0.0
    assert seen[1][0] > 1e-3
    assert out.report.sums["ratio_max"] > 1.001
