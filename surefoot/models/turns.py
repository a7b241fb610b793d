"""Examples as token ids: conversations, completions and documents, and what is trained in them.

Owns where an assistant's turn begins and ends in ids, and the one end token behind it.
Refuses to own which rows are kept, and prompts alone (`template.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from surefoot.errors import ModelError
from surefoot.models.template import Messages, PromptTemplate

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "MARKER"
Trained = tuple[tuple[int, ...], tuple[bool, ...], bool]
"""Ids, which of them are trained, and whether parts of the text had to be tokenised apart."""


class ExampleTemplate:
    """What a `PromptTemplate` is for prompts, for whole examples.

    A prompt has here the very ids that it has in a rollout. A completion ends with the token that
    ends a turn (without a template: the end-of-sequence token), once, and nothing behind it: what
    a template writes after that token is never sampled, so it is not trained.
    """

    def __init__(self, template: PromptTemplate, *, stops: Iterable[int] = ()) -> None:
        """`stops` are further ids that end a completion, such as those of a generation config."""
        self._template = template
        self._tokenizer = template.tokenizer
        eos, turn_end = self._tokenizer.eos_token_id, template.turn_end()
        known = [id for id in (turn_end, eos) if id is not None]
        if not known:
            raise ModelError(
                "model.path: the tokenizer has no end-of-sequence token, and no chat template ends "
                "a turn with a control token, so nothing could end a completion; set eos_token in "
                "its tokenizer_config.json"
            )
        self._ends = frozenset((*known, *stops))
        self._end_texts = tuple(self._tokenizer.convert_ids_to_tokens(known))
        self._turn_end = known[0]
        self._document_end = known[-1]
        self._tail = self._written_after_a_turn() if template.has_template else ""
        self._marked = (
            template.has_template
            and self._tokenizer.is_fast
            and _GENERATION.search(str(self._tokenizer.chat_template)) is not None
        )

    @property
    def max_context(self) -> int:
        return self._template.max_context

    @property
    def has_template(self) -> bool:
        return self._template.has_template

    def encode(self, messages: Messages | str) -> tuple[int, ...]:
        """Ids of a prompt, as in a rollout; a second start token in front is left out."""
        ids = self._template.encode(messages)
        start = self._tokenizer.bos_token_id
        return ids[1:] if start is not None and ids[:2] == (start, start) else ids

    def render(self, messages: Messages | str) -> str:
        return self._template.render(messages)

    def literal(self, text: str) -> bool:
        return self._template.literal(text)

    def completion(self, prompt: Messages | str, answer: str) -> tuple[tuple[int, ...], bool]:
        """Ids of an answer behind `encode(prompt)`, and whether it was tokenised apart from it."""
        if isinstance(prompt, str):
            return self._continued(prompt, answer)
        messages = [*prompt, {"role": "assistant", "content": answer}]
        ids, trained, apart = self.conversation(messages, first=len(prompt))
        return ids[trained.index(True) :], apart

    def conversation(self, messages: Messages, *, first: int) -> Trained:
        """A conversation whose assistant turns from message `first` on are trained.

        It ends with the last of them. ModelError where the template writes a message differently
        once others follow, so that no turn could be told apart.
        """
        if first == 0 and self._marked:
            return self._by_markers(messages)
        parts: list[str] = []
        done = whole = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first:
                continue
            if index == 0:
                raise ModelError("message 0 has role 'assistant', but a turn answers something")
            before = self._template.render(messages[:index])
            prefix, whole = whole, self._written(messages[: index + 1])
            if not (before.startswith(prefix) and whole.startswith(before)):
                raise ModelError(
                    f"the chat template writes what comes before message {index} differently once "
                    "it is answered, so its tokens cannot be told from the prompt's. Keep only "
                    "the last turn, or set model.template to one with generation markers"
                )
            turn = self._ended(whole[len(before) :])
            parts += [before[len(done) :], turn]
            done = before + turn
        assert parts, "no turn to train"
        pieces, apart = self._split(parts)
        ids: list[int] = []
        trained: list[bool] = []
        for place, piece in enumerate(pieces):
            asked = place % 2 == 0
            kept = piece if asked else self._with_one_end(piece)
            ids += kept
            trained += [not asked] * len(kept)
        return *self._closed(ids, trained), apart

    def document(self, text: str, *, ends: bool) -> tuple[int, ...]:
        """Ids of plain text, closed by one end-of-sequence token unless it goes on elsewhere."""
        ids = self._without_end(self.encode(text))
        return (*ids, self._document_end) if ends else ids

    def _continued(self, prompt: str, answer: str) -> tuple[tuple[int, ...], bool]:
        start, whole = self.encode(prompt), self.encode(prompt + answer)
        apart = whole[: len(start)] != start
        ids = self._tokens(answer) if apart else whole[len(start) :]
        return (*self._without_end(ids), self._document_end), apart

    def _closed(
        self, ids: list[int], trained: list[bool]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """With a trained end token behind the last turn, where the template writes none."""
        if trained[-1] and ids[-1] in self._ends:
            return tuple(ids), tuple(trained)
        return (*ids, self._turn_end), (*trained, True)

    def _with_one_end(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Words that bring an end token get no second one."""
        while len(ids) > 1 and ids[-1] in self._ends and ids[-2] in self._ends:
            ids = ids[:-1]
        return ids

    def _without_end(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Some tokenizers, and some texts, bring end tokens of their own."""
        while ids and ids[-1] in self._ends:
            ids = ids[:-1]
        return ids

    def _split(self, parts: Sequence[str]) -> tuple[list[tuple[int, ...]], bool]:
        """The ids of each part in the whole text; each part's own ids where a token spans two."""
        whole = self._tokens("".join(parts))
        cuts, text = [0], ""
        for part in parts[:-1]:
            text += part
            start = self._tokens(text)
            if whole[: len(start)] != start:
                return [self._tokens(each) for each in parts], True
            cuts.append(len(start))
        return [whole[start:end] for start, end in pairwise([*cuts, len(whole)])], False

    def _by_markers(self, messages: Messages) -> Trained:
        """The turns that the template itself marks, each with its end token."""
        coded = self._applied(messages, as_ids=True)
        ids, marked = list(coded["input_ids"]), [bool(flag) for flag in coded["assistant_masks"]]
        trained = [False] * len(ids)
        start = 0
        while start < len(ids):
            if not marked[start]:
                start += 1
                continue
            end = start
            while end < len(ids) and marked[end] and ids[end] not in self._ends:
                end += 1
            # Some templates close the marked part before the token that ends the turn.
            last = end + 1 if end < len(ids) and ids[end] in self._ends else end
            trained[start:last] = [True] * (last - start)
            start = last
            while start < len(ids) and marked[start]:
                start += 1
        if not any(trained):
            raise ModelError("the generation markers of the chat template mark no token")
        last = max(index for index, flag in enumerate(trained) if flag) + 1
        return *self._closed(ids[:last], trained[:last]), False

    def _ended(self, turn: str) -> str:
        """What the template writes for a turn, up to the token that ends it."""
        if turn.endswith(self._tail):
            return turn.removesuffix(self._tail) + self._through_the_end(self._tail)
        return self._through_the_end(turn)

    def _through_the_end(self, text: str) -> str:
        ends = [text.find(end) + len(end) for end in self._end_texts if end in text]
        return text[: min(ends)] if ends else text.rstrip()

    def _written_after_a_turn(self) -> str:
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _MARKER}]
        return self._written(turn).rpartition(_MARKER)[2]

    def _written(self, messages: Messages) -> str:
        text: str = self._applied(messages, as_ids=False)
        return text

    def _applied(self, messages: Messages, *, as_ids: bool) -> Any:
        plain: list[Mapping[str, Any]] = [dict(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                plain,
                tokenize=as_ids,
                return_dict=as_ids,
                return_assistant_tokens_mask=as_ids,
                add_generation_prompt=False,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"model.template: the chat template failed: {error}") from error

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
