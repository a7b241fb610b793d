"""Prompts that a row does not name: what two conversations or two transcripts share.

Owns the reading of Human/Assistant transcripts, and the split of two answers from what came before.
Refuses to own columns, and never guesses: what shares nothing is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.data.rows import BadRow, Message, read_text

_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Whether the text begins with a turn of Human or Assistant."""
    return _MARK.match(text) is not None


def transcript(text: str, what: str) -> tuple[Message, ...]:
    """The messages of a transcript, without white space around them; BadRow for an empty one."""
    return _messages(_turns(text), what)


def shared_messages(
    chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[tuple[Message, ...], str, str]:
    """(the prompt, and the two answers) of two conversations with one beginning."""
    sides = [
        [(message["role"], message["content"]) for message in side] for side in (chosen, rejected)
    ]
    shared = _shared(sides[0], sides[1], "message")
    return tuple(chosen[:shared]), chosen[-1]["content"], rejected[-1]["content"]


def shared_transcript(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(the prompt up to the last shared `Assistant:`, and the two answers), letter for letter."""
    turns, others = _turns(chosen), _turns(rejected)
    _shared(turns, others, "turn")
    said, other = turns[-1][1], others[-1][1]
    return chosen[: len(chosen) - len(said)], said, other


def asked(prompt: str) -> tuple[Message, ...]:
    """The messages of a prompt that ends with `Assistant:`."""
    return _messages(_turns(prompt)[:-1], "the shared part")


def _turns(text: str) -> list[tuple[str, str]]:
    """(role, what follows the mark) of every turn; the text begins with a mark."""
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        (_ROLES[mark.group(1)], text[mark.end() : end])
        for mark, end in zip(marks, ends, strict=True)
    ]


def _messages(turns: Sequence[tuple[str, str]], what: str) -> tuple[Message, ...]:
    return tuple(
        {"role": role, "content": read_text(said.strip(), f"turn {index} of {what}")}
        for index, (role, said) in enumerate(turns)
    )


def _shared(
    chosen: Sequence[tuple[str, str]], rejected: Sequence[tuple[str, str]], noun: str
) -> int:
    """How many turns come before the two answers; BadRow where that is not plain to see."""
    shared = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        shared += 1
    if shared == 0:
        raise BadRow(
            f"chosen and rejected begin with no shared {noun} before their answers, so the prompt "
            "is unknown; give it in a column 'prompt'"
        )
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        rest = [role for role, _ in side[shared:]]
        if rest != ["assistant"]:
            raise BadRow(
                f"{name} goes on with {', '.join(rest)} after the {shared} shared {noun}s, but an "
                "answer is one turn of the assistant"
            )
    return shared
