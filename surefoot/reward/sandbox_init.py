"""The supervisor inside a sandbox: runs one program after another and says what it saw of each.

Owns the fork of each program, its limits, its streams, and the end of everything that it started.
Refuses to own verdicts: no expected value ever comes in here, and what goes out is only data.

Its text is run by `python -c` with the standard library alone, so it imports nothing of ours.
Outside, it is imported for `encode` and `decode`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

CHANNEL = 3
_HEADER_BYTES = 8
_CHUNK = 1 << 16
_TICK = 0.01
_TAIL = 400  # bytes of a program's stderr that are told
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def encode(value: Any) -> Any:
    """A plain value as JSON that keeps its type; anything else as {"x": the name of its class}."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return {"i": hex(int.__int__(value))}
    if isinstance(value, float):
        return {"f": float.__repr__(float.__float__(value))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return {"b": bytes.hex(value)}
    if isinstance(value, list):
        return [encode(item) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": [encode(item) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    if isinstance(value, set | frozenset):
        return {"s": [encode(item) for item in value]}
    return {"x": type(value).__name__}


def decode(message: Any) -> Any:
    """The value that `encode` told; ValueError or TypeError where it is none."""
    if message is None or isinstance(message, bool | str):
        return message
    if isinstance(message, list):
        return [decode(item) for item in message]
    if not isinstance(message, dict) or len(message) != 1:
        raise ValueError("not an encoded value")
    ((kind, inner),) = message.items()
    if kind == "i":
        return int(inner, 16)
    if kind == "f":
        return float(inner)
    if kind == "b":
        return bytes.fromhex(inner)
    if kind == "t":
        return tuple(decode(item) for item in inner)
    if kind == "s":
        return frozenset(decode(item) for item in inner)
    if kind == "d":
        return {decode(key): decode(item) for key, item in inner}
    if kind == "x":
        raise ValueError(f"a {str(inner)[:40]} is no plain value")
    raise ValueError("not an encoded value")


def _send(message: Any) -> None:
    body = json.dumps(message).encode()
    data = memoryview(len(body).to_bytes(_HEADER_BYTES, "big") + body)
    while data:
        data = data[os.write(CHANNEL, data) :]


def _exactly(count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = os.read(CHANNEL, min(count - len(found), _CHUNK))
        if not data:
            raise EOFError
        found += data
    return bytes(found)


def _receive() -> Any:
    return json.loads(_exactly(int.from_bytes(_exactly(_HEADER_BYTES), "big")))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _serve(limits: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a PID 1 the kernel then drops it
    # A program cannot read or change this process, and through it the run's view of other tests.
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.environ.clear()
    _send({"ready": True})
    while True:
        try:
            job = _receive()
        except EOFError:
            return
        _send(_run(job, limits))


def _run(job: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Run one program to its end, or to the first limit that it meets."""
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "answer")}
    start = time.monotonic()
    try:
        pid = os.fork()
    except OSError as error:  # what an earlier test of the same program left behind
        for end in (end for ends in pipes.values() for end in ends):
            os.close(end)
        return {"nonce": job["nonce"], "ended": "fork", "error": str(error)}
    if pid == 0:
        _become(job, limits, pipes)
    watch = _Watch(pid, pipes, job["stdin"].encode("utf-8", "surrogatepass"), limits)
    ended = watch.follow(job["wall"], start + job["within"])
    if watch.status is None:
        _kill(pid)
        watch.wait(blocking=True)
    _end_descendants(limits["alone"])
    watch.drain()
    cpu = watch.cpu
    if ended is None and watch.over:
        ended = "output"
    used_up = watch.status == -signal.SIGXCPU or cpu > (limits["cpu"] or math.inf)
    if ended is None and used_up:
        ended = "cpu"
    return {
        "nonce": job["nonce"],
        "ended": ended,
        "status": watch.status,
        "cpu": cpu,
        "wall": time.monotonic() - start,
        "stdout": watch.text("stdout"),
        "answer": watch.text("answer"),
        "error": watch.text("stderr")[-_TAIL:],
    }


class _Watch:
    """One running program seen from outside: its pipes, its end, its memory."""

    def __init__(
        self, pid: int, pipes: dict[str, tuple[int, int]], given: bytes, limits: dict[str, Any]
    ) -> None:
        self.pid = pid
        self.status: int | None = None
        self.cpu = 0.0
        self.over = False
        self._limits = limits
        self._given = memoryview(given)
        self._kept = {name: bytearray() for name in ("stdout", "stderr", "answer")}
        self._reads: dict[int, str] = {}
        self._poll = select.poll()
        for name, (read, write) in pipes.items():
            ours, theirs = (write, read) if name == "stdin" else (read, write)
            os.close(theirs)
            os.set_blocking(ours, False)
            if name == "stdin":
                self._feed: int | None = ours
                self._poll.register(ours, select.POLLOUT)
            else:
                self._reads[ours] = name
                self._poll.register(ours, select.POLLIN)
        self._end = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        if self._end is not None:
            self._poll.register(self._end, select.POLLIN)

    def follow(self, wall: float, latest: float) -> str | None:
        """Watch until the program ends (None) or meets a limit (its name).

        Time for which it runs, or is ready and has no CPU, is left to the limit of CPU time, so
        that a busy machine ends nobody before `latest`.
        """
        waited, looked = 0.0, time.monotonic()
        while True:
            for handle, _ in self._poll.poll(_TICK * 1000):
                if handle == self._feed:
                    self._write()
                elif handle in self._reads:
                    self._read(handle)
            if self.over:
                return "output"
            self.wait(blocking=False)
            if self.status is not None:
                return None
            now = time.monotonic()
            if now > looked + _TICK:
                # A longer step is one in which this process had no CPU itself.
                step, looked = min(now - looked, 5 * _TICK), now
                if self._limits["cpu"] is None or not _ready(self.pid):
                    waited += step
                if self._limits["alone"]:
                    memory, cpu = _used()
                    if memory > self._limits["memory"]:
                        return "memory"
                    if cpu > self._limits["cpu"]:
                        return "cpu"
            if now > latest or waited > wall:
                return "wall"

    def wait(self, *, blocking: bool) -> None:
        pid, status, usage = os.wait4(self.pid, 0 if blocking else os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            self.cpu = usage.ru_utime + usage.ru_stime

    def drain(self) -> None:
        """Take what is left in the pipes, and close them."""
        for handle in list(self._reads):
            while handle in self._reads and not self.over and self._read(handle):
                pass
        for left in (*self._reads, self._feed, self._end):
            if left is not None:
                os.close(left)

    def text(self, name: str) -> str:
        return self._kept[name].decode("latin-1")

    def _write(self) -> None:
        assert self._feed is not None
        try:
            self._given = self._given[os.write(self._feed, self._given[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the program does not read it
            self._given = memoryview(b"")
        if not self._given:
            self._poll.unregister(self._feed)
            os.close(self._feed)
            self._feed = None

    def _read(self, handle: int) -> bool:
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._poll.unregister(handle)
            os.close(handle)
            del self._reads[handle]
            return False
        kept = self._kept[self._reads[handle]]
        kept += data
        if len(kept) > self._limits["output"]:
            del kept[self._limits["output"] :]
            self.over = True
        return True


def _used() -> tuple[int, float]:
    """Bytes of memory and seconds of CPU of every other process in here, reaped children's too."""
    pages = ticks = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/stat", "rb") as numbers:
                    told = numbers.read().rpartition(b")")[2].split()
                ticks += sum(map(int, told[11:15]))
                pages += int(told[21])
            except (OSError, IndexError):  # ended meanwhile
                continue
    return pages * resource.getpagesize(), ticks / os.sysconf("SC_CLK_TCK")


def _ready(pid: int) -> bool:
    """Whether a thread of a process runs or could; False where the kernel does not tell."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as told:
                if told.read().rpartition(b")")[2].split()[0] == b"R":
                    return True
    except (OSError, IndexError):
        pass
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _end_descendants(alone: bool) -> None:
    """End and reap whatever the program started: all of the PID namespace, or all that we adopt."""
    assert not alone or os.getpid() == 1
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        if alone:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)  # everybody in here but ourselves
        else:
            for pid in _children():
                _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.0005)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(pid) for pid in listed.read().split()]
    except OSError:
        return []


def _become(job: dict[str, Any], limits: dict[str, Any], pipes: dict[str, Any]) -> NoReturn:
    """The forked child: take on the limits and streams, be the program, end."""
    code = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(pipes["stdin"][0], 0)
        os.dup2(pipes["stdout"][1], 1)
        os.dup2(pipes["stderr"][1], 2)
        answer = pipes["answer"][1]
        for ends in pipes.values():
            for end in ends:
                if end != answer or job["call"] is None:
                    os.close(end)
        os.close(CHANNEL)
        _limit(limits)
        _execute(job, answer)
        code = 0
        if job["call"] is None:
            _finish()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        try:
            _finish()
        except BaseException:
            code = 1
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
        code = 1
    finally:
        os._exit(code & 255)


def _limit(limits: dict[str, Any]) -> None:
    if limits["cpu"] is not None:
        seconds = math.ceil(limits["cpu"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if limits["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))


def _execute(job: dict[str, Any], answer: int) -> None:
    import builtins

    called = job["call"] is not None
    # `site`, which is not loaded, is what defines these two.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = type(sys)("solution" if called else "__main__")
    keep = sys.modules["__main__"]
    sys.modules[module.__name__] = module
    sys.argv = ["main.py"]
    exec(compile(job["code"], "main.py", "exec", dont_inherit=True), module.__dict__)
    if called:
        args, kwargs = decode(job["args"]), decode(job["kwargs"])
        value = _find(module, job["call"])(*args, **kwargs)
        told = json.dumps({"nonce": job["nonce"], "value": encode(value)}).encode()
        left = memoryview(told)
        while left:
            left = left[os.write(answer, left) :]
    del keep


def _find(module: Any, path: str) -> Any:
    """`name`, or `Class.method` of a fresh instance."""
    first, *others = path.split(".")
    if first not in module.__dict__:
        raise NameError(f"the program defines no {first}")
    found = module.__dict__[first]
    for name in others:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def _finish() -> None:
    """What an interpreter does at its end: wait for threads, run exit functions, flush."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
