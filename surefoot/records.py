"""What moves between the rooms: prompts, completions, scores and groups.

Owns the frozen records, the form of a process reward too, and the checks they make on construction.
Refuses to own tensors, text processing and any decision about what a record is worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why a completion ended; the engine says it, nobody infers it (DESIGN law 9)."""

    STOP = "stop"  # an end-of-sequence id or a stop string
    LENGTH = "length"  # the cap on new tokens
    ERROR = "error"  # the engine failed; never trained


class ScoreStatus(StrEnum):
    """The three states of a score (DESIGN law 13)."""

    SCORED = "scored"
    UNSCORABLE = "unscorable"  # the row's fault: the whole group is dropped
    INFRA_ERROR = "infra_error"  # the grader's fault: the sample is missing


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt stream, ready for an engine.

    `ids` are the token ids with the chat template applied; `position` is the place in the stream
    at which the row was drawn, and part of the key of every random draw made for it.
    """

    id: str
    position: int
    ids: tuple[int, ...]
    text: str
    answer: str | None = None
    task: str = "default"
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.ids, f"prompt {self.id} has no token ids"
        assert self.position >= 0, f"prompt {self.id} has position {self.position}"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: the ids that were sampled, and their log-probabilities when sampled.

    `logps` are natural logarithms under the distribution that was really sampled (temperature and
    truncation included). A stopping end-of-sequence id is the last of `ids`. `text` is for people
    and graders only: without the end-of-sequence id, cut before a stop string.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    stop: StopReason
    version: int
    sample: int
    text: str
    detail: str = ""

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logps), (len(self.ids), len(self.logps))
        assert self.ids or self.stop is StopReason.ERROR, "a completion without ids is an error"

    @property
    def terminated(self) -> bool:
        return self.stop is StopReason.STOP


@dataclass(frozen=True, slots=True, init=False)
class ProcessReward:
    """What a reward function returns to score places inside a completion.

    `values[k]` is earned by the text that ends at character `ends[k]` (exclusive) of the sample's
    text; the ends ascend. What does not fit is found where the value is read, because it is the
    reward's fault and not the run's.
    """

    values: tuple[float, ...]
    ends: tuple[int, ...]

    def __init__(self, values: Sequence[float], ends: Sequence[int]) -> None:
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "ends", tuple(ends))

    @classmethod
    def by_step(cls, text: str, values: Sequence[float], *, separator: str = "\n") -> ProcessReward:
        """One value for each non-empty piece of `text` between separators, at the piece's end."""
        ends = []
        start = 0
        for piece in text.split(separator):
            if piece:
                ends.append(start + len(piece))
            start += len(piece) + len(separator)
        if len(values) != len(ends):
            raise ValueError(
                f"there are {len(values)} values for {len(ends)} steps (the non-empty pieces of "
                f"the text between {separator!r}); give one value for each step"
            )
        return cls(values, ends)


@dataclass(frozen=True, slots=True)
class Score:
    """What the grader says of one completion: a state, the weighted sum, and its parts.

    `parts` maps a reward's name to its value before weighting; None means not applicable (or, with
    INFRA_ERROR and UNSCORABLE, that this part failed). `value` is None unless SCORED.

    `steps` are what places inside the text earn of `value`: the character at which each ends
    (exclusive) and its weighted value, by ascending end. The rest of `value` is earned by the
    completion as a whole.
    """

    status: ScoreStatus
    value: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        scored = self.status is ScoreStatus.SCORED
        assert scored == (self.value is not None), (self.status, self.value)
        assert self.value is None or math.isfinite(self.value), self.value
        assert scored or not self.steps, (self.status, self.steps)
        assert all(math.isfinite(value) for _, value in self.steps), self.steps
        ends = [end for end, _ in self.steps]
        assert all(end <= later for end, later in itertools.pairwise(ends)), self.steps

    @property
    def valid(self) -> bool:
        return self.status is ScoreStatus.SCORED


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one draw of one prompt, and their scores once they are known.

    `greedy` is one more, most likely completion of the prompt, where a baseline reads its score;
    it is never trained on.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...] | None = None
    greedy: Completion | None = None
    greedy_score: Score | None = None

    def __post_init__(self) -> None:
        assert self.completions, f"prompt {self.prompt.id} has no completions"
        assert self.scores is None or len(self.scores) == len(self.completions)

    def scored(self, scores: tuple[Score, ...]) -> Group:
        return replace(self, scores=scores)
