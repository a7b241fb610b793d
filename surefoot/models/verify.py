"""Does an exported directory do what the run's model does? Asked of plain transformers and PEFT.

Owns loading the directory as its users will, and comparing tokens, prompts and rewards.
Refuses to own what the run's model says (`loops/export`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from surefoot.errors import ModelError
from surefoot.models.load import LoadedModel

_TIE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Logits nearer than this are one to a model's rounding: either token is the likeliest."""
_REWARD = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Asked:
    """A question, its ids in a rollout, and the run's greedy answer."""

    text: str
    ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Below:
    """The model under an adapter, as `from_pretrained` takes it."""

    path: str
    revision: str | None


def same_tokens(
    folder: Path,
    loaded: LoadedModel,
    questions: Sequence[Asked],
    *,
    below: Below | None,
    remote_code: bool,
) -> str:
    """Let plain transformers (over `below`: plain PEFT) answer greedily; ModelError if otherwise.

    Returns what was compared, in words. Where two tokens are equally likely to rounding, the rest
    of that answer is not compared, and the words say so.
    """
    _same_prompts(folder, loaded, questions, remote_code=remote_code)
    plain, library = _open(folder, loaded, below, remote_code=remote_code)
    ends = plain.generation_config.eos_token_id
    listed = set(ends if isinstance(ends, list) else [ends])
    if below is None and listed != set(loaded.stop_ids):
        raise _differs(f"ends at the ids {sorted(listed)} instead of {list(loaded.stop_ids)}")
    # Defaults of the base, such as a repetition penalty, are not what the run sampled with.
    plain.generation_config = GenerationConfig(
        eos_token_id=list(loaded.stop_ids), pad_token_id=loaded.stop_ids[0]
    )
    compared = ties = 0
    for question in questions:
        equal = _equal_until(plain, question)
        compared += equal
        ties += equal < len(question.answer)
    said = f"{len(questions)} prompts, {compared} greedy tokens, equal in {library}"
    return said if not ties else f"{said}; {ties} of the answers up to a tie of two tokens"


def same_rewards(
    folder: Path, questions: Sequence[tuple[tuple[int, ...], float]], *, remote_code: bool
) -> str:
    """Let plain transformers score (ids, the run's reward); ModelError if it says otherwise."""
    plain = AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=remote_code
    )
    plain.eval()
    bound = _REWARD[plain.dtype]
    for ids, reward in questions:
        with torch.no_grad():
            told = float(plain(input_ids=torch.tensor([ids])).logits[0, 0])
        if abs(told - reward) > bound * max(1.0, abs(reward)):
            raise _differs(f"scores {told:.6g} where the run's model scores {reward:.6g}")
    return f"{len(questions)} answers, equal scores in transformers {transformers.__version__}"


def _open(
    folder: Path, loaded: LoadedModel, below: Below | None, *, remote_code: bool
) -> tuple[PreTrainedModel, str]:
    options = {"dtype": loaded.model.dtype, "trust_remote_code": remote_code}
    library = f"transformers {transformers.__version__}"
    if below is None:
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval(), library
    import peft

    base = AutoModelForCausalLM.from_pretrained(below.path, revision=below.revision, **options)
    over: Any = peft.PeftModel.from_pretrained(base, str(folder))
    return over.get_base_model().eval(), f"peft {peft.__version__} over {library}"


def _same_prompts(
    folder: Path, loaded: LoadedModel, questions: Sequence[Asked], *, remote_code: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote_code)
    for question in questions:
        if loaded.template.has_template:
            text = tokenizer.apply_chat_template(
                turn(question.text), tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(question.text)["input_ids"]
        if tuple(ids) != question.ids:
            raise _differs(f"reads the prompt {question.text!r} as other token ids")


def turn(text: str) -> list[dict[str, str]]:
    """A user's message."""
    return [{"role": "user", "content": text}]


@torch.no_grad()
def _equal_until(plain: PreTrainedModel, question: Asked) -> int:
    """How many tokens agree: all of them, or those before a tie."""
    start = torch.tensor([question.ids])
    whole: Any = plain.generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=False,
        max_new_tokens=len(question.answer),
    )
    theirs = whole[0, len(question.ids) :].tolist()
    pairs = list(zip(theirs, question.answer, strict=False))
    at = next((k for k, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if at == len(question.answer):
        return at
    ours = question.answer[at]
    logits = plain(input_ids=whole[:, : len(question.ids) + at]).logits[0, -1].double()
    if float(logits.max() - logits[ours]) > _TIE[plain.dtype]:
        raise _differs(
            f"answers {question.text!r} with other tokens from token {at + 1} on ({ours} is "
            "the run's)"
        )
    return at


def _differs(what: str) -> ModelError:
    return ModelError(
        f"export: the directory, loaded by plain transformers, {what}; nothing was written. Please "
        "report this with the versions that `surefoot env` prints"
    )
