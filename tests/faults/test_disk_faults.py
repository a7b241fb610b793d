"""Disks that refuse: checkpoints (row 5) and the ledger (row 6) of real runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import assert_same_run, command, kill, make_recipe, start, train
from support.soak import limit_file_size, wait
from support.zygote import Child

from surefoot.errors import EXIT_FINDING, EXIT_REFUSED
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.read import read_events, read_metrics

REWARD = '''
"""A reward with spread, and a door before each step that a test can hold shut."""

import time
from pathlib import Path

FOLDER = Path(__file__).parent


def letters(completions, answer, trainer_state):
    step = trainer_state.global_step + 1
    (FOLDER / f"at_{step}").touch()
    while (FOLDER / f"hold_{step}").exists():
        time.sleep(0.005)
    shares = [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]
    return [s + float(a in text) for s, a, text in zip(shares, answer, completions)]
'''
BELOW_A_CHECKPOINT = 40_000
"""Bytes: the rows and the terminal of nine steps fit, the weights do not."""
BELOW_THE_ROWS = 4_000
"""Bytes: less than three rows of metrics, more than what nine steps show on a terminal."""

pytestmark = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="this machine limits file sizes itself",
)


def make(folder: Path, model: Path, **changes: Any) -> Path:
    method = {"name": "grpo", "epochs": 2, "minibatches": 2}
    # Held-out prompts would pass the doors too.
    path = make_recipe(folder, model, method=method, run__eval_every=0, **changes)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run."""
    command("--version", cwd=tmp_path_factory.mktemp("warm")).communicate(timeout=200)
    recipe = make(tmp_path_factory.mktemp("whole"), tiny_model)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    return recipe.parent / "run"


def hold(recipe: Path, *steps: int) -> None:
    """Shut the doors before these steps."""
    for step in steps:
        (recipe.parent / f"hold_{step}").touch()


def reach(recipe: Path, step: int, child: Child) -> None:
    """Until the child stands at that door: all steps before are done."""
    wait(child, (recipe.parent / f"at_{step}").exists, f"step {step}")
    assert child.poll() is None, child.err.read_text(encoding="utf-8")


def release(recipe: Path, step: int) -> None:
    (recipe.parent / f"hold_{step}").unlink()


def finish(child: Child) -> str:
    """What the child said, once it has ended well."""
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    return said


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == kind]


def newest(run: Path) -> int:
    """The step of the newest checkpoint; it verifies, and beside it there is no half one."""
    loaded = load_latest(RunDirectory(run), rename_damaged=False)
    assert loaded is not None and loaded.skipped == ()
    assert not list((run / "checkpoints").glob(".tmp-*"))
    return loaded.step


# -- row 5: checkpoints ----------------------------------------------------------------------------


