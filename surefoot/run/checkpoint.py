"""Checkpoints: a directory under its final name is whole, or it does not exist.

Owns writing, verifying, choosing, retiring and reading `checkpoints/step_N`. Tensors are
safetensors, the rest is JSON, and nothing is ever unpickled (DESIGN law 16).
Refuses to own what the state means, and model exports: a resume directory is not a model directory.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from surefoot.errors import CheckpointError
from surefoot.run import manifest
from surefoot.run.directory import RunDirectory
from surefoot.run.files import fsync_directory

POINTS = (
    "begun",
    "temp_made",
    "mid_tensors",
    "tensors_written",
    "state_written",
    "manifest_written",
    "temp_synced",
    "moved_aside",
    "renamed",
    "parent_synced",
    "mid_retention",
    "retained",
)
_FAULT = "SUREFOOT_FAULT_AT"
_SPARE_BYTES = 200 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KNOWN_ENTRY = re.compile(r"step_\d{6,}(\.aside|\.corrupt(-\d+)?)?")
_log = logging.getLogger(__name__)
_Point = Callable[[str], None]
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A damaged checkpoint that was passed over, why, and the name that it has now."""

    name: str
    reason: str
    now: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint whose every file has the sha256 that its manifest says."""

    path: Path
    step: int
    state: dict[str, Any]
    identity: dict[str, Any]
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors saved under `name`, on the CPU, bit for bit."""
        if name not in self.names:
            raise CheckpointError(
                f"checkpoint {self.path.name} has no tensors named {name!r}; "
                f"it has {', '.join(self.names) or 'none'}"
            )
        file = self.path / f"{name}{manifest.TENSORS}"
        try:
            return safetensors.torch.load_file(file)
        except OSError as error:
            raise manifest.unreadable(file, error) from error

    def differences(self, expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Each key of `expected` that this checkpoint contradicts: what it says, what is expected.

        A key that it does not know is no contradiction.
        """
        plain = manifest.parse(manifest.dump(expected, "identity"))
        return {
            key: (self.identity[key], value)
            for key, value in plain.items()
            if key in self.identity and self.identity[key] != value
        }


# -- writing ---------------------------------------------------------------------------------------


def save(
    directory: RunDirectory,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    identity: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step`, then retire all but the newest `keep`; returns its path.

    `tensors` maps a file's name to its tensors (any device and stride; each is written whole, so
    tied weights belong in once). `state` and `identity` are JSON values; floats come back exactly.
    Raises CheckpointError when the disk is too small or refuses: older checkpoints are untouched
    then, and no partial one is left. The caller holds the run lock.
    """
    if keep < 1:
        raise CheckpointError(f"run.keep is {keep}, which would keep no checkpoint; use 1 or more")
    state_bytes = manifest.dump(state, "state")
    root, final = directory.checkpoints, directory.step_path(step)
    temporary = root / f".tmp-{final.name}-{os.getpid()}"
    point = _fault_points(step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _settle(root)
        _check_space(root, tensors, len(state_bytes))
        point("begun")
        temporary.mkdir()
        point("temp_made")
        files = {}
        for name, content in tensors.items():
            file = temporary / _file_name(name)
            files[file.name] = manifest.write_hashed(file, _safetensors(content, point))
        point("tensors_written")
        file = temporary / manifest.STATE
        files[file.name] = manifest.write_hashed(file, [state_bytes])
        point("state_written")
        older = [old for old in directory.checkpoint_steps() if old != step]
        parent = older[-1] if older else None
        manifest.write_manifest(temporary, step, files, identity=identity, parent=parent)
        point("manifest_written")
        fsync_directory(temporary)
        point("temp_synced")
        _put_in_place(temporary, final, point)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {root} ({error.strerror}); "
            "earlier checkpoints are untouched. Free space, or name another run.dir"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _retire(directory, final, keep, point)
    point("retained")
    return final


def _put_in_place(temporary: Path, final: Path, point: _Point) -> None:
    aside = final.with_name(f"{final.name}.aside")
    if final.exists():
        # A step that is done again replaces itself; `_settle` undoes this line after a crash.
        os.rename(final, aside)
        point("moved_aside")
    os.rename(temporary, final)
    point("renamed")
    fsync_directory(final.parent)
    point("parent_synced")
    _remove(aside)


def _retire(directory: RunDirectory, newest: Path, keep: int, point: _Point) -> None:
    """Delete old checkpoints. Damaged-looking ones do not count towards `keep`."""
    whole = [
        path
        for path in map(directory.step_path, directory.checkpoint_steps())
        if path == newest or manifest.looks_whole(path)
    ]
    for path in whole[:-keep]:
        if path != newest:
            _remove(path, point)


def _remove(path: Path, point: _Point | None = None) -> None:
    """Take a directory away under a temporary name, so that half of it is never a checkpoint."""
    if not path.exists():
        return
    grave = path.with_name(f".tmp-{path.name}-removed-{os.getpid()}")
    try:
        os.rename(path, grave)
    except OSError as error:
        _log.warning("old checkpoint %s could not be removed (%s)", path, error.strerror)
        return
    if point is not None:
        point("mid_retention")
    shutil.rmtree(grave, ignore_errors=True)


def _settle(root: Path) -> None:
    """Clear what a crash can leave behind: temporary directories, a step moved aside."""
    for entry in list(root.iterdir()):
        if entry.name.startswith(".tmp-"):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.endswith(".aside"):
            final = entry.with_name(entry.name.removesuffix(".aside"))
            if final.exists():
                _remove(entry)
            else:
                os.rename(entry, final)


def _check_space(root: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], rest: int) -> None:
    size = rest + sum(
        tensor.numel() * tensor.element_size()
        for content in tensors.values()
        for tensor in content.values()
    )
    free = shutil.disk_usage(root).free
    needed = int(1.1 * size) + _SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"a checkpoint of {size >> 20} MiB needs {needed >> 20} MiB free in {root}, "
            f"and {free >> 20} MiB are left; free space, lower run.keep, or move run.dir"
        )


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} cannot name a checkpoint file; use letters, digits, _ . -")
    return f"{name}{manifest.TENSORS}"


