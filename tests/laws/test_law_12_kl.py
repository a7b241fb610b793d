"""Law 12: KL says which: its three places, its names, and what is measured when nothing is paid."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hand import (
    Recorder,
    credited,
    group,
    make_learner,
    no_kl,
    prompt,
    row,
    score,
    take_step,
)
from support.loop import make_loop

from surefoot.errors import RecipeError
from surefoot.learner.batch import make_batch
from surefoot.learner.scorer import Scorer
from surefoot.learner.update import Facts
from surefoot.loops.assemble import keeps_reference
from surefoot.loops.credit import Credit, kl_in_reward
from surefoot.methods import Method, online_rows
from surefoot.records import Completion, Group, ScoreStatus, StopReason

# k1 per token: 0.25 + 0.5 in the first completion; 0, -0.25 and 0.5 in the second.
OLD = torch.tensor([[-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
GAP = torch.tensor([[0.25, 0.5, 0.0], [0.0, -0.25, 0.5]], dtype=torch.float64)
FACTS = Facts(OLD, OLD - GAP, (0, 1))
TWO = [2, 3]


def credit_of(method: Method, groups: list[Group], facts: Facts) -> Credit:
    batch = make_batch(groups)
    return credited(method, batch, facts)


def test_reward_sequence_enters_before_the_baseline() -> None:
    method = row("rloo", group_size=2, kl={"coef": 0.5})
    found = credit_of(method, [group([1.0, 0.0], lengths=TWO)], FACTS)
    # 1 - 0.5 * 0.75 and 0 - 0.5 * 0.25.
    assert found.shaped_PG.tolist() == [[0.625, -0.125]]
    assert found.advantage_PG.tolist() == [[0.75, -0.75]]
    assert found.trained_kl == {"kl/reward_sequence_k1_sequence": 0.5}


def test_reward_sequence_without_a_baseline() -> None:
    method = row("reinforce", group_size=2, kl={"coef": 0.5})
    found = credit_of(method, [group([1.0, 0.0], lengths=TWO)], FACTS)
    assert found.signal.advantage_BT.tolist() == [[0.625, 0.625, 0.0], [-0.125, -0.125, -0.125]]


def test_a_completion_without_score_pays_and_costs_nothing() -> None:
    method = row("rloo", group_size=3, min_group=2, kl={"coef": 0.5})
    torn = group([1.0, 0.0, ScoreStatus.INFRA_ERROR], lengths=[2, 3, 3])
    nan = torch.full((1, 3), math.nan, dtype=torch.float64)
    facts = Facts(torch.cat([OLD, nan]), torch.cat([OLD - GAP, nan]), (0, 1))
    found = credit_of(method, [torn], facts)
    assert found.advantage_PG.tolist() == [[0.75, -0.75, 0.0]]
    assert found.trained_kl == {"kl/reward_sequence_k1_sequence": 0.5}


@pytest.mark.parametrize(
    ("gamma", "want"),
    [
        # From the end: 1 - 0.5*0.5 = 0.75, then 0.75 - 0.5*0.25; and -0.25, +0.125 - 0.25, - 0.
        (1.0, [[0.625, 0.75, 0.0], [-0.125, -0.125, -0.25]]),
        # 0.75, then 0.375 - 0.125; and -0.25, 0.125 - 0.125, 0.
        (0.5, [[0.25, 0.75, 0.0], [0.0, 0.0, -0.25]]),
    ],
)
def test_reward_token_enters_the_return_to_go(gamma: float, want: list[list[float]]) -> None:
    method = row(
        "reinforce",
        group_size=2,
        credit={"kind": "reward_to_go", "gamma": gamma},
        kl={"place": "reward_token", "coef": 0.5},
    )
    found = credit_of(method, [group([1.0, 0.0], lengths=TWO)], FACTS)
    assert found.signal.advantage_BT.tolist() == want
    # Mean over the five tokens of 0.25, 0.5, 0, -0.25, 0.5.
    assert found.trained_kl == {"kl/reward_token_k1_token": pytest.approx(0.2)}


def test_reward_token_comes_after_the_baseline() -> None:
    method = row(
        "reinforce",
        group_size=2,
        baseline="batch",
        credit="reward_to_go",
        kl={"place": "reward_token", "coef": 0.5},
    )
    found = credit_of(method, [group([1.0, 0.0], lengths=TWO)], FACTS)
    # The score 1 became 1/2 and 0 became -1/2; the KL is charged as it is.
    assert found.signal.advantage_BT[:, 0].tolist() == [0.125, -0.625]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_loss_term_names_estimator_and_unit(estimator: str) -> None:
    method = row("grpo", group_size=4, kl={"estimator": estimator})
    step = take_step(method, [group([1.0, 0.0, 0.5, 0.0])])
    trained = [key for key in step.metrics if key.startswith("kl/")]
    assert trained == [f"kl/loss_{estimator}_token"]
    # `kl` is k3 whatever is trained.
    same = step.metrics[trained[0]] == pytest.approx(step.metrics["kl"], rel=1e-5)
    assert same == (estimator == "k3")


def test_the_loss_term_is_in_the_loss() -> None:
    """Equal rewards leave the KL alone: loss = coef x mean over sequences of the mean k3."""
    method = row("grpo", group_size=2, kl={"coef": 0.5})
    even = [group([1.0, 1.0], lengths=[3, 3])]
    step = take_step(method, even)
    assert step.report.loss == pytest.approx(0.5 * float(step.metrics["kl"]), rel=1e-5)  # type: ignore[arg-type]
    assert credit_of(method, even, Facts()).trained_kl == {}


def test_two_places_at_once_cannot_be_written() -> None:
    with pytest.raises(RecipeError, match=r"kl\.place"):
        row("grpo", kl={"place": ["loss", "reward_sequence"]})
    with pytest.raises(RecipeError, match=r"kl\.place.*reward_to_go"):
        row("grpo", kl={"place": "reward_token"})


@pytest.mark.parametrize(
    "name",
    [name for name, value in online_rows().items() if value.kl.place != "none"],  # type: ignore[union-attr]
)
def test_coefficient_zero_enters_nowhere(name: str) -> None:
    free = row(name, group_size=4, kl={"coef": 0.0})
    assert not kl_in_reward(free)
    groups = [group([1.0, 0.0, 0.5, 0.0])]
    step, bare = take_step(free, groups), take_step(no_kl(name, group_size=4), groups)
    assert torch.equal(step.gradient, bare.gradient)
    assert not any(key.startswith("kl") for key in step.metrics)


@pytest.mark.parametrize(("every", "seen"), [(1, [1, 2, 3, 4]), (2, [1, 3]), (3, [1, 4]), (0, [])])
def test_coefficient_zero_is_measured_now_and_then(
    tiny_model: Path, tmp_path: Path, every: int, seen: list[int]
) -> None:
    method = {"name": "grpo", "group_size": 2, "kl": {"coef": 0.0, "measure_every": every}}
    bench = make_loop(
        tiny_model, tmp_path / "run", method=method, judge=lambda p, s, c: float(s), steps=4
    )
    assert (bench.learner.reference is not None) == (every > 0)
    bench.run()
    rows_ = bench.metrics()
    assert [r["step"] for r in rows_ if "kl" in r] == seen
    assert all(key == "kl" for r in rows_ for key in r if key.startswith("kl"))
    for r in rows_:
        if "kl" in r:
            assert r["kl"] == 0.0 if r["step"] == 1 else r["kl"] > 0.0


@pytest.mark.parametrize("place", ["none", "loss"])
def test_a_row_without_place_measures_as_well(place: str, tiny_model: Path, tmp_path: Path) -> None:
    """DESIGN 5: with coefficient 0 the reference is scored every measure_every steps."""
    method = {
        "name": "dapo",
        "group_size": 2,
        "kl": {"place": place, "coef": 0.0, "measure_every": 1},
    }
    bench = make_loop(tiny_model, tmp_path / "run", method=method, judge=lambda p, s, c: float(s))
    bench.run()
    assert [r["kl"] == 0.0 for r in bench.metrics()] == [True, False]
    assert keeps_reference(bench.parts.row) and not keeps_reference(row("dapo"))


def _sampled(policy: Scorer, count: int) -> list[Group]:
    """One-token completions drawn from the policy itself, all scored 0."""
    logits_V = policy.model(torch.tensor([prompt().ids])).logits[0, -1].detach()
    logp_V = logits_V.double().log_softmax(0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(logp_V.exp(), count, replacement=True, generator=generator)
    completions = tuple(
        Completion((int(t),), (float(logp_V[t]),), StopReason.STOP, 0, i, "")
        for i, t in enumerate(tokens)
    )
    scores = tuple(score(0.0) for _ in completions)
    return [replace(group([0.0]), completions=completions, scores=scores)]


def _exact_kl(policy: Scorer, reference: Scorer) -> float:
    ids = torch.tensor([prompt().ids])
    with torch.no_grad():
        now_V, ref_V = (
            s.model(ids).logits[0, -1].double().log_softmax(0) for s in (policy, reference)
        )
    return float((now_V.exp() * (now_V - ref_V)).sum())


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "token"])
def test_with_rewards_all_zero_a_step_brings_the_policy_closer(name: str) -> None:
    """The exact KL over the whole vocabulary falls, wherever the term enters."""
    if name == "token":
        to_go = {"place": "reward_token", "coef": 0.5}
        method = row("reinforce", group_size=256, credit="reward_to_go", kl=to_go)
    else:
        method = row(name, group_size=256, kl={"coef": 0.5})
    learner = make_learner(method, rate=1e-3)
    assert learner.reference is not None and isinstance(learner.optimizer, Recorder)
    before = _exact_kl(learner.scorer, learner.reference)
    step = take_step(method, _sampled(learner.scorer, 256), learner=learner)
    after = _exact_kl(learner.scorer, learner.reference)
    assert step.report.steps == 1 and before > 0.5
    assert after < before - 0.01, (before, after)
