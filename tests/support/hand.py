"""Groups made by hand, and one step of a tiny policy on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from support.tiny import make_model
from surefoot.learner.batch import Batch, Packing, make_batch
from surefoot.learner.critic import Critic, ValueModel, value_backbone
from surefoot.learner.layouts import NAMES
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.learner.update import Facts, Learner, UpdateReport
from surefoot.loops import metrics as names
from surefoot.loops.assemble import keeps_reference
from surefoot.loops.credit import Credit, assign, kl_in_reward, needs_facts
from surefoot.loops.health import critic_metrics
from surefoot.loops.history import HistoryBook
from surefoot.loops.standing import Standing, stand
from surefoot.methods import Critic as CriticRow
from surefoot.methods import History, Method, resolve
from surefoot.recipe.schema import Optim
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason

CAP = 10
"""`max_new_tokens` of every step here."""
WEIGHTS = {"r": 1.0}
"""The one part that scores here have."""
Told = float | ScoreStatus | Score


def row(name: str, **changes: object) -> Method:
    """A built-in row with fields changed, as a recipe would change them."""
    made = resolve({"name": name, **changes})
    assert isinstance(made, Method)
    return made


def no_kl(name: str, **changes: object) -> Method:
    """The same, without any KL term or measurement."""
    return row(name, kl={"place": "none", "coef": 0.0, "measure_every": 0}, **changes)


def score(told: Told) -> Score:
    """A number is a valid score; a status is one without a value."""
    if isinstance(told, Score):
        return told
    if isinstance(told, ScoreStatus):
        return Score(told, None, {"r": None}, "said so")
    return Score(ScoreStatus.SCORED, float(told), {"r": float(told)})


def prompt(index: int = 0, *, length: int = 3) -> Prompt:
    ids = tuple(10 + (7 * index + i) % 60 for i in range(length))
    return Prompt(f"p{index}", index, ids, f"prompt {index}")


def group(
    scores: Sequence[Told],
    *,
    index: int = 0,
    lengths: Sequence[int] | None = None,
    stops: Sequence[StopReason] | None = None,
) -> Group:
    """One completion per score; token ids are a function of prompt, sample and place.

    The greedy completion scores 0.25.
    """
    count = len(scores)
    lengths = lengths or [2 + (3 * index + i) % 4 for i in range(count)]
    stops = stops or [StopReason.STOP] * count
    completions = []
    for sample, (length, stop) in enumerate(zip(lengths, stops, strict=True)):
        ids = tuple(8 + (31 * index + 13 * sample + 5 * t) % 80 for t in range(length))
        logps = tuple(-1.0 - 0.1 * t for t in range(length))
        completions.append(Completion(ids, logps, stop, 0, sample, f"text {sample}"))
    greedy = Completion((9, 2), (-0.1, -0.1), StopReason.STOP, 0, 0, "greedy")
    told = tuple(score(said) for said in scores)
    return Group(prompt(index), tuple(completions), told, greedy, score(0.25))


def stood(method: Method, batch: Batch) -> Standing:
    return stand(method, batch, max_new_tokens=CAP, weights=WEIGHTS)


def credited(method: Method, batch: Batch, facts: Facts | None = None) -> Credit:
    """Stand and assign; a history baseline has seen one reward of 0.5 before."""
    return assigned(method, batch, stood(method, batch), facts or Facts())


def assigned(method: Method, batch: Batch, standing: Standing, facts: Facts) -> Credit:
    """A critic that nobody asked says 0.25 everywhere."""
    book = None
    if method.critic.kind != "none" and facts.value_BT is None:
        facts = dataclasses.replace(facts, value_BT=torch.full_like(batch.sampled_logp_BT, 0.25))
    if isinstance(method.baseline, History):
        book = HistoryBook(method.baseline)
        book.learn([("p", "default", [0.5])], step=1)
    return assign(method, batch, standing, facts, book=book)


class Recorder(Optimizer):
    """An optimizer that keeps the gradients it was given; it steps unless told not to."""

    applies = True

    def step(self, *, rate: float, norm: float) -> None:
        self.gradients.append(flat_gradient(self))
        if self.applies:
            super().step(rate=rate, norm=norm)

    @property
    def gradients(self) -> list[Tensor]:
        return self.__dict__.setdefault("_gradients", [])


def flat_gradient(optimizer: Optimizer) -> Tensor:
    """All gradients as one float64 vector; a parameter without one counts as 0."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in optimizer.parameters]
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def make_learner(
    method: Method,
    *,
    config: object = None,
    dtype: torch.dtype = torch.float32,
    reference_seed: int = 1,
    rate: float = 1e-2,
    budget: int = 4096,
) -> Learner:
    """A learner on the tiny model; its reference is another model, so that KL is not 0."""

    def scorer(seed: int) -> Scorer:
        model = make_model(config, seed=seed, dtype=dtype)  # type: ignore[arg-type]
        return Scorer(model, compute=dtype, head_dtype=dtype, temperature=1.0)

    policy = scorer(0)
    critic = None
    if isinstance(method.critic, CriticRow):
        backbone = value_backbone(scorer(2).model, layers=None)
        value_model = ValueModel(backbone, compute=dtype)
        # Not zero, so that values differ from token to token.
        torch.nn.init.normal_(
            value_model.head.weight, std=0.3, generator=torch.Generator().manual_seed(3)
        )
        own = Recorder(value_model, Optim(learning_rate=rate), steps=10)
        critic = Critic(value_model, own, method.critic.loss_weight, method.critic.clip)
    return Learner(
        policy,
        Recorder(policy.model, Optim(learning_rate=rate), steps=10),
        method,
        reference=scorer(reference_seed) if keeps_reference(method) else None,
        packing=Packing(budget, NAMES, policy.shape),
        constant=float(CAP),
        seed=0,
        critic=critic,
    )


