"""One GRPO step on SmolLM2-135M, here and in TRL: the same work, timed side by side in one run.

    python bench/step_vs_trl.py       everything; writes bench/results/step_vs_trl.{json,txt}
    python bench/step_vs_trl.py --shapes 2x2x4 --steps 1 --out DIRECTORY      a smoke test

First the same tokens go through both losses in float32: loss and gradient must agree (relative
norm 1e-4). Then TRL's settings are swept for its fastest, and each side takes whole steps
(sample, score, update) in a process of its own, in turn, so that the machine's drift hits both.
Rewards are random, so that every group is live, and every completion runs to its cap; AdamW, KL
coefficient 0. TRL may train bfloat16 weights, which is less exact and less work than float32
weights in bfloat16 compute. Three pairs are timed: bfloat16 weights on both sides, TRL as it comes
and TRL given our allocator settings, which it does not itself set; and our steps by the demo's
recipe, with float32 weights and LM head, against TRL in its fastest setting of all.

Owns settings, pairs and the report. Refuses to own the steps (step_sides.py, step_floor.py) and
turns (turns.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from step_sides import parse
from turns import Child, say

HERE = Path(__file__).resolve().parent
SCRIPTS = ("step_sides.py", "step_floor.py", "turns.py")
AGREE = 1e-4
# The settings of glibc that surefoot.loops.process.tune_allocator makes in our own process.
KEPT_BLOCKS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "67108864",
}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ALLOCATORS: dict[str, dict[str, str]] = {
    "": {},
    "kept blocks": KEPT_BLOCKS,
    "kept blocks, huge pages": KEPT_BLOCKS | HUGE_PAGES,
}
"""By the words for it; the first is as TRL comes."""


def _said(weights: str) -> str:
    return "bf16 weights" if weights == "bfloat16" else "fp32 weights, bf16 compute"


@dataclass(frozen=True)
class Setting:
    """One way to run TRL."""

    weights: str
    allocator: str
    """A key of ALLOCATORS."""
    passes: int
    """Forward and backward passes a step; each takes that share of the sequences."""

    def __str__(self) -> str:
        weights = _said(self.weights)
        share = {1: "all rows a pass", 2: "half the rows a pass", 4: "a quarter of the rows a pass"}
        return ", ".join(filter(None, (weights, share[self.passes], self.allocator)))


class Scripts:
    """Where the scripts of the children lie; `main` copies them away first."""

    folder = HERE


def child(script: str, *arguments: str, allocator: str = "") -> Child:
    """A script of ours with one of the allocator settings, and none of those that are set here."""
    blank = dict.fromkeys(KEPT_BLOCKS | HUGE_PAGES)
    return Child(Scripts.folder / script, *arguments, settings={**blank, **ALLOCATORS[allocator]})


def ours(shape: str, weights: str) -> Child:
    return child("step_sides.py", "ours", "--shape", shape, "--weights", weights)


def theirs(shape: str, setting: Setting) -> Child:
    prompts, group, _ = parse(shape)
    batch = prompts * group // setting.passes
    options = ["--shape", shape, "--weights", setting.weights, "--batch", str(batch)]
    return child("step_sides.py", "trl", *options, allocator=setting.allocator)


def once(script: str, *arguments: str) -> dict[str, Any]:
    with child(script, *arguments) as side:
        return side.hear()


def sweep_one(shape: str, setting: Setting, *, warm: bool) -> float:
    """Seconds of one step of TRL."""
    with theirs(shape, setting) as side:
        if warm:
            side.turn()
        taken: float = side.turn()["step"]
    say(f"sweep {shape}: {taken:.2f} s  {setting}")
    return taken


def sweep(shape: str, *, warm: bool) -> dict[Setting, float]:
    """Seconds of one step of TRL on a shape in each setting that is tried.

    Weights and the rows a pass as TRL comes, then the allocator's settings for the fastest of them.
    """
    prompts, group, _ = parse(shape)
    timed: dict[Setting, float] = {}
    for weights in ("float32", "bfloat16"):
        for passes in (1, 2, 4):
            if prompts * group % passes == 0:
                setting = Setting(weights, "", passes)
                timed[setting] = sweep_one(shape, setting, warm=warm)
    known = min(timed, key=lambda setting: timed[setting])
    for allocator in list(ALLOCATORS)[1:]:
        setting = replace(known, allocator=allocator)
        timed[setting] = sweep_one(shape, setting, warm=warm)
    return timed


def facts(turns: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [turn["step"] for turn in turns]
    return {
        "seconds": steps,
        "sampling": [turn["sampling"] for turn in turns],
        "median": statistics.median(steps),
        "best": min(steps),
        "sampling_median": statistics.median(turn["sampling"] for turn in turns),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
    }


def pair(shape: str, weights: str, setting: Setting, steps: int) -> dict[str, Any]:
    """Ours and TRL's in turn, after two steps of each that are not counted."""
    mine, other = [], []
    with ours(shape, weights) as us, theirs(shape, setting) as them:
        # The heap of a process still grows in its second step.
        for _ in range(2):
            us.turn()
            them.turn()
        for _ in range(steps):
            mine.append(us.turn())
            other.append(them.turn())
            seconds = f"{mine[-1]['step']:.2f} s and TRL {other[-1]['step']:.2f} s"
            say(f"{shape}: {seconds}  {_said(weights)}; {setting}")
    here, there = facts(mine), facts(other)
    return {
        "weights": _said(weights),
        "setting": str(setting),
        "surefoot": here,
        "trl": there,
        "ratio_median": there["median"] / here["median"],
        "ratio_best": there["best"] / here["best"],
        "layouts": mine[-1]["layouts"],
        "prompt_tokens": mine[-1]["prompt_tokens"],
    }


