"""Where everything of a run lies, and the record of the machine that it ran on.

Owns the layout of a run directory, its creation, `recipe.yaml` and `environment.json`.
Refuses to own rows (`ledger`), weights (`checkpoint`) and who may write (`lock`).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from surefoot.errors import RunDirectoryError
from surefoot.recipe import dump, stages
from surefoot.recipe.references import MODEL, STAGES, folders
from surefoot.run.files import atomic_write_json, atomic_write_text

FILES = (
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "groups.jsonl",
    "samples.jsonl",
    "events.jsonl",
    "checkpoints",
    "reference",
    STAGES,
    "tensorboard",
    "report.html",
    "run.lock",
)
STEP_NAME = re.compile(r"step_(\d{6,})")
_DEPENDENCIES = (
    "surefoot",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
    "tensorboard",
    "peft",
    "datasets",
    "gguf",
    "reasoning-gym",
    "math-verify",
    "vllm",
    "trl",
)
_SECRET_WORD = re.compile(r"(key|token|secret|password|passwd|credential)s?$", re.I)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-)[\w-]{8,}")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_HIDDEN = "[redacted]"


class RunDirectory:
    """The paths of one run; nothing is touched until `create`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if any(len(os.fsencode(part)) > 255 for part in self.path.parts):
            raise RunDirectoryError(f"{str(path)!r:.60} is too long for a run directory's name")
        self.recipe = self.path / "recipe.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.groups = self.path / "groups.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.reference = self.path / "reference"
        self.stages = self.path / STAGES
        self.model = self.path / MODEL
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / "run.lock"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_chain(self) -> bool:
        """Whether it holds stages, each with a run directory of its own, instead of one run."""
        return self.stages.is_dir()

    def stage_paths(self) -> list[Path]:
        """The directories of a chain's stages that were begun, in order."""
        return [path for _, _, path in folders(self.stages)]

    def create(self) -> Self:
        """Make the directory, or accept one that an earlier start of this run made.

        Raises RunDirectoryError when the path is a file, cannot be written, holds a chain, or holds
        somebody else's files and none of ours.
        """
        if self.is_chain:
            raise RunDirectoryError(
                f"run.dir {self.path} holds a chain of stages; name another directory in run.dir"
            )
        return self._create(self.checkpoints)

    def create_chain(self) -> Self:
        """Likewise for a chain; the directory of a single run is refused."""
        if self.recipe.is_file() and self._wrote_recipe() and not self.is_chain:
            raise RunDirectoryError(
                f"run.dir {self.path} holds a run without stages; name another directory in run.dir"
            )
        return self._create(self.stages)

    def _create(self, inner: Path) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(
                f"run.dir {self.path} is a file, so a run cannot be kept there; "
                "name another directory in run.dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            visible = [entry.name for entry in self.path.iterdir() if entry.name[0] != "."]
            if visible and not set(visible) & set(FILES):
                raise RunDirectoryError(
                    f"run.dir {self.path} holds other files ({', '.join(sorted(visible)[:3])}) and "
                    "nothing of a run; name an empty or new directory in run.dir"
                )
            if self.recipe.is_file() and not self._wrote_recipe():
                raise RunDirectoryError(
                    f"run.dir {self.path} holds a {self.recipe.name} that no run wrote, and a run "
                    "would write its own over it; name an empty or new directory in run.dir"
                )
            inner.mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir {self.path} cannot be written ({error.strerror}); "
                "name a directory that you may write to in run.dir"
            ) from error
        return self

    def _wrote_recipe(self) -> bool:
        headers = tuple(text.splitlines()[0].encode() for text in (dump.HEADER, stages.HEADER))
        try:
            return self.recipe.read_bytes().startswith(headers)
        except OSError:
            return False

    def step_path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, whether it exists or not."""
        return self.checkpoints / f"step_{step:06d}"

    def has_checkpoint(self) -> bool:
        """Whether an earlier start left a checkpoint, whole or damaged: then it must be loaded."""
        if not self.checkpoints.is_dir():
            return False
        return any(entry.name.startswith("step_") for entry in self.checkpoints.iterdir())

    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint directory under its final name, ascending."""
        if not self.checkpoints.is_dir():
            return []
        matches = (STEP_NAME.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def write_recipe(self, text: str) -> None:
        """Put the resolved recipe, as YAML text, in place atomically."""
        with self._writing(self.recipe):
            atomic_write_text(self.recipe, text)

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Put the record of the machine in place atomically; values under secret names go."""
        with self._writing(self.environment):
            atomic_write_json(self.environment, redact(facts))

    @contextmanager
    def _writing(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"{file} cannot be written ({error.strerror}); make room, move what lies there "
                "elsewhere, or name another run.dir"
            ) from error


def environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, hardware, code revision and command line, without a single environment variable.

    `argv` defaults to the command line of this process. Memory is in bytes. Whatever looks like a
    key, token, secret or password is replaced; no path is recorded except those in `argv`.
    """
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip() or None,
        },
        "cpus": os.cpu_count(),
        "memory_bytes": _total_memory(),
        "git": _git(),
        "argv": redact_arguments(sys.argv if argv is None else argv),
    }


def redact(value: Any) -> Any:
    """`value` with everything under a secret name, and every credential in text, replaced."""
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if _is_secret(str(key)) and item is not None else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return _URL_LOGIN.sub(_HIDDEN, _SECRET_VALUE.sub(_HIDDEN, value))
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def redact_arguments(argv: Sequence[str]) -> list[str]:
    """A command line that may be kept: program name without its path, secrets replaced."""
    kept: list[str] = []
    hide_next = False
    for place, argument in enumerate(argv):
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            kept.append(_HIDDEN)
        elif equals and _is_secret(name):
            kept.append(f"{name}={_HIDDEN}")
        else:
            kept.append(redact(os.path.basename(argument) if place == 0 else argument))
        hide_next = not equals and argument.startswith("-") and _is_secret(argument)
    return kept


def _is_secret(name: str) -> bool:
    """True for api_key, HF_TOKEN or clientSecret; False for max_new_tokens or tokenizer."""
    words = re.split(r"[^A-Za-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    return any(_SECRET_WORD.search(word) for word in words if word.lower() != "tokens")


def _versions() -> dict[str, str]:
    found = {}
    for package in _DEPENDENCIES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _git() -> dict[str, Any] | None:
    """Revision and dirtiness of the code in the working directory, or None outside git."""
    answers = []
    for question in (("rev-parse", "HEAD"), ("status", "--porcelain")):
        try:
            answer = subprocess.run(
                ("git", *question), capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode != 0:
            return None
        answers.append(answer.stdout.strip())
    return {"revision": answers[0], "dirty": bool(answers[1])}
