"""Killed at any moment of a run: the directory is usable, and the end is the undisturbed one."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.offline import make_offline_recipe
from support.results import write_result
from support.runs import (
    assert_same_run,
    command,
    kill,
    make_recipe,
    start,
    train,
    wait_for_step,
)
from support.zygote import Child

from surefoot.run.checkpoint import POINTS, Loaded, load_latest, load_step
from surefoot.run.directory import RunDirectory
from surefoot.run.read import latest_step, read_events, read_metrics

METHODS: dict[str, tuple[dict[str, Any], str | None]] = {
    "rloo": ({"name": "rloo"}, None),
    "grpo": ({"name": "grpo", "epochs": 2, "minibatches": 2}, None),
    "reinforce_ma": ({"name": "reinforce_ma", "baseline": {"scope": "task"}}, None),
    "ppo": (
        {
            "name": "ppo",
            "epochs": 2,
            "kl": {"controller": {"kind": "proportional", "target": 0.5, "horizon": 100}},
        },
        None,
    ),
    "dapo": ({"name": "dapo", "keep": {"kind": "informative", "max_rounds": 2}}, None),
    "dpo": ({"name": "dpo"}, "pairs"),
    "sft": ({"name": "sft", "packing": True}, "demonstrations"),
}
STEPS = 8
COIN = """
import surefoot


@surefoot.reward_function
def letters(sample) -> float:
    return float(sum(map(ord, sample.text)) % 4 > 0)
"""
"""A reward of 0 or 1, so that some groups are dead and DAPO draws more prompts."""


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed."""

    run: Path
    start: float
    """Seconds from the fork to the first step."""
    seconds: float
    """To the end of the last one."""
    places: dict[int, tuple[int, int]]
    """Of the checkpoint of each step: rows walked over, and how many an epoch has."""

    def left(self, run: Path) -> float:
        """How many seconds a process that goes on in `run` takes, about."""
        share = 1 - max(RunDirectory(run).checkpoint_steps(), default=0) / STEPS
        return self.start + share * (self.seconds - self.start)


def recipe_of(name: str, folder: Path, model: Path, **changes: Any) -> Path:
    """A checkpoint after every step; an epoch is two steps, or about that where some are redone."""
    method, rows = METHODS[name]
    changes = {"run__checkpoint_every": 1, "run__steps": STEPS, **changes}
    if rows is not None:
        changes = {"optim__batch_size": 4, **changes}
        return make_offline_recipe(folder, model, method=method, rows=rows, **changes)
    recipe = make_recipe(folder, model, method=method, data__eval_size=3, **changes)
    if name == "dapo":
        (folder / "reward.py").write_text(COIN, encoding="utf-8")
    return recipe


def place_of(checkpoint: Loaded) -> tuple[int, int]:
    cursor = checkpoint.state["cursor"]
    return cursor["counts"][0], cursor["sizes"][0]


@pytest.fixture(scope="module")
def undisturbed(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Whole]:
    """An undisturbed run of each method, made when it is asked for."""
    command("--version", cwd=tmp_path_factory.mktemp("warm")).communicate(timeout=200)

    @functools.cache
    def make(name: str) -> Whole:
        folder = tmp_path_factory.mktemp(name)
        recipe, run = recipe_of(name, folder, tiny_model, run__keep=STEPS), folder / "run"
        began = time.monotonic()
        child = start(recipe)
        wait_for_step(run, 1, child)
        first = time.monotonic() - began
        wait_for_step(run, STEPS, child)
        last = time.monotonic() - began
        _, err = child.communicate(timeout=200)
        assert child.returncode == 0, err
        steps = range(1, STEPS + 1)
        directory = RunDirectory(run)
        places = {step: place_of(load_step(directory, step)) for step in steps}
        return Whole(run, first, last, places)

    return make


def usable(run: Path) -> Loaded | None:
    """The newest checkpoint, which is whole, and no older than any that was told of."""
    directory = RunDirectory(run)
    newest = load_latest(directory, rename_damaged=False)
    events = read_events(run) if directory.events.is_file() else []
    told = max((event["step"] for event in events if event["kind"] == "checkpoint"), default=0)
    if newest is None:
        assert told == 0
        return None
    assert newest.skipped == ()
    assert newest.step >= told
    assert not [entry.name for entry in directory.checkpoints.iterdir() if "corrupt" in entry.name]
    return newest


def assert_finishes(recipe: Path, whole: Path) -> None:
    """The same command goes on, and its end is that of the undisturbed run, state included."""
    run = recipe.parent / "run"
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, whole)
    mine, theirs = (load_latest(RunDirectory(place)) for place in (run, whole))
    assert mine is not None and theirs is not None
    assert mine.state == theirs.state
    assert not list((run / "checkpoints").glob(".*"))


