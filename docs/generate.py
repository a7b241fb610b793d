"""Fill the generated parts of the pages from the code and the fact files beside this one.

    python docs/generate.py            rewrite the pages
    python docs/generate.py --check    exit 1 if one of them is not current

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.methods import Method, describe, online_rows, rows
from surefoot.methods.built import BUILT
from surefoot.recipe.schema import SECTIONS, DataSource, RewardPart, Section

ROOT = Path(__file__).resolve().parent.parent
DOCS = Path(__file__).resolve().parent
PAGES = (
    "README.md",
    "docs/methods.md",
    "docs/recipes.md",
    "docs/differences.md",
    "docs/field_bugs.md",
    "docs/given_data.md",
    "docs/faults.md",
)
FIGURES = ("kills", "fuzz", "soak")
"""Results of the slow tier, under bench/results."""


def _facts(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / f"{name}_facts.py"))


def method_table() -> str:
    lines = ["| method | what differs from the default of its type |", "|---|---|"]
    for name, row in online_rows().items():
        lines.append(f"| `{name}` | {_words(describe(row))} |")
    return "\n".join(lines)


def offline_table() -> str:
    lines = ["| method | trains on | what differs from the default of its type |", "|---|---|---|"]
    for name, row in rows().items():
        if not isinstance(row, Method):
            lines.append(f"| `{name}` | {row.data} | {_words(describe(row)) or 'nothing'} |")
    return "\n".join(lines)


def row_sections() -> str:
    """One section a row: formula, when, what fails, where the values come from, claims."""
    facts, claims = _facts("method")["FACTS"], _facts("claim")["CLAIMS"]
    return "\n\n".join(_row_section(name, facts[name], claims) for name in online_rows())


def given_sections() -> str:
    """The same for rows that sample nothing."""
    given = _facts("method")["GIVEN"]
    return "\n\n".join(_row_section(name, facts, {}) for name, facts in given.items())


def _row_section(name: str, facts: Any, claims: Mapping[str, Any]) -> str:
    parts = [
        f"### {name}",
        f"{facts.paper}.",
        _wrapped(facts.formula, "    "),
        _wrapped(f"*Take it:* {facts.when}"),
        _wrapped(f"*Known failure:* {facts.failure}"),
    ]
    if facts.notes:
        parts.append("\n".join(_wrapped(note, "* ", "  ") for note in facts.notes))
    if facts.claims:
        told = [claims[key] for key in facts.claims]
        lines = [f'Claim: "{c.text}". **{_capital(c.verdict)}.** {c.answer}' for c in told]
        parts.append("\n".join(_wrapped(line, "* ", "  ") for line in lines))
    table = ["| value | of | source |", "|---|---|---|"]
    table += [
        f"| `{_word(fact.value)}` | `{key}` | {fact.source} |" for key, fact in facts.fields.items()
    ]
    if facts.fields:
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def _wrapped(text: str, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(
        text,
        width=105,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def claim_table() -> str:
    """Every claim, and the rows that it is told with."""
    facts, claims = _facts("method")["FACTS"], _facts("claim")["CLAIMS"]
    lines = ["| claim | verdict | answer | rows |", "|---|---|---|---|"]
    for key, claim in claims.items():
        names = ", ".join(f"`{name}`" for name in online_rows() if key in facts[name].claims)
        lines.append(f"| {claim.text} | {claim.verdict} | {claim.answer} | {names} |")
    return "\n".join(lines)


def agreement_table() -> str:
    lines = ["| what | in TRL | here | remark |", "|---|---|---|---|"]
    for found in _facts("trl")["AGREEMENTS"]:
        remarks = [found.note] if found.note else []
        if found.one_micro:
            remarks.append("only in one micro-batch")
        if found.on_policy:
            remarks.append("the gradient at one optimizer step per generation")
        trainer = {"grpo": "GRPO", "rloo": "RLOO", "gmpo": "experimental GMPO"}[found.trainer]
        settings = ", ".join(f"`{key}={value}`" for key, value in found.trl.items())
        changes = ", ".join(f"`{key}: {_recipe(value)}`" for key, value in found.ours.items())
        row = f"`{found.row}`" + (f" with {changes}" if changes else "")
        lines.append(
            f"| {found.name} | {trainer} {settings}".rstrip() + f" | {row} | {'; '.join(remarks)} |"
        )
    return "\n".join(lines)


def difference_table() -> str:
    facts = _facts("trl")
    lines = ["| subject | TRL | here | example | TRL | here |", "|---|---|---|---|---|---|"]
    for d in facts["DIFFERENCES"]:
        lines.append(
            f"| {d.subject} | {d.trl} | {d.ours} | {d.example} | {d.theirs:g} | {d.ours_value:g} |"
        )
    lines += ["", "In TRL and not here:", ""]
    lines += [f"* {name}: {what}." for name, what in facts["ABSENT"]]
    return "\n".join(lines)


def _recipe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_recipe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_recipe(item) for item in value) + "]"
    return str(value)


def bug_table() -> str:
    """Every reported fault with the tests that hold it off, or the feature that owes them."""
    lines = ["| reported | the fault | held off by |", "|---|---|---|"]
    for bug in _facts("bug")["BUGS"]:
        names = [f"`{test}`" for test in bug.tests]
        if bug.owed:
            names.append(f"owed by {bug.owed}")
        lines.append(f"| {bug.reports} | {bug.fault} | {', '.join(names)} |")
    return "\n".join(lines)


class FaultTest(NamedTuple):
    file: str
    """Under tests/, without its ending."""
    name: str


_ROW_NAME = re.compile(r"test_row_(\d+)_")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
Marks = list[tuple[int, ast.expr]]


def fault_tests(folder: Path) -> dict[int, list[FaultTest]]:
    """The tests of each row of the fault matrix, read from the sources without importing them.

    A test belongs to a row by its name (`test_row_NN_...`), or by the marker `fault` on itself, its
    class or its module. ValueError for a marker that marks no test.
    """
    found: dict[int, list[FaultTest]] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(folder).with_suffix("").as_posix()
        used: set[ast.expr] = set()
        for name, marks in _tests_in(tree.body, _module_marks(tree.body)):
            used.update(marker for _, marker in marks)
            by_name = [int(match[1]) for match in [_ROW_NAME.match(name)] if match]
            for row in sorted({*by_name, *(row for row, _ in marks)}):
                found.setdefault(row, []).append(FaultTest(file, name))
        for node in ast.walk(tree):
            if _is_marker(node) and node not in used:
                raise ValueError(
                    f"tests/{file}.py:{node.lineno}: this marker is not read; write "
                    "@pytest.mark.fault(ROW, ...) with whole numbers on a test, a class of tests "
                    "or as pytestmark"
                )
    return found


def _tests_in(body: Sequence[ast.stmt], above: Marks) -> Iterator[tuple[str, Marks]]:
    """Every test with its marks, those of its class and module included."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            own = _marks(node.decorator_list) + _module_marks(node.body)
            yield from _tests_in(node.body, above + own)
        elif isinstance(node, _Function) and node.name.startswith("test_"):
            yield node.name, above + _marks(node.decorator_list)


