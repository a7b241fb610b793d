"""A run's own completions as data: on-policy pairs, and demonstrations for rejection sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.loop import make_loop
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.errors import DataError
from surefoot.loops.harvest import harvest
from surefoot.records import Prompt
from surefoot.run.read import read_samples


def scored(prompt: Prompt, sample: int, call: int) -> float:
    return float(sample) / 3


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Path:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "rloo", "group_size": 4, "kl": {"coef": 0.0}},
        judge=scored,
        steps=2,
    )
    bench.run()
    return bench.path


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_are_the_best_and_the_worst_of_a_group(run: Path, tmp_path: Path) -> None:
    found = harvest(run, tmp_path / "pairs.jsonl", "pairs")
    rows = rows_of(tmp_path / "pairs.jsonl")
    # Eight completions a step are kept: two prompts of four.
    assert len(rows) == len(found.rows) == 4 and found.samples == 16
    for row in rows:
        assert row["margin"] == pytest.approx(1.0)
        assert (row["chosen"], row["rejected"]) == ("text 3", "text 0")
    assert all(sample["task"] == "default" for sample in read_samples(run))


def test_demonstrations_are_those_of_the_score(run: Path, tmp_path: Path) -> None:
    harvest(run, tmp_path / "demos.jsonl", "demonstrations", at_least=0.6)
    rows = rows_of(tmp_path / "demos.jsonl")
    assert {row["completion"] for row in rows} == {"text 2", "text 3"}


def test_nothing_found_is_said_with_the_mend(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no demonstrations .*run\.samples: all"):
        harvest(run, tmp_path / "none.jsonl", "demonstrations", at_least=7.0)
    assert not (tmp_path / "none.jsonl").exists()


def test_the_command_writes_and_counts(run: Path, tmp_path: Path) -> None:
    dest = tmp_path / "pairs.jsonl"
    done = CliRunner().invoke(app, ["export", str(run), str(dest), "--pairs"])
    assert done.exit_code == 0, done.output
    assert "4 rows from 16 samples" in done.output and len(rows_of(dest)) == 4
    again = CliRunner().invoke(app, ["export", str(run), str(dest), "--pairs"])
    assert isinstance(again.exception, DataError)
    both = ["export", str(run), str(tmp_path / "x"), "--pairs", "--demonstrations", "1"]
    assert "give one of" in str(CliRunner().invoke(app, both).exception)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("score", "1"), ("score", float("inf")), ("score", 10**400), ("completion", None)),
        *(("position", "0"), ("sample", []), ("prompt", {}), ("stop", 7), ("task", None)),
    ],
)
def test_samples_that_no_run_writes_are_refused(
    run: Path, tmp_path: Path, name: str, value: object
) -> None:
    rows = [*rows_of(run / "samples.jsonl"), {**rows_of(run / "samples.jsonl")[0], name: value}]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"sample {len(rows)} of the run is damaged: {name}"):
        harvest(run, tmp_path / "pairs.jsonl", "pairs")


@pytest.mark.parametrize("dest", ["file/pairs.jsonl", "x" * 300], ids=["in a file", "too long"])
def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path, dest: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        harvest(run, tmp_path / dest, "pairs")
