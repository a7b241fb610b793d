"""What ends a completion, and the text that people and graders see of it.

Owns stop ids and stop strings. Refuses to guess: a completion that merely fills its cap is
truncated (DESIGN law 9).
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopRule:
    """A set of end-of-sequence ids, and strings that end a completion wherever they appear."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], strings: Sequence[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.ids = tuple(ids)
        self.strings = tuple(strings)
        # A string of n bytes spans at most n tokens that show something (byte-level tokens show
        # a part of a character); the margin covers tokens that show nothing.
        self._window = max((len(string.encode()) for string in strings), default=0) + 8

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the completion ends with the token just drawn."""
        if ids[-1] in self.ids:
            return True
        if not self.strings:
            return False
        tail = self._decode(ids[-self._window :])
        return any(string in tail for string in self.strings)

    def text(self, ids: Sequence[int]) -> str:
        """The completion's text: no stopping id, and nothing from a stop string on."""
        kept = ids[:-1] if ids and ids[-1] in self.ids else ids
        text = self._decode(kept)
        cuts = [text.find(string) for string in self.strings if string in text]
        return text[: min(cuts)] if cuts else text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
