"""Programs that solve nothing: they score 0, and the machine is afterwards what it was before.

Rows 28 to 30 of the fault matrix. Every attack is also a complete answer to a row with two tests,
so that a grader which believes anything that a program says would pay for it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import Grader, sandbox, sandbox_folders, sandbox_walls
from surefoot.reward.code import CodeOptions, code
from surefoot.reward.contract import PartScore, RewardSample
from surefoot.reward.sandbox import Tier
from surefoot.reward.sandbox_probe import isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

BEST = isolation().tier
TIERS = [tier for tier in Tier if tier is not Tier.NAMESPACES or BEST is Tier.NAMESPACES]
needs_namespaces = pytest.mark.skipif(
    BEST is not Tier.NAMESPACES, reason="this machine has no namespaces for us"
)
LIMITS = {
    "cpu_limit": 1.0,
    "wall_limit": 2.0,
    "total_limit": 6.0,
    "memory_mb": 160,
    "output_kb": 16,
    "disk_mb": 2,
    "processes": 6,
}
CALLS = [
    {"call": "solve", "args": [3], "expect": "q7-first"},
    {"call": "solve", "args": [4], "expect": 918273645},
]
STREAMS = [{"input": "3\n", "output": "q7-first\n"}, {"input": "4\n", "output": "918273645\n"}]


def grade(program: str, tests: Any, tier: Tier, **options: Any) -> PartScore:
    rule = code(CodeOptions(**{**LIMITS, "fraction": True, **options}), tier)
    text = f"```python\n{program}\n```"
    columns = {"tests": tests}
    return rule(RewardSample("q", text, (1,), None, "code", columns, StopReason.STOP))


def test_the_row_can_be_solved() -> None:
    """Else every 0 below would mean nothing."""
    program = "def solve(n): return {3: 'q7-first', 4: 918273645}[n]"
    assert grade(program, CALLS, BEST).value == 1.0
    assert grade(program + "\nprint(solve(int(input())))", STREAMS, BEST).value == 1.0


# Built from pieces, so that the program's own text does not hold what it looks for.
SEARCH = """
    import gc, sys
    needle = "".join(reversed("tsrif-7q"))
    def look(value, depth=0):
        if isinstance(value, str):
            return needle in value and value is not needle
        if depth > 4:
            return False
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple, set)):
            return any(look(item, depth + 1) for item in list(value))
        return isinstance(value, (bytes, bytearray)) and needle.encode() in value
    def solve(n):
        frame, seen = sys._getframe().f_back, gc.get_objects()
        while frame:
            seen += [*frame.f_locals.values(), *frame.f_globals.values()]
            frame = frame.f_back
        return needle if any(look(value) for value in seen if value is not globals()) else None
    """

# Forged verdicts: what a program does to look as if it had passed (row 29).

FORGE = {
    "exit at once": "import sys; sys.exit(0)",
    "exit behind every handler": "import os; os._exit(0)",
    "exit when called": "import os\ndef solve(n): os._exit(0)",
    "system exit when called": "def solve(n): raise SystemExit(0)",
    "exit function": "import atexit\natexit.register(lambda: print('passed'))",
    "exit cannot fail": "import os, sys\nsys.exit = os._exit = lambda code=0: None\nsys.exit(1)",
    "signal to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "equal to everything": """
        class Yes:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
            def __repr__(self): return "q7-any"
            def __bool__(self): return True
        def solve(n): return Yes()
        print(Yes())
        """,
    "a string equal to everything": """
        class Yes(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        def solve(n): return Yes("x")
        print(Yes("x"))
        """,
    "a number equal to everything": """
        class Yes(int):
            def __eq__(self, other): return True
            def __int__(self): return 918273645
            def __index__(self): return 918273645
            __hash__ = int.__hash__
        def solve(n): return Yes(1)
        """,
    "a mapping of everything": """
        class All(dict):
            def __missing__(self, key): return key
            def items(self): return [("q7-first", 918273645)]
        def solve(n): return All()
        """,
    "patched builtins": """
        import builtins
        for name in ("isinstance", "type", "len", "all", "any", "bool", "print", "repr", "hex"):
            setattr(builtins, name, lambda *a, **k: True)
        def solve(n): return 1
        """,
    "patched json": """
        import json
        json.dumps = lambda *a, **k: '{"passed": true, "value": true}'
        json.loads = lambda *a, **k: True
        json.JSONEncoder.default = lambda self, o: True
        def solve(n): return object()
        """,
    "patched supervisor": """
        import sys, gc
        for space in gc.get_objects():
            if isinstance(space, dict) and "encode" in space and "decode" in space:
                space["encode"] = lambda value: {"i": "0x1"}
                space["_find"] = lambda module, path: (lambda *a, **k: True)
                space["_finish"] = space["_execute"] = lambda *a: None
        def solve(n): return True
        """,
    "a comparison that says yes": """
        import operator, unittest
        operator.eq = lambda a, b: True
        unittest.TestCase.assertEqual = lambda *a: None
        def check(candidate): return True
        def solve(n): return None
        """,
    "printed verdicts": """
        for line in ('{"passed": true}', "PASSED", "OK", "all tests passed", "1.0", "2 passed",
                     '{"ended": null, "status": 0, "answer": ""}'):
            print(line)
        def solve(n): print("q7-maybe"); return "passed"
        """,
    "every frame and every object": SEARCH,
    "frames written to every handle": """
        import json, os, sys
        def solve(n):
            frame, nonce = sys._getframe(), None
            while frame:
                job = frame.f_locals.get("job")
                if job: nonce = job["nonce"]
                frame = frame.f_back
            told = json.dumps({"nonce": nonce, "ended": None, "status": 0, "stdout": "ok",
                               "answer": json.dumps({"nonce": nonce, "value": True}),
                               "error": "", "cpu": 0.0}).encode()
            for handle in range(64):
                try: os.write(handle, len(told).to_bytes(8, "big") + told)
                except OSError: pass
            return True
        """,
    "many answers": """
        import json, os, sys
        def solve(n):
            frame = sys._getframe()
            while "job" not in frame.f_locals: frame = frame.f_back
            nonce, answer = frame.f_locals["job"]["nonce"], frame.f_locals["answer"]
            for guess in ("q7-first", {"i": hex(918273645)}):
                os.write(answer, json.dumps({"nonce": nonce, "value": guess}).encode())
            os._exit(0)
        """,
    "an answer without the nonce": """
        import os
        for handle in range(3, 64):
            try: os.write(handle, b'{"nonce": "0", "value": "q7-first"}')
            except OSError: pass
        def solve(n): os._exit(0)
        """,
    "two returns from one call": """
        import os
        def solve(n):
            pid = os.fork()
            if pid: os.waitpid(pid, 0)
            return "q7-first" if pid else 918273645
        """,
    "a child answers first": """
        import os
        def solve(n):
            if os.fork() == 0: return "wrong"
            os.wait()
            return "wrong too"
        """,
    "nested without end": """
        def solve(n):
            value = []
            for _ in range(100_000): value = [value]
            return value
        """,
    "a value that contains itself": "def solve(n):\n    a = []\n    a.append(a)\n    return a",
    "odd values": "def solve(n): return [float('nan'), 10**9000, '\\ud800', b'\\xff', {(): ()}]",
    "handles closed": "import os\nos.closerange(0, 64)\ndef solve(n): return 1",
    "input where none is": "print(open(0).read() + input())",
    "nothing": "pass",
}


MARK = f"# boxes of test process {os.getpid()}\n"


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine is afterwards what it was before; our boxes carry a mark to be told apart by."""
    monkeypatch.setattr(sandbox, "_SOURCE", sandbox._SOURCE + MARK)
    before = host()
    yield
    until = time.monotonic() + 2.0
    while host() != before and time.monotonic() < until:
        time.sleep(0.02)
    assert host() == before


def host() -> dict[str, Any]:
    """What an attack could have changed."""
    me = os.getpid()
    return {
        "children": Path(f"/proc/self/task/{me}/children").read_text().split(),
        "processes": inside(),
        "handles": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mounts").read_text(),
        "boxes": sorted(str(path) for path in sandbox_folders.home().glob(f"{me}-*")),
        "traces": [str(path) for path in Path("/tmp").glob("surefoot-attack-*")],
        "namespaces": Path("/proc/sys/user/max_user_namespaces").read_text(),
        "name": socket.gethostname(),
    }


def inside() -> list[int]:
    """Every process of a box of this test process; a forked program keeps its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.fault(29)
@pytest.mark.parametrize("tier", TIERS[1:])
@pytest.mark.parametrize("tests", [CALLS, STREAMS], ids=["calls", "streams"])
@pytest.mark.parametrize("attack", FORGE)
def test_a_forged_verdict_scores_nothing(attack: str, tests: Any, tier: Tier) -> None:
    verdict = grade(textwrap.dedent(FORGE[attack]), tests, tier)
    assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, 0.0), verdict.detail


@pytest.mark.parametrize("tier", TIERS)
def test_the_search_would_find_an_expected_value(tier: Tier) -> None:
    """The attack that looks for it works: a value that is in there is found, and pays."""
    leaky = textwrap.dedent(SEARCH) + "\nkept = [{'job': ('expect', 'q7-' 'first')}]\n"
    assert grade(leaky, CALLS, tier).value == 0.5


@pytest.mark.fault(29)
def test_a_forged_frame_is_flagged() -> None:
    for attack in ("many answers", "an answer without the nonce", "two returns from one call"):
        verdict = grade(textwrap.dedent(FORGE[attack]), CALLS, BEST)
        assert "tamper" in verdict.detail, (attack, verdict.detail)


# Harm: what a program does to the machine (row 30).

HARM = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb of sessions": """
        import os
        while True:
            try:
                if os.fork() == 0: os.setsid()
            except OSError: pass
        """,
    "threads": """
        import threading, time
        while True:
            try: threading.Thread(target=time.sleep, args=(60,)).start()
            except RuntimeError: pass
        """,
    "much memory": "x = [bytearray(10 << 30)]",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory of many": """
        import os
        for _ in range(5):
            try:
                if os.fork() == 0: break
            except OSError: break
        x = []
        while True:
            try: x.append(bytearray(b"1" * (1 << 20)))
            except MemoryError: pass
        """,
    "memory that no process maps": """
        import ctypes, mmap, os
        kept = []
        while True:
            try:
                kept.append(os.memfd_create("x"))
                os.write(kept[-1], b"1" * (1 << 20))
            except OSError: pass
            ctypes.CDLL(None).shmget(0, 1 << 28, 0o1700)
        """,
    "a long line": "print('x' * (1 << 26))",
    "much output": "while True: print('x' * 10_000)",
    "much error output": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "much on every handle": """
        import os
        while True:
            for handle in range(1, 12):
                try: os.write(handle, b'x' * 65536)
                except OSError: pass
        """,
    "a full disk": """
        import os
        for folder in ("/tmp", "/", "/dev", "/dev/shm", "/var/tmp", os.path.dirname(os.__file__)):
            try:
                with open(folder + "/surefoot-attack-fill", "wb") as f:
                    while True: f.write(bytes(1 << 20))
            except OSError: pass
        """,
    "a disk of small files": """
        n = 0
        while n < 200_000:
            try: open(f"/tmp/surefoot-attack-{n}", "x").close()
            except OSError: break
            n += 1
        """,
    "a sparse file": """
        import os
        with open("/tmp/surefoot-attack-sparse", "wb") as f: os.truncate(f.fileno(), 1 << 40)
        """,
    "deep folders": """
        import os
        try:
            while True:
                os.mkdir("d" * 200); os.chdir("d" * 200)
        except OSError: pass
        """,
    "an orphan that writes later": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(0.5)
                open("/tmp/surefoot-attack-orphan", "w").write("late")
                time.sleep(60)
            os._exit(0)
        """,
    "time": "while True: pass",
    "time without a signal": """
        import signal
        for number in signal.valid_signals():
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        while True: pass
        """,
    "sleep": "import time\ntime.sleep(3600)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "waiting for what never comes": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "signals to everybody": """
        import os, signal
        for number in signal.valid_signals():
            if number in (signal.SIGKILL, signal.SIGSTOP): continue
            for pid in (1, 0, -1):
                try:
                    signal.signal(number, signal.SIG_IGN)
                    os.kill(pid, number)
                except OSError: pass
        for pid in (*range(2, 5000), -1):
            if pid != os.getpid():
                try: os.kill(pid, signal.SIGKILL)
                except OSError: pass
        os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGSTOP)
        """,
    "its supervisor's memory": """
        import ctypes, os
        for path in ("/proc/1/mem", "/proc/1/fd", "/proc/1/environ", "/proc/1/root/etc/passwd"):
            try: os.open(path, os.O_RDWR); print("opened", path)
            except OSError: pass
        ctypes.CDLL(None).ptrace(16, 1, 0, 0)
        """,
    "new namespaces and mounts": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for flags in (0x10000000, 0x10020000, 0x00020000, 0x40000000):
            if libc.unshare(flags) == 0: print("unshared", flags)
        libc.mount(b"none", b"/", None, 32, None)
        libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"size=10g")
        libc.sethostname(b"taken", 5)
        libc.chroot(b"/")
        """,
    "higher limits": """
        import resource
        for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU):
            try: resource.setrlimit(kind, (-1, -1)); print("raised", kind)
            except (OSError, ValueError): pass
        """,
    "settings of the kernel": """
        import os
        for path in ("/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/hostname",
                     "/proc/sysrq-trigger", "/proc/self/uid_map", "/sys/power/state"):
            try: open(path, "w").write("0"); print("wrote", path)
            except OSError: pass
        """,
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a compiler bomb": "x = " + "(" * 300 + "1" + ")" * 300 + "\nexec('1' + '+1' * 10**6)",
    "a number bomb": "print(len(str(9 ** 9 ** 9)))",
}


