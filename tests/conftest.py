"""Fixtures shared by all tests, and the settings under which they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Before torch is imported: several tests fork this process, and a child of a process that has
# started OpenMP threads hangs at its first parallel operation.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama with a character tokenizer."""
    from support.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")
