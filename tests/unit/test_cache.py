"""The decoding cache: blocks grow, rows leave and join, and no value is ever moved wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.rollout.cache import GrowingLayer, join, new_cache, select

HEADS, SIZE, LAYERS = 2, 3, 2


def states(rows: int, columns: int, *, start: float = 0.0) -> Tensor:
    """Every number differs: row x 1000 + column, a fraction for head and place."""
    row = torch.arange(rows)[:, None, None, None] * 1000.0
    column = torch.arange(columns)[None, None, :, None]
    head = torch.arange(HEADS)[None, :, None, None] * 0.25
    place = torch.arange(SIZE)[None, None, None, :] * 0.0625
    return start + row + column + head + place


def filled(rows: int, columns: int, *, start: float = 0.0) -> object:
    cache = new_cache(LAYERS)
    for index in range(LAYERS):
        made = states(rows, columns, start=start + 100_000 * index)
        cache.update(made, -made, index)
    return cache


def keys(cache: object, layer: int = 0) -> Tensor:
    return cache.layers[layer].keys  # type: ignore[attr-defined]


def test_appending_equals_concatenation_across_blocks() -> None:
    layer, want = GrowingLayer(), torch.empty(2, HEADS, 0, SIZE)
    moved = 0
    for width in (5, 1, 1, 127, 1, 200, 1):
        fresh = states(2, width, start=10_000.0 * width)
        want = torch.cat([want, fresh], dim=2)
        before = layer.key_buffer
        got_keys, got_values = layer.update(fresh, -fresh)
        moved += layer.key_buffer is not before
        assert torch.equal(got_keys, want) and torch.equal(got_values, -want)
    assert moved < 7, "every token copied the whole cache"


def test_a_token_is_written_in_place() -> None:
    layer = GrowingLayer()
    layer.update(states(2, 5), states(2, 5))
    buffer = layer.key_buffer
    for _ in range(100):
        layer.update(states(2, 1), states(2, 1))
    assert layer.key_buffer is buffer
    assert layer.keys.shape[2] == 105


def test_the_callers_states_are_copied() -> None:
    """Otherwise the model's own tensors would be written over by the next token."""
    layer, given = GrowingLayer(), states(1, 4)
    layer.update(given, given)
    layer.keys.zero_()
    assert torch.equal(given, states(1, 4))


def test_transformers_reads_its_length() -> None:
    cache = filled(2, 7)
    assert cache.get_seq_length() == 7  # type: ignore[attr-defined]
    cache.update(states(2, 3), states(2, 3), 0)  # type: ignore[attr-defined]
    assert cache.get_seq_length() == 10  # type: ignore[attr-defined]


def test_select_drops_repeats_and_reorders_rows_of_every_layer() -> None:
    cache = filled(4, 6)
    want = [keys(cache, i)[[3, 0, 0]].clone() for i in range(LAYERS)]
    select(cache, torch.tensor([3, 0, 0]))  # type: ignore[arg-type]
    for index in range(LAYERS):
        layer = cache.layers[index]  # type: ignore[attr-defined]
        assert torch.equal(layer.keys, want[index]) and torch.equal(layer.values, -want[index])


def test_repeated_rows_do_not_share_memory() -> None:
    cache = filled(1, 3)
    select(cache, torch.tensor([0, 0]))  # type: ignore[arg-type]
    fresh = states(2, 1, start=7.0)
    cache.update(fresh, fresh, 0)  # type: ignore[attr-defined]
    assert torch.equal(keys(cache)[:, :, 3:], fresh)
    assert torch.equal(keys(cache)[0, :, :3], keys(cache)[1, :, :3])


@pytest.mark.parametrize("first", [0, 2, 5])
def test_select_drops_the_first_columns(first: int) -> None:
    cache = filled(3, 6)
    want = keys(cache)[[2, 1], :, first:].clone()
    select(cache, torch.tensor([2, 1]), first_column=first)  # type: ignore[arg-type]
    assert torch.equal(keys(cache), want)
    fresh = states(2, 1, start=9.0)
    cache.update(fresh, -fresh, 0)  # type: ignore[attr-defined]
    assert torch.equal(keys(cache), torch.cat([want, fresh], dim=2))
    assert cache.get_seq_length() == 6 - first + 1  # type: ignore[attr-defined]


def test_join_pads_the_shorter_on_the_left() -> None:
    short, long = filled(1, 2, start=50.0), filled(2, 5)
    both = join([short, long])  # type: ignore[list-item]
    for index in range(LAYERS):
        out = keys(both, index)
        assert out.shape == (3, HEADS, 5, SIZE)
        assert torch.equal(out[0, :, :3], torch.zeros(HEADS, 3, SIZE))
        assert torch.equal(out[0, :, 3:], states(1, 2, start=50.0 + 100_000 * index)[0])
        assert torch.equal(out[1:], states(2, 5, start=100_000.0 * index))
        assert torch.equal(both.layers[index].values, -out)  # type: ignore[attr-defined]


def test_join_of_one_is_itself() -> None:
    cache = filled(2, 3)
    assert join([cache]) is cache  # type: ignore[list-item]
