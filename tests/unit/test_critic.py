"""The critic: its head, its layers, the layouts it shares with the policy, and that it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.hand import credited, group, make_learner, no_kl, row, take_step
from support.loop import make_loop
from support.steps import batch_of
from support.tiny import architectures, make_model

from surefoot.errors import ModelError, RecipeError
from surefoot.learner.batch import make_batch
from surefoot.learner.critic import ValueModel, value_backbone
from surefoot.learner.layouts import NAMES, Bundle, Name, build
from surefoot.learner.update import Facts
from surefoot.loops.critics import make_critic
from surefoot.recipe import CriticModel, load


def value_model(architecture: str = "llama", *, layers: int | None = None) -> ValueModel:
    model = make_model(architectures()[architecture], seed=4)
    made = ValueModel(value_backbone(model, layers=layers), compute=torch.float32)
    torch.nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(1))
    return made


def test_the_head_starts_at_zero() -> None:
    made = ValueModel(value_backbone(make_model(), layers=None), compute=torch.float32)
    part = build("rows", [Bundle((5, 6, 7), ((8, 9),), (0,))])
    assert made(part).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_a_value_is_that_of_the_state_before_the_token(architecture: str, layout: Name) -> None:
    """Against the model alone: the state that predicts token t, for two completions of a prompt."""
    made = value_model(architecture)
    prompt, completions = (5, 6, 7), ((8, 9, 10), (11, 12))
    part = build(layout, [Bundle(prompt, completions, (0, 1))])
    with torch.no_grad():
        got_N = made(part)
        for r, completion in enumerate(completions):
            states = made.model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state
            want_T = made.head(states[0, len(prompt) - 1 : -1])[:, 0]
            mine = got_N[part.rows_N == r][part.columns_N[part.rows_N == r].argsort()]
            assert torch.allclose(mine, want_T, atol=1e-5)


def test_lower_layers_are_kept() -> None:
    model = make_model()
    whole, cut = value_backbone(model, layers=None), value_backbone(model, layers=1)
    assert len(whole.layers) == 2 and len(cut.layers) == 1 and cut.config.num_hidden_layers == 1
    assert len(model.model.layers) == 2 and model.config.num_hidden_layers == 2
    with pytest.raises(ModelError, match=r"critic\.layers: 3, but the model has 2"):
        value_backbone(model, layers=3)


def test_advantages_and_targets_by_hand() -> None:
    """Score 1 after two tokens, V 0.25 before each; gamma 1, lam 0.5.

    Last: 1 - 0.25 = 0.75. First: (0.25 - 0.25) + 0.5 * 0.75 = 0.375. Targets: A + V.
    """
    method = no_kl("ppo", group_size=1, credit={"lam": 0.5}, whiten="none")
    found = credited(method, make_batch([group([1.0], lengths=[2])]))
    assert found.signal.advantage_BT.tolist() == [[0.375, 0.75]]
    assert found.signal.return_BT is not None and found.monte_carlo_BT is not None
    assert found.signal.return_BT.tolist() == [[0.625, 1.0]]
    assert found.monte_carlo_BT.tolist() == [[1.0, 1.0]]


def test_the_critics_own_lambda() -> None:
    method = no_kl("ppo", group_size=1, credit={"lam": 0.5, "critic_lam": 1.0}, whiten="none")
    found = credited(method, make_batch([group([1.0], lengths=[2])]))
    assert found.signal.advantage_BT.tolist() == [[0.375, 0.75]]
    assert found.signal.return_BT is not None
    assert found.signal.return_BT.tolist() == [[1.0, 1.0]]


def test_a_lambda_of_the_length() -> None:
    """alpha 1: lengths 1 and 2 have lambda 0 and 0.5."""
    method = no_kl("ppo", group_size=2, credit={"length_alpha": 1.0}, whiten="none")
    found = credited(method, make_batch([group([1.0, 1.0], lengths=[1, 2])]))
    assert found.signal.advantage_BT.tolist() == [[0.75, 0.0], [0.375, 0.75]]


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_group_and_critic_are_mixed(weight: float) -> None:
    """The group part is grpo's, the rest is ppo's; a dead group keeps the rest."""
    groups = [group([1.0, 0.0], lengths=[2, 3]), group([1.0, 1.0], index=1, lengths=[2, 2])]
    method = no_kl("grpo_critic", group_size=2, credit={"group_weight": weight})
    mixed = credited(method, make_batch(groups))
    theirs = credited(no_kl("grpo", group_size=2), make_batch(groups)).signal.advantage_BT
    ours = credited(no_kl("ppo", group_size=2), make_batch(groups)).signal.advantage_BT
    want = weight * theirs + (1 - weight) * ours
    assert torch.allclose(mixed.signal.advantage_BT, want, rtol=0, atol=1e-12)
    assert weight not in (0.0, 1.0) or torch.equal(mixed.signal.advantage_BT, want)
    assert mixed.dead_P.tolist() == [False, True]
    alive = bool((mixed.signal.advantage_BT[2:] != 0).any())
    assert alive == (weight < 1)


def test_the_two_losses_do_not_touch_each_other() -> None:
    """A critic of other targets leaves the policy's gradient as it is, and the other way round."""
    method = no_kl("ppo", group_size=4)
    groups = [group([1.0, 0.0, 0.5, 0.0])]

    def gradients(*, loss_weight: float, gate: str) -> tuple[torch.Tensor, torch.Tensor]:
        changed = no_kl("ppo", group_size=4, critic={"loss_weight": loss_weight}, gate=gate)
        learner = make_learner(changed)
        take_step(changed, groups, learner=learner)
        assert learner.critic is not None
        policy, critic = learner.optimizer, learner.critic.optimizer
        return policy.gradients[0], critic.gradients[0]  # type: ignore[attr-defined]

    one, other = gradients(loss_weight=0.1, gate="clip"), gradients(loss_weight=0.2, gate="clip")
    assert torch.equal(one[0], other[0])
    assert torch.allclose(2 * one[1], other[1], rtol=1e-5)
    assert float(one[1].norm()) > 0 and method.critic.kind == "critic"


