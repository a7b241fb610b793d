"""Datasets of the Hugging Face library: a hub id, a copy of one in a directory, a saved one.

Owns the choice of configuration, revision and split, and short answers where the hub gives none.
Refuses to own code: rows come from Parquet, Arrow, JSON, CSV and text, and from nothing else.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.data.arrow import BATCH, numbered, package
from surefoot.data.files import resolved
from surefoot.data.options import Option, nearest
from surefoot.data.rows import Sieve
from surefoot.data.source import ROW_OPTIONS, Items, Loaded, Request, Source, checked_rows
from surefoot.errors import DataError, RecipeError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SECONDS = 10.0
# Earlier ones run a dataset's own script.
_OLDEST_DATASETS = 4
_READERS = ("parquet", "arrow", "json", "csv", "text", "cache")
_SAVED_FILES = ("dataset_dict.json", "state.json")


def load(request: Request, sieve: Sieve) -> Loaded:
    """The rows of one split, checked; no split of our own."""
    return checked_rows(request, raw(request), sieve)


def raw(request: Request) -> Items:
    """The rows of one split as they are."""
    library = _library()
    key, spec = request.key, request.spec
    path = resolved(spec.source, request.base_dir)
    revision = None
    if path.is_dir():
        found = _directory(library, path, request)
    else:
        revision = _revision(library, request)
        found = _built(library, spec.source, request, revision=revision)
    place = str(path) if path.is_dir() else spec.source
    if isinstance(found, library.DatasetDict):
        split = _split(found, spec.split, key=key, place=place)
        found, place = found[split], f"{place}[{split}]"
    elif spec.split is not None:
        raise RecipeError(f"{key}.split: {place} has no named parts. Remove it.")
    # As Arrow, so that no image or sound is decoded and a saved format is left aside.
    batches = found.with_format("arrow").iter(batch_size=BATCH)
    items = numbered(batches, names=found.column_names, place=place)
    return Items(items, f"{place} is empty: it has no rows.", revision)


def _directory(library: Any, path: Path, request: Request) -> Any:
    """A saved dataset, or a copy of a hub repository, told apart by the files they bring."""
    if request.options["revision"] is not None:
        raise RecipeError(
            f"{request.key}.revision: {path} is a directory here, so nothing reads it. Remove it."
        )
    if not any((path / name).is_file() for name in _SAVED_FILES):
        return _built(library, str(path), request, revision=None)
    if request.options["config"] is not None:
        raise RecipeError(
            f"{request.key}.config: {path} is a saved dataset, so nothing reads it. Remove it."
        )
    try:
        return library.load_from_disk(str(path))
    except Exception as error:  # the library raises whatever its readers do
        raise DataError(
            f"{path} is not a whole saved dataset ({_line(error)}). Write it again with "
            "save_to_disk."
        ) from error


def _revision(library: Any, request: Request) -> str | None:
    """The commit to load, from one question to the hub; None in offline mode, which asks none."""
    name, wanted = request.spec.source, request.options["revision"]
    if library.config.HF_HUB_OFFLINE:
        return wanted
    hub = importlib.import_module("huggingface_hub")
    try:
        return hub.HfApi().dataset_info(name, revision=wanted, timeout=_SECONDS).sha
    except hub.errors.RevisionNotFoundError as error:
        raise DataError(f"{request.key}.revision: {name} has no revision {wanted!r}.") from error
    except hub.errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{request.key}.source: there is no directory {name} here, and the Hugging Face hub "
            "has no such dataset, or it is private. Check the name; for a private one set HF_TOKEN."
        ) from error
    except Exception as error:  # each version of the library brings another HTTP client
        raise DataError(
            f"{request.key}.source: there is no directory {name} here, and the Hugging Face hub "
            f"cannot be reached ({_line(error)}). With the dataset in the cache set "
            "HF_HUB_OFFLINE=1; or name a file or a directory."
        ) from error


def _built(library: Any, name: str, request: Request, *, revision: str | None) -> Any:
    """Every split of a hub id or of a directory, read by one of the plain readers."""
    config = request.options["config"]
    try:
        builder = library.load_dataset_builder(name, config, revision=revision)
        reader = type(builder).__module__.rpartition(".")[2]
        if reader in _READERS:
            return library.load_dataset(name, config, revision=revision)
    except Exception as error:  # the library raises whatever its readers do
        mend = f" A configuration is chosen with {request.key}.config."
        raise DataError(
            f"{request.key}.source: {name} cannot be loaded: {_line(error)}"
            f"{mend if 'onfig' in str(error) else ''}"
        ) from error
    raise DataError(
        f"{request.key}.source: {name} holds {reader} files. Read are Parquet, Arrow, JSON, CSV "
        "and text; convert it, or name a file."
    )


def _split(parts: Mapping[str, Any], wanted: str | None, *, key: str, place: str) -> str:
    names = list(parts)
    if wanted is not None:
        if wanted not in parts:
            raise RecipeError(
                f"{key}.split: {place} has no part {wanted!r}{nearest(wanted, names)} Its parts: "
                f"{', '.join(names)}."
            )
        return wanted
    if "train" in parts:
        return "train"
    if len(names) == 1:
        return names[0]
    raise RecipeError(f"{key}.split: say which part of {place}: {', '.join(names)}.")


def _library() -> Any:
    package("datasets of the Hugging Face library")
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            "a directory or hub id as data needs the package datasets, which is not installed. "
            "Install it with: pip install 'surefoot[data]'"
        ) from error
    if int(library.__version__.partition(".")[0]) < _OLDEST_DATASETS:
        raise DataError(
            f"a directory or hub id as data needs datasets {_OLDEST_DATASETS} or newer; "
            f"{library.__version__} may run a dataset's own code. Update it with: "
            "pip install 'surefoot[data]'"
        )
    return library


def _line(error: Exception) -> str:
    """The first line of an error's text, short."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


SOURCE = Source(
    name="datasets",
    splits=False,
    options={**ROW_OPTIONS, "config": Option(str), "revision": Option(str)},
    reads=frozenset({"columns", "split"}),
    load=load,
    raw=raw,
)
