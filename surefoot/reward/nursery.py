"""What runs in the child processes: the nursery that forks workers, and the workers.

Owns process hygiene: signals, sessions, standard streams, reaping, and dying with the parent.
Refuses to own deadlines and meaning: the run decides when a worker is killed, and what a function's
reply is worth.

The nursery is forked before the run has threads, a model or a GPU. It stays single-threaded, so it
can fork workers safely at any later time, and closures need no pickling because they are already
in its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from surefoot.reward import wire

Served = Callable[[Any], Any]  # JSON in, JSON out

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_JOB_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PARENT_CHECK_SECONDS = 1.0
_TRACE_CHARACTERS = 8000
_MESSAGE_CHARACTERS = 500
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_nursery(
    control: socket.socket,
    functions: Sequence[Served],
    warm: Sequence[Callable[[], None]],
    *,
    parent: int,
) -> NoReturn:
    """Serve `control` until it ends or `parent` is gone; never returns into the caller's stack."""
    code = 1
    try:
        os.setsid()
        _default_signals()
        signal.signal(signal.SIGINT, _nothing)
        _own_streams()
        # Not SIGKILL: the nursery is woken, sees that its parent is gone, and cleans up.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.environ.update(_THREADS)
        for start in warm:
            with contextlib.suppress(Exception):  # the first call fails the same way, and is heard
                start()
        gc.freeze()
        _Nursery(control, functions, parent).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler and not SIG_IGN: programs that a function starts get their default back."""


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _own_streams() -> None:
    """No input; everything a function prints goes to the run's stderr, never into its stdout."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # the run was started without a stderr
        os.dup2(null, 1)
        os.dup2(null, 2)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


class _Nursery:
    def __init__(self, control: socket.socket, functions: Sequence[Served], parent: int) -> None:
        self._control = control
        self._functions = functions
        self._parent = parent
        self._inbox = wire.Inbox()
        self._handles: list[int] = []
        self._workers: dict[int, int] = {}  # pid -> number given by the run
        self._wake_read, self._wake_write = os.pipe()

    def serve(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # The run decides when to end; what is sent to every process of a job only wakes the loop.
        for number in (*_JOB_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _nothing)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            going = True
            while going and os.getppid() == self._parent:
                ready = {key.fileobj for key, _ in selector.select(_PARENT_CHECK_SECONDS)}
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                if self._control in ready:
                    going = self._obey()
        self._end()

    def _obey(self) -> bool:
        try:
            data, handles, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        except ConnectionError:
            return False
        self._handles += handles
        for command in self._inbox.feed(data):
            if command["do"] == "fork":
                self._fork(command["worker"], self._handles.pop(0))
            else:
                self._kill(command["worker"])
        return bool(data)

    def _fork(self, number: int, handle: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(handle)
            self._tell({"died": number, "status": None, "why": str(error)})
            return
        if pid == 0:
            self._become_worker(handle)
        os.close(handle)
        self._workers[pid] = number

    def _become_worker(self, handle: int) -> NoReturn:
        try:
            for inherited in (self._wake_read, self._wake_write):
                os.close(inherited)
            self._control.close()
            run_worker(socket.socket(fileno=handle), self._functions, nursery=os.getppid())
        finally:
            os._exit(1)

    def _kill(self, number: int) -> None:
        for pid, worker in self._workers.items():
            if worker == number:
                _kill_tree(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            _kill_group(pid)  # what the function started ends with its worker
            number = self._workers.pop(pid, None)
            if number is not None:
                self._sweep()
                code = os.waitstatus_to_exitcode(status)
                self._tell({"died": number, "status": code, "why": ""})

    def _sweep(self) -> None:
        """Kill adopted orphans: processes that a function moved out of its worker's group."""
        for pid in _children():
            if pid not in self._workers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the parent is gone; the loop notices
            wire.send(self._control, message)

    def _end(self) -> None:
        for pid in self._workers:
            _kill_tree(pid)
        self._workers.clear()
        while True:
            self._sweep()
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            _kill_group(pid)


def _children() -> list[int]:
    """Our child processes, where the kernel lists them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in listed.split()]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_tree(pid: int) -> None:
    _kill_group(pid)
    # A worker killed within microseconds of its fork has no group of its own yet.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run_worker(connection: socket.socket, functions: Sequence[Served], *, nursery: int) -> NoReturn:
    """Answer requests until the connection ends.

    A request is {"function": index, "payload": JSON}; a reply is {"value": JSON} or {"error": ...}.
    """
    me = os.getpid()
    try:
        _default_signals()
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            return
        signal.signal(signal.SIGINT, _nothing)  # Ctrl-C belongs to the run
        wire.send(connection, {"ready": True})
        while (request := wire.receive(connection)) is not None:
            reply = _answer(functions[request["function"]], request["payload"])
            if os.getpid() != me:
                return  # a fork of the function came back as if it were the worker
            wire.send(connection, reply)
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(function: Served, payload: Any) -> dict[str, Any]:
    try:
        return {"value": function(payload)}
    except BaseException as error:  # sys.exit and timeouts that are no Exception included
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        trace = "".join(traceback.format_exception(error))
        name = type(error).__name__
        return {
            "error": f"{name}: {error}"[:_MESSAGE_CHARACTERS],
            "place": f"{name}@{place}",
            "trace": trace[-_TRACE_CHARACTERS:],
        }
