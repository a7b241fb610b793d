"""How often each prompt of a source was solved in this run, and which are passed over for it.

Owns the counts, the rule of `keep_solve_rate` and its plain text in a cursor.
Refuses to own the order of prompts, and what counts as solved.

A prompt that was never tried is taken. A tried one is taken while solved / tried lies in
[low, high]; outside it is passed over `LOOK_AGAIN_AFTER` times, then taken with its counts
forgotten, so that a policy that has changed is measured anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.errors import CheckpointError

LOOK_AGAIN_AFTER = 3
_ENTRY = re.compile(r"(\d+):(\d+)/(\d+)(?:-(\d+))?")


class Window:
    """The counts of one source's prompts. Rows with one id are one prompt, kept at its first."""

    def __init__(self, bounds: tuple[float, float], ids: Sequence[str]) -> None:
        self.low, self.high = bounds
        self._first_of: dict[str, int] = {}
        self._prompt_of = [self._first_of.setdefault(id, row) for row, id in enumerate(ids)]
        self._seen: dict[int, tuple[int, int, int]] = {}
        """Row -> (solved, tried, times passed over since it fell outside)."""
        self._outside: set[int] = set()
        self._text: str | None = ""

    def __contains__(self, id: str) -> bool:
        return id in self._first_of

    @property
    def empty(self) -> bool:
        """Whether every prompt lies outside."""
        return len(self._outside) == len(self._first_of)

    def takes(self, row: int) -> bool:
        """Whether the row is taken at this visit, which is counted if not."""
        prompt = self._prompt_of[row]
        if prompt not in self._outside:
            return True
        # Once an epoch, however often the prompt stands in the data.
        if row != prompt:
            return False
        solved, tried, passed = self._seen[prompt]
        self._text = None
        if passed < LOOK_AGAIN_AFTER:
            self._seen[prompt] = (solved, tried, passed + 1)
            return False
        del self._seen[prompt]
        self._outside.discard(prompt)
        return True

    def observe(self, id: str, solved: int, tried: int) -> None:
        """Add what one draw of a prompt gave."""
        assert 0 <= solved <= tried, (id, solved, tried)
        if tried == 0:
            return
        prompt = self._first_of[id]
        before = self._seen.get(prompt, (0, 0, 0))
        self._put(prompt, before[0] + solved, before[1] + tried, before[2])
        self._text = None

    def forget(self) -> None:
        """Take every prompt again, as if none had been tried."""
        self._seen.clear()
        self._outside.clear()
        self._text = ""

    def text(self) -> str:
        """The counts as `row:solved/tried`, with `-passed` where passed over, by row."""
        if self._text is None:
            self._text = " ".join(
                f"{row}:{solved}/{tried}" + (f"-{passed}" if passed else "")
                for row, (solved, tried, passed) in sorted(self._seen.items())
            )
        return self._text

    def restore(self, text: str) -> None:
        """Go to the counts of `text`; the bounds are those of now."""
        self.forget()
        for entry in text.split():
            match = _ENTRY.fullmatch(entry)
            row, solved, tried, passed = (
                (int(number or 0) for number in match.groups()) if match else (-1, 0, 0, 0)
            )
            known = 0 <= row < len(self._prompt_of) and self._prompt_of[row] == row
            if not known or not 0 <= solved <= tried or tried == 0:
                raise CheckpointError(
                    f"the stream's cursor has the solve count {entry!r}, which no row can have: "
                    "the checkpoint's state is damaged. Resume from an older checkpoint."
                )
            self._put(row, solved, tried, passed)
        self._text = None

    def _put(self, prompt: int, solved: int, tried: int, passed: int) -> None:
        inside = self.low <= solved / tried <= self.high
        # Back inside, a later fall is a new one.
        self._seen[prompt] = (solved, tried, 0 if inside else passed)
        if inside:
            self._outside.discard(prompt)
        else:
            self._outside.add(prompt)
