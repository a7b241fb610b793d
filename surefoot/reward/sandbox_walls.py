"""The walls of a sandbox: what a forked process does to itself before it becomes the supervisor.

Owns namespaces, mounts, users, capabilities, the system call filter, and the keeper that ends all
of it when the worker is gone. Linux only, by system calls; no program with more rights is needed.
Refuses to own the protocol with the supervisor (`sandbox.py`) and the limits of a single program,
which the supervisor sets (`sandbox_init.py`).

Every function here runs between fork and exec. The exec matters: until then the process holds the
worker's memory, expected values included.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

CHANNEL = 3
INSIDE = 1000  # user and group of a program, as it sees itself
OUTSIDE = 65534  # what root's sandboxes are on the host: nobody
FILES = 64

_NEW = {
    "cgroup": 0x02000000,
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000  # the number is the same on every architecture
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_CAPABILITY_VERSION = 0x20080522
_ROOT = "/tmp"  # mounted over, in a mount namespace of our own

# Memory that no limit counts, other processes' memory, and doors into the kernel that no program of
# a test needs. (x86_64, aarch64)
_DENIED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_LD, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


@dataclass(frozen=True, slots=True)
class Plan:
    """What the supervisor is and what it may use; `limited` is false for tier none."""

    arguments: tuple[str, ...]
    prefix: str
    disk_bytes: int
    processes: int
    limited: bool = True
    folder: str | None = None  # where it runs without walls


def _libc(name: str, *arguments: object) -> int:
    """Call a C function; OSError names it where it returns -1."""
    library = ctypes.CDLL(None, use_errno=True)
    result = int(library[name](*arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def enter(channel: int, life: int, plan: Plan, *, worker: int) -> NoReturn:
    """In the worker's child: build the walls, and stay outside of them as the keeper.

    The channel carries three frames before the supervisor's own: {"map": true}, answered by one
    byte when the user map is written, and {"failed": why} if something is not possible here.
    """
    try:
        _calm(channel, life, worker)
        if os.geteuid() == 0:
            os.setgroups([])
        _libc("unshare", sum(_NEW.values()))
        _tell(channel, {"map": True})
        if os.read(channel, 1) != b"m":
            os._exit(1)
        inner = os.fork()
    except OSError as error:
        _fail(channel, error)
    if inner:
        _keep(channel, life, inner)
    try:
        os.setsid()
        _enclose(plan)
        _drop_rights(plan)
        _libc("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        _become(channel, plan)
    except OSError as error:
        _fail(channel, error)


def enter_folder(channel: int, plan: Plan, *, worker: int) -> NoReturn:
    """In the worker's child, without walls: a folder, limits, a clean environment."""
    try:
        assert plan.folder is not None
        _calm(channel, channel, worker)
        os.setsid()
        os.chdir(plan.folder)
        if plan.limited:
            _bound(plan)
            if sys.platform == "linux":
                _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _become(channel, plan)
    except OSError as error:
        _fail(channel, error)


def _calm(channel: int, life: int, worker: int) -> None:
    """Default signals, empty standard streams, no other handles, dying with the worker."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        _libc("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != worker:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    low, high = sorted((channel, life))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))


def _tell(channel: int, message: object) -> None:
    body = json.dumps(message).encode()
    os.write(channel, struct.pack(">Q", len(body)) + body)


def _fail(channel: int, error: OSError) -> NoReturn:
    with contextlib.suppress(OSError):
        _tell(channel, {"failed": error.strerror or str(error)})
    os._exit(1)


def _keep(channel: int, life: int, inner: int) -> NoReturn:
    """Wait until the supervisor ends, or end it when the worker lets go of `life`."""
    os.close(channel)
    end = os.pidfd_open(inner)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(life, 0)  # a hang-up is always told
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(inner, signal.SIGKILL)
    os.waitpid(inner, 0)
    os._exit(0)


def _become(channel: int, plan: Plan) -> NoReturn:
    if channel == CHANNEL:
        os.set_inheritable(CHANNEL, True)
    else:
        os.dup2(channel, CHANNEL)
    os.execve(plan.arguments[0], list(plan.arguments), {})


def _sources(plan: Plan) -> list[str]:
    """What of the host a program can read: one interpreter and the system's libraries."""
    wanted = [plan.arguments[0], f"{plan.prefix}/lib", f"{plan.prefix}/lib64"]
    wanted += ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    return [path for path in dict.fromkeys(wanted) if Path(path).exists()]


