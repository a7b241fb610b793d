"""The built-in reward `reasoning_gym`: that library's own verifier for its procedural tasks.

Owns the call of the verifier and the strict reading of what it gives.
Refuses to own the tasks: the row carries its entry, written by the data source of the same name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward.contract import PartScore, RewardSample, scored, unscorable
from surefoot.reward.figures import check_tag, tagged
from surefoot.reward.rules import BuiltIn, Hired, Rule

COLUMN = "reasoning_gym"


@dataclass(frozen=True, slots=True)
class ReasoningGymOptions:
    """`partial`: the verifier's own value counts; else only its full score, as 1.

    `tag`: the answer is what the last <tag>...</tag> holds; without one the score is 0.
    """

    partial: bool = False
    tag: str | None = None

    def __post_init__(self) -> None:
        if self.tag is not None:
            check_tag(self.tag)


def reasoning_gym(options: ReasoningGymOptions) -> Rule:
    """The verifier's score of the text for the row's entry.

    Partial scores are off by default because several verifiers give one for any text that contains
    the answer somewhere. A row without an entry, or of an unknown dataset, is unscorable.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError(
            "reward 'reasoning_gym' needs the reasoning-gym package, which is not installed; "
            "install surefoot[tasks]"
        )

    def rule(sample: RewardSample) -> PartScore:
        if COLUMN not in sample.columns:
            return unscorable(f"the row has no column {COLUMN!r}; use the data source of that name")
        row = sample.columns[COLUMN]
        if not isinstance(row, Mapping) or not {"dataset", "entry"} <= row.keys():
            return unscorable(f"column {COLUMN!r} does not hold a dataset and an entry")
        try:
            verify = _verifier(row["dataset"])
        except ValueError as error:
            return unscorable(str(error))
        text = sample.text.strip() if options.tag is None else tagged(sample.text, options.tag)
        if text is None:
            return scored(0.0)
        value = float(verify(answer=text, entry=row["entry"]))
        return scored(value if options.partial else float(value >= 1.0))

    return rule


@functools.cache
def _verifier(dataset: str) -> Callable[..., Any]:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(dataset)


def _warm() -> None:
    importlib.import_module("reasoning_gym")


TASKS: dict[str, BuiltIn] = {
    "reasoning_gym": BuiltIn(ReasoningGymOptions, reasoning_gym, lambda options: Hired(warm=_warm))
}
