"""Optional copies of the metrics in somebody else's viewer; the ledger is the truth.

Owns the sinks, and one daemon thread with a bounded queue per sink, so that a sink that raises or
hangs costs training nothing. Refuses to own any metric, and to keep what a sink lost.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from surefoot.errors import NotBuiltError, RecipeError
from surefoot.run.directory import RunDirectory

BUILT = ("tensorboard",)
KNOWN = ("tensorboard", "wandb", "trackio", "mlflow")
_log = logging.getLogger(__name__)
_QUEUE_LENGTH = 1024
_START_PATIENCE_S, _PATIENCE_S = 10.0, 1.0


class Tracker(Protocol):
    """One sink. Every method runs in the sink's own thread, and may raise or be slow."""

    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self) -> None: ...


class TensorBoard:
    """Scalars and texts as TensorBoard event files in `directory`.

    `purge_step` hides what an earlier start of the run wrote from that step on.
    """

    def __init__(self, directory: Path, *, purge_step: int | None) -> None:
        self._directory = directory
        self._purge_step = purge_step
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(self._directory), purge_step=self._purge_step, flush_secs=10
        )
        lines = [f"    {key}: {value}" for key, value in config.items()]
        self._writer.add_text("recipe", "\n".join(lines), self._purge_step or 0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, Real):
                self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0]) if rows else []
        lines = [columns, ["---"] * len(columns)]
        lines += [[_cell(row.get(column)) for column in columns] for row in rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self._writer.add_text(name, text, step)

    def finish(self) -> None:
        self._writer.close()


class Trackers:
    """Several sinks as one; no method raises, and none waits for a sink except `finish`."""

    def __init__(
        self, sinks: Mapping[str, Tracker], config: Mapping[str, Any], *, queue_length: int
    ) -> None:
        self._threads = [
            _SinkThread(name, sink, config, queue_length) for name, sink in sinks.items()
        ]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand one step's metrics to every sink."""
        kept = dict(metrics)
        for thread in self._threads:
            thread.put(lambda sink: sink.log(step, kept))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand a table (sampled completions) to every sink; the columns are the first row's."""
        kept = [dict(row) for row in rows]
        for thread in self._threads:
            thread.put(lambda sink: sink.table(step, name, kept))

    def troubles(self) -> list[str]:
        """What went wrong since the last call, for the ledger's events; one line per sink."""
        return [line for thread in self._threads for line in thread.troubles()]

    def finish(self, *, patience_s: float = _PATIENCE_S) -> None:
        """Wait while the sinks move on; give one up that stands still for `patience_s`."""
        for thread in self._threads:
            thread.finish(patience_s)


def open_trackers(
    names: Sequence[str],
    directory: RunDirectory,
    *,
    config: Mapping[str, Any],
    resume_step: int | None,
    extra: Mapping[str, Tracker] | None = None,
    queue_length: int = _QUEUE_LENGTH,
) -> Trackers:
    """Start the sinks that `run.trackers` names, and those passed as objects in `extra`.

    Raises RecipeError for a name that nobody knows, NotBuiltError for one not built yet.
    """
    purge_step = None if resume_step is None else resume_step + 1
    sinks: dict[str, Tracker] = {}
    for name in names:
        check_tracker(name)
        sinks[name] = TensorBoard(directory.tensorboard, purge_step=purge_step)
    return Trackers({**sinks, **(extra or {})}, config, queue_length=queue_length)


def check_tracker(name: str) -> None:
    """Raise unless `run.trackers` may contain `name`."""
    if name in BUILT:
        return
    if name in KNOWN:
        raise NotBuiltError(
            f"run.trackers: {name} is not built in this version; built: {', '.join(BUILT)}"
        )
    near = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KNOWN)}"
    raise RecipeError(f"run.trackers: nobody knows the tracker {name!r}; {hint}")


class _SinkThread:
    """One sink, its queue and its thread. The first trouble of each kind is reported, once."""

    def __init__(
        self, name: str, sink: Tracker, config: Mapping[str, Any], queue_length: int
    ) -> None:
        self._name = name
        self._sink = sink
        self._jobs: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(queue_length)
        self._lock = threading.Lock()
        self._fresh: list[str] = []
        self._reported: set[str] = set()
        self._dropped = 0
        self._started = False
        self._closing = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, args=(config,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def put(self, run: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._jobs.put_nowait(run)
        except queue.Full:
            self._dropped += 1
            self._report("slow", "does not keep up, so some of its rows are dropped")

    def troubles(self) -> list[str]:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self, patience_s: float) -> None:
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the worker sees `_closing` after its last job
            self._jobs.put_nowait(None)
        asked = time.monotonic()
        while self._thread.is_alive():
            patience = patience_s if self._started else max(patience_s, _START_PATIENCE_S)
            if time.monotonic() - max(asked, self._moved) > patience:
                self._report("stuck", "hangs, so its last rows are given up")
                return
            self._thread.join(0.02)

    def _work(self, config: Mapping[str, Any]) -> None:
        if not self._attempt(lambda sink: sink.start(config), "could not be started"):
            return
        self._started = True
        while (job := self._jobs.get()) is not None:
            self._attempt(job, "failed")
            if self._closing.is_set() and self._jobs.empty():
                break
        self._attempt(lambda sink: sink.finish(), "could not be closed")

    def _attempt(self, run: Callable[[Tracker], None], what: str) -> bool:
        try:
            run(self._sink)
        except (Exception, SystemExit) as error:  # a viewer's failure is not the run's
            self._report(what, f"{what} ({type(error).__name__}: {error})")
            return False
        finally:
            self._moved = time.monotonic()
        return True

    def _report(self, kind: str, words: str) -> None:
        with self._lock:
            if kind in self._reported:
                return
            self._reported.add(kind)
            line = f"tracker {self._name} {words}; training goes on, metrics.jsonl is complete"
            self._fresh.append(line)
        _log.warning("%s", line)


def _cell(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
