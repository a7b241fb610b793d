"""Summaries of hand-made run directories, and the lines that people see."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import RunDirectoryError, SurefootError
from surefoot.report.curve import draw, smooth
from surefoot.run.display import Display, duration, printable, summary_table
from surefoot.run.read import (
    Evaluation,
    evaluations,
    latest_step,
    read_environment,
    read_groups,
    read_metrics,
    summary,
)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _eval(step: int, accuracy: float, n: int, eos: float) -> dict[str, Any]:
    return {
        "step": step,
        "eval/accuracy": accuracy,
        "eval/n": n,
        "eval/eos_share": eos,
        "eval/reward": accuracy,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten prompts: 2 right before, 6 after; 5 gained, 1 lost."""
    path = tmp_path / "addition"
    path.mkdir()
    times = {"time/rollout": 2.0, "time/update": 1.5, "time/reward": 0.5}
    _jsonl(
        path / "metrics.jsonl",
        [
            _eval(0, 0.2, 10, 0.5),
            {"step": 1, "reward": 0.1, "time/step": 5.0, "time/tokens_per_second": 100.0, **times},
            {"step": 2, "reward": 0.3, "time/step": 2.0, "time/tokens_per_second": 300.0, **times},
            {
                "step": 3,
                "reward": None,
                "time/step": 3.0,
                "time/tokens_per_second": 200.0,
                **times,
                **{key: value for key, value in _eval(3, 0.6, 10, 1.0).items() if key != "step"},
                "time/eval": 4.0,
            },
        ],
    )
    before, after = {0, 1}, {1, 2, 3, 4, 5, 6}
    _jsonl(
        path / "groups.jsonl",
        [
            *(
                {"step": 0, "split": "eval", "prompt": f"p{i}", "correct": i in before}
                for i in range(10)
            ),
            {"step": 0, "split": "eval", "prompt": "only-before", "correct": True},
            {"step": 0, "split": "eval", "prompt": "ungraded-later", "correct": True},
            {"step": 3, "split": "eval", "prompt": "ungraded-later", "correct": None},
            {"step": 1, "split": "train", "prompt": "q", "scores": [1.0, 0.0]},
            *(
                {"step": 3, "split": "eval", "prompt": f"p{i}", "correct": i in after}
                for i in reversed(range(10))
            ),
            {"step": 3, "split": "eval", "prompt": "only-after", "correct": True},
        ],
    )
    return path


def test_summary_by_hand(run: Path) -> None:
    found = summary(run)
    assert (found.name, found.steps, found.pairs) == ("addition", 3, 10)
    assert found.first is not None
    assert found.last is not None
    assert (found.first.step, found.first.correct, found.first.n) == (0, 2, 10)
    # Wilson for 2 of 10 at z = 1.96: (0.2 + 0.19208 ± 1.96 sqrt(0.016 + 0.009604)) / 1.38416
    assert found.first.low == pytest.approx(0.0567, abs=1e-4)
    assert found.first.high == pytest.approx(0.5098, abs=1e-4)
    assert found.last.accuracy == 0.6
    assert (found.first.eos_share, found.last.eos_share) == (0.5, 1.0)
    assert found.difference is not None
    assert found.difference.estimate == pytest.approx(0.4)
    assert found.difference.low < 0.4 < found.difference.high
    assert found.seconds_per_step == 3.0
    assert found.tokens_per_second == 200.0
    # 6 + 4.5 + 1.5 + 4 seconds = 16
    assert found.time_shares == {
        "rollout": 0.375,
        "update": 0.28125,
        "eval": 0.25,
        "reward": 0.09375,
    }
    assert list(found.time_shares) == ["rollout", "update", "eval", "reward"]


