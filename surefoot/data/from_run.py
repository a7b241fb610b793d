"""Pairs and demonstrations from what a run sampled and scored, as rows that the sources read.

Owns which completions of a run make a row, and the counts of those that make none.
Refuses to own files: it takes rows of `samples.jsonl` and gives rows of a JSONL file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

from surefoot.errors import DataError

_NEEDED: Mapping[str, type | UnionType] = {
    "step": int,
    "position": int,
    "split": str,
    "id": str,
    "task": str,
    "sample": int,
    "prompt": str,
    "completion": str,
    "score": int | float | None,
    "stop": str,
}


@dataclass(frozen=True, slots=True)
class Harvest:
    """Rows for a JSONL file, and what was left out.

    `samples` were read. Of these `evaluation` are of held-out prompts, `unscored` have no score,
    `truncated` did not end by themselves, so that an end token behind them would be a lie; `nul`
    hold a NUL character, which no source reads; `empty`
    say nothing and would be what is imitated, or the better one of a pair (counted in groups);
    `below` miss the threshold, `repeated` say what an earlier one says. Of the groups left, `alone`
    have one usable completion and `tied` have no two that differ in score and in words.
    """

    rows: tuple[Mapping[str, Any], ...]
    samples: int
    evaluation: int
    unscored: int
    truncated: int
    nul: int = 0
    below: int = 0
    repeated: int = 0
    empty: int = 0
    groups: int = 0
    alone: int = 0
    tied: int = 0

    def text(self) -> str:
        """The rows as JSON lines."""
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows)

    def lines(self) -> list[str]:
        """What to print: what was made of how much, and each thing left out."""
        notes = {
            "evaluation": "samples left out: of held-out prompts",
            "unscored": "samples left out: no score",
            "truncated": "samples left out: cut at the length limit, or failed",
            "nul": "samples left out: a NUL character in them",
            "below": "samples left out: below the threshold",
            "repeated": "samples left out: said before to the same prompt",
            "empty": "left out: the better completion says nothing",
            "alone": "groups left out: one usable completion",
            "tied": "groups left out: equal scores, or equal words",
        }
        of = f" and {self.groups} groups" if self.groups else ""
        lines = [f"{len(self.rows)} rows from {self.samples} samples{of}"]
        counts = {name: getattr(self, name) for name in notes}
        return lines + [f"  {counts[name]} {text}" for name, text in notes.items() if counts[name]]


def pairs_from_run(samples: Iterable[Mapping[str, Any]]) -> Harvest:
    """The best and the worst completion of every group of training samples, by raw score.

    Rows: {id, task, prompt, chosen, rejected, margin}, the margin being the difference of the two
    scores. Of equal scores the earlier sample is taken. A group is one draw of one prompt. Groups
    without two completions that differ in score and in words are left out and counted.
    """
    usable = _usable(samples)
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in usable.rows:
        groups.setdefault((row["step"], row["position"]), []).append(row)
    made, alone, tied, empty = [], 0, 0, 0
    for group in groups.values():
        ordered = sorted(group, key=lambda row: (-row["score"], row["sample"]))
        best = ordered[0]
        worst = next(row for row in ordered if row["score"] == ordered[-1]["score"])
        if len(group) == 1:
            alone += 1
        elif best["score"] == worst["score"] or best["completion"] == worst["completion"]:
            tied += 1
        elif not best["completion"].strip():
            empty += 1
        else:
            made.append(
                {
                    **_asked(best),
                    "chosen": best["completion"],
                    "rejected": worst["completion"],
                    "margin": best["score"] - worst["score"],
                }
            )
    return Harvest(
        rows=tuple(made),
        samples=usable.samples,
        evaluation=usable.evaluation,
        unscored=usable.unscored,
        truncated=usable.truncated,
        nul=usable.nul,
        empty=empty,
        groups=len(groups),
        alone=alone,
        tied=tied,
    )


def demonstrations_from_run(samples: Iterable[Mapping[str, Any]], *, at_least: float) -> Harvest:
    """The training samples whose raw score is at least a threshold (rejection sampling).

    Rows: {id, task, prompt, completion}. What was said before to the same prompt is left out.
    """
    usable = _usable(samples)
    made, below, repeated, empty = [], 0, 0, 0
    seen: set[str] = set()
    for row in usable.rows:
        asked = _asked(row)
        said = json.dumps([asked["prompt"], row["completion"]], sort_keys=True)
        if row["score"] < at_least:
            below += 1
        elif not row["completion"].strip():
            empty += 1
        elif said in seen:
            repeated += 1
        else:
            seen.add(said)
            name = f"{asked['id']}/{row['sample']}"
            made.append({**asked, "id": name, "completion": row["completion"]})
    return Harvest(
        rows=tuple(made),
        samples=usable.samples,
        evaluation=usable.evaluation,
        unscored=usable.unscored,
        truncated=usable.truncated,
        nul=usable.nul,
        below=below,
        repeated=repeated,
        empty=empty,
    )


def _usable(samples: Iterable[Mapping[str, Any]]) -> Harvest:
    """The training samples with a score that ended by themselves, and the counts of the others."""
    rows, evaluation, unscored, truncated, nul = [], 0, 0, 0, 0
    count = 0
    for count, row in enumerate(samples, start=1):
        missing = [name for name in _NEEDED if name not in row]
        if missing:
            raise DataError(
                f"sample {count} of the run lacks {', '.join(missing)}: samples.jsonl was written "
                "by another version. Run it again."
            )
        odd = [name for name, kind in _NEEDED.items() if not isinstance(row[name], kind)]
        if odd or not abs(row["score"] or 0) < 1e300:
            raise DataError(
                f"sample {count} of the run is damaged: {', '.join(odd) or 'score'} is not what a "
                "run writes. Restore a copy of samples.jsonl, or run it again."
            )
        if row["split"] != "train":
            evaluation += 1
        elif row["score"] is None:
            unscored += 1
        elif row["stop"] != "stop":
            truncated += 1
        elif "\0" in row["completion"]:
            nul += 1
        else:
            rows.append(row)
    return Harvest(tuple(rows), count, evaluation, unscored, truncated, nul)


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Name, task and prompt of a sample; messages where the run recorded them."""
    asked: dict[str, Any] = {"id": f"{row['id']}@{row['position']}", "task": row["task"]}
    asked["prompt"] = row["prompt"] if row.get("messages") is None else row["messages"]
    return asked
