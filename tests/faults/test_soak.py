"""Hundreds of steps under random faults: all of them counted, and nothing else changed by them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.offline import make_offline_recipe
from support.results import write_result
from support.runs import assert_same_run
from support.soak import (
    WARM_UP,
    Life,
    Memory,
    Soak,
    fault_of,
    injected,
    make_script,
    make_soak_recipe,
    watch,
)

from surefoot.errors import EXIT_DONE, EXIT_FINDING, EXIT_INTERRUPTED
from surefoot.run.read import read_groups, read_metrics, read_samples

STEPS = 300
KILLS, TERMS, WINDOWS = 6, 2, 4
GROUPS, SIZE = 2, 4
TABLES = {"metrics.jsonl", "groups.jsonl", "samples.jsonl"}
CODES = {"kill": -9, "born": -9, "term": EXIT_INTERRUPTED, "refused": EXIT_FINDING, "done": 0}

pytestmark = pytest.mark.fault(3, 5, 6, 22, 23, 24)


@dataclass(frozen=True)
class Soaked:
    """An undisturbed run whose memory was watched, and one of the same recipe under faults."""

    calm: Path
    memory: Memory
    rough: Path
    lives: list[Life]


def soak(calm: Path, rough: Path, *, seed: int, steps: int, kinds: tuple[int, int, int]) -> Soaked:
    """`kinds`: how many kills, SIGTERMs and full disks."""
    memory, child = watch(calm)
    assert child.returncode == EXIT_DONE, child.err.read_text(encoding="utf-8")[-2000:]
    kills, terms, windows = kinds
    script = make_script(seed, steps, kills=kills, terms=terms, windows=windows)
    lives = Soak(rough, seed=seed).live(script)
    return Soaked(calm.parent, memory, rough.parent, lives)


def soak_online(folder: Path, model: Path, *, seed: int, kinds: tuple[int, int, int]) -> Soaked:
    calm, rough = (
        make_soak_recipe(folder / name, model, seed=seed, steps=STEPS) for name in ("calm", "rough")
    )
    return soak(calm, rough, seed=seed, steps=STEPS, kinds=kinds)


@pytest.fixture(scope="module")
def soaked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Soaked:
    folder = tmp_path_factory.mktemp("soak")
    return soak_online(folder, tiny_model, seed=0, kinds=(KILLS, TERMS, WINDOWS))


def assert_rewards_counted(folder: Path) -> Counter[str]:
    """The ledger's counts against the rule by which a text fails; how many of each kind."""
    run = folder / "run"
    texts: dict[int, list[dict[str, Any]]] = {step: [] for step in range(1, STEPS + 1)}
    for row in read_samples(run):
        if row["split"] == "train":
            texts[row["step"]].append(row)
    groups: dict[int, list[list[float | None]]] = {step: [] for step in texts}
    for row in read_groups(run, split="train"):
        groups[row["step"]].append(row["scores"])
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == list(range(STEPS + 1))
    total: Counter[str] = Counter()
    keys = set()
    for row in metrics[1:]:
        step = row["step"]
        assert [sample["sample"] for sample in texts[step]] == [*range(SIZE)] * GROUPS
        assert len(groups[step]) == GROUPS
        told = [(f"{s['prompt'][-1]}:{s['completion']}", s) for s in texts[step]]
        kinds = [fault_of(key) for key, _ in told]
        counted = Counter(kind for kind in kinds if kind is not None)
        assert row["reward_failures"] == counted.total(), step
        assert row["rewards/letters/deadlines"] == counted["hang"], step
        assert row["rewards/letters/retries"] == counted.total() - counted["hang"], step
        failed = [kind is not None for kind in kinds]
        assert [s["status"] == "infra_error" for _, s in told] == failed, step
        assert [score is None for scores in groups[step] for score in scores] == failed, step
        assert all(s["advantage"] == 0.0 for (_, s), bad in zip(told, failed, strict=True) if bad)
        total += counted
        keys |= {(kind, key) for kind, (key, _) in zip(kinds, told, strict=True) if kind}
    # A step that was lost to a kill was done again with the same texts, so no fault is in it alone.
    assert set(injected(folder)) == keys
    return total


def assert_counted(lives: list[Life], *, tables: set[str]) -> None:
    """Every kill, signal and refusal of the disk is in the events of its own process."""
    for place, life in enumerate(lives):
        end, said, about = life.chapter.end, life.said[-2000:], f"{place}: {life.chapter}"
        assert life.code == CODES[end], (about, said)
        if end != "born":
            assert life.count("resumed") == (place > 0), about
        assert life.count("restarted") == 0, about
        assert life.count("stopped") == (end in ("term", "refused")), about
        assert life.warned == bool(life.chapter.window), about
        assert life.count("checkpoint_failed") == life.failed_saves, about
        if end == "refused":
            # Two intervals, and a last try before the run is given up.
            assert life.failed_saves == 3 and "Free space" in said, about
            continue
        if life.chapter.window == "checkpoint":
            assert life.failed_saves == 1, about
        gaps = {gap["file"]: gap for gap in life.events if gap["kind"] == "gap"}
        assert len(gaps) == life.count("gap"), about
        assert gaps.keys() - {"events.jsonl"} == (tables if life.warned else set()), about
        assert all(gap["lost"] == 0 and gap["recovered"] > 0 for gap in gaps.values()), about
        if life.warned:
            gap = gaps["metrics.jsonl"]
            assert gap["recovered"] == gap["last_step"] - gap["first_step"] + 1, about
            assert gap["first_step"] > life.chapter.opens, about


