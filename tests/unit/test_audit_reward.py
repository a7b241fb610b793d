"""`audit reward` from a recipe to its report: four graders on real solutions, and a real pilot."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from surefoot import reward_function
from surefoot.audit import reward as audit
from surefoot.audit.report import AuditReport, Finding, Severity
from surefoot.errors import DataError, RecipeError

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = ROOT / "examples" / "data" / "gsm8k_model_solutions.jsonl.gz"
PROBLEMS = 50

LISTS = """
import re
from surefoot import reward_function

@reward_function
def any_candidate(sample):
    return sample.answer in re.findall(r"-?[0-9]+", sample.text)

@reward_function(price=0.01)
def paid(sample):
    return sample.text.endswith(sample.answer)
"""


def finding(report: AuditReport, check: str) -> Finding:
    return next(each for each in report.findings if each.check == check)


def gold(row: dict[str, Any]) -> str:
    return str(row["ground_truth"]).rpartition("A: ")[2].replace(",", "")


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    with gzip.open(SOLUTIONS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def folder(problems, tmp_path_factory) -> Path:
    """A recipe's folder: GSM8K with its golds, and a file of rewards."""
    place = tmp_path_factory.mktemp("audit")
    rows = [{"question": row["question"], "answer": gold(row)} for row in problems]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "gsm8k.jsonl").write_text(text, encoding="utf-8")
    (place / "mine.py").write_text(LISTS, encoding="utf-8")
    return place


def run(folder: Path, reward: dict[str, Any], **settings: Any) -> AuditReport:
    recipe = {
        "data": {"source": str(folder / "gsm8k.jsonl"), "columns": {"prompt": "question"}},
        "reward": [reward],
        "method": "rloo",
        "run": {"steps": 1},
    }
    return audit.audit_reward(recipe, rows=PROBLEMS, pilot=0, **settings)


def counted(problems, judge: Callable[[str, str], bool]) -> tuple[float, float]:
    """TPR and FPR over the 4,000 solutions, read from the file by this test alone."""
    accepted: dict[bool, list[bool]] = {True: [], False: []}
    for row in problems:
        for each in row.values():
            if isinstance(each, dict):
                accepted[each["is_correct"]].append(judge(each["solution"], gold(row)))
    right, wrong = accepted[True], accepted[False]
    assert (len(right), len(wrong)) == (1541, 2459)
    return sum(right) / len(right), sum(wrong) / len(wrong)


def last_number(text: str, answer: str) -> bool:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return bool(found) and Fraction(found[-1].replace(",", "")) == Fraction(answer)


def behind_the_mark(text: str, answer: str) -> bool:
    return "A: " in text and text.rpartition("A: ")[2] == answer


GRADERS = {
    "exact string": ({"use": "regex", "pattern": "A: (.*)$", "group": 1}, behind_the_mark),
    "whole text": ({"use": "exact"}, lambda text, answer: text == answer),
    "last number": ({"use": "numeric"}, last_number),
    "boxed only": ({"use": "boxed"}, lambda text, answer: f"\\boxed{{{answer}}}" in text),
    # math-verify finds the same last number in these texts (bench/audit_graders.py calls it).
    "math-verify": ({"use": "math"}, last_number),
}


@pytest.mark.parametrize("name", GRADERS)
def test_rates_of_graders_on_real_solutions_hold_the_truth(name, folder, problems):
    reward, judge = GRADERS[name]
    tpr, fpr = counted(problems, judge)
    report = run(folder, reward, labelled=SOLUTIONS)
    found = finding(report, "youden on solutions")
    assert found.figures["right"] + found.figures["wrong"] == 4 * PROBLEMS
    for key, truth in (("tpr", tpr), ("fpr", fpr), ("j", tpr - fpr)):
        said = found.figures[key]
        assert said["low"] <= truth <= said["high"], (key, truth, said)
        assert said["high"] - said["low"] < 0.3
    sound = tpr > 0.9
    assert found.severity is (Severity.OK if sound else Severity.STOP)
    assert (report.verdict == "stop") is not sound


def test_a_grader_that_accepts_any_listed_candidate_is_stopped(folder):
    report = run(folder, {"use": f"{folder / 'mine.py'}:any_candidate"})
    assert report.verdict == "stop"
    stops = [each.check for each in report.findings if each.severity is Severity.STOP]
    assert stops == ["exploits"]
    # Golds and hard negatives alone would have passed it.
    assert finding(report, "youden").figures["j"]["low"] > 0.8


def test_what_is_not_run_is_named(folder):
    report = run(folder, {"use": "numeric"})
    assert finding(report, "pilot").text.startswith("skipped")
    rows = [{"prompt": f"Say {n}"} for n in range(5)]
    recipe = {"reward": [{"use": "length", "max": 5}], "method": "rloo", "run": {"steps": 1}}
    unanswered = audit.audit_reward(recipe, data=rows, pilot=0)
    named = next(each for each in unanswered.findings if "rewrites" in each.check)
    assert named.check == ("golds, wrong answers, youden, rewrites, exploits, shuffled reference")
    assert named.severity is Severity.INFO and "data.columns.answer" in named.text
    assert unanswered.verdict == "go"


