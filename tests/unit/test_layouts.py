"""Layouts: what they forward, that they agree with the model's own logits, and the choice."""

from __future__ import annotations

import pytest
import torch
from support.steps import distance
from support.tiny import VOCABULARY, architectures, make_model
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.learner.check import check_layouts
from surefoot.learner.layouts import NAMES, Bundle, Name, Shape, build, microbatches, split_bundles
from surefoot.learner.scorer import Scorer

EXACT_IN_FLOAT64 = ("gpt2",)
FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
SHAPE = Shape(parameters=100_000_000, attention=17_280)


def bundle(prompt: int, lengths: tuple[int, ...], *, first_row: int = 0) -> Bundle:
    generator = torch.Generator().manual_seed(prompt + 100 * first_row)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, VOCABULARY, (count,), generator=generator).tolist())

    rows = tuple(range(first_row, first_row + len(lengths)))
    return Bundle(ids(prompt), tuple(ids(n) for n in lengths), rows)


# 29 beside 40 leaves padding behind it that is longer than the sliding windows.
BUNDLES = [
    bundle(9, (6, 1, 12)),
    bundle(5, (3, 3, 10), first_row=3),
    bundle(9, (2,), first_row=6),
    bundle(7, (40, 29), first_row=7),
]


def plain(model: PreTrainedModel, bundles: list[Bundle], temperature: float) -> dict[int, Tensor]:
    """Each completion alone through the model's own forward."""
    found = {}
    for b in bundles:
        for row, completion in zip(b.rows, b.completions, strict=True):
            ids = torch.tensor([(*b.prompt, *completion)])
            logp = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
            start = len(b.prompt) - 1
            found[row] = logp[start:-1].gather(1, ids[0, start + 1 :, None])[:, 0]
    return found


