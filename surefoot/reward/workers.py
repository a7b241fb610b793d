"""Calls to user functions with deadlines that hold, whatever the function does.

Owns the run's side: one nursery process, up to four workers, dispatch, deadlines, kills, retries.
Refuses to own what a payload or a reply means.

A deadline is kept by SIGKILL to the worker's process group, because a thread or a signal handler
cannot end a loop inside C code. Messages are JSON over socket pairs; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward import wire
from surefoot.reward.limits import LIMIT_SIGNAL
from surefoot.reward.nursery import Served, run_nursery

WIDTH = 4  # workers of one call
DEADLINE_KILLS = 3  # of one call; then the rest of it is given up
ATTEMPTS = 2
START_SECONDS = 60.0
GROW_SECONDS = 0.05  # one worker is enough, and keeps a function's own state in one place, until
#                      no reply has come for this long while payloads wait
_CLOSE_SECONDS = 5.0

_open: weakref.WeakSet[_Nurse] = weakref.WeakSet()


class Failure(StrEnum):
    """Why a payload has no reply."""

    EXCEPTION = "exception"
    DEADLINE = "deadline"
    DIED = "died"
    BREAKER = "breaker"
    LIMIT = "limit"  # of CPU time, which the function set itself
    START = "start"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reply, or why there is none; `place` tells distinct errors apart, `trace` is for people."""

    value: Any = None
    failure: Failure | None = None
    detail: str = ""
    place: str = ""
    trace: str = ""


class _Nurse:
    """The parent's handle on the nursery process."""

    def __init__(self, functions: Sequence[Served], warm: Sequence[Callable[[], None]]) -> None:
        if not hasattr(os, "fork"):
            raise RewardError(
                "reward functions run in forked worker processes, which this system does not have; "
                "use a built-in reward, or Linux or macOS"
            )
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()  # else a child could write the same buffered text again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, Python 3.12
            self.pid = os.fork()
        if self.pid == 0:
            try:
                self.control.close()
                for other in _open:
                    other.control.close()
            finally:
                run_nursery(theirs, functions, warm, parent=self.owner)
        theirs.close()
        self.inbox = wire.Inbox()
        self.alive = True
        _open.add(self)

    def command(self, do: str, worker: int, handle: socket.socket | None = None) -> None:
        body = wire.frame(wire.encode({"do": do, "worker": worker}))
        try:
            socket.send_fds(self.control, [body], [] if handle is None else [handle.fileno()])
        except ConnectionError as error:
            raise self.lost() from error

    def news(self) -> list[dict[str, Any]]:
        try:
            data = self.control.recv(1 << 16)
        except ConnectionError as error:
            raise self.lost() from error
        if not data:
            raise self.lost()
        return self.inbox.feed(data)

    def lost(self) -> RewardError:
        self.close()
        return RewardError(
            f"the process that starts reward workers (pid {self.pid}) was ended from outside, "
            "perhaps for lack of memory; run the same command again"
        )

    def close(self) -> None:
        """End the nursery, which ends its workers; wait until it is reaped."""
        if not self.alive or os.getpid() != self.owner:
            return
        self.alive = False
        _open.discard(self)
        with contextlib.suppress(OSError):
            # Not only close: a process forked later may hold a copy of this end.
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        until = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.002)


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    connection: socket.socket
    until: float  # when it must be ready, then when its payload must be answered
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    recycle: int | None = None  # payloads after which it is replaced
    answered: int = 0
    ready: bool = False
    ended: bool = False
    item: int | None = None

    @property
    def worn(self) -> bool:
        return self.recycle is not None and self.answered >= self.recycle


@dataclass(slots=True)
class _Call:
    function: int
    payloads: Sequence[bytes]
    timeout: float
    again: Callable[[Any], bool]
    recycle: int | None
    queue: deque[int]
    outcomes: list[Outcome | None]
    attempts: list[int]
    left: int  # outcomes not known yet
    until: dict[int, float] = field(default_factory=dict)
    kills: int = 0
    failed_starts: int = 0
    width: int = 1
    progress: float = field(default_factory=time.monotonic)

    def settle(self, item: int, outcome: Outcome) -> None:
        """Keep the outcome, or put the item back for its last attempt within its deadline."""
        self.progress = time.monotonic()
        bad = outcome.failure is not None or self.again(outcome.value)
        last = outcome.failure in (Failure.DEADLINE, Failure.LIMIT)
        in_time = not last and self.progress < self.until[item]
        if bad and in_time and self.attempts[item] < ATTEMPTS:
            self.queue.appendleft(item)
        else:
            self.outcomes[item] = outcome
            self.left -= 1

    def give_up(self, outcome: Outcome) -> None:
        self.queue.clear()
        self.left = 0
        self.outcomes = [outcome if known is None else known for known in self.outcomes]


