"""Whole runs over odd prompts, odd completions and broken viewers.

Rows 33 to 36 of the fault matrix, through the loops, the ledger and what is made of it later.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import TOKENIZER, make_engine, make_prompt
from support.loop import Bench, make_loop, plain_script
from support.offline import make_offline_recipe
from support.runs import make_recipe
from support.tiny import END, write_rows

import surefoot
from surefoot.errors import DataError, StoppedOnFinding
from surefoot.loops.harvest import harvest
from surefoot.methods import online_rows
from surefoot.records import Prompt, Score, ScoreStatus, StopReason
from surefoot.rollout.scripted import Line
from surefoot.run import trackers
from surefoot.run.read import read_events, read_metrics, read_samples

QUIET = {"kl": {"coef": 0.0, "measure_every": 0}, "group_size": 4}


def events(run: Path, kind: str) -> list[str]:
    return [str(event["message"]) for event in read_events(run) if event["kind"] == kind]


def ledger_lines(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Every JSONL file of a run, read as strictly as any other program would."""
    found = {}
    for path in sorted(run.glob("*.jsonl")):
        text = path.read_bytes().decode("utf-8", "strict")
        lines = text.split("\n")
        assert lines.pop() == "", f"{path.name} ends within a line"
        found[path.name] = [json.loads(line, parse_constant=_no_constant) for line in lines]
    return found


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- row 33: prompts that cannot be asked ---

LONG = "1 + 1 = " * 70  # 560 characters; the context of the tiny model has 512


def test_row_33_a_run_asks_only_what_can_be_asked(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "abc"]
    odd = [
        {"prompt": text, "answer": "x", "id": f"odd{i}"} for i, text in enumerate(("", " ", LONG))
    ]
    path = write_rows(tmp_path / "rows.jsonl", [*odd, *rows])

    def bench(**options: Any) -> Bench:
        return make_loop(
            tiny_model,
            tmp_path / "run",
            method={"name": "rloo", **QUIET},
            judge=lambda p, s, c: float(s % 2),
            sources=[{"source": str(path), **options}],
            steps=4,
        )

    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*empty"):
        bench()
    made = bench(skip_invalid=True, max_invalid=1.0)
    counts = made.parts.data.report.counts()
    assert (counts["quarantined"], counts["too_long"], counts["train"]) == (2, 1, 3)
    made.run()
    assert {prompt for prompt, _, _ in made.engine.asked} == set("abc")
    assert len(made.metrics()) == 4


def test_row_33_a_run_on_given_data_leaves_them_out_and_says_how_many(
    tiny_model: Path, tmp_path: Path
) -> None:
    recipe = make_offline_recipe(
        tmp_path,
        tiny_model,
        method={"name": "sft"},
        rows="demonstrations",
        data__skip_invalid=True,
        data__max_invalid=0.5,
        run__steps=4,
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    odd = [
        {"prompt": text, "completion": "x", "id": f"odd{i}"} for i, text in enumerate(("", LONG))
    ]
    write_rows(tmp_path / "rows.jsonl", [*odd, *rows])
    run = surefoot.train(recipe)
    told = " ".join(events(run.path, "opened"))
    assert "12 rows" in told
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) for row in run.metrics[1:])


# --- row 34: text that breaks files, pages and terminals ---

HOSTILE = {
    "control token": f"{END}{END}",
    "surrogate": "half \ud83d of it",
    "nul": "a\x00b",
    "right to left": "\u202eabc \u05d0\u05d1",
    "line ends of unicode": "one\u2028two\u2029three\x85four\r\nfive",
    "escape": "\x1b[2J\x1b[31mred\x07",
    "markup": "</script><script>alert(1)</script>[bold]{{x}}%s",
    "json": '"}\n{"step": 99, "reward": 1e9}\n',
    "not a character": "\ufffe\uffff\U0010ffff",
    "a megabyte": "x" * (1 << 20),
}
ASKED = ("right to left", "line ends of unicode", "escape", "markup", "json", "not a character")
"""Texts that may be a prompt; the others are refused when data is read."""


def hostile_rows() -> list[dict[str, object]]:
    return [
        {"prompt": f"say {HOSTILE[name]}", "answer": HOSTILE[name], "id": f"{name} {HOSTILE[name]}"}
        for name in ASKED
    ]


