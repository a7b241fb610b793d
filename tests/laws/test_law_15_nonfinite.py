"""Law 15: non-finite stops at the door; and a non-finite sampled log-probability is absent."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand import Recorder, apart, group, make_learner, no_kl, prompt, row, take_step
from support.loop import Bench, make_loop, plain_script

from surefoot.errors import StoppedOnFinding
from surefoot.learner import update
from surefoot.learner.loss import LossInputs, LossSums, microbatch_loss
from surefoot.learner.update import Learner
from surefoot.methods import FAMILIES, Method, online_rows
from surefoot.records import Group, Prompt
from surefoot.rollout.scripted import Line

REDUCTIONS = tuple(FAMILIES["reduce"].kinds)
BAD = (math.nan, math.inf, -math.inf)


def poison_loss(monkeypatch: pytest.MonkeyPatch, value: float, when: Any = lambda: True) -> None:
    """The loss becomes `value`; its gradient stays what it was."""

    def bad(inputs: LossInputs, method: Method) -> LossSums:
        out = microbatch_loss(inputs, method)
        return LossSums(out.loss + value, out.sums) if when() else out

    monkeypatch.setattr(update, "microbatch_loss", bad)


def poison_gradient(learner: Learner, value: float) -> None:
    """One weight's gradient gets `value` in one place; the loss is finite."""

    def bad(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    next(iter(learner.scorer.model.parameters())).register_hook(bad)


def whole() -> list[Group]:
    return [group([1.0, 0.0, 0.5, 0.0]), group([0.0, 1.0, 1.0, 0.0], index=1)]


@pytest.mark.fault(12)
@pytest.mark.parametrize("place", ["loss", "gradient"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", online_rows())
def test_the_optimizer_step_is_skipped(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, place: str
) -> None:
    method = row(name, group_size=4)
    learner = make_learner(method)
    before = [p.clone() for p in learner.scorer.model.parameters()]
    if place == "loss":
        poison_loss(monkeypatch, value)
    else:
        poison_gradient(learner, value)
    step = take_step(method, whole(), learner=learner)
    assert (step.report.steps, step.report.skipped) == (0, 1)
    assert step.report.bad_rows == tuple(range(8))
    assert step.metrics["skipped_steps"] == 1 and "loss" not in step.metrics
    assert not learner.optimizer.state()
    for parameter, old in zip(learner.scorer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


@pytest.mark.fault(12)
def test_only_the_bad_minibatch_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    method = no_kl("grpo", group_size=4, minibatches=2)
    calls: list[int] = []

    def second() -> bool:
        calls.append(1)
        return len(calls) == 2

    poison_loss(monkeypatch, math.nan, second)
    learner = make_learner(method)
    step = take_step(method, whole(), learner=learner)
    assert (step.report.steps, step.report.skipped) == (1, 1)
    assert step.report.bad_rows in ((0, 1, 2, 3), (4, 5, 6, 7))
    assert math.isfinite(step.report.loss) and math.isfinite(step.report.grad_norm)
    assert all(bool(p.isfinite().all()) for p in learner.scorer.model.parameters())


def bench_of(model: Path, run: Path, **changes: Any) -> Bench:
    changes = {"steps": 8, "judge": lambda p, s, c: float(s), **changes}
    return make_loop(
        model,
        run,
        method={"name": "grpo", "group_size": 2, "kl": {"coef": 0.0, "measure_every": 0}},
        **changes,
    )


@pytest.mark.fault(12)
def test_three_in_a_row_stop_resumably_and_name_the_prompts(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    bench = bench_of(tiny_model, tmp_path / "run")
    poison_loss(monkeypatch, math.nan, lambda: bench.loop.progress.step >= 2)
    with pytest.raises(StoppedOnFinding, match="3 optimizer steps in a row") as stop:
        bench.run()
    assert stop.value.exit_code == 3
    assert [r["skipped_steps"] for r in bench.metrics()] == [0, 0, 1, 1, 1]
    events = bench.events("nonfinite")
    assert [event["prompts"] for event in events] == [sorted(a) for a in bench.grader.asked[2:]]
    assert "step 3" in events[0]["message"]
    assert bench.desk.directory.checkpoint_steps() == [5]
    assert all(bool(p.isfinite().all()) for p in bench.learner.scorer.model.parameters())


@pytest.mark.fault(12)
def test_two_in_a_row_are_survived(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    bench = bench_of(tiny_model, tmp_path / "run")
    poison_loss(monkeypatch, math.inf, lambda: bench.loop.progress.step % 3 != 2)
    bench.run()
    assert [r["skipped_steps"] for r in bench.metrics()] == [1, 1, 0, 1, 1, 0, 1, 1]
    assert len(bench.events("nonfinite")) == 6


@pytest.mark.fault(12)
def test_a_step_without_signal_between_does_not_reset_the_count(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    """No optimizer step was applied, so nothing says that the weights are sound again."""
    bench = bench_of(tiny_model, tmp_path / "run")
    bench.grader.judge = lambda p, s, c: 0.5 if c == 1 else float(s)
    poison_loss(monkeypatch, math.nan)
    with pytest.raises(StoppedOnFinding, match="in a row"):
        bench.run()
    assert [r["skipped_steps"] for r in bench.metrics()] == [1, 0, 1, 1]


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("pattern", "stops_at"),
    [
        # One character per optimizer step, two of them in each of six rollout steps; x is bad.
        ("x.x.x.x.x.x.", None),
        (".x.x.x.x.x.x", None),
        ("xx.xx.xx.xx.", None),
        (".xxx........", 2),
        ("..x.xx..xxx.", 6),
    ],
)
def test_in_a_row_is_counted_over_optimizer_steps(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
    pattern: str,
    stops_at: int | None,
) -> None:
    """A step that was applied ends the row, also between the minibatches of one rollout step."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={
            "name": "grpo",
            "group_size": 2,
            "minibatches": 2,
            "kl": {"coef": 0.0, "measure_every": 0},
        },
        judge=lambda p, s, c: float(s),
        steps=6,
    )
    fates = iter(pattern)
    poison_loss(monkeypatch, math.nan, lambda: next(fates) == "x")
    if stops_at is None:
        bench.run()
    else:
        with pytest.raises(StoppedOnFinding, match="3 optimizer steps in a row"):
            bench.run()
    assert len(bench.metrics()) == (stops_at or 6)


@pytest.mark.fault(12)
def test_a_run_that_goes_on_after_three_may_recover(tiny_model: Path, tmp_path: Path) -> None:
    """Resumed with what the message named mended: the count of the stop is not held against it."""
    bench = bench_of(tiny_model, tmp_path / "run", steps=2)
    bench.loop.progress.nonfinite = 3
    bench.run()
    assert bench.loop.progress.nonfinite == 0 and len(bench.metrics()) == 2


def test_nor_is_it_while_no_optimizer_step_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    """Equal rewards: nothing to learn from, and nothing that is not finite either."""
    bench = bench_of(tiny_model, tmp_path / "run", steps=2, judge=lambda p, s, c: 1.0)
    bench.loop.progress.nonfinite = 3
    bench.run()
    assert bench.loop.progress.nonfinite == 3
    assert [row["optimizer_steps"] for row in bench.metrics()] == [0, 0]


# --- a sampled log-probability that is not finite ---


def torn(groups: list[Group], value: float) -> list[Group]:
    """The second token of the first completion has `value` as its sampled log-probability."""
    first = groups[0].completions[0]
    changed = dataclasses.replace(first, logps=(first.logps[0], value, *first.logps[2:]))
    rest = groups[0].completions[1:]
    return [dataclasses.replace(groups[0], completions=(changed, *rest)), *groups[1:]]


def token_logps(learner: Learner, one: Group) -> list[torch.Tensor]:
    """Log-probability of every token, by the model's own forward."""
    out = []
    for completion in one.completions:
        ids = torch.tensor([[*one.prompt.ids, *completion.ids]])
        logp_TV = learner.scorer.model(ids).logits[0].float().log_softmax(-1)
        start = len(one.prompt.ids) - 1
        targets = torch.tensor(completion.ids)
        out.append(logp_TV[start : start + len(targets)].gather(1, targets[:, None])[:, 0])
    return out


@pytest.mark.fault(13)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("reduce", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_the_token_is_in_no_loss_and_no_denominator(reduce: str, value: float) -> None:
    """Against the loss written out: rewards 1, 0 of 3 and 2 tokens, one token gone."""
    method = no_kl("reinforce", group_size=2, reduce=reduce, baseline="leave_one_out")
    whole_ = [group([1.0, 0.0], lengths=[3, 2])]
    step = take_step(method, torn(whole_, value))
    learner = make_learner(method)
    first, second = token_logps(learner, whole_[0])
    seen = first[0] + first[2]
    parts = {
        "token_mean": (seen - second.sum()) / 4,
        "sequence_mean": (seen / 2 - second.mean()) / 2,
        "sequence_sum": (seen - second.sum()) / 2,
        "constant": (seen - second.sum()) / (2 * 10),
    }
    loss = -parts[reduce]
    loss.backward()
    want = torch.cat([p.grad.double().reshape(-1) for p in learner.optimizer.parameters])  # type: ignore[union-attr]
    assert apart(step.gradient, want) < 1e-5
    assert step.report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert step.metrics["nonfinite_logps"] == 1


@pytest.mark.fault(13)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", online_rows())
def test_which_non_finite_value_does_not_matter(name: str, reduce: str) -> None:
    method = row(name, group_size=4, reduce=reduce)
    steps = [take_step(method, torn(whole(), value)) for value in BAD]
    clean = take_step(method, whole())
    for step in steps:
        assert torch.equal(step.gradient, steps[0].gradient)
        assert step.metrics == steps[0].metrics
        assert all(math.isfinite(float(value)) for value in step.metrics.values())  # type: ignore[arg-type]
    assert apart(steps[0].gradient, clean.gradient) > 1e-4


@pytest.mark.fault(13)
def test_a_completion_of_such_tokens_alone_is_absent() -> None:
    method = no_kl("rloo", group_size=3, min_group=2)
    nan = group([1.0, 0.0, 1.0])
    lost = dataclasses.replace(nan.completions[2], logps=(math.nan,) * len(nan.completions[2].ids))
    step = take_step(method, [dataclasses.replace(nan, completions=(*nan.completions[:2], lost))])
    assert step.standing.present_PG.tolist() == [[True, True, False]]
    assert step.credit.advantage_PG.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.fault(13)
def test_the_loop_counts_them_and_stays_finite(tiny_model: Path, tmp_path: Path) -> None:
    def script(asked: Prompt, sample: int) -> Line:
        line = plain_script(asked, sample)
        logps = (math.nan if sample == 0 else -1.0,) + (-1.0,) * (len(line.ids) - 1)
        return dataclasses.replace(line, logps=logps)

    bench = bench_of(tiny_model, tmp_path / "run", steps=2, script=script)
    bench.run()
    for r in bench.metrics():
        assert r["nonfinite_logps"] == 2 and r["optimizer_steps"] == 1
        assert r["entropy"] == 1.0
        assert all(value is not None for value in r.values())


def test_the_recorder_sees_what_the_optimizer_is_given() -> None:
    """The tests above rest on this: one gradient per applied step, none where skipped."""
    method = no_kl("grpo", group_size=4, epochs=2, minibatches=2)
    learner = make_learner(method)
    take_step(method, whole(), learner=learner)
    assert isinstance(learner.optimizer, Recorder)
    assert len(learner.optimizer.gradients) == 4 and prompt().ids == (10, 11, 12)
