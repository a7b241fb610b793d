"""The scripts for schedulers do what docs/clusters.md says of exit codes and signals (row 4)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.runs import make_recipe, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"

# Says that it runs, and ends with CODE: at once, or half a second after the first signal. A second
# signal in that time ends it with 99.
STAND_IN = """#!{python}
import os, signal, sys, time
told = []
def handle(number, frame):
    if told:
        os._exit(99)
    told.append(number)
signal.signal(signal.SIGUSR1, handle)
open("arguments", "w").write(" ".join(sys.argv[1:]))
if {waits}:
    while not told:
        time.sleep(0.01)
    time.sleep(0.5)
sys.exit({code})
"""


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _submit(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script as Slurm would run it, with a `scontrol` that writes down what it is asked."""
    _program(folder, "scontrol", '#!/bin/sh\necho "$@" >> asked\n')
    return subprocess.Popen(
        ["bash", str(SLURM), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"},
        text=True,
        stderr=subprocess.PIPE,
    )


def _asked(folder: Path) -> str:
    path = folder / "asked"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.fault(4)
@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_slurm_queues_a_job_again_for_75_alone(code: int, tmp_path: Path) -> None:
    stand_in = STAND_IN.format(python=sys.executable, waits=False, code=code)
    _program(tmp_path, "surefoot", stand_in)
    job = _submit(tmp_path, "r.yaml", "run.dir=x")
    job.communicate(timeout=60)
    assert job.returncode == code
    assert _asked(tmp_path) == ("requeue 42" if code == 75 else "")
    assert (tmp_path / "arguments").read_text() == "train r.yaml run.dir=x run.grace=100"


@pytest.mark.fault(4)
@pytest.mark.parametrize("code", [75, 3])
def test_slurm_tells_the_run_once_and_waits_for_it(code: int, tmp_path: Path) -> None:
    _program(tmp_path, "surefoot", STAND_IN.format(python=sys.executable, waits=True, code=code))
    job = _submit(tmp_path, "r.yaml")
    _wait_for(tmp_path / "arguments")
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    job.send_signal(signal.SIGTERM)  # what comes at the limit itself
    job.communicate(timeout=60)
    assert job.returncode == code
    assert _asked(tmp_path) == ("requeue 42" if code == 75 else "")


@pytest.mark.slow
@pytest.mark.fault(4)
def test_a_real_run_goes_back_into_the_queue_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    made = {"method": {"name": "grpo"}, "run__steps": 400, "run__checkpoint_every": 100}
    recipe = make_recipe(tmp_path, tiny_model, **made)
    _program(
        tmp_path,
        "surefoot",
        f'#!/bin/sh\nOMP_NUM_THREADS=1 exec {sys.executable} -m surefoot "$@"\n',
    )
    job = _submit(tmp_path, str(recipe))
    wait_for_step(tmp_path / "run", 3, job)  # type: ignore[arg-type]
    job.send_signal(signal.SIGUSR1)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 75, said
    assert _asked(tmp_path) == "requeue 42"
    steps = [int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert steps and max(steps) < 100, "saved because of the signal, not by the clock"
    job = _submit(tmp_path, str(recipe), f"run.steps={max(steps) + 2}")
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert _asked(tmp_path) == "requeue 42"


def test_the_loop_of_the_page_goes_on_after_75_and_ends_after_anything_else(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^until .*$", page, flags=re.M)
    for last in (0, 3):
        counted = f'echo x >> runs\n[ "$(wc -l < runs)" -lt 3 ] && exit 75\nexit {last}\n'
        _program(tmp_path, "surefoot", f"#!/bin/sh\n{counted}")
        (tmp_path / "runs").write_text("")
        subprocess.run(
            ["bash", "-c", loop],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            timeout=60,
            check=True,
        )
        assert (tmp_path / "runs").read_text().count("x") == 3


def test_skypilot_restarts_for_75_alone_on_a_volume_that_the_run_lies_on() -> None:
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "skypilot.yaml").read_text())
    recovery = job["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [75]}
    (mounted,) = job["volumes"]
    assert f"run.dir={mounted}/" in job["run"]
    assert (ROOT / job["run"].split()[2]).is_file()
