"""Steps whose numbers give way: left out, held, or stopped.

Rows 12 and 15 of the fault matrix, for what is sampled and for what is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.given import CASES, RELATIVE, given, make_task
from support.hand import Step, group, make_learner, row, take_step
from support.offline import make_offline_recipe
from support.runs import make_recipe

import surefoot
from surefoot.errors import EXIT_FINDING, StoppedOnFinding
from surefoot.learner import update
from surefoot.learner.batch import make_batch
from surefoot.learner.descent import PassLoss, descend
from surefoot.learner.loss import LossInputs, microbatch_loss
from surefoot.learner.optim import Optimizer
from surefoot.learner.update import Facts
from surefoot.loops import preference, supervised
from surefoot.methods import Method, online_rows
from surefoot.objective.kl import ESTIMATORS
from surefoot.objective.policy import LOG_RATIO_LIMIT
from surefoot.run.read import read_events, read_metrics

# --- row 12: a loss or a gradient that is not finite ---


def poison_given(
    monkeypatch: pytest.MonkeyPatch, place: str, value: float, when: Callable[[], bool]
) -> None:
    """One of the passes of a step on given data gives a bad loss, or a bad gradient alone."""

    def bad(optimizer: Optimizer, passes: Any, loss_of: Any, **rest: Any) -> Any:
        if not when():
            return descend(optimizer, passes, loss_of, **rest)
        last = passes[-1]

        def poisoned(part: Any) -> PassLoss:
            out = loss_of(part)
            if part is not last:
                return out
            shift = value if place == "loss" else _zero_with_gradient(optimizer, value)
            return dataclasses.replace(out, loss=out.loss + shift)

        return descend(optimizer, passes, poisoned, **rest)

    for room in (preference, supervised):
        monkeypatch.setattr(room, "descend", bad)


def _zero_with_gradient(optimizer: Optimizer, value: float) -> torch.Tensor:
    """A term of exactly 0 whose gradient is `value` for one weight."""
    weight = optimizer.parameters[0].reshape(-1)[3]
    link = weight - weight.detach()
    link.register_hook(lambda gradient: torch.full_like(gradient, value))
    return link


FORMS = {"sft": "demonstrations", "dpo": "pairs", "kto": "labels", "reward_model": "pairs"}
POISONED = [
    *((name, "loss", math.nan) for name in CASES),
    *((name, "gradient", math.inf) for name in FORMS),
]


@pytest.mark.parametrize(("name", "place", "value"), POISONED)
def test_row_12_a_step_on_given_data_changes_no_weight_and_no_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, place: str, value: float
) -> None:
    examples = given(CASES[name].data)
    bench = make_task(CASES[name], examples, tmp_path, budget=12)
    bench.step(examples, moves=True)
    weights = [p.detach().clone() for p in bench.optimizer.parameters]
    moments = {key: value.clone() for key, value in bench.optimizer.state().items()}
    assert moments
    poison_given(monkeypatch, place, value, lambda: True)
    done, _ = bench.task.learn(examples, rate=0.05)
    assert not done.applied and not done.silent
    assert math.isfinite(done.loss) == (place == "gradient")
    assert not math.isfinite(done.grad_norm) or place == "loss"
    for parameter, before in zip(bench.optimizer.parameters, weights, strict=True):
        assert torch.equal(parameter, before) and parameter.grad is None
    after = bench.optimizer.state()
    assert all(torch.equal(after[key], moments[key]) for key in moments | after)
    monkeypatch.undo()
    bench.step(examples)


@pytest.mark.parametrize("name", FORMS)
def test_row_12_three_in_a_row_stop_a_run_on_given_data_and_it_goes_on_when_mended(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    recipe = make_offline_recipe(
        tmp_path, tiny_model, method={"name": name}, rows=FORMS[name], run__keep=9
    )
    run = tmp_path / "run"
    steps: list[int] = []

    def third_to_fifth() -> bool:
        steps.append(1)
        return 3 <= len(steps) <= 5

    poison_given(monkeypatch, "loss", math.nan, third_to_fifth)
    with pytest.raises(StoppedOnFinding, match="3 optimizer steps in a row") as stop:
        surefoot.train(recipe)
    assert stop.value.exit_code == EXIT_FINDING
    assert _column(run, "skipped_steps") == [0, 0, 1, 1, 1]
    assert ["loss" in r for r in read_metrics(run) if r["step"]] == [True] * 2 + [False] * 3
    events = [e for e in read_events(run) if e["kind"] == "nonfinite"]
    # The letters of the rows are their ids: three of them a step.
    assert [len(set(e["rows"]) & set("abcdefghij")) for e in events] == [3, 3, 3]
    saved = {step: _tensors(run, step) for step in (2, 5)}
    assert saved[2].keys() == saved[5].keys() and any("exp_avg" in key for key in saved[5])
    assert all(torch.equal(saved[2][key], saved[5][key]) for key in saved[5])
    surefoot.train(recipe)
    assert _column(run, "skipped_steps") == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    last = _tensors(run, 9)
    assert all(bool(value.isfinite().all()) for value in last.values())
    assert not all(torch.equal(last[key], saved[5][key]) for key in last)


def test_row_12_a_run_over_samples_goes_on_from_what_the_stop_saved(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    method = {"name": "reinforce", "kl": {"coef": 0.0, "measure_every": 0}}
    recipe = make_recipe(tmp_path, tiny_model, method=method, run__keep=9, run__eval_every=0)
    run = tmp_path / "run"
    passes: list[int] = []

    def bad(inputs: LossInputs, method: Method) -> Any:
        out = microbatch_loss(inputs, method)
        passes.append(1)
        return dataclasses.replace(out, loss=out.loss * math.nan) if len(passes) > 2 else out

    monkeypatch.setattr(update, "microbatch_loss", bad)
    with pytest.raises(StoppedOnFinding, match="nonfinite events"):
        surefoot.train(recipe)
    assert _column(run, "skipped_steps") == [0, 0, 1, 1, 1]
    saved = {step: _tensors(run, step) for step in (2, 5)}
    assert all(torch.equal(saved[2][key], saved[5][key]) for key in saved[5])
    monkeypatch.undo()
    surefoot.train(recipe, ["run.steps=7"])
    assert _column(run, "skipped_steps") == [0, 0, 1, 1, 1, 0, 0]


def _column(run: Path, name: str) -> list[Any]:
    return [row[name] for row in read_metrics(run) if row["step"]]


def _tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and moments."""
    files = sorted((run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors"))
    return {f"{f.name}:{key}": value for f in files for key, value in load_file(f).items()}


# --- row 15: log-probabilities of then and now that lie far apart ---

FAR = (0.0, -1.0, -80.0, -1e4)
"""Log-probabilities; pairs of them are up to 10,000 nats apart, either way."""


def _rows() -> dict[str, Method]:
    """Every row of the registry, and values of gate, ratio, KL, correction that no row has."""
    found = {name: row(name) for name in online_rows()}
    for estimator in ESTIMATORS[1:]:
        kl = {"place": "loss", "estimator": estimator, "coef": 0.1}
        found[f"grpo with {estimator}"] = row("grpo", kl=kl)
    for name in ("grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo"):
        found[f"{name} to the sampler"] = row(name, ratio={"to": "sampler"})
    for kind in ("truncate", "mask", "geometric_mask"):
        found[f"grpo and {kind}"] = row("grpo", correction=kind)
    for kind in ("truncate", "mask"):
        changes = {"kind": kind, "level": "sequence"}
        found[f"grpo and {kind} of sequences"] = row("grpo", correction=changes)
    found["no gate"] = row("grpo", gate={"kind": "none"})
    found["dual clip"] = row("grpo", gate={"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0})
    found["dppo by kl"] = row("dppo", gate={"measure": "kl"})
    found["stale"] = row("grpo", epochs=2, terms=[{"kind": "stale_mask", "delta": 0.1}])
    return found


ROWS = _rows()


def every_gap(*, reference_too: bool) -> LossInputs:
    """One completion of one token for each now, old, sampled, reference and sign of advantage.

    Else the reference says what the policy says.
    """
    grid = torch.cartesian_prod(
        *(torch.tensor(values) for values in (FAR, FAR, FAR, FAR, (1.0, 0.0, -1.0)))
    )
    now_B, old_B, sampled_B, ref_B, advantage_B = (part.reshape(-1, 1) for part in grid.T)
    ref_B = ref_B if reference_too else now_B.clone()
    mask_BT = torch.ones_like(now_B, dtype=torch.bool)
    return LossInputs(
        logp_BT=now_B.clone().requires_grad_(),
        entropy_BT=torch.ones_like(now_B),
        old_logp_BT=old_B,
        sampled_logp_BT=sampled_B,
        ref_logp_BT=ref_B,
        advantage_BT=advantage_B.double(),
        mask_BT=mask_BT,
        weight_BT=mask_BT.double() / mask_BT.numel(),
        imitated_BT=mask_BT.double() / mask_BT.numel(),
    )


@pytest.mark.parametrize("name", ROWS)
def test_row_15_no_ratio_overflows_in_loss_gradient_or_sums(name: str) -> None:
    method = ROWS[name]
    inputs = every_gap(reference_too=False)
    out = microbatch_loss(inputs, method)
    out.loss.backward()
    assert bool(out.loss.isfinite())
    assert inputs.logp_BT.grad is not None and bool(inputs.logp_BT.grad.isfinite().all())
    assert all(math.isfinite(value) for value in out.sums.values())
    # By hand: of 4 x 4 pairs of now and then, those that include -1e4 once, and -80 beside 0 or
    # -1: 2 x 3 and 2 x 2. Times 4 x 4 of what is not compared, and 3 signs.
    assert out.sums["clamped"] == (6 + 4) * 16 * 3
    assert out.sums["ratio_max"] == pytest.approx(math.exp(LOG_RATIO_LIMIT))


@pytest.mark.parametrize("name", [n for n, m in ROWS.items() if m.kl.place == "loss"])
def test_row_15_a_kl_that_overflows_is_never_finite_in_half(name: str) -> None:
    """A reference 10,000 nats above the policy: the loss or the gradient says so, or is right."""
    inputs = every_gap(reference_too=True)
    out = microbatch_loss(inputs, ROWS[name])
    out.loss.backward()
    assert inputs.logp_BT.grad is not None
    assert inputs.ref_logp_BT is not None
    finite = bool(out.loss.isfinite()) and bool(inputs.logp_BT.grad.isfinite().all())
    if ROWS[name].kl.estimator == "k2":
        assert finite
        return
    assert not finite
    # What is infinite is the token's own: gradients of tokens with a near reference are sound.
    near_BT = (inputs.ref_logp_BT - inputs.logp_BT.detach()) < 2.0
    assert bool(inputs.logp_BT.grad[near_BT].isfinite().all())


def stepped(
    monkeypatch: pytest.MonkeyPatch, name: str, which: str, logp: float
) -> tuple[Method, Step, bool]:
    """A step in which one token of one completion has another log-probability; did weights move?"""
    changes: dict[str, Any] = {"group_size": 4}
    if which == "old":
        changes["epochs"] = 2
    if name in ("grpo", "gspo"):
        changes["kl"] = {"place": "loss", "estimator": "k3", "coef": 0.1}
    method = row(name, **changes)
    batch = make_batch([group([1.0, 0.0, 0.5, 0.0]), group([0.0, 1.0, 1.0, 0.0], index=1)])
    if which == "sampled":
        batch.sampled_logp_BT[0, 0] = logp
    learner = make_learner(method)
    score = learner.score

    def torn(*args: Any, **kwargs: Any) -> Facts:
        facts = score(*args, **kwargs)
        values_BT = {"old": facts.old_logp_BT, "reference": facts.ref_logp_BT}.get(which)
        if values_BT is not None:
            values_BT[0, 0] = logp
        return facts

    monkeypatch.setattr(learner, "score", torn)
    before = [p.detach().clone() for p in learner.scorer.model.parameters()]
    step = take_step(method, batch, learner=learner)
    after = list(learner.scorer.model.parameters())
    assert all(bool(p.isfinite().all()) for p in after)
    moved = any(not torch.equal(p, old) for p, old in zip(after, before, strict=True))
    return method, step, moved


@pytest.mark.parametrize("gap", [80.0, 1e4])
@pytest.mark.parametrize("which", ["old", "sampled", "reference"])
@pytest.mark.parametrize("name", ["rloo", "grpo", "gspo", "dppo", "ppo"])
def test_row_15_a_step_with_a_token_far_away_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, which: str, gap: float
) -> None:
    method, step, moved = stepped(monkeypatch, name, which, -gap)
    assert step.report.skipped == 0 and step.report.steps >= 1 and moved
    assert math.isfinite(step.report.loss) and math.isfinite(step.report.grad_norm)
    if which == {"old": "old", "sampler": "sampled"}[method.ratio.to]:
        assert step.metrics["ratio/clamped"] == len(step.report.applied)
        assert step.metrics["ratio/max"] == pytest.approx(math.exp(LOG_RATIO_LIMIT))
    if which == "sampled":
        assert float(step.metrics["mismatch/abs_max"] or 0) > gap - 20


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_row_15_a_kl_that_overflows_is_refused_and_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, step, moved = stepped(monkeypatch, name, "reference", 1e4)
    assert (step.report.steps, step.report.skipped) == (0, 1) and not moved
    assert step.metrics["skipped_steps"] == 1 and "loss" not in step.metrics


@pytest.mark.parametrize("gap", [80.0, -1e4])
@pytest.mark.parametrize("name", RELATIVE)
def test_row_15_a_reference_far_away_from_given_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, gap: float
) -> None:
    """The reference says of the first answer alone something else by `gap` nats."""
    examples = given(CASES[name].data)
    bench = make_task(CASES[name], examples, tmp_path)
    reference = bench.task.reference  # type: ignore[union-attr]
    assert reference is not None
    of = reference.of

    def torn(examples: Any) -> torch.Tensor:
        score_B = of(examples).clone()
        score_B[0] += gap
        return score_B

    monkeypatch.setattr(reference, "of", torn)
    bench.optimizer.applies = True
    done, metrics = bench.task.learn(examples, rate=0.05)
    assert done.applied and math.isfinite(done.loss) and math.isfinite(done.grad_norm)
    assert all(bool(p.isfinite().all()) for p in bench.optimizer.parameters)
    assert all(value is None or math.isfinite(float(value)) for value in metrics.values())
