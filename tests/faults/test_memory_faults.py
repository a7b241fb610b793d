"""A learner that runs out of memory: the step is redone in smaller pieces, or the run stops whole.

Row 18 of the fault matrix, for what is sampled and for what is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loop import Bench, make_loop
from support.offline import make_offline_recipe
from support.runs import assert_same_run

import surefoot
from surefoot.errors import EXIT_FINDING, NotSaved, StoppedOnFinding
from surefoot.learner.critic import ValueModel
from surefoot.learner.descent import descend
from surefoot.learner.scorer import Backbone
from surefoot.loops import preference, supervised
from surefoot.models.memory import out_of_memory
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.read import read_events, read_metrics

FORMS = {"sft": "demonstrations", "dpo": "pairs", "kto": "labels", "reward_model": "pairs"}


@contextmanager
def room_for(limit: list[int], of: type[Backbone] = Backbone) -> Iterator[list[int]]:
    """Every pass with gradient over more than limit[0] positions runs out of memory.

    `of`: those of one kind of model. Yields the sizes of the passes that did.
    """
    refused: list[int] = []
    hidden = Backbone.hidden

    def tight(self: Backbone, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and isinstance(self, of) and batch.tokens > limit[0]:
            refused.append(batch.tokens)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backbone, "hidden", tight)
        yield refused


def test_row_18_what_counts_as_running_out() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    for said in (
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        assert out_of_memory(RuntimeError(said))
    assert not out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not out_of_memory(RuntimeError("shapes do not match"))


ENOUGH, ROOM, TIGHT, NONE = 10_000, 256, 64, 0
"""Positions: for anything; of a micro-batch at first; for one group of prompts; for none."""
KINDS: dict[str, dict[str, Any]] = {
    "one step": {"name": "rloo"},
    "four steps": {"name": "grpo", "epochs": 2, "minibatches": 2},
    "kl in the loss": {"name": "grpo", "kl": {"coef": 0.04}},
    "a critic": {"name": "ppo", "kl": {"coef": 0.05}},
}


def bench_of(model: Path, run: Path, kind: str, *, budget: int = ROOM) -> Bench:
    bench = make_loop(
        model,
        run,
        method={"group_size": 4, "kl": {"coef": 0.0, "measure_every": 0}, **KINDS[kind]},
        judge=lambda p, s, c: float(s % 2) + 0.1 * c,
        prompts=4,
        steps=2,
    )
    bench.learner.packing = dataclasses.replace(bench.learner.packing, budget=budget)
    return bench


def weights(bench: Bench) -> list[torch.Tensor]:
    models = [bench.learner.scorer.model]
    if bench.learner.critic is not None:
        models.append(bench.learner.critic.model)  # type: ignore[arg-type]
    return [p.detach().clone() for model in models for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WEIGHED = ("loss", "grad_norm", "ratio/mean", "kl", "critic/loss", "optimizer_steps")


@pytest.mark.parametrize("kind", KINDS)
def test_row_18_a_step_is_redone_in_smaller_pieces_with_the_same_result(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    bench, calm = (bench_of(tiny_model, tmp_path / name, kind) for name in ("tight", "calm"))
    with room_for([TIGHT]) as refused:
        bench.run()
    calm.run()
    # At 256 positions four groups go together, at 128 three; at 64 each goes alone.
    assert len(refused) == 2 and min(refused) > TIGHT
    (told,) = bench.events("out_of_memory")
    assert "step 1: redone with 64 tokens per micro-batch" in told["message"]
    first, undisturbed = bench.metrics()[0], calm.metrics()[0]
    for name in [name for name in WEIGHED if name in undisturbed]:
        assert first[name] == pytest.approx(undisturbed[name], rel=1e-3, abs=1e-6), name
    assert len(bench.metrics()) == 2 and not calm.events("out_of_memory")
    small = bench_of(tiny_model, tmp_path / "small", kind, budget=64)
    small.run()
    assert same(weights(bench), weights(small))
    # What was found out is remembered by whoever goes on.
    loaded = load_latest(bench.desk.directory)
    assert loaded is not None and loaded.state["budget"] == 64


@pytest.mark.parametrize("kind", ["four steps", "a critic"])
def test_row_18_memory_that_runs_out_between_two_optimizer_steps(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    """Those that were taken stay; the next ones are done in smaller pieces."""
    bench, calm = (bench_of(tiny_model, tmp_path / name, kind) for name in ("tight", "calm"))
    limit = [ENOUGH]
    of: type[Backbone] = Backbone if bench.learner.critic is None else ValueModel
    apply = bench.learner.optimizer.step

    def first(*, rate: float, norm: float) -> None:
        apply(rate=rate, norm=norm)
        limit[0] = TIGHT

    bench.learner.optimizer.step = first  # type: ignore[method-assign]
    with room_for(limit, of) as refused:
        bench.run()
    calm.run()
    assert refused
    assert len(bench.events("out_of_memory")) == 1
    at = 0 if kind == "four steps" else 1
    assert bench.metrics()[0]["optimizer_steps"] == calm.metrics()[0]["optimizer_steps"]
    for name in [name for name in WEIGHED if name in calm.metrics()[at]]:
        want = calm.metrics()[at][name]
        assert bench.metrics()[at][name] == pytest.approx(want, rel=1e-2, abs=1e-4), name


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("kind", ["one step", "a critic"])
def test_row_18_where_nothing_smaller_is_left_the_run_stops_whole(
    tiny_model: Path, tmp_path: Path, kind: str, done: int
) -> None:
    bench = bench_of(tiny_model, tmp_path / "run", kind)
    limit = [ENOUGH if done else NONE]
    load, before = bench.engine.load, [weights(bench)]

    def third(model: Any, *, version: int) -> None:
        load(model, version=version)
        if version == done > 0:
            limit[0] = NONE
            before[0] = weights(bench)

    bench.engine.load = third  # type: ignore[method-assign]
    with (
        room_for(limit),
        pytest.raises(StoppedOnFinding, match=r"out of memory .*model\.lora") as stop,
    ):
        bench.run()
    assert stop.value.exit_code == EXIT_FINDING
    assert same(weights(bench), before[0])
    assert all(p.grad is None for p in bench.learner.scorer.model.parameters())
    assert len(bench.metrics()) == done
    loaded = load_latest(bench.desk.directory)
    assert loaded is not None and (loaded.step, loaded.state["budget"]) == (done, 64)


def test_row_18_an_update_that_is_half_done_is_never_saved(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The optimizer itself runs out while weights move: nothing says which have."""
    bench = bench_of(tiny_model, tmp_path / "run", "four steps")
    apply, calls = bench.learner.optimizer.step, []

    def second(*, rate: float, norm: float) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        apply(rate=rate, norm=norm)

    bench.learner.optimizer.step = second  # type: ignore[method-assign]
    with pytest.raises(NotSaved, match="newest checkpoint is resumed from"):
        bench.run()
    assert bench.metrics() == [] and bench.desk.directory.checkpoint_steps() == []


