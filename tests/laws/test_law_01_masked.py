"""Law 1: masked means absent, in loss, gradient, advantages and metrics; NaN under a mask too."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from support.hand import Step, apart, credited, group, make_learner, row, take_step
from support.tiny import architectures

from surefoot.learner.batch import Batch, make_batch
from surefoot.learner.update import Facts
from surefoot.methods import FAMILIES, online_rows
from surefoot.records import Completion, Group, ScoreStatus

FAILED = ScoreStatus.INFRA_ERROR
REDUCTIONS = tuple(FAMILIES["reduce"].kinds)
# A group with a missing score, a whole one, and one that is dropped for too few scores.
SCORES = ([1.0, FAILED, 0.0, 0.5], [0.0, 1.0, 1.0, 0.0], [FAILED, FAILED, 1.0, FAILED])


def groups() -> list[Group]:
    return [group(scores, index=index) for index, scores in enumerate(SCORES)]


def same(one: Step, other: Step, *, but: tuple[str, ...] = ()) -> None:
    """The same gradient and advantages, bit for bit; sums for metrics up to their order."""
    assert torch.equal(one.gradient, other.gradient)
    assert torch.equal(one.credit.advantage_PG, other.credit.advantage_PG)
    assert one.report.loss == pytest.approx(other.report.loss, rel=1e-12)
    assert not math.isnan(one.report.loss) and float(one.gradient.norm()) > 0
    for name in one.metrics.keys() | other.metrics.keys():
        if name not in but:
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-6), name


def wider(batch: Batch, columns: int, *, fill: float) -> Batch:
    """The batch with more padding, and `fill` in all of it."""
    mask_BT = torch.nn.functional.pad(batch.mask_BT, (0, columns))
    logp_BT = torch.nn.functional.pad(batch.sampled_logp_BT, (0, columns))
    filled_BT = torch.where(mask_BT, logp_BT, fill)
    return dataclasses.replace(batch, mask_BT=mask_BT, sampled_logp_BT=filled_BT)


@pytest.mark.fault(14)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_padding_is_not_looked_at(name: str, reduce: str) -> None:
    method = row(name, group_size=4, reduce=reduce)
    plain = take_step(method, groups())
    padded = take_step(method, wider(make_batch(groups()), 7, fill=math.nan), poison=True)
    same(plain, padded)


@pytest.mark.fault(14)
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("name", online_rows())
def test_values_of_absent_completions_are_not_looked_at(name: str, minibatches: int) -> None:
    """Other tokens, other log-probabilities, NaN facts: where no score is, nothing is read."""
    method = row(name, group_size=4, minibatches=minibatches, epochs=2)
    changed = [
        dataclasses.replace(
            g,
            completions=tuple(
                c if s.valid else _other(c)
                for c, s in zip(g.completions, g.scores or (), strict=True)
            ),
        )
        for g in groups()
    ]
    assert changed != groups()
    same(take_step(method, groups()), take_step(method, changed, poison=True))


def _other(completion: Completion) -> Completion:
    ids = tuple(90 - token % 80 for token in completion.ids)
    return dataclasses.replace(completion, ids=ids, logps=(-7.0,) * len(ids), text="garbage")


@pytest.mark.fault(14)
@pytest.mark.parametrize("name", online_rows())
def test_lengths_of_absent_completions_change_no_denominator(name: str) -> None:
    method = row(name, group_size=4)
    longer = groups()
    failed = longer[0].completions[1]
    ids = (*failed.ids, 20, 21, 22, 23)
    grown = dataclasses.replace(failed, ids=ids, logps=(math.nan,) * len(ids))
    completions = (longer[0].completions[0], grown, *longer[0].completions[2:])
    longer[0] = dataclasses.replace(longer[0], completions=completions)
    # These two say what was sampled, absent completions included.
    but = ("entropy_coverage", "nonfinite_logps")
    same(take_step(method, groups()), take_step(method, longer), but=but)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_order_of_rows_and_groups_does_not_matter(name: str, reduce: str) -> None:
    method = row(name, group_size=4, reduce=reduce)

    def learner() -> object:
        return make_learner(method, config=architectures()["gpt2"], dtype=torch.float64)

    plain = take_step(method, groups(), learner=learner())  # type: ignore[arg-type]
    order, within = (2, 0, 1), (3, 1, 0, 2)
    moved = [
        replace(
            groups()[p],
            completions=tuple(groups()[p].completions[i] for i in within),
            scores=tuple((groups()[p].scores or ())[i] for i in within),
        )
        for p in order
    ]
    other = take_step(method, moved, learner=learner())  # type: ignore[arg-type]
    want_PG = plain.credit.advantage_PG[list(order)][:, list(within)]
    assert torch.allclose(other.credit.advantage_PG, want_PG, rtol=0, atol=1e-12)
    assert apart(plain.gradient, other.gradient) < 1e-9
    assert other.report.loss == pytest.approx(plain.report.loss, rel=1e-9, abs=1e-12)
    for key, value in plain.metrics.items():
        assert other.metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_a_log_probability_of_zero_is_a_value_and_not_absence() -> None:
    """A policy that is certain says exactly 0; the mismatch counts such tokens."""
    method = row("grpo", group_size=4, kl={"place": "none"})
    learner = make_learner(method)
    batch = make_batch([group([1.0, 0.0, 0.5, 0.0])])
    credit = credited(method, batch)
    plan = learner.plan(batch, credit.forwarded_B, step=1)
    facts = Facts(old_logp_BT=torch.zeros_like(batch.sampled_logp_BT))
    report = learner.update(batch, plan, credit.signal, facts, step=1)
    assert torch.equal(report.known_BT, batch.mask_BT)


def test_without_poison_the_comparison_would_notice() -> None:
    """A visible token that changes does change the gradient: `same` can fail."""
    method = row("grpo", group_size=4)
    seen = groups()
    other = (_other(seen[0].completions[0]), *seen[0].completions[1:])
    seen[0] = dataclasses.replace(seen[0], completions=other)
    assert apart(take_step(method, groups()).gradient, take_step(method, seen).gradient) > 1e-2
