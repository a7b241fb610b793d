"""The `addition` source: sums of two whole numbers, whole and without a download.

Owns the questions and a test set that shares no pair with training, in either order.
Refuses to own how an answer is judged.
"""

from __future__ import annotations

import string
from itertools import combinations_with_replacement

from surefoot import draws
from surefoot.data.options import Option
from surefoot.data.rows import Row, Sieve
from surefoot.data.source import SPLIT_SEED, Loaded, Request, Source
from surefoot.errors import RecipeError

_MOST_OPERANDS = 1001  # a million questions; each is built and encoded before the run


def load(request: Request, sieve: Sieve) -> Loaded:
    """All ordered pairs of operands, and `eval_size` unordered pairs that are held out of them.

    A held-out pair appears once in the test set, in a keyed order of its operands, and in no order
    in training. The first pairs held out stay the same when eval_size grows.
    """
    low, high = request.options["min_operand"], request.options["max_operand"]
    if high < low:
        raise RecipeError(
            f"{request.key}.max_operand is {high}, below min_operand {low}: there is no question."
        )
    if high - low + 1 > _MOST_OPERANDS:
        raise RecipeError(
            f"{request.key}: {high - low + 1} operands give more than a million questions, which "
            f"are all built before the run. Keep max_operand - min_operand below {_MOST_OPERANDS}."
        )
    template = _template(request.options["question"], request.key)
    pairs = list(combinations_with_replacement(range(low, high + 1), 2))
    if request.eval_size > len(pairs) // 2:
        raise RecipeError(
            f"{request.key}.eval_size is {request.eval_size}, but operands {low} to {high} make "
            f"only {len(pairs)} different pairs, and half of them stay for training. Set eval_size "
            f"to {len(pairs) // 2} or less, or raise max_operand."
        )
    task = request.spec.task or "addition"
    order = draws.permutation(SPLIT_SEED, "split/addition", len(pairs))[: request.eval_size]
    swaps = draws.bits(SPLIT_SEED, "split/addition/swap", order) & 1
    tested = [pairs[index] for index in order]
    turned = [(b, a) if swap else (a, b) for (a, b), swap in zip(tested, swaps, strict=True)]
    hidden = set(tested)
    numbers = range(low, high + 1)
    kept = [(a, b) for a in numbers for b in numbers if (min(a, b), max(a, b)) not in hidden]
    sieve.seen += len(kept) + len(turned)
    return Loaded(
        rows=[_row(a, b, template, task) for a, b in kept],
        held_out=[_row(a, b, template, task) for a, b in turned],
    )


def _row(a: int, b: int, template: str, task: str) -> Row:
    name = f"{a}+{b}"
    return Row(
        where=f"addition {name}",
        id=name,
        prompt=template.format(a=a, b=b),
        answer=str(a + b),
        task=task,
        columns={"a": a, "b": b, "answer": str(a + b)},
    )


def _template(template: str, key: str) -> str:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise RecipeError(
            f"{key}.question is not a template ({error}). Write it as 'What is {{a}} + {{b}}?'."
        ) from None
    if sorted(fields) != ["a", "b"]:
        raise RecipeError(
            f"{key}.question has the fields {fields}, but needs {{a}} and {{b}} once each, as in "
            "'What is {a} + {b}?'."
        )
    return template


SOURCE = Source(
    name="addition",
    splits=True,
    options={
        "max_operand": Option(int, 50, at_least=0),
        "min_operand": Option(int, 0, at_least=0),
        "question": Option(str, "What is {a} + {b}?"),
    },
    reads=frozenset(),
    load=load,
)
