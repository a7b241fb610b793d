"""A chain that is killed in any stage, or between two, ends where an undisturbed one ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.chains import assert_same_chain, make_chain, stage
from support.runs import kill, start, train, train_after, wait_for_step

# The named function of the chain is where the process dies.
DIES = """
import os, signal
from surefoot.loops import stages
stages.{function} = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a chain that nothing disturbed."""
    recipe = make_chain(tmp_path_factory.mktemp("whole"), tiny_model)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    tables = [line.split() for line in done.stdout.splitlines() if line.startswith("run ")]
    assert [words[1] for words in tables] == ["01_first,", "02_second,"]
    return recipe.parent / "run"


@pytest.mark.fault(3)
def test_kill_nine_in_each_stage(finished: Path, tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_chain(tmp_path, tiny_model)
    run = tmp_path / "run"
    for name in ("01_first", "02_second"):
        child = start(recipe)
        wait_for_step(run / "stages" / name, 3, child)
        kill(child)
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert "stage 1 of 2, first: complete, skipped" in done.stderr
    assert_same_chain(run, finished)
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    seen = [(row["kind"], row["stage"], row.get("resumes")) for row in rows]
    assert seen[0] == ("stage_began", "first", False)
    assert seen[-1] == ("stage_ended", "second", None)
    assert seen.count(("stage_ended", "first", None)) == 1
    assert ("stage_began", "second", True) in seen


@pytest.mark.fault(3)
@pytest.mark.parametrize(("function", "part"), [("export_whole", False), ("_sync", True)])
def test_kill_nine_between_the_last_step_and_the_model(
    function: str, part: bool, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """`export_whole` dies before anything is written, `_sync` when the files are there unnamed."""
    recipe = make_chain(tmp_path, tiny_model)
    done = train_after(DIES.format(function=function), recipe)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first = stage(tmp_path / "run", "first")
    assert (first / "checkpoints" / "step_000006").is_dir()
    assert not (first / "model").exists()
    assert (first / "model.part").exists() == part
    again = train(recipe)
    assert again.returncode == 0, again.stderr
    assert f"{first.relative_to(tmp_path)} is complete at step 6" in again.stderr.replace(
        f"{tmp_path}/", ""
    )
    assert_same_chain(tmp_path / "run", finished)


@pytest.mark.fault(4)
def test_a_signal_in_the_second_stage_saves_and_says_75(
    finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_chain(tmp_path, tiny_model)
    run = tmp_path / "run"
    child = start(recipe)
    wait_for_step(run / "stages" / "02_second", 1, child)
    kill(child, signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "same command" in err and "Traceback" not in err
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (rows[-1]["kind"], rows[-1]["stage"]) == ("stage_stopped", "second")
    assert train(recipe).returncode == 0
    assert_same_chain(run, finished)


@pytest.mark.fault(10)
def test_a_second_process_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_chain(tmp_path, tiny_model, steps=400)
    child = start(recipe)
    try:
        wait_for_step(tmp_path / "run" / "stages" / "01_first", 1, child)
        second = train(recipe)
        assert second.returncode == 2
        assert f"process {child.pid}" in second.stderr
    finally:
        kill(child)
        child.communicate(timeout=60)
