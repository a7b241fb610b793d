"""From a form to examples in token ids: the system prompt, the template, what is trained.

Owns the `ExampleEncoder` protocol, and which tokens each `train_on` puts into the loss.
Refuses to own tokenizers and templates, which live with the models, and never cuts a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from surefoot.data.examples import Demonstration, Example, Label, Pair, Ranking
from surefoot.data.forms import Answer, Form
from surefoot.data.prompts import PromptEncoder, contents_of, fingerprint, with_system
from surefoot.data.rows import BadRow, Message
from surefoot.errors import ModelError, RecipeError

TrainOn = Literal["completion", "assistant", "all"]


class ExampleEncoder(PromptEncoder, Protocol):
    """What this room asks of a tokenizer and its template beside prompts.

    Ids of answers and documents end with the one end token. The flag that comes with ids says
    that a token would have spanned a prompt and its answer, so the two were tokenised apart.
    """

    def completion(
        self, prompt: Sequence[Message] | str, answer: str
    ) -> tuple[tuple[int, ...], bool]:
        """Ids of an answer that follow `encode(prompt)`."""
        ...

    def conversation(
        self, messages: Sequence[Message], *, first: int
    ) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        """Ids up to the end of the last turn, and True for the assistant's from `first` on."""
        ...

    def document(self, text: str, *, ends: bool) -> tuple[int, ...]:
        """Ids of plain text."""
        ...


@dataclass(frozen=True, slots=True)
class Coded:
    """The examples of one row, with its place and the fingerprint of what it asks."""

    examples: tuple[Example, ...]
    where: str
    fingerprint: bytes
    apart: bool

    @property
    def length(self) -> int:
        """Tokens of the longest example."""
        return max(example.length for example in self.examples)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the rows of one source become examples. `train_on` is for demonstrations alone."""

    encoder: ExampleEncoder
    kind: type[Example]
    train_on: TrainOn | None
    system: str | None
    allow_control_tokens: bool

    def __post_init__(self) -> None:
        given = self.train_on is not None
        assert given == (self.kind is Demonstration), (self.kind, self.train_on)

    def code(self, form: Form) -> Coded | None:
        """The examples of a row; None if two of its answers are the same tokens.

        A string prompt becomes a user message where there is a template. BadRow for a control
        token in a text, messages without a template, or a template that cannot tell the turns.
        """
        self._check(form)
        try:
            coded = self._demonstration(form) if self.train_on else self._answered(form)
        except ModelError as error:
            raise BadRow(str(error)) from error
        if coded is None:
            return None
        examples, apart = coded
        return Coded(examples, form.where, fingerprint(form.prompt), apart)

    def _check(self, form: Form) -> None:
        parts: list[Answer] = [form.prompt, *form.answers]
        if not self.encoder.has_template and not all(isinstance(part, str) for part in parts):
            raise BadRow(
                "the row holds messages, but the model has no chat template (model.template: "
                "none); write prompt and answer as text"
            )
        texts = [text for part in parts for text in contents_of(part)]
        if not self.allow_control_tokens and not all(map(self.encoder.literal, texts)):
            raise BadRow(
                "a text contains a control token of the tokenizer, which would be read as the "
                "template's own; end tokens are added for you (allow_control_tokens: true lets it)",
                kind="control_tokens",
            )

    def _asked(self, prompt: Answer) -> Sequence[Message] | str:
        """The prompt as the encoder takes it."""
        if not self.encoder.has_template:
            assert isinstance(prompt, str), prompt
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_system(messages, self.system)

    def _demonstration(self, form: Form) -> tuple[tuple[Example, ...], bool]:
        if not form.answers:
            ids, trained, apart = self._document(form)
        else:
            asked = self._asked(form.prompt)
            if isinstance(asked, str):
                ids, trained, apart = self._text(asked, cast(str, form.answers[0]))
            else:
                ids, trained, apart = self._conversation(asked, form.answers[0])
        if self.train_on == "all":
            trained = (False, *(True for _ in ids[1:]))
        return (Demonstration(form.id, ids, trained, form.task),), apart

    def _document(self, form: Form) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        if self.train_on != "all":
            raise RecipeError(
                f"method.train_on is {self.train_on}, but {form.where} is plain text, which has "
                "no such part. Set method.train_on: all, or give prompts and completions."
            )
        assert isinstance(form.prompt, str), form.prompt
        ids = self.encoder.document(form.prompt, ends=form.ends)
        if len(ids) < 2:
            raise BadRow(f"the text has {len(ids)} tokens, and the first has nothing to predict it")
        return ids, (), False

    def _text(self, prompt: str, answer: str) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        if self.train_on == "assistant":
            raise RecipeError(
                "method.train_on is assistant, but the model has no chat template (model.template: "
                "none), so there are no turns. Set method.train_on: completion."
            )
        start = self._prompt_ids(prompt)
        ids, apart = self.encoder.completion(prompt, answer)
        return (*start, *ids), (*(False for _ in start), *(True for _ in ids)), apart

    def _conversation(
        self, asked: Sequence[Message], answer: Answer
    ) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        first = 0 if self.train_on == "assistant" else len(asked)
        return self.encoder.conversation([*asked, *said], first=first)

    def _answered(self, form: Form) -> tuple[tuple[Example, ...], bool] | None:
        asked = self._asked(form.prompt)
        prompt = self._prompt_ids(asked)
        coded = [self.encoder.completion(asked, cast(str, answer)) for answer in form.answers]
        ids, apart = [ids for ids, _ in coded], any(apart for _, apart in coded)
        if len(set(ids)) < len(ids):
            return None
        example: Example
        if self.kind is Pair:
            example = Pair(form.id, prompt, ids[0], ids[1], form.margin, form.task)
        elif self.kind is Ranking:
            example = Ranking(form.id, prompt, tuple(ids), form.task)
        elif form.desirable is not None:
            example = Label(form.id, prompt, ids[0], form.desirable, form.task)
        else:
            # A pair is two labels.
            better = Label(f"{form.id}/chosen", prompt, ids[0], True, form.task)
            worse = Label(f"{form.id}/rejected", prompt, ids[1], False, form.task)
            return (better, worse), apart
        return (example,), apart

    def _prompt_ids(self, asked: Sequence[Message] | str) -> tuple[int, ...]:
        ids = tuple(self.encoder.encode(asked))
        if not ids:
            raise BadRow("the prompt encodes to no tokens")
        return ids
