"""The report of an audit: the worst finding decides, and it is the same in all three forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from surefoot.audit.report import AuditReport, Finding, Severity, Table
from surefoot.errors import DataError

OK = Finding("a", Severity.OK, "fine")
INFO = Finding("b", Severity.INFO, "worth knowing")
CHANGE = Finding("c", Severity.CHANGE, "wrong", "mend it", {"rows": 3})
STOP = Finding("d", Severity.STOP, "hopeless", "start again")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ((), "go"),
        ((OK, INFO), "go"),
        ((OK, CHANGE, INFO), "go with changes"),
        ((CHANGE, STOP, OK), "stop"),
    ],
)
def test_the_worst_finding_decides(findings: tuple[Finding, ...], verdict: str) -> None:
    report = AuditReport("data", "x.jsonl", findings)
    assert report.verdict == verdict
    assert report.to_json()["verdict"] == verdict
    assert report.lines()[0].casefold().startswith(verdict)


def test_lines_go_from_the_worst_down_with_mends_under_their_findings() -> None:
    table = Table("Rows", ("row", "text"), (("12", "a\nb"), ("3", "c" * 100)))
    lines = AuditReport("data", "x.jsonl", (OK, CHANGE, STOP), (table,)).lines()
    assert [line.split()[0] for line in lines[1:6]] == ["stop", "mend:", "change", "mend:", "ok"]
    assert lines[7:] == [
        "Rows",
        "  row  text",
        f"  ---  {'-' * 60}",
        "  12   a b",
        f"  3    {'c' * 59}…",
    ]


def test_json_is_plain_and_missing_is_null(tmp_path: Path) -> None:
    figures = {"rate": np.float64(0.5), "none": float("nan"), "many": np.arange(2), "s": "\ud800"}
    report = AuditReport("data", "\ud800.jsonl", (CHANGE,), figures=figures)
    data, page = report.write(tmp_path / "new" / "folder")
    read = json.loads(data.read_bytes().decode("utf-8"))
    assert read["figures"] == {"rate": 0.5, "none": None, "many": [0, 1], "s": "\ufffd"}
    assert read["subject"] == "\ufffd.jsonl"
    assert read["findings"][0] == {
        "check": "c",
        "severity": "change",
        "text": "wrong",
        "mend": "mend it",
        "figures": {"rows": 3},
    }
    assert "go with changes" in page.read_text(encoding="utf-8")


def test_figures_of_a_shape_are_drawn() -> None:
    figures = {
        "h": {"title": "Lengths", "edges": [0, 1, 2], "counts": [5, 6]},
        "b": {"bars": {"x": 1}},
        "n": 3,
    }
    html = AuditReport("data", "x", (OK,), figures=figures)._page()
    assert [part.title for part in html.sections[1].parts] == ["Lengths", "b"]  # type: ignore[union-attr]


def test_a_table_with_a_missing_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells, not 2"):
        Table("t", ("a", "b"), (("1",),))


def test_a_place_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--out: .*file' cannot be written"):
        AuditReport("data", "x", (OK,)).write(tmp_path / "file")