def test_row_34_hostile_text_goes_through_a_run_as_text(tiny_model: Path, tmp_path: Path) -> None:
    names = list(HOSTILE)

    def script(asked: Prompt, sample: int) -> Line:
        line = plain_script(asked, sample)
        name = names[(asked.position * 4 + sample) % len(names)]
        return dataclasses.replace(line, text=f"{HOSTILE[name]} said {sample}")

    path = write_rows(tmp_path / "rows.jsonl", hostile_rows())
    run = tmp_path / "run"
    bench = make_loop(
        tiny_model,
        run,
        method={"name": "rloo", **QUIET},
        judge=lambda p, s, c: float(s % 2),
        script=script,
        sources=[{"source": str(path), "eval_size": 2}],
        steps=5,
        settings={"samples": "all", "eval_every": 1, "trackers": ["tensorboard"]},
    )
    bench.run()
    bench.desk.trackers.finish()
    assert bench.desk.trackers.troubles() == []
    said = bench.said.getvalue()
    assert not set(said) & set("\x00\x07\x1b\x85\u2028\u202e\ud83d")
    lines = ledger_lines(run)
    assert [row["step"] for row in lines["metrics.jsonl"]] == [0, 1, 2, 3, 4, 5]
    train = [row for row in lines["samples.jsonl"] if row["split"] == "train"]
    assert len(train) == 5 * 2 * 4
    expected = [text.replace("\ud83d", "\ufffd") for text in HOSTILE.values()]
    for row in train:
        assert row["completion"].removesuffix(f" said {row['sample']}") in expected
        assert row["prompt"] in {f"say {HOSTILE[name]}" for name in ASKED}
    # All of them were said, and readers see lines where lines were written.
    assert len({row["completion"].partition(" said ")[0] for row in train}) == len(HOSTILE)
    assert [row["completion"] for row in read_samples(run) if row["split"] == "train"] == [
        row["completion"] for row in train
    ]


def test_row_34_what_such_a_run_exports_is_data_again(tiny_model: Path, tmp_path: Path) -> None:
    """Everything but NUL, control tokens and lines of a megabyte, which no data may hold."""
    texts = [text for name, text in HOSTILE.items() if name not in ("control token", "a megabyte")]

    def script(asked: Prompt, sample: int) -> Line:
        text = texts[(asked.position * 4 + sample) % len(texts)]
        return dataclasses.replace(plain_script(asked, sample), text=f"{text} said {sample}")

    path = write_rows(tmp_path / "rows.jsonl", hostile_rows())
    run = tmp_path / "run"
    make_loop(
        tiny_model,
        run,
        method={"name": "rloo", **QUIET},
        judge=lambda p, s, c: float(s),
        script=script,
        sources=[{"source": str(path)}],
        steps=4,
        settings={"samples": "all"},
    ).run()
    found = harvest(run, tmp_path / "pairs.jsonl", "pairs")
    assert found.nul == sum("\0" in row["completion"] for row in read_samples(run)) > 0
    assert f"  {found.nul} samples left out: a NUL character in them" in found.lines()
    written = (tmp_path / "pairs.jsonl").read_bytes().decode("utf-8", "strict")
    assert len(found.rows) == len(written.split("\n")) - 1 == 8
    recipe = make_offline_recipe(
        tmp_path / "dpo", tiny_model, method={"name": "dpo"}, rows="pairs", run__steps=3
    )
    (tmp_path / "dpo" / "rows.jsonl").write_text(written, encoding="utf-8")
    trained = surefoot.train(recipe)
    assert all(math.isfinite(row["loss"]) for row in trained.metrics[1:])
    ledger_lines(trained.path)


# --- row 35: odd completions ---


@pytest.mark.parametrize("greedy", [False, True])
def test_row_35_the_local_engine_ends_at_the_first_token(greedy: bool) -> None:
    """A token of certainty: its log-probability is 0, and it is the whole completion."""
    engine = make_engine()
    end = next(i for i in engine.stops.ids)

    class Certain(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*hidden.shape[:-1], len(TOKENIZER)), -1e4)
            logits[..., end] = 1e4
            return logits

    assert engine.decoder is not None
    engine.decoder.logits = Certain()  # type: ignore[method-assign]
    prompts = [make_prompt(text, i) for i, text in enumerate(("abc", "a", "hello"))]
    groups = engine.sample(prompts, 3, purpose="rollout", greedy=greedy)
    for group in groups:
        for completion in group.completions:
            assert completion.ids == (end,) and completion.logps == (0.0,)
            assert completion.text == "" and completion.stop is StopReason.STOP


def odd_script(asked: Prompt, sample: int) -> Line:
    """Nothing, nothing again, cut off, and the prompt once more."""
    return (
        Line((2,), ""),
        Line((2,), ""),
        Line(tuple(range(8, 18)), "cut off", StopReason.LENGTH),
        Line((*asked.ids[:5], 2), asked.text),
    )[sample]


LIKE_ANY_OTHER = [
    *((name, "score") for name in online_rows() if name not in ("reinforce_ma", "ppo_warm")),
    *((name, "mask") for name in ("rloo", "dr_grpo", "gspo", "ppo")),
]


