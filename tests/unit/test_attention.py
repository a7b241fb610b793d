"""Attention for short rows against torch's own kernel in float64, and by hand numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny import architectures, make_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from surefoot.learner import attention
from surefoot.learner.attention import NAME, short_attention, use_short_attention

BATCH, HEADS, SIZE = 3, 4, 5
INFINITE = float("-inf")


class Module(nn.Module):
    """What transformers hands over: an attention layer that knows how many heads share a key."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.fixture(autouse=True)
def fresh_mask_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_bias", attention._Bias())
    yield


def states(
    queries: int, keys: int, *, shared: int = HEADS, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + 100 * keys + shared)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = random(BATCH, HEADS, queries, SIZE).requires_grad_()
    key = random(BATCH, shared, keys, SIZE).requires_grad_()
    return query, key, random(BATCH, shared, keys, SIZE).requires_grad_()


def offset_causal(queries: int, keys: int) -> Tensor:
    """Query i stands at column keys - queries + i."""
    column = torch.arange(keys)
    place = torch.arange(keys - queries, keys)
    return (column <= place[:, None]).expand(BATCH, 1, -1, -1)


def padded(queries: int, keys: int) -> Tensor:
    """Each row of the batch lacks another number of columns on the left, and sees itself."""
    mask = offset_causal(queries, keys).clone()
    for row in range(BATCH):
        mask[row, :, :, :row] = False
    index = torch.arange(queries)
    mask[:, :, index, keys - queries + index] = True
    return mask


def scattered(queries: int, keys: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(BATCH, 1, queries, keys, generator=generator) < 0.5
    mask[..., 0] = True
    return mask


MASKS = {"causal": offset_causal, "padded": padded, "scattered": scattered}


def ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    groups: int = 1,
    **options: Any,
) -> Tensor:
    out, weights = short_attention(Module(groups), query, key, value, mask, **options)
    assert weights is None
    assert out.is_contiguous()
    return out


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Every query head with its own copy of the keys, through torch."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale
    ).transpose(1, 2)


def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the fused kernel was called")

    monkeypatch.setattr(attention, "sdpa_attention_forward", refuse)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 11), (2, 9)])
def test_value_and_gradient_equal_the_kernels(
    queries: int,
    keys: int,
    shared: int,
    additive: bool,
    kind: str,
    scale: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_kernel(monkeypatch)
    inputs = states(queries, keys, shared=shared)
    mask = MASKS[kind](queries, keys)
    given = mask
    if additive:
        given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, INFINITE)
    got = ours(*inputs, given, groups=HEADS // shared, scaling=scale)
    want = kernel(*inputs, mask, scale)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).reshape(got.shape)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        rtol=1e-11,
        atol=1e-12,
    )


def test_a_finite_additive_mask_is_a_bias() -> None:
    inputs = states(5, 5)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(BATCH, 1, 5, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours(*inputs, bias), kernel(*inputs, bias, None), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8)])
def test_without_a_mask_a_query_sees_what_came_before_it(queries: int, keys: int) -> None:
    """On a cache of keys - queries columns the queries come after it."""
    inputs = states(queries, keys)
    want = kernel(*inputs, offset_causal(queries, keys), None)
    torch.testing.assert_close(ours(*inputs, None), want, rtol=1e-12, atol=1e-12)


def test_hand_numbers() -> None:
    """Queries of zeros weigh all they see equally; ln 3 against 0 weighs three to one."""
    value = torch.tensor([3.0, 9.0, 30.0]).reshape(1, 1, 3, 1)
    zeros = torch.zeros(1, 1, 3, 1)
    assert ours(zeros, zeros, value, None).flatten().tolist() == [3.0, 6.0, 14.0]
    query = torch.tensor([1.0, 1.0]).reshape(1, 1, 2, 1)
    key = torch.tensor([1.0986122886681098, 0.0, 5.0]).reshape(1, 1, 3, 1)
    mask = torch.tensor([[True, True, False], [False, False, True]])[None, None]
    assert ours(query, key, value, mask).flatten().tolist() == pytest.approx([4.5, 30.0])
    halved = ours(query, 2 * key, value, mask, scaling=0.5)
    assert halved.flatten().tolist() == pytest.approx([4.5, 30.0])


@pytest.mark.parametrize("said_by", ["module", "call"])
def test_attention_that_is_not_causal_sees_what_comes_later(said_by: str) -> None:
    value = torch.tensor([3.0, 9.0, 30.0]).reshape(1, 1, 3, 1)
    zeros = torch.zeros(1, 1, 3, 1)
    module, options = Module(), {}
    if said_by == "module":
        module.is_causal = False
    else:
        options["is_causal"] = False
    out, _ = short_attention(module, zeros, zeros, value, None, **options)
    assert out.flatten().tolist() == pytest.approx([14.0, 14.0, 14.0])