@pytest.mark.fault(5)
def test_one_refused_checkpoint_costs_one_interval(
    finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe, run = make(tmp_path, tiny_model), tmp_path / "run"
    hold(recipe, 4, 5)
    child = start(recipe)
    try:
        reach(recipe, 4, child)
        limit_file_size(child, BELOW_A_CHECKPOINT)
        release(recipe, 4)
        reach(recipe, 5, child)
        assert newest(run) == 2
        assert "checkpoint of step 4 could not be written" in child.err.read_text(encoding="utf-8")
        (failed,) = events(run, "checkpoint_failed")
        assert failed["step"] == 4 and "earlier checkpoints are untouched" in failed["message"]
        limit_file_size(child, None)
        release(recipe, 5)
        said = finish(child)
    finally:
        kill(child)
    assert said.count("could not be written") == 1
    assert [event["step"] for event in events(run, "checkpoint")] == [2, 6, 8, 9]
    assert newest(run) == 9
    assert_same_run(run, finished)


def given_up(recipe: Path, step: int) -> str:
    """What a run says that stops because no checkpoint can be written from a step on."""
    hold(recipe, step)
    child = start(recipe)
    try:
        reach(recipe, step, child)
        limit_file_size(child, BELOW_A_CHECKPOINT)
        release(recipe, step)
        _, said = child.communicate(timeout=120)
    finally:
        kill(child)
    assert child.returncode == EXIT_FINDING, said
    return said


@pytest.mark.fault(5)
def test_two_in_a_row_stop_the_run_and_the_same_command_finishes_it(
    finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe, run = make(tmp_path, tiny_model), tmp_path / "run"
    said = given_up(recipe, 4)
    last = said.splitlines()[-1]
    assert "stopped at step 6" in last and "Free space" in last and "of step 2" in last
    assert newest(run) == 2
    failed = events(run, "checkpoint_failed")
    assert {event["step"] for event in failed} == {4, 6}
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished)


@pytest.mark.fault(5)
@pytest.mark.parametrize("first", [True, False])
def test_the_last_checkpoint_must_succeed(
    first: bool, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """With earlier ones or none: what was trained must not be called done without its weights."""
    every = 0 if first else 4
    recipe, run = make(tmp_path, tiny_model, run__checkpoint_every=every), tmp_path / "run"
    said = given_up(recipe, 9)
    assert ("there is none" if first else "of step 8") in said.splitlines()[-1]
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished)


@pytest.mark.fault(5)
@pytest.mark.parametrize("limit", [BELOW_A_CHECKPOINT, 1])
def test_a_signal_while_the_disk_refuses_does_not_claim_that_state_is_saved(
    limit: int, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """With a limit of 1, nothing can be said either: the exit code is what is left."""
    recipe, run = make(tmp_path, tiny_model), tmp_path / "run"
    hold(recipe, 6)
    child = start(recipe)
    try:
        reach(recipe, 6, child)
        limit_file_size(child, limit)
        kill(child, signal.SIGTERM)
        release(recipe, 6)
        _, said = child.communicate(timeout=120)
    finally:
        kill(child)
    assert child.returncode == EXIT_FINDING, said
    assert "state is saved" not in said
    assert limit == 1 or "the newest one is of step 4" in said.splitlines()[-1]
    assert newest(run) == 4
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, finished)


# -- row 6: the ledger -----------------------------------------------------------------------------


@pytest.mark.fault(6)
@pytest.mark.parametrize("limit", [BELOW_THE_ROWS, 1])
def test_rows_wait_in_memory_and_the_gap_is_marked(
    limit: int, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """All tables, for three steps; with a limit of 1, what the run says goes to that disk too."""
    recipe, run = make(tmp_path, tiny_model, run__checkpoint_every=8), tmp_path / "run"
    hold(recipe, 4, 7)
    child = start(recipe)
    try:
        reach(recipe, 4, child)
        limit_file_size(child, limit)
        release(recipe, 4)
        reach(recipe, 7, child)
        before = [row["step"] for row in read_metrics(run)]
        assert before == [1, 2, 3], "whole rows, and none that the disk refused"
        limit_file_size(child, None)
        release(recipe, 7)
        said = finish(child)
    finally:
        kill(child)
    assert said.count("cannot be written") == 1, "one warning, whatever the number of files"
    gaps = {gap["file"]: gap for gap in events(run, "gap")}
    assert len(events(run, "gap")) == len(gaps) and "metrics.jsonl" in gaps
    gap = gaps["metrics.jsonl"]
    assert (gap["first_step"], gap["last_step"]) == (4, 7)
    assert (gap["recovered"], gap["lost"]) == (4, 0)
    assert_same_run(run, finished)


# -- a real disk, of a few megabytes ---------------------------------------------------------------


class Disk:
    """A tmpfs in a namespace of its own, whose size can be changed while it is in use."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["unshare", "-Urm", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.path = Path(f"/proc/{self._shell.pid}/root/mnt")
        self._run("mount -t tmpfs -o size=400m none /mnt")
        (self.path / "probe").touch()

    def leave(self, free: int) -> None:
        """Make it so small that `free` bytes are left."""
        facts = os.statvfs(self.path)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        self._run(f"mount -o remount,size={used + free} /mnt")

    def close(self) -> None:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.stdout.close()
        self._shell.wait(timeout=30)

    def _run(self, line: str) -> None:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        try:
            self._shell.stdin.write(f"{line}; echo ended with $?\n")
            self._shell.stdin.flush()
        except BrokenPipeError:
            pass
        said = self._shell.stdout.readline()
        if said != "ended with 0\n":
            raise OSError(f"{line}: {said}")


@pytest.fixture
def disk() -> Iterator[Disk]:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    try:
        made = Disk()
    except OSError as error:
        pytest.skip(f"no namespace of our own here ({error})")
    yield made
    made.close()


@pytest.mark.fault(5)
def test_too_little_room_for_a_checkpoint_costs_one_interval(
    disk: Disk, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run = disk.path / "run"
    recipe = make(tmp_path, tiny_model, run__dir=str(run))
    hold(recipe, 4, 5)
    child = start(recipe)
    try:
        reach(recipe, 4, child)
        disk.leave(100 << 20)
        release(recipe, 4)
        reach(recipe, 5, child)
        assert newest(run) == 2
        (failed,) = events(run, "checkpoint_failed")
        assert "needs 200 MiB free" in failed["message"] and "are left" in failed["message"]
        disk.leave(300 << 20)
        release(recipe, 5)
        finish(child)
    finally:
        kill(child)
    assert [event["step"] for event in events(run, "checkpoint")] == [2, 6, 8, 9]
    assert_same_run(run, finished)


@pytest.mark.fault(5, 6)
def test_a_run_on_a_full_disk_is_refused_until_there_is_room(
    disk: Disk, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run = disk.path / "run"
    recipe = make(tmp_path, tiny_model, run__dir=str(run))
    hold(recipe, 6)
    child = start(recipe)
    reach(recipe, 6, child)
    kill(child)
    child.communicate(timeout=60)
    release(recipe, 6)
    disk.leave(0)
    refused = train(recipe)
    assert refused.returncode == EXIT_REFUSED, refused.stderr
    assert "No space left on device" in refused.stderr and "make room" in refused.stderr
    assert newest(run) == 4
    disk.leave(300 << 20)
    assert train(recipe).returncode == 0
    assert_same_run(run, finished)


@pytest.mark.fault(6)
def test_a_full_disk_tears_no_row_and_loses_none(
    disk: Disk, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run = disk.path / "run"
    recipe = make(tmp_path, tiny_model, run__dir=str(run), run__checkpoint_every=8)
    hold(recipe, 4, 8)
    child = start(recipe)
    try:
        reach(recipe, 4, child)
        disk.leave(0)
        release(recipe, 4)
        reach(recipe, 8, child)
        for name in ("metrics.jsonl", "groups.jsonl", "samples.jsonl"):
            data = (run / name).read_bytes()
            assert data.endswith(b"}\n") and all(map(json.loads, data.splitlines()))
        disk.leave(300 << 20)
        release(recipe, 8)
        said = finish(child)
    finally:
        kill(child)
    assert said.count("No space left on device") == 1
    gaps = {gap["file"]: gap for gap in events(run, "gap")}
    # What fits into the last page of a file is still written.
    assert gaps["metrics.jsonl"]["first_step"] in (4, 5) and gaps["metrics.jsonl"]["lost"] == 0
    assert_same_run(run, finished)


@pytest.mark.fault(5, 6)
def test_checkpoints_go_on_where_the_log_alone_is_full_and_a_kill_loses_no_row(
    disk: Disk, finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    recipe, run = make(tmp_path, tiny_model, run__checkpoint_every=4), tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(disk.path / "metrics.jsonl")
    hold(recipe, 2, 6)
    child = start(recipe)
    try:
        reach(recipe, 2, child)
        disk.leave(0)
        release(recipe, 2)
        reach(recipe, 6, child)
        kill(child)
        child.communicate(timeout=60)
    finally:
        kill(child)
    assert newest(run) == 4 and read_metrics(run)[-1]["step"] < 4
    disk.leave(300 << 20)
    release(recipe, 6)
    done = train(recipe)
    assert done.returncode == 0, done.stderr
    (gap,) = events(run, "gap")
    assert gap["file"] == "metrics.jsonl" and gap["recovered"] >= 2 and gap["lost"] == 0
    assert_same_run(run, finished)
