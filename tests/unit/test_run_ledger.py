"""Ledger rows: their form, the cut on resume, and disks that refuse."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.errors import RunDirectoryError
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.run import rows
from surefoot.run.directory import RunDirectory
from surefoot.run.ledger import Ledger
from surefoot.run.read import read_events, read_groups, read_metrics, read_samples


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def _write(directory: RunDirectory, steps: range, *, resume_step: int | None = None) -> None:
    ledger = Ledger(directory, resume_step=resume_step)
    for step in steps:
        ledger.step(step, {"reward": step / 2}, [{"prompt": "a"}, {"prompt": "b"}], [{"n": step}])
    ledger.close()


def test_a_row_starts_with_its_step_keeps_order_and_has_no_nan(directory: RunDirectory) -> None:
    ledger = Ledger(directory, resume_step=None)
    metrics = {"z": float("nan"), "a": np.float32(0.5), "i": np.int64(3), "text": "né\ud800\u2028"}
    ledger.step(7, {**metrics, "none": None, "inf": float("-inf"), "step": 99})
    ledger.close()
    data = directory.metrics.read_bytes()
    assert (
        data
        == (
            '{"step": 7, "z": null, "a": 0.5, "i": 3, "text": "né\ufffd\u2028", "none": null, '
            '"inf": null}\n'
        ).encode()
    )
    assert read_metrics(directory.path)[0]["i"] == 3


def test_rows_are_readable_before_close(directory: RunDirectory) -> None:
    ledger = Ledger(directory, resume_step=None)
    ledger.step(1, {"reward": 1.0}, [{"prompt": "a"}], [{"completion": "b"}])
    ledger.event("finding", "no signal", {"group": 3})
    assert read_metrics(directory.path) == [{"step": 1, "reward": 1.0}]
    assert read_groups(directory.path) == [{"step": 1, "prompt": "a"}]
    assert read_samples(directory.path) == [{"step": 1, "completion": "b"}]
    (event,) = read_events(directory.path)
    assert {key: event[key] for key in ("step", "kind", "message", "group")} == {
        "step": 1,
        "kind": "finding",
        "message": "no signal",
        "group": 3,
    }
    ledger.close()


def test_a_value_that_is_not_json_writes_nothing_of_its_step(directory: RunDirectory) -> None:
    ledger = Ledger(directory, resume_step=None)
    with pytest.raises(TypeError, match=r"row\.loss is a object"):
        ledger.step(1, {"loss": object()}, [{"prompt": "a"}])  # type: ignore[dict-item]
    ledger.step(2, {})
    assert (read_metrics(directory.path), read_groups(directory.path)) == ([{"step": 2}], [])
    ledger.close()


@pytest.mark.fault(3)
def test_resume_cuts_later_rows_and_a_torn_line_and_keeps_events(directory: RunDirectory) -> None:
    _write(directory, range(1, 8))
    with open(directory.metrics, "ab") as file:
        file.write(b'{"step": 8, "rew')
    with open(directory.events, "ab") as file:
        file.write(b'{"step": 7, "time": "x", "kind": "finding", "message": "m"}\n{"torn')
    _write(directory, range(5, 7), resume_step=4)
    assert [row["step"] for row in read_metrics(directory.path)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_groups(directory.path)][::2] == [1, 2, 3, 4, 5, 6]
    assert len(read_groups(directory.path)) == 12
    assert [row["n"] for row in read_samples(directory.path)] == [1, 2, 3, 4, 5, 6]
    events = read_events(directory.path)
    assert [event["kind"] for event in events] == ["finding", "resumed"]
    cut = {"metrics.jsonl": 4, "groups.jsonl": 6, "samples.jsonl": 3}
    assert (events[1]["step"], events[1]["cut_rows"]) == (4, cut)
    assert all(json.loads(line) for line in directory.events.read_bytes().splitlines())


def test_resumed_rows_equal_the_uninterrupted_ones(tmp_path: Path) -> None:
    whole, cut = (RunDirectory(tmp_path / name).create() for name in ("whole", "cut"))
    _write(whole, range(1, 9))
    _write(cut, range(1, 6))
    _write(cut, range(4, 9), resume_step=3)
    for name in ("metrics.jsonl", "groups.jsonl", "samples.jsonl"):
        assert (cut.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_scattered_rows_of_later_steps_are_cut_too(directory: RunDirectory) -> None:
    directory.metrics.write_bytes(b'{"step": 1}\n{"step": 5}\ngarbage\n{"step": 2}\n{"step": 6}\n')
    Ledger(directory, resume_step=2).close()
    assert directory.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert not list(directory.path.glob(".tmp-*"))


def test_a_start_from_zero_drops_what_a_crash_before_the_first_checkpoint_left(
    directory: RunDirectory,
) -> None:
    _write(directory, range(0, 3))
    _write(directory, range(0, 2))
    assert [row["step"] for row in read_metrics(directory.path)] == [0, 1]
    assert [event["kind"] for event in read_events(directory.path)] == ["restarted"]


def test_the_reservoir_is_bounded_keyed_and_covers_every_place(tmp_path: Path) -> None:
    def kept(name: str, seed: int) -> list[tuple[int, int]]:
        directory = RunDirectory(tmp_path / name).create()
        ledger = Ledger(directory, resume_step=None, seed=seed, samples_per_step=3)
        for step in range(40):
            ledger.step(step, {}, (), ({"place": place} for place in range(8)))
        ledger.close()
        return [(row["step"], row["place"]) for row in read_samples(directory.path)]

    first = kept("a", 0)
    assert first == kept("b", 0)
    assert first != kept("c", 1)
    assert all(sum(step == at for step, _ in first) == 3 for at in range(40))
    assert {place for _, place in first} == set(range(8))


@pytest.mark.fault(6)
def test_an_unwritable_file_costs_one_warning_and_no_row(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(directory, resume_step=None)
    directory.metrics.mkdir()  # a directory in the file's place: every open fails
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            ledger.step(step, {"reward": 0.5}, [{"prompt": "a"}])
    assert len(caplog.records) == 1
    assert "metrics.jsonl cannot be written" in caplog.text
    assert ledger.waiting == 5
    directory.metrics.rmdir()
    ledger.step(6, {"reward": 0.5})
    assert ledger.waiting == 0
    assert [row["step"] for row in read_metrics(directory.path)] == [1, 2, 3, 4, 5, 6]
    (event,) = read_events(directory.path)
    facts = ("kind", "file", "first_step", "last_step", "recovered", "lost")
    assert [event[key] for key in facts] == ["gap", "metrics.jsonl", 1, 6, 6, 0]
    ledger.close()


@pytest.mark.fault(6)
def test_rows_in_memory_are_bounded_and_the_loss_is_counted(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.run.ledger._WAITING_LIMIT", 3)
    ledger = Ledger(directory, resume_step=None)
    directory.metrics.mkdir()
    for step in range(1, 6):
        ledger.step(step, {})
    directory.metrics.rmdir()
    ledger.step(6, {})
    ledger.close()
    assert [row["step"] for row in read_metrics(directory.path)] == [4, 5, 6]
    (event,) = read_events(directory.path)
    assert (event["recovered"], event["lost"]) == (3, 3)


_FULL_DISK = """
import resource, sys
from surefoot.run.directory import RunDirectory
from surefoot.run.ledger import Ledger
ledger = Ledger(RunDirectory(sys.argv[1]).create(), resume_step=None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(1, 21):
    ledger.step(step, {"text": "x" * 80})
assert ledger.waiting > 0
assert open(sys.argv[1] + "/metrics.jsonl").read().endswith("}\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ledger.step(21, {"text": "x" * 80})
ledger.close()
print("alive")
"""


@pytest.mark.fault(6)
def test_a_disk_that_fills_in_the_middle_of_a_line_tears_no_line(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine limits file sizes itself")
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 22))
    (event,) = read_events(tmp_path / "run")
    assert event["kind"] == "gap"
    assert done.stderr.count("cannot be written") == 1


def _write_two_rows_a_step(ledger: Ledger, steps: range) -> None:
    for step in steps:
        ledger.step(step, {"loss": step / 4}, [{"prompt": "a"}, {"prompt": "a"}])


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.fault(6)
@pytest.mark.parametrize("written_since", [False, True])
def test_rows_that_waited_at_a_checkpoint_survive_a_kill(
    written_since: bool, directory: RunDirectory
) -> None:
    """The checkpoint is of step 4, and the process dies two steps later."""
    ledger = Ledger(directory, resume_step=None)
    files = (directory.metrics, directory.groups, directory.events)
    for path in files:
        path.mkdir()
    _write_two_rows_a_step(ledger, range(1, 5))
    ledger.event("finding", "told once")
    ledger.secure()
    assert ledger.waiting == 4 + 8 + 1
    for path in files:
        path.rmdir()
    if written_since:
        _write_two_rows_a_step(ledger, range(5, 7))
        assert _steps(directory.metrics) == [1, 2, 3, 4, 5, 6]
    again = Ledger(directory, resume_step=4)
    assert _steps(directory.metrics) == [1, 2, 3, 4]
    assert _steps(directory.groups) == [1, 1, 2, 2, 3, 3, 4, 4]
    again.close()
    assert not (directory.path / "waiting.json").exists()
    events = read_events(directory.path)
    assert [event["message"] for event in events if event["kind"] == "finding"] == ["told once"]
    gaps = {event["file"]: event["recovered"] for event in events if event["kind"] == "gap"}
    more = 1 if written_since else 0  # the row whose writing found the disk mended
    assert (gaps["metrics.jsonl"], gaps["groups.jsonl"]) == (4 + more, 8 + 2 * more)


@pytest.mark.fault(6)
def test_rows_that_wait_and_are_done_again_are_not_doubled(directory: RunDirectory) -> None:
    """The newest checkpoint is older than what was put aside."""
    ledger = Ledger(directory, resume_step=None)
    directory.metrics.mkdir()
    _write_two_rows_a_step(ledger, range(1, 6))
    ledger.close()
    directory.metrics.rmdir()
    again = Ledger(directory, resume_step=3)
    _write_two_rows_a_step(again, range(4, 6))
    again.close()
    assert _steps(directory.metrics) == [1, 2, 3, 4, 5]
    assert _steps(directory.groups) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.fault(5, 6)
def test_no_checkpoint_is_due_without_the_rows_before_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(directory, resume_step=None)
    directory.metrics.mkdir()
    ledger.step(1, {"loss": 0.5})

    def refuse(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.run.ledger.atomic_write_json", refuse)
    with pytest.raises(OSError, match="No space left"):
        ledger.secure()
    assert ledger.waiting == 1


@pytest.mark.fault(5, 6)
def test_rows_put_aside_stay_there_until_their_files_are_synced(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(directory, resume_step=None)
    aside = directory.path / "waiting.json"
    directory.metrics.mkdir()
    ledger.step(1, {"loss": 0.5})
    ledger.secure()
    directory.metrics.rmdir()
    put = aside.read_bytes()
    real = os.fsync

    def refuse(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}") == str(directory.metrics):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        ledger.secure()
    assert _steps(directory.metrics) == [1] and ledger.waiting == 0
    assert aside.read_bytes() == put
    monkeypatch.setattr(os, "fsync", real)
    ledger.secure()
    assert not aside.exists()
    ledger.close()


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    "held",
    [
        b"",
        b'{"metrics.jsonl": [',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"metrics.jsonl": null}',
        b'{"metrics.jsonl": ""}',
        b'{"metrics.jsonl": [1]}',
        b'{"other.jsonl": []}',
        rb'{"metrics.jsonl": ["{\"step\": 1}"]}',
        rb'{"metrics.jsonl": ["{\"step\":\n1}\n"]}',
        rb'{"events.jsonl": ["{\"kind\": \"x\"}\n"]}',
        rb'{"events.jsonl": ["{\"step\": 1, \"kind\": \"\ud800\"}\n"]}',
    ],
)
def test_a_damaged_file_of_rows_put_aside_is_named(directory: RunDirectory, held: bytes) -> None:
    aside = directory.path / "waiting.json"
    aside.write_bytes(held)
    with pytest.raises(RunDirectoryError, match=r"waiting\.json is not what .* its rows are lost"):
        Ledger(directory, resume_step=3)
    assert aside.read_bytes() == held
    aside.rename(directory.path.with_name("elsewhere"))
    Ledger(directory, resume_step=3).close()


@pytest.mark.fault(6)
def test_a_file_of_rows_put_aside_that_cannot_be_read_is_named(directory: RunDirectory) -> None:
    aside = directory.path / "waiting.json"
    aside.mkdir()
    with pytest.raises(RunDirectoryError, match=r"waiting\.json cannot be read .*Is a directory"):
        Ledger(directory, resume_step=3)
    aside.rmdir()
    aside.symlink_to(aside.name)
    with pytest.raises(RunDirectoryError, match=r"waiting\.json cannot be read .*symbolic links"):
        Ledger(directory, resume_step=3)


def test_rows_of_a_group() -> None:
    prompt = Prompt(id="p1", position=4, ids=(1, 2), text="3+4=", task="add")
    group = Group(
        prompt=prompt,
        completions=(
            Completion((5, 6), (-0.1, -0.2), StopReason.STOP, version=3, sample=0, text="7"),
            Completion((5,), (-0.1,), StopReason.LENGTH, version=3, sample=1, text="se"),
        ),
        scores=(
            Score(ScoreStatus.SCORED, 1.0, {"numeric": 1.0}),
            Score(ScoreStatus.INFRA_ERROR),
        ),
    )
    trained: dict[str, Any] = rows.train_row(group, dead=False)
    assert trained == {
        "split": "train",
        "prompt": "p1",
        "position": 4,
        "task": "add",
        "scores": [1.0, None],
        "parts": {"numeric": [1.0, None]},
        "lengths": [2, 1],
        "stops": ["stop", "length"],
        "dead": False,
        "kept": True,
    }
    assert rows.eval_row(group, correct=True) == {
        "split": "eval",
        "prompt": "p1",
        "task": "add",
        "correct": True,
        "score": 1.0,
        "stop": "stop",
        "length": 2,
    }
    first, second = rows.sample_rows(group, advantages=[0.5, 0.0])
    assert (first["prompt"], first["completion"], first["parts"]) == ("3+4=", "7", {"numeric": 1.0})
    assert (second["score"], second["status"], second["advantage"]) == (None, "infra_error", 0.0)


@pytest.mark.parametrize("name", ["metrics", "groups", "samples", "events"])
def test_what_lies_in_a_files_place_is_named(directory: RunDirectory, name: str) -> None:
    path: Path = getattr(directory, name)
    path.mkdir()
    with pytest.raises(RunDirectoryError, match=rf"{name}\.jsonl cannot be read .*Is a directory"):
        Ledger(directory, resume_step=3)
