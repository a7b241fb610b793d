"""How a group's shared prompt is forwarded once: the rows that a Scorer takes.

Owns three layouts of the same tokens, their cost, and the choice between them:

packed  one row [p | c1 | ... | cG] for each group; positions restart at the prompt's end and a
        boolean mask lets every completion see the prompt and itself. Dense attention, so for
        short completions.
prefix  the prompt goes through once, with gradient, into a key-value cache; completions continue
        on copies of it, in slices of similar length.
rows    prompt and completion side by side, the prompt again for each. The last resort.

The last token of a completion is predicted but never read, so no layout forwards it.
Refuses to own the forward pass (`scorer`) and which completions are worth one (`update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Name = Literal["packed", "prefix", "rows"]
NAMES: tuple[Name, ...] = ("packed", "prefix", "rows")

ATTENTION_WEIGHT = 4.0
"""A FLOP of masked attention costs about as much as four of a large matrix product."""
CALL_FLOPS = 1e9
"""What one more forward call costs, in FLOPs of a large matrix product."""
_SLICE_RATIO = 0.7


@dataclass(frozen=True)
class Bundle:
    """Completions of one prompt that are forwarded together; `rows` are their places in the batch.

    Every prompt and completion holds token ids; completions are not empty.
    """

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    @property
    def read(self) -> int:
        """Completion tokens that are inputs: all but the last of each."""
        return sum(len(completion) - 1 for completion in self.completions)

    @property
    def longest(self) -> int:
        return max(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True)
class Shape:
    """The counts of a model that a cost needs: parameters outside embeddings, attention width."""

    parameters: int
    attention: int
    """Layers times heads times head size."""


@dataclass(frozen=True)
class Slice:
    """Completions of similar length that continue on the cache together."""

    ids_BT: Tensor
    bundle_B: Tensor
    length_B: Tensor


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass takes. Only the fields of its `layout` are set.

    Scored token n of the pass is token `columns_N[n]` of completion `rows_N[n]` of the batch, and
    `targets_N[n]` is its id. `places_N` index the flattened hidden states: of the row block
    (packed, rows), or of the prompts' last states followed by the slices' states (prefix).
    """

    layout: Name
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    places_N: Tensor
    bundles: tuple[Bundle, ...]
    ids_RT: Tensor | None = None
    positions_RT: Tensor | None = None
    mask_RTT: Tensor | None = None
    prompts: tuple[Tensor, ...] = ()
    """Prefix: blocks of prompts of equal length, in the order of `bundles`."""
    slices: tuple[Slice, ...] = ()

    @property
    def tokens(self) -> int:
        """Positions that are forwarded, padding included."""
        if self.ids_RT is not None:
            return self.ids_RT.numel()
        blocks = sum(block.numel() for block in self.prompts)
        return blocks + sum(part.ids_BT.numel() for part in self.slices)

    @property
    def row_list(self) -> list[int]:
        """The completions of the batch that this pass scores, ascending."""
        return sorted(row for bundle in self.bundles for row in bundle.rows)


def split_bundles(bundles: Sequence[Bundle], *, budget: int) -> list[Bundle]:
    """Cut groups that exceed the token budget into smaller ones that repeat the prompt."""
    parts: list[Bundle] = []
    for bundle in bundles:
        order = sorted(range(len(bundle.rows)), key=lambda i: -len(bundle.completions[i]))
        current: list[int] = []
        tokens = len(bundle.prompt)
        for index in order:
            extra = len(bundle.completions[index]) - 1
            if current and tokens + extra > budget:
                parts.append(_pick(bundle, current))
                current, tokens = [], len(bundle.prompt)
            current.append(index)
            tokens += extra
        parts.append(_pick(bundle, current))
    return parts


def _pick(bundle: Bundle, indices: Sequence[int]) -> Bundle:
    return Bundle(
        bundle.prompt,
        tuple(bundle.completions[i] for i in indices),
        tuple(bundle.rows[i] for i in indices),
    )


