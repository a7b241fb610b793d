"""Law 14: no silent no-op; a step without signal changes nothing, a run without signal stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand import Told
from support.loop import Bench, make_loop
from support.tiny import make_model

from surefoot.errors import DataError, ModelError, RecipeError, StoppedOnFinding
from surefoot.learner.optim import Optimizer
from surefoot.methods import is_group_relative, online_rows
from surefoot.recipe import batch_arithmetic, load
from surefoot.recipe.schema import Optim
from surefoot.records import Prompt, ScoreStatus
from surefoot.run.checkpoint import load_latest

RELATIVE = [
    name
    for name, value in online_rows().items()
    # With a critic's part beside the group's, only the latter is zeroed.
    if is_group_relative(value) and value.critic.kind == "none"
]


def quiet(name: str, **changes: object) -> dict[str, Any]:
    return {"name": name, "group_size": 4, "kl": {"coef": 0.0, "measure_every": 0}, **changes}


def constant(asked: Prompt, sample: int, call: int) -> Told:
    return 0.7


def weights(bench: Bench) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in bench.learner.scorer.model.named_parameters()}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.fault(16, 17)
@pytest.mark.parametrize("name", RELATIVE)
def test_a_constant_reward_stops_the_run(tiny_model: Path, tmp_path: Path, name: str) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet(name),
        judge=constant,
        steps=9,
        settings={"stop_without_signal": 3},
    )
    before = weights(bench)
    with pytest.raises(StoppedOnFinding, match=r"3 steps .*no signal.*0\.7.*never") as stop:
        bench.run()
    assert stop.value.exit_code == 3
    assert equal(before, weights(bench)) and not bench.learner.optimizer.state()
    assert [row["steps_without_signal"] for row in bench.metrics()] == [1, 2, 3]
    # Saved after the last step done, so that a changed recipe goes on from here.
    loaded = load_latest(bench.desk.directory)
    assert loaded is not None and loaded.step == 3 and loaded.state["silent"] == 3
    assert equal(loaded.tensors("policy"), before)
    assert "no signal" in bench.events("stopped")[0]["message"]


def test_never_is_for_controls(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("rloo"),
        judge=constant,
        steps=12,
        settings={"stop_without_signal": "never"},
    )
    before = weights(bench)
    bench.run()
    assert [row["steps_without_signal"] for row in bench.metrics()] == list(range(1, 13))
    assert equal(before, weights(bench))


@pytest.mark.fault(17)
def test_by_default_ten_steps(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(tiny_model, tmp_path / "run", method=quiet("rloo"), judge=constant, steps=40)
    with pytest.raises(StoppedOnFinding, match="10 steps"):
        bench.run()
    assert len(bench.metrics()) == 10


@pytest.mark.fault(16)
def test_a_step_without_coefficients_touches_no_weight_and_no_moment(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Step 2 of 3 is dead: AdamW's momentum must not move the weights either."""
    seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("grpo"),
        judge=lambda p, s, c: 0.5 if c == 1 else float(s % 2),
        steps=3,
    )
    engine_load = bench.engine.load

    def watch(model: Any, *, version: int) -> None:
        moments = {n: t.clone() for n, t in bench.learner.optimizer.state().items()}
        seen.append((weights(bench), moments))
        engine_load(model, version=version)

    bench.engine.load = watch  # type: ignore[method-assign]
    bench.run()
    # Loaded before each step.
    first, second, third = seen
    assert not equal(first[0], second[0]) and second[1]
    assert equal(second[0], third[0]) and equal(second[1], third[1])
    counts = [row["optimizer_steps"] for row in bench.metrics()]
    assert counts == [1, 0, 1]
    assert [row["steps_without_signal"] for row in bench.metrics()] == [0, 1, 0]
    assert [("loss" in row, "grad_norm" in row) for row in bench.metrics()][1] == (False, False)
    assert bench.metrics()[1]["frac_reward_zero_std"] == 1.0


@pytest.mark.fault(16, 17)
def test_a_constant_reward_under_kl_is_no_signal_either(tiny_model: Path, tmp_path: Path) -> None:
    """The KL makes steps, but what the run was for has no gradient."""
    for place in ("loss", "reward_sequence"):
        bench = make_loop(
            tiny_model,
            tmp_path / place,
            method={"name": "grpo", "group_size": 4, "kl": {"place": place, "coef": 0.1}},
            judge=constant,
            steps=4,
            settings={"stop_without_signal": 2},
        )
        with pytest.raises(StoppedOnFinding, match="no signal"):
            bench.run()


@pytest.mark.parametrize(("value", "stops"), [(0.7, False), (0.0, True)])
def test_for_a_row_without_baseline_equal_rewards_are_a_signal(
    tiny_model: Path, tmp_path: Path, value: float, stops: bool
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("reinforce"),
        judge=lambda p, s, c: value,
        steps=3,
        settings={"stop_without_signal": 2},
    )
    if stops:
        with pytest.raises(StoppedOnFinding):
            bench.run()
    else:
        bench.run()
        assert [row["steps_without_signal"] for row in bench.metrics()] == [0, 0, 0]


@pytest.mark.parametrize("name", ["rloo", "dapo"])
def test_the_reward_in_the_message_is_absent_where_unknown(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet(name),
        judge=lambda p, s, c: ScoreStatus.INFRA_ERROR,
        steps=3,
        settings={"stop_without_signal": 1, "stop_at_failure_rate": 1.0},
    )
    with pytest.raises(StoppedOnFinding, match="unknown"):
        bench.run()
    assert "reward" not in bench.metrics()[0]


# --- dynamic sampling ---


def dapo(rounds: int, **changes: object) -> dict[str, Any]:
    return {
        "name": "dapo",
        "group_size": 4,
        "keep": {"kind": "informative", "max_rounds": rounds},
        **changes,
    }