class Workers:
    """Runs functions on JSON payloads in killable processes.

    `functions` are called as function(payload) -> JSON and may be closures: they are inherited by
    fork, at construction. `warm` are called once in the nursery, so that workers start with slow
    imports done.
    """

    def __init__(
        self, functions: Sequence[Served], *, warm: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._nurse = _Nurse(functions, warm)
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _end, self._nurse, self._workers)
        self._born = 0

    @property
    def pid(self) -> int:
        """Of the nursery, the parent of every worker."""
        return self._nurse.pid

    def close(self) -> None:
        """End and reap every process; a second call does nothing."""
        self._finalizer()

    def run(
        self,
        function: int,
        payloads: Sequence[bytes],
        *,
        timeout: float,
        again: Callable[[Any], bool],
        recycle: int | None = None,
    ) -> list[Outcome]:
        """One outcome per payload (encoded JSON), in order; each has `timeout` seconds.

        Exceptions, deaths and replies for which `again` holds are tried once more within the same
        deadline. After `DEADLINE_KILLS` deadlines the rest is given up (Failure.BREAKER). With
        `recycle` the function has workers of its own, each replaced after that many payloads, so
        that the state of other functions is kept.
        """
        if not self._nurse.alive:
            raise RewardError("this grader is closed; build a new one to score more completions")
        call = _Call(
            function=function,
            payloads=payloads,
            timeout=timeout,
            again=again,
            recycle=recycle,
            queue=deque(range(len(payloads))),
            outcomes=[None] * len(payloads),
            attempts=[0] * len(payloads),
            left=len(payloads),
        )
        self._listen(call, 0.0)  # deaths since the last call
        try:
            while call.left:
                self._dispatch(call)
                self._listen(call, self._pause(call))
                self._keep_time(call)
        finally:
            for worker in [w for w in self._workers if w.item is not None]:
                self._discard(worker)
        return [outcome for outcome in call.outcomes if outcome is not None]

    def _dispatch(self, call: _Call) -> None:
        if call.queue:
            for worker in [w for w in self._workers if w.worn and w.item is None]:
                self._discard(worker)
        mine = [w for w in self._workers if w.recycle == call.recycle]
        free = [w for w in mine[: call.width] if w.item is None and not w.ended]
        for _ in range(min(call.width - len(mine), len(call.queue) - len(free))):
            self._start(call.recycle)
        for worker in free:
            if call.queue and worker.ready:
                self._give(call, worker, call.queue.popleft())

    def _start(self, recycle: int | None) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._born += 1
        worker = _Worker(self._born, ours, time.monotonic() + START_SECONDS, recycle=recycle)
        self._workers.append(worker)
        try:
            self._nurse.command("fork", worker.number, theirs)
        finally:
            theirs.close()

    def _give(self, call: _Call, worker: _Worker, item: int) -> None:
        call.attempts[item] += 1
        worker.until = call.until.setdefault(item, time.monotonic() + call.timeout)
        worker.item = item
        request = b'{"function":%d,"payload":%s}' % (call.function, call.payloads[item])
        worker.connection.settimeout(max(0.0, worker.until - time.monotonic()) + 1e-3)
        with contextlib.suppress(TimeoutError, ConnectionError):  # met again as silence or an end
            worker.connection.sendall(wire.frame(request))
        worker.connection.setblocking(False)

    def _pause(self, call: _Call) -> float:
        """Seconds until the next moment at which something must be done."""
        moments = [w.until for w in self._workers if w.item is not None or not w.ready]
        if call.queue and call.width < WIDTH:
            moments.append(call.progress + GROW_SECONDS)
        return max(0.0, min(moments) - time.monotonic()) if moments else GROW_SECONDS

    def _listen(self, call: _Call, pause: float) -> None:
        """Wait up to `pause` seconds for a reply or a death, and take all that is there."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._nurse.control, selectors.EVENT_READ)
            for worker in self._workers:
                if not worker.ended:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(pause)]
        for worker in ready:
            if worker is not None:
                self._hear(call, worker)
        if None in ready:
            for message in self._nurse.news():
                self._bury(call, message)

    def _hear(self, call: _Call, worker: _Worker) -> None:
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
            elif worker.item is not None:
                item, worker.item = worker.item, None
                worker.answered += 1
                call.settle(item, _outcome(message))
        if not data:
            # Most likely dead: the nursery's news will say how. If it lives on, this ends it.
            worker.ended = True
            self._nurse.command("kill", worker.number)

    def _bury(self, call: _Call, news: dict[str, Any]) -> None:
        found = [w for w in self._workers if w.number == news["died"]]
        if not found:
            return  # one that we killed
        worker = found[0]
        self._hear(call, worker)  # a last reply may have crossed with the news
        self._workers.remove(worker)
        worker.connection.close()
        call.progress = time.monotonic()
        if worker.item is not None:
            how = _how_it_died(news["status"])
            failure = Failure.LIMIT if news["status"] == -LIMIT_SIGNAL else Failure.DIED
            call.settle(worker.item, Outcome(failure=failure, detail=how, place=how))
        elif not worker.ready:
            call.failed_starts += 1
            if call.failed_starts >= ATTEMPTS:
                why = news["why"] or _how_it_died(news["status"])
                detail = f"no worker process could be started ({why})"
                call.give_up(Outcome(failure=Failure.START, detail=detail, place="start"))

    def _keep_time(self, call: _Call) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now < worker.until or (worker.ready and worker.item is None):
                continue
            self._discard(worker)
            if worker.item is None:
                detail = f"no worker process was ready within {START_SECONDS:g} s"
                call.give_up(Outcome(failure=Failure.START, detail=detail, place="start"))
                return
            call.kills += 1
            detail = f"no reply within the deadline of {call.timeout:g} s"
            call.settle(worker.item, Outcome(failure=Failure.DEADLINE, detail=detail))
        if call.kills >= DEADLINE_KILLS and call.left:
            detail = f"given up after {call.kills} deadlines of {call.timeout:g} s in one call"
            call.give_up(Outcome(failure=Failure.BREAKER, detail=detail))
        elif call.queue and now >= call.progress + GROW_SECONDS and call.width < WIDTH:
            call.width += 1
            call.progress = now

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        if self._nurse.alive:
            self._nurse.command("kill", worker.number)


def _end(nurse: _Nurse, workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    workers.clear()
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