def test_values_where_nothing_is_trained_do_not_matter() -> None:
    """NaN of the critic at padding and at absent completions (law 1)."""
    method = no_kl("ppo", group_size=4)
    batch = batch_of([[3, 8, 1, 6]])
    values = torch.linspace(-1, 1, batch.mask_BT.numel(), dtype=torch.float64)
    value_BT = values.reshape(batch.mask_BT.shape)
    poisoned = torch.where(batch.mask_BT, value_BT, torch.nan)
    clean, torn = (credited(method, batch, Facts(value_BT=v)) for v in (value_BT, poisoned))
    assert torch.equal(clean.signal.advantage_BT, torn.signal.advantage_BT)
    assert clean.signal.return_BT is not None and torn.signal.return_BT is not None
    assert torch.equal(clean.signal.return_BT, torn.signal.return_BT)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_it_learns_what_the_reward_is(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Every second prompt is worth 1: foreseen from the prompt alone."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "ppo", "group_size": 2, "kl": {"coef": 0.0}, "critic": {"clip": None}},
        judge=lambda prompt, sample, call: float(int(prompt.text.split()[1]) % 2),
        rows=4,
        prompts=4,
        rate=0.02,
        steps=40,
    )
    if kind == "shared":
        parts = bench.parts
        recipe = dataclasses.replace(parts.recipe, critic=CriticModel(share_trunk=True))
        bench.learner.critic = make_critic(recipe, parts.row, parts.loaded, bench.learner.scorer)
    bench.run()
    seen = [r["critic/explained_variance"] for r in bench.metrics()]
    assert seen[0] == 0.0  # a head of zeros
    # The policy's own loss pulls at a shared trunk.
    explained, left = {"own": (0.8, 0.1), "shared": (0.5, 0.3)}[kind]
    assert sum(seen[-5:]) / 5 > explained
    assert bench.metrics()[-1]["critic/loss"] < left * bench.metrics()[0]["critic/loss"]


def test_keys_of_a_critic_that_is_not_there_are_refused() -> None:
    sections = {
        "data": {"source": "addition"},
        "reward": {"use": "numeric"},
        "method": "grpo",
        "run": {"steps": 2},
        "critic": {"layers": 3},
    }
    with pytest.raises(RecipeError, match=r"critic\.layers: grpo has no critic"):
        load(sections)
    assert load({**sections, "method": "ppo"}).critic.layers == 3
    assert dataclasses.is_dataclass(row("ppo").critic)
