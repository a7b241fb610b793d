"""Baselines and scales that read more than a group's rewards: hand numbers through the loop's own
`stand` and `assign`, and what the loop asks the engine and the grader for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hand import CAP, assigned, credited, group, no_kl, row, stood
from support.loop import make_loop

from surefoot.errors import RecipeError, StoppedOnFinding
from surefoot.learner.batch import make_batch
from surefoot.learner.update import Facts
from surefoot.loops.standing import stand
from surefoot.methods import Method
from surefoot.objective.shaping import shorter_is_better
from surefoot.records import Group, Score, ScoreStatus, StopReason

FAILED = Score(ScoreStatus.INFRA_ERROR, None, {"r": None}, "down")


def parts(told: list[tuple[float | None, float | None]], *, index: int = 0) -> Group:
    """A group scored in two parts, a (weight 2) and b (weight 1)."""
    made = group([0.0] * len(told), index=index)
    scores = []
    for a, b in told:
        value = 2.0 * (a or 0.0) + (b or 0.0)
        scores.append(Score(ScoreStatus.SCORED, value, {"a": a, "b": b}))
    return replace(made, scores=tuple(scores))


def by_parts(method: Method, *groups: Group) -> torch.Tensor:
    batch = make_batch(groups)
    standing = stand(method, batch, max_new_tokens=CAP, weights={"a": 2.0, "b": 1.0})
    return assigned(method, batch, standing, Facts()).advantage_PG


def test_the_greedy_score_is_subtracted() -> None:
    method = no_kl("remax", group_size=2)
    found = credited(method, make_batch([group([1.0, 0.0])]))
    assert found.advantage_PG.tolist() == [[0.75, -0.25]]
    # Equal rewards differ from the greedy one, so they are a signal.
    same = credited(method, make_batch([group([1.0, 1.0])]))
    assert same.advantage_PG.tolist() == [[0.75, 0.75]] and same.signal_found
    assert not credited(method, make_batch([group([0.25, 0.25])])).signal_found


def test_a_group_whose_greedy_completion_has_no_score_is_absent() -> None:
    method = no_kl("remax", group_size=2)
    torn = replace(group([1.0, 0.0]), greedy_score=FAILED)
    batch = make_batch([torn, group([1.0, 0.0], index=1)])
    assert stood(method, batch).dropped_P.tolist() == [True, False]
    found = credited(method, batch)
    assert found.advantage_PG.tolist() == [[0.0, 0.0], [0.75, -0.25]]
    assert found.forwarded_B.tolist() == [False, False, True, True]


def test_the_greedy_completion_counts_by_the_rules_of_the_others() -> None:
    """Cut at the cap: the floor of -1 instead of 0.25."""
    cut = replace(group([1.0, 0.0]).greedy, stop=StopReason.LENGTH)  # type: ignore[type-var]
    method = no_kl("remax", group_size=2, truncated={"kind": "floor", "value": -1.0})
    found = credited(method, make_batch([replace(group([1.0, 0.0]), greedy=cut)]))
    assert found.advantage_PG.tolist() == [[2.0, 1.0]]


def test_a_cut_greedy_completion_is_no_baseline_where_the_cut_are_absent() -> None:
    cut = replace(group([1.0, 0.0]).greedy, stop=StopReason.LENGTH)  # type: ignore[type-var]
    method = no_kl("remax", group_size=2, truncated="mask")
    batch = make_batch([replace(group([1.0, 0.0]), greedy=cut), group([1.0, 0.0], index=1)])
    assert stood(method, batch).dropped_P.tolist() == [True, False]


def test_a_step_without_coefficients_makes_no_optimizer_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    """All score what the greedy one scores, and at unchanged weights the KL is exactly 0."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "remax", "group_size": 2},
        judge=lambda prompt, sample, call: 1.0,
        steps=2,
    )
    bench.run()
    for row_ in bench.metrics():
        assert row_["optimizer_steps"] == 0 and row_["forwarded_tokens"] == 0


