"""`python -m surefoot`, also under torchrun: the same as the `surefoot` command."""

from __future__ import annotations

from surefoot.cli import main

if __name__ == "__main__":
    main()