@pytest.mark.parametrize(("name", "truncated"), LIKE_ANY_OTHER)
def test_row_35_odd_completions_train_like_any_other(
    tiny_model: Path, tmp_path: Path, name: str, truncated: str
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": name, "group_size": 4, "truncated": truncated},
        judge=lambda p, s, c: scored((0.0, 0.25, 0.5, 1.0)[s]),
        script=odd_script,
        steps=1,
    )
    bench.run()
    (row,) = bench.metrics()
    assert row["optimizer_steps"] >= 1 and row["skipped_steps"] == 0
    assert all(value is not None for value in row.values())
    assert row["completions/min_length"] == 1 and row["completions/clipped_ratio"] == 0.25
    assert row["completions/absent"] == (2 if truncated == "mask" else 0)
    models = [bench.learner.scorer.model, bench.learner.critic and bench.learner.critic.model]
    for model in filter(None, models):
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert {tuple(group["lengths"]) for group in bench.groups()} == {(1, 1, 10, 6)}


def scored(value: float) -> Score:
    """By the one reward of these runs."""
    return Score(ScoreStatus.SCORED, value, {"exact": value})


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "gspo", "ppo", "opo"])
def test_row_35_a_step_of_nothing_but_empty_completions(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Lengths of one everywhere: a signal if their scores differ, and none if they do not."""
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": name, "group_size": 4},
        judge=lambda p, s, c: float(s % 2) if c == 0 else 0.0,
        script=lambda asked, sample: Line((2,), ""),
        steps=2,
    )
    bench.run()
    first, second = bench.metrics()
    assert first["optimizer_steps"] >= 1 and first["skipped_steps"] == 0
    assert first["completions/mean_length"] == second["completions/mean_length"] == 1
    assert all(value is not None for row in (first, second) for value in row.values())
    assert all(bool(p.isfinite().all()) for p in bench.learner.scorer.model.parameters())


def test_row_35_a_step_whose_every_completion_is_cut_off_and_masked(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "grpo", "truncated": "mask", **QUIET},
        judge=lambda p, s, c: float(s),
        script=lambda asked, sample: Line(tuple(range(8, 18)), "on and on", StopReason.LENGTH),
        steps=9,
        settings={"stop_without_signal": 3},
    )
    before = [p.detach().clone() for p in bench.learner.scorer.model.parameters()]
    with pytest.raises(StoppedOnFinding, match="3 steps in a row gave no signal"):
        bench.run()
    assert [row["optimizer_steps"] for row in bench.metrics()] == [0, 0, 0]
    after = bench.learner.scorer.model.parameters()
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


# --- row 36: viewers that are down, slow or not there ---


class Down(trackers.TensorBoard):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("the server is away")


class Stuck(trackers.TensorBoard):
    """Hangs at the first row, until the test is over."""

    until = threading.Event()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.until.wait(60)


class NeverStarts(Stuck):
    def start(self, config: Mapping[str, Any]) -> None:
        self.until.wait(60)

    def finish(self) -> None:
        """It was never there."""


WORDS = {
    "down": "failed (ConnectionError: the server is away)",
    "not installed": "could not be started (ModuleNotFoundError",
    "stuck": "hangs, so its last rows are given up",
    "never starts": "hangs, so its last rows are given up",
}


@pytest.mark.parametrize("fault", WORDS)
def test_row_36_a_viewer_costs_a_run_nothing_but_one_event(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tiny_model: Path,
    tmp_path: Path,
    fault: str,
) -> None:
    if fault == "not installed":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        broken = {"down": Down, "stuck": Stuck, "never starts": NeverStarts}[fault]
        monkeypatch.setattr(trackers, "TensorBoard", broken)
        monkeypatch.setattr(trackers, "_START_PATIENCE_S", 0.5)
        monkeypatch.setattr(Stuck, "until", threading.Event())
    waited = [0.0]
    log = trackers.Trackers.log

    def timed(self: trackers.Trackers, step: int, metrics: Mapping[str, Any]) -> None:
        began = time.monotonic()
        log(self, step, metrics)
        waited[0] += time.monotonic() - began

    monkeypatch.setattr(trackers.Trackers, "log", timed)
    recipe = make_recipe(
        tmp_path,
        tiny_model,
        method={"name": "rloo", "kl": {"coef": 0.0, "measure_every": 0}},
        run__trackers=["tensorboard"],
        run__steps=5,
    )
    try:
        with caplog.at_level(logging.WARNING, logger="surefoot"):
            run = surefoot.train(recipe)
    finally:
        Stuck.until.set()
    assert waited[0] < 1.0
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4, 5]
    assert set(ledger_lines(run.path)) >= {"metrics.jsonl", "groups.jsonl", "samples.jsonl"}
    (told,) = events(run.path, "tracker")
    assert told.startswith(f"tracker tensorboard {WORDS[fault]}"), told
    assert told.endswith("training goes on, metrics.jsonl is complete")
    warned = [r.getMessage() for r in caplog.records if r.name == "surefoot.run.trackers"]
    assert warned == [told]
