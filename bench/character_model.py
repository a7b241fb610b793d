"""A small Llama with random weights that reads characters, saved as a model directory.

    python bench/character_model.py FOLDER --characters 0123456789= --seed 0

Nothing is downloaded. One token is one character; the end of a text is a token of its own, which
pads too. There is no chat template: set model.template to none.

Owns the command line. Refuses to own the model (surefoot/models/characters.py) and tasks
(copy_task.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surefoot.models.characters import Shape, save

__all__ = ["Shape", "save"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--characters", default="0123456789=")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    options = parser.parse_args()
    shape = Shape(layers=options.layers, hidden=options.hidden)
    save(options.folder, characters=options.characters, seed=options.seed, shape=shape)


if __name__ == "__main__":
    main()