def _module_marks(body: Sequence[ast.stmt]) -> Marks:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            value = node.value
            return _marks(value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
    return []


def _marks(markers: Sequence[ast.expr]) -> Marks:
    found: Marks = []
    for marker in markers:
        if isinstance(marker, ast.Call) and _is_marker(marker.func) and not marker.keywords:
            rows = [a.value for a in marker.args if isinstance(a, ast.Constant)]
            if len(rows) == len(marker.args) and all(type(row) is int for row in rows):
                found += [(row, marker.func) for row in rows]
    return found


def _is_marker(node: ast.AST) -> bool:
    named = isinstance(node, ast.Attribute) and node.attr == "fault"
    return named and ast.unparse(node) == "pytest.mark.fault"


def fault_table(faults: Mapping[int, Any], tests: Mapping[int, Sequence[FaultTest]]) -> str:
    """Every row of the matrix with its tests. ValueError where one has none, or is not there."""
    for row, named in tests.items():
        if row not in faults:
            raise ValueError(
                f"tests/{named[0].file}.py::{named[0].name}: there is no row {row} in "
                f"docs/fault_facts.py; it has {min(faults)} to {max(faults)}"
            )
    bare = [str(row) for row in faults if not tests.get(row)]
    if bare:
        raise ValueError(
            f"docs/fault_facts.py: no test puts the fault of row {', '.join(bare)} in; name one "
            "test_row_NN_..., or mark one with @pytest.mark.fault(NN)"
        )
    lines = ["| row | fault | what happens | class | tests |", "|---|---|---|---|---|"]
    for row, fault in sorted(faults.items()):
        files: dict[str, list[str]] = {}
        for test in tests[row]:
            name = _ROW_NAME.sub("", test.name).removeprefix("test_")
            files.setdefault(test.file, []).append(f"`{name}`")
        links = "; ".join(
            f"[{file}](../tests/{file}.py): {', '.join(names)}" for file, names in files.items()
        )
        lines.append(f"| {row} | {fault.fault} | {fault.expected} | {fault.outcome} | {links} |")
    return "\n".join(lines)


def faults_part() -> str:
    return fault_table(_facts("fault")["FAULTS"], fault_tests(ROOT / "tests"))


def fault_figures() -> str:
    """The first paragraph of each result that there is."""
    lines = []
    for name in FIGURES:
        path = ROOT / "bench" / "results" / f"{name}.txt"
        if path.is_file():
            first = path.read_text(encoding="utf-8").strip().split("\n\n")[0]
            lines.append(f"* [{name}](../bench/results/{name}.txt): {' '.join(first.split())}")
    return "\n".join(lines) or "(none is there yet)"


def built_table() -> str:
    lines = ["| field | values that are built |", "|---|---|"]
    for field, values in BUILT.items():
        words = ", ".join(f"`{str(value).lower()}`" for value in sorted(values, key=str))
        lines.append(f"| `{field}` | {words} |")
    return "\n".join(lines)


def key_tables() -> str:
    sections: dict[str, type[Section]] = {
        "model": SECTIONS["model"],
        "data": DataSource,
        "reward": RewardPart,
        **{name: section for name, section in SECTIONS.items() if name != "model"},
    }
    parts = []
    for name, section in sections.items():
        lines = [f"### {name}", "", str(section.__doc__).strip(), "", "| key | default | meaning |"]
        lines.append("|---|---|---|")
        for key, field in section.model_fields.items():
            default = "required" if field.is_required() else _default(field)
            lines.append(f"| `{name}.{key}` | {default} | {field.description} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _words(value: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {_word(item)}" for key, item in value.items())


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        (_, kind), *options = value.items()
        inside = ", ".join(f"{name} {_word(item)}" for name, item in options)
        return f"{kind}({inside})" if inside else str(kind)
    if isinstance(value, list):
        return " + ".join(_word(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) and len(str(value)) > 8 else str(value)


PARTS: Mapping[str, Callable[[], str]] = {
    "methods": method_table,
    "offline": offline_table,
    "built": built_table,
    "keys": key_tables,
    "rows": row_sections,
    "given_rows": given_sections,
    "claims": claim_table,
    "agreements": agreement_table,
    "differences": difference_table,
    "bugs": bug_table,
    "faults": faults_part,
    "fault_figures": fault_figures,
}


def filled(text: str) -> str:
    """The page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- generated: (\w+) -->).*?(<!-- end -->)", part, text, flags=re.DOTALL)


def main(*, check: bool) -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run: make docs")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