# -- random moments --------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the kills of one method."""

    sent: int = 0
    alive: int = 0
    """Of them, while the run was alive."""
    before: int = 0
    """Of those, before it had a checkpoint."""
    saving: int = 0
    """Of those, while a checkpoint was written or retired: half of one was left."""
    runs: int = 0
    """Run directories, each of which went on to its end."""


def strike(recipe: Path, whole: Whole, chance: random.Random) -> Child:
    """SIGKILL between fork and end; every second time about where a checkpoint is saved."""
    run = recipe.parent / "run"
    seen = latest_step(run) or 0 if (run / "metrics.jsonl").is_file() else 0
    child = start(recipe)
    if seen == STEPS or chance.random() < 0.5:
        # Beyond the end too: a run at its last step would else be killed there again and again.
        until = time.monotonic() + 1.5 * chance.random() * whole.left(run)
        while time.monotonic() < until and child.poll() is None:
            time.sleep(0.002)
    else:
        wait_for_step(run, chance.randint(seen + 1, STEPS), child)
        time.sleep(chance.uniform(0.0, 0.005))
    kill(child)
    child.communicate(timeout=60)
    return child


def kill_at_random(name: str, kills: int, whole: Whole, folder: Path, model: Path) -> Tally:
    """So many kills of runs that were alive, in as many run directories as that takes."""
    chance, tally = random.Random(f"{name}, {kills} kills"), Tally()
    while tally.alive < kills:
        tally.runs += 1
        recipe = recipe_of(name, folder / str(tally.runs), model)
        run = recipe.parent / "run"
        ended = False
        while tally.alive < kills and not ended:
            child = strike(recipe, whole, chance)
            tally.sent += 1
            assert tally.sent <= 10 + 3 * kills, "too many kills came after the end"
            assert child.returncode in (0, -signal.SIGKILL), child.err.read_text()
            newest = usable(run)
            ended = newest is not None and newest.step == STEPS
            if child.returncode != 0:
                tally.alive += 1
                tally.before += newest is None
                tally.saving += bool(list((run / "checkpoints").glob(".tmp-*")))
        assert_finishes(recipe, whole.run)
    return tally


KILLS = {"rloo": 4, "grpo": 4, "reinforce_ma": 4, "ppo": 4, "dapo": 3, "dpo": 3, "sft": 3}
"""Twenty-five; the slow tier has eight times as many."""


@pytest.mark.fault(1, 3)
@pytest.mark.parametrize("name", METHODS)
def test_kill_nine_at_random_moments(
    name: str, undisturbed: Callable[[str], Whole], tiny_model: Path, tmp_path: Path
) -> None:
    tally = kill_at_random(name, KILLS[name], undisturbed(name), tmp_path, tiny_model)
    assert tally.alive == KILLS[name] and tally.runs >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(1, 3)
def test_two_hundred_kills_at_random_moments(
    undisturbed: Callable[[str], Whole], tiny_model: Path, tmp_path: Path
) -> None:
    rows = []
    for name, few in KILLS.items():
        whole = undisturbed(name)
        rows.append((name, kill_at_random(name, 8 * few, whole, tmp_path / name, tiny_model)))
    total = Tally(
        *(
            sum(getattr(tally, field) for _, tally in rows)
            for field in ("sent", "alive", "before", "saving", "runs")
        )
    )
    assert total.alive == 200
    assert total.saving >= 10, "too few kills landed in a save for this test to mean anything"
    write_result("kills", table([*rows, ("all", total)]))


def table(rows: list[tuple[str, Tally]]) -> list[str]:
    """For bench/results; a directory that was not usable, or an unequal end, has ended the test."""
    heads = ("method", "sent", "alive", "no checkpoint yet", "in a save", "unusable", "runs")
    lines = [
        "SIGKILL to `surefoot train` (tiny model, 8 steps, a checkpoint after each) at random",
        "moments: half of them uniform between fork and end, half about where a step is saved.",
        "After each kill the newest checkpoint is verified, and the same command goes on.",
        "",
        "  ".join(f"{head:>{max(12, len(head))}}" for head in (*heads, "equal ends")),
    ]
    for name, tally in rows:
        cells = (tally.sent, tally.alive, tally.before, tally.saving, 0, tally.runs, tally.runs)
        widths = [max(12, len(head)) for head in (*heads, "equal ends")]
        words = (name, *map(str, cells))
        lines.append("  ".join(f"{word:>{w}}" for word, w in zip(words, widths, strict=True)))
    return [
        *lines,
        "",
        "sent: kills sent; alive: the run had not ended before; in a save: half a checkpoint, or",
        "half of a retired one, was left behind; unusable: no whole checkpoint, or one was lost;",
        "equal ends: runs whose weights, moments, state and rows are those of the undisturbed run,",
        "byte for byte.",
    ]