@pytest.mark.fault(30)
@needs_namespaces
@pytest.mark.parametrize("attack", HARM)
def test_harm_is_contained(attack: str) -> None:
    start = time.monotonic()
    verdict = grade(textwrap.dedent(HARM[attack]), STREAMS, Tier.NAMESPACES, fraction=False)
    assert time.monotonic() - start < CodeOptions(**LIMITS).deadline
    assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, 0.0)


@pytest.mark.fault(30)
@needs_namespaces
def test_an_attack_inside_a_called_function_is_contained() -> None:
    for attack in ("fork bomb", "memory bit by bit", "sleep", "much on every handle"):
        body = textwrap.indent(textwrap.dedent(HARM[attack]), "    ")
        verdict = grade(f"def solve(n):\n{body}\n", CALLS, Tier.NAMESPACES, fraction=False)
        assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, 0.0), attack


@pytest.mark.fault(30)
@needs_namespaces
def test_a_disk_that_is_full_by_one_test_costs_only_its_program() -> None:
    assert grade(textwrap.dedent(HARM["a full disk"]), STREAMS, Tier.NAMESPACES).value == 0.0
    assert grade(RIGHT, STREAMS, Tier.NAMESPACES).value == 1.0


# Secrets: rows whose answer lies on the machine.


