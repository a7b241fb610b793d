"""The command line: verbs and options frozen, exit codes, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from surefoot.cli import app
from surefoot.methods import rows

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
data: {source: addition, max_operand: 9}
reward: numeric
method: rloo
run: {steps: 2}
"""

# A stand-in for the room that does the work, so that only the command line is tested.
STAND_IN = """
import sys, types
entry = types.ModuleType("surefoot.loops.entry")
class Result:
    summary = types.SimpleNamespace(first=None)
    path = None
    def table(self): return "accuracy 0.5"
    def to_json(self): return {{"eval/accuracy": 0.5}}
def train(recipe, overrides):
    print("train", recipe, overrides)
    {body}
    return Result()
def evaluate(target, overrides, *, checkpoint):
    print("eval", target, overrides, checkpoint)
    return Result()
def export(run, dest, checkpoint, *, merge):
    print("export", run, dest, checkpoint, merge)
entry.train, entry.evaluate, entry.export = train, evaluate, export
sys.modules["surefoot.loops"] = types.ModuleType("surefoot.loops")
sys.modules["surefoot.loops.entry"] = entry
sys.argv = ["surefoot", *{argv!r}]
from surefoot import errors
from surefoot.cli import main
main()
"""


def command(*argv: str, cwd: Path = ROOT, body: str = "pass") -> subprocess.CompletedProcess[str]:
    code = STAND_IN.format(argv=list(argv), body=body)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "first.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def surface_of(group: Any) -> dict[str, str]:
    """Each verb's arguments and options; a verb of verbs has its own lines."""
    found: dict[str, str] = {}
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            found |= {f"{name} {inner}": opts for inner, opts in surface_of(verb).items()}
        else:
            found[name] = " ".join("/".join(parameter.opts) for parameter in verb.params)
    return found


def test_the_verbs_and_their_options() -> None:
    group = typer.main.get_command(app)
    assert surface_of(group) == {
        "audit data": (
            "file --out --kind --column --answer-format --model --max-tokens --max-invalid --eval "
            "--verifier --trusted --flips --fix --fix-flips --json"
        ),
        "audit reward": (
            "recipe overrides --out --rows --pilot --no-pilot --solutions --form --accept-at "
            "--max-calls --json"
        ),
        "train": "recipe overrides",
        "eval": "target overrides --checkpoint --json",
        "export": "run dest --checkpoint --merge --pairs --demonstrations",
        "methods": "--json",
        "env": "--json",
    }
    assert [opt for parameter in group.params for opt in parameter.opts] == ["--version"]


def test_version_and_help_need_no_verb() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")
    done = command("--help")
    assert done.returncode == 0
    for verb in ("train", "eval", "export", "methods", "env"):
        assert verb in done.stdout


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")


def test_methods_prints_one_plain_line_a_row_when_piped() -> None:
    done = command("methods")
    assert done.returncode == 0
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(rows())
    assert "gate clip(low 0.2, high 0.28)" in lines["dapo"]
    assert "baseline leave_one_out" in lines["rloo"]
    assert "gate clip(low 0.3297, high 0.4918)" in lines["gmpo"]
    assert "baseline" not in lines["reinforce"]


def test_methods_as_json() -> None:
    table = json.loads(command("methods", "--json").stdout)
    assert table["dapo"]["type"] == "method"
    assert table["dapo"]["differs"]["keep"]["kind"] == "informative"
    assert table["grpo"]["fields"]["kl"]["coef"] == 0.04


def test_env_as_json() -> None:
    facts = json.loads(command("env", "--json").stdout)
    assert facts["cpus"] >= 1
    assert facts["torch"]["threads"] >= 1
    assert set(facts["extras"]) == {"smollm2", "tasks", "plot", "lora", "judge", "audit", "trl"}


def test_overrides_in_both_spellings(recipe: Path) -> None:
    done = command(
        "train", str(recipe), "run.seed=3", "--optim.learning_rate=1e-5", "--run.steps", "4"
    )
    assert done.returncode == 0, done.stderr
    assert "'run.seed=3', '--optim.learning_rate=1e-5', '--run.steps=4'" in done.stdout


def test_eval_and_export_hand_on_their_arguments() -> None:
    done = command("eval", "runs/a", "rollout.rows=4", "--checkpoint", "20")
    assert "eval runs/a ['rollout.rows=4'] 20" in done.stdout
    assert "accuracy 0.5" in done.stdout
    done = command("eval", "runs/a", "--json")
    assert json.loads(done.stdout.partition("\n")[2]) == {"eval/accuracy": 0.5}
    done = command("export", "runs/a", "out")
    assert "export runs/a out None False" in done.stdout


def test_our_errors_are_one_message_and_exit_code_2(recipe: Path) -> None:
    done = command("train", str(recipe), "optim.learning_rat=1e-5")
    assert done.returncode == 2
    assert "did you mean 'learning_rate'" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("train", str(recipe.parent / "nowhere.yaml"))
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise errors.Interrupted('stopped by a signal')", 75),
        ("raise errors.StoppedOnFinding('no signal for 10 steps')", 3),
        ("raise errors.DataError('line 3 is broken')", 2),
        ("raise KeyboardInterrupt", 75),
    ],
)
def test_the_exit_code_says_what_a_scheduler_may_do(recipe: Path, body: str, code: int) -> None:
    done = command("train", str(recipe), body=body)
    assert done.returncode == code
    assert done.stderr.startswith("surefoot: ")
    assert "Traceback" not in done.stderr


def test_a_bug_leaves_its_traceback_in_a_named_file(recipe: Path, tmp_path: Path) -> None:
    done = command("train", str(recipe), cwd=tmp_path, body="raise KeyError('oops')")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "surefoot-traceback.txt" in done.stderr
    assert "KeyError: 'oops'" in (tmp_path / "surefoot-traceback.txt").read_text()


def test_the_traceback_goes_into_the_run_directory_if_there_is_one(
    recipe: Path, tmp_path: Path
) -> None:
    body = "import os; os.makedirs('runs/first'); raise KeyError('oops')"
    done = command("train", str(recipe), cwd=tmp_path, body=body)
    assert done.returncode == 1
    assert "runs/first/surefoot-traceback.txt" in done.stderr
    assert (tmp_path / "runs/first/surefoot-traceback.txt").is_file()