def test_a_torn_last_line_is_left_out_and_a_missing_file_is_empty(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward": 0.')
    assert latest_step(run) == 3
    assert len(read_metrics(run)) == 4
    assert len(read_groups(run, split="train")) == 1
    (run / "groups.jsonl").unlink()
    assert summary(run).difference is None


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    found = summary(tmp_path)
    assert (found.steps, found.first, found.last, found.difference) == (None, None, None, None)
    assert found.time_shares == {}
    assert "accuracy before" in summary_table(found)
    with pytest.raises(SurefootError, match="no evaluation and no reward"):
        draw([tmp_path], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds nothing of a run"):
        summary(tmp_path)
    with pytest.raises(RunDirectoryError, match="does not exist"):
        summary(tmp_path / "nowhere")


def test_one_evaluation_has_no_difference(tmp_path: Path) -> None:
    _jsonl(tmp_path / "metrics.jsonl", [_eval(0, 0.25, 4, 1.0)])
    found = summary(tmp_path)
    assert found.first == found.last
    assert found.difference is None


def test_an_evaluation_survives_the_ledger(tmp_path: Path) -> None:
    look = Evaluation.of(20, n=7, correct=3, reward=0.43, eos_share=None)
    _jsonl(tmp_path / "metrics.jsonl", [{"step": 20, **look.metrics()}])
    assert evaluations(tmp_path) == [look]


def test_the_closing_table(run: Path) -> None:
    lines = summary_table(summary(run)).splitlines()
    assert lines[0] == "run                  addition, 3 steps"
    assert lines[1] == "accuracy before      0.200 [0.057, 0.510] of 10 (step 0)"
    assert lines[2].startswith("accuracy after       0.600 [")
    assert lines[3].startswith("paired difference    +0.400 [")
    assert lines[3].endswith("on the same 10 prompts")
    assert lines[4] == "ended with EOS       50% before, 100% after"
    assert lines[5] == "seconds per step     3.00 (median)"
    assert lines[7] == "where the time went  rollout 38%, update 28%, eval 25%, reward 9%"


def test_the_closing_table_shows_a_reward_that_is_more_than_right_or_wrong(tmp_path: Path) -> None:
    before, after = _eval(0, 0.0, 4, 1.0), _eval(2, 0.0, 4, 1.0)
    _jsonl(tmp_path / "metrics.jsonl", [before, {**after, "eval/reward": 0.375}])
    assert "mean reward          0.00 before, 0.38 after" in summary_table(summary(tmp_path))
    _jsonl(tmp_path / "metrics.jsonl", [before, after])
    assert "mean reward" not in summary_table(summary(tmp_path))


# -- display ---------------------------------------------------------------------------------------

_METRICS = {
    "reward": 0.414,
    "entropy": 0.82,
    "completions/mean_length": 9.1,
    "clip_ratio/region_mean": 0.0,
    "frac_reward_zero_std": 0.25,
    "time/tokens_per_second": 812.3,
    "time/step": 4.0,
}


def test_plain_lines_show_absent_as_a_dash_and_the_time_left() -> None:
    stream = io.StringIO()
    now = [100.0]
    display = Display(60, stream=stream, clock=lambda: now[0])
    display.step(12, _METRICS)
    now[0] = 108.0
    display.step(14, {})
    display.close()
    assert stream.getvalue().splitlines() == [
        "step 12/60 | reward 0.41 | kl - | entropy 0.82 | len 9.1 | clip 0.00 | dead 0.25 | "
        "812 tok/s | eta 3m12s",
        "step 14/60 | reward - | kl - | entropy - | len - | clip - | dead - | - tok/s | eta 3m04s",
    ]


def test_samples_and_evaluations_are_lines_without_control_characters() -> None:
    stream = io.StringIO()
    display = Display(60, stream=stream)
    display.samples([("3+4=\n", "\x1b[2J7\ud800\u202e", 1.0), ("x", "y" * 500, None)])
    display.evaluation(Evaluation.of(20, n=10, correct=2, eos_share=0.5))
    display.note("two\nlines\x07")
    lines = stream.getvalue().splitlines()
    assert lines[0] == r"  [+1.00] 3+4=\n -> \x1b[2J7\ud800\u202e"
    assert lines[1].startswith("  [-] x -> yyy")
    assert lines[1].endswith("...")
    assert len(lines[1]) < 200
    assert lines[2] == (
        "eval 20/60 | accuracy 0.200 [0.057, 0.510] of 10 | reward - | ended with EOS 50%"
    )
    assert lines[3:] == ["two", r"lines\x07"]


def test_a_stream_of_another_encoding_or_a_closed_one_does_no_harm() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = Display(1, stream=stream)
    display.note("né")
    assert raw.getvalue() == b"n\\xe9\n"
    stream.close()
    display.note("after")
    display.close()


def test_the_live_line_keeps_markup_and_honours_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    display = Display(60, stream=stream, force="rich")
    display.step(12, _METRICS)
    display.samples([("[red]x", "[/bold]:smile:", 0.0)])
    display.close()
    display.close()
    shown = stream.getvalue()
    assert "[+0.00] [red]x -> [/bold]:smile:" in shown
    assert "0.41" in shown
    assert "\x1b[3" not in shown  # a colour; attributes and cursor movements stay


def test_an_unknown_display_is_refused() -> None:
    with pytest.raises(SurefootError, match="auto, plain or rich"):
        Display(1, stream=io.StringIO(), force="fancy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.4, "0s"), (59.6, "1m00s"), (190, "3m10s"), (7500, "2h05m"), (100800, "1d04h")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_printable_keeps_ordinary_text() -> None:
    assert printable("né 3+4 = 7 → ok") == "né 3+4 = 7 → ok"


# -- curve -----------------------------------------------------------------------------------------


def test_a_curve_is_a_png_of_every_run(run: Path, tmp_path: Path) -> None:
    rewards_only = tmp_path / "other"
    rewards_only.mkdir()
    _jsonl(rewards_only / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    target = draw([run, rewards_only], tmp_path / "deep" / "curve.png")
    first = target.read_bytes()
    assert first.startswith(b"\x89PNG")
    assert draw([run], target).read_bytes() != first
    with pytest.raises(SurefootError, match="at least one run"):
        draw([], target)


def test_smoothing_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 0.0], 3) == [1.5, 3.0, pytest.approx(8 / 3), 3.0]
    assert smooth([5.0], 3) == [5.0]


# -- rows that a hand or a disk has changed --------------------------------------------------------


def test_rows_that_do_not_tell_their_step_are_foreign(run: Path) -> None:
    whole = read_metrics(run)
    odd = [{"step": step} for step in ("1", None, True, 1.5, [1], -1, 2**63)]
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in odd) + "[" * 100_000 + "\n")
    assert read_metrics(run) == whole
    assert latest_step(run) == max(row["step"] for row in whole)


