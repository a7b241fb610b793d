"""What a run's judge has cost, kept in the run directory so that no restart forgets it.

Owns the file and its form. It is written at each request and not with the checkpoints, because
money that was spent in an abandoned step is spent.
Refuses to own counting and limits (`reward/judge_budget`).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from surefoot.errors import RunDirectoryError
from surefoot.recipe import Recipe
from surefoot.reward.cache import ScoreCache
from surefoot.reward.judge import JudgeSetup
from surefoot.reward.judge_budget import Spent
from surefoot.reward.resolve import JUDGE
from surefoot.run.files import atomic_write_json

FILE = "judge.json"

log = logging.getLogger(__name__)


def judge_setup(recipe: Recipe, run: Path | None) -> JudgeSetup | None:
    """What the recipe's judge rewards share; None where it has none.

    `run` is the run directory whose budget counts; None counts for this process alone.
    """
    if all(part.use != JUDGE for part in recipe.reward):
        return None
    book = None if run is None else SpendingFile(run / FILE)
    return JudgeSetup(
        recipe.judge,
        seed=recipe.run.seed,
        cache=ScoreCache(),
        spent=None if book is None else book.read(),
        keep=None if book is None else book.write,
    )


class SpendingFile:
    """`judge.json` of a run directory: {"calls": n, "usd": x}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = False

    def read(self) -> Spent:
        """What the file says; nothing was spent where there is none."""
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            return Spent(int(told["calls"]), float(told["usd"]))
        except FileNotFoundError:
            return Spent()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.path}: cannot be read ({error}), so it is not known what the judge has "
                'cost; write {"calls": n, "usd": x} into it, or name another run.dir'
            ) from error

    def write(self, spent: Spent) -> None:
        """Replace the file; a disk that refuses is told of once, and the run goes on."""
        try:
            atomic_write_json(self.path, {"calls": spent.calls, "usd": spent.usd})
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning(
                    "%s cannot be written (%s); what the judge costs is known to this process "
                    "only, until there is room",
                    self.path,
                    error,
                )