def assert_unchanged(rough: Path, calm: Path) -> None:
    """No fault changed a byte, and none left anything behind."""
    assert_same_run(rough / "run", calm / "run")
    assert [row["step"] for row in read_metrics(rough / "run")][-1] > 0
    left = [*(rough / "run" / "checkpoints").glob(".tmp-*"), *(rough / "run").glob("waiting*")]
    assert not left


def test_every_failure_of_the_reward_is_counted(soaked: Soaked) -> None:
    total = assert_rewards_counted(soaked.calm)
    assert min(total["raise"], total["nan"], total["die"]) >= 1 and total.total() >= 20
    # Undisturbed, a text that raised was asked twice, and one that hung once.
    asked = Counter(injected(soaked.calm))
    assert all(count % (1 if kind == "hang" else 2) == 0 for (kind, _), count in asked.items())
    assert assert_rewards_counted(soaked.rough) == total


def test_every_kill_and_every_refusal_of_the_disk_is_counted(soaked: Soaked) -> None:
    assert_counted(soaked.lives, tables=TABLES)
    ends = Counter(life.chapter.end for life in soaked.lives)
    assert ends["kill"] == KILLS + 1 and ends["term"] == TERMS and ends["refused"] == 1
    assert sum(bool(life.chapter.window) for life in soaked.lives) == WINDOWS + 1


def test_no_byte_of_the_run_was_changed(soaked: Soaked) -> None:
    assert_unchanged(soaked.rough, soaked.calm)


def test_memory_does_not_grow(soaked: Soaked) -> None:
    memory = soaked.memory
    for sizes in (memory.training, memory.nursery, memory.workers):
        assert memory.slope(sizes) < 1.0
    # A slope of nothing proves nothing: the watch sees what a process holds.
    assert min(memory.training) > 50.0


def summary(name: str, soaked: Soaked, steps: int) -> list[str]:
    """What was injected, all of it found again in the ledger by the assertions before."""
    lives = soaked.lives
    ends = Counter(life.chapter.end for life in lives)
    rows = len(read_metrics(soaked.rough / "run"))
    wasted = sum(
        event["cut_rows"]["metrics.jsonl"]
        for life in lives
        for event in life.events
        if event["kind"] == "resumed"
    )
    return [
        f"{name}: {steps} steps in {len(lives)} processes, {rows} rows of metrics, "
        f"{wasted} steps done again",
        f"  killed {ends['kill']}, while starting {ends['born']}; SIGTERM {ends['term']}; "
        f"given up because of the disk {ends['refused']}",
        f"  times that the disk refused {sum(bool(life.warned) for life in lives)}, "
        f"gaps marked {sum(life.count('gap') for life in lives)}, "
        f"checkpoints refused {sum(life.failed_saves for life in lives)}",
    ]


def grown(memory: Memory, *, rewards: bool) -> str:
    """Asserts that memory does not grow; how much it did."""
    sizes = {"training": memory.training}
    if rewards:
        sizes |= {"nursery": memory.nursery, "reward workers": memory.workers}
    slopes = {name: memory.slope(size) for name, size in sizes.items()}
    assert max(slopes.values()) < 1.0, slopes
    told = ", ".join(f"{name} {slope:+.3f}" for name, slope in slopes.items())
    return f"  MB per 100 steps after {WARM_UP}: {told}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_seeds_and_given_data(tiny_model: Path, tmp_path: Path) -> None:
    lines = [
        "Runs under random faults end byte for byte as undisturbed ones; every fault is counted.",
        "",
    ]
    for seed in (1, 2, 3):
        soaked = soak_online(tmp_path / f"{seed}", tiny_model, seed=seed, kinds=(8, 3, 5))
        assert_counted(soaked.lives, tables=TABLES)
        total = assert_rewards_counted(soaked.calm)
        assert assert_rewards_counted(soaked.rough) == total
        assert_unchanged(soaked.rough, soaked.calm)
        lines += summary(f"grpo, seed {seed}", soaked, STEPS)
        asked = Counter(kind for kind, _ in injected(soaked.rough))
        told = ", ".join(f"{kind} {count} ({asked[kind]})" for kind, count in sorted(total.items()))
        lines.append(f"  completions without a score, by kind (attempts, steps again): {told}")
        lines.append(grown(soaked.memory, rewards=True))
    for name, rows in (("sft", "demonstrations"), ("dpo", "pairs")):
        # Shorter steps: more of them, so that a window is as long by the clock.
        steps = 5 * STEPS
        calm, rough = (
            make_offline_recipe(
                tmp_path / name / folder,
                tiny_model,
                method={"name": name},
                rows=rows,
                run__steps=steps,
                run__eval_every=steps // 3,
                run__checkpoint_every=steps // 15,
                run__stop_without_signal="never",
            )
            for folder in ("calm", "rough")
        )
        soaked = soak(calm, rough, seed=4, steps=steps, kinds=(8, 3, 5))
        assert_counted(soaked.lives, tables={"metrics.jsonl"})
        assert_unchanged(soaked.rough, soaked.calm)
        lines += [*summary(name, soaked, steps), grown(soaked.memory, rewards=False)]
    write_result("soak", lines)
