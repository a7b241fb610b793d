"""One DPO step and one SFT step on SmolLM2-135M, here and in TRL, timed side by side in one run.

    python bench/given_vs_trl.py      everything; writes bench/results/given_vs_trl.{json,txt}
    python bench/given_vs_trl.py --check                               equal losses, nothing timed
    python bench/given_vs_trl.py --smoke --out DIRECTORY                  a smoke test, tiny model

DPO: 4 pairs, prompts of 400 tokens, answers of about 64; reference log-probabilities are known
before the first step on both sides. SFT: 8 demonstrations of 200 to 300 tokens, loss on the
completions. Both sides train by their own loop (`surefoot.train`, `trainer.train`) on the same
token ids; a step is forward, backward, clipping and AdamW, and its loss is the one that the loop
reports. First three steps in float32 on both sides: losses within 1e-4 of each other, gradient
norms within 1e-3 of their size. The first DPO step is at the reference's own weights, where every
loss is log 2; the others are not. Then TRL's settings are swept for its fastest, and each side
takes steps in a process of its own, in turn, so that the machine's drift hits both.

Owns settings, pairs, bars and the report. Refuses to own the steps (given_sides.py) and turns
(turns.py).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from step_vs_trl import ALLOCATORS, HUGE_PAGES, KEPT_BLOCKS
from turns import Child, say

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "examples" / "data" / "gsm8k_model_solutions.jsonl.gz"
SCRIPTS = ("given_sides.py", "turns.py")
LOSS_AGREES, NORM_AGREES = 1e-4, 1e-3
CHECKED_STEPS = 3
SANE = 0.1
"""First losses are no further apart than this in any precision: both sides did the same work."""
BARS = {"dpo": 1.5, "sft": 1.0}
"""TRL's median over ours, at least."""
SIZES = {
    "dpo": [[400, 64, 61], [400, 58, 72], [400, 70, 56], [400, 62, 66]],
    "sft": [
        [64, 136], [96, 118], [72, 157], [88, 155], [80, 177], [104, 167], [68, 218], [92, 208],
    ],
}  # fmt: skip
"""Tokens of prompt, chosen and rejected; of prompt and completion."""
TINY = {
    "dpo": [[40, 17, 15], [40, 13, 19], [40, 18, 16], [40, 14, 17]],
    "sft": [[6, 14], [9, 12], [7, 16], [8, 21]],
}
OURS_SAID = {
    "default": "fp32 weights and head, bf16 compute",
    "autocast": "fp32 weights, bf16 compute and head",
    "half": "bf16 weights, compute and head",
}
TRL_SAID = {
    "autocast": "fp32 weights, bf16 autocast",
    "half autocast": "bf16 weights, bf16 autocast",
    "half": "bf16 weights",
}
SAME = {"autocast": "autocast", "half autocast": "half", "half": "half"}
"""Our precision that is TRL's."""


@dataclass(frozen=True)
class Setting:
    """One way to run TRL."""

    precision: str
    passes: int = 1
    """Forward and backward passes a step; each takes that share of the rows."""
    recompute: bool = False
    """Gradient checkpointing, which TRL has on unless told otherwise."""
    allocator: str = ""
    """A key of ALLOCATORS."""

    def __str__(self) -> str:
        share = "all rows a pass" if self.passes == 1 else f"1/{self.passes} of the rows a pass"
        recomputes = "gradient checkpointing" if self.recompute else ""
        return ", ".join(
            filter(None, (TRL_SAID[self.precision], share, recomputes, self.allocator))
        )


