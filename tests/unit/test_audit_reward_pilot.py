"""Labelled solutions, and the findings of a pilot, on groups that were scored by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.graders import bench, exact, of, prompts

from surefoot.audit.pilot import pilot_findings
from surefoot.audit.report import Finding, Severity
from surefoot.audit.sampling import Plan
from surefoot.audit.solutions import read_row, read_solutions
from surefoot.errors import DataError
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason

# --- labelled solutions


def test_the_forms_of_a_row_of_solutions():
    named = {"question": "q", "a": {"solution": "s", "is_correct": True}, "b": {"x": 1}}
    for row in (
        named,
        {"prompt": "q", "solution": "s", "is_correct": True},
        {"prompt": "q", "solutions": ["s"], "is_correct": [True]},
        {"prompt": "q", "solutions": [{"solution": "s", "is_correct": True}]},
    ):
        question, found = read_row("here", row)
        assert question == "q" and [(s.text, s.is_correct) for s in found] == [("s", True)]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"solution": "s", "is_correct": True}, "`prompt` or `question`"),
        ({"prompt": "q"}, "no solution"),
        ({"prompt": "q", "solution": "s"}, "`is_correct`"),
        ({"prompt": "q", "solution": "s", "is_correct": 1}, "`is_correct`"),
        ({"prompt": "q", "solutions": ["s", "t"], "is_correct": [True]}, "differ in length"),
        ({"prompt": "q", "solutions": [3], "is_correct": [True]}, "not text"),
        ([], "not an object"),
    ],
)
def test_a_wrong_row_of_solutions_is_named(row, what):
    with pytest.raises(DataError, match=f"file:7.*{what}"):
        read_row("file:7", row)


def test_solutions_find_their_rows_without_case_and_spaces(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    rows = [
        {"prompt": "question 1:  HOW many?", "solution": "a", "is_correct": False},
        {"prompt": "something else", "solution": "b", "is_correct": True},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = read_solutions(path, prompts(), most=10)
    assert [row.prompt.id for row in found.rows] == ["r1"] and found.unmatched == 1
    with pytest.raises(DataError, match="none of its 2 prompts"):
        read_solutions(path, [], most=10)


# --- the pilot's findings, on groups that were scored by hand


def pilot_groups(solved: list[int], size: int, *, cut: int = 0, value: float = 1.0) -> list[Group]:
    groups = []
    for place, right in enumerate(solved):
        completions = tuple(
            Completion((1,), (0.0,), StopReason.LENGTH if i < cut else StopReason.STOP, 0, i, "t")
            for i in range(size)
        )
        values = [value if i < right else 0.0 for i in range(size)]
        scores = tuple(Score(ScoreStatus.SCORED, v, {"plain": v}) for v in values)
        groups.append(Group(Prompt(f"p{place}", place, (1,), "q", "1"), completions, scores))
    return groups


def pilot(groups: list[Group], **changes: object) -> list[Finding]:
    plan = Plan(
        **{**{"group_size": 8, "baseline": "group", "keep": "all"}, "max_new_tokens": 9} | changes
    )  # type: ignore[arg-type]
    return pilot_findings(bench(exact), groups, plan, seed=0)[0]


def test_a_pilot_in_the_middle_goes():
    found = pilot(pilot_groups([2, 3, 4, 5, 6] * 8, 8))
    assert {f.check: f.severity for f in found} == dict.fromkeys(
        ("truncation", "solve rate", "dead groups"), Severity.OK
    )
    assert of(found, "solve rate").figures["solve_rate"] == 0.5


def test_a_pilot_that_solves_nothing_stops_a_group_method_only():
    groups = pilot_groups([0] * 64, 8)
    found = pilot(groups)
    assert of(found, "dead groups").severity is Severity.STOP
    assert of(found, "starvation").severity is Severity.CHANGE
    assert "no group size up to 64" in of(found, "dead groups").mend
    other = of(pilot(groups, baseline="batch"), "dead groups")
    assert other.severity is Severity.INFO and "baseline batch" in other.text


def test_a_pilot_that_solves_everything_is_saturated():
    found = pilot(pilot_groups([8] * 40 + [7] * 2, 8))
    assert of(found, "saturation").severity is Severity.CHANGE
    assert "data.keep_solve_rate" in of(found, "dead groups").mend


def test_a_hard_pilot_names_the_group_size_that_it_needs():
    # Counts of a rate of one quarter of 8: groups of 2 are dead in 10 of 16, of 4 in 0.32.
    weights = [9, 24, 28, 19, 8, 2]
    solved = [k for k, weight in enumerate(weights) for _ in range(weight)]
    found = of(pilot(pilot_groups(solved, 8), group_size=2), "dead groups")
    assert found.severity is Severity.CHANGE
    assert found.figures["dead"] == pytest.approx(10 / 16, abs=0.03)
    assert found.figures["needed_group_size"] in (4, 5)
    assert f"method.group_size: {found.figures['needed_group_size']}" in found.mend


def test_cut_off_answers_name_the_key():
    found = of(pilot(pilot_groups([4] * 10, 8, cut=2)), "truncation")
    assert found.severity is Severity.CHANGE and found.figures["share"] == 0.25
    assert "rollout.max_new_tokens above 9" in found.mend


def test_scores_of_many_grades_are_counted_and_not_fitted():
    groups = pilot_groups([4] * 6, 8)
    graded = [
        group.scored(
            tuple(
                Score(ScoreStatus.SCORED, 0.1 * i, {"plain": 0.1 * i})
                for i, _ in enumerate(group.completions)
            )
        )
        for group in groups[:3]
    ]
    found = of(pilot([*graded, *groups[3:]]), "dead groups")
    assert found.figures == {"group_size": 8, "dead": 0.0}
    flat = [g.scored((Score(ScoreStatus.SCORED, 0.3, {"plain": 0.3}),) * 8) for g in groups]
    mixed = of(pilot([*graded, *flat[3:]]), "dead groups")
    assert mixed.figures["dead"] == 0.5 and mixed.severity is Severity.CHANGE


def test_a_scale_without_a_mark_for_solved_has_no_solve_rate():
    scores = tuple(Score(ScoreStatus.SCORED, v, {"plain": v}) for v in (-2.5, 0.25, 1.5, 3.25))
    group = pilot_groups([0], 4)[0]
    bare = Group(Prompt("p", 0, (1,), "q", None), group.completions, scores)
    found = of(pilot([bare] * 4), "solve rate")
    assert found.severity is Severity.INFO
    assert found.figures == {"mean": 0.625, "least": -2.5, "most": 3.25}
    # With answers, and a sample that is accepted, the share of those is told.
    rated = of(pilot([group.scored(scores)] * 4), "solve rate")
    assert rated.figures["solve_rate"] == 0.5
