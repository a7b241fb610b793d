"""The arrows of the house: which room may import which, and where torch may be imported.

Reads the imports with `ast`, so that a room is judged without being run. The checker itself is
tested on planted violations first.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "surefoot"
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 65

COMMON = {"errors", "records", "statistics", "recipe", "draws"}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "draws": {"errors"},
    "records": {"errors", "draws"},
    "statistics": {"errors", "draws"},
    "methods": {"errors"},
    "objective": {"errors"},
    "recipe": {"errors", "methods", "draws"},
    "models": COMMON,
    "data": COMMON,
    "rollout": COMMON | {"models"},
    "reward": COMMON | {"models"},
    "learner": COMMON | {"objective", "methods", "models"},
    "loops": COMMON
    | {"data", "rollout", "reward", "learner", "objective", "methods"}
    | {"models", "run", "doctor", "plan"},
    "run": COMMON,
    "audit": COMMON | {"data", "rollout", "reward", "models", "report"},
    "plan": COMMON | {"methods", "report"},
    "doctor": COMMON | {"run", "methods", "objective"},
    "compare": COMMON | {"loops", "run", "methods", "plan", "doctor", "report"},
    "report": COMMON | {"run", "doctor"},
}
EVERYTHING = {"__init__", "__main__", "cli"}

# No torch when these are imported; a lazy import inside a function is allowed where noted.
TORCH_FREE = {"errors", "draws", "records", "statistics", "methods", "recipe", "data", "reward"}
TORCH_FREE |= {"plan", "doctor", "report", "run", *EVERYTHING}
LAZY_TORCH = {"cli.py", "run/trackers.py", "doctor/replay.py"}
# A reward model is a model; the rest of reward/ starts without torch.
TORCH_ALLOWED = {"run/checkpoint.py", "reward/model.py"}
CHECKPOINT_USERS = {"loops", "cli"}
THIRD_PARTY = {"methods": set(), "objective": {"torch"}, "recipe": {"pydantic", "yaml"}}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, its line, and whether it runs at import."""

    module: str
    line: int
    eager: bool
    typing_only: bool = False


def imports(source: str, path: str) -> Iterator[Import]:
    """Every module that `source` (the file at `path` in the package) imports, anywhere."""
    yield from _visit(ast.parse(source), path, eager=True, typing_only=False)