# -- every point of a save -------------------------------------------------------------------------

SHORT: dict[str, Any] = {"run__steps": 4, "run__eval_every": 0}
AT = 3
"""The step in whose save the process dies: two older checkpoints exist, and one is to go."""


@pytest.fixture(scope="module")
def short(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an undisturbed short run."""
    recipe = recipe_of("rloo", tmp_path_factory.mktemp("short"), tiny_model, **SHORT)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    return recipe.parent / "run"


def checkpoints(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def renamed(point: str) -> bool:
    """Whether the checkpoint has its final name by then."""
    return POINTS.index(point) >= POINTS.index("renamed")


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_dies_at_any_point_of_a_save_goes_on(
    point: str, short: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of("rloo", tmp_path, tiny_model, **SHORT)
    run = tmp_path / "run"
    died = train(recipe, SUREFOOT_FAULT_AT=f"{point}@{AT}")
    newest = usable(run)
    assert newest is not None
    if point == "moved_aside":
        # A run never saves a step that has a checkpoint.
        assert (died.returncode, newest.step) == (0, SHORT["run__steps"]), died.stderr
    else:
        wanted = (137, AT if renamed(point) else AT - 1)
        assert (died.returncode, newest.step) == wanted, died.stderr
    assert_finishes(recipe, short)
    assert checkpoints(run) == checkpoints(short)


@pytest.mark.fault(1, 2)
def test_a_supervised_run_that_dies_at_every_point_in_turn_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    points = [point for point in POINTS if point != "moved_aside"]
    long: dict[str, Any] = {"run__steps": len(points) + AT, "run__eval_every": 0}
    whole, recipe = (
        recipe_of("sft", tmp_path / name, tiny_model, **long) for name in ("whole", "killed")
    )
    assert train(whole).returncode == 0
    for step, point in enumerate(points, start=AT):
        died = train(recipe, SUREFOOT_FAULT_AT=f"{point}@{step}")
        newest = usable(recipe.parent / "run")
        assert newest is not None
        wanted = (137, step if renamed(point) else step - 1)
        assert (died.returncode, newest.step) == wanted, (point, died.stderr)
    assert_finishes(recipe, whole.parent / "run")


# -- places of an epoch ----------------------------------------------------------------------------


def test_there_is_something_to_forget(undisturbed: Callable[[str], Whole]) -> None:
    """DAPO draws more prompts in some steps, and the controller of PPO moves in each."""
    taken = [walked for walked, _ in undisturbed("dapo").places.values()]
    steps = {after - before for before, after in zip([0, *taken], taken, strict=False)}
    assert len(steps) > 1, taken
    rows = read_metrics(undisturbed("ppo").run)
    assert len({row["kl/coef"] for row in rows if "kl/coef" in row}) == STEPS


@pytest.mark.fault(3)
@pytest.mark.parametrize("name", METHODS)
def test_killed_at_the_middle_and_at_the_end_of_an_epoch(
    name: str, undisturbed: Callable[[str], Whole], tiny_model: Path, tmp_path: Path
) -> None:
    whole = undisturbed(name)
    later = {step: place for step, place in whole.places.items() if step > 1}
    middle = next(step for step, (walked, rows) in later.items() if 2 * (walked % rows) == rows)
    end = next(
        step for step, (walked, rows) in later.items() if step > middle and walked % rows == 0
    )
    assert end < STEPS - 1
    recipe = recipe_of(name, tmp_path, tiny_model)
    run = tmp_path / "run"
    for step in (middle, end):
        died = train(recipe, SUREFOOT_FAULT_AT=f"retained@{step}")
        assert died.returncode == 137, died.stderr
        newest = usable(run)
        assert newest is not None
        assert (newest.step, place_of(newest)) == (step, whole.places[step])
    child = start(recipe)
    wait_for_step(run, end + 1, child)
    kill(child)
    child.communicate(timeout=60)
    assert_finishes(recipe, whole.run)
    resumed = [event["step"] for event in read_events(run) if event["kind"] == "resumed"]
    assert resumed[:2] == [middle, end]
    steps = [row["step"] for row in read_metrics(run)]
    assert steps == list(range(STEPS + 1)), "no row is missing, and none is there twice"
