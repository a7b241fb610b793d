"""Checkpoints under kills, full disks, flipped bits, foreign files (fault rows 1, 2, 5, 7, 11)."""

from __future__ import annotations

import builtins
import errno
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.errors import CheckpointError, RunDirectoryError
from surefoot.loops.resuming import resumed
from surefoot.recipe import load
from surefoot.run import checkpoint, manifest
from surefoot.run.checkpoint import POINTS, load_latest, load_step, save
from surefoot.run.directory import RunDirectory

_AFTER_RENAME = POINTS[POINTS.index("renamed") :]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def _save(directory: RunDirectory, step: int, *, keep: int = 2, size: int = 1000) -> Path:
    """Every number of the checkpoint of a step is a function of the step."""
    tensors = {
        "policy": {"w": torch.full((size,), step + 0.5), "b": torch.tensor([step])},
        "optimizer": {"m": torch.full((size,), -(step % 256), dtype=torch.bfloat16)},
    }
    state = {"step": step, "cursor": {"epoch": step // 3}}
    return save(directory, step, tensors, state, keep=keep, identity={"recipe": "abc"})


def _assert_whole(loaded: checkpoint.Loaded | None, step: int) -> None:
    assert loaded is not None
    assert (loaded.step, loaded.state) == (step, {"step": step, "cursor": {"epoch": step // 3}})
    policy, optimizer = loaded.tensors("policy"), loaded.tensors("optimizer")
    assert policy["w"].unique().tolist() == [step + 0.5]
    assert policy["b"].tolist() == [step]
    assert optimizer["m"].unique().tolist() == [-(step % 256)]


def _in_child(action: Callable[[], Any], *, environment: dict[str, str] | None = None) -> int:
    """Run `action` in a forked process; returns its exit code (0, or 1 when it raised)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.update(environment or {})
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _names(directory: RunDirectory) -> list[str]:
    return sorted(entry.name for entry in directory.checkpoints.iterdir())


# -- the protocol ----------------------------------------------------------------------------------


def test_what_was_saved_comes_back_bit_for_bit(directory: RunDirectory) -> None:
    odd = torch.tensor([0x7FC00001, 0x00000001, 0x80000000], dtype=torch.uint32).view(torch.float32)
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "nan payload, denormal, -0": odd,
        "bfloat16": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "bool": torch.tensor([True, False, True]),
        "transposed": base.T,
        "shares memory": base[1:],
        "strided": torch.arange(10.0)[::2],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "gradient": torch.ones(2, requires_grad=True),
        "uint8": torch.arange(3, dtype=torch.uint8),
    }
    save(directory, 1, {"all": tensors, "none": {}}, {}, keep=1, identity={})
    loaded = load_step(directory, 1)
    back = loaded.tensors("all")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        raw = (
            [
                item.detach().reshape(-1).contiguous().view(torch.uint8)
                for item in (back[name], tensor)
            ]
            if tensor.numel()
            else [back[name], tensor]
        )
        assert torch.equal(*raw), name
    assert loaded.tensors("none") == {}
    with pytest.raises(CheckpointError, match=r"no tensors named 'critic'; it has all, none"):
        loaded.tensors("critic")


def test_writing_into_loaded_tensors_leaves_the_checkpoint_alone(directory: RunDirectory) -> None:
    _save(directory, 1)
    loaded = load_step(directory, 1)
    with_changes = loaded.tensors("policy")
    with_changes["w"].zero_()
    _assert_whole(load_step(directory, 1), 1)
    shutil.rmtree(loaded.path)
    assert with_changes["w"].sum().item() == 0.0


def test_every_tensor_is_aligned_in_its_file(directory: RunDirectory) -> None:
    tensors = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "c": torch.zeros(3, dtype=torch.int64),
    }
    path = save(directory, 1, {"t": tensors}, {}, keep=1, identity={}) / "t.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert len(data) == 8 + length + 3 + 6 + 24
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_state_comes_back_exactly(directory: RunDirectory) -> None:
    state = {
        "floats": [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf],
        "nan": math.nan,
        "big": 2**70,
        "text": "né\ud800\u2028",
        "none": None,
        "flag": True,
        "nested": {"tuple": (1, 2)},
    }
    save(directory, 1, {}, state, keep=1, identity={"lr": 0.1})
    back = load_step(directory, 1)
    assert math.isnan(back.state.pop("nan"))
    del state["nan"]
    state["nested"] = {"tuple": [1, 2]}
    assert back.state == state
    assert [math.copysign(1, number) for number in back.state["floats"][4:5]] == [-1.0]
    assert back.state["flag"] is True
    assert back.differences({"lr": 0.1, "new key": 1}) == {}
    assert back.differences({"lr": 0.2}) == {"lr": (0.1, 0.2)}


@pytest.mark.parametrize(
    ("tensors", "state", "message"),
    [
        ({}, {"a": {1: 2}}, r"state\.a has the key 1"),
        ({}, {"a": [object()]}, r"state\.a\[0\] is a object"),
        ({"../x": {}}, {}, "cannot name a checkpoint file"),
        ({"x": {"w": torch.zeros(2, dtype=torch.complex64)}}, {}, "tensor 'w'"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(
    directory: RunDirectory, tensors: Any, state: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(directory, 1, tensors, state, keep=1, identity={})
    assert _names(directory) == []


def test_retention_keeps_the_newest_and_at_least_one(directory: RunDirectory) -> None:
    for step in range(10, 60, 10):
        _save(directory, step, keep=2)
    assert _names(directory) == ["step_000040", "step_000050"]
    _save(directory, 60, keep=1)
    assert _names(directory) == ["step_000060"]
    with pytest.raises(CheckpointError, match=r"run\.keep is 0"):
        _save(directory, 70, keep=0)
    _save(directory, 50, keep=1)  # what was just written is never retired
    assert "step_000050" in _names(directory)


@pytest.mark.fault(7)
def test_retention_does_not_count_damaged_directories(directory: RunDirectory) -> None:
    for step in (1, 2, 3):
        _save(directory, step, keep=3)
    (directory.step_path(3) / "policy.safetensors").write_bytes(b"")
    _save(directory, 4, keep=2)
    assert directory.checkpoint_steps() == [2, 3, 4]


@pytest.mark.fault(1)
def test_stale_temporary_directories_are_removed(directory: RunDirectory) -> None:
    (directory.checkpoints / ".tmp-step_000009-123").mkdir()
    (directory.checkpoints / ".tmp-step_000009-123" / "policy.safetensors").write_bytes(b"x")
    _save(directory, 1)
    assert _names(directory) == ["step_000001"]


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("again", [False, True], ids=["next-step", "same-step"])
def test_every_crash_point_leaves_a_verified_checkpoint(
    directory: RunDirectory, point: str, again: bool
) -> None:
    _save(directory, 1, keep=1)
    step = 1 if again else 2
    unreached = "mid_retention" if again else "moved_aside"
    code = _in_child(
        lambda: _save(directory, step, keep=1), environment={"SUREFOOT_FAULT_AT": point}
    )
    assert code == (0 if point == unreached else 137)
    loaded = load_latest(directory)
    _assert_whole(loaded, step if point in _AFTER_RENAME or point == unreached else 1)
    assert loaded is not None
    assert loaded.skipped == ()
    _save(directory, 3, keep=1)
    assert _names(directory) == ["step_000003"]


def test_a_fault_point_can_wait_for_its_step_and_must_exist(directory: RunDirectory) -> None:
    def save_three() -> None:
        for step in (1, 2, 3):
            _save(directory, step)

    assert _in_child(save_three, environment={"SUREFOOT_FAULT_AT": "renamed@2"}) == 137
    assert directory.checkpoint_steps() == [1, 2]
    assert _in_child(save_three, environment={"SUREFOOT_FAULT_AT": "nowhere"}) == 1


@pytest.mark.fault(1)
def test_thirty_kills_at_random_moments(directory: RunDirectory) -> None:
    """The child saves without pause, so that every kill lands in a save."""
    chance, size = random.Random(0), 200_000
    _save(directory, 1, size=size)
    interrupted = 0
    for _ in range(30):
        known = load_latest(directory)
        assert known is not None
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for step in range(known.step + 1, known.step + 10_000):
                _save(directory, step, size=size)
                os.write(writing, step.to_bytes(4, "little"))
            os._exit(1)
        os.close(writing)
        time.sleep(chance.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(reading, "rb") as told:
            finished = told.read()
        interrupted += any(name.startswith(".tmp-") for name in _names(directory))
        loaded = load_latest(directory)
        assert loaded is not None
        assert loaded.skipped == ()
        assert loaded.step >= int.from_bytes(finished[-4:] or b"\1", "little")
        _assert_whole(loaded, loaded.step)
    assert interrupted >= 5, "too few kills landed in a save for this test to mean anything"


# -- damage ----------------------------------------------------------------------------------------


def _flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << (place % 8)
    file.write_bytes(data)


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "name", ["policy.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"]
)
def test_any_flipped_bit_is_found(directory: RunDirectory, name: str) -> None:
    file = _save(directory, 2, size=8) / name
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        _flip(file, place)
        with pytest.raises(CheckpointError, match=f"step_000002 is damaged .*{name}"):
            load_step(directory, 2)
        file.write_bytes(whole)
    _assert_whole(load_step(directory, 2), 2)


@pytest.mark.fault(7)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_named_moved_and_passed_over(
    directory: RunDirectory, damage: str
) -> None:
    _save(directory, 1)
    path = _save(directory, 2)
    file = path / ("MANIFEST.json" if damage == "no manifest" else "policy.safetensors")
    if damage == "flip":
        _flip(file, file.stat().st_size - 1)
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    reader = load_latest(directory, rename_damaged=False)
    _assert_whole(reader, 1)
    assert directory.checkpoint_steps() == [1, 2]
    loaded = load_latest(directory)
    _assert_whole(loaded, 1)
    assert loaded is not None
    (skipped,) = loaded.skipped
    assert (skipped.name, skipped.now) == ("step_000002", "step_000002.corrupt")
    assert file.name in skipped.reason
    assert _names(directory) == ["step_000001", "step_000002.corrupt"]
    _save(directory, 2)
    _assert_whole(load_latest(directory), 2)


@pytest.mark.fault(7)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("place", ["", "MANIFEST.json", "state.json", "policy.safetensors"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    directory: RunDirectory, place: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(directory, 1, keep=3)
    wanted = _save(directory, 2, keep=3) / place
    _flip(_save(directory, 3, keep=3) / "state.json", 3)
    before = _names(directory)

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and Path(path) == wanted:
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *arguments, **options)

        return asked

    with monkeypatch.context() as patch:
        for module, name in ((builtins, "open"), (io, "open"), (os, "listdir"), (os, "scandir")):
            patch.setattr(module, name, refusing(getattr(module, name)))
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught:
                load_latest(directory)
            for word in (f"{wanted} cannot be read", os.strerror(number), "nothing was changed"):
                assert word in str(caught.value)
        assert _names(directory) == before
        with pytest.raises(CheckpointError, match=r"cannot be read .*send the same command again"):
            load_step(directory, 2)
    _assert_whole(load_latest(directory), 2)
    assert _names(directory) == ["step_000001", "step_000002", "step_000003.corrupt"]


@pytest.mark.fault(7)
def test_a_size_that_cannot_be_asked_now_is_no_damage(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _save(directory, 1) / "policy.safetensors"
    real = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        with pytest.raises(CheckpointError, match=r"policy\.safetensors cannot be read .*Stale"):
            load_latest(directory)
    assert _names(directory) == ["step_000001"]


@pytest.mark.fault(7)
def test_when_all_are_damaged_no_run_starts_silently_from_zero(directory: RunDirectory) -> None:
    assert load_latest(directory) is None
    for step in (1, 2):
        _flip(_save(directory, step) / "state.json", 3)
    for _ in range(2):  # the second start finds them renamed, and must not take that for a new run
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole .*step_000001"):
            load_latest(directory)
    shutil.rmtree(directory.checkpoints)
    assert load_latest(directory) is None


def test_load_step_names_what_there_is(directory: RunDirectory) -> None:
    _save(directory, 1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; it has 1"):
        load_step(directory, 5)


@pytest.mark.fault(7)
def test_a_manifest_of_another_step_or_version_is_not_believed(directory: RunDirectory) -> None:
    os.rename(_save(directory, 1), directory.step_path(2))
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is of step 1"):
        load_step(directory, 2)
    path = directory.step_path(3)
    path.mkdir()
    body = {"format": "surefoot-checkpoint", "schema": 99, "step": 3, "files": {}}
    digest = manifest._digest(body)
    (path / "MANIFEST.json").write_bytes(manifest.dump({**body, "digest": digest}, "x"))
    with pytest.raises(CheckpointError, match="surefoot-checkpoint 99"):
        load_step(directory, 3)


# -- foreign files ---------------------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.fault(11)
@pytest.mark.parametrize("name", ["optimizer.pt", "model.bin", "extra.safetensors"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_foreign_files_are_refused_by_name_and_never_unpickled(
    directory: RunDirectory, name: str, with_manifest: bool
) -> None:
    path = _save(directory, 1)
    (path / name).write_bytes(pickle.dumps(_Bomb()))
    if not with_manifest:
        (path / "MANIFEST.json").unlink()
    message = name if with_manifest or not name.endswith("safetensors") else "MANIFEST"
    with pytest.raises(CheckpointError, match=message):
        load_latest(directory)


@pytest.mark.fault(11)
@pytest.mark.parametrize("name", ["step_000002.pt", "step_3", "step_000004.tmp"])
def test_a_foreign_name_that_looks_like_a_step_is_refused(
    directory: RunDirectory, name: str
) -> None:
    _save(directory, 1)
    (directory.checkpoints / name).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match=f"{name} is not a checkpoint of ours"):
        load_latest(directory)


# -- full disks ------------------------------------------------------------------------------------


@pytest.mark.fault(5)
def test_a_disk_that_fills_while_writing_leaves_the_old_checkpoint(directory: RunDirectory) -> None:
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine limits file sizes itself")
    _save(directory, 1)

    def save_on_a_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*untouched"):
            _save(directory, 2, size=100_000)
        assert _names(directory) == ["step_000001"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        _save(directory, 3)

    assert _in_child(save_on_a_small_disk) == 0
    _assert_whole(load_latest(directory), 3)


@pytest.mark.fault(5)
def test_too_little_space_is_found_before_anything_is_written(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    free = 200 * 2**20 + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40 - free, free))
    _save(directory, 1, size=100)
    with pytest.raises(CheckpointError, match="needs 200 MiB free"):
        _save(directory, 2, size=1000)
    assert _names(directory) == ["step_000001"]


@pytest.mark.parametrize("odd", ["file", "link to itself", "link", "manifest", "tensors"])
def test_what_lies_in_a_checkpoints_place_is_passed_over(directory: RunDirectory, odd: str) -> None:
    _save(directory, 1)
    path = directory.step_path(2)
    if odd == "file":
        path.write_bytes(b"x")
    elif odd == "link to itself":
        path.symlink_to(path.name)
    elif odd == "link":
        path.symlink_to("nowhere")
    else:
        name = "MANIFEST.json" if odd == "manifest" else "policy.safetensors"
        file = _save(directory, 2) / name
        file.unlink()
        file.mkdir()
    loaded = load_latest(directory)
    _assert_whole(loaded, 1)
    assert loaded is not None and [each.name for each in loaded.skipped] == ["step_000002"]
    _save(directory, 3, keep=2)
    _assert_whole(load_latest(directory), 3)


def test_checkpoints_without_their_recipe_are_not_started_over(directory: RunDirectory) -> None:
    recipe = load({"data": "addition", "reward": "numeric", "method": "rloo", "run": {"steps": 3}})
    assert resumed(directory, recipe) == (recipe, None, [])
    _save(directory, 1)
    with pytest.raises(RunDirectoryError, match=r"holds checkpoints and no recipe\.yaml"):
        resumed(directory, recipe)
    _assert_whole(load_latest(directory), 1)
