"""How the records of a step become rows of `groups.jsonl` and `samples.jsonl`.

Owns the names of those columns, so that writers and readers cannot drift apart.
Refuses to own which rows are written, and metrics rows, whose names their makers know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.records import Group, Score


def train_row(group: Group, *, dead: bool, kept: bool = True) -> dict[str, Any]:
    """One trained group: prompt, task, scores (null where missing), lengths in tokens, stops.

    `parts` are the values of each reward before weighting; null where it does not apply or failed.

    `greedy_score` is there for methods that take a greedy completion too.
    """
    row: dict[str, Any] = {
        "split": "train",
        "prompt": group.prompt.id,
        "position": group.prompt.position,
        "task": group.prompt.task,
        "scores": _values(group),
        "parts": _parts(group),
        "lengths": [len(completion.ids) for completion in group.completions],
        "stops": [completion.stop.value for completion in group.completions],
        "dead": dead,
        "kept": kept,
    }
    if group.greedy_score is not None:
        row["greedy_score"] = group.greedy_score.value
    return row


def eval_row(group: Group, *, correct: bool | None) -> dict[str, Any]:
    """One held-out prompt, from its first completion; `correct` is null when it has no score."""
    first = group.completions[0]
    return {
        "split": "eval",
        "prompt": group.prompt.id,
        "task": group.prompt.task,
        "correct": correct,
        "score": _values(group)[0],
        "stop": first.stop.value,
        "length": len(first.ids),
    }


def sample_rows(
    group: Group, *, advantages: Sequence[float | None], split: str = "train"
) -> list[dict[str, Any]]:
    """Every completion of a group as people read it; `advantages` has one number each.

    `steps` are there for a score that has some: [end in characters, weighted value].
    """
    assert len(advantages) == len(group.completions), (len(advantages), len(group.completions))
    scores = group.scores or (None,) * len(group.completions)
    return [
        {
            "split": split,
            "id": group.prompt.id,
            "position": group.prompt.position,
            "task": group.prompt.task,
            "sample": completion.sample,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "score": None if score is None else score.value,
            "parts": {} if score is None else dict(score.parts),
            "status": None if score is None else score.status.value,
            "stop": completion.stop.value,
            "advantage": advantage,
            "length": len(completion.ids),
            "version": completion.version,
        }
        | _steps(score)
        | _messages(group)
        for completion, score, advantage in zip(group.completions, scores, advantages, strict=True)
    ]


def _steps(score: Score | None) -> dict[str, list[list[float]]]:
    if score is None or not score.steps:
        return {}
    return {"steps": [[end, value] for end, value in score.steps]}


def _messages(group: Group) -> dict[str, Any]:
    """The prompt as it was given, where `prompt` is what a template made of it."""
    messages = group.prompt.messages
    return {} if messages is None else {"messages": [dict(message) for message in messages]}


def _parts(group: Group) -> dict[str, list[float | None]]:
    scores = group.scores or ()
    names = dict.fromkeys(name for score in scores for name in score.parts)
    return {name: [score.parts.get(name) for score in scores] for name in names}


def _values(group: Group) -> list[float | None]:
    if group.scores is None:
        return [None] * len(group.completions)
    return [score.value for score in group.scores]