@dataclass(frozen=True)
class Bench:
    """Where scripts and batches lie, and how much is done."""

    folder: Path
    steps: int
    untimed: int = 2
    model: str = "smollm2-135m"
    template: str = "auto"
    sizes: dict[str, list[list[int]]] = field(default_factory=lambda: SIZES)
    precisions: tuple[str, ...] = ("autocast", "half autocast", "half")
    passes: tuple[int, ...] = (1, 2, 4)

    def child(self, *arguments: str, allocator: str = "") -> Child:
        """A side with one of the allocator settings, and none of those that are set here."""
        blank = dict.fromkeys(KEPT_BLOCKS | HUGE_PAGES)
        settings = {**blank, **ALLOCATORS[allocator]}
        return Child(self.folder / "given_sides.py", *arguments, settings=settings)

    def file(self, task: str) -> str:
        return str(self.folder / f"{task}.json")

    def write(self, task: str) -> None:
        told = ["--model", self.model, "--template", self.template, "--text", str(TEXT)]
        sizes = json.dumps(self.sizes[task])
        with self.child("batch", task, *told, "--sizes", sizes, self.file(task)) as side:
            side.hear()

    def ours(self, task: str, precision: str) -> Child:
        return self.child("ours", "--precision", precision, self.file(task))

    def theirs(self, task: str, setting: Setting) -> Child:
        told = ["--precision", setting.precision, "--passes", str(setting.passes)]
        told += ["--recompute"] if setting.recompute else []
        return self.child("trl", *told, self.file(task), allocator=setting.allocator)


def check(bench: Bench, task: str) -> dict[str, Any]:
    """Steps in float32, one side after the other: losses and gradient norms as both report them.

    TRL recomputes activations, which changes nothing but memory.
    """
    with bench.ours(task, "exact") as us:
        mine = [us.turn() for _ in range(CHECKED_STEPS)]
    with bench.theirs(task, Setting("exact", recompute=True)) as them:
        other = [them.turn() for _ in range(CHECKED_STEPS)]
    pairs = list(zip(mine, other, strict=True))
    found = {
        "loss_ours": [turn["loss"] for turn in mine],
        "loss_trl": [turn["loss"] for turn in other],
        "norm_ours": [turn["norm"] for turn in mine],
        "norm_trl": [turn["norm"] for turn in other],
        "loss_apart": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "norm_apart": max(abs(a["norm"] - b["norm"]) / b["norm"] for a, b in pairs),
    }
    say(f"{task}: {found}")
    assert found["loss_apart"] <= LOSS_AGREES and found["norm_apart"] <= NORM_AGREES, found
    if task == "dpo":
        assert abs(mine[-1]["loss"] - math.log(2)) > 10 * LOSS_AGREES, "still the reference"
    return found


def sweep_one(bench: Bench, task: str, setting: Setting) -> float:
    """Seconds of TRL's second step."""
    with bench.theirs(task, setting) as side:
        side.turn()
        taken: float = side.turn()["step"]
    say(f"sweep {task}: {taken:.2f} s  {setting}")
    return taken


def sweep(bench: Bench, task: str) -> dict[Setting, float]:
    """Seconds of TRL's step in each setting that is tried.

    Precision and the rows a pass; then gradient checkpointing and the allocator's settings, for the
    fastest so far.
    """
    tried = [Setting(name, passes) for name in bench.precisions for passes in bench.passes]
    timed = {setting: sweep_one(bench, task, setting) for setting in tried}
    known = fastest(timed)
    more = [replace(known, recompute=True)]
    more += [replace(known, allocator=name) for name in list(ALLOCATORS)[1:]]
    return timed | {setting: sweep_one(bench, task, setting) for setting in more}


def fastest(timed: dict[Setting, float]) -> Setting:
    return min(timed, key=lambda setting: timed[setting])


