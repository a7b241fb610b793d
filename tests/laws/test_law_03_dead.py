"""Law 3: dead groups are exactly zero where the baseline is the group, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.hand import credited, group, make_learner, no_kl, row, take_step

from surefoot.learner.batch import make_batch
from surefoot.learner.update import Facts
from surefoot.loops.credit import Credit
from surefoot.loops.keep import is_informative
from surefoot.methods import Method, is_group_relative, online_rows
from surefoot.records import Group

SEVENTHS = [float(np.float32(0.7))] * 8
RELATIVE = [
    name
    for name, value in online_rows().items()
    # With a critic's part beside the group's, only the latter is zeroed.
    if is_group_relative(value) and value.critic.kind == "none"
]


def credit_of(method: Method, groups: list[Group], facts: Facts | None = None) -> Credit:
    batch = make_batch(groups)
    return credited(method, batch, facts)


def test_float32_copies_have_a_standard_deviation_that_is_not_zero() -> None:
    """Why the range decides: the usual test would call this group alive."""
    assert float(torch.tensor(SEVENTHS, dtype=torch.float32).std()) > 0


@pytest.mark.fault(16)
@pytest.mark.parametrize("value", [0.7, 0.1, 1.0, 0.0, -1e12, 1e-30])
@pytest.mark.parametrize("name", RELATIVE)
def test_equal_rewards_are_dead(name: str, value: float) -> None:
    copies = [float(np.float32(value))] * 8
    live = [1.0, 0.0] * 4
    found = credit_of(no_kl(name), [group(copies), group(live, index=1)])
    assert found.dead_P.tolist() == [True, False]
    assert torch.equal(found.advantage_PG[0], torch.zeros(8, dtype=torch.float64))
    assert torch.equal(
        found.signal.advantage_BT[:8], torch.zeros_like(found.signal.advantage_BT)[:8]
    )
    assert not found.forwarded_B[:8].any() and found.forwarded_B[8:].all()


@pytest.mark.parametrize("name", RELATIVE)
def test_a_gap_of_a_ten_millionth_is_a_gap(name: str) -> None:
    found = credit_of(no_kl(name), [group([0.7] * 7 + [0.7 + 1e-7])])
    assert found.dead_P.tolist() == [False]
    one, others = found.advantage_PG[0, 7], found.advantage_PG[0, :7]
    assert float(one) > 0
    # The median of the others does not see a lone one.
    assert bool((others == 0).all() if name == "rloo_median" else (others < 0).all())


@pytest.mark.parametrize("credit", ["broadcast", {"kind": "reward_to_go", "gamma": 0.9}])
@pytest.mark.parametrize("baseline", ["none", "batch"])
def test_equal_rewards_are_a_signal_for_other_baselines(baseline: str, credit: object) -> None:
    method = no_kl("reinforce", baseline=baseline, credit=credit)
    groups = [group([0.75] * 8, lengths=[2] * 8), group([0.25] * 8, index=1, lengths=[2] * 8)]
    found = credit_of(method, groups)
    discount = 1.0 if credit == "broadcast" else 0.9
    first = {"none": 0.75, "batch": 0.25}[baseline]
    assert found.signal.advantage_BT[0].tolist() == pytest.approx([first * discount, first])
    assert found.signal_found and found.forwarded_B.all()
    # Named dead in the metrics all the same: the share of groups without spread.
    assert found.dead_P.tolist() == [True, True]


@pytest.mark.fault(16)
@pytest.mark.parametrize("name", RELATIVE)
def test_a_batch_of_dead_groups_makes_no_step(name: str) -> None:
    method = no_kl(name)
    learner = make_learner(method)
    before = {n: p.clone() for n, p in learner.scorer.model.named_parameters()}
    step = take_step(method, [group(SEVENTHS), group(SEVENTHS, index=1)], learner=learner)
    assert step.report.steps == 0 and step.report.forwarded == 0
    assert step.metrics["frac_reward_zero_std"] == 1.0
    assert "loss" not in step.metrics and not step.credit.signal_found
    for name_, parameter in learner.scorer.model.named_parameters():
        assert torch.equal(parameter, before[name_])


def test_dead_groups_stay_in_the_denominator() -> None:
    """A dead group beside a live one halves the gradient of sequence_mean (law 2: gated)."""
    method = no_kl("grpo", group_size=4)
    live = group([1.0, 0.0, 0.0, 1.0])
    alone = take_step(method, [live]).gradient
    beside = take_step(method, [live, group([0.7] * 4, index=1)]).gradient
    assert torch.allclose(alone, 2 * beside, rtol=1e-4, atol=1e-7)


def test_dead_is_decided_after_shaping_and_selection_before() -> None:
    """Overlong shaping gives a spread of advantages; it does not make a group worth asking for."""
    method = no_kl("dapo", group_size=4, shaping=[{"kind": "overlong", "cache": 5}])
    long = group([1.0] * 4, lengths=[2, 5, 10, 10])
    found = credit_of(method, [long])
    assert found.dead_P.tolist() == [False]
    assert found.shaped_PG.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert not is_informative(long)
    # And the other way round: shaping that levels unequal scores makes the group dead.
    level = group([0.0, 0.0, 1.0, 1.0], lengths=[2, 5, 10, 10])
    assert credit_of(method, [level]).dead_P.tolist() == [True]
    assert is_informative(level)


def test_sequence_kl_gives_equal_scores_a_spread() -> None:
    method = row("rloo", group_size=2, kl={"coef": 0.5})
    groups = [group([1.0, 1.0], lengths=[2, 2])]
    old_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    even = credit_of(method, groups, Facts(old_BT, old_BT - 0.25, (0, 1)))
    assert even.dead_P.tolist() == [True]
    assert even.advantage_PG.tolist() == [[0.0, 0.0]]
    apart_BT = torch.tensor([[-1.5, -1.5], [-1.0, -1.0]], dtype=torch.float64)
    found = credit_of(method, groups, Facts(old_BT, apart_BT, (0, 1)))
    # KL 1.0 and 0.0 nats: rewards 0.5 and 1.0.
    assert found.dead_P.tolist() == [False]
    assert found.advantage_PG.tolist() == [[-0.5, 0.5]]
    # Only the KL speaks, so the rewards alone gave no signal.
    assert not found.signal_found


def test_a_dead_group_is_zero_at_the_end_of_credit_assignment() -> None:
    """Also where the KL is paid token by token after the baseline."""
    to_go = {"place": "reward_token", "coef": 0.5}
    method = row("rloo", group_size=2, credit="reward_to_go", kl=to_go)
    old_BT = torch.full((4, 2), -1.0, dtype=torch.float64)
    facts = Facts(old_BT, old_BT - 0.25, (0, 1, 2, 3))
    dead, live = group([0.7, 0.7], lengths=[2, 2]), group([1.0, 0.0], index=1, lengths=[2, 2])
    found = credit_of(method, [dead, live], facts)
    assert found.signal.advantage_BT[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # 1 - 0.5 * 0.25, and the same again for the token before.
    assert found.signal.advantage_BT[2].tolist() == [0.75, 0.875]


def test_a_dead_group_still_pays_kl_in_the_loss() -> None:
    step = take_step(row("grpo"), [group(SEVENTHS)])
    assert step.report.steps == 1 and float(step.gradient.norm()) > 0
    assert not step.credit.signal_found