def test_each_pair_of_heads_reads_its_own_key() -> None:
    """Grouped queries: heads 0 and 1 share the first key-value head, 2 and 3 the second."""
    zeros = torch.zeros(1, 4, 2, 1)
    value = torch.tensor([[1.0, 3.0], [10.0, 30.0]]).reshape(1, 2, 2, 1)
    out = ours(zeros, torch.zeros(1, 2, 2, 1), value, None, groups=2)
    assert out[0, :, :, 0].tolist() == [[1.0, 1.0, 10.0, 10.0], [2.0, 2.0, 20.0, 20.0]]


@pytest.mark.parametrize("additive", [False, True])
def test_a_query_without_any_key_stays_finite_and_harms_no_other(additive: bool) -> None:
    """Padding beyond a sliding window sees nothing; NaN there would reach every real row."""
    query, key, value = states(4, 4)
    mask = offset_causal(4, 4).clone()
    want = kernel(query, key, value, mask, None)
    mask[:, :, 3] = False
    given = mask
    if additive:
        given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, INFINITE)
    got = ours(query, key, value, given)
    assert bool(torch.isfinite(got).all())
    torch.testing.assert_close(got[:, :3], want[:, :3], rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got[:, :3].sum(), (query, key, value))
    wants = torch.autograd.grad(want[:, :3].sum(), (query, key, value))
    torch.testing.assert_close(grads, wants, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Scores are float32: the result is the exact one, rounded to the input's precision."""
    inputs = states(6, 9, shared=2, dtype=dtype)
    mask = offset_causal(6, 9)
    want = kernel(*(state.double() for state in inputs), mask, None)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(*inputs, mask, groups=2)
    assert got.dtype == dtype
    half_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(
        got.double(), want, rtol=1.01 * half_step, atol=10 * torch.finfo(torch.float32).eps
    )


def test_one_mask_after_the_other() -> None:
    """The expanded mask of the last call is kept, and must not outlive its mask or its shape."""
    inputs = states(5, 5)
    for kind in ("causal", "scattered", "causal", "padded"):
        mask = MASKS[kind](5, 5)
        want = kernel(*inputs, mask, None)
        torch.testing.assert_close(ours(*inputs, mask), want, rtol=1e-12, atol=1e-12)
    mask = MASKS["scattered"](5, 5)
    for heads, shared in [(4, 4), (4, 2), (2, 1), (4, 1), (2, 2), (4, 4)]:
        query = inputs[0][:, :heads]
        key, value = inputs[1][:, :shared], inputs[2][:, :shared]
        got = ours(query, key, value, mask, groups=heads // shared)
        want = kernel(query, key, value, mask, None)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    single = ours(*(state.float() for state in inputs), mask)
    want = kernel(*inputs, mask, None).float()
    torch.testing.assert_close(single, want, rtol=1e-5, atol=1e-6)


def test_layers_of_one_pass_expand_their_mask_once() -> None:
    inputs, mask = states(5, 5), offset_causal(5, 5)
    ours(*inputs, mask)
    kept = attention._bias.bias
    ours(*inputs, mask)
    assert attention._bias.bias is kept


@pytest.mark.parametrize(
    ("queries", "options"),
    [
        (1, {}),
        (257, {}),
        (4, {"dropout": 0.5}),
        (4, {"is_causal": False}),
    ],
)
def test_the_rest_goes_to_the_kernel_as_it_came(
    queries: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []

    def watch(*args: object, **given: object) -> tuple[Tensor, None]:
        calls.append((*args, given))
        return torch.zeros(1), None

    monkeypatch.setattr(attention, "sdpa_attention_forward", watch)
    query, key, value = states(queries, queries)
    module = Module()
    dropout = options.get("dropout", 0.0)
    named = {name: option for name, option in options.items() if name != "dropout"}
    short_attention(module, query, key, value, None, dropout, 0.3, **named)
    assert calls == [(module, query, key, value, None, dropout, 0.3, named)]


def test_a_mask_for_each_head_goes_to_the_kernel() -> None:
    """ALiBi comes as a bias of every head."""
    inputs = states(4, 4)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(BATCH, HEADS, 4, 4, generator=generator, dtype=torch.float64)
    got = ours(*inputs, bias)
    want, _ = sdpa_attention_forward(Module(), *inputs, bias)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, kernel(*inputs, bias, None), rtol=1e-12, atol=1e-12)


def test_the_longest_short_query_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    no_kernel(monkeypatch)
    inputs = states(256, 256)
    want = kernel(*inputs, offset_causal(256, 256), None)
    torch.testing.assert_close(ours(*inputs, None), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", architectures())
def test_a_whole_model_says_the_same_after_the_switch(name: str) -> None:
    model = make_model(architectures()[name])
    ids = torch.arange(4, 28).reshape(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    before = model.config._attn_implementation
    want = model(input_ids=ids, attention_mask=mask).logits
    use_short_attention(model)
    assert (model.config._attn_implementation == NAME) == (before == "sdpa")
    got = model(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)
    # A choice of the user's is not overruled.
    eager = make_model(architectures()[name])
    eager.set_attn_implementation("eager")
    use_short_attention(eager)
    assert eager.config._attn_implementation == "eager"
