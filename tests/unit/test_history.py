"""The history baseline: averages by hand, the book that keeps them, and shifts by simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from surefoot import draws
from surefoot.errors import CheckpointError, SurefootError
from surefoot.loops import history
from surefoot.loops.history import HistoryBook, Rewards, Shift
from surefoot.methods import History
from surefoot.objective.history import MovingAverage

PROMPTS, SEEDS, HALF = 32, range(20), 2 * math.sqrt(0.2 * 0.8 / 32)
Rate = float | Callable[[int], float]


def uniforms(seed: int, step: int, size: int = PROMPTS) -> NDArray[np.float64]:
    return draws.uniform(seed, "history test", step, np.arange(size))


def labelled(values: NDArray[Any], step: int, task: str | None = None) -> list[Rewards]:
    return [(f"{task}{step}.{i}", task, [float(x)]) for i, x in enumerate(values)]


def coins(seed: int, step: int, rate: float, task: str | None = None) -> list[Rewards]:
    return labelled(uniforms(seed, step) < rate, step, task)


def play(book: HistoryBook, steps: Iterator[list[Rewards]]) -> tuple[list[Shift], list[float]]:
    """Every shift, and each step's mean advantage."""
    shifts: list[Shift] = []
    advantages = []
    for step, rewards in enumerate(steps, 1):
        baselines = book.baselines([(prompt, task) for prompt, task, _ in rewards])
        gaps = [x - b for (_, _, xs), b in zip(rewards, baselines, strict=True) for x in xs]
        advantages.append(math.fsum(gaps) / max(1, len(gaps)))
        shifts += book.learn(rewards, step=step)
    return shifts, advantages


def switching(
    seed: int, switch: int, tasks: tuple[str | None, str | None], rates: tuple[float, float]
) -> Iterator[list[Rewards]]:
    """The second task and rate from step `switch` on, and 25 steps of it."""
    for step in range(1, switch + 25):
        yield coins(seed, step, rates[step >= switch], tasks[step >= switch])


# One average.


def test_init_has_no_weight_once_a_debiased_ema_has_seen_rewards() -> None:
    average = MovingAverage("ema", 0.5, init=8.0, debias=True)
    assert average.baseline([1.0]) == 8.0
    average.update([2.0])
    assert average.baseline(()) == 2.0
    average.update([5.0])
    # Weights 1/3 and 2/3: (0.5 * 0.5 * 2 + 0.5 * 5) / (1 - 0.25) = 4.
    assert average.baseline(()) == pytest.approx(4.0)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("mode", ["ema", "window", "cumulative"])
@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 49, -3.3, 1e-30])
def test_equal_rewards_are_met_exactly(mode: Any, debias: bool, value: float) -> None:
    """So a run whose rewards are all equal has advantages of 0, and can be seen to stand still."""
    average = MovingAverage(mode, 0.9, None, debias, 3)
    for size in (3, 49, 1, 7, 10, 3):
        average.update([value] * size)
        assert average.baseline(()) == value


# The book.


def test_scopes_by_hand() -> None:
    first = [("p", "a", [1.0, 0.0]), ("q", "b", [1.0, 1.0]), ("r", None, [0.0]), ("s", None, [])]
    second = [("p", "a"), ("q", "a"), ("r", "b"), ("s", None), ("t", "c")]
    wanted = {
        "global": (0.6, 0.6, 0.6, 0.6, 0.6),
        "task": (0.5, 0.5, 1.0, 0.0, 9.0),
        "prompt": (0.5, 1.0, 0.0, 9.0, 9.0),
    }
    for scope, baselines in wanted.items():
        book = HistoryBook(History(scope=scope, init=9.0))  # type: ignore[arg-type]
        assert book.baselines(second) == (9.0,) * 5
        assert book.learn(first, step=1) == ()
        assert book.baselines(second) == pytest.approx(baselines)


