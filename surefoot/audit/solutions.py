"""Labelled solutions: answers that are known to be right or wrong, against what a grader says.

Owns the file of solutions, finding the rows that they answer, and J on them.
Refuses to own J itself (`golds.py`), and answers that are made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.audit.bench import Bench, Mark, gold_of
from surefoot.audit.golds import judged, percent, rates
from surefoot.audit.report import Finding, Severity, Table
from surefoot.data.jsonl import read_items
from surefoot.data.prompts import fingerprint
from surefoot.data.rows import BadRow
from surefoot.errors import DataError
from surefoot.records import Group, Prompt
from surefoot.statistics import Interval, clustered_share

_LINE_BYTES = 1 << 24
_PROMPTS = ("prompt", "question")
_EXAMPLES = 20
FORM = (
    "a row has `prompt` or `question`, and `solution` with `is_correct`: one of each, two lists of "
    "one length (`solutions`, `is_correct`), or named mappings that hold both"
)


@dataclass(frozen=True, slots=True)
class Solution:
    """A completion text, and whether it is right."""

    text: str
    is_correct: bool


@dataclass(frozen=True, slots=True)
class Labelled:
    """A row of the data with solutions to it."""

    prompt: Prompt
    solutions: tuple[Solution, ...]


@dataclass(frozen=True, slots=True)
class SolutionFile:
    """What a file holds for the rows of a recipe, and how many of its rows found none."""

    rows: tuple[Labelled, ...]
    unmatched: int


def read_solutions(path: Path, prompts: Sequence[Prompt], *, most: int) -> SolutionFile:
    """The first `most` rows of a JSONL file whose prompt is one of `prompts`.

    Prompts are matched without regard to case and white space. DataError for a row that is none,
    and for a file that answers no row at all.
    """
    known = {fingerprint(prompt.text): prompt for prompt in prompts}
    rows: list[Labelled] = []
    unmatched = 0
    for where, raw in read_items(path, max_line_bytes=_LINE_BYTES):
        if isinstance(raw, BadRow):
            raise DataError(f"{where}: {raw.reason}. Mend the row.")
        question, found = read_row(where, raw)
        prompt = known.get(fingerprint(question))
        if prompt is None:
            unmatched += 1
        elif len(rows) < most:
            rows.append(Labelled(prompt, found))
    if not rows:
        raise DataError(
            f"{path}: none of its {unmatched} prompts is a row of data, so nothing says what the "
            "right answers are. Give solutions to rows of the recipe's data."
        )
    return SolutionFile(tuple(rows), unmatched)


def read_row(where: str, raw: object) -> tuple[str, tuple[Solution, ...]]:
    """The question of one row and its solutions; DataError names what is missing."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: the row is not an object with named columns; {FORM}.")
    name = next((name for name in _PROMPTS if name in raw), None)
    if name is None or not isinstance(raw[name], str):
        raise DataError(f"{where}: there is no text in `prompt` or `question`; {FORM}.")
    found = tuple(_solutions(where, raw))
    if not found:
        raise DataError(f"{where}: there is no solution; {FORM}.")
    return raw[name], found


def _solutions(where: str, raw: Mapping[str, Any]) -> Iterator[Solution]:
    if "solution" in raw:
        yield _solution(where, raw["solution"], raw.get("is_correct"))
    if "solutions" in raw:
        texts, labels = raw["solutions"], raw.get("is_correct")
        if not isinstance(texts, list):
            raise DataError(f"{where}: `solutions` is not a list; {FORM}.")
        if texts and isinstance(texts[0], Mapping):
            labels = [item.get("is_correct") for item in texts if isinstance(item, Mapping)]
            texts = [item.get("solution") for item in texts if isinstance(item, Mapping)]
        if not isinstance(labels, list) or len(labels) != len(texts):
            raise DataError(f"{where}: `solutions` and `is_correct` differ in length; {FORM}.")
        for text, label in zip(texts, labels, strict=True):
            yield _solution(where, text, label)
    for value in raw.values():
        if isinstance(value, Mapping) and {"solution", "is_correct"} <= value.keys():
            yield _solution(where, value["solution"], value["is_correct"])


def _solution(where: str, text: object, label: object) -> Solution:
    if not isinstance(text, str):
        raise DataError(f"{where}: a solution is not text; {FORM}.")
    if not isinstance(label, bool):
        raise DataError(f"{where}: `is_correct` of a solution is not true or false; {FORM}.")
    return Solution(text, label)


