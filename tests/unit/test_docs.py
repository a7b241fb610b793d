"""The pages say what the code says, and the examples are recipes that load."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from surefoot.errors import SurefootError
from surefoot.methods import online_rows, resolve
from surefoot.objective import group
from surefoot.recipe import load
from surefoot.recipe.stages import load_chain

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_parts_of_the_pages_are_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generate["main"](check=True) == 0


def test_a_stale_page_is_noticed() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = "<!-- generated: methods -->\nold\n<!-- end -->"
    assert "leave_one_out" in generate["filled"](stale)
    assert "old" not in generate["filled"](stale)


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("examples/*.yaml")), ids=lambda p: p.name)
def test_every_example_is_a_recipe(recipe: Path) -> None:
    chain = load_chain(recipe)
    parts = [load(recipe)] if chain is None else [stage.recipe for stage in chain.stages]
    assert all(part.run.steps or part.run.epochs for part in parts)


def test_links_in_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


BUGS = runpy.run_path(str(ROOT / "docs" / "bug_facts.py"))["BUGS"]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.reports)
def test_every_reported_fault_has_a_test_that_exists_or_a_feature_that_owes_it(bug: Any) -> None:
    assert bug.tests or bug.owed
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in functions_of(ROOT / "tests" / file), test


GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
FAULTS = runpy.run_path(str(ROOT / "docs" / "fault_facts.py"))["FAULTS"]
MARKED = """
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.fault(9)]

@pytest.mark.fault(3, 4)
@pytest.mark.parametrize("x", [1, 2])
def test_both(x): ...

@pytest.mark.fault(12)
class TestInside:
    @pytest.mark.fault(1)
    async def test_deep(self): ...

def test_row_07_by_its_name(): ...

def helper(): ...
"""


def collected(folder: Path, text: str) -> dict[int, list[str]]:
    (folder / "unit").mkdir(exist_ok=True)
    (folder / "unit" / "test_some.py").write_text(text, encoding="utf-8")
    found = GENERATE["fault_tests"](folder)
    assert {test.file for tests in found.values() for test in tests} <= {"unit/test_some"}
    return {row: [test.name for test in tests] for row, tests in found.items()}


def test_tests_of_faults_are_found_by_name_and_by_marker(tmp_path: Path) -> None:
    everywhere = ["test_both", "test_deep", "test_row_07_by_its_name"]
    assert collected(tmp_path, MARKED) == {
        1: ["test_deep"],
        3: ["test_both"],
        4: ["test_both"],
        7: ["test_row_07_by_its_name"],
        9: everywhere,
        12: ["test_deep"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.fault\ndef test_a(): ...",
        "@pytest.mark.fault()\ndef test_a(): ...",
        "@pytest.mark.fault(1, ROW)\ndef test_a(): ...",
        "@pytest.mark.fault(row=1)\ndef test_a(): ...",
        "@pytest.mark.fault(1)\ndef helper(): ...",
        "CASE = pytest.param(1, marks=pytest.mark.fault(1))",
    ],
)
def test_a_marker_that_nothing_reads_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"tests/unit/test_some\.py:1: this marker is not read"):
        collected(tmp_path, text)


def test_the_matrix_has_36_rows_and_each_has_a_test_that_exists() -> None:
    assert list(FAULTS) == list(range(1, 37))
    found = GENERATE["fault_tests"](ROOT / "tests")
    table = GENERATE["fault_table"](FAULTS, found).splitlines()[2:]
    assert [int(line.split("|")[1]) for line in table] == list(FAULTS)
    for row, line in zip(FAULTS, table, strict=True):
        assert line.count(" | ") == 4, f"row {row} has a bar in a cell"
        for test in found[row]:
            path = ROOT / "tests" / f"{test.file}.py"
            assert f"[{test.file}](../tests/{test.file}.py)" in line
            assert test.name in functions_of(path)


def test_a_row_without_a_test_and_a_test_without_a_row_stop_the_page() -> None:
    found = GENERATE["fault_tests"](ROOT / "tests")
    with pytest.raises(ValueError, match="no test puts the fault of row 12, 36 in"):
        GENERATE["fault_table"](FAULTS, {**found, 12: [], 36: []})
    with pytest.raises(ValueError, match=r"there is no row 37 .* it has 1 to 36"):
        GENERATE["fault_table"](FAULTS, {**found, 37: found[12]})


def test_what_the_slow_tier_found_is_quoted_and_what_is_not_there_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    monkeypatch.setitem(generate["fault_figures"].__globals__, "ROOT", tmp_path)
    assert generate["fault_figures"]() == "(none is there yet)"
    (tmp_path / "bench" / "results").mkdir(parents=True)
    text = "7 kills,\n0 differ\n\nmore of it\n"
    (tmp_path / "bench" / "results" / "kills.txt").write_text(text, encoding="utf-8")
    said = "* [kills](../bench/results/kills.txt): 7 kills, 0 differ"
    assert generate["fault_figures"]() == said


def cells(page: str, heading: str) -> Iterator[list[str]]:
    """The body rows of the tables under a heading, cell by cell."""
    text = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| subject"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def settings(cell: str) -> dict[str, Any]:
    """The settings in backticks: `gate.low=0.2 gate.high=0.3` and `gate: {low: 0.2}` alike."""
    found: dict[str, Any] = {}
    for span in re.findall(r"`([^`]*)`", cell):
        for word in span.split() if "=" in span else ():
            path, _, value = word.partition("=")
            field, _, option = path.partition(".")
            inner = found.setdefault(field, {})
            # YAML 1.1 reads 1e-6 as a word.
            inner[option] = float(value) if value[0].isdigit() else value
        loaded = yaml.safe_load(span) if ": " in span else None
        if isinstance(loaded, Mapping):
            found.update(_flat(loaded))
    return found


def _flat(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """`kl.controller: {...}` is a key inside kl."""
    out: dict[str, Any] = {}
    for key, value in loaded.items():
        field, _, option = key.partition(".")
        out[field] = {option: value} if option else value
    return out


def accepted(name: str, changes: Mapping[str, Any]) -> bool:
    try:
        resolve({"name": name, **changes})
    except SurefootError:
        return False
    return True


@pytest.mark.parametrize("library", ["verl", "OpenRLHF", "NeMo-RL"])
def test_settings_on_the_page_of_differences_are_accepted(library: str) -> None:
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    tried = 0
    for row in cells(page, library):
        changes = settings(row[-1])
        if changes:
            tried += 1
            assert any(accepted(name, changes) for name in online_rows()), (row[0], changes)
    assert tried >= 2


def test_settings_are_read() -> None:
    assert settings("`gate.low=0.2 gate.high=0.3`, `scale.eps=1e-6`") == {
        "gate": {"low": 0.2, "high": 0.3},
        "scale": {"eps": 1e-6},
    }
    assert settings("`reduce: token_mean` and none") == {"reduce": "token_mean"}
    assert not accepted("grpo", {"gate": {"lo": 0.2}})


def test_the_numbers_beside_nemo() -> None:
    """Odd one out: the advantages of `grpo` and `rloo`, and theirs where no rounding decides."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    table = [row for row in cells(page, "NeMo-RL") if row[0].startswith(("one ", "four "))]
    assert len(table) == 6
    count = {"one": 1, "four": 4, "seven": 7}
    for row in table:
        first, second = (part.split() for part in row[0].split(", "))
        rewards = [float(first[1])] * count[first[0]] + [float(second[1])] * count[second[0]]
        reward_PG = torch.tensor([rewards], dtype=torch.float64)
        valid_PG = torch.ones_like(reward_PG, dtype=torch.bool)
        ours = {
            2: group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=1, eps=1e-4),
            3: group.leave_one_out(reward_PG, valid_PG=valid_PG),
        }
        for column, advantage_PG in ours.items():
            want = [round(float(advantage_PG[0, place]), 3) for place in (0, -1)]
            assert [float(x) for x in row[column].split(", ")] == pytest.approx(want), row
        if set(rewards) == {0.0, 1.0}:
            theirs = [_without_itself(rewards, place) for place in (0, -1)]
            assert [float(x) for x in row[1].split(", ")] == pytest.approx(theirs, abs=1e-3)