def microbatches(
    bundles: Sequence[Bundle],
    *,
    budget: int,
    allowed: Sequence[Name],
    shape: Shape,
    whole: bool = False,
) -> list[Microbatch]:
    """Choose the cheapest allowed layout for these bundles and cut it by the token budget.

    `whole`: no bundle is split, though it exceed the budget, because its loss compares its answers.
    """
    pieces = list(bundles) if whole else split_bundles(bundles, budget=budget)
    plans = {name: _partition(name, pieces, budget) for name in allowed}
    best = min(allowed, key=lambda name: sum(_cost(name, part, shape) for part in plans[name]))
    return [build(best, part) for part in plans[best]]


def build(layout: Name, bundles: Sequence[Bundle]) -> Microbatch:
    """Lay out bundles as the input of one forward pass."""
    builders = {"packed": _packed, "prefix": _prefix, "rows": _rows}
    return builders[layout](tuple(bundles))


def _partition(layout: Name, bundles: Sequence[Bundle], budget: int) -> list[list[Bundle]]:
    """Bundles in passes of at most `budget` tokens each (a single one may exceed it)."""
    parts: list[list[Bundle]] = []
    size = {"packed": _packed_width, "prefix": _packed_width, "rows": _rows_width}[layout]
    for bundle in sorted(bundles, key=lambda b: (-size(b), b.rows)):
        if parts and _tokens(layout, [*parts[-1], bundle]) <= budget:
            parts[-1].append(bundle)
        else:
            parts.append([bundle])
    return parts


def _packed_width(bundle: Bundle) -> int:
    return len(bundle.prompt) + bundle.read


def _rows_width(bundle: Bundle) -> int:
    return len(bundle.prompt) + bundle.longest


def _tokens(layout: Name, part: Sequence[Bundle]) -> int:
    if layout == "packed":
        return len(part) * max(map(_packed_width, part))
    if layout == "rows":
        return sum(len(bundle.rows) for bundle in part) * max(map(_rows_width, part))
    prompts = sum(len(bundle.prompt) for bundle in part)
    return prompts + sum(count * width for count, width in _slice_sizes(part))


def _cost(layout: Name, part: Sequence[Bundle], shape: Shape) -> float:
    """FLOPs of a forward pass, with attention weighed by what it really costs."""
    linear = 2.0 * shape.parameters * _tokens(layout, part)
    if layout == "packed":
        width = max(map(_packed_width, part))
        pairs, calls = len(part) * width * width, 1
    elif layout == "rows":
        width = max(map(_rows_width, part))
        pairs, calls = sum(len(b.rows) for b in part) * width * width, 1
    else:
        slices = _slice_sizes(part)
        longest = max(len(bundle.prompt) for bundle in part)
        pairs = sum(len(bundle.prompt) ** 2 for bundle in part)
        pairs += sum(count * width * (longest + width) for count, width in slices)
        calls = len(slices) + len({len(bundle.prompt) for bundle in part})
    return linear + ATTENTION_WEIGHT * 4.0 * shape.attention * pairs + calls * CALL_FLOPS