def test_dynamic_sampling_asks_for_the_missing_groups_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Round 1 of four prompts: the first and third dead. Round 2 of two: the first dead."""
    fates = [[False, True, False, True], [False, True], [True]]

    def judge(asked: Prompt, sample: int, call: int) -> Told:
        place = bench.grader.asked[call].index(asked.id)
        return float(sample % 2) if fates[call][place] else 0.5

    bench = make_loop(
        tiny_model, tmp_path / "run", method=dapo(10), judge=judge, prompts=4, steps=1
    )
    bench.run()
    (row,) = bench.metrics()
    assert [len(call) for call in bench.grader.asked] == [4, 2, 1]
    assert (row["groups/asked"], row["groups/kept"], row["groups/rounds"]) == (7, 4, 3)
    # In the order of the stream: no prompt twice, positions rising, among kept and rejected.
    groups = bench.groups()
    assert [g["position"] for g in groups] == list(range(7))
    assert [g["kept"] for g in groups] == [False, True, False, True, False, True, True]
    assert bench.parts.data.stream.position == 7
    # The reward of the step is that of everything sampled, not of the chosen.
    assert row["reward"] == 0.5 and row["frac_reward_zero_std"] == 0.0


@pytest.mark.fault(17)
def test_dynamic_sampling_is_bounded_and_trains_on_what_was_found(
    tiny_model: Path, tmp_path: Path
) -> None:
    def judge(asked: Prompt, sample: int, call: int) -> Told:
        live = call == 1 and bench.grader.asked[call].index(asked.id) == 0
        return float(sample % 2) if live else 1.0

    bench = make_loop(tiny_model, tmp_path / "run", method=dapo(3), judge=judge, prompts=4, steps=1)
    before = weights(bench)
    bench.run()
    (row,) = bench.metrics()
    assert [len(call) for call in bench.grader.asked] == [4, 4, 3]
    assert (row["groups/rounds"], row["groups/kept"], row["groups/wanted"]) == (3, 1, 4)
    assert row["optimizer_steps"] == 1 and not equal(before, weights(bench))


@pytest.mark.fault(17)
def test_a_bound_reached_with_nothing_is_a_step_without_signal(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=dapo(2),
        judge=constant,
        steps=5,
        settings={"stop_without_signal": 2},
    )
    before = weights(bench)
    with pytest.raises(StoppedOnFinding):
        bench.run()
    assert len(bench.grader.asked) == 4 and equal(before, weights(bench))
    assert [row["groups/kept"] for row in bench.metrics()] == [0, 0]
    assert not any(g["kept"] for g in bench.groups())


def test_dynamic_sampling_looks_at_the_raw_score(tiny_model: Path, tmp_path: Path) -> None:
    """Lengths differ, so overlong shaping spreads equal scores: still not worth a gradient."""
    shaping = [{"kind": "overlong", "cache": 9}]
    bench = make_loop(
        tiny_model, tmp_path / "run", method=dapo(2, shaping=shaping), judge=constant, steps=1
    )
    bench.run()
    (row,) = bench.metrics()
    assert (row["groups/kept"], row["groups/asked"]) == (0, 4)
    assert len({length for g in bench.groups() for length in g["lengths"]}) > 1


# --- what is refused before training ---


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "data": {"source": "addition"},
        "reward": [{"use": "numeric"}],
        "method": {"name": "grpo"},
        "run": {"steps": 1},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim": {"learnin_rate": 1e-5}}, "learning_rate"),
        ({"rolout": {}}, "rollout"),
        ({"method": {"name": "grpo", "gate": {"kind": "clip", "hihg": 0.3}}}, "high"),
        ({"reward": [{"use": "numeric", "weight": 0.0}]}, "every weight is 0"),
        ({"run": {"steps": 1, "epochs": 2}}, "run.epochs"),
        ({"optim": {"batch_size": 4}}, "optim.batch_size"),
        ({"run": {"steps": 1, "eval_every": 1}}, "nothing to evaluate on"),
        ({"model": {"template": "none", "system": "Be brief."}}, "model.system"),
    ],
)
def test_keys_that_nothing_reads_are_refused(changes: dict[str, Any], said: str) -> None:
    load(recipe())
    with pytest.raises(RecipeError, match=said):
        load(recipe(**changes))


def test_zero_trainable_parameters_are_refused() -> None:
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter is trainable"):
        Optimizer(model, Optim(), steps=1)


@pytest.mark.fault(33)
def test_prompts_longer_than_the_context_are_refused_or_counted(
    tiny_model: Path, tmp_path: Path
) -> None:
    from surefoot.data import build
    from surefoot.models import load_model

    written = load(
        recipe(
            model={"path": str(tiny_model)},
            rollout={"max_new_tokens": 16},
            data={"source": "rows"},
        ),
    )
    encoder = load_model(written).template
    long, short = {"prompt": "x" * 600, "answer": "1"}, {"prompt": "2 + 2", "answer": "4"}
    report = build(written, encoder, base_dir=tmp_path, rows=[long, short]).report
    assert any("1" in line and "long" in line for line in report.lines()), report.lines()
    with pytest.raises(DataError, match=r"(?s)long"):
        build(written, encoder, base_dir=tmp_path, rows=[long])


def test_the_batch_arithmetic_is_told_in_prompts_and_completions() -> None:
    method = {"name": "grpo", "group_size": 6, "minibatches": 2, "epochs": 3}
    written = load(recipe(method=method, rollout={"prompts_per_step": 4}))
    said = " ".join(batch_arithmetic(written))
    for number in ("4 prompts", "24 completions", "12 completions", "6 optimizer steps"):
        assert number in said, said
