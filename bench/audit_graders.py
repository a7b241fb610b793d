"""What `audit reward` says of four graders on real solutions, against a count of its own.

    python bench/audit_graders.py          writes bench/results/audit_graders.txt

4,000 solutions of four models to 1,000 problems of GSM8K, each labelled right or wrong
(examples/data/gsm8k_model_solutions.jsonl.gz). The count reads the file by itself: the text behind
the last `A: `, the last number, the last box, and math-verify called directly on the solution.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from surefoot.audit.report import AuditReport
from surefoot.audit.reward import audit_reward

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "examples" / "data" / "gsm8k_model_solutions.jsonl.gz"
RESULT = ROOT / "bench" / "results" / "audit_graders.txt"
MARK = "A: "


def rows() -> list[dict[str, Any]]:
    with gzip.open(SOLUTIONS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def gold(row: Mapping[str, Any]) -> str:
    return str(row["ground_truth"]).rpartition(MARK)[2].replace(",", "")


def exact(text: str, answer: str) -> bool:
    return MARK in text and text.rpartition(MARK)[2] == answer


def last_number(text: str, answer: str) -> bool:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return bool(found) and Fraction(found[-1].replace(",", "")) == Fraction(answer)


def boxed(text: str, answer: str) -> bool:
    return f"\\boxed{{{answer}}}" in text


def math_verify(text: str, answer: str) -> bool:
    ways = [LatexExtractionConfig(), ExprExtractionConfig()]
    found = parse(text, extraction_config=ways, fallback_mode="no_fallback", parsing_timeout=None)
    return bool(verify(parse(answer, parsing_timeout=None), found, timeout_seconds=None))


GRADERS: dict[str, tuple[dict[str, Any], Callable[[str, str], bool]]] = {
    "exact string behind `A: `": ({"use": "regex", "pattern": "A: (.*)$", "group": 1}, exact),
    "last number": ({"use": "numeric"}, last_number),
    "boxed only": ({"use": "boxed"}, boxed),
    "math-verify": ({"use": "math"}, math_verify),
}


def counted(judge: Callable[[str, str], bool]) -> tuple[int, int, int, int]:
    """(right accepted, right, wrong accepted, wrong) over the whole file."""
    counts = [0, 0, 0, 0]
    for row in rows():
        for value in row.values():
            if isinstance(value, dict):
                at = 0 if value["is_correct"] else 2
                counts[at] += judge(value["solution"], gold(row))
                counts[at + 1] += 1
    return counts[0], counts[1], counts[2], counts[3]


def audited(reward: Mapping[str, Any], data: Path, *, problems: int) -> AuditReport:
    recipe = {
        "data": {"source": str(data), "columns": {"prompt": "question"}},
        "reward": [dict(reward)],
        "method": "rloo",
        "run": {"steps": 1},
    }
    return audit_reward(recipe, rows=problems, pilot=0, labelled=SOLUTIONS)


def line(name: str, report: AuditReport, truth: tuple[int, int, int, int]) -> list[str]:
    """Estimate and interval of the audit beside the count, and whether the interval holds it."""
    figures = next(f.figures for f in report.findings if f.check == "youden on solutions")
    tpr, fpr = truth[0] / truth[1], truth[2] / truth[3]
    lines = [f"{name}: {report.verdict}"]
    for key, true in (("tpr", tpr), ("fpr", fpr), ("j", tpr - fpr)):
        said = figures[key]
        holds = said["low"] <= true <= said["high"]
        lines.append(
            f"  {key:<4} audit {said['estimate']:.4f} [{said['low']:.4f}, {said['high']:.4f}]"
            f"   count {true:.4f}   {'inside' if holds else 'OUTSIDE'}"
        )
    return lines


def main() -> None:
    out = [
        "TPR, FPR and J of four graders on GSM8K solutions: `surefoot audit reward` (95 %",
        "intervals, problems as clusters) against a count over all 4,000 solutions.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "gsm8k.jsonl"
        text = "".join(
            json.dumps({"question": row["question"], "answer": gold(row)}) + "\n" for row in rows()
        )
        data.write_text(text, encoding="utf-8")
        truths = {name: counted(judge) for name, (_, judge) in GRADERS.items()}
        for problems in (100, 1000):
            out += ["", f"audit of {problems} problems, {4 * problems} solutions"]
            for name, (reward, _) in GRADERS.items():
                began = time.perf_counter()
                out += line(name, audited(reward, data, problems=problems), truths[name])
                out[-1] += f"   ({time.perf_counter() - began:.0f} s)" if problems == 1000 else ""
                sys.stderr.write("\n".join(out[-4:]) + "\n")
    RESULT.write_text("\n".join(out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
