"""What a run sampled, as data for the next: a JSONL file of pairs or of demonstrations.

Owns reading the run and writing the file. Refuses to own which completions count
(`data/from_run`), and models (`export`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from surefoot.data.from_run import Harvest, demonstrations_from_run, pairs_from_run
from surefoot.errors import DataError
from surefoot.run.files import atomic_write_text
from surefoot.run.read import read_samples

Kind = Literal["pairs", "demonstrations"]


def harvest(run: Path | str, dest: Path | str, kind: Kind, *, at_least: float = 1.0) -> Harvest:
    """Write the pairs of a run's groups, or its completions that score `at_least`, as JSON lines.

    A run keeps a few completions of a step unless its recipe says `run.samples: all`. DataError if
    nothing is found, or if `dest` exists.
    """
    path = Path(dest)
    try:
        there = path.exists()
    except OSError as error:
        raise _unwritable(path, error) from error
    if there:
        raise DataError(f"export: {path} exists; name a new file")
    samples = read_samples(run)
    if kind == "pairs":
        found = pairs_from_run(samples)
    else:
        found = demonstrations_from_run(samples, at_least=at_least)
    if not found.rows:
        told = "; ".join(line.strip() for line in found.lines())
        raise DataError(
            f"export: {run} gives no {kind} ({told}). A run keeps 8 completions of a step unless "
            "its recipe says run.samples: all"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, found.text())
    except OSError as error:
        raise _unwritable(path, error) from error
    return found


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"export: {str(path)!r:.200} cannot be written ({error.strerror}); name another file"
    )
