"""How often the shift test of a history baseline reports, with and without a shift, by simulation.

    python bench/shift.py          writes bench/results/shift.txt

No model: batches of rewards go straight into the detector, 32 prompts a step with one completion
each where nothing else is said. Draws are keyed, so the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from surefoot.loops.shift import Detector, Value

Draw = Callable[[np.random.Generator, int], np.ndarray]
RUNS, STEPS, PROMPTS = 300, 200, 32
QUIET: dict[str, Draw] = {
    **{
        f"0/1 rewards, rate {rate:g}": lambda rng, n, rate=rate: rng.random(n) < rate
        for rate in (0.02, 0.2, 0.5, 0.7, 0.98)
    },
    "normal": lambda rng, n: rng.normal(size=n),
    "log-normal": lambda rng, n: rng.lognormal(size=n),
    "Student t, 3 degrees of freedom": lambda rng, n: rng.standard_t(3, size=n),
}


def reports(batches: Iterable[np.ndarray]) -> list[int]:
    """The steps, from 1, at which a detector reports."""
    detector = Detector()
    found = []
    for step, batch in enumerate(batches, 1):
        values = [Value([float(reward)], None) for reward in batch]
        if detector.see(values, step=step) is not None:
            found.append(step)
    return found


def quiet(draw: Draw, prompts: int, seed: int) -> tuple[int, int]:
    """Reports and steps without any shift, in 30 runs of 200 steps."""
    count = 0
    for run in range(30):
        rng = np.random.default_rng([seed, run])
        count += len(reports(draw(rng, prompts) for _ in range(STEPS)))
    return count, 30 * STEPS


def caught(before: int) -> float:
    """Share of runs in which a fall from 0.7 to 0.2 is reported within three steps."""
    hits = 0
    for run in range(RUNS):
        rng = np.random.default_rng([77, before, run])
        rates = [0.7] * before + [0.2] * 3
        found = reports(rng.random(PROMPTS) < rate for rate in rates)
        hits += any(step > before for step in found)
    return hits / RUNS


def climbs(low: float, high: float, steps: int) -> int:
    """Runs of 200 in which a steady climb of the rate is reported."""
    hits = 0
    for run in range(200):
        rng = np.random.default_rng([99, steps, int(10 * low), run])
        rates = [low] * 20 + list(np.linspace(low, high, steps))
        hits += bool(reports(rng.random(PROMPTS) < rate for rate in rates))
    return hits


def main() -> None:
    lines = ["Reports without a shift, of 6000 steps each:"]
    for seed, (name, draw) in enumerate(QUIET.items()):
        counts = [quiet(draw, prompts, seed)[0] for prompts in (4, PROMPTS)]
        lines.append(f"  {name:34} {counts[0]} with 4 prompts, {counts[1]} with {PROMPTS}")
    lines.append(f"A fall from 0.7 to 0.2 reported within three steps, of {RUNS} runs:")
    lines += [f"  seen before: {n} steps {caught(n):8.1%}" for n in (1, 2, 3, 5)]
    lines.append("Climbs of the rate reported, of 200 runs after 20 steps at the lower rate:")
    lines += [
        f"  {low:g} to 0.6 over {steps:3} steps {climbs(low, 0.6, steps):4}"
        for low in (0.2, 0.0)
        for steps in (100, 50, 30)
    ]
    text = "\n".join(lines) + "\n"
    target = Path(__file__).resolve().parent / "results" / "shift.txt"
    target.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
