"""Calls to user functions with deadlines that hold, whatever the function does.

Owns the run's side of the workers: up to four for each function, and one loop in which the payloads
of several functions are handed out, answered, timed and, at their deadline, ended.
Refuses to own what a payload or a reply means, and when a payload is tried again (`calls.py`).

A deadline is kept by SIGKILL to the worker's process group, because a thread or a signal handler
cannot end a loop inside C code. Messages are JSON over socket pairs; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward import wire
from surefoot.reward.calls import WIDTH, Call, Failure, Outcome
from surefoot.reward.limits import LIMIT_SIGNAL
from surefoot.reward.nurse import Nurse
from surefoot.reward.nursery import Served

START_SECONDS = 60.0
STARTS = 2  # of workers that never became ready, in one call; then no worker can be started
GROW_SECONDS = 0.05  # one worker is enough, and keeps a function's own state in one place, until
#                      no reply has come for this long while payloads wait


class Cancelled(Exception):
    """The calls were given up because the run goes elsewhere; they have no outcomes."""


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    function: int
    connection: socket.socket
    until: float  # when it must be ready, then when its payload must be answered
    recycle: int | None  # payloads after which it is replaced
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    answered: int = 0
    ready: bool = False
    ended: bool = False
    call: Call | None = None
    item: int = -1

    @property
    def worn(self) -> bool:
        return self.recycle is not None and self.answered >= self.recycle


class Workers:
    """Runs functions on JSON payloads in killable processes.

    `functions` are called as function(payload) -> JSON and may be closures: they are inherited by
    fork, at construction. `warm` are called once in the nursery, so that workers start with slow
    imports done. Each function has workers of its own, so that none disturbs another's state.
    """

    def __init__(
        self, functions: Sequence[Served], *, warm: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._nurse = Nurse(functions, warm)
        self._workers: list[_Worker] = []
        self._calls: dict[int, Call] = {}
        self._born = 0
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._finalizer = weakref.finalize(
            self, _end, self._nurse, self._workers, (self._woken, self._wake)
        )

    @property
    def pid(self) -> int:
        """Of the nursery, the parent of every worker."""
        return self._nurse.pid

    def close(self) -> None:
        """End and reap every process; a second call does nothing."""
        self._finalizer()

    def wake(self) -> None:
        """Make the `run` that is going on in another thread look at its `stop` now."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def run(self, calls: Sequence[Call], *, stop: threading.Event | None = None) -> None:
        """Answer every payload of every call, all functions at once; one run at a time.

        `Cancelled` once `stop` is set (and `wake` called, so that it is noticed at once).
        """
        assert len({call.function for call in calls}) == len(calls)
        with self._lock:
            if not self._nurse.alive:
                raise RewardError("this grader is closed; build a new one to score more")
            self._calls = {call.function: call for call in calls}
            for call in calls:
                call.progress = time.monotonic()
            try:
                self._listen(0.0)  # deaths since the last run
                while any(call.left for call in calls):
                    if stop is not None and stop.is_set():
                        raise Cancelled
                    self._turn([call for call in calls if call.left])
            finally:
                self._calls = {}
                for worker in [w for w in self._workers if w.call is not None]:
                    self._discard(worker)

    def _turn(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.release(time.monotonic())
            self._dispatch(call)
        self._listen(self._pause(calls))
        self._keep_time()
        for call in calls:
            call.give_up_if_hopeless()
        for worker in [w for w in self._workers if w.call is not None and not w.call.left]:
            self._discard(worker)

    def _dispatch(self, call: Call) -> None:
        mine = [w for w in self._workers if w.function == call.function]
        if call.queue:
            for worker in [w for w in mine if w.worn and w.call is None]:
                self._discard(worker)
                mine.remove(worker)
        free = [w for w in mine[: call.width] if w.call is None and not w.ended]
        for _ in range(min(call.width - len(mine), len(call.queue) - len(free))):
            self._start(call)
        for worker in free:
            if call.queue and worker.ready:
                self._give(call, worker)

    def _start(self, call: Call) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._born += 1
        until = time.monotonic() + START_SECONDS
        self._workers.append(_Worker(self._born, call.function, ours, until, call.recycle))
        try:
            self._nurse.command("fork", self._born, theirs)
        finally:
            theirs.close()

    def _give(self, call: Call, worker: _Worker) -> None:
        worker.call = call
        worker.item, payload, worker.until = call.give()
        request = b'{"function":%d,"payload":%s}' % (call.function, payload)
        worker.connection.settimeout(max(0.0, worker.until - time.monotonic()) + 1e-3)
        with contextlib.suppress(TimeoutError, ConnectionError):  # met again as silence or an end
            worker.connection.sendall(wire.frame(request))
        worker.connection.setblocking(False)

    def _pause(self, calls: Sequence[Call]) -> float:
        """Seconds until the next moment at which something must be done."""
        moments = [w.until for w in self._workers if w.call is not None or not w.ready]
        for call in calls:
            due = call.next_release()
            if due is not None:
                moments.append(due)
            if call.queue and call.width < WIDTH:
                moments.append(call.progress + GROW_SECONDS)
        return max(0.0, min(moments) - time.monotonic()) if moments else GROW_SECONDS

    def _listen(self, pause: float) -> None:
        """Wait up to `pause` seconds for a reply or a death, and take all that is there."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._nurse.control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ, self._woken)
            for worker in self._workers:
                if not worker.ended:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(pause)]
        for heard in ready:
            if isinstance(heard, _Worker):
                self._hear(heard)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(1 << 10)
        if None in ready:
            for message in self._nurse.news():
                self._bury(message)

    def _hear(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv(1 << 20)
            messages = worker.inbox.feed(data)
        except BlockingIOError:
            return
        except (ConnectionError, ValueError):  # reset, or bytes that are no message of ours
            data, messages = b"", []
        for message in messages:
            if not worker.ready:
                worker.ready = True
            elif worker.call is not None:
                call, worker.call = worker.call, None
                worker.answered += 1
                call.settle(worker.item, _outcome(message))
        if not data:
            # Most likely dead: the nursery's news will say how. If it lives on, this ends it.
            worker.ended = True
            self._nurse.command("kill", worker.number)

    def _bury(self, news: dict[str, Any]) -> None:
        found = [w for w in self._workers if w.number == news["died"]]
        if not found:
            return  # one that we killed
        worker = found[0]
        self._hear(worker)  # a last reply may have crossed with the news
        self._workers.remove(worker)
        worker.connection.close()
        if worker.call is not None:
            how = _how_it_died(news["status"])
            failure = Failure.LIMIT if news["status"] == -LIMIT_SIGNAL else Failure.DIED
            worker.call.settle(worker.item, Outcome(failure=failure, detail=how, place=how))
        elif not worker.ready and worker.function in self._calls:
            call = self._calls[worker.function]
            call.progress = time.monotonic()
            call.failed_starts += 1
            if call.failed_starts >= STARTS and call.left:
                why = news["why"] or _how_it_died(news["status"])
                _no_worker(call, f"no worker process could be started ({why})")

    def _keep_time(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now < worker.until or (worker.ready and worker.call is None):
                continue
            self._discard(worker)
            call = worker.call
            if call is not None:
                detail = f"no reply within the deadline of {call.timeout:g} s"
                call.settle(worker.item, Outcome(failure=Failure.DEADLINE, detail=detail))
            elif worker.function in self._calls:
                detail = f"no worker process was ready within {START_SECONDS:g} s"
                _no_worker(self._calls[worker.function], detail)
        for call in self._calls.values():
            if call.queue and now >= call.progress + GROW_SECONDS and call.width < WIDTH:
                call.width += 1
                call.progress = now

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        if self._nurse.alive:
            self._nurse.command("kill", worker.number)


def _no_worker(call: Call, detail: str) -> None:
    call.give_up(Outcome(failure=Failure.START, detail=detail, place="start"))


def _end(nurse: Nurse, workers: list[_Worker], wakers: Sequence[socket.socket]) -> None:
    for worker in workers:
        worker.connection.close()
    workers.clear()
    for waker in wakers:
        waker.close()
    nurse.close()


def _outcome(message: dict[str, Any]) -> Outcome:
    if "error" not in message:
        return Outcome(value=message["value"])
    return Outcome(
        failure=Failure.EXCEPTION,
        detail=message["error"],
        place=message["place"],
        trace=message["trace"],
    )


def _how_it_died(status: int | None) -> str:
    if status is not None and status < 0:
        name = signal.strsignal(-status) or "unknown"
        return f"its worker process was ended by signal {-status} ({name})"
    return f"its worker process ended itself with exit code {status}"