@dataclass(frozen=True, slots=True)
class Judged:
    """Every solution with its mark, by row."""

    rows: tuple[tuple[Labelled, tuple[Mark, ...]], ...]

    def clusters(self) -> list[tuple[int, int, int, int]]:
        """By row: (right accepted, right, wrong accepted, wrong); without a verdict is left out."""
        found = []
        for row, marks in self.rows:
            counts = [0, 0, 0, 0]
            for solution, mark in zip(row.solutions, marks, strict=True):
                if mark.accepted is not None:
                    at = 0 if solution.is_correct else 2
                    counts[at] += mark.accepted
                    counts[at + 1] += 1
            found.append((counts[0], counts[1], counts[2], counts[3]))
        return found


def judge_solutions(bench: Bench, rows: Sequence[Labelled]) -> tuple[Judged, list[Group]]:
    """Mark every solution; the groups are the same solutions as completions of their rows."""
    groups = [bench.group(row.prompt, [each.text for each in row.solutions]) for row in rows]
    graded = bench.graded(groups)
    pairs = zip(rows, graded, strict=True)
    return Judged(tuple((row, tuple(bench.read(group))) for row, group in pairs)), groups


def solution_findings(judgement: Judged, unmatched: int) -> tuple[list[Finding], list[Table]]:
    """J on the labelled solutions, what has no verdict, and the rows where both disagree."""
    clusters = judgement.clusters()
    total = sum(len(row.solutions) for row, _ in judgement.rows)
    known = sum(c[1] + c[3] for c in clusters)
    findings: list[Finding] = []
    if unmatched:
        text = f"{unmatched} rows of the file of solutions are left out: no row of data asks that"
        findings.append(Finding("solutions", Severity.INFO, text))
    if known < total:
        text = f"{total - known} of {total} solutions have no verdict and are left out"
        mend = "see golds and odd inputs: the row cannot be scored, or the grader fails"
        severity = Severity.CHANGE if known < 0.9 * total else Severity.INFO
        findings.append(Finding("solutions", severity, text, mend))
    found = rates(clusters)
    if found is None:
        text = "J cannot be told: the solutions with a verdict are all right, or all wrong"
        mend = "give a file with right and wrong solutions"
        return [*findings, Finding("youden on solutions", Severity.INFO, text, mend)], []
    what = f"{known} labelled solutions to {len(clusters)} rows"
    finding = judged("youden on solutions", found, what)
    wrong = _disagreements(judgement)
    finding = Finding(
        finding.check,
        finding.severity,
        finding.text,
        finding.mend,
        {**finding.figures, "disagreements": wrong[:50]},
    )
    return [*findings, finding], [_rates(clusters), *_examples(wrong)]


def _disagreements(judgement: Judged) -> list[dict[str, Any]]:
    return [
        {
            "row": row.prompt.id,
            "gold": gold_of(row.prompt),
            "is_correct": solution.is_correct,
            "solution": solution.text[-200:],
        }
        for row, marks in judgement.rows
        for solution, mark in zip(row.solutions, marks, strict=True)
        if mark.accepted is not None and mark.accepted != solution.is_correct
    ]


def _rates(clusters: Sequence[tuple[int, int, int, int]]) -> Table:
    def line(name: str, at: int) -> tuple[str, ...]:
        share: Interval = clustered_share([c[at] for c in clusters], [c[at + 1] for c in clusters])
        accepted, tried = sum(c[at] for c in clusters), sum(c[at + 1] for c in clusters)
        return (name, str(accepted), str(tried - accepted), percent(share))

    return Table(
        "Labelled solutions",
        ("solution", "accepted", "refused", "accepted, 95 % interval"),
        (line("right", 0), line("wrong", 2)),
    )


def _examples(wrong: Sequence[Mapping[str, Any]]) -> list[Table]:
    if not wrong:
        return []
    rows = tuple(
        (
            str(each["row"]),
            "right, refused" if each["is_correct"] else "wrong, accepted",
            str(each["gold"]),
            str(each["solution"]).rpartition("\n")[2][-60:],
        )
        for each in wrong[:_EXAMPLES]
    )
    return [Table("Where grader and label differ", ("row", "solution", "gold", "its end"), rows)]