def _visit(node: ast.AST, path: str, *, eager: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, eager, typing_only)
        elif isinstance(child, ast.ImportFrom):
            for module in _from(child, path):
                yield Import(module, child.lineno, eager, typing_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                wrapped = ast.Module([part], [])
                yield from _visit(wrapped, path, eager=False, typing_only=True)
            for part in child.orelse:
                wrapped = ast.Module([part], [])
                yield from _visit(wrapped, path, eager=eager, typing_only=typing_only)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _visit(child, path, eager=eager and not inside, typing_only=typing_only)


def _from(node: ast.ImportFrom, path: str) -> list[str]:
    module = node.module or ""
    if node.level:
        parts = ["surefoot", *path.removesuffix(".py").split("/")]
        home = parts[: len(parts) - node.level]
        module = ".".join([*home, module]) if module else ".".join(home)
    # `from surefoot import draws` and `from surefoot.run import checkpoint` name modules.
    return [f"{module}.{alias.name}" for alias in node.names]


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def violations(source: str, path: str) -> list[str]:
    """What the file at `path` (relative to the package) does against the house's rules."""
    room = room_of(path)
    found: list[str] = []
    if room not in ARROWS and room not in EVERYTHING:
        return [f"{path}: {room} is no room of the design"]
    for item in imports(source, path):
        where = f"{path}:{item.line}"
        parts = item.module.split(".")
        if parts[0] == "surefoot":
            found += [f"{where}: {problem}" for problem in _arrow(room, path, parts, item)]
        elif parts[0] in ("torch", "transformers"):
            found += [f"{where}: {problem}" for problem in _torch(room, path, parts[0], item)]
        if room in THIRD_PARTY and parts[0] not in sys.stdlib_module_names | {"surefoot"}:
            allowed = THIRD_PARTY[room]
            if parts[0] not in allowed:
                found.append(f"{where}: {room} imports {parts[0]}")
    return found


def _arrow(room: str, path: str, parts: list[str], item: Import) -> list[str]:
    target = parts[1] if len(parts) > 1 else ""
    if room in EVERYTHING:
        lazy_only = room == "__init__" and target not in ("errors",)
        return [f"{room} imports {target} eagerly"] if lazy_only and item.eager else []
    if target.startswith("__") and target.endswith("__"):
        return []
    problems = []
    if target != room and target not in ARROWS[room]:
        problems.append(f"{room} imports {target or 'surefoot itself'}")
    if parts[1:3] == ["run", "checkpoint"] and room not in CHECKPOINT_USERS | {"run"}:
        problems.append(f"{room} imports run/checkpoint")
    inside_run = room == "run" and path != "run/checkpoint.py"
    if inside_run and parts[1:3] == ["run", "checkpoint"] and item.eager:
        problems.append("the rest of run imports run/checkpoint at import")
    if room == "doctor" and target == "objective" and (item.eager or path != "doctor/replay.py"):
        problems.append("doctor imports objective outside a function of replay.py")
    return problems


def _torch(room: str, path: str, name: str, item: Import) -> list[str]:
    if room not in TORCH_FREE or path in TORCH_ALLOWED or item.typing_only:
        return []
    if item.eager:
        return [f"{room} imports {name} at import"]
    return [] if path in LAZY_TORCH else [f"{room} imports {name} inside a function"]


def lengths(source: str, path: str) -> list[str]:
    """Files and functions that have outgrown one subject."""
    found = []
    count = len(source.splitlines())
    if count > MAX_FILE_LINES:
        found.append(f"{path}: {count} lines, the limit is {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            size = node.end_lineno - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {size} lines")
    return found


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_every_arrow_points_the_right_way(path: str) -> None:
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize("path", FILES)
def test_files_and_functions_have_one_subject(path: str) -> None:
    assert lengths((PACKAGE / path).read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize("path", FILES)
def test_every_module_says_what_it_owns(path: str) -> None:
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} has no docstring"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("objective/kl.py", "from surefoot.methods import KL"),
        ("objective/kl.py", "import numpy"),
        ("methods/table.py", "import torch"),
        ("methods/table.py", "from surefoot.recipe import Recipe"),
        ("methods/table.py", "from surefoot.records import Score"),
        ("recipe/load.py", "from surefoot import records"),
        ("recipe/load.py", "import torch"),
        ("data/build.py", "from surefoot.models import load"),
        ("data/build.py", "def f():\n    from ..models import load"),
        ("models/load.py", "import surefoot.data.stream"),
        ("rollout/local.py", "from surefoot.learner import Scorer"),
        ("reward/grader.py", "from surefoot.objective import group"),
        ("learner/update.py", "from surefoot.loops import online"),
        ("learner/update.py", "from surefoot import train"),
        ("run/ledger.py", "import torch"),
        ("run/ledger.py", "class A:\n    import torch.nn as nn"),
        ("run/ledger.py", "def f():\n    import torch"),
        ("run/ledger.py", "from surefoot.run import checkpoint"),
        ("run/ledger.py", "from .checkpoint import save"),
        ("report/page.py", "from surefoot.run.checkpoint import load_latest"),
        ("report/page.py", "from surefoot.loops import online"),
        ("plan/memory.py", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("plan/memory.py", "from surefoot.run import read"),
        ("doctor/rules.py", "def f():\n    from surefoot.objective import kl"),
        ("doctor/replay.py", "from surefoot.objective import kl"),
        ("audit/reward.py", "from surefoot.loops import online"),
        ("compare/budget.py", "from surefoot.learner import update"),
        ("loops/online.py", "from surefoot.compare import budget"),
        ("errors.py", "from surefoot.records import Score"),
        ("statistics.py", "from surefoot.run import read"),
        ("records.py", "import torch"),
        ("__init__.py", "from surefoot.loops.entry import train"),
        ("__init__.py", "import torch"),
        ("cli.py", "import torch"),
        ("helpers/misc.py", "x = 1"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert violations(source, path) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("objective/kl.py", "import math\nimport torch\nfrom surefoot.errors import SurefootError"),
        ("data/build.py", "from surefoot import draws, records, statistics\nimport numpy"),
        ("data/build.py", "from surefoot.recipe import Recipe\nfrom .stream import Stream"),
        ("data/build.py", "from surefoot import __version__"),
        ("reward/model.py", "from surefoot.models import load"),
        ("loops/online.py", "import torch\nfrom surefoot.run.checkpoint import save"),
        ("run/checkpoint.py", "import torch"),
        ("run/trackers.py", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        ("doctor/replay.py", "def f():\n    from surefoot.objective import kl"),
        (
            "__init__.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from surefoot.loops.entry import train",
        ),
        ("cli.py", "def f():\n    import torch\n    from surefoot.run.checkpoint import save"),
        ("models/load.py", "import torch\nimport transformers"),
    ],
)
def test_what_the_design_allows_is_not_found(path: str, source: str) -> None:
    assert violations(source, path) == []


def test_long_files_and_functions_are_found() -> None:
    assert lengths("x = 1\n" * (MAX_FILE_LINES + 1), "a.py") != []
    assert lengths("x = 1\n" * MAX_FILE_LINES, "a.py") == []
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert lengths(f"def f():\n{body}", "a.py") != []
    assert lengths("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1), "a.py") == []


@pytest.mark.parametrize(
    "statement",
    [
        "import surefoot; surefoot.Recipe, surefoot.Score",
        "import surefoot.cli",
        "import surefoot.recipe",
        "import surefoot.methods",
        "import surefoot.records, surefoot.draws, surefoot.errors",
    ],
)
def test_no_torch_is_loaded(statement: str) -> None:
    check = f"{statement}\nimport sys\nassert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
