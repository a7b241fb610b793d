"""The fused attention kernel against surefoot's own on CPU, forward and backward, in bfloat16.

    python bench/attention.py          writes bench/results/attention.txt

Shapes are those of SmolLM2-135M (9 heads on 3 key-value heads of size 64) in the layouts of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from surefoot.learner.attention import short_attention
from surefoot.loops.process import tune_allocator

SHAPES = {
    "prefix, 64 rows of 11 on 40": (64, 11, 51),
    "packed, 8 rows of 130": (8, 130, 130),
    "prompts, 8 rows of 40": (8, 40, 40),
    "prefix, 32 rows of 127 on 40": (32, 127, 167),
    "packed, 1 row of 1060": (1, 1060, 1060),
}


def best(call: Callable[[], object]) -> float:
    """Milliseconds, best of four batches of five."""
    call()
    seconds = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(5):
            call()
        seconds = min(seconds, (time.perf_counter() - began) / 5)
    return seconds * 1e3


def main() -> None:
    tune_allocator()
    generator = torch.Generator().manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    lines = [
        f"Attention, bfloat16, forward and backward, milliseconds; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        f"{'shape':32}{'fused':>10}{'ours':>10}{'ratio':>8}",
    ]
    for name, (rows, queries, keys) in SHAPES.items():
        make = [(9, queries), (3, keys), (3, keys)]
        q, k, v = (
            torch.randn(rows, heads, length, 64, generator=generator).bfloat16().requires_grad_()
            for heads, length in make
        )
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = mask.expand(rows, 1, -1, -1)
        grad = torch.randn(rows, queries, 9, 64, generator=generator).bfloat16()

        def run(function: Callable[..., object], q=q, k=k, v=v, mask=mask, grad=grad) -> None:
            out, _ = function(module, q, k, v, mask, scaling=0.125)
            out.backward(grad)

        fused = best(lambda run=run: run(sdpa_attention_forward))
        ours = best(lambda run=run: run(short_attention))
        lines.append(f"{name:32}{fused:10.1f}{ours:10.1f}{fused / ours:8.1f}")
    lines.append("Queries longer than 256 go to the fused kernel on both sides.")
    text = "\n".join(lines) + "\n"
    target = Path(__file__).resolve().parent / "results" / "attention.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