@dataclass(frozen=True)
class Secret:
    """A program that prints what the host has, and what that is."""

    program: str
    value: str


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Secret]]:
    monkeypatch.setenv("SUREFOOT_SECRET", "of the environment")
    path = tmp_path / "key"
    path.write_text("of a file")
    for folder in (path, *tmp_path.parents[:3], tmp_path):
        if folder.owner() == Path.home().owner():
            folder.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0surefoot-attack-{os.getpid()}")
        local.listen()
        connect = "import socket\nfamily, place = {}\ns = socket.socket(family)\ns.connect(place)\n"
        port = server.getsockname()[1]
        abstract = f"\\0surefoot-attack-{os.getpid()}"
        yield {
            "environment": Secret(
                "import os\nprint(os.environ['SUREFOOT_SECRET'])", "of the environment"
            ),
            "file": Secret(f"print(open({str(path)!r}).read())", "of a file"),
            "root of a process": Secret(
                f"print(open('/proc/{os.getpid()}/root{path}').read())", "of a file"
            ),
            "its parent's environment": Secret(
                f"print('of the' if b'HOME' in open('/proc/{os.getpid()}/environ', 'rb').read() "
                "else 0)",
                "of the",
            ),
            "network": Secret(
                connect.format(f"socket.AF_INET, ('127.0.0.1', {port})") + "print('connected')",
                "connected",
            ),
            "local socket": Secret(
                connect.format(f"socket.AF_UNIX, '{abstract}'") + "print('connected')", "connected"
            ),
            "process": Secret(f"import os\nos.kill({os.getpid()}, 0)\nprint('seen')", "seen"),
            "users": Secret("print('root' in open('/etc/passwd').read())", "True"),
            "name": Secret("import socket\nprint(socket.gethostname())", socket.gethostname()),
        }