@pytest.mark.parametrize("value", ["x", [], {}, True, 1e308, 10**400, float("inf"), float("nan")])
def test_figures_that_are_no_numbers_are_missing(run: Path, value: Any) -> None:
    names = ("eval/accuracy", "eval/n", "eval/reward", "time/step", "time/rollout", "cost/total")
    _jsonl(run / "metrics.jsonl", [{"step": 0, **dict.fromkeys(names, value)}])
    found = summary(run)
    assert (found.first, found.seconds_per_step, found.cost) == (None, None, None)
    assert found.time_shares == {}


@pytest.mark.parametrize(
    ("accuracy", "n"), [(-0.1, 4), (1.1, 4), (0.5, 0), (0.5, -4)], ids=lambda value: str(value)
)
def test_shares_that_cannot_be_are_no_evaluation(run: Path, accuracy: float, n: int) -> None:
    _jsonl(run / "metrics.jsonl", [{"step": 0, "eval/accuracy": accuracy, "eval/n": n}])
    assert evaluations(run) == []


def test_verdicts_of_odd_prompts_are_left_out(run: Path) -> None:
    pairs = summary(run).pairs
    with open(run / "groups.jsonl", "a", encoding="utf-8") as file:
        for prompt in ([1], {"a": 1}, None):
            row = {"step": 0, "split": "eval", "prompt": prompt, "correct": True}
            file.write(json.dumps(row) + "\n")
    assert summary(run).pairs == pairs > 0


def test_a_file_that_is_none_is_refused_by_name(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(
        RunDirectoryError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"
    ):
        summary(run)


@pytest.mark.parametrize("text", ["", "[]", "7", "\x80", "[" * 100_000, None])
def test_a_damaged_record_of_the_machine_is_refused_by_name(run: Path, text: str | None) -> None:
    file = run / "environment.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    with pytest.raises(RunDirectoryError, match=r"environment\.json: .*damaged"):
        read_environment(run)