def test_modes_by_hand() -> None:
    steps = [[1.0], [0.0, 0.0, 0.0], [1.0]]
    wanted = {
        "ema": [0.0, 1.0, 1 / 3, (0.25 * 1 + 1) / 1.75],
        "window": [0.0, 1.0, 0.25, 0.25],
        "cumulative": [0.0, 1.0, 0.25, 0.4],
    }
    for mode, baselines in wanted.items():
        book = HistoryBook(History(mode=mode, decay=0.5, window=2))  # type: ignore[arg-type]
        found = []
        for step, rewards in enumerate([*steps, []], 1):
            found += book.baselines([("p", None)])
            book.learn([("p", None, rewards)], step=step)
        assert found == pytest.approx(baselines)


def test_groups_of_one_prompt_in_a_step_are_one_batch_of_its_average() -> None:
    book = HistoryBook(History(scope="prompt", mode="window", window=1))
    book.learn([("p", None, [1.0]), ("p", None, [0.0, 0.0, 0.0])], step=1)
    assert book.baselines([("p", None)]) == (0.25,)


def test_reading_changes_nothing_and_a_step_without_rewards_neither() -> None:
    book = HistoryBook(History(scope="prompt"))
    book.learn(coins(0, 1, 0.5), step=1)
    state = book.to_state()
    book.baselines([(f"None1.{i}", None) for i in range(64)])
    assert book.learn([("None1.0", None, [])], step=2) == ()
    assert book.to_state() == state


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_before_anything_is_learned(bad: float) -> None:
    book = HistoryBook(History())
    state = book.to_state()
    with pytest.raises(SurefootError, match="prompt q"):
        book.learn([("p", None, [1.0]), ("q", None, [bad])], step=1)
    assert book.to_state() == state


@pytest.mark.parametrize(
    ("scope", "on_shift"),
    [
        ("global", "report"),
        ("global", "reset"),
        ("task", "report"),
        ("task", "reset"),
        ("prompt", "report"),
    ],
)
@pytest.mark.parametrize("mode", ["ema", "window", "cumulative"])
def test_a_book_of_the_saved_state_goes_on_exactly(mode: Any, scope: Any, on_shift: Any) -> None:
    rule = History(mode=mode, scope=scope, on_shift=on_shift, window=3, debias=False)
    whole, broken = HistoryBook(rule), HistoryBook(rule)
    found = 0
    for step in range(1, 31):
        values = uniforms(3, step) < (0.9 if step < 15 else 0.1)
        rewards: list[Rewards] = [
            (f"p{i}", "ab"[i % 2], [float(x)]) for i, x in enumerate(values) if (i + step) % 3
        ]
        broken = HistoryBook.from_state(rule, json.loads(json.dumps(broken.to_state())))
        asked = [(prompt, task) for prompt, task, _ in rewards]
        assert whole.baselines(asked) == broken.baselines(asked)
        shifts = whole.learn(rewards, step=step)
        assert shifts == broken.learn(rewards, step=step)
        assert whole.to_state() == broken.to_state()
        found += len(shifts)
    assert found == {"global": 1, "task": 2, "prompt": 0}[scope]


def test_another_rule_starts_again_and_another_version_is_refused() -> None:
    book = HistoryBook(History(init=0.5))
    book.learn(coins(0, 1, 1.0), step=1)
    state = book.to_state()
    for rule, baseline in (
        (History(init=0.5, on_shift="reset"), 1.0),
        (History(init=0.5, decay=0.8), 0.5),
        (History(init=0.5, scope="task"), 0.5),
    ):
        assert HistoryBook.from_state(rule, state).baselines([("p", None)]) == (baseline,)
    with pytest.raises(CheckpointError, match="version"):
        HistoryBook.from_state(book.rule, {"rule": state["rule"]})
    del state["detectors"][""][0]["low"]
    with pytest.raises(CheckpointError, match="low"):
        HistoryBook.from_state(book.rule, state)


def test_the_prompts_unseen_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LIMIT", 3)
    book = HistoryBook(History(scope="prompt", init=0.5))
    for step, prompt in enumerate("abcadeb", 1):
        book.learn([(prompt, None, [1.0])], step=step)
        assert len(book) == min(3, len(set("abcadeb"[:step])))
    # b goes for d and c for e; then b comes back, and a goes.
    assert book.baselines([(p, None) for p in "abcde"]) == (0.5, 1.0, 0.5, 1.0, 1.0)
    assert book.dropped == 3
    assert [average[0] for average in book.to_state()["averages"]] == ["d", "e", "b"]


