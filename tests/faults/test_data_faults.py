"""Data that is broken, mislabelled, too long or hostile: refused or listed, never trained on.

Rows 31 to 34 of the fault matrix, through the loader that a run uses and through `audit data`.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.tiny import save_tiny

from surefoot.audit.data import DataOptions, audit_data
from surefoot.audit.measure import lengths_of
from surefoot.audit.report import AuditReport, Finding, Severity
from surefoot.data import build
from surefoot.errors import DataError
from surefoot.models.load import load_model
from surefoot.recipe import Recipe, load

ROOT = Path(__file__).resolve().parents[2]
PAIRS = DataOptions(kind="pairs", flips=False, max_invalid=1.0)
PROMPTS = DataOptions(kind="prompts", max_invalid=1.0)


def finding(report: AuditReport, check: str) -> Finding:
    (found,) = [each for each in report.findings if each.check == check]
    return found


def pair(n: int, **changes: Any) -> str:
    row = {"id": f"r{n}", "prompt": f"q{n}?", "chosen": f"a{n}", "rejected": f"b{n}", **changes}
    return json.dumps({key: value for key, value in row.items() if value is not None})


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "audit", "data", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


BROKEN = [
    ('{"prompt": "q?", "chosen": ', "malformed JSON at column"),
    (pair(0, chosen=None), "the row lacks columns"),
    (pair(0, chosen=7), "a whole number, not text"),
    (pair(0, id="r1"), "id 'r1' was already used by"),
    ("[1, 2]", "a list, not an object"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_row_31_a_broken_row_is_listed_with_its_line(
    tmp_path: Path, line: str, reason: str
) -> None:
    lines = [pair(n) for n in range(1, 200)]
    lines.insert(41, line)
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    audit = audit_data(path, DataOptions(kind="pairs", flips=False, fix=out))
    found = finding(audit.report, "invalid rows")
    assert found.figures["rows"] == 1
    assert found.severity is Severity.CHANGE  # one of 200 is under the hundredth allowed
    assert f"{path}:42: " in found.text
    assert reason in found.text
    (listed,) = [
        json.loads(row)
        for row in Path(f"{out}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (listed["row"], listed["check"]) == (42, "invalid rows")
    assert len(out.read_text().splitlines()) == 199


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_row_31_pairs_without_one_side_are_not_taken_for_prompts(side: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", side: "b"}) + "\n", encoding="utf-8")
    audit = audit_data(path, DataOptions(flips=False))
    assert audit.report.verdict == "stop"
    assert finding(audit.report, "invalid rows").severity is Severity.STOP


def test_row_31_more_than_a_hundredth_stops_with_exit_code_2(tmp_path: Path) -> None:
    lines = [pair(n) for n in range(50)] + ["{"]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = command("pairs.jsonl", "--no-flips", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("STOP")
    assert "pairs.jsonl:51: malformed JSON" in done.stdout
    assert "1 of 51 rows are invalid (2.0%), more than the 1.0% allowed" in done.stdout
    assert json.loads((tmp_path / "pairs-audit/audit.json").read_text())["verdict"] == "stop"


def test_row_31_a_torn_gzip_file_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("".join(pair(n) + "\n" for n in range(900)).encode())[:-40])
    with pytest.raises(DataError, match="not a whole gzip file"):
        audit_data(path, PAIRS)


def test_row_32_a_gold_that_cannot_be_right_is_listed_and_goes(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q{n}?", "answer": n} for n in range(40)]
    rows += [{"prompt": "empty?", "answer": " "}, {"prompt": "none?", "answer": None}]
    rows += [{"prompt": "words?", "answer": "forty or so"}, {"prompt": "two?", "answer": "4 or 5"}]
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    audit = audit_data(path, DataOptions(kind="prompts", max_invalid=1.0, fix=out))
    assert finding(audit.report, "invalid rows").figures["rows"] == 1
    assert finding(audit.report, "golds").figures == {"rows": 3, "verifier": "numeric"}
    kept = [json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert kept == [f"q{n}?" for n in range(40)]
    listed = [
        json.loads(line)
        for line in Path(f"{out}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["row"] for row in listed] == [41, 42, 43, 44]
    assert "'forty or so' is not a number" in listed[2]["reason"]


def test_row_33_empty_and_long_prompts_are_filtered_with_the_template(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    limit = 60
    lengths = lengths_of(str(model), max_tokens=limit)
    fits = "1 + 1 = " * 3
    long = "1 + 1 = " * limit
    rows = [{"prompt": fits, "answer": "2"}, {"prompt": long}, {"prompt": " "}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    audit = audit_data(path, PROMPTS, lengths=lengths)
    assert finding(audit.report, "too long").figures == {"rows": 1, "limit": limit}
    assert finding(audit.report, "invalid rows").figures["rows"] == 1
    # The boundary is the length with the template, to the token.
    exact = len(lengths.encoder.encode([{"role": "user", "content": fits}]))
    assert exact > len(lengths.encoder.encode(fits))
    for allowed, left_out in ((exact, 0), (exact - 1, 1)):
        tight = lengths_of(str(model), max_tokens=allowed)
        (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
        report = audit_data(tmp_path / "one.jsonl", PROMPTS, lengths=tight).report
        assert finding(report, "too long").figures["rows"] == left_out
    # The loader of a run leaves out the same rows, and asks the engine for none of them.
    data = build(_recipe(tmp_path, model, path, limit), _template(tmp_path, model, path, limit))
    assert data.report.counts()["too_long"] == 1
    assert data.report.counts()["quarantined"] == 1
    assert data.report.counts()["train"] == 1


def _recipe(folder: Path, model: Path, path: Path, limit: int) -> Recipe:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {model}}}\n"
        f"data: {{source: {path}, skip_invalid: true, max_invalid: 1,\n"
        f"       max_prompt_tokens: {limit}}}\n"
        "reward: numeric\nmethod: rloo\nrollout: {max_new_tokens: 4}\n"
        f"run: {{dir: {folder / 'run'}, steps: 1}}\n",
        encoding="utf-8",
    )
    return load(recipe)


def _template(folder: Path, model: Path, path: Path, limit: int) -> Any:
    return load_model(_recipe(folder, model, path, limit)).template


HOSTILE = {
    "script": "<script>alert(1)</script>",
    "attribute": "'\"><img src=x onerror=alert(1)>",
    "surrogate": "half \ud83d of it",
    "right to left": "\u202eabc \u05d0\u05d1",
    "escape": "\x1b[2J\x1b[31mred",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_row_34_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    same = pair(1, prompt=f"p {text}", chosen=f"x {text}", rejected=f"x {text}")
    (tmp_path / "pairs.jsonl").write_text(f"{pair(0)}\n{same}\n", encoding="utf-8")
    done = command("pairs.jsonl", "--no-flips", "--fix", "out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    page = (tmp_path / "pairs-audit/audit.html").read_bytes().decode("utf-8")
    tags = _Tags()
    tags.feed(page)
    assert not {"script", "img"} & set(tags.opened)
    json.loads((tmp_path / "pairs-audit/audit.json").read_bytes().decode("utf-8"))
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == f"{pair(0)}\n"
    Path(tmp_path / "out.jsonl.removed.jsonl").read_bytes().decode("utf-8")


def test_row_34_nul_and_a_line_too_long_are_quarantined(tmp_path: Path) -> None:
    big = pair(2, chosen="x" * (1 << 20))
    lines = [pair(0), pair(1, prompt="a\x00b"), big, pair(3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    audit = audit_data(path, DataOptions(kind="pairs", flips=False, max_invalid=1.0))
    listed = {row["row"]: row["reason"] for row in _shown(audit.report, "invalid rows")}
    assert "NUL" in listed["2"]
    assert "more than max_line_bytes" in listed["3"]
    _, page = audit.report.write(tmp_path / "audit")
    assert page.stat().st_size < 100_000


def test_row_34_control_tokens_of_the_tokenizer_are_quarantined(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    lengths = lengths_of(str(model), max_tokens=None)
    control = load_model(_recipe(tmp_path, model, tmp_path / "x.jsonl", 9)).template.tokenizer
    bad = pair(1, chosen=f"yes{control.eos_token}")
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{pair(0)}\n{bad}\n{pair(2)}\n", encoding="utf-8")
    report = audit_data(path, PAIRS, lengths=lengths).report
    assert "1 rows have a control token" in finding(report, "control tokens").text


def _shown(report: AuditReport, check: str) -> list[dict[str, str]]:
    (table,) = [each for each in report.tables if each.title.startswith(check)]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
