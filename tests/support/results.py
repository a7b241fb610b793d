"""Where the slow tier leaves what it counted, so that the figures in the docs have a source."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def write_result(name: str, lines: list[str]) -> None:
    """Write `bench/results/NAME.txt`, which is committed."""
    (RESULTS / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