# Shifts.


@pytest.mark.parametrize("tasks", [("a", "b"), (None, None)])
@pytest.mark.parametrize("switch", [3, 5, 30, 60])
def test_a_switch_is_reported_once_and_within_three_steps(switch: int, tasks: Any) -> None:
    for seed in SEEDS:
        shifts, _ = play(HistoryBook(History()), switching(seed, switch, tasks, (0.7, 0.2)))
        assert len(shifts) == 1
        shift = shifts[0]
        assert switch <= shift.step <= switch + 2
        assert abs(shift.since - switch) <= 1
        assert shift.task == tasks[1] and not shift.reset
        assert shift.mean < 0.45 < shift.before and shift.z < -3.7


def test_one_batch_is_little_to_compare_with() -> None:
    """32 rewards before the switch: most are reported in time, and none twice."""
    steps = []
    for seed in SEEDS:
        shifts, _ = play(HistoryBook(History()), switching(seed, 2, ("a", "b"), (0.7, 0.2)))
        assert len(shifts) <= 1
        steps += [shift.step for shift in shifts if shift.step <= 4]
    assert len(steps) >= 14


@pytest.mark.parametrize("mode", ["ema", "window", "cumulative"])
@pytest.mark.parametrize("switch", [5, 30])
def test_after_a_reset_the_advantages_are_centered_again(switch: int, mode: Any) -> None:
    for seed in SEEDS:
        gaps = {}
        for on_shift in ("report", "reset"):
            book = HistoryBook(History(mode=mode, on_shift=on_shift))  # type: ignore[arg-type]
            steps = switching(seed, switch, (None, None), (0.7, 0.2))
            shifts, advantages = play(book, steps)
            assert [shift.reset for shift in shifts] == [on_shift == "reset"]
            gaps[on_shift] = advantages[switch - 1 :]
        assert gaps["reset"][0] < -0.2
        assert min(map(abs, gaps["reset"][1:5])) < HALF
        assert abs(np.mean(gaps["reset"][5:])) < HALF / 2
        assert max(map(abs, gaps["reset"][5:])) < 2.5 * HALF
        if switch == 30:
            assert abs(np.mean(gaps["reset"][5:])) < abs(np.mean(gaps["report"][5:]))


def test_a_reset_starts_at_the_mean_of_the_batch_that_showed_it() -> None:
    for debias in (False, True):
        book = HistoryBook(History(on_shift="reset", debias=debias))
        steps = [labelled(np.full(32, 1.0 - (step > 10) * 0.75), step) for step in range(1, 14)]
        shifts, advantages = play(book, iter(steps))
        assert [(shift.step, shift.since) for shift in shifts] == [(11, 11)]
        # The batch itself was still compared with what came before it.
        assert advantages[10] <= -0.25 and advantages[11:] == [0.0, 0.0]


def test_a_cumulative_average_that_is_kept_never_recovers() -> None:
    book = HistoryBook(History(mode="cumulative"))
    steps = [labelled(np.full(32, float(step <= 30)), step) for step in range(1, 92)]
    shifts, advantages = play(book, iter(steps))
    assert len(shifts) == 1
    # 30 old batches among 60, then among 90.
    assert [advantages[60], advantages[90]] == pytest.approx([-1 / 2, -1 / 3])


