"""The allocator's settings, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from surefoot.loops.process import tune_allocator

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    before = faults()
    torch.ones(64 << 20, dtype=torch.uint8)
    return faults() - before

fill()
before = fill()
kept = tune_allocator()
fill()
print(kept, before, fill())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
def test_a_freed_block_is_used_again_without_new_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    kept, before, after = done.stdout.split()
    assert kept == "True"
    # 64 MiB are 16384 small pages.
    assert int(before) > 10_000 and int(after) < 100, done.stdout


def test_a_limit_on_address_space_is_no_error() -> None:
    """The heap cannot be reserved; the run goes on with small pages."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
    done = subprocess.run(
        [sys.executable, "-c", limited + SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True")