@pytest.mark.fault(30)
@needs_namespaces
def test_secrets_of_the_machine_stay_there(secrets: Mapping[str, Secret]) -> None:
    for name, secret in secrets.items():
        tests = [{"input": "", "output": secret.value}]
        assert grade(secret.program, tests, Tier.NAMESPACES).value == 0.0, name


def test_less_than_the_boundary_does_not_keep_them(secrets: Mapping[str, Secret]) -> None:
    """The programs above do work, and so the lower tiers must be allowed by name."""
    for name, secret in secrets.items():
        tests = [{"input": "", "output": secret.value}]
        expected = 0.0 if name == "environment" else 1.0
        assert grade(secret.program, tests, Tier.GUARDED).value == expected, name


# The same through a run's grader: real workers, deadlines, deaths (row 28).


@dataclass(frozen=True)
class Entry:
    use: str = "code"
    weight: float = 1.0
    name: str | None = None
    timeout: float = 10.0
    price: float | None = None
    retries: int = 1
    options: Mapping[str, Any] = field(default_factory=lambda: dict(LIMITS))


def group(programs: list[str], tests: Any = STREAMS) -> Group:
    prompt = Prompt("r", 0, (1,), "q", None, "code", None, {"tests": tests})
    return Group(
        prompt,
        tuple(
            Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, i, f"```python\n{program}\n```")
            for i, program in enumerate(programs)
        ),
    )


