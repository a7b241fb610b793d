"""Boxes: what a run reports, what limits do, what is left behind, and how a tier is chosen."""

from __future__ import annotations

import json
import os
import platform
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.reward import sandbox, sandbox_folders, sandbox_probe, sandbox_walls
from surefoot.reward.sandbox import Box, Ended, Job, Limits, Tier
from surefoot.reward.sandbox_folders import SandboxError
from surefoot.reward.sandbox_probe import broken_promises, isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

ROOT = Path(__file__).resolve().parents[2]
BEST = isolation().tier
TIERS = [tier for tier in Tier if tier is not Tier.NAMESPACES or BEST is Tier.NAMESPACES]
SMALL = Limits(cpu=1.0, wall=2.0, memory_mb=160, output_kb=8, disk_mb=2, processes=6)
needs_namespaces = pytest.mark.skipif(
    BEST is not Tier.NAMESPACES, reason="this machine has no namespaces for us"
)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def tree(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in tree(child)]


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After every test: no child, no handle and no folder of ours."""
    before = set(children(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield
    assert set(children(os.getpid())) <= before[0]
    assert len(os.listdir("/proc/self/fd")) == before[1]
    home = sandbox_folders.home()
    assert not home.exists() or not list(home.glob(f"{os.getpid()}-*"))


@pytest.fixture(params=TIERS)
def tier(request) -> Tier:
    return request.param


def test_a_run_is_reported(tier):
    with Box(tier, SMALL) as box:
        told = box.run(
            Job("import sys\nprint(input()[::-1])\nprint('bad', file=sys.stderr)", "abc")
        )
        assert (told.ended, told.status, told.stdout) == (Ended.BY_ITSELF, 0, b"cba\n")
        assert (told.error, told.answered) == ("bad", False)
        told = box.run(Job("raise SystemExit(7)"))
        assert (told.ended, told.status) == (Ended.BY_ITSELF, 7)
        told = box.run(Job("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
        assert told.status == -signal.SIGKILL
        told = box.run(Job("def f(a, *, b): return [a, {b}]", call="f", args=[1], kwargs={"b": 2}))
        assert told.answered and told.value == [1, {2}]
        told = box.run(Job("def f(): return object()", call="f"))
        assert not told.answered and "object" in told.error
        told = box.run(Job("\ud800"))
        assert told.status == 1


def test_large_inputs_and_outputs_pass(tier):
    limits = Limits(output_kb=4096)
    text = "x" * 1_000_000
    with Box(tier, limits) as box:
        told = box.run(Job("print(input())", text + "\n"))
        assert told.stdout == text.encode() + b"\n"
        assert box.run(Job("print(1)", text)).stdout == b"1\n"  # input that is not read
        told = box.run(Job("def f(x): return x + x", call="f", args=[text]))
        assert told.value == text + text


def test_programs_of_one_box_do_not_meet(tier):
    with Box(tier, SMALL) as box:
        box.run(Job("import builtins, sys\nbuiltins.print = None\nsys.modules['math'] = None"))
        assert box.run(Job("import math\nprint(math.floor(2.5))")).stdout == b"2\n"


def test_the_wall_clock_ends_what_sleeps(tier):
    with Box(tier, SMALL) as box:
        start = time.monotonic()
        assert box.run(Job("import time\ntime.sleep(60)"), within=0.3).ended is Ended.WALL
        assert box.run(Job("import os\nos.kill(os.getpid(), 19)"), within=0.3).ended is Ended.WALL
        assert box.run(Job("input()\nclose = 1"), within=0.3).ended is Ended.BY_ITSELF  # no input
        assert time.monotonic() - start < 3.0
        assert box.run(Job("print(1)")).stdout == b"1\n"


@pytest.mark.fault(30)
@pytest.mark.parametrize("tier", [t for t in TIERS if t is not Tier.NONE])
def test_cpu_and_memory_end_what_uses_them_up(tier):
    with Box(tier, SMALL) as box:
        assert box.run(Job("while True: pass")).ended is Ended.CPU
        told = box.run(Job("x = bytearray(1 << 30)\nprint(1)"))
        assert told.stdout == b"" and "MemoryError" in told.error
        # A little too much is too much, even if it is done before the kernel's whole seconds.
        told = box.run(Job("import time\nwhile time.process_time() < 1.2: pass\nprint(1)"))
        assert told.ended is Ended.CPU


@needs_namespaces
def test_the_cpu_time_of_all_processes_counts_together():
    program = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    with Box(Tier.NAMESPACES, Limits(cpu=1.0, wall=20.0)) as box:
        assert box.run(Job(program)).ended is Ended.CPU
    program = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        while time.process_time() < 0.5: pass\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "time.sleep(60)"
    )
    with Box(Tier.NAMESPACES, Limits(cpu=1.0, wall=20.0)) as box:
        assert box.run(Job(program)).ended is Ended.CPU


@pytest.mark.fault(30)
def test_a_flood_is_cut(tier):
    for stream in ("stdout", "stderr"):
        with Box(tier, SMALL) as box:
            told = box.run(Job(f"import sys\nwhile True: sys.{stream}.write('x' * 5000)"))
            assert told.ended is Ended.OUTPUT and len(told.stdout) <= 8 * 1024


def test_a_program_has_no_environment_and_an_empty_folder(tier, monkeypatch):
    monkeypatch.setenv("SUREFOOT_SECRET", "s3cret")
    with Box(tier, SMALL) as box:
        told = box.run(Job("import os\nprint(dict(os.environ), os.listdir())"))
    assert told.stdout == b"{} []\n"


@pytest.mark.fault(30)
def test_a_child_left_behind_ends_with_its_program(tier):
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    with Box(tier, SMALL) as box:
        alone = len(tree(box.pid))
        assert box.run(Job(program)).status == 0
        assert len(tree(box.pid)) == alone


def test_close_ends_a_box_in_the_middle_of_a_run(tier):
    program = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile 1: pass"
    box = Box(tier, SMALL)
    job = {"nonce": "", "wall": 60, "within": 60, "code": program, "stdin": "", "call": None}
    body = json.dumps(job).encode()
    box._channel.sendall(len(body).to_bytes(8, "big") + body)
    time.sleep(0.2)
    inside = tree(box.pid)
    assert inside
    box.close()
    box.close()
    assert gone(inside)


@pytest.mark.parametrize("tier", TIERS)
def test_a_box_ends_with_its_killed_worker_and_its_folder_goes_at_the_next_start(tier):
    script = (
        "import sys, time\n"
        "from surefoot.reward.sandbox import Box, Job, Limits, Tier\n"
        f"box = Box(Tier('{tier.value}'), Limits(wall=60.0))\n"
        "print(box.pid, flush=True)\n"
        "box.run(Job('import time\\nwhile True: time.sleep(0.01)'))\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    time.sleep(0.3)
    inside = [pid, *tree(pid)]
    assert len(inside) >= 2
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert gone(inside)
    left = list(sandbox_folders.home().glob(f"{worker.pid}-*"))
    assert bool(left) == (tier is not Tier.NAMESPACES)
    assert sandbox_folders.sweep_folders() >= len(left)
    assert not list(sandbox_folders.home().glob(f"{worker.pid}-*"))


def test_a_folder_that_is_in_use_is_not_swept():
    with Box(Tier.GUARDED, SMALL) as box:
        sandbox_folders.sweep_folders()
        assert box.run(Job("open('x', 'w').close()\nprint(1)")).stdout == b"1\n"


def test_a_folder_is_removed_whatever_its_rights_and_never_through_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    folder = tmp_path / "box"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(outside)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0o500)
    sandbox_folders.remove_folder(folder)
    assert not folder.exists() and outside.stat().st_mode & 0o777 == 0o755


@pytest.mark.fault(28)
def test_a_box_that_cannot_be_started_says_so_and_leaves_nothing(tier, monkeypatch):
    monkeypatch.setattr(sandbox_walls, "interpreter", lambda script: ("/no/such/python", *script))
    with pytest.raises(SandboxError, match=r"did not start.*No such file"):
        Box(tier, SMALL)


def test_a_supervisor_that_ends_at_once_is_the_machines_fault(tier, monkeypatch):
    monkeypatch.setattr(sandbox, "_SOURCE", "raise SystemExit(3)")
    with pytest.raises(SandboxError, match="ended at once"):
        Box(tier, SMALL)


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    "lie",
    [
        b"\x00" * 8,
        (7).to_bytes(8, "big") + b"no json",
        (2).to_bytes(8, "big") + b"{}",
        (1 << 40).to_bytes(8, "big"),
        b"\xff" * 100,
        (100_000).to_bytes(8, "big") + b"[" * 100_000,
    ],
)
def test_a_lying_supervisor_is_a_tampered_run(lie, monkeypatch):
    """Whatever takes the supervisor over gets no more from us than a failed test."""
    source = (
        "import os, time\n"
        "os.write(3, (15).to_bytes(8, 'big') + b'{\"ready\": true}')\n"
        "os.read(3, 9)\n"
        f"os.write(3, {lie!r})\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(sandbox, "_SOURCE", source)
    with Box(Tier.GUARDED, SMALL) as box:
        assert box.run(Job("print(1)")).ended is Ended.TAMPER


@needs_namespaces
def test_every_promise_of_the_boundary_holds_here():
    assert broken_promises(Tier.NAMESPACES) == []
    assert broken_promises(Tier.GUARDED) == []


@needs_namespaces
def test_the_probe_finds_every_broken_promise():
    """The same programs in a box without walls break what they are there to break."""
    probes = sandbox_probe._PROMISES[Tier.NAMESPACES]
    by_name = {name: (attempt, kept) for name, attempt, kept in probes}
    limits = Limits(cpu=2.0, wall=3.0, memory_mb=400, output_kb=16, processes=6)
    with sandbox_probe._outside() as out, Box(Tier.NONE, limits) as box:
        held = {}
        for name in ("files of the host", "network", "processes of the host", "rights"):
            attempt, kept = by_name[name]
            held[name] = kept(box.run(Job(attempt(out))))
    assert not any(held.values()), held


def test_a_machine_without_namespaces_gets_the_next_tier_and_says_why(monkeypatch):
    monkeypatch.setattr(sandbox_walls, "exists", lambda: False)
    sandbox_probe._tried.cache_clear()
    try:
        found = isolation()
        assert found.tier is Tier.GUARDED
        assert "no user namespaces" in str(found) and "not an adversary" in str(found)
        with pytest.raises(SandboxError, match="no user namespaces"):
            isolation(Tier.NAMESPACES)
    finally:
        sandbox_probe._tried.cache_clear()


@needs_namespaces
def test_a_broken_promise_lowers_the_tier_with_its_name(monkeypatch):
    broken = ("network", lambda out: "print('got through')", sandbox_probe._says("[]"))
    promises = {**sandbox_probe._PROMISES, Tier.NAMESPACES: (broken,)}
    monkeypatch.setattr(sandbox_probe, "_PROMISES", promises)
    sandbox_probe._tried.cache_clear()
    try:
        found = isolation()
    finally:
        sandbox_probe._tried.cache_clear()
    assert found.tier is Tier.GUARDED
    assert found.lost == ("not namespaces, because network: ended by itself, said 'got through'",)


def run_filter(code: bytes, architecture: int, number: int) -> int:
    """A small interpreter of the filter's few instructions."""
    lines = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    at, word = 0, 0
    while True:
        operation, yes, no, value = lines[at]
        if operation == 0x06:
            return value
        if operation == 0x20:
            word = {0: number, 4: architecture}[value]
            at += 1
        else:
            holds = word == value if operation == 0x15 else word >= value
            at += 1 + (yes if holds else no)


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_denies_its_list_and_nothing_else(machine, column):
    code = sandbox_walls.call_filter(machine)
    ours = sandbox_walls._MACHINES[machine][1]
    denied = {pair[column] for pair in sandbox_walls._DENIED.values()}
    for number in range(600):
        expected = 0x00050001 if number in denied else 0x7FFF0000
        assert run_filter(code, ours, number) == expected, number
    assert run_filter(code, 0x40000003, 1) == 0x80000000  # 32-bit calls on the same machine
    if machine == "x86_64":
        assert run_filter(code, ours, 0x40000000 + 1) == 0x00050001
        assert platform.machine() != "x86_64" or len(code) // 8 < 64
