"""The command line in forked children of one warm process: real processes, without the imports.

A child has its own process id, session, files and signals; only the seconds that importing takes
are paid once. The warm process runs on one thread and never computes, so that forking it is safe.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WARM = "import sys; sys.path.insert(0, {tests!r}); from support.zygote import serve; serve()"


@dataclass
class Child:
    """A forked `surefoot ...`; as much of `subprocess.Popen` as the tests need."""

    args: list[str]
    pid: int
    out: Path
    err: Path
    home: Zygote
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self.home.ask({"poll": self.pid})["code"]
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what it printed."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"{self.args} still runs after {timeout} s: {self.err}")
            time.sleep(0.005)
        return self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")


class Zygote:
    """The warm process."""

    def __init__(self) -> None:
        tests = str(Path(__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WARM.format(tests=tests)],
            # No hub: an unknown name is then refused at once instead of after several tries.
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=Path(tests).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(
        self, *arguments: str, cwd: Path, environment: dict[str, str], before: str = ""
    ) -> Child:
        """Fork `surefoot ARGUMENTS` in the directory `cwd`; `before` is Python that it runs first.

        What that replaces is replaced in the child alone.
        """
        self._count += 1
        out, err = (cwd / f".{name}-{self._count}" for name in ("stdout", "stderr"))
        # They are there even if the child is killed before it opens them.
        out.touch()
        err.touch()
        question = {
            "run": ["surefoot", *arguments],
            "cwd": str(cwd),
            "out": str(out),
            "err": str(err),
            "environment": environment,
            "before": before,
        }
        return Child(list(arguments), self.ask(question)["pid"], out, err, self)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            # A child forked by some test may still hold the pipe's other end.
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """The warm process's life: fork what is asked for until the input ends."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import surefoot.cli
    import surefoot.loops.entry  # noqa: F401

    torch.set_num_threads(1)
    _warm_up()
    # Else every child's collector walks through, and so copies, all that was imported here.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                _become(question)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _warm_up() -> None:
    """What every run would do once more: a pattern over all losses, the fonts of its picture."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=4, num_attention_heads=1))
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot


def _become(question: dict[str, Any]) -> None:
    """In the child: a session, streams and arguments of its own, then the command line."""
    from surefoot.cli import main

    os.setsid()
    os.chdir(question["cwd"])
    os.environ.update(question["environment"])
    for number, name in ((0, os.devnull), (1, question["out"]), (2, question["err"])):
        handle = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # As Python opens it: what cannot be encoded is escaped.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    sys.argv = question["run"]
    code = 0
    try:
        exec(question["before"], {})
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