@dataclass(frozen=True)
class Step:
    """Everything that one step leaves behind."""

    standing: Standing
    credit: Credit
    report: UpdateReport
    gradient: Tensor
    """Of the first optimizer step; zeros if there was none."""
    metrics: names.Metrics


def take_step(
    method: Method,
    groups: Sequence[Group] | Batch,
    *,
    learner: Learner | None = None,
    poison: bool = False,
) -> Step:
    """Stand, assign and update as the online loop does. `poison` writes NaN wherever a value must
    not be looked at: padding, absent completions, tokens that were not scored."""
    learner = learner or make_learner(method)
    batch = groups if isinstance(groups, Batch) else make_batch(groups)
    standing = stood(method, batch)
    present_B = standing.present_PG.reshape(-1)
    hidden_BT = ~(batch.mask_BT & present_B[:, None])
    facts = Facts()
    if needs_facts(method):
        plan = learner.plan(batch, present_B, step=1)
        charged = kl_in_reward(method)
        in_loss = method.kl.place == "loss" and method.kl.coef != 0
        old = charged or not learner.single_step
        facts = learner.score(batch, plan, old=old, reference=charged or in_loss)
        facts = _poisoned(facts, hidden_BT) if poison else facts
        credit = assigned(method, batch, standing, facts)
        plan = plan.only(credit.forwarded_B)
    else:
        credit = assigned(method, batch, standing, facts)
        plan = learner.plan(batch, credit.forwarded_B, step=1)
        in_loss = method.kl.place == "loss" and method.kl.coef != 0
        old = not learner.single_step
        if old or in_loss:
            facts = learner.score(batch, plan, old=old, reference=in_loss)
            facts = _poisoned(facts, hidden_BT) if poison else facts
    signal = credit.signal
    if poison:
        advantage_BT = torch.where(hidden_BT, torch.nan, signal.advantage_BT)
        signal = dataclasses.replace(signal, advantage_BT=advantage_BT)
        if signal.return_BT is not None:
            return_BT = torch.where(hidden_BT, torch.nan, signal.return_BT)
            signal = dataclasses.replace(signal, return_BT=return_BT)
    report = learner.update(batch, plan, signal, facts, step=1)
    gradient = _first(learner.optimizer)
    if learner.critic is not None:
        gradient = torch.cat([gradient, _first(learner.critic.optimizer)])
    out = names.credit_metrics(standing, credit)
    out.update(names.update_metrics(batch, standing, facts, report, method))
    if facts.value_BT is not None:
        out.update(critic_metrics(batch, standing, credit, facts, report, seed=0, step=1))
    return Step(standing, credit, report, gradient, out)


def _first(optimizer: Optimizer) -> Tensor:
    assert isinstance(optimizer, Recorder)
    seen = optimizer.gradients
    return seen[0] if seen else torch.zeros_like(flat_gradient(optimizer))


def _poisoned(facts: Facts, hidden_BT: Tensor) -> Facts:
    def nan(values_BT: Tensor | None) -> Tensor | None:
        return None if values_BT is None else torch.where(hidden_BT, torch.nan, values_BT)

    return Facts(
        nan(facts.old_logp_BT), nan(facts.ref_logp_BT), facts.ref_rows, nan(facts.value_BT)
    )


def apart(one: Tensor, other: Tensor) -> float:
    """Relative distance of two gradients, by their norms."""
    scale = float(torch.maximum(one.norm(), other.norm()))
    return float((one - other).norm()) / scale if scale else 0.0
