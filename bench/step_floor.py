"""The floor of a GRPO step on SmolLM2: counted work over rates timed bare (DESIGN, section 8).

    python bench/step_floor.py 8x8x12 --prompt-tokens 40

Owns counting and the bare rates, on the model's own layer shapes, best of five. Not counted:
attention, norms, the softmax, the optimizer; so no step can be at its floor. Refuses to own steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from step_sides import Shape, model_directory, parse
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig
from turns import answer

from surefoot.loops.process import tune_allocator


@dataclass(frozen=True)
class Sizes:
    """What the model's config says, in numbers."""

    hidden: int
    inner: int
    layers: int
    narrow: int
    """Width of keys, and of values."""
    vocabulary: int

    @property
    def layer(self) -> list[tuple[int, int]]:
        """(out, in) of the linear layers of one block."""
        wide, narrow = (self.hidden, self.hidden), (self.narrow, self.hidden)
        up, down = (self.inner, self.hidden), (self.hidden, self.inner)
        return [wide, narrow, narrow, wide, up, up, down]

    @property
    def body(self) -> int:
        """Parameters in linear layers, the head apart."""
        return self.layers * sum(o * i for o, i in self.layer)

    @property
    def head(self) -> int:
        return self.hidden * self.vocabulary


def sizes() -> Sizes:
    config = AutoConfig.from_pretrained(model_directory())
    return Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_key_value_heads * config.head_dim,
        config.vocab_size,
    )


def seconds(call: Callable[[], object]) -> float:
    """Best of five, after one that is not timed."""
    call()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def forward_rate(weights: list[Tensor], rows: int) -> float:
    """FLOP/s of the forward products of these weights on that many rows."""
    dtype = weights[0].dtype
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(dtype) for w in weights}

    def call() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    return 2.0 * rows * sum(w.numel() for w in weights) / seconds(call)


def train_rate(weights: list[Tensor], rows: int) -> float:
    """FLOP/s of forward, input gradient and weight gradient together."""
    dtype = weights[0].dtype
    widths = {n for w in weights for n in w.shape}
    block = {n: torch.randn(rows, n).to(dtype) for n in widths}

    def call() -> None:
        for weight in weights:
            out, into = weight.shape
            linear(block[into], weight)
            block[out] @ weight
            block[out].T @ block[into]

    return 6.0 * rows * sum(w.numel() for w in weights) / seconds(call)


def memory_rate() -> float:
    """Bytes a second: the faster of reading a block and copying it."""
    block = torch.randn(64 << 20)
    other = torch.empty_like(block)
    size = block.numel() * 4.0
    return max(size / seconds(block.sum), 2.0 * size / seconds(lambda: other.copy_(block)))


@torch.inference_mode()
def floor(shape: Shape, prompt_tokens: int) -> dict[str, float]:
    """Seconds of each part of the floor, and the rates behind them."""
    prompts, group, tokens = shape
    live, scored = prompts * group, prompts * group * tokens
    distinct = prompts * prompt_tokens + scored
    model = sizes()
    blocks = [torch.randn(o, i).bfloat16() for _ in range(model.layers) for o, i in model.layer]
    few = blocks[: 4 * len(model.layer)]
    head = torch.randn(model.vocabulary, model.hidden)
    half = [head.bfloat16()]
    # Rates may depend on the number of rows in a pass, and that is the trainer's to choose.
    wide = sorted({min(rows, distinct) for rows in (256, 1024, 4096)})
    rates = {
        "train": max(train_rate(few, rows) for rows in wide),
        "prefill": max(forward_rate(few, rows) for rows in wide),
        "decode": forward_rate(blocks, live),
        "decode_head": forward_rate(half, live),
        "head": max(train_rate([head], min(rows, scored)) for rows in (128, 512)),
        "memory_bytes": memory_rate(),
    }
    cache = 2 * model.layers * model.narrow * 2
    mean_columns = prompt_tokens + tokens / 2
    moved = 2 * (model.body + model.head) + live * mean_columns * cache
    products = model.body / rates["decode"] + model.head / rates["decode_head"]
    parts = {
        "decode": tokens * max(moved / rates["memory_bytes"], 2.0 * live * products),
        "prefill": 2.0 * prompts * prompt_tokens * model.body / rates["prefill"],
        "train": 6.0 * distinct * model.body / rates["train"],
        "head": 6.0 * scored * model.head / rates["head"],
    }
    named = {f"rate_{name}": rate for name, rate in rates.items()}
    return {**parts, "total": sum(parts.values()), **named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=parse)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    options = parser.parse_args()
    tune_allocator()
    answer(floor(options.shape, options.prompt_tokens))


if __name__ == "__main__":
    main()