def facts(turns: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [turn["step"] for turn in turns]
    return {
        "seconds": steps,
        "median": statistics.median(steps),
        "best": min(steps),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
    }


def pair(bench: Bench, task: str, precision: str, setting: Setting) -> dict[str, Any]:
    """Ours and TRL's in turn; the first steps of each are not counted."""
    mine, other = [], []
    with bench.ours(task, precision) as us, bench.theirs(task, setting) as them:
        for _ in range(bench.untimed + bench.steps):
            mine.append(us.turn())
            other.append(them.turn())
            seconds = f"{mine[-1]['step']:.2f} s and TRL {other[-1]['step']:.2f} s"
            say(f"{task}: {seconds}  {OURS_SAID[precision]}; {setting}")
    apart = abs(mine[0]["loss"] - other[0]["loss"])
    assert apart < SANE, (mine[0], other[0])
    here, there = facts(mine[bench.untimed :]), facts(other[bench.untimed :])
    return {
        "precision": OURS_SAID[precision],
        "setting": str(setting),
        "surefoot": here,
        "trl": there,
        "ratio_median": there["median"] / here["median"],
        "ratio_best": there["best"] / here["best"],
        "losses": [[turn["loss"] for turn in side] for side in (mine, other)],
        "first_loss_apart": apart,
        "forwarded": mine[-1]["forwarded"],
        "layouts": mine[-1]["layouts"],
    }


def compare(bench: Bench, task: str, timed: dict[Setting, float]) -> list[dict[str, Any]]:
    """Equal precision, TRL as it comes and in its fastest setting of all; then our steps as the
    demos train, against that setting."""
    plain = fastest({setting: taken for setting, taken in timed.items() if not setting.allocator})
    best = fastest(timed)
    asked = [(SAME[plain.precision], plain), (SAME[best.precision], best), ("default", best)]
    return [pair(bench, task, precision, setting) for precision, setting in dict.fromkeys(asked)]


def verdict(task: str, pairs: list[dict[str, Any]]) -> str:
    bar = BARS[task]
    asked = f"at least {bar} times faster than TRL" if bar > 1 else "no slower than TRL"
    missed = [p for p in pairs if p["ratio_median"] < bar]
    short = [f"{p['precision']} ({p['ratio_median']:.2f})" for p in missed]
    if not short:
        return f"Bar, {asked}: met by every pair"
    return f"Bar, {asked}: NOT met with {'; '.join(short)}"


def task_lines(task: str, row: dict[str, Any]) -> list[str]:
    found, first = row["check"], row["pairs"][0]
    shape = ", ".join("+".join(map(str, sizes)) for sizes in row["sizes"])
    lines = [
        "",
        f"{task.upper()}; tokens of prompt and answers: {shape}",
        f"  surefoot forwards {first['forwarded']} positions; layouts {first['layouts']}",
        "  the same tokens in float32, three steps; losses and gradient norms:",
    ]
    for name, told in (("surefoot", "ours"), ("TRL", "trl")):
        losses = " ".join(f"{loss:.6f}" for loss in found[f"loss_{told}"])
        norms = " ".join(f"{norm:.4f}" for norm in found[f"norm_{told}"])
        lines.append(f"    {name:10}{losses}   {norms}")
    lines += [
        f"    losses apart by at most {found['loss_apart']:.1e}, "
        f"norms by {found['norm_apart']:.1e} of their size",
        "  TRL, its second step in each setting:",
    ]
    lines += [f"  {seconds:8.2f} s  {name}" for name, seconds in row["sweep"].items()]
    heads = ("median", "best", "peak GiB", "ratio", "of bests")
    lines.append("  {:72}{:>8}{:>8}{:>10}{:>8}{:>10}".format("in turn, seconds", *heads))
    for p in row["pairs"]:
        ratios = f"{p['ratio_median']:8.2f}{p['ratio_best']:10.2f}"
        lines.append(_line(f"surefoot, {p['precision']}", p["surefoot"], ""))
        lines.append(_line(f"TRL, {p['setting']}", p["trl"], ratios))
    return [*lines, f"  {verdict(task, row['pairs'])}"]


def _line(name: str, side: dict[str, Any], ratios: str) -> str:
    peak = side["peak_bytes"] / 2**30
    return f"  {name:72}{side['median']:8.2f}{side['best']:8.2f}{peak:10.1f}{ratios}"


NOTES = """
Ratio: TRL's median over surefoot's, then best over best. The first pairs of a task have TRL's
precision on both sides: TRL as it comes, then in its fastest setting of all, which may have our
allocator's settings: kept blocks (glibc keeps freed memory) and huge pages, which surefoot.train
asks for itself and TRL was given by environment variables. The last pair is surefoot as the demos
train, with float32 weights and LM head, against TRL's fastest setting. Both sides clip and log
every step. On a CPU, TRL's LM head scores every position, prompts and padding too, and adds its
gradients up in float32; on a GPU with Triton it scores the trained tokens alone, as surefoot
does everywhere, so the ratios hold for CPUs. For DPO surefoot forwards a prompt once for both
answers, TRL with each. Peak: largest resident size of the process.
"""


def report(result: dict[str, Any]) -> str:
    versions = result["versions"]
    lines = [
        f"One step on given data, {result['model']}: surefoot and TRL {versions['trl']}",
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{result['threads']} threads, {result['steps']} timed steps a side",
    ]
    for task, row in result["tasks"].items():
        lines += task_lines(task, row)
    return "\n".join(lines) + "\n" + NOTES


def save(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given_vs_trl.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "given_vs_trl.txt").write_text(report(result))


def kept(result: dict[str, Any], folder: Path, tasks: list[str]) -> dict[str, Any]:
    """The other tasks of an earlier run that differs in nothing else."""
    file = folder / "given_vs_trl.json"
    if not file.exists():
        return {}
    old = json.loads(file.read_text())
    if any(old[key] != result[key] for key in result if key != "tasks"):
        return {}
    return {task: row for task, row in old["tasks"].items() if task not in tasks}


def run(bench: Bench, tasks: list[str], out: Path | None) -> None:
    """Everything, in order; what is known so far is saved after each task. No `out`: the check."""
    packages = {"torch": torch, "transformers": transformers, "trl": trl}
    result: dict[str, Any] = {
        "versions": {name: package.__version__ for name, package in packages.items()},
        "model": bench.model,
        "threads": torch.get_num_threads(),
        "steps": bench.steps,
        "tasks": {},
    }
    if out is not None:
        result["tasks"] = kept(result, out, tasks)
    for task in tasks:
        bench.write(task)
        row: dict[str, Any] = {"sizes": bench.sizes[task], "check": check(bench, task)}
        if out is None:
            continue
        timed = sweep(bench, task)
        row["sweep"] = {str(setting): seconds for setting, seconds in timed.items()}
        row["pairs"] = compare(bench, task, timed)
        result["tasks"][task] = row
        save(result, out)
    if out is not None:
        print(report(result))


def tiny(folder: Path) -> dict[str, Any]:
    """The settings of a smoke test: a random model of characters, and few of TRL's settings."""
    from character_model import Shape
    from character_model import save as save_model

    printable = "".join(map(chr, range(32, 127))) + "\n"
    model = save_model(
        folder / "tiny", characters=printable, seed=0, shape=Shape(hidden=32, context=64)
    )
    told = {"model": str(model), "template": "none", "sizes": TINY, "untimed": 1}
    return {**told, "precisions": ("autocast",), "passes": (2,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="dpo,sft")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a side")
    parser.add_argument("--untimed", type=int, default=2, help="steps a side before those")
    parser.add_argument("--passes", default="1,2,4", help="of TRL's sweep, passes a step")
    parser.add_argument("--check", action="store_true", help="equal losses, nothing timed")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.smoke and not options.check and options.out == HERE / "results":
        parser.error("--smoke needs an --out of its own")
    with tempfile.TemporaryDirectory() as name:
        # A run takes long: an edit of these files meanwhile must not reach it.
        folder = Path(name)
        for script in SCRIPTS:
            shutil.copy(HERE / script, folder)
        passes = tuple(int(count) for count in options.passes.split(","))
        changes: dict[str, Any] = {"untimed": options.untimed, "passes": passes}
        if options.smoke:
            changes |= tiny(folder)
        bench = Bench(folder, options.steps, **changes)
        run(bench, options.tasks.split(","), None if options.check else options.out)


if __name__ == "__main__":
    main()