def _safetensors(content: Mapping[str, torch.Tensor], point: _Point) -> Iterator[Any]:
    """The bytes of one safetensors file, tensor by tensor: no second copy of a model in memory."""
    header: dict[str, Any] = {}
    end = 0
    # Widest elements first keeps every tensor aligned without holes, as the format demands.
    names = sorted(content, key=lambda name: (-content[name].element_size(), name))
    for name in names:
        tensor = content[name]
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be saved; "
                "convert it to a dense tensor of a common dtype first"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = content[name].detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())
        point("mid_tensors")


def _fault_points(step: int) -> _Point:
    """The crash hook of the fault tests: POINT, or POINT@STEP, ends the process there."""
    wanted, _, at = os.environ.get(_FAULT, "").partition("@")
    if wanted and wanted not in POINTS:
        raise CheckpointError(f"{_FAULT} names no point: {wanted!r}; it has {', '.join(POINTS)}")
    armed = bool(wanted) and at in ("", str(step))

    def point(name: str) -> None:
        if armed and name == wanted:
            os._exit(137)

    return point


# -- reading ---------------------------------------------------------------------------------------


def load_latest(directory: RunDirectory, *, rename_damaged: bool = True) -> Loaded | None:
    """The newest checkpoint that verifies, or None when the run never had one.

    A damaged one is renamed `step_N.corrupt`, named in `skipped`, and the one before it is used;
    `rename_damaged=False` leaves names alone, for readers that do not hold the run lock. Raises
    CheckpointError, with names left alone too, for a foreign file, and for one that cannot be read
    now; and when every checkpoint there is is damaged: starting again from zero without a word
    would be worse.
    """
    root = directory.checkpoints
    if not root.is_dir():
        return None
    if rename_damaged:
        _settle(root)
    for entry in root.iterdir():
        if entry.name.startswith("step_") and not _KNOWN_ENTRY.fullmatch(entry.name):
            raise CheckpointError(
                f"{entry} is not a checkpoint of ours, and it is not read; move it elsewhere"
            )
    loaded: Loaded | None = None
    found: dict[Path, str] = {}
    for step in reversed(directory.checkpoint_steps()):
        path = directory.step_path(step)
        try:
            loaded = _load(path)
            break
        except manifest.Damaged as damage:
            found[path] = str(damage)
    skipped = tuple(
        Skipped(path.name, reason, (_set_aside(path) if rename_damaged else path).name)
        for path, reason in found.items()
    )
    if loaded is not None:
        return dataclasses.replace(loaded, skipped=skipped)
    damaged = sorted(entry.name for entry in root.iterdir() if ".corrupt" in entry.name)
    if skipped or damaged:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in skipped)
        raise CheckpointError(
            f"no checkpoint in {root} is whole ({reasons or ', '.join(damaged)}). "
            f"Delete {root} to start from zero, or restore a copy"
        )
    return None


def load_step(directory: RunDirectory, step: int) -> Loaded:
    """The checkpoint of one step; raises CheckpointError when it is absent or damaged."""
    path = directory.step_path(step)
    if not path.is_dir():
        there = ", ".join(map(str, directory.checkpoint_steps())) or "none"
        raise CheckpointError(f"{directory.path} has no checkpoint of step {step}; it has {there}")
    try:
        return _load(path)
    except manifest.Damaged as damage:
        raise CheckpointError(
            f"checkpoint {path.name} is damaged ({damage}); name another step"
        ) from damage


def _load(path: Path) -> Loaded:
    facts = manifest.verify(path)
    try:
        data = (path / manifest.STATE).read_bytes()
    except OSError as error:
        raise manifest.unreadable(path / manifest.STATE, error) from error
    state = manifest.parse(data)
    names = tuple(
        name.removesuffix(manifest.TENSORS) for name in facts["files"] if name != manifest.STATE
    )
    identity = manifest.decode(facts["identity"])
    return Loaded(path, facts["step"], state, identity, names)


def _set_aside(path: Path) -> Path:
    target, count = path.with_name(f"{path.name}.corrupt"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.corrupt-{count}")
    os.rename(path, target)
    fsync_directory(path.parent)
    return target
