"""What the critic's loss does to weights, on a backbone of its own and on the policy's.

Its gradient by differences, masks, splits, the shared forward pass, the value after the last token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from support.hand import (
    Recorder,
    apart,
    assigned,
    group,
    make_learner,
    no_kl,
    stood,
    take_step,
)
from support.steps import batch_of
from support.tiny import architectures

from surefoot.learner.batch import Batch, Packing, make_batch
from surefoot.learner.critic import Critic, SharedValue, ValueModel
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.update import Learner
from surefoot.loops.state import tensors
from surefoot.methods import Critic as CriticRow
from surefoot.methods import Method
from surefoot.recipe import Optim
from surefoot.records import Group, ScoreStatus

KINDS = ("own", "shared")


def learner_of(kind: str, method: Method, **settings: object) -> Learner:
    """A learner whose critic has a backbone of its own, or the policy's; its head is not zero."""
    learner = make_learner(method, **settings)  # type: ignore[arg-type]
    if kind == "shared":
        assert isinstance(method.critic, CriticRow)
        model = SharedValue(learner.scorer)
        torch.nn.init.normal_(
            model.head.weight, std=0.3, generator=torch.Generator().manual_seed(3)
        )
        own = Recorder(model, Optim(learning_rate=1e-2), steps=10)
        learner.critic = Critic(model, own, method.critic.loss_weight, method.critic.clip)
    return learner


def value_after(learner: Learner, ids: Sequence[int]) -> torch.Tensor:
    """V of the state after each of the tokens, by the model alone."""
    critic = learner.critic
    assert critic is not None
    own = critic.model.model if isinstance(critic.model, ValueModel) else learner.scorer.model
    states_TH = own.base_model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    return critic.model.head(states_TH)[:, 0]


