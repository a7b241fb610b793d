"""Prompts as token ids: the chat template, control tokens in data, and what ends a turn.

Owns the `PromptEncoder` that the data room asks for, and the set of stop ids.
Refuses to own which rows are kept and what a completion is worth.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from surefoot.errors import ModelError

Messages = Sequence[Mapping[str, Any]]


class PromptTemplate:
    """Turns messages into ids by a tokenizer's chat template, or text as it is (`none`).

    `template` is auto (the tokenizer's own), none, or the path of a Jinja file. Templates run in
    the sandbox of transformers. `max_context` is in tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str, max_context: int
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.has_template = template != "none"
        if template not in ("auto", "none"):
            file = Path(template)
            if not file.is_file():
                raise ModelError(f"model.template: there is no file {template}; give a Jinja file")
            try:
                tokenizer.chat_template = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"model.template: {template} cannot be read: {error}") from error
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ModelError(
                "model.path: model_max_length in tokenizer_config.json is "
                f"{tokenizer.model_max_length!r:.60}, no number; mend the file, or save the "
                "tokenizer again"
            )
        if self.has_template and not tokenizer.chat_template:
            raise ModelError(
                "model.template: this tokenizer brings no chat template; set model.template to "
                "none (prompts are used as they are) or to a Jinja file"
            )

    @property
    def identity(self) -> str:
        """sha256 of the template text, or `none`."""
        if not self.has_template:
            return "none"
        return hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()

    @functools.cached_property
    def tokenizer_identity(self) -> str:
        """sha256 of what turns text into ids: vocabulary, merges, splitting, control tokens."""
        tokenizer = self.tokenizer
        facts: dict[str, Any] = {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "added": [
                [id, str(token), token.special]
                for id, token in sorted(tokenizer.added_tokens_decoder.items())
            ],
        }
        if tokenizer.is_fast:
            core = json.loads(tokenizer.backend_tokenizer.to_str())
            facts |= {name: _said(core.get(name)) for name in ("normalizer", "pre_tokenizer")}
            facts["model"] = _model_facts(core["model"])
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def encode(self, messages: Messages | str) -> tuple[int, ...]:
        """Ids of a prompt: messages with the generation prompt added, or text as it is."""
        if isinstance(messages, str):
            return tuple(self.tokenizer(messages)["input_ids"])
        # The rendered text already holds every control token, so none is added on top.
        ids = self.tokenizer(self.render(messages), add_special_tokens=False)["input_ids"]
        return tuple(ids)

    def render(self, messages: Messages | str) -> str:
        """The text that `encode` turns into ids."""
        if isinstance(messages, str):
            return messages
        if not self.has_template:
            raise ModelError(
                "data: this row's prompt is a list of messages, but model.template is none; give "
                "the prompt as text, or set model.template"
            )
        return self._apply(messages, generation_prompt=True)

    def literal(self, text: str) -> bool:
        """Whether no part of `text` would become a control token of this tokenizer."""
        plain = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        special = self.tokenizer(text, add_special_tokens=False)
        return plain["input_ids"] == special["input_ids"]

    def turn_end(self) -> int | None:
        """The id that the template writes right after an assistant's turn, if it is one token."""
        if not self.has_template:
            return None
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "MARKER"}]
        tail = self._apply(turn, generation_prompt=False).rpartition("MARKER")[2]
        ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
        # The end of a turn may be a control token that has no role such as eos or pad.
        control = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        control.update(self.tokenizer.all_special_ids)
        return ids[0] if ids and ids[0] in control else None

    def _apply(self, messages: Messages, *, generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"model.template: the chat template failed: {error}") from error


def _said(value: Any) -> Any:
    """A value without the entries that say "not set", which writers spell as null or as ""."""
    if isinstance(value, Mapping):
        return {key: _said(item) for key, item in value.items() if item not in (None, "")}
    return [_said(item) for item in value] if isinstance(value, list) else value


def _model_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer's model does with text, whichever release wrote it down."""
    # False is "not set" here alone: a normalizer's strip_accents differs between null and false.
    facts = {key: value for key, value in _said(model).items() if value is not False}
    # Ids by word are in `get_vocab`; the list of a unigram model holds its scores as well.
    if isinstance(facts.get("vocab"), Mapping):
        del facts["vocab"]
    if "merges" in facts:
        facts["merges"] = [
            merge.split(" ", 1) if isinstance(merge, str) else merge for merge in facts["merges"]
        ]
    return facts


def stop_ids(config: Any, generation_config: Any, template: PromptTemplate) -> tuple[int, ...]:
    """Every id that ends a completion: of model, generation config, tokenizer and template."""
    found: list[Any] = []
    for value in (
        config.eos_token_id,
        generation_config.eos_token_id if generation_config is not None else None,
        template.tokenizer.eos_token_id,
        template.turn_end(),
    ):
        if value is not None:
            found += value if isinstance(value, list | tuple) else (value,)
    odd = [id for id in found if type(id) is not int or id < 0]
    if odd:
        raise ModelError(
            f"model.path: eos_token_id of its config.json or generation_config.json holds "
            f"{odd[0]!r:.60}, which is no id of a token; mend the file"
        )
    return tuple(sorted(set(found)))
