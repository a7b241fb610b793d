"""Prompts and golds before a run: what is counted, what goes, and what is only said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.audit.data import DataAudit, DataOptions, audit_data
from surefoot.audit.report import Finding, Severity
from surefoot.errors import RecipeError

STORY = "the quick brown fox jumps over the lazy dog and runs home to eat bread with honey"


def written(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def looked(path: Path, rows: Iterable[Mapping[str, Any]], **options: Any) -> DataAudit:
    return audit_data(written(path / "prompts.jsonl", rows), DataOptions(**options))


def finding(audit: DataAudit, check: str) -> Finding:
    (found,) = [each for each in audit.report.findings if each.check == check]
    return found


def asked(prompt: str, answer: str | None = None) -> dict[str, Any]:
    return {"prompt": prompt} if answer is None else {"prompt": prompt, "answer": answer}


def test_duplicates_and_how_many_prompts_there_are_in_effect(tmp_path: Path) -> None:
    rows = [asked("One?"), asked("one? "), asked("ONE?"), asked("Two?")]
    found = finding(looked(tmp_path, rows), "duplicates")
    assert found.figures["rows"] == 2
    assert found.figures["different"] == 2
    # Weights 3/4 and 1/4: 1 / (9/16 + 1/16).
    assert found.figures["effective"] == pytest.approx(1.6)


def test_near_duplicates_and_templates_are_told_apart(tmp_path: Path) -> None:
    long = f"{STORY} {' '.join(f'word{n}' for n in range(40))}"
    rows = [
        asked(long),
        asked(f"{long} again"),
        asked("Tom has 3 apples and 4 pears, how many?"),
        asked("Tom has 5 apples and 1 pears, how many?"),
        asked("Something else altogether."),
    ]
    audit = looked(tmp_path, rows)
    assert finding(audit, "near-duplicates").figures["rows"] == 1
    assert finding(audit, "templates").figures["rows"] == 2
    assert audit.report.verdict == "go"


def test_conflicting_golds_go_and_equal_ones_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = [asked("a?", "4"), asked("A?", "5"), asked("b?", "0.5"), asked("b?", "1/2")]
    audit = looked(tmp_path, rows, fix=out)
    assert finding(audit, "conflicting golds").figures["rows"] == 2
    # Of b? the second is a duplicate.
    assert [
        json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").splitlines()
    ] == ["b?"]


@pytest.mark.fault(32)
def test_golds_are_read_by_their_own_verifier(tmp_path: Path) -> None:
    rows = [asked(f"q{n}?", str(n)) for n in range(20)] + [asked("q?", "about seven")]
    found = finding(looked(tmp_path, rows), "golds")
    assert found.figures == {"rows": 1, "verifier": "numeric"}
    assert finding(looked(tmp_path, rows, verifier="exact"), "golds").figures["rows"] == 0
    words = [asked(f"q{n}?", f"word {n}") for n in range(9)]
    assert finding(looked(tmp_path, words), "golds").figures["verifier"] == "exact"
    found = finding(looked(tmp_path, words, verifier="numeric"), "golds")
    assert found.severity is Severity.STOP
    assert finding(looked(tmp_path, words, verifier="boxed"), "golds").figures["rows"] == 0
    none = [asked("q?")]
    assert finding(looked(tmp_path, none), "golds").severity is Severity.OK
    assert finding(looked(tmp_path, none, verifier="exact"), "golds").severity is Severity.STOP


def test_overlap_is_the_same_prompt_or_most_of_its_words(tmp_path: Path) -> None:
    tested = written(tmp_path / "eval.jsonl", [asked("Same?"), asked(f"Now: {STORY}, or not?")])
    rows = [asked("same?"), asked(STORY), asked("The quick brown fox sleeps."), asked("Other?")]
    out = tmp_path / "out.jsonl"
    audit = looked(tmp_path, rows, eval_file=tested, fix=out)
    assert finding(audit, "overlap with evaluation").figures["rows"] == 2
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.fault(34)
def test_control_tokens_go_and_comparisons_stay(tmp_path: Path) -> None:
    rows = [
        asked("Hi <|im_end|>\n<|im_start|>system"),
        asked("[INST] do it [/INST]"),
        asked("Is a<b and c>d, or |x|>1?"),
        asked("Write <b>bold</b> and <s2>."),
    ]
    assert finding(looked(tmp_path, rows), "control tokens").figures["rows"] == 2


def test_an_answer_in_its_prompt_is_said(tmp_path: Path) -> None:
    rows = [asked("Is it Paris or Rome?", "Paris"), asked("Capital of France?", "Paris")]
    assert finding(looked(tmp_path, rows), "answer in prompt").figures["rows"] == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [({"trusted": Path("t.jsonl")}, "--trusted"), ({"flips": False}, "--no-flips")],
)
def test_an_option_of_pairs_is_refused(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(RecipeError, match=name):
        looked(tmp_path, [asked("a?")], **options)


def test_columns_and_the_format_of_answers(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}?", "solution": f"so #### {n}"} for n in range(5)]
    columns = {"prompt": "question", "answer": "solution"}
    audit = looked(tmp_path, rows, columns=columns, answer_format="gsm8k")
    assert finding(audit, "golds").figures == {"rows": 0, "verifier": "numeric"}
