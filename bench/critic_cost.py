"""What a critic costs: peak memory and time of a step on SmolLM2-135M, method by method (claim C2).

    python bench/critic_cost.py       everything; writes bench/results/critic_cost.{json,txt}
    python bench/critic_cost.py --shape 2x2x4 --steps 1 --arms rloo --out DIRECTORY  a smoke test

grpo, rloo, ppo with a critic of its own, with one of ten layers (a third) and with a value head on
the policy's own layers. Each is `surefoot.train` in a process of its own, as the demo trains:
float32 weights, bfloat16 compute, no reference. All have the same prompts, group and tokens; every
completion runs to its cap, and rewards are random, so that every group is live. Each method takes
steps in turn with grpo, so that the machine's drift hits both; memory is too small for all at once.

Owns arms, turns and the table. Refuses to own the conversation (turns.py) and the step.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turns import Child, answer, peak_bytes, say, wait

import surefoot

HERE = Path(__file__).resolve().parent
SCRIPTS = ("critic_cost.py", "turns.py")
BASE = "grpo"
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"method": {"name": "grpo"}},
    "rloo": {"method": {"name": "rloo"}},
    "ppo": {"method": {"name": "ppo"}},
    "ppo, critic of 10 layers": {"method": {"name": "ppo"}, "critic": {"layers": 10}},
    "ppo, shared trunk": {"method": {"name": "ppo"}, "critic": {"share_trunk": True}},
}
PARTS = {"sampling": "time/rollout", "score": "time/score", "update": "time/update"}
NO_KL = {"place": "none", "coef": 0.0, "measure_every": 0}


@surefoot.reward_function
def noise(sample: Any) -> float:
    """A number between 0 and 1 that the completion itself fixes."""
    return random.Random(str(sample.ids)).random()


class Turns(surefoot.Callback):
    """Answers after each step, and holds the run until the next turn."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> Any:
        assert metrics["optimizer_steps"] == 1 and metrics["skipped_steps"] == 0, dict(metrics)
        assert metrics["completions/clipped_ratio"] == 1.0, "a completion ended early"
        answer(
            {
                "step": metrics["time/step"],
                "peak_bytes": peak_bytes(),
                "forwarded": metrics["forwarded_tokens"],
                **{name: metrics[key] for name, key in PARTS.items()},
            }
        )
        return None if wait() else surefoot.STOP


def train(arm: str, shape: str, runs: Path) -> None:
    """One step a turn."""
    prompts, group, tokens = (int(number) for number in shape.split("x"))
    own = ARMS[arm]
    wait()
    surefoot.train(
        {
            "model": {"path": "smollm2-135m", "dtype": "float32", "compute": "bfloat16"},
            "data": {"source": "addition", "max_operand": 50},
            "method": {**own["method"], "group_size": group, "kl": NO_KL},
            "critic": own.get("critic", {}),
            "rollout": {
                "prompts_per_step": prompts,
                "max_new_tokens": tokens,
                "min_new_tokens": tokens,
            },
            "optim": {"learning_rate": 1e-5},
            "run": {
                "dir": str(runs / "run"),
                "steps": 10_000,
                "checkpoint_every": 0,
                "trackers": [],
                # Every completion is to run to its cap.
                "allow": ["truncated_sampling"],
            },
        },
        rewards=[noise],
        callbacks=[Turns()],
    )


def facts(turns: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [turn["step"] for turn in turns]
    middle = {name: statistics.median(turn[name] for turn in turns) for name in PARTS}
    return {
        "seconds": steps,
        "median": statistics.median(steps),
        "best": min(steps),
        **middle,
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "forwarded": turns[-1]["forwarded"],
    }


def pair(folder: Path, arm: str, shape: str, steps: int) -> dict[str, dict[str, Any]]:
    """An arm and grpo in turn, after two steps of each that are not counted."""
    seen: dict[str, list[dict[str, Any]]] = {"arm": [], BASE: []}
    with side(folder, arm, shape) as mine, side(folder, BASE, shape) as base:
        # The heap of a process still grows in its second step.
        for _ in range(2):
            mine.turn()
            base.turn()
        for _ in range(steps):
            seen["arm"].append(mine.turn())
            seen[BASE].append(base.turn())
            pace = " and ".join(f"{turns[-1]['step']:.2f} s" for turns in seen.values())
            say(f"{arm} and {BASE}: {pace}")
    return {name: facts(turns) for name, turns in seen.items()}


def side(folder: Path, arm: str, shape: str) -> Child:
    runs = tempfile.mkdtemp(dir=folder)
    return Child(folder / "critic_cost.py", "--child", arm, "--shape", shape, "--runs", runs)


def report(result: dict[str, Any]) -> str:
    lines = [
        f"A step on SmolLM2-135M, {result['shape']} (prompts x group x new tokens), "
        f"{result['threads']} threads, {result['steps']} timed steps a side",
        "",
        "  {:26}{:>9}{:>8}{:>8}{:>10}{:>8}{:>8}{:>12}{:>12}".format(
            "", "peak GiB", "median", "best", *PARTS, "memory/grpo", "time/grpo"
        ),
    ]
    for arm, sides in result["pairs"].items():
        mine, base = sides["arm"], sides[BASE]
        split = "".join(f"{mine[name]:>{10 if name == 'sampling' else 8}.2f}" for name in PARTS)
        lines.append(
            f"  {arm:26}{mine['peak_bytes'] / 2**30:>9.2f}{mine['median']:>8.2f}"
            f"{mine['best']:>8.2f}{split}{mine['peak_bytes'] / base['peak_bytes']:>12.2f}"
            f"{mine['median'] / base['median']:>12.2f}"
        )
    return "\n".join(lines) + "\n" + NOTES


NOTES = """
Seconds; medians but for best. Ratios are to grpo taking turns with that row (the first row: grpo
beside itself). Peak: largest resident size of the training process, with the interpreter and its
libraries, weights, optimizer states, the engine's bfloat16 copy and activations. No reference is
kept by any; one adds its weights to each alike.
"""


def run(shape: str, steps: int, arms: list[str], out: Path) -> None:
    """Pair after pair; what is known so far is saved after each."""
    import torch

    result: dict[str, Any] = {
        "shape": shape,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "pairs": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # A run takes long: an edit of these files meanwhile must not reach it.
        for script in SCRIPTS:
            shutil.copy(HERE / script, scratch)
        for arm in arms:
            result["pairs"][arm] = pair(Path(scratch), arm, shape, steps)
            (out / "critic_cost.json").write_text(json.dumps(result, indent=2) + "\n")
            (out / "critic_cost.txt").write_text(report(result))
    print(report(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8x8x16", help="prompts x group x new tokens")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a side")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--child", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        train(options.child, options.shape, options.runs)
    else:
        run(options.shape, options.steps, options.arms, options.out)


if __name__ == "__main__":
    main()
