"""How a bare answer is written as a completion, and which of these forms a grader reads.

Owns the forms, and the choice of the one in which answers are shown to a grader.
Refuses to own what is shown in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.audit.bench import Bench, accepted_count, gold_of
from surefoot.audit.report import Table
from surefoot.errors import RecipeError
from surefoot.records import Prompt
from surefoot.statistics import wilson

HOLE = "{answer}"
# Rows on which the forms are tried; more would not change which is read best.
TRIED = 40


@dataclass(frozen=True, slots=True)
class Form:
    """A text with a place for the answer."""

    name: str
    template: str

    def of(self, answer: str) -> str:
        inside = answer.strip("$") if "\\boxed" in self.template else answer
        return self.template.replace(HOLE, inside)


FORMS: tuple[Form, ...] = (
    Form("plain", HOLE),
    Form("sentence", f"The answer is {HOLE}."),
    Form("after ####", f"Step by step we find it.\n#### {HOLE}"),
    Form("boxed", f"\\boxed{{{HOLE}}}"),
    Form("boxed in a sentence", f"Therefore the final answer is $\\boxed{{{HOLE}}}$."),
    Form("answer tags", f"<answer>{HOLE}</answer>"),
    Form(
        "think and answer tags",
        f"<think>\nStep by step we find it.\n</think>\n<answer>{HOLE}</answer>",
    ),
    Form("boxed after think", f"<think>\nStep by step.\n</think>\n\\boxed{{{HOLE}}}"),
    Form("sentence after think", f"<think>\nStep by step.\n</think>\nThe answer is {HOLE}."),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """How often each form of the right answer was accepted: (form, accepted, tried)."""

    counts: tuple[tuple[Form, int, int], ...]

    @property
    def best(self) -> Form:
        """The form accepted most often; of equal ones the first."""
        return max(self.counts, key=lambda item: item[1] / max(item[2], 1))[0]

    @property
    def read(self) -> tuple[Form, ...]:
        """The forms that at least half of the right answers are accepted in, the best first."""
        good = [item for item in self.counts if 2 * item[1] >= item[2] > 0]
        good.sort(key=lambda item: -item[1] / item[2])
        return tuple(form for form, _, _ in good)

    def table(self) -> Table:
        rows = []
        for form, accepted, tried in self.counts:
            low, high = wilson(accepted, tried) if tried else (0.0, 1.0)
            share = f"{accepted / tried:.1%}" if tried else "no verdict"
            rows.append((form.name, form.of("42"), share, f"{low:.1%} to {high:.1%}", str(tried)))
        columns = ("form", "the answer 42 in it", "accepted", "95 % interval", "rows")
        return Table("The right answer, in several forms", columns, tuple(rows))


def own_forms(templates: Sequence[str]) -> tuple[Form, ...]:
    """Forms of the user's own, each a text with {answer} in it."""
    for template in templates:
        if HOLE not in template:
            raise RecipeError(
                f"--form {template!r} has no place for the answer; write {HOLE} in it, as in "
                f"'A: {HOLE}'"
            )
    return tuple(
        Form(f"your form {number}", template.replace("\\n", "\n"))
        for number, template in enumerate(templates, 1)
    )


def read_forms(bench: Bench, prompts: Sequence[Prompt], own: Sequence[Form] = ()) -> Reading:
    """Try every form on the right answers of a few rows."""
    rows = [(prompt, gold) for prompt in prompts if (gold := gold_of(prompt)) is not None][:TRIED]
    counts = []
    for form in (*own, *FORMS):
        marks = bench.marks([(prompt, form.of(gold)) for prompt, gold in rows])
        counts.append((form, *accepted_count(marks)))
    return Reading(tuple(counts))
