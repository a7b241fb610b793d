"""Which tier this machine has: each promise of a tier is tried before it is believed.

Owns the promises, the programs that try to break them, and the choice of the tier.
Refuses to own whether a tier is good enough: the recipe says that (`code.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.reward import sandbox_walls
from surefoot.reward.sandbox import Box, Ended, Job, Limits, Report, Tier
from surefoot.reward.sandbox_folders import SandboxError, sweep_folders

log = logging.getLogger(__name__)

_LIMITS = Limits(cpu=2.0, wall=5.0, memory_mb=160, output_kb=16, disk_mb=2, processes=6)
_WORDS = {
    Tier.NAMESPACES: "namespaces (a boundary)",
    Tier.GUARDED: "guarded process (stops accidents, not an adversary)",
    Tier.NONE: "none (deadlines alone)",
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """The tier in use, and why each better one is not."""

    tier: Tier
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f"; {'; '.join(self.lost)}" if self.lost else ""
        return f"isolation of model-written code: {_WORDS[self.tier]}{why}"


@dataclass(frozen=True, slots=True)
class Outside:
    """What the host has that a program must not reach."""

    folder: Path
    secret: Path
    port: int
    pid: int


Attempt = Callable[[Outside], str]
Kept = Callable[[Report], bool]


def _says(text: str) -> Kept:
    return lambda report: report.stdout.decode("utf-8", "replace").strip() == text


_RUNS = ("runs programs", lambda out: "print(6 * 7)", _says("42"))
_CLEAN = ("no environment", lambda out: "import os\nprint(len(os.environ))", _says("0"))
_MEMORY = (
    "memory of a process",
    lambda out: "x = bytearray(400 << 20)\nprint(len(x))",
    lambda report: report.stdout == b"",
)
_OUTPUT = (
    "output",
    lambda out: "while True: print('x' * 1000)",
    lambda report: report.ended is Ended.OUTPUT and len(report.stdout) == 16 * 1024,
)
_FILES = (
    "files of the host",
    lambda out: (
        f"""
import os
done = []
for path in ({str(out.secret)!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ"):
    try:
        open(path).read()
        done.append("read " + path)
    except OSError:
        pass
for path in ({str(out.folder)!r}, "/", "/usr/lib", "/dev", os.path.dirname(os.__file__)):
    try:
        open(path + "/surefoot-probe", "w")
        done.append("wrote " + path)
    except OSError:
        pass
print(done)
"""
    ),
    _says("[]"),
)
_NETWORK = (
    "network",
    lambda out: (
        f"""
import socket
done = []
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {out.port})),
    (socket.AF_UNIX, "\\0surefoot-probe-{out.pid}"),
    (socket.AF_INET, ("198.51.100.1", 80)),
):
    s = socket.socket(family)
    s.settimeout(0.5)
    try:
        s.connect(address)
        done.append(address)
    except TimeoutError:
        done.append("a way out")
    except OSError:
        pass
print(done)
"""
    ),
    _says("[]"),
)
_PROCESSES = (
    "number of processes",
    lambda out: (
        """
import os, time
born = 0
try:
    while born < 50:
        if os.fork() == 0:
            time.sleep(60)
        born += 1
except OSError:
    pass
print(born < 6)
"""
    ),
    _says("True"),
)
_ORPHANS = (
    "processes that outlive their program",
    lambda out: (
        """
import os
names = [name for name in os.listdir("/proc") if name.isdigit()]
print([name for name in names if int(name) not in (1, os.getpid())])
"""
    ),
    _says("[]"),
)
_TOGETHER = (
    "memory of all processes",
    lambda out: (
        """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1)) * (90 << 20)
        time.sleep(60)
time.sleep(60)
"""
    ),
    lambda report: report.ended is Ended.MEMORY,
)
_DISK = (
    "disk",
    lambda out: (
        """
written = 0
try:
    for k in range(8):
        with open(f"/tmp/{k}", "wb", buffering=0) as f:
            written += f.write(bytes(1 << 20))
