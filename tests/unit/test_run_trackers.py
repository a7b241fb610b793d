"""Trackers never raise into training and never make it wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import NotBuiltError, RecipeError
from surefoot.run.directory import RunDirectory
from surefoot.run.trackers import Trackers, open_trackers


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, config: Mapping[str, Any]) -> None:
        self.calls.append(("start", dict(config)))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append(("table", step, name, list(rows)))

    def finish(self) -> None:
        self.calls.append(("finish",))


class Raising(Recorder):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("the server is away")


class NotStarting(Recorder):
    def start(self, config: Mapping[str, Any]) -> None:
        raise ImportError("not installed")


class Hanging(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.until = threading.Event()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.until.wait(60)


def _open(tmp_path: Path, *, queue_length: int = 100, **sinks: Recorder) -> Trackers:
    return open_trackers(
        [],
        RunDirectory(tmp_path),
        config={"seed": 0},
        resume_step=None,
        extra=sinks,
        queue_length=queue_length,
    )


def test_everything_arrives_in_order(tmp_path: Path) -> None:
    sink = Recorder()
    trackers = _open(tmp_path, sink=sink)
    metrics = {"reward": 0.5}
    trackers.log(1, metrics)
    metrics["reward"] = 9.0  # the row was handed over: later changes are not its own
    trackers.table(1, "samples", [{"prompt": "a"}])
    trackers.log(2, {"reward": 1.0})
    trackers.finish()
    assert sink.calls == [
        ("start", {"seed": 0}),
        ("log", 1, {"reward": 0.5}),
        ("table", 1, "samples", [{"prompt": "a"}]),
        ("log", 2, {"reward": 1.0}),
        ("finish",),
    ]
    assert trackers.troubles() == []


@pytest.mark.fault(36)
def test_a_sink_that_raises_warns_once_and_leaves_the_others_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Recorder(), Raising()
    with caplog.at_level(logging.WARNING):
        trackers = _open(tmp_path, good=good, bad=bad)
        for step in range(5):
            trackers.log(step, {})
        trackers.finish()
    assert [record.getMessage() for record in caplog.records] == trackers.troubles()
    assert len(caplog.records) == 1
    assert "bad failed (ConnectionError: the server is away)" in caplog.text
    assert [call[1] for call in good.calls if call[0] == "log"] == [0, 1, 2, 3, 4]
    assert bad.calls[-1] == ("finish",)


@pytest.mark.fault(36)
def test_a_sink_that_cannot_start_is_off(tmp_path: Path) -> None:
    sink = NotStarting()
    trackers = _open(tmp_path, sink=sink)
    trackers.log(1, {})
    trackers.finish()
    assert sink.calls == []
    assert len(trackers.troubles()) == 1
    assert trackers.troubles() == []


@pytest.mark.fault(36)
def test_a_sink_that_hangs_never_blocks(tmp_path: Path) -> None:
    sink, good = Hanging(), Recorder()
    trackers = _open(tmp_path, queue_length=4, sink=sink, good=good)
    in_the_run = 0.0
    for step in range(50):
        began = time.monotonic()
        trackers.log(step, {})
        in_the_run += time.monotonic() - began
        # A sink that works is given time to, however busy the machine is.
        deadline = time.monotonic() + 30
        while not _logged(good, step) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert in_the_run < 1.0
    began = time.monotonic()
    trackers.finish(patience_s=0.2)
    assert time.monotonic() - began < 5.0
    troubles = trackers.troubles()
    assert any("does not keep up" in line for line in troubles)
    assert any("hangs" in line for line in troubles)
    assert [call[1] for call in good.calls if call[0] == "log"] == list(range(50))
    sink.until.set()


def _logged(sink: Recorder, step: int) -> bool:
    return any(call[:2] == ("log", step) for call in list(sink.calls))


@pytest.mark.parametrize("length", [1, 2, 100])
def test_finish_delivers_what_is_queued(tmp_path: Path, length: int) -> None:
    sink = Hanging()
    trackers = _open(tmp_path, queue_length=length, sink=sink)
    for step in range(length + 3):
        trackers.log(step, {})
    threading.Timer(0.1, sink.until.set).start()
    trackers.finish()
    assert sink.calls[-1] == ("finish",)


def test_names_are_checked(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(RecipeError, match="did you mean tensorboard"):
        open_trackers(["tensorbord"], directory, config={}, resume_step=None)
    with pytest.raises(NotBuiltError, match=r"run\.trackers: wandb is not built"):
        open_trackers(["wandb"], directory, config={}, resume_step=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    for resume_step, steps in ((None, range(1, 5)), (2, range(3, 6))):
        trackers = open_trackers(
            ["tensorboard"], directory, config={"seed": 0}, resume_step=resume_step
        )
        for step in steps:
            offset = 0.0 if resume_step is None else 10.0
            trackers.log(step, {"reward": step + offset, "kl": None, "note": "text"})
            trackers.table(step, "samples", [{"prompt": "a|b", "score": None}])
        trackers.finish()
        assert trackers.troubles() == []
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert events.Tags()["scalars"] == ["reward"]
    values = [(event.step, event.value) for event in events.Scalars("reward")]
    assert values == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