def test_a_constant_reward_is_no_signal_for_a_history_though_its_kl_moves(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The first step differs from init; from then on only the KL gives advantages."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "reinforce_ma", "group_size": 2, "kl": {"coef": 0.5}},
        judge=lambda prompt, sample, call: 1.0,
        rate=0.02,
        steps=6,
        settings={"stop_without_signal": 3},
    )
    with pytest.raises(StoppedOnFinding, match="3 steps in a row gave no signal"):
        bench.run()
    seen = bench.metrics()
    assert [row_["steps_without_signal"] for row_ in seen] == [0, 1, 2, 3]
    assert seen[-1]["advantage/abs_max"] > 0


def test_a_negative_reward_stops_a_row_that_divides_by_the_mean(
    tmp_path: Path, tiny_model: Path
) -> None:
    """At the second step; the first is saved, and the step is redone when the run goes on."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "maxrl", "group_size": 2},
        judge=lambda prompt, sample, call: float(sample) - (0.5 if call else 0.0),
        steps=3,
    )
    with pytest.raises(StoppedOnFinding, match=r"was rewarded -0\.5.*rewards must be 0 or more"):
        bench.run()
    assert bench.loop.progress.step == 1
    assert [event["step"] for event in bench.events("checkpoint")] == [1]
    assert bench.parts.data.stream.position == 2


def test_history_is_subtracted() -> None:
    """The average has seen one reward of 0.5."""
    found = credited(no_kl("reinforce_ma", group_size=2), make_batch([group([1.0, 0.0])]))
    assert found.advantage_PG.tolist() == [[0.5, -0.5]]


def test_the_loop_reads_the_history_before_it_learns_of_a_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Rewards 0, 1 in every group. Before the first step init (0), then 0.5 for ever."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "reinforce_ma", "group_size": 2, "kl": {"coef": 0.0}},
        judge=lambda prompt, sample, call: float(sample),
        steps=3,
    )
    bench.run()
    assert [row["baseline/history"] for row in bench.metrics()] == [0.0, 0.5, 0.5]
    assert [row["advantage/mean"] for row in bench.metrics()] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("labelled", [True, False])
def test_the_loop_reports_a_task_switch_and_starts_again(
    labelled: bool, tmp_path: Path, tiny_model: Path
) -> None:
    """From step 8 on no completion is right, where two of three were: a switch in the recipe."""
    sources = []
    for name, interval in (("easy", {"until_step": 8}), ("hard", {"from_step": 8})):
        path = tmp_path / f"{name}.jsonl"
        lines = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(48)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        label = {"task": name} if labelled else {}
        sources.append({"source": str(path), **interval, **label})
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={
            "name": "reinforce_ma",
            "group_size": 1,
            "kl": {"coef": 0.0},
            "baseline": {"on_shift": "reset"},
        },
        judge=lambda prompt, sample, call: float(
            "easy" in prompt.text and prompt.position % 3 != 0
        ),
        prompts=16,
        steps=10,
        sources=sources,
    )
    bench.run()
    (event,) = bench.events("history_shift")
    assert event["since"] == 8 and event["reset"] is True and 8 <= event["at"] <= 10
    assert event["task"] == ("hard" if labelled else None)
    assert ("task 'hard'" in bench.said.getvalue()) == labelled


def test_parts_are_scaled_before_they_are_added() -> None:
    """Both parts (1, 0): z = 0.5 / (sqrt(0.5) + 1e-4) each, times 2 and 1."""
    method = no_kl("gdpo", group_size=2, whiten="none")
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert by_parts(method, parts([(1.0, 1.0), (0.0, 0.0)])).tolist() == [
        pytest.approx([3 * z, -3 * z])
    ]
    # Ten times larger in b: its unit goes, its weight stays.
    big = 5.0 / (math.sqrt(50.0) + 1e-4)
    assert by_parts(method, parts([(1.0, 0.0), (0.0, 10.0)])).tolist() == [
        pytest.approx([2 * z - big, big - 2 * z])
    ]


def test_equal_sums_of_different_parts_are_a_signal() -> None:
    """2 * 0.5 + 0 = 2 * 0 + 1: the sum is dead, the parts are not."""
    method = no_kl("gdpo", group_size=2, whiten="none")
    batch = make_batch([parts([(0.5, 0.0), (0.0, 1.0)])])
    standing = stand(method, batch, max_new_tokens=CAP, weights={"a": 2.0, "b": 1.0})
    found = assigned(method, batch, standing, Facts())
    assert found.dead_P.tolist() == [False] and found.signal_found
    assert float(found.advantage_PG[0, 0]) > 0 > float(found.advantage_PG[0, 1])


def test_a_part_that_does_not_apply_adds_nothing_and_is_in_no_mean() -> None:
    method = no_kl("gdpo", group_size=3, whiten="none")
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    found = by_parts(method, parts([(1.0, None), (0.0, None), (None, 1.0)]))
    assert found.tolist() == [pytest.approx([2 * z, -2 * z, 0.0])]


def test_dead_in_every_part_stays_zero_under_whitening() -> None:
    method = no_kl("gdpo", group_size=2)
    found = by_parts(
        method, parts([(1.0, 0.5), (1.0, 0.5)]), parts([(1.0, 0.0), (0.0, 0.0)], index=1)
    )
    assert found[0].tolist() == [0.0, 0.0] and float(found[1].abs().min()) > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"shaping": [{"kind": "overlong"}]},
        {"truncated": {"kind": "floor", "value": -1.0}},
        {"kl": {"place": "reward_sequence", "coef": 0.1, "estimator": "k1"}},
        {"baseline": "leave_one_out"},
    ],
)
def test_what_parts_would_drop_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"scale\.per_part"):
        row("gdpo", **changes)


def test_length_is_compared_within_the_group() -> None:
    """Lengths 2, 4, 6: +0.5, 0, -0.5 for right ones; wrong ones never gain."""
    length = torch.tensor([[2, 4, 6], [2, 4, 6], [3, 3, 3], [2, 9, 4]])
    right = torch.tensor([[True] * 3, [False] * 3, [True] * 3, [True] * 3])
    valid = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, False, True]])
    bonus = shorter_is_better(length, right_PG=right, valid_PG=valid)
    assert bonus.tolist() == [
        [0.5, 0.0, -0.5],
        [0.0, 0.0, -0.5],
        [0.0, 0.0, 0.0],
        [0.5, 0.0, -0.5],
    ]


def test_length_shaping_reaches_the_reward() -> None:
    method = no_kl("reinforce", group_size=2, shaping=[{"kind": "length", "weight": 0.2}])
    batch = make_batch([group([1.0, 1.0], lengths=[2, 6])])
    assert stood(method, batch).reward_PG.tolist() == [[1.1, 0.9]]
    with pytest.raises(RecipeError, match="shaping: length compares"):
        row("remax", shaping=[{"kind": "length"}])


def test_the_loop_asks_for_one_greedy_completion_and_never_trains_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "remax", "group_size": 2, "kl": {"coef": 0.0}},
        judge=lambda prompt, sample, call: float(sample),
        steps=1,
    )
    bench.run()
    asked = [(purpose, sample) for _, sample, purpose in bench.engine.asked]
    assert asked.count(("rollout/greedy", 0)) == 2 and asked.count(("rollout", 1)) == 2
    rows = bench.groups()
    assert [len(r["scores"]) for r in rows] == [2, 2]
    # The greedy one is sample 0 of the script, so it scores 0: advantages are 0 and 1.
    assert [r["greedy_score"] for r in rows] == [0.0, 0.0]
    assert bench.metrics()[0]["advantage/mean"] == 0.5
    assert bench.metrics()[0]["reward/greedy_mean"] == 0.0