NORMAL = norm(0.3, 2.0).ppf
KINDS: dict[str, Callable[[NDArray[np.float64]], NDArray[Any]]] = {
    **{f"rate {rate}": lambda u, rate=rate: u < rate for rate in (0.02, 0.2, 0.5, 0.7, 0.98)},
    "normal": NORMAL,
    "log-normal": lambda u: np.exp(2 * norm.ppf(u)),
    "constant": lambda u: np.full(len(u), 0.7),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_is_reported_where_nothing_changes(kind: str) -> None:
    for seed in SEEDS:
        steps = (labelled(KINDS[kind](uniforms(seed, step)), step) for step in range(200))
        shifts, advantages = play(HistoryBook(History()), steps)
        assert shifts == []
        assert kind != "constant" or advantages[1:] == [0.0] * 199


def test_nothing_is_reported_where_scores_are_missing() -> None:
    for seed in SEEDS:
        sizes = draws.uniform(seed, "sizes", np.arange(200)) * (PROMPTS + 1)
        steps = (coins(seed, step, 0.5)[: int(sizes[step])] for step in range(200))
        assert play(HistoryBook(History()), steps)[0] == []


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5, 0.7])
def test_another_task_that_is_as_hard_is_no_shift(rate: float) -> None:
    for seed in SEEDS:
        steps = switching(seed, 30, ("a", "b"), (rate, rate))
        assert play(HistoryBook(History()), steps)[0] == []


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize(("start", "end"), [(0.2, 0.6), (0.0, 0.6), (0.6, 1.0)])
def test_learning_is_no_shift(start: float, end: float, samples: int) -> None:
    """Over 100 steps; also with so many completions that the climb itself is certain."""
    for seed in SEEDS:

        def climb(seed: int = seed) -> Iterator[list[Rewards]]:
            for step in range(120):
                rate = start + (end - start) * min(step, 100) / 100
                won = uniforms(seed, step, PROMPTS * samples).reshape(PROMPTS, -1) < rate
                yield [(str(i), None, row.astype(float).tolist()) for i, row in enumerate(won)]

        assert play(HistoryBook(History()), climb())[0] == []


def test_prompts_of_unequal_difficulty_are_no_shift() -> None:
    """Eight prompts a step, sixteen completions each: 128 rewards, but eight that are independent.

    Taken for 128 independent ones, each of these runs would have a report.
    """
    for seed in SEEDS:

        def steps(seed: int = seed) -> Iterator[list[Rewards]]:
            for step in range(200):
                rates = draws.uniform(seed, "difficulty", step, np.arange(8)) ** 3
                won = uniforms(seed, step, 128).reshape(8, 16) < rates[:, None]
                yield [(f"{step}/{i}", None, w.astype(float).tolist()) for i, w in enumerate(won)]

        assert play(HistoryBook(History()), steps())[0] == []


def test_a_changed_mix_names_the_task_that_is_new() -> None:
    """Half of the batch is of a new, harder task from step 30 on."""
    for seed in SEEDS:

        def mixed(seed: int = seed) -> Iterator[list[Rewards]]:
            for step in range(1, 60):
                new = 16 if step >= 30 else 0
                old = coins(seed, step, 0.9, "a")[new:]
                yield old + coins(seed + 100, step, 0.1, "b")[:new]

        shifts, _ = play(HistoryBook(History()), mixed())
        assert [shift.task for shift in shifts] == ["b"]
        assert 30 <= shifts[0].step <= 33
        assert play(HistoryBook(History(scope="task")), mixed())[0] == []


def test_under_scope_task_only_the_task_that_changed_starts_again() -> None:
    for seed in SEEDS:

        def both(seed: int = seed) -> Iterator[list[Rewards]]:
            for step in range(1, 60):
                yield coins(seed, step, 0.7, "a") + coins(
                    seed + 100, step, 0.7 if step < 30 else 0.2, "b"
                )

        book, kept = (
            HistoryBook(History(scope="task", on_shift=o))  # type: ignore[arg-type]
            for o in ("reset", "report")
        )
        shifts, _ = play(book, both())
        assert [shift.task for shift in shifts] == ["b"] and 30 <= shifts[0].step <= 32
        play(kept, both())
        asked = [("", "a"), ("", "b")]
        assert book.baselines(asked)[0] == kept.baselines(asked)[0]
        assert book.baselines(asked)[1] < kept.baselines(asked)[1]


def test_the_words() -> None:
    known: dict[str, Any] = {"step": 42, "since": 41, "mean": 0.2, "before": 0.71, "z": -6.04}
    told = Shift(scope="global", task="b", reset=False, **known)
    assert str(told) == (
        "task 'b' since step 41; reward mean 0.20 against a history of 0.71 (z -6.0); the history "
        "is kept: method.baseline.on_shift=reset would start it again"
    )
    told = Shift(scope="task", task=None, reset=True, **known)
    assert str(told) == (
        "the rewards changed since step 41; reward mean 0.20 against a history of 0.71 (z -6.0); "
        "the history starts again at step 42"
    )
