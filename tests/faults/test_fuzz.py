"""Whatever is given to the command line ends in done, refused or stopped: never in a bug.

Recipes, datasets and run directories that are nearly right (`support.fuzz_*`), each read by a verb
in a process of its own. Exit code 1 is a bug. A case that asks for years is asked to stop.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuzz import Case, Odd, Outcome, counts, drawn, run, run_all
from support.fuzz_data import data_cases
from support.fuzz_recipes import plain_recipe, recipe_cases, rows_of
from support.fuzz_runs import BASES, prepare, run_cases
from support.results import write_result
from support.tiny import save_tiny

import surefoot.cli

KINDS = {"recipe": recipe_cases(), "data": data_cases(), "run": run_cases()}
FEW = {"recipe": 40, "data": 30, "run": 30}
MANY = {"recipe": 800, "data": 600, "run": 600}
CODES = ("0", "2", "3", "asked")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def bases(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return prepare(tmp_path_factory.mktemp("bases"), model)


def fuzzed(kind: str, count: int, home: Path, model: Path, bases: dict[str, Path]) -> list[Outcome]:
    cases = drawn(KINDS[kind], count, start=count)
    assert len(cases) == count
    return run_all(cases, home, model=model, bases=bases)


def assert_sound(outcomes: list[Outcome]) -> None:
    wrong = [outcome.text() for outcome in outcomes if outcome.wrongs]
    assert not wrong, f"{len(wrong)} of {len(outcomes)} cases\n\n" + "\n\n".join(wrong[:20])
    # A fuzzer whose cases are all refused at the door looks at nothing.
    assert {0, 2} <= {outcome.code for outcome in outcomes}


@pytest.mark.parametrize("kind", ["recipe", "data"])
def test_what_is_nearly_right_is_done_or_refused(kind: str, model: Path, tmp_path: Path) -> None:
    assert_sound(fuzzed(kind, FEW[kind], tmp_path, model, {}))


def test_what_happened_to_a_run_is_named_and_nothing_whole_is_lost(
    model: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    assert_sound(fuzzed("run", FEW["run"], tmp_path, model, bases))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_thousand_cases(model: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    outcomes = [
        outcome
        for kind, count in MANY.items()
        for outcome in fuzzed(kind, count, tmp_path / kind, model, bases)
    ]
    assert len(outcomes) == 2000
    assert_sound(outcomes)
    write_result("fuzz", list(table(outcomes)))


def table(outcomes: list[Outcome]) -> Iterator[str]:
    yield "Cases of tests/faults/test_fuzz.py by how they ended (make test-slow)."
    yield "0: done, 2: refused, 3: stopped on a finding; asked: ran on, and ended when asked to."
    yield "Any other end, a lost checkpoint or a changed input fails the test."
    yield ""
    yield "kind    verb                      cases" + "".join(f"{code:>7}" for code in CODES)
    total: Counter[str] = Counter()
    for (kind, verb), found in sorted(counts(outcomes).items()):
        yield _line(kind, verb, found)
        total += found
    yield _line("all", "", total)


def _line(kind: str, verb: str, found: Counter[str]) -> str:
    numbers = "".join(f"{found[code]:>7}" for code in CODES)
    return f"{kind:<8}{verb:<24}{found.total():>7}{numbers}"


# -- the fuzzer itself -----------------------------------------------------------------------------


def test_the_same_start_draws_the_same_cases_and_another_draws_others() -> None:
    one, again, other = (drawn(KINDS["data"], 8, start=start) for start in (1, 1, 2))
    assert one == again
    assert one != other
    assert len({repr(case) for case in one}) > 4


def test_a_run_that_asks_for_years_is_asked_to_stop(model: Path, tmp_path: Path) -> None:
    recipe = str(plain_recipe("sft", run__steps=10**9, run__epochs=10**9)).encode()
    files: dict[str, bytes | Odd] = {
        "recipe.yaml": recipe,
        "rows.jsonl": rows_of("demonstrations"),
    }
    outcome = run(
        Case("recipe", ("train", "recipe.yaml"), files),
        tmp_path / "case",
        model=model,
        bases={},
        patience=2.0,
    )
    assert (outcome.code, outcome.stopped, outcome.wrongs) == (75, True, ())


def test_a_lost_checkpoint_and_a_changed_input_are_seen(
    model: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    reward = b"import shutil, surefoot\nshutil.rmtree('run/checkpoints', ignore_errors=True)\n"
    reward += b"open('rows.jsonl', 'a').write('\\n')\n1 / 0\n"
    changes = ("run.steps=3", "reward.0.use=vandal.py:f", "run.allow_change=[reward]")
    case = Case("run", ("train", "recipe.yaml", *changes), {"vandal.py": reward}, base="rloo")
    outcome = run(case, tmp_path / "case", model=model, bases=bases)
    assert outcome.code == 2, outcome.text()
    assert "rows.jsonl, which was given, has changed" in outcome.wrongs
    assert "checkpoints/step_000002, which was whole, is lost or changed" in outcome.wrongs


def test_every_prepared_run_has_two_whole_checkpoints(bases: dict[str, Path]) -> None:
    from support.fuzz import whole_checkpoints

    assert set(bases) == set(BASES)
    for name, folder in bases.items():
        found = sorted(whole_checkpoints(folder / "run"))
        stages = ("stages/01_s0/", "stages/02_s1/") if name == "chain" else ("",)
        want = [f"{s}checkpoints/step_00000{n}" for s in stages for n in (1, 2)]
        assert found == want, name


# -- no catch-all ----------------------------------------------------------------------------------


def test_the_command_line_catches_nothing_but_what_it_names() -> None:
    source = Path(surefoot.cli.__file__).read_text(encoding="utf-8")
    caught = [
        ast.unparse(handler.type) if handler.type is not None else "everything"
        for handler in ast.walk(ast.parse(source))
        if isinstance(handler, ast.ExceptHandler)
    ]
    assert caught
    assert not [name for name in caught if name in ("everything", "Exception", "BaseException")]
    assert "SurefootError" in caught


def test_a_bug_ends_with_exit_code_1_and_a_traceback_that_is_named(tmp_path: Path) -> None:
    bug = (
        "import sys, surefoot.methods, surefoot.cli\n"
        "surefoot.methods.rows = lambda: 1 / 0\n"
        "sys.argv = ['surefoot', 'methods']\n"
        "surefoot.cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", bug], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "surefoot: failed: ZeroDivisionError: division by zero" in done.stderr
    assert "this is a bug; the traceback is in surefoot-traceback.txt" in done.stderr
    text = (tmp_path / "surefoot-traceback.txt").read_text(encoding="utf-8")
    assert text.startswith("Traceback") and "ZeroDivisionError" in text