def holed(made: Group) -> Group:
    """The second token of every completion of three or more is not trained."""
    completions = tuple(
        dataclasses.replace(c, logps=(c.logps[0], math.nan, *c.logps[2:])) if len(c.ids) > 2 else c
        for c in made.completions
    )
    return dataclasses.replace(made, completions=completions)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_squared_error(kind: str) -> None:
    """By differences of the mean of 1/2 (V - R)^2 over the trained tokens, of the model alone.

    A loss that is detached from head or trunk, inverted or scaled otherwise is found out.
    """
    made = holed(group([1.0, 0.0, 0.5, ScoreStatus.INFRA_ERROR]))
    found = []
    for weight in (0.5, 1.5):
        method = no_kl("ppo", group_size=4, critic={"clip": None, "loss_weight": weight})
        learner = learner_of(kind, method, config=architectures()["gpt2"], dtype=torch.float64)
        assert learner.critic is not None
        for optimizer in (learner.optimizer, learner.critic.optimizer):
            assert isinstance(optimizer, Recorder)
            optimizer.applies = False
        step = take_step(method, [made], learner=learner)
        found.append(step.gradient)
    return_BT, mask_BT = step.credit.signal.return_BT, make_batch([made]).mask_BT
    assert return_BT is not None and mask_BT[:3].sum(1).tolist() == [2, 2, 3]

    def error() -> float:
        total, count = 0.0, 0
        for b, completion in enumerate(made.completions[:3]):
            prompt = made.prompt.ids
            value_T = value_after(learner, (*prompt, *completion.ids))[len(prompt) - 1 : -1]
            for t in range(len(completion.ids)):
                if mask_BT[b, t]:
                    total += 0.5 * float(value_T[t] - return_BT[b, t]) ** 2
                    count += 1
        return total / count

    parameters = [*learner.optimizer.parameters, *learner.critic.optimizer.parameters]
    generator = torch.Generator().manual_seed(7)
    way = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    seen = []
    with torch.no_grad():
        for distance in (1e-6, -2e-6):
            for parameter, along in zip(parameters, way, strict=True):
                parameter.add_(along, alpha=distance)
            seen.append(error())
    slope = (seen[0] - seen[1]) / 2e-6
    want = torch.cat([along.reshape(-1) for along in way]) @ (found[1] - found[0])
    assert abs(slope) > 1e-2
    assert slope == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_lowers_the_value_loss(kind: str) -> None:
    method = no_kl("ppo", group_size=4, critic={"clip": None})
    groups = [group([1.0, 0.0, 0.5, 0.0])]
    learner = learner_of(kind, method, dtype=torch.float64)
    before = take_step(method, groups, learner=learner).metrics["critic/loss"]
    after = take_step(method, groups, learner=learner).metrics["critic/loss"]
    assert float(after) < float(before)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_a_mask_does_not_reach_the_loss(kind: str) -> None:
    """NaN for the old value, return and advantage of padding, absent rows and untrained tokens."""
    method = no_kl("ppo", group_size=4)
    groups = [
        holed(group([1.0, 0.0, ScoreStatus.INFRA_ERROR, 0.5])),
        group([0.0, 1.0, 0.0, 1.0], index=1),
    ]
    clean, torn = (
        take_step(method, groups, learner=learner_of(kind, method), poison=poison)
        for poison in (False, True)
    )
    assert clean.report.steps == torn.report.steps == 1
    assert torch.equal(clean.gradient, torn.gradient)
    assert clean.metrics["critic/loss"] == torn.metrics["critic/loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_gives_the_same_gradient(kind: str) -> None:
    method = no_kl("ppo", group_size=4)
    groups = [
        group([1.0, 0.0, 0.5, 0.0], lengths=[5, 1, 3, 8]),
        holed(group([0.0, 1.0, ScoreStatus.INFRA_ERROR, 1.0], index=1, lengths=[2, 6, 4, 7])),
    ]
    gradients, losses = [], []
    for budget in (4096, 25, 1):
        learner = learner_of(
            kind, method, config=architectures()["gpt2"], dtype=torch.float64, budget=budget
        )
        step = take_step(method, groups, learner=learner)
        gradients.append(step.gradient)
        losses.append(step.metrics["critic/loss"])
    assert apart(gradients[1], gradients[0]) < 1e-9
    assert apart(gradients[2], gradients[0]) < 1e-9
    assert losses[1] == pytest.approx(losses[0]) and losses[2] == pytest.approx(losses[0])


@pytest.mark.parametrize("layout", NAMES)
def test_a_shared_trunk_starts_at_one_and_says_all_in_one_forward(layout: Name) -> None:
    method = no_kl("ppo", group_size=4, epochs=2)
    learner = learner_of("shared", method)
    learner.packing = Packing(4096, (layout,), learner.packing.shape)
    batch = batch_of([[3, 8, 1, 6]])
    plan = learner.plan(batch, torch.ones(4, dtype=torch.bool), step=1)
    calls: list[int] = []
    body = learner.scorer.model.base_model
    hook = body.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        learner.scorer.hidden(plan.passes[0])
    once = len(calls)
    facts = learner.score(batch, plan, old=True, reference=False)
    hook.remove()
    assert len(plan.passes) == 1 and len(calls) == 2 * once
    assert facts.old_logp_BT is not None and facts.value_BT is not None
    scored = learner.scorer(plan.passes[0])
    place = (plan.passes[0].rows_N, plan.passes[0].columns_N)
    assert torch.equal(scored.logp_N.detach().double(), facts.old_logp_BT[place])
    assert torch.equal(scored.value_N.detach().double(), facts.value_BT[place])
    assert float(facts.value_BT.abs().max()) > 0
    # Without old log-probabilities there is nothing for the LM head to do.
    alone = learner.score(batch, plan, old=False, reference=False)
    assert alone.old_logp_BT is None and torch.equal(alone.value_BT, facts.value_BT)


@pytest.mark.parametrize("warming", [True, False])
def test_a_warm_up_moves_the_head_and_never_the_shared_trunk(warming: bool) -> None:
    method = no_kl("ppo", group_size=4)
    learner = learner_of("shared", method)
    batch = make_batch([group([1.0, 0.0, 0.5, 0.0])])
    present_B = torch.ones(4, dtype=torch.bool)
    plan = learner.plan(batch, present_B, step=1)
    facts = learner.score(batch, plan, old=False, reference=False)
    credit = assigned(method, batch, stood(method, batch), facts)
    assert learner.critic is not None
    trunk = [p.detach().clone() for p in learner.scorer.model.parameters()]
    head = [p.detach().clone() for p in learner.critic.model.parameters()]
    seen: list[bool] = []
    clear = learner.clear

    def look() -> None:
        seen.extend(p.grad is None for p in learner.optimizer.parameters)
        clear()

    learner.clear = look  # type: ignore[method-assign]
    report = learner.update(batch, plan, credit.signal, facts, step=1, warming=warming)
    assert all(seen) if warming else not any(seen)
    assert report.steps == 1 and report.sums["value_tokens"] == int(batch.mask_BT.sum())
    stayed = [
        torch.equal(a, b) for a, b in zip(trunk, learner.scorer.model.parameters(), strict=True)
    ]
    assert all(stayed) if warming else not any(stayed)
    moved = zip(head, learner.critic.model.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in moved)


def test_a_shared_critic_is_saved_as_its_head() -> None:
    learner = learner_of("shared", no_kl("ppo", group_size=4))
    saved = tensors(learner)
    assert sorted(saved["critic"]) == ["head.bias", "head.weight"]
    assert not any(name.startswith("head.") for name in saved["policy"])


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.float32), ("gpt2", torch.float64)]
)
def test_the_value_after_the_last_token(
    architecture: str, dtype: torch.dtype, kind: str, layout: Name
) -> None:
    """Of the completions that are asked for, whether their last tokens are trained or not."""
    method = no_kl("ppo", group_size=4)
    learner = learner_of(kind, method, config=architectures()[architecture], dtype=dtype)
    learner.packing = Packing(30, (layout,), learner.packing.shape)
    made = [group([1.0] * 4, lengths=[5, 1, 3, 8]), group([1.0] * 3, index=1, lengths=[2, 6, 4])]
    cut = dataclasses.replace(
        made[0].completions[3], logps=(*made[0].completions[3].logps[:6], math.nan, math.nan)
    )
    made[0] = dataclasses.replace(made[0], completions=(*made[0].completions[:3], cut))
    batch: Batch = make_batch(made)
    cut_B = torch.tensor([False, True, False, True, True, False, True])
    got_B = learner.bootstrap(batch, cut_B)
    assert got_B.dtype == torch.float64 and got_B.shape == (7,)
    rows = [(g.prompt.ids, c.ids) for g in made for c in g.completions]
    with torch.no_grad():
        for b, (prompt, ids) in enumerate(rows):
            want = float(value_after(learner, (*prompt, *ids))[-1]) if cut_B[b] else 0.0
            assert float(got_B[b]) == pytest.approx(want, abs=1e-5)
    assert float(got_B.abs().min()) == 0.0 and len(set(got_B[cut_B].tolist())) == 4


def test_nobody_is_cut_off() -> None:
    learner = learner_of("own", no_kl("ppo", group_size=4))
    batch = batch_of([[3, 8, 1, 6]])
    assert learner.bootstrap(batch, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


def test_policy_and_critic_take_layouts_that_are_right_for_both() -> None:
    learner = learner_of("own", no_kl("ppo", group_size=4))
    batch, everyone = batch_of([[3, 8, 1, 6]]), torch.ones(4, dtype=torch.bool)
    assert learner.plan(batch, everyone, step=1).passes[0].layout != "rows"
    assert learner.critic is not None
    learner.critic.layouts = ("rows",)
    assert {part.layout for part in learner.plan(batch, everyone, step=1).passes} == {"rows"}
    learner.critic = None
    assert learner.plan(batch, everyone, step=1).passes[0].layout != "rows"
