"""What makes a checkpoint directory believable: exact JSON, digests, and their verification.

Owns `MANIFEST.json`, the JSON dialect of `state.json`, and the judgement whole, damaged or foreign.
Refuses to own tensors, and what is done about a damaged directory: both belong to `checkpoint`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from surefoot.errors import CheckpointError

MANIFEST, STATE, TENSORS = "MANIFEST.json", "state.json", ".safetensors"
_FORMAT, _SCHEMA = "surefoot-checkpoint", 1
_FLOAT = "$float"
_OTHER_KIND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Error numbers of a place that holds nothing, or something of another kind."""


class Damaged(Exception):
    """Bytes of a checkpoint are missing or changed; the reason names the file."""


def dump(value: Mapping[str, Any], name: str) -> bytes:
    """JSON bytes from which `parse` gives an equal value: every float, every string, exactly.

    Raises CheckpointError naming the place of what JSON cannot hold.
    """
    return json.dumps(_encode(value, name), indent=1, allow_nan=False).encode() + b"\n"


def parse(data: bytes) -> Any:
    """The inverse of `dump`; sequences come back as lists."""
    return decode(json.loads(data))


def decode(value: Any) -> Any:
    """Turn the marks for NaN and infinities back into floats."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: repr(number)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _FLOAT:
                raise CheckpointError(f"{where} has the key {key!r}; checkpoint keys are strings")
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_encode(item, f"{where}[{place}]") for place, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold as JSON; "
        "save tensors as tensors and the rest as numbers, strings, lists and mappings"
    )


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write, hash in the same pass, and sync; returns the file's size (bytes) and sha256.

    The digest is of what was in memory, so a disk that changes it later is found out.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def write_manifest(
    directory: Path,
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    *,
    identity: Mapping[str, Any],
    parent: int | None,
) -> None:
    """Write `MANIFEST.json` over the facts that `write_hashed` gave for each file."""
    body = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "step": step,
        "parent": parent,
        "files": files,
        "identity": identity,
        "versions": {name: metadata.version(name) for name in ("torch", "safetensors")},
    }
    encoded = _encode(body, MANIFEST)
    text = json.dumps({**encoded, "digest": _digest(encoded)}, indent=1)
    write_hashed(directory / MANIFEST, [text.encode() + b"\n"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, its own digest checked.

    Raises Damaged, or CheckpointError when the directory is not ours, of another version, or cannot
    be read now.
    """
    try:
        raw = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        _refuse_foreign(path, known=())
        raise Damaged(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise _judged(path / MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON") from error
    if not isinstance(raw, dict) or raw.get("digest") != _digest(raw):
        raise Damaged(f"{MANIFEST} has changed: its digest is wrong")
    if raw.get("format") != _FORMAT or raw.get("schema") != _SCHEMA:
        raise CheckpointError(
            f"{path} has format {raw.get('format')} {raw.get('schema')}, and this version reads "
            f"{_FORMAT} {_SCHEMA}; use the version that wrote it"
        )
    return raw


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every byte is as written.

    Raises Damaged naming the file, or CheckpointError naming a file that is not part of it, or that
    cannot be read now.
    """
    manifest = read_manifest(path)
    _refuse_foreign(path, known=manifest["files"])
    for name, facts in manifest["files"].items():
        file = path / name
        size = _size_of(file)
        if size != facts["size"]:
            raise Damaged(f"{name} has {size} bytes instead of {facts['size']}")
        if _digest_of(file) != facts["sha256"]:
            raise Damaged(f"{name} has changed: its sha256 is not the manifest's")
    if path.name != f"step_{manifest['step']:06d}":
        raise Damaged(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What to say of a file or directory of a checkpoint that may be whole, but cannot be read."""
    return CheckpointError(
        f"{path} cannot be read ({error.strerror or error}); nothing was changed. Mend the disk or "
        "the permissions and send the same command again, or move the checkpoint elsewhere to go "
        "on without it"
    )


def _judged(path: Path, error: OSError) -> Damaged | CheckpointError:
    """Damaged by what lies there, or not to be read now: then nothing is known of its bytes."""
    if error.errno in _OTHER_KIND:
        return Damaged(f"{path.name} cannot be read: {error.strerror}")
    return unreadable(path, error)


def _size_of(file: Path) -> int:
    try:
        facts = file.stat()
    except FileNotFoundError as error:
        raise Damaged(f"{file.name} is missing") from error
    except OSError as error:
        raise _judged(file, error) from error
    if not stat.S_ISREG(facts.st_mode):
        raise Damaged(f"{file.name} is no file")
    return facts.st_size


def _digest_of(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise _judged(file, error) from error


def looks_whole(path: Path) -> bool:
    """A cheap look, for retention: the manifest is sound and the sizes are right."""
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == facts["size"] for name, facts in files.items())
    except (Damaged, CheckpointError, OSError):
        return False


def _refuse_foreign(path: Path, known: Collection[str]) -> None:
    """Name what does not belong. Without a manifest, the names of our own files pass."""
    listed = {MANIFEST, STATE, *known}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise _judged(path, error) from error
    for entry in entries:
        if entry.name in listed or (not known and entry.name.endswith(TENSORS)):
            continue
        raise CheckpointError(
            f"{entry} is not part of a checkpoint of ours, and it is not read (a pickle could run "
            "code); move it elsewhere"
        )


def _digest(raw: Mapping[str, Any]) -> str:
    body = {key: value for key, value in raw.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
