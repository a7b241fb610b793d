"""The layout of a run directory, its environment record, and the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.errors import RunDirectoryError
from surefoot.run.directory import RunDirectory, environment, redact, redact_arguments
from surefoot.run.files import atomic_write_json, atomic_write_text, plain
from surefoot.run.lock import Owner, RunLock, read_owner


def test_create_makes_the_directory_and_accepts_it_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b").create()
    assert directory.checkpoints.is_dir()
    assert not directory.has_checkpoint()
    directory.create()
    (directory.checkpoints / ".tmp-step_000160-1").mkdir()
    assert not directory.has_checkpoint()
    (directory.checkpoints / "step_000140.corrupt").mkdir()
    assert directory.has_checkpoint(), "a damaged one must not be taken for a fresh start"
    assert directory.checkpoint_steps() == []
    directory.step_path(120).mkdir()
    assert directory.step_path(120).name == "step_000120"
    assert directory.checkpoint_steps() == [120]
    assert directory.has_checkpoint()


def test_the_room_is_free_of_torch_but_for_checkpoint() -> None:
    rooms = (
        "directory",
        "files",
        "ledger",
        "lock",
        "manifest",
        "read",
        "rows",
        "trackers",
        "display",
    )
    names = ", ".join([*(f"surefoot.run.{name}" for name in rooms), "surefoot.report.curve"])
    code = f"import sys, {names}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_create_refuses_a_file_and_somebody_elses_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory(tmp_path / "file").create()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(RunDirectoryError, match=r"cat\.jpg"):
        RunDirectory(tmp_path / "photos").create()
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_atomic_write_keeps_the_old_file_when_the_new_one_cannot_be_made(tmp_path: Path) -> None:
    target = tmp_path / "recipe.yaml"
    atomic_write_text(target, "old")
    (tmp_path / f".tmp-recipe.yaml-{os.getpid()}").mkdir()
    with pytest.raises(OSError):
        atomic_write_text(target, "new")
    assert target.read_text() == "old"


def test_json_has_no_nan_and_no_lone_surrogates(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "x.json", {"a": float("nan"), "b": "né\ud800", "c": (1, 2.5)})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": None, "b": "né\ufffd", "c": [1, 2.5]}
    with pytest.raises(TypeError, match=r"row\.a\[1\] is a object"):
        plain({"a": [1, object()]}, "row")


def test_environment_names_versions_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-7c1f")
    facts = environment(["/home/me/bin/surefoot", "train", "judge.api_key=canary-7c1f"])
    directory = RunDirectory(tmp_path / "run").create()
    directory.write_environment({**facts, "hf_token": "canary-7c1f", "model_hash": "ab12"})
    text = directory.environment.read_text()
    assert "canary-7c1f" not in text
    assert str(Path.home()) + os.sep not in text
    assert "/home/me" not in text
    kept = json.loads(text)
    assert kept["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in kept["versions"]
    assert kept["cpus"] >= 1
    assert kept["memory_bytes"] > 2**28
    assert kept["model_hash"] == "ab12"
    assert kept["argv"] == ["surefoot", "train", "judge.api_key=[redacted]"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["x", "HF_TOKEN=abc"], ["x", "HF_TOKEN=[redacted]"]),
        (["x", "--api-key", "abc", "y"], ["x", "--api-key", "[redacted]", "y"]),
        (["x", "clientSecret=abc"], ["x", "clientSecret=[redacted]"]),
        (["x", "rollout.max_new_tokens=16"], ["x", "rollout.max_new_tokens=16"]),
        (["x", "tokens_per_microbatch=9"], ["x", "tokens_per_microbatch=9"]),
        (["x", "tokenizer=a"], ["x", "tokenizer=a"]),
        (["x", "--budget", "tokens=2e6"], ["x", "--budget", "tokens=2e6"]),
        (["x", "url=https://me:pw@host/v1"], ["x", "url=https://[redacted]@host/v1"]),
        (["x", "a=hf_abcdefghij"], ["x", "a=[redacted]"]),
    ],
)
def test_secrets_leave_the_command_line(argv: list[str], expected: list[str]) -> None:
    assert redact_arguments(argv) == expected


def test_redact_goes_into_nested_values_and_keeps_an_absent_secret_absent() -> None:
    facts = {"judge": {"API_KEY": "abc", "model": "m"}, "token": None, "list": [{"secret": 1}]}
    assert redact(facts) == {
        "judge": {"API_KEY": "[redacted]", "model": "m"},
        "token": None,
        "list": [{"secret": "[redacted]"}],
    }


def test_git_revision_and_dirtiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment([])["git"] is None
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run((*git, "init", "-q"), check=True)
    subprocess.run((*git, "commit", "-q", "--allow-empty", "-m", "x"), check=True)
    clean = environment([])["git"]
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new.txt").write_text("x")
    assert environment([])["git"]["dirty"] is True


# -- lock ------------------------------------------------------------------------------------------

_HOLD = """
import sys, time
from surefoot.run.directory import RunDirectory
from surefoot.run.lock import RunLock
lock = RunLock(RunDirectory(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def _holder(directory: RunDirectory) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(directory.path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_process_is_refused_and_told_who_has_it(directory: RunDirectory) -> None:
    with _holder(directory) as child:
        with pytest.raises(RunDirectoryError, match=f"process {child.pid} on "):
            RunLock(directory).acquire()
        child.kill()
        child.wait()
    lock = RunLock(directory).acquire()
    assert lock.stale is not None
    assert lock.stale.pid == child.pid
    lock.release()


def test_a_second_lock_in_the_same_process_is_refused_until_release(
    directory: RunDirectory,
) -> None:
    with RunLock(directory), pytest.raises(RunDirectoryError, match=str(os.getpid())):
        RunLock(directory).acquire()
    with RunLock(directory) as again:
        assert again.stale is None
    assert read_owner(directory.lock) is None


@pytest.mark.parametrize("change", ["boot", "pid", "start"])
def test_a_record_of_a_dead_owner_is_taken_over(directory: RunDirectory, change: str) -> None:
    with RunLock(directory):
        ours = read_owner(directory.lock)
    assert ours is not None
    record = {name: getattr(ours, name) for name in Owner.__slots__}
    record[change] = {"boot": "another-boot", "pid": 2**22 + 1, "start": -1}[change]
    directory.lock.write_text(json.dumps(record))
    with RunLock(directory) as lock:
        assert lock.stale == Owner(**record)


def test_a_living_owner_counts_where_the_filesystem_has_no_locks(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with _holder(directory) as child:
        with pytest.raises(RunDirectoryError, match=str(child.pid)):
            RunLock(directory).acquire()
        child.kill()


def test_a_torn_record_is_no_obstacle(directory: RunDirectory) -> None:
    directory.lock.write_text('{"pid": 1, "ho')
    with RunLock(directory) as lock:
        assert lock.stale is None


def test_a_forked_child_does_not_keep_the_lock(directory: RunDirectory) -> None:
    lock = RunLock(directory).acquire()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    lock.release()
    try:
        RunLock(directory).acquire().release()
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_a_recipe_that_no_run_wrote_is_never_written_over(tmp_path: Path) -> None:
    own = tmp_path / "recipe.yaml"
    own.write_text("method: rloo\nrun: {dir: .}\n", encoding="utf-8")
    for create in (RunDirectory(tmp_path).create, RunDirectory(tmp_path).create_chain):
        with pytest.raises(RunDirectoryError, match=r"holds a recipe\.yaml that no run wrote"):
            create()
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]
    own.write_text("# The resolved recipe; after each value: where it came from.\nmethod: rloo\n")
    RunDirectory(tmp_path).create()


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / ("x" * 255)).create()
    with pytest.raises(RunDirectoryError, match="too long for a run directory's name"):
        RunDirectory(tmp_path / ("x" * 256) / "run")


@pytest.mark.parametrize("name", ["recipe", "environment"])
def test_a_record_whose_place_is_taken_is_named(tmp_path: Path, name: str) -> None:
    directory = RunDirectory(tmp_path / "run").create()
    file = directory.recipe if name == "recipe" else directory.environment
    file.mkdir()
    (file / "x").write_text("")
    with pytest.raises(RunDirectoryError, match=rf"{file.name} cannot be written"):
        if name == "recipe":
            directory.write_recipe("a: 1\n")
        else:
            directory.write_environment({})
    assert sorted(entry.name for entry in directory.path.iterdir()) == ["checkpoints", file.name]


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run").create()
    directory.lock.mkdir()
    with pytest.raises(RunDirectoryError, match=r"run\.lock cannot be opened \(Is a directory\)"):
        RunLock(directory).acquire()