def scores(grader: Grader, programs: list[str], tests: Any = STREAMS) -> tuple[Score, ...]:
    (graded,) = grader.score([group(programs, tests)])
    return graded.scores or ()


RIGHT = "print({3: 'q7-first', 4: 918273645}[int(input())])"


@pytest.mark.fault(29, 30)
@needs_namespaces
def test_a_batch_with_attacks_scores_everybody_else_and_is_not_missing() -> None:
    programs = [RIGHT, *map(textwrap.dedent, list(HARM.values())[:4]), RIGHT]
    with Grader([Entry()]) as grader:
        found = scores(grader, programs)
        assert [score.value for score in found] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        counts = grader.counts()
        assert counts["reward_failures"] == 0.0 and counts["reward_breaker"] == 0.0
        bad = scores(grader, [RIGHT], [{"input": "1"}])
        assert bad[0].status is ScoreStatus.UNSCORABLE


@pytest.mark.fault(28)
def test_a_sandbox_that_cannot_start_is_missing_and_never_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox_walls, "interpreter", lambda script: ("/no/such/python", *script))
    with caplog.at_level(logging.ERROR), Grader([Entry()], allow=("unisolated_code",)) as grader:
        found = scores(grader, [RIGHT, "print(1)", RIGHT])
    assert [score.status for score in found] == [ScoreStatus.INFRA_ERROR] * 3
    assert "did not start" in caplog.text


@needs_namespaces
def test_a_killed_worker_takes_its_box_with_it() -> None:
    def below(pid: int) -> list[int]:
        try:
            listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [int(child) for child in listed]

    with Grader([Entry()]) as grader:
        assert scores(grader, [RIGHT])[0].value == 1.0
        assert grader._workers is not None
        nursery = grader._workers.pid
        pid = os.fork()
        if pid == 0:  # beside the blocking call: kill every worker while its program sleeps
            time.sleep(0.7)
            for worker in below(nursery):
                os.kill(worker, signal.SIGKILL)
            os._exit(0)
        sleeper = "import time\ntime.sleep(1.5)\n" + RIGHT
        found = scores(grader, [sleeper])
        os.waitpid(pid, 0)
        assert found[0].value == 1.0  # tried once more
    assert inside() == []