@pytest.mark.parametrize("name", FORMS)
def test_row_18_given_data_in_smaller_pieces_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Stops while there is no room at all, goes on in small pieces, and is the run of those."""

    def recipe_of(folder: Path, budget: int) -> Path:
        changes = {"optim__tokens_per_microbatch": budget, "run__steps": 4}
        return make_offline_recipe(
            folder, tiny_model, method={"name": name}, rows=FORMS[name], **changes
        )

    tight = recipe_of(tmp_path / "tight", 256)
    limit, refused = [TIGHT], []

    def descended(*args: Any, **kwargs: Any) -> Any:
        with room_for(limit) as seen:
            try:
                return descend(*args, **kwargs)
            finally:
                refused.extend(seen)

    for room in (preference, supervised):
        monkeypatch.setattr(room, "descend", descended)
    run = tmp_path / "tight" / "run"
    limit[0] = NONE
    with pytest.raises(StoppedOnFinding, match=r"out of memory .*model\.lora") as stop:
        surefoot.train(tight)
    assert stop.value.exit_code == EXIT_FINDING and refused
    assert RunDirectory(run).checkpoint_steps() == [0]
    limit[0] = ENOUGH
    surefoot.train(tight)
    calm = recipe_of(tmp_path / "calm", 64)
    surefoot.train(calm)
    told = [e["message"] for e in read_events(run) if e["kind"] == "out_of_memory"]
    assert [m.split("with ")[1] for m in told] == [f"{n} tokens per micro-batch" for n in (128, 64)]
    if name in ("sft", "reward_model"):
        assert_same_run(run, tmp_path / "calm" / "run")
    else:
        # The reference was asked in larger pieces.
        mine, theirs = (
            [row["loss"] for row in read_metrics(path) if row["step"]]
            for path in (run, tmp_path / "calm" / "run")
        )
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_row_18_given_data_whose_update_is_half_done_is_never_saved(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """The third step changes weights, and runs out before it is known which."""
    for folder in ("torn", "calm"):
        make_offline_recipe(
            tmp_path / folder, tiny_model, method={"name": name}, rows=FORMS[name], run__steps=5
        )
    apply, calls = torch.optim.AdamW.step, []

    def third(self: torch.optim.AdamW) -> None:
        apply(self)
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run = tmp_path / "torn" / "run"
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", third)
        with pytest.raises(NotSaved, match="newest checkpoint is resumed from"):
            surefoot.train(tmp_path / "torn" / "recipe.yaml")
    assert len(calls) == 3 and RunDirectory(run).checkpoint_steps() == [2]
    for folder in ("torn", "calm"):
        surefoot.train(tmp_path / folder / "recipe.yaml")
    assert_same_run(run, tmp_path / "calm" / "run")
