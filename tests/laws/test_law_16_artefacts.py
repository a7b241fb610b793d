"""Law 16: nothing is unpickled, and no remote code runs unless the recipe says so by name."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from support.loop import make_loop

import surefoot
from surefoot.errors import ModelError, RecipeError
from surefoot.models import load_model
from surefoot.recipe import Recipe, load

PACKAGE = Path(surefoot.__file__).parent
UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "multiprocessing",
    "concurrent.futures.process",
}


def recipe(path: Path, **run: object) -> Recipe:
    return load(
        {
            "model": {"path": str(path)},
            "data": {"source": "addition"},
            "reward": [{"use": "numeric"}],
            "method": {"name": "rloo"},
            "run": {"steps": 1, **run},
        }
    )


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.where,))


@pytest.mark.fault(11)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_a_directory_of_pickles_is_refused_unread(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    (folder / name).write_bytes(pickle.dumps({"weight": Trap(sprung)}))
    with pytest.raises(ModelError, match=rf"(?s){name}.*safetensors"):
        load_model(recipe(folder))
    assert not sprung.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    loaded = load_model(recipe(folder))
    assert loaded.hash == load_model(recipe(tiny_model)).hash and not sprung.exists()


def _with_code(tiny_model: Path, folder: Path, sprung: Path) -> Path:
    """A model directory that brings its own model class, as hub repositories do."""
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "sprung"
    config["auto_map"] = {
        "AutoConfig": "code.SprungConfig",
        "AutoModelForCausalLM": "code.SprungModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(sprung)!r}, 'w').close()\nraise SystemExit\n")
    return folder


def test_remote_code_is_refused_unread(tiny_model: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    folder = _with_code(tiny_model, tmp_path / "model", sprung)
    with pytest.raises(ModelError, match=r"model\.path"):
        load_model(recipe(folder))
    assert not sprung.exists()


def test_remote_code_can_be_allowed_by_this_name_only() -> None:
    assert recipe(Path("x"), allow=["remote_code"]).run.allow == ("remote_code",)
    with pytest.raises(RecipeError, match="remote_code"):
        recipe(Path("x"), allow=["remote_cod"])


@pytest.mark.fault(11)
def test_the_package_has_no_unpickler() -> None:
    """No import of one, and no torch.load, anywhere."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            bad = UNPICKLERS | {
                "torch.load",
                "np.load",
                "numpy.load",
                "yaml.unsafe_load",
            }
            found += [f"{path.relative_to(PACKAGE)}: {name}" for name in names if name in bad]
    assert not found


def test_a_recipe_makes_no_objects(tmp_path: Path) -> None:
    written = tmp_path / "recipe.yaml"
    sprung = tmp_path / "sprung"
    written.write_text(f"run: !!python/object/apply:pathlib.Path.touch [{str(sprung)!r}]\n")
    with pytest.raises(RecipeError, match="not readable as YAML"):
        load(written)
    assert not sprung.exists()


def test_a_run_directory_holds_tensors_as_safetensors_and_the_rest_as_text(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={"name": "grpo", "group_size": 2},
        judge=lambda p, s, c: float(s),
    )
    bench.run()
    files = [path for path in bench.path.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert {".safetensors", ".json", ".jsonl", ".yaml"} <= kinds
    for path in files:
        if path.suffix == ".safetensors":
            header = int.from_bytes(path.read_bytes()[:8], "little")
            assert json.loads(path.read_bytes()[8 : 8 + header])
        else:
            path.read_text(encoding="utf-8")
        # A pickle and a zip (torch.save) begin like this.
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")


def test_the_trap_would_spring(tmp_path: Path) -> None:
    """The tests above can fail: unpickling does write the file."""
    saved = tmp_path / "weights.bin"
    torch.save({"weight": Trap(tmp_path / "sprung")}, saved)
    torch.load(saved, weights_only=False)
    assert (tmp_path / "sprung").exists()