def _without_itself(rewards: list[float], place: int) -> float:
    others = torch.tensor([r for i, r in enumerate(rewards) if i != place % len(rewards)])
    gap, spread = rewards[place] - float(others.mean()), float(others.std())
    return gap / (spread + 1e-6) if spread > 0 else gap


def test_numbers_in_the_prose_of_the_methods() -> None:
    def scored(rewards: list[float], eps: float, ddof: int = 1) -> float:
        reward_PG = torch.tensor([rewards], dtype=torch.float64)
        valid_PG = torch.ones_like(reward_PG, dtype=torch.bool)
        return float(group.group_normalized(reward_PG, valid_PG=valid_PG, ddof=ddof, eps=eps).max())

    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    said = " ".join(page.split())
    assert "of 0.62 with eps 1e-4, and of 0.707 with eps 0" in said
    assert scored([0.5, 0.501], 1e-4) == pytest.approx(0.62, abs=0.005)
    assert scored([0.5, 0.501], 0.0) == pytest.approx(0.7071, abs=1e-4)
    assert "(G - 1) / sqrt(G): 2.5 at 8, 5.5 at 32" in said
    assert scored([1.0] + [0.0] * 7, 0.0) == pytest.approx(2.5, abs=0.05)
    assert scored([1.0] + [0.0] * 31, 0.0) == pytest.approx(5.5, abs=0.05)
    assert "With ddof 1; 1.73 with ddof 0." in said
    assert scored([1.0, 0.0, 0.0, 0.0], 0.0) == pytest.approx(1.5)
    assert scored([1.0, 0.0, 0.0, 0.0], 0.0, ddof=0) == pytest.approx(1.73, abs=0.005)
    assert "p = 0.1: 0.66 at 4, 0.43 at 8, 0.19 at 16, 0.03 at 32" in said
    for size, chance in ((4, 0.66), (8, 0.43), (16, 0.19), (32, 0.03)):
        assert 0.1**size + 0.9**size == pytest.approx(chance, abs=0.005)
