"""Where a grader is put to the test: made-up or real answers in, marks out, calls counted.

Owns what a mark is, when an answer counts as accepted, and the cap on calls that cost money.
Refuses to own which answers are tried (the checks do), and how a score comes about (`reward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.records import Completion, Group, Prompt, ScoreStatus, StopReason
from surefoot.reward import Grader

Try = tuple[Prompt, str]
"""A row and a text that answers it."""
Ids = Callable[[str], tuple[int, ...]]
_LETTERS_PER_TOKEN = 4


class OutOfCalls(Exception):
    """The cap on calls is reached; always caught inside this room, and named there."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What the grader said of one answer.

    `value` is the weighted sum; `first` is the first reward's own value, the one that says what is
    correct; `accepted` is None where there is none.
    """

    status: ScoreStatus
    value: float | None
    first: float | None
    accepted: bool | None
    detail: str


def gold_of(prompt: Prompt) -> str | None:
    """The row's answer, or None where there is none to speak of."""
    return prompt.answer.strip() or None if prompt.answer is not None else None


def about_four_letters(text: str) -> tuple[int, ...]:
    """As many ids as a tokenizer would make, roughly, where no tokenizer is at hand."""
    return (0,) * max(1, -(-len(text) // _LETTERS_PER_TOKEN))


class Bench:
    """A grader with its calls counted.

    An answer is accepted when the first reward gives at least `accept_at`, as in evaluation. `cap`
    is the most answers that are scored in all (None: no bound).
    """

    def __init__(
        self,
        grader: Grader,
        *,
        accept_at: float,
        cap: int | None = None,
        ids: Ids = about_four_letters,
    ) -> None:
        self.grader = grader
        self.accept_at = accept_at
        self.cap = cap
        self.ids = ids
        self.calls = 0

    @property
    def price(self) -> float | None:
        """US dollars of scoring one answer; None where no reward names a price."""
        prices = [reward.price for reward in self.grader.rewards if reward.price is not None]
        return sum(prices) if prices else None

    def marks(self, tries: Sequence[Try]) -> list[Mark]:
        """One mark for each try, in order; all of them are one call of a batch reward."""
        groups = [self.group(prompt, [text]) for prompt, text in tries]
        return [mark for group in self.graded(groups) for mark in self.read(group)]

    def group(self, prompt: Prompt, texts: Sequence[str]) -> Group:
        """Texts as completions of a row, as if they had been sampled."""
        completions = []
        for sample, text in enumerate(texts):
            ids = self.ids(text) or (0,)
            logps = (0.0,) * len(ids)
            completions.append(Completion(ids, logps, StopReason.STOP, 0, sample, text))
        return Group(prompt, tuple(completions))

    def graded(self, groups: Sequence[Group]) -> list[Group]:
        """Groups with their scores, counted against the cap."""
        count = sum(len(group.completions) for group in groups)
        if self.cap is not None and self.calls + count > self.cap:
            raise OutOfCalls
        self.calls += count
        return self.grader.score(groups) if groups else []

    def read(self, group: Group) -> list[Mark]:
        """The marks of a scored group."""
        assert group.scores is not None
        name = self.grader.rewards[0].name
        marks = []
        for score in group.scores:
            first = score.parts.get(name) if score.valid else None
            accepted = None if first is None else first >= self.accept_at
            marks.append(Mark(score.status, score.value, first, accepted, score.detail))
        return marks


def accepted_count(marks: Sequence[Mark]) -> tuple[int, int]:
    """(accepted, with a verdict)."""
    known = [mark.accepted for mark in marks if mark.accepted is not None]
    return sum(known), len(known)
