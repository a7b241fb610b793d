"""Fixtures shared by all tests, and the settings under which they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama with a character tokenizer."""
    from support.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")
