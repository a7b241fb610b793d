"""The model card of an exported directory: what it was made from, and what was measured.

Owns the text. Refuses to own the facts (`loops/export` collects them), and any praise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FILE = "README.md"
Kind = Literal["model", "adapter", "classifier"]

_LOADING: Mapping[Kind, str] = {
    "model": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH)
tokenizer = AutoTokenizer.from_pretrained(PATH)""",
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), PATH)
tokenizer = AutoTokenizer.from_pretrained(PATH)""",
    "classifier": """from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained(PATH)
tokenizer = AutoTokenizer.from_pretrained(PATH)""",
}


@dataclass(frozen=True)
class Card:
    """The facts of an export, each as the run has it."""

    name: str
    kind: Kind
    base: str
    hub_id: str | None
    """Of the base, where it came from a hub; a card's header may name nothing else."""
    method: str
    adapter: str | None
    data: Sequence[str]
    step: int
    steps: int | None
    seed: int
    evaluation: Mapping[str, float]
    """The metrics of the last evaluation up to this step; empty if there was none."""
    evaluated: int | None
    """Its step."""
    versions: Mapping[str, str]
    """Of the packages that trained it."""
    verified: str


def render(card: Card) -> str:
    """The card as Markdown with a YAML header."""
    library = "peft" if card.kind == "adapter" else "transformers"
    header = ["---", *([f"base_model: {card.hub_id}"] if card.hub_id else [])]
    header += [f"library_name: {library}", "tags: [surefoot]", "---"]
    of = "" if card.steps is None else f" of {card.steps:,}"
    facts = [
        ("base model", f"`{card.base}`"),
        ("method", card.method),
        *([("adapter", card.adapter)] if card.adapter else []),
        *(("data", source) for source in card.data),
        ("step", f"{card.step:,}{of}"),
        ("seed", str(card.seed)),
        ("trained with", ", ".join(f"{name} {word}" for name, word in card.versions.items())),
        ("verified", card.verified),
    ]
    lines = [*header, "", f"# {card.name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts]
    if card.evaluation:
        lines += ["", f"Evaluated at step {card.evaluated} on held-out rows:", ""]
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| `{name}` | {value:.6g} |" for name, value in card.evaluation.items()]
    lines += ["", "```python", _LOADING[card.kind], "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Inside a table."""
    return text.replace("|", "\\|").replace("\n", " ")
