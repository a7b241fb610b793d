"""The one hierarchy of errors that a user can meet: what happened, why, and what to do.

Owns the exception types, the exit code that each of them means, and the error numbers of a disk
that refuses.
Refuses to own any check: a check lives where the thing that it checks lives.
"""

from __future__ import annotations

import errno

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_FINDING = 3
EXIT_INTERRUPTED = 75

DISK_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Error numbers of a disk that is full, limited, read-only or broken."""


class SurefootError(ValueError):
    """Something the user can mend; the message names the key, row or file and the mend."""

    exit_code = EXIT_REFUSED


class RecipeError(SurefootError):
    """A recipe is wrong: an unknown key, a bad value, a combination that cannot work."""


class NotBuiltError(RecipeError):
    """A value that the schema knows, but whose function this version does not have."""


class DataError(SurefootError):
    """A dataset is wrong: a file, a row or a column."""


class RewardError(SurefootError):
    """A reward breaks its contract, or cannot be found."""


class ModelError(SurefootError):
    """A model directory, a tokenizer or a template cannot be used."""


class RolloutError(SurefootError):
    """Sampling cannot go on."""


class CheckpointError(SurefootError):
    """A checkpoint is damaged, foreign, or belongs to another run."""


class RunDirectoryError(SurefootError):
    """A run directory is locked, unreadable, or not one of ours."""


class Stop(SurefootError):
    """Base of the orderly stops: state is saved, and the exit code says what a scheduler may do."""


class Interrupted(Stop):
    """A signal ended the run; the same command resumes it."""

    exit_code = EXIT_INTERRUPTED


class StoppedOnFinding(Stop):
    """The run stopped itself; the same command would stop again: change what is named."""

    exit_code = EXIT_FINDING


class NotSaved(StoppedOnFinding):
    """The weights in memory are half-changed, of no use, or refused by the disk: none are saved."""