def _packed(bundles: tuple[Bundle, ...]) -> Microbatch:
    width = max(map(_packed_width, bundles))
    ids = torch.zeros(len(bundles), width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    segment = torch.full_like(ids, -1)
    scored: list[tuple[int, int, int, int]] = []
    for r, bundle in enumerate(bundles):
        start = len(bundle.prompt)
        ids[r, :start] = torch.tensor(bundle.prompt)
        positions[r, :start] = torch.arange(start)
        segment[r, :start] = 0
        at = start
        for k, completion in enumerate(bundle.completions):
            read = len(completion) - 1
            ids[r, at : at + read] = torch.tensor(completion[:-1], dtype=torch.long)
            positions[r, at : at + read] = torch.arange(start, start + read)
            segment[r, at : at + read] = k + 1
            for t, token in enumerate(completion):
                place = start - 1 if t == 0 else at + t - 1
                scored.append((bundle.rows[k], t, token, r * width + place))
            at += read
    index = torch.arange(width)
    causal = index[:, None] >= index[None, :]
    same = segment[:, :, None] == segment[:, None, :]
    prompt = (segment == 0)[:, None, :]
    # Padding sees its own segment only, itself included: no query is left without a key.
    mask = causal & (same | (prompt & (segment >= 0)[:, :, None]))
    return _microbatch("packed", bundles, scored, ids=ids, positions=positions, mask=mask)


def _rows(bundles: tuple[Bundle, ...]) -> Microbatch:
    width = max(map(_rows_width, bundles))
    count = sum(len(bundle.rows) for bundle in bundles)
    ids = torch.zeros(count, width, dtype=torch.long)
    scored: list[tuple[int, int, int, int]] = []
    r = 0
    for bundle in bundles:
        start = len(bundle.prompt)
        for row, completion in zip(bundle.rows, bundle.completions, strict=True):
            line = (*bundle.prompt, *completion[:-1])
            ids[r, : len(line)] = torch.tensor(line)
            scored.extend(
                (row, t, token, r * width + start + t - 1) for t, token in enumerate(completion)
            )
            r += 1
    positions = torch.arange(width).expand(count, -1)
    return _microbatch("rows", bundles, scored, ids=ids, positions=positions)


def _slice_sizes(part: Sequence[Bundle]) -> list[tuple[int, int]]:
    """(completions, width) of each slice: lengths in falling order, cut where they drop."""
    widths = sorted((len(c) - 1 for b in part for c in b.completions), reverse=True)
    sizes: list[tuple[int, int]] = []
    start = 0
    for i, width in enumerate([*widths, -1]):
        if i > start and width < _SLICE_RATIO * widths[start]:
            sizes.append((i - start, widths[start]))
            start = i
    if start < len(widths):
        sizes.append((len(widths) - start, widths[start]))
    return [(count, width) for count, width in sizes if width > 0]


def _prefix(bundles: tuple[Bundle, ...]) -> Microbatch:
    # Prompts of equal length form a block, so that none is padded: a pad between prompt and
    # completion would shift a sliding window.
    bundles = tuple(sorted(bundles, key=lambda b: (len(b.prompt), b.rows)))
    blocks: dict[int, list[tuple[int, ...]]] = {}
    for bundle in bundles:
        blocks.setdefault(len(bundle.prompt), []).append(bundle.prompt)
    entries = sorted(
        ((b, k) for b, bundle in enumerate(bundles) for k in range(len(bundle.rows))),
        key=lambda e: (-len(bundles[e[0]].completions[e[1]]), bundles[e[0]].rows[e[1]]),
    )
    # Hidden states in order: the last one of each prompt, then every slice, flattened.
    scored = [(bundles[b].rows[k], 0, bundles[b].completions[k][0], b) for b, k in entries]
    slices: list[Slice] = []
    base, at = len(bundles), 0
    for count, width in _slice_sizes(bundles):
        ids = torch.zeros(count, width, dtype=torch.long)
        chosen = entries[at : at + count]
        for i, (b, k) in enumerate(chosen):
            completion = bundles[b].completions[k]
            ids[i, : len(completion) - 1] = torch.tensor(completion[:-1], dtype=torch.long)
            scored.extend(
                (bundles[b].rows[k], t, completion[t], base + i * width + t - 1)
                for t in range(1, len(completion))
            )
        lengths = [len(bundles[b].completions[k]) - 1 for b, k in chosen]
        owners = torch.tensor([b for b, _ in chosen])
        slices.append(Slice(ids, owners, torch.tensor(lengths)))
        base += count * width
        at += count
    prompts = tuple(torch.tensor(block) for block in blocks.values())
    return _microbatch("prefix", bundles, scored, prompts=prompts, slices=tuple(slices))


def _microbatch(
    layout: Name,
    bundles: tuple[Bundle, ...],
    scored: list[tuple[int, int, int, int]],
    *,
    ids: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    prompts: tuple[Tensor, ...] = (),
    slices: tuple[Slice, ...] = (),
) -> Microbatch:
    rows, columns, targets, places = torch.tensor(scored, dtype=torch.long).T.contiguous()
    return Microbatch(
        layout, rows, columns, targets, places, bundles, ids, positions, mask, prompts, slices
    )