def flat_gradient(model: PreTrainedModel, logps: dict[int, Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = sum((row + 1.5) * (-1) ** row * logps[row].sum() for row in sorted(logps))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("architecture", architectures())
def test_every_layout_equals_row_by_row(architecture: str, layout: Name) -> None:
    double = architecture in EXACT_IN_FLOAT64
    dtype = torch.float64 if double else torch.float32
    model = make_model(architectures()[architecture], dtype=dtype)
    scorer = Scorer(model, compute=dtype, head_dtype=dtype, temperature=0.7)
    if layout not in check_layouts(scorer, seed=0).allowed:
        assert layout == "packed"
        assert architecture in ("bloom", "gemma3", "mistral_sliding")
        return
    want = plain(model, BUNDLES, 0.7)
    part = build(layout, BUNDLES)
    logp_N = scorer(part).logp_N
    got = {}
    for row, expected in want.items():
        place = torch.nonzero(part.rows_N == row)[:, 0]
        got[row] = logp_N[place[part.columns_N[place].argsort()]]
        assert got[row].shape == expected.shape
    bound = 1e-9 if double else 1e-4
    everything = torch.cat([got[r] for r in sorted(got)])
    assert distance(everything.detach(), torch.cat([want[r] for r in sorted(want)])) < bound
    assert distance(flat_gradient(model, got), flat_gradient(model, want)) < bound


def test_packed_is_wrong_on_sliding_windows_and_therefore_off() -> None:
    model = make_model(architectures()["mistral_sliding"])
    scorer = Scorer(model, compute=torch.float32, head_dtype=torch.float32, temperature=1.0)
    check = check_layouts(scorer, seed=0)
    assert check.allowed == ("prefix", "rows")
    assert "sliding" in check.refused["packed"]
    # The refusal is not idle: packed really gives other numbers here.
    part = build("packed", [bundle(12, (9, 9))])
    want = plain(model, [bundle(12, (9, 9))], 1.0)
    got = scorer(part).logp_N[part.rows_N == 1]
    assert float((got - want[1]).detach().abs().max()) > 1e-3


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(FULL)]
)
def test_memory_that_runs_out_at_the_check_is_said_to(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whichever class: of a layout it would read as no more than "fails"."""

    def full(scorer: Scorer, part: object) -> object:
        raise error

    monkeypatch.setattr(Scorer, "forward", full)
    scorer = Scorer(make_model(), compute=torch.float32, head_dtype=torch.float32, temperature=1.0)
    with pytest.raises(ModelError, match=r"model\.path: memory runs out at the model's first test"):
        check_layouts(scorer, seed=0)


def test_tokens_forwarded_by_hand() -> None:
    group = bundle(10, (4, 4, 1))
    # Packed: the prompt once and all but the last token of each completion, 10 + 3 + 3 + 0.
    assert build("packed", [group]).tokens == 16
    # Prefix: the same here; the completion of one token needs no input at all.
    assert build("prefix", [group]).tokens == 16
    # Rows: three times the prompt and the longest completion but its last token, 3 * (10 + 3).
    assert build("rows", [group]).tokens == 39
    for name in NAMES:
        assert build(name, [group]).rows_N.numel() == 9


def test_one_long_completion_does_not_widen_the_others() -> None:
    # 31 completions of 5 tokens and one of 50, prompt 10.
    group = bundle(10, (50, *[5] * 31))
    assert build("packed", [group]).tokens == 10 + 49 + 31 * 4
    assert build("prefix", [group]).tokens == 10 + 49 + 31 * 4
    assert build("rows", [group]).tokens == 32 * 59


def test_completions_of_similar_length_share_a_slice() -> None:
    """Inputs of 10, 8 and 6 tokens: 8 is within seven tenths of 10 and is padded, 6 is not."""
    part = build("prefix", [bundle(10, (9, 7, 11))])
    assert [tuple(s.ids_BT.shape) for s in part.slices] == [(2, 10), (1, 6)]
    assert part.tokens == 10 + 2 * 10 + 6


def test_short_completions_pack_and_long_ones_take_the_prefix() -> None:
    short = [bundle(20, (5,) * 4)]
    long = [bundle(20, (512,) * 4)]
    # Eight prompts of eight lengths are one packed pass, and eight prefix passes and a slice.
    mixed = [bundle(20 + i, (5,) * 4, first_row=4 * i) for i in range(8)]

    def chosen(bundles: list[Bundle], allowed: tuple[Name, ...] = NAMES) -> list[str]:
        made = microbatches(bundles, budget=100_000, allowed=allowed, shape=SHAPE)
        return [part.layout for part in made]

    assert chosen(short) == ["packed"]
    assert chosen(mixed) == ["packed"]
    assert chosen(long) == ["prefix"]
    assert chosen(short, ("prefix", "rows")) == ["prefix"]
    assert chosen(long, ("packed", "rows")) == ["rows"]
    assert chosen(short, ("rows",)) == ["rows"]


def test_where_packed_ends_and_prefix_begins() -> None:
    """Both forward the same tokens, so attention decides against one call more.

    Prompt 20, two completions of 11: a packed row of 20 + 10 + 10 has 40 x 40 = 1600 pairs; the
    prefix has 20 x 20 + 2 x 10 x 30 = 1000. The 600 pairs between them cost
    4 x 4 x width x 600 FLOPs, a call 1e9: equal at a width of 104 167.
    """
    group = bundle(20, (11, 11))
    for width, expected in [(104_000, "packed"), (104_400, "prefix")]:
        shape = Shape(parameters=1_000_000, attention=width)
        (part,) = microbatches([group], budget=1000, allowed=NAMES, shape=shape)
        assert part.layout == expected


def test_the_budget_cuts_and_repeats_the_prompt() -> None:
    group = bundle(10, (6, 6, 6, 6))
    parts = split_bundles([group], budget=21)
    assert [len(part.rows) for part in parts] == [2, 2]
    assert all(part.prompt == group.prompt for part in parts)
    assert sorted(row for part in parts for row in part.rows) == [0, 1, 2, 3]
    made = microbatches([group], budget=21, allowed=("packed",), shape=SHAPE)
    assert [part.tokens for part in made] == [20, 20]
    # One completion may exceed the budget: it goes alone.
    alone = split_bundles([bundle(10, (30, 2))], budget=5)
    assert [len(part.completions[0]) for part in alone] == [30, 2]