def _enclose(plan: Plan) -> None:
    """A root of our own, in memory: read-only but for /tmp, and nothing else of the host."""
    links = {path: os.readlink(path) for path in _sources(plan) if Path(path).is_symlink()}
    # Opened before anything is mounted over them.
    sources = {
        path: os.open(path, os.O_PATH)
        for path in (*_sources(plan), *(f"/dev/{name}" for name in _DEVICES))
        if path not in links
    }
    # Nobody in here makes a namespace, and with it capabilities, again.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=2k,mode=755")
    os.chdir(_ROOT)
    for path, link in links.items():
        target = Path(path.lstrip("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(link)
    for path, handle in sources.items():
        _bind(handle, Path(path.lstrip("/")), device=path.startswith("/dev/"))
    for name, link in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        Path("dev", name).symlink_to(f"/proc/self/fd/{link}")
    for name in ("proc", "tmp"):
        Path(name).mkdir()
    _mount("proc", "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")
    size = f"size={plan.disk_bytes},nr_inodes=4k,mode=1777"
    _mount("tmpfs", "tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    _mount(None, _ROOT, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _libc("pivot_root", b".", b".")
    _libc("umount2", b".", _MNT_DETACH)
    os.chdir("/tmp")
    name = b"sandbox"
    _libc("sethostname", name, len(name))


_DEVICES = ("null", "zero", "full", "random", "urandom")


def _bind(handle: int, target: Path, *, device: bool) -> None:
    if device or not Path(f"/proc/self/fd/{handle}").is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    else:
        target.mkdir(parents=True, exist_ok=True)
    _mount(f"/proc/self/fd/{handle}", str(target), None, _MS_BIND | _MS_REC)
    if not device:
        wanted = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
        place = str(target).encode()
        _libc("syscall", _MOUNT_SETATTR, -100, place, _AT_RECURSIVE, wanted, ctypes.c_size_t(32))
    os.close(handle)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else value.encode()

    try:
        _libc("mount", text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data))
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} (at {target})") from None


def _bound(plan: Plan) -> None:
    """Limits of every process in here; those of a program's time and memory come later."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, plan.disk_bytes),
        (resource.RLIMIT_NOFILE, FILES),
    ):
        resource.setrlimit(kind, (most, most))


def _drop_rights(plan: Plan) -> None:
    """Become the inside user, for good, with no capability and fewer system calls."""
    _bound(plan)
    # The supervisor counts too, and so does the keeper where it is the same user.
    most = plan.processes + (1 if os.geteuid() == 0 else 2)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    for capability in range(64):
        with contextlib.suppress(OSError):
            _libc("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    _libc("capset", struct.pack("II", _CAPABILITY_VERSION, 0), bytes(24))
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_calls()


def call_filter(machine: str) -> bytes:
    """The classic BPF program that denies `_DENIED`, and every call of a foreign architecture."""
    column, architecture = _MACHINES[machine]
    numbers = [pair[column] for pair in _DENIED.values()]
    x32 = [(_JGE, len(numbers) + 1, 0, _X32)] if machine == "x86_64" else []
    code = [
        (_LD, 0, 0, 4),
        (_JEQ, 1, 0, architecture),
        (_RET, 0, 0, _KILL),
        (_LD, 0, 0, 0),
        *x32,
        *((_JEQ, len(numbers) - k, 0, number) for k, number in enumerate(numbers)),
        (_RET, 0, 0, _ALLOW),
        (_RET, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _filter_calls() -> None:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(f"no system call filter for {machine}")
    code = call_filter(machine)
    # The kernel copies it during the call.
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
    _libc("prctl", _PR_SET_SECCOMP, 2, program, 0, 0)


def write_user_map(pid: int) -> None:
    """In the worker: say who the keeper's user namespace's users are on the host."""
    user, group = os.geteuid(), os.getegid()
    folder = Path(f"/proc/{pid}")
    (folder / "setgroups").write_text("deny")
    if user == 0:
        (folder / "uid_map").write_text(f"0 0 1\n{INSIDE} {OUTSIDE} 1\n")
        (folder / "gid_map").write_text(f"0 {group} 1\n{INSIDE} {OUTSIDE} 1\n")
    else:
        (folder / "uid_map").write_text(f"{INSIDE} {user} 1\n")
        (folder / "gid_map").write_text(f"{INSIDE} {group} 1\n")


def exists() -> bool:
    return sys.platform == "linux" and Path("/proc/self/ns/user").exists()


def interpreter(script: Sequence[str]) -> tuple[str, ...]:
    """The command that runs Python, isolated from its environment and packages, on a script."""
    own = sys._base_executable  # type: ignore[attr-defined]
    return (os.path.realpath(own), "-I", "-S", "-B", "-X", "utf8", *script)


def home() -> str:
    """The folder that the interpreter's library is in."""
    return os.path.realpath(sys.base_prefix)
