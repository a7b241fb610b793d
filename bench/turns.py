"""Sides of a benchmark in processes of their own that take steps in turn.

The machine's drift then hits all sides alike. A child does a step for each line on its stdin and
answers with a line of JSON on its stdout.

Owns both ends of that conversation. Refuses to own what a step is and what is made of the answers.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ANSWER = "@@ "


def wait() -> bool:
    """In a child: block until the next turn; False when there is none."""
    return bool(sys.stdin.readline())


def answer(facts: Mapping[str, Any]) -> None:
    print(ANSWER + json.dumps(facts), flush=True)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(text: str) -> None:
    """Progress, for people."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Child:
    """A script in a process of its own, in this environment with `settings` laid over it.

    A setting of None takes the variable away.
    """

    def __init__(
        self, script: Path, *arguments: str, settings: Mapping[str, str | None] | None = None
    ) -> None:
        laid = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        laid |= dict(settings or {})  # type: ignore[arg-type]
        self.command = [sys.executable, str(script), *arguments]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            self.command,
            env={name: value for name, value in laid.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def turn(self) -> dict[str, Any]:
        """One step; SystemExit with the child's last words if it died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It has died; `hear` says of what.
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                facts: dict[str, Any] = json.loads(line[len(ANSWER) :])
                return facts
        code = self.process.wait()
        self.errors.seek(0)
        raise SystemExit(f"{' '.join(self.command)}: exit {code}\n{self.errors.read()[-4000:]}")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The child waits for a turn, or is in one that nobody hears any more.
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            assert stream is not None
            stream.close()
