"""Law 13: a score has three states, and each has its consequence in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand import Told, group, no_kl, stood
from support.loop import make_loop, plain_script

from surefoot.errors import StoppedOnFinding
from surefoot.learner.batch import make_batch
from surefoot.methods import online_rows
from surefoot.records import Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import Grader
from surefoot.rollout.scripted import ScriptedEngine

FAILED, UNSCORABLE = ScoreStatus.INFRA_ERROR, ScoreStatus.UNSCORABLE


def quiet(name: str, size: int = 4) -> dict[str, Any]:
    return {"name": name, "group_size": size, "kl": {"coef": 0.0, "measure_every": 0}}


def graded(*functions: Any) -> list[Score]:
    """What a grader with these rewards says of one group of two."""
    asked = Prompt("p", 0, (10, 11), "prompt")
    with Grader(functions) as grader:
        (done,) = grader.score(ScriptedEngine(plain_script).sample([asked], 2, purpose="rollout"))
    assert done.scores is not None
    return list(done.scores)


def raises(completions: list[str]) -> list[float]:
    raise KeyError("answer")


def nothing(completions: list[str]) -> list[None]:
    return [None for _ in completions]


def one_nan(completions: list[str]) -> list[float]:
    return [0.5, math.nan]


def one_infinite(completions: list[str]) -> list[float]:
    return [0.5, math.inf]


def one_word(completions: list[str]) -> list[object]:
    return [0.5, "good"]


def too_many(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) + 1)


def half(completions: list[str]) -> list[float]:
    return [0.5 for _ in completions]


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (raises, [None, None]),
        (nothing, [None, None]),
        (one_nan, [0.5, None]),
        (one_infinite, [0.5, None]),
        (one_word, [0.5, None]),
        (too_many, [None, None]),
    ],
)
def test_a_failed_grader_is_missing_and_never_zero(function: Any, values: list[Any]) -> None:
    scores = graded(function)
    assert [s.value for s in scores] == values
    assert [s.status for s in scores] == [
        ScoreStatus.SCORED if value is not None else FAILED for value in values
    ]


def test_a_part_that_does_not_apply_leaves_the_sum() -> None:
    assert [s.value for s in graded(half, nothing)] == [0.5, 0.5]
    assert [s.parts["nothing"] for s in graded(half, nothing)] == [None, None]


@pytest.mark.fault(32)
@pytest.mark.parametrize("name", online_rows())
def test_unscorable_drops_the_group_whole(name: str) -> None:
    """One completion is enough: it is the row's fault, not the completion's."""
    method = no_kl(name, group_size=8)
    batch = make_batch([group([1.0, 0.0] * 3 + [1.0, UNSCORABLE]), group([1.0, 0.0] * 4, index=1)])
    standing = stood(method, batch)
    assert standing.dropped_P.tolist() == [True, False]
    assert not standing.present_PG[0].any() and standing.present_PG[1].all()


@pytest.mark.fault(32)
def test_the_row_is_quarantined_and_asked_never_again(tiny_model: Path, tmp_path: Path) -> None:
    """Four rows, two a step, three epochs: r2 is asked once."""

    def judge(asked: Prompt, sample: int, call: int) -> Told:
        return UNSCORABLE if asked.text == bad["text"] else float(sample % 2)

    bad = {"text": ""}
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("rloo"),
        judge=judge,
        rows=4,
        steps=6,
    )
    stream = bench.parts.data.stream
    start = stream.cursor()
    texts = {p.id: p.text for p in stream.take(4, step=1)}
    stream.restore(start)
    assert len(texts) == 4
    victim = sorted(texts)[2]
    bad["text"] = texts[victim]
    bench.run()
    asked = [name for call in bench.grader.asked for name in call]
    assert asked.count(victim) == 1
    # The others fill its place: two prompts in every step.
    assert [len(call) for call in bench.grader.asked] == [2] * 6
    assert bench.loop.progress.quarantined == [victim]
    (event,) = bench.events("quarantined")
    assert event["prompt"] == victim and victim in event["message"]
    (row,) = [row for row in bench.groups() if row["prompt"] == victim]
    assert row["scores"] == [None] * 4 and row["kept"] is False
    dropped = [row["groups/dropped"] for row in bench.metrics()]
    assert sum(dropped) == 1


@pytest.mark.fault(32)
def test_a_dataset_that_is_quarantined_whole_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("rloo"),
        judge=lambda p, s, c: UNSCORABLE,
        rows=4,
        steps=6,
    )
    with pytest.raises(StoppedOnFinding, match="all 4 rows for step 3 are quarantined"):
        bench.run()


@pytest.mark.fault(22)
def test_missing_scores_are_counted_and_the_rest_trained(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={**quiet("rloo"), "min_group": 3},
        judge=lambda p, s, c: FAILED if s == 0 else float(s % 2),
        steps=1,
        settings={"stop_at_failure_rate": 0.5},
    )
    before = [p.clone() for p in bench.learner.scorer.model.parameters()]
    bench.run()
    (row,) = bench.metrics()
    assert row["reward_failures"] == 2 and row["completions/absent"] == 2
    assert row["reward"] == pytest.approx(2 / 3) and row["optimizer_steps"] == 1
    after = list(bench.learner.scorer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [r["scores"][0] for r in bench.groups()] == [None, None]


@pytest.mark.fault(22)
def test_a_grader_that_fails_too_often_stops_the_run(tiny_model: Path, tmp_path: Path) -> None:
    """One of four is above the default of a fifth; the state is saved."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method=quiet("rloo"),
        judge=lambda p, s, c: FAILED if s == 0 and c == 1 else float(s % 2),
        steps=4,
    )
    with pytest.raises(StoppedOnFinding, match=r"2 of 8 .*stop_at_failure_rate") as stop:
        bench.run()
    assert stop.value.exit_code == 3
    assert bench.desk.directory.checkpoint_steps() == [2]


@pytest.mark.fault(19)
def test_what_the_engine_failed_to_give_is_no_failure_of_a_reward() -> None:
    torn = group([1.0, 0.0], stops=[StopReason.STOP, StopReason.ERROR])
    with Grader([half]) as grader:
        (done,) = grader.score([torn])
        assert grader.counts()["reward_failures"] == 0
    assert done.scores is not None
    assert [s.status for s in done.scores] == [ScoreStatus.SCORED, FAILED]
