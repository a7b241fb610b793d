"""What the allocator's settings do for reading all weights of a token, and for the norms.

    python bench/allocator.py          writes bench/results/allocator.txt

Each line is a process of its own, in turn with the others. Products: the linear layers of
SmolLM2-135M for 32 rows in bfloat16, one layer after the other, so that weights come from memory:
with plain weights as torch multiplies them, and packed as the engine keeps them. Norm: forward and
backward of the norm before a product for 4096 tokens in float32 under bfloat16 autocast, as
transformers writes it and as the learner computes it, with two products behind it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from surefoot.learner.norms import norm_before_product
from surefoot.loops.process import tune_allocator

SIZES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, ROWS, TOKENS = 30, 32, 4096
SETTINGS = ("as it comes", "kept blocks", "kept blocks, huge pages")
ROUNDS = 3


def best(call: Callable[[], object]) -> float:
    """Milliseconds, best of fifteen."""
    seconds = float("inf")
    for _ in range(15):
        began = time.perf_counter()
        call()
        seconds = min(seconds, time.perf_counter() - began)
    return seconds * 1e3


@torch.inference_mode()
def products(*, packed: bool) -> float:
    ops = torch.ops.mkldnn
    weights = [torch.randn(*size).bfloat16() for _ in range(LAYERS) for size in SIZES]
    inputs = {width: torch.randn(ROWS, width).bfloat16() for width in (576, 1536)}
    pairs = [(inputs[weight.shape[1]], weight) for weight in weights]
    if not packed:
        return best(lambda: [F.linear(x, weight) for x, weight in pairs])
    kept = [(x, ops._reorder_linear_weight(weight, ROWS)) for x, weight in pairs]
    return best(lambda: [ops._linear_pointwise(x, w, None, "none", [], "") for x, w in kept])


def norm(*, ours: bool) -> float:
    module = LlamaRMSNorm(576)
    x = torch.randn(TOKENS, 576, requires_grad=True)
    weights = [torch.randn(1536, 576, requires_grad=True) for _ in range(2)]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = norm_before_product(module, x) if ours else module(x)
            out = [F.linear(y, weight) for weight in weights]
        torch.autograd.backward(out, [torch.ones_like(part) for part in out])

    return best(step)


def child(setting: str) -> None:
    if setting != SETTINGS[0]:
        tune_allocator(huge_pages=setting == SETTINGS[2])
    found = [products(packed=False), products(packed=True), norm(ours=False), norm(ours=True)]
    print(*found)


def main() -> None:
    times: dict[str, list[list[float]]] = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting in SETTINGS:
            command = [sys.executable, __file__, setting]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times[setting].append([float(word) for word in done.stdout.split()])
    heads = ("plain", "packed", "norm", "our norm")
    lines = [
        f"Milliseconds, best of {ROUNDS} processes; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        f"{'':28}" + "".join(f"{head:>10}" for head in heads),
    ]
    for setting, rows in times.items():
        values = [min(row[i] for row in rows) for i in range(len(heads))]
        lines.append(f"{setting:28}" + "".join(f"{value:10.1f}" for value in values))
    text = "\n".join(lines) + "\n" + str(__doc__).split("\n\n", 2)[2]
    target = Path(__file__).resolve().parent / "results" / "allocator.txt"
    target.write_text(text)
    print(text)


if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