except OSError:
    pass
print(written <= 2 << 20)
"""
    ),
    _says("True"),
)
_SIGNALS = (
    "processes of the host",
    lambda out: (
        f"""
import os
try:
    os.kill({out.pid}, 0)
    print("seen")
except ProcessLookupError:
    print("unseen")
"""
    ),
    _says("unseen"),
)
_RIGHTS = (
    "rights",
    lambda out: (
        """
import ctypes, os
status = open("/proc/self/status").read()
caps = [line.split()[1] for line in status.splitlines() if line.startswith("Cap")]
libc = ctypes.CDLL(None)
tried = [libc.unshare(0x10000000), libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)]
try:
    open("/proc/1/mem", "rb")
    tried.append(0)
except OSError:
    tried.append(-1)
try:
    os.memfd_create("x")
    tried.append(0)
except OSError:
    tried.append(-1)
print(set(caps) == {"0" * 16}, os.getuid() != 0, tried)
"""
    ),
    _says("True True [-1, -1, -1, -1]"),
)

_PROMISES: dict[Tier, tuple[tuple[str, Attempt, Kept], ...]] = {
    Tier.NAMESPACES: (
        _RUNS,
        _CLEAN,
        _FILES,
        _NETWORK,
        _SIGNALS,
        _RIGHTS,
        _MEMORY,
        _OUTPUT,
        _DISK,
        _PROCESSES,
        _ORPHANS,
        _TOGETHER,
    ),
    Tier.GUARDED: (_RUNS, _CLEAN, _MEMORY, _OUTPUT),
    Tier.NONE: (_RUNS,),
}


def broken_promises(tier: Tier) -> list[str]:
    """What of a tier does not hold on this machine, each tried by a program; [] if all of it."""
    if tier is Tier.NAMESPACES and not sandbox_walls.exists():
        return ["this system has no user namespaces"]
    broken = []
    try:
        with _outside() as out, Box(tier, _LIMITS) as box:
            for name, attempt, kept in _PROMISES[tier]:
                report = box.run(Job(attempt(out)))
                if not kept(report):
                    broken.append(f"{name}: {_seen(report)}")
                if report.ended in (Ended.GONE, Ended.TAMPER):
                    break
    except SandboxError as error:
        broken.append(str(error))
    return broken


def _seen(report: Report) -> str:
    said = report.stdout[:80].decode("utf-8", "replace").strip()
    return f"ended {report.ended.value}, said {said!r} {report.error[:80]}".rstrip()


@contextlib.contextmanager
def _outside() -> Iterator[Outside]:
    """A readable file, a listening port and an abstract socket on the host."""
    with (
        tempfile.TemporaryDirectory(prefix="surefoot-probe-") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        if sandbox_walls.exists():
            local = stack.enter_context(socket.socket(socket.AF_UNIX))
            local.bind(f"\0surefoot-probe-{os.getpid()}")
            local.listen()
        yield Outside(folder, secret, server.getsockname()[1], os.getpid())


def isolation(wanted: Tier | None = None) -> Isolation:
    """The best tier whose promises all hold here, or `wanted` if they do.

    Tried once per process, in about a second. SandboxError where not even the last one works.
    """
    return _tried(wanted)


@functools.cache
def _tried(wanted: Tier | None) -> Isolation:
    sweep_folders()
    lost: list[str] = []
    tiers = (Tier.NAMESPACES, Tier.GUARDED, Tier.NONE) if wanted is None else (wanted,)
    for tier in tiers:
        broken = broken_promises(tier)
        if not broken:
            found = Isolation(tier, tuple(lost))
            log.info("%s", found)
            return found
        lost.append(f"not {tier.value}, because {', '.join(broken)}")
    raise SandboxError(
        f"programs cannot be isolated on this machine: {'; '.join(lost)}; use Linux with user "
        "namespaces, or another reward"
    )