def test_what_a_paid_reward_costs_is_said_before_and_bounded(folder, monkeypatch):
    monkeypatch.setenv("SUREFOOT_CACHE", str(folder / "cache"))
    told: list[str] = []
    report = run(folder, {"use": f"{folder / 'mine.py'}:paid"}, max_calls=500, tell=told.append)
    assert report.figures["calls"] <= 500 and 2 <= report.figures["rows"] < PROBLEMS
    (line,) = told
    said = re.fullmatch(r"about (\d+) answers are scored on (\d+) rows, for (\S+) USD", line)
    assert said is not None, line
    assert int(said[1]) <= 500 and int(said[2]) == report.figures["rows"]
    assert float(said[3]) == pytest.approx(0.01 * int(said[1]), abs=0.005)
    assert 0.5 * int(said[1]) <= report.figures["calls"] <= 1.2 * int(said[1])


def test_a_function_and_rows_from_python():
    @reward_function
    def half(sample) -> float:
        return 0.5 * (sample.text == sample.answer)

    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(30)]
    recipe = {"method": "rloo", "run": {"steps": 1}}
    report = audit.audit_reward(recipe, rewards=[half], data=rows, pilot=0)
    assert report.verdict == "stop" and "--accept-at" in finding(report, "golds").mend
    scaled = audit.audit_reward(recipe, rewards=[half], data=rows, pilot=0, accept_at=0.5)
    assert finding(scaled, "golds").severity is Severity.OK
    assert finding(scaled, "youden").figures["j"]["estimate"] == 1.0


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "data: {source: gsm8k.jsonl, columns: {prompt: question}}\n"
        "reward: [{use: numeric}]\nmethod: rloo\nrun: {steps: 1}\n",
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "audit", "reward", str(recipe), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_command_prints_a_table_writes_the_report_and_exits_0(folder):
    done = command(folder, "--no-pilot", "--rows", "20", "--out", "seen")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GO: audit of reward")
    assert "Wrong answers that look right" in done.stdout
    written = json.loads((folder / "seen" / "audit.json").read_text(encoding="utf-8"))
    assert (written["kind"], written["verdict"]) == ("reward", "go")
    page = (folder / "seen" / "audit.html").read_text(encoding="utf-8")
    assert "Wrong answers that look right" in page


def test_the_command_exits_2_on_stop_and_reads_overrides(folder):
    reward = f"reward=[{{use: {folder / 'mine.py'}:any_candidate}}]"
    done = command(folder, reward, "--no-pilot", "--rows", "20", "--json")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["verdict"] == "stop"
    both = command(folder, "--no-pilot", "--pilot", "4")
    assert both.returncode == 2 and "one of --pilot and --no-pilot" in both.stderr


def test_what_cannot_be_audited_is_refused(folder, tmp_path):
    offline = {"data": str(folder / "gsm8k.jsonl"), "method": "dpo", "run": {"steps": 1}}
    with pytest.raises(RecipeError, match="audit data"):
        audit.audit_reward(offline)
    with pytest.raises(DataError, match="--solutions"):
        run(folder, {"use": "numeric"}, labelled=tmp_path / "none.jsonl")
    with pytest.raises(RecipeError, match="2 rows"):
        audit.audit_reward({"method": "rloo"}, rows=1)


def test_a_pilot_with_a_real_model(tiny_model):
    recipe = {
        "model": {"path": str(tiny_model)},
        "data": {"source": "addition", "max_operand": 50},
        "reward": [{"use": "numeric"}, {"use": "length", "target": 6, "weight": 0.1}],
        "method": "rloo",
        "rollout": {"max_new_tokens": 6},
        "run": {"steps": 1},
    }
    told: list[str] = []
    report = audit.audit_reward(recipe, rows=20, pilot=6, tell=told.append)
    assert told == ["pilot: 6 prompts, 8 completions each, at most 6 tokens"]
    # A random model solves no sum and hardly ever stops; the length still spreads.
    assert finding(report, "starvation").figures["solve_rate"] < 0.1
    assert finding(report, "truncation").severity is Severity.CHANGE
    assert finding(report, "dead groups").figures["group_size"] == 8
    assert "48 completions (sampled by the model)" in finding(report, "noise").text
    assert [table.title for table in report.tables].count("Parts of the score") == 1
    assert sum(report.figures["solve rates"]["counts"]) == 6
    again = audit.audit_reward(recipe, rows=20, pilot=6)
    pair = [finding(each, "dead groups").figures for each in (report, again)]
    assert pair[0] == pair[1]
