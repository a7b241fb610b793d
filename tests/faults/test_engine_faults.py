"""The sampler out of memory, with other weights, or at odds with the trainer (rows 19, 20, 21)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import PROMPTS, ids_of, make_engine
from support.loop import Bench, make_loop
from support.offline import make_offline_recipe
from support.runs import make_recipe, rows_of

from surefoot.errors import ModelError, NotSaved, StoppedOnFinding
from surefoot.learner.scorer import Scorer
from surefoot.loops import entry
from surefoot.loops.online import STALE_LIMIT, OnlineLoop
from surefoot.records import Group, Prompt
from surefoot.rollout import LocalEngine
from surefoot.rollout.scripted import ScriptedEngine
from surefoot.run.read import read_events, read_metrics

FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


class Small:
    """Memory for so many completions at once; the engine's caches are what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.rows = rows
        self.refused = 0
        advance = LocalEngine._advance

        def bounded(engine: LocalEngine, state: Any) -> None:
            if len(state.rows) > self.rows:
                self.refused += 1
                raise RuntimeError(FULL)
            advance(engine, state)

        monkeypatch.setattr(LocalEngine, "_advance", bounded)


# -- row 19 ----------------------------------------------------------------------------------------


@pytest.mark.fault(19)
@pytest.mark.parametrize(("rows", "left", "refused"), [(16, 16, 0), (6, 4, 2), (1, 1, 4)])
def test_sampling_goes_on_with_fewer_at_once_and_says_the_same(
    rows: int, left: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_engine().sample(PROMPTS, 4, purpose="rollout")
    memory = Small(monkeypatch, rows)
    engine = make_engine()
    found = engine.sample(PROMPTS, 4, purpose="rollout")
    assert ids_of(found) == ids_of(whole)
    pairs = zip(found, whole, strict=True)
    for got, want in ((c, d) for g, w in pairs for c, d in zip(*_both(g, w), strict=True)):
        assert (got.stop, got.text, got.sample) == (want.stop, want.text, want.sample)
        assert got.logps == pytest.approx(want.logps, abs=1e-5)
    assert memory.refused == refused
    told = engine.troubles()
    assert len(told) == refused and engine.troubles() == []
    assert engine.rows == (64 if refused == 0 else left)
    if refused:
        assert told[-1].endswith(f"and later with at most {left}")
    # What was learned is kept: the next rollout does not run out again.
    engine.sample(PROMPTS, 4, purpose="rollout")
    assert memory.refused == refused


def _both(one: Group, other: Group) -> tuple[Any, Any]:
    assert one.prompt == other.prompt
    return one.completions, other.completions


@pytest.mark.fault(19)
def test_one_that_does_not_fit_alone_is_a_stop_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Small(monkeypatch, 0)
    with pytest.raises(StoppedOnFinding, match=r"one completion at a time; lower rollout\.max_new"):
        make_engine().sample(PROMPTS, 2, purpose="rollout")


@pytest.mark.fault(19)
def test_another_error_of_the_engine_is_not_taken_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(engine: LocalEngine, state: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(LocalEngine, "_advance", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        make_engine().sample(PROMPTS, 2, purpose="rollout")


@pytest.mark.fault(19)
def test_a_run_in_too_little_memory_learns_the_same_and_says_so(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo = {"method": {"name": "grpo"}, "run__steps": 3}
    entry.train(make_recipe(tmp_path / "whole", tiny_model, **grpo))
    memory = Small(monkeypatch, 3)
    entry.train(make_recipe(tmp_path / "small", tiny_model, **grpo))
    assert memory.refused == 2  # 8 completions, then 4, then 2
    said = [e["message"] for e in read_events(tmp_path / "small" / "run") if e["kind"] == "engine"]
    assert len(said) == 2 and said[-1].endswith("goes on with 2, and later with at most 2")
    assert rows_of(tmp_path / "small" / "run", "samples.jsonl") == rows_of(
        tmp_path / "whole" / "run", "samples.jsonl"
    )


@pytest.mark.fault(19)
def test_a_run_whose_sampler_never_fits_stops_with_its_state(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method={"name": "grpo"}, run__eval_every=0)
    entry.train(recipe, ["run.steps=2"])
    with monkeypatch.context() as patch:
        Small(patch, 0)
        with pytest.raises(StoppedOnFinding, match="one completion at a time"):
            entry.train(recipe, ["run.steps=4"])
    entry.train(recipe, ["run.steps=4"])
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


# -- row 18: what the learner cannot cut further ---------------------------------------------------


class Unfit:
    """The `nth` and every later forward with gradient runs out of memory, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, nth: int, times: float) -> None:
        self.seen = 0
        forward = Scorer.forward

        def bounded(scorer: Scorer, part: Any) -> Any:
            if torch.is_grad_enabled():
                self.seen += 1
                if nth <= self.seen < nth + times:
                    raise RuntimeError(FULL)
            return forward(scorer, part)

        monkeypatch.setattr(Scorer, "forward", bounded)


def _grpo(run: Path, model: Path, steps: int) -> Bench:
    return make_loop(
        model,
        run,
        method={"name": "grpo", "epochs": 2, "minibatches": 2, "group_size": 4},
        judge=lambda p, s, c: float(s % 2),
        steps=steps,
    )


@pytest.mark.fault(18)
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_memory_that_runs_out_in_any_optimizer_step_changes_nothing(
    nth: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four optimizer steps of one pass each; the ones before it are not done again."""
    whole = _grpo(tmp_path / "whole", tiny_model, 1)
    whole.run()
    bench = _grpo(tmp_path / "short", tiny_model, 1)
    memory = Unfit(monkeypatch, nth=nth, times=1)
    bench.run()
    assert memory.seen >= 5
    assert bench.learner.packing.budget == whole.learner.packing.budget // 2
    assert len(bench.events("out_of_memory")) == 1
    apart = [
        float((a - b).detach().abs().max())
        for a, b in zip(
            bench.learner.optimizer.parameters, whole.learner.optimizer.parameters, strict=True
        )
    ]
    assert max(apart) < 1e-5
    one, other = bench.metrics()[0], whole.metrics()[0]
    assert one["optimizer_steps"] == other["optimizer_steps"] == 4
    for name in ("loss", "grad_norm", "entropy", "ratio/max"):
        assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.fault(18)
def test_before_a_weight_changed_what_never_fits_stops_with_state(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _grpo(tmp_path, tiny_model, 1)
    with monkeypatch.context() as patch:
        Unfit(patch, nth=1, times=math.inf)
        with pytest.raises(StoppedOnFinding, match=r"64 tokens per micro-batch.*model\.lora"):
            bench.run()
    assert bench.desk.directory.checkpoint_steps() == [0]


@pytest.mark.fault(18)
def test_after_one_changed_nothing_half_done_is_saved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _grpo(tmp_path, tiny_model, 1)
    with monkeypatch.context() as patch:
        Unfit(patch, nth=3, times=math.inf)
        with pytest.raises(NotSaved, match=r"step 1: out of memory .* not saved; the newest"):
            bench.run()
    assert bench.desk.directory.checkpoint_steps() == []


@pytest.mark.fault(18)
def test_given_data_that_never_fits_stops_with_state_too(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft = {"method": {"name": "sft"}, "rows": "demonstrations"}
    recipe = make_offline_recipe(tmp_path, tiny_model, **sft)
    entry.train(recipe, ["run.steps=2"])

    def never_fits(*given: Any, **options: Any) -> None:
        raise RuntimeError(FULL)

    with monkeypatch.context() as patch:
        patch.setattr("surefoot.loops.supervised.descend", never_fits)
        with pytest.raises(StoppedOnFinding, match=r"64 tokens per micro-batch"):
            entry.train(recipe, ["run.steps=4"])
    entry.train(recipe, ["run.steps=4"])
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


@pytest.mark.fault(18)
@pytest.mark.parametrize("where", ["the reference", "the evaluation"])
def test_passes_without_gradient_are_cut_too(
    where: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.loops import reference
    from surefoot.loops.preference import PreferenceTask

    dpo = {"method": {"name": "dpo"}, "rows": "pairs", "run__steps": 2}
    entry.train(make_offline_recipe(tmp_path / "whole", tiny_model, **dpo))
    refused: list[int] = []

    def full_once() -> None:
        if not refused:
            refused.append(1)
            raise RuntimeError(FULL)

    ask, look = reference._ask, PreferenceTask.look

    def asked(*given: Any) -> None:
        full_once()
        ask(*given)

    def looked(task: PreferenceTask, step: int) -> Any:
        full_once()
        return look(task, step)

    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    if where == "the reference":
        monkeypatch.setattr(reference, "_ask", asked)
    else:
        monkeypatch.setattr(PreferenceTask, "look", looked)
    entry.train(make_offline_recipe(tmp_path / "small", tiny_model, **dpo))
    assert refused == [1]
    small, whole = (read_metrics(tmp_path / name / "run") for name in ("small", "whole"))
    for one, other in zip(small, whole, strict=True):
        names = {"loss", "eval/accuracy", "eval/margin", "rewards/margins"} & other.keys()
        assert len(names) >= 2
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.fault(18)
def test_a_model_that_fits_no_test_is_refused_for_that(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unfit(monkeypatch, nth=1, times=math.inf)
    with pytest.raises(ModelError, match="memory runs out at the model's first test"):
        _grpo(tmp_path, tiny_model, 1)


# -- row 20 ----------------------------------------------------------------------------------------


@pytest.mark.fault(20)
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_engine_with_other_weights_stops_the_run(
    epochs: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "grpo", "epochs": epochs}
    recipe = make_recipe(tmp_path, tiny_model, method=method, run__eval_every=0)
    entry.train(recipe, ["run.steps=2"])
    seen = [row["mismatch/kl_k1"] for row in read_metrics(tmp_path / "run")]
    assert max(map(abs, seen)) < 1e-3, "the same weights, in this process and in float32"
    with monkeypatch.context() as patch:
        sample = LocalEngine.sample

        def perturbed(engine: LocalEngine, *args: Any, **kwargs: Any) -> Any:
            """As if an update had not reached it, or had reached it broken."""
            generator = torch.Generator().manual_seed(1)
            kept = [parameter.detach().clone() for parameter in engine.model.parameters()]
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
                if engine.decoder is not None:
                    engine.decoder.refresh()
                out = sample(engine, *args, **kwargs)
                for parameter, own in zip(engine.model.parameters(), kept, strict=True):
                    parameter.copy_(own)
            return out

        patch.setattr(LocalEngine, "sample", perturbed)
        with pytest.raises(StoppedOnFinding, match=r"nats a token apart .* stale or other weights"):
            entry.train(recipe, ["run.steps=6"])
        last = read_metrics(tmp_path / "run")[-1]
        assert last["step"] == 3 and last["mismatch/kl_k1"] > 1.0
        entry.train(recipe, ["run.steps=4", "run.stop_at_mismatch=never"])
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.fault(20)
def test_a_distribution_that_was_cut_on_purpose_stops_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The engine renormalises what top-k leaves, so the two are far apart at equal weights."""
    recipe = make_recipe(tmp_path, tiny_model, method={"name": "rloo"}, run__steps=2)
    entry.train(recipe, ["rollout.top_k=3", "run.allow=[truncated_sampling]"])
    assert read_metrics(tmp_path / "run")[-1]["mismatch/kl_k1"] > 1.0


# -- row 21 ----------------------------------------------------------------------------------------


class Stale(ScriptedEngine):
    """Some completions come from the weights of two versions ago."""

    late = 1

    def sample(self, prompts: Any, group_size: int, **kwargs: Any) -> list[Group]:
        groups = super().sample(prompts, group_size, **kwargs)
        return [
            dataclasses.replace(
                group,
                completions=tuple(
                    dataclasses.replace(c, version=c.version - 2) if c.sample < self.late else c
                    for c in group.completions
                ),
            )
            for group in groups
        ]


def _stale(run: Path, model: Path, *, late: int, steps: int) -> Bench:
    def judge(prompt: Prompt, sample: int, call: int) -> float:
        return 100.0 if sample == 0 else float(sample % 2)

    bench = make_loop(
        model, run, method={"name": "rloo", "group_size": 5}, judge=judge, steps=steps
    )
    engine = Stale(bench.engine.script)
    engine.late = late
    bench.parts.engine = engine
    return bench


@pytest.mark.fault(21)
def test_stale_completions_are_dropped_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    """The one that is stale has the highest reward by far; nobody's baseline knows of it."""
    bench = _stale(tmp_path, tiny_model, late=1, steps=1)
    assert isinstance(bench.loop, OnlineLoop)
    bench.run()
    (row,) = bench.metrics()
    assert row["completions/stale"] == 2  # one of each of the two groups
    assert row["reward"] == pytest.approx(0.5)  # of 1, 0, 1, 0
    for group in bench.groups():
        assert group["scores"][0] is None and group["stops"][0] == "error"
        assert group["scores"][1:] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.fault(21)
def test_an_engine_that_stays_behind_stops_the_run(tiny_model: Path, tmp_path: Path) -> None:
    bench = _stale(tmp_path, tiny_model, late=1, steps=9)
    with pytest.raises(StoppedOnFinding, match=r"3 steps in a row.*under version 0 of the weights"):
        bench.run()
    assert len(bench.metrics()) == STALE_LIMIT
    assert bench.desk.directory.checkpoint_steps() == [STALE_LIMIT]
