"""Preference pairs: what each check finds in them, what tells a swapped set, what --fix writes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.preferences import made_pairs

from surefoot.audit.data import DataAudit, DataOptions, audit_data, options_of
from surefoot.audit.report import Finding, Severity
from surefoot.errors import DataError, RecipeError

PLAIN = DataOptions(flips=False)
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def written(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def looked(path: Path, rows: Iterable[Mapping[str, Any]], **options: Any) -> DataAudit:
    given = DataOptions(**{"flips": False, **options})
    return audit_data(written(path / "pairs.jsonl", rows), given)


def finding(audit: DataAudit, check: str) -> Finding:
    (found,) = [each for each in audit.report.findings if each.check == check]
    return found


def removed(path: Path) -> dict[int, str]:
    """Row number -> check, of the list beside a cleaned file."""
    listed = (
        json.loads(line)
        for line in Path(f"{path}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return {row["row"]: row["check"] for row in listed}


def test_each_defect_is_counted_and_goes_for_its_own_reason(tmp_path: Path) -> None:
    rows = [
        pair("a?", "Yes.", "No."),
        pair("b?", "Same here.", "Same  here. "),
        pair("c?", "Yes.", "No.", score_chosen=4, score_rejected=4),
        pair("d?", "Up.", "Down."),
        pair("d?", "Down.", "Up."),
        pair("e?", "Up.", "Down."),
        pair("e?", "Up.", "Down."),
        pair("e?", "Down.", "Up."),
        pair("f?", f"{LONG} {LONG} a.", f"{LONG} {LONG} b."),
    ]
    out = tmp_path / "out.jsonl"
    audit = looked(tmp_path, rows, fix=out)
    assert finding(audit, "identical").figures["rows"] == 1
    assert finding(audit, "tied").figures["rows"] == 1
    assert finding(audit, "contradictory").figures["rows"] == 5
    assert finding(audit, "near-identical").figures["rows"] == 1
    assert finding(audit, "repeated").figures["rows"] == 1
    # Of d? neither side wins, of e? the one against two goes; near-identical stays.
    assert removed(out) == {
        2: "identical",
        3: "tied",
        4: "contradictory",
        5: "contradictory",
        8: "contradictory",
    }
    assert [
        json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").splitlines()
    ] == ["a?", "e?", "e?", "f?"]


def test_a_circle_is_found_and_a_chain_is_not(tmp_path: Path) -> None:
    circle = [pair("a?", x, y) for x, y in ("AB", "BC", "CA")]
    chain = [pair("b?", x, y) for x, y in ("AB", "BC", "AC")]
    apart = [pair("c?", "A", "B"), pair("d?", "B", "A")]
    audit = looked(tmp_path, [*circle, *chain, *apart])
    assert finding(audit, "cyclic").figures["rows"] == 3
    assert finding(audit, "contradictory").figures["rows"] == 0


def test_near_means_the_words_in_order(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40)]
    moved = [*words[20:], *words[:20]]
    other = [*words[:-1], "else"]  # 39 of 40 in common: 0.975
    rows = [
        pair("a?", " ".join(words), " ".join(moved)),
        pair("b?", " ".join(words), " ".join(other)),
        pair("c?", " ".join(words[:19]), " ".join([*words[:18], "else"])),  # 18 of 19: 0.947
        pair("d?", "45", "46"),
    ]
    assert finding(looked(tmp_path, rows), "near-identical").figures["rows"] == 1


@pytest.mark.parametrize(
    ("long_ones", "severity"),
    [(55, Severity.OK), (90, Severity.CHANGE), (15, Severity.CHANGE)],
)
def test_length_bias_needs_an_interval_outside_the_bounds(
    tmp_path: Path, long_ones: int, severity: Severity
) -> None:
    rows = [
        pair(f"q{n}?", *(("Longer.", "Short.") if n < long_ones else ("Short.", "Longer.")))
        for n in range(100)
    ]
    found = finding(looked(tmp_path, rows), "length bias")
    assert found.severity is severity
    assert found.figures["share"] == long_ones / 100


def test_a_prompt_in_both_answers_and_a_cut_answer_are_listed(tmp_path: Path) -> None:
    rows = [pair(f"What is {n} and {n}?", f"It is {n}.", f"No, {n}.") for n in range(30)]
    rows.append(pair("Tell me all of it.", "Tell me all of it. Yes.", "Tell me all of it. No."))
    rows.append(pair("And then?", "Then he went to the", "Nothing came of it."))
    rows.append(pair("Some code?", "```python\nprint(1)", "No."))
    audit = looked(tmp_path, rows)
    assert finding(audit, "prompt said twice").figures["rows"] == 1
    assert finding(audit, "truncated").figures["rows"] == 2


def test_a_shifted_column_is_named(tmp_path: Path) -> None:
    made = [
        pair(f"Where lies town{n} of land{n}?", f"It is town{n} indeed.", f"Not land{n} I say.")
        for n in range(60)
    ]
    assert finding(looked(tmp_path, made), "prompt mismatch").severity is Severity.OK
    shifted = [
        {**row, "rejected": made[(n + 7) % len(made)]["rejected"]} for n, row in enumerate(made)
    ]
    found = finding(looked(tmp_path, shifted), "prompt mismatch")
    assert found.severity is Severity.STOP
    assert found.text.startswith("rejected answers")


def scored(count: int, against: int) -> list[dict[str, Any]]:
    """Pairs of which the first `against` have the better score on the rejected side."""
    return [
        pair(f"q{n}?", f"a{n}", f"b{n}", score_chosen=1, score_rejected=2 if n < against else 0)
        for n in range(count)
    ]


def test_swapped_is_said_only_with_evidence(tmp_path: Path) -> None:
    rows = [pair(f"q{n}?", f"a{n}", f"b{n}") for n in range(50)]
    found = finding(looked(tmp_path, rows), "swapped")
    assert found.severity is Severity.INFO
    assert "every label exchanged would look the same" in found.text
    assert finding(looked(tmp_path, scored(50, 50)), "swapped").severity is Severity.STOP
    assert finding(looked(tmp_path, scored(50, 25)), "swapped").severity is Severity.CHANGE
    assert finding(looked(tmp_path, scored(50, 0)), "swapped").severity is Severity.OK


def test_a_swapped_set_is_exchanged_and_never_thinned(tmp_path: Path) -> None:
    rows = scored(40, 38)
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="--fix-flips swap"):
        looked(tmp_path, rows, fix=out)
    assert not out.exists()
    looked(tmp_path, rows, fix=out, fix_flips="swap")
    fixed = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(fixed) == 40
    assert all(row["score_chosen"] > row["score_rejected"] for row in fixed)
    assert fixed[0] == pair("q0?", "b0", "a0", score_chosen=2, score_rejected=1)
    assert fixed[39] == rows[39]


def test_golds_tell_which_answer_is_right(tmp_path: Path) -> None:
    rows = [
        pair(f"What is {n} + 1?", f"I say {n + 2}", f"It is {n + 1}.", gold=str(n + 1))
        for n in range(60)
    ]
    found = finding(looked(tmp_path, rows, columns={"answer": "gold"}), "swapped")
    assert found.severity is Severity.STOP
    assert found.text.startswith("swapped. the column answer: agrees with 0.0%")


def test_trusted_pairs_of_the_file_itself_tell(tmp_path: Path) -> None:
    rows = [pair(f"q{n}?", f"good {n}", f"bad {n}") for n in range(40)]
    turned = [pair(r["prompt"], r["rejected"], r["chosen"]) for r in rows]
    trusted = written(tmp_path / "trusted.jsonl", rows)
    found = finding(looked(tmp_path, turned, trusted=trusted), "swapped")
    assert found.severity is Severity.STOP
    other = written(tmp_path / "other.jsonl", [pair("z?", "y", "n")])
    assert finding(looked(tmp_path, turned, trusted=other), "trusted").severity is Severity.CHANGE


def test_a_scorer_of_trusted_pairs_names_a_swapped_set(tmp_path: Path) -> None:
    rows = [made.row for made in made_pairs(900, flipped=0.0, seed=3)]
    trusted = written(tmp_path / "trusted.jsonl", rows[:600])
    turned = [pair(r["prompt"], r["rejected"], r["chosen"]) for r in rows[600:]]
    found = finding(looked(tmp_path, turned, trusted=trusted), "swapped")
    assert found.severity is Severity.STOP
    assert "learned from 600 trusted pairs" in found.text
    found = finding(looked(tmp_path, rows[600:], trusted=trusted), "swapped")
    assert found.severity is Severity.OK


def test_kept_lines_keep_their_bytes(tmp_path: Path) -> None:
    lines = [
        b'{"chosen":"Yes.",  "prompt":"a?","rejected":"No.", "n": 1.0}\n',
        b"\n",
        b'{"prompt": "b?", "chosen": "Same.", "rejected": "Same."}\n',
        '{"prompt": "ü?", "chosen": "Ja.", "rejected": "\\u004eein."}'.encode(),
    ]
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    with gzip.open(source, "wb") as file:
        file.writelines(lines)
    audit = audit_data(source, DataOptions(flips=False, fix=out))
    assert out.read_bytes() == lines[0] + lines[3] + b"\n"
    assert audit.fixed is not None
    assert (audit.fixed.kept, audit.fixed.removed) == (2, 1)
    (listed,) = [
        json.loads(line)
        for line in Path(f"{out}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (listed["row"], listed["check"], listed["action"]) == (3, "identical", "removed")


def test_an_array_is_cleaned_into_lines(tmp_path: Path) -> None:
    rows = [pair("a?", "Yes.", "No."), pair("b?", "Same.", "Same.")]
    source, out = tmp_path / "in.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps(rows), encoding="utf-8")
    audit_data(source, DataOptions(flips=False, fix=out))
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == rows[:1]
    assert removed(out) == {2: "identical"}


def test_nothing_that_exists_is_written_over(tmp_path: Path) -> None:
    rows = [pair("a?", "Yes.", "No.")]
    for name in ("out.jsonl", "out.jsonl.removed.jsonl"):
        there = tmp_path / name
        there.write_text("mine")
        with pytest.raises(DataError, match="exists already"):
            looked(tmp_path, rows, fix=tmp_path / "out.jsonl")
        assert there.read_text() == "mine"
        there.unlink()
    source = written(tmp_path / "same.jsonl", rows)
    with pytest.raises(DataError, match="exists already"):
        audit_data(source, DataOptions(flips=False, fix=source))


def test_a_file_of_which_nothing_is_left_is_not_written(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=r"nothing of .* would be left"):
        looked(tmp_path, [pair("a?", "Same.", "Same.")], fix=out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"eval_file": Path("x.jsonl")}, "--eval"),
        ({"verifier": "numeric"}, "--verifier"),
        ({"answer_format": "gsm8k"}, "--answer-format"),
        ({"fix_flips": "swap"}, "--fix-flips"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(RecipeError, match=name):
        looked(tmp_path, [pair("a?", "Yes.", "No.")], **options)


def test_options_as_typed() -> None:
    words: dict[str, Any] = {
        "kind": "pairs",
        "columns": ["chosen=better", "rejected=a=b"],
        "answer_format": None,
        "max_invalid": 0.5,
        "eval_file": None,
        "verifier": None,
        "trusted": None,
        "flips": True,
        "fix": None,
        "fix_flips": "drop",
    }
    assert options_of(**words).columns == {"chosen": "better", "rejected": "a=b"}
    for name, value, message in (
        ("columns", ["chosen"], "write PART=NAME"),
        ("columns", ["chosen=a", "chosen=b"], "Keep one"),
        ("kind", "labels", "one of pairs, prompts"),
        ("fix_flips", "keep", "one of drop, swap"),
        ("verifier", "code", "one of numeric"),
    ):
        with pytest.raises(RecipeError, match=message):
            options_of(**{**words, name: value})