def compare(shape: str, timed: dict[Setting, float], steps: int) -> dict[str, Any]:
    """bfloat16 weights on both sides, TRL as it comes and with our allocator's settings; then our
    float32 weights and head against TRL's fastest setting of all."""
    fastest = min(timed, key=lambda setting: timed[setting])
    plain = [s for s in timed if s.weights == "bfloat16" and not s.allocator]
    half = min(plain, key=lambda setting: timed[setting])
    tuned = replace(half, allocator=fastest.allocator)
    asked = [("bfloat16", half), ("bfloat16", tuned), ("float32", fastest)]
    pairs = [pair(shape, weights, setting, steps) for weights, setting in dict.fromkeys(asked)]
    floor = once("step_floor.py", shape, "--prompt-tokens", str(pairs[0]["prompt_tokens"]))
    best = pairs[-1]["surefoot"]["best"]
    return {"shape": shape, "pairs": pairs, "floor": floor, "over_floor": best / floor["total"]}


def _line(name: str, side: dict[str, Any], ratios: str = "") -> str:
    peak = side["peak_bytes"] / 2**30
    numbers = f"{side['median']:8.2f}{side['best']:8.2f}{side['sampling_median']:10.2f}{peak:10.1f}"
    return f"  {name:60}{numbers}{ratios}"


def shape_lines(row: dict[str, Any]) -> list[str]:
    floor = row["floor"]
    parts = " + ".join(
        f"{name} {floor[name]:.2f}" for name in ("decode", "prefill", "train", "head")
    )
    lines = [
        "",
        f"{row['shape']} (prompts x group x new tokens); layouts {row['pairs'][0]['layouts']}",
    ]
    lines += [f"  TRL, one {'warm' if row['warm'] else 'cold'} step in each setting:"]
    lines += [f"  {seconds:8.2f} s  {name}" for name, seconds in row["sweep"].items()]
    heads = ("median", "best", "sampling", "peak GiB", "ratio", "of bests")
    lines.append("  {:60}{:>8}{:>8}{:>10}{:>10}{:>8}{:>10}".format("in turn, seconds", *heads))
    for p in row["pairs"]:
        lines.append(_line(f"surefoot, {p['weights']}", p["surefoot"]))
        ratios = f"{p['ratio_median']:8.2f}{p['ratio_best']:10.2f}"
        lines.append(_line(f"TRL, {p['setting']}", p["trl"], ratios))
    said = row["pairs"][-1]["weights"]
    lines.append(f"  floor {floor['total']:.2f} s = {parts}")
    lines.append(f"  surefoot's best step, {said}, is {row['over_floor']:.2f} times the floor")
    return lines


NOTES = """
Ratio: TRL's median over surefoot's, then best over best, against TRL in the fastest setting found.
The first two pairs of a shape have bfloat16 weights on both sides, which was TRL's fastest or
nearly so: first TRL as it comes, then TRL with our allocator's settings: kept blocks (glibc keeps
freed memory) and huge pages, which surefoot's training process asks for itself and TRL was given by
environment variables. The last pair is surefoot as it trains by default in bfloat16 compute, with
float32 weights and LM head, which is more exact and more work, against TRL's fastest setting of
all. Sampling of TRL includes its call of the reward, a random number on both sides; surefoot's step
leaves out grading in worker processes and the ledger. Peak:
largest resident size of the process. The floor counts matrix products only, of the last pair.
"""


def report(result: dict[str, Any]) -> str:
    versions, check = result["versions"], result["check"]
    lines = [
        f"One GRPO step on SmolLM2-135M: surefoot and TRL {versions['trl']}",
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{result['threads']} threads, {result['steps']} timed steps a side",
        "",
        f"Same tokens, float32: loss {check['loss_ours']:.8f} and {check['loss_trl']:.8f} "
        f"(relative {check['loss_relative']:.1e}), gradient apart by "
        f"{check['gradient_relative']:.1e} (relative norm)",
    ]
    for row in result["shapes"]:
        lines += shape_lines(row)
    return "\n".join(lines) + "\n" + NOTES


def save(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step_vs_trl.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "step_vs_trl.txt").write_text(report(result))


def run(shapes: list[str], steps: int, out: Path) -> None:
    """Everything, in order; what is known so far is saved after each shape."""
    check = once("step_sides.py", "check")
    say(f"check: {check}")
    assert check["gradient_relative"] < AGREE and check["loss_relative"] < AGREE, check
    packages = {"torch": torch, "transformers": transformers, "trl": trl}
    result: dict[str, Any] = {
        "versions": {name: package.__version__ for name, package in packages.items()},
        "threads": torch.get_num_threads(),
        "steps": steps,
        "check": check,
        "shapes": [],
    }
    for shape in shapes:
        # The first shape is short enough for a warm step in each setting.
        warm = shape == shapes[0]
        timed = sweep(shape, warm=warm)
        tried = {str(setting): seconds for setting, seconds in timed.items()}
        row = compare(shape, timed, steps)
        result["shapes"].append({**row, "sweep": tried, "warm": warm})
        save(result, out)
    print(report(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8x8x12,4x8x128")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a side")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # A run takes long: an edit of these files meanwhile must not reach it.
        for script in SCRIPTS:
            shutil.copy(HERE / script, folder)
        Scripts.folder = Path(folder)
        run(options.shapes.split(","), options.steps, options.out)


if __name__ == "__main__":
    main()
