"""The verbs of `surefoot audit`: their options, and what they print.

Owns parsing, printing and the exit code of every audit. Refuses to own work: each verb imports the
module that does it, so that the command line starts without torch and scikit-learn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.errors import EXIT_REFUSED, RecipeError

if TYPE_CHECKING:
    from surefoot.audit.reading import Lengths
    from surefoot.audit.report import AuditReport

audit_app = typer.Typer(
    help="Look at the data or the reward before a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.SUB=VALUE", help="Values laid over the recipe."),
]
# `--key.sub=value` is an override too; typer must hand it on instead of refusing it.
OVERRIDES = {"ignore_unknown_options": True}
FixedFile = Annotated[
    Path | None, typer.Option("--fix", metavar="OUT", help="Write the cleaned file.")
]
FixFlips = Annotated[
    str, typer.Option("--fix-flips", help="drop or swap pairs with a wrong label.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Where audit.json and audit.html are written."),
]


def joined(arguments: list[str] | None) -> list[str]:
    """The overrides as key.sub=value, also where they were spelled `--key.sub value`."""
    overrides: list[str] = []
    for argument in arguments or []:
        last = overrides[-1] if overrides else ""
        if last.startswith("--") and "=" not in last:
            overrides[-1] = f"{last}={argument}"
        else:
            overrides.append(argument)
    return overrides


@audit_app.command(name="data")
def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Preference pairs, or prompts.")],
    out: Folder = None,
    *,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="pairs or prompts; default: pairs if rows have a side of one."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="PART=NAME", help="What a part is called; repeatable."),
    ] = None,
    answer_format: Annotated[
        str | None, typer.Option("--answer-format", help="How answers are written: gsm8k.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Measure rows with this model's tokenizer.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest row; default: the context.")
    ] = None,
    max_invalid: Annotated[
        float, typer.Option("--max-invalid", min=0, help="Share of rows that may be unreadable.")
    ] = 0.01,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Prompts of the evaluation, to find overlap.")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="numeric, math, boxed or exact, to read the answers."),
    ] = None,
    trusted: Annotated[
        Path | None, typer.Option("--trusted", help="Pairs whose labels are known to be right.")
    ] = None,
    flips: Annotated[
        bool, typer.Option("--flips/--no-flips", help="Look for flipped labels.")
    ] = True,
    fix: FixedFile = None,
    fix_flips: FixFlips = "drop",
    as_json: AsJson = False,
) -> None:
    """Look at preference pairs or prompts; exit code 2 if the verdict is stop."""
    from surefoot.audit.data import audit_data, options_of

    options = options_of(
        kind=kind,
        columns=column or (),
        answer_format=answer_format,
        max_invalid=max_invalid,
        eval_file=evaluation,
        verifier=verifier,
        trusted=trusted,
        flips=flips,
        fix=fix,
        fix_flips=fix_flips,
    )
    found = audit_data(file, options, lengths=_lengths(model, max_tokens))
    folder = out or Path(f"{Path(file).name.partition('.')[0]}-audit")
    tell(found.report, folder, as_json=as_json)
    if found.fixed is not None and not as_json:
        typer.echo(found.fixed.line())
    exit_on_stop(found.report)


@audit_app.command(name="reward", context_settings=OVERRIDES)
def audit_reward(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file.")],
    overrides: Overrides = None,
    out: Folder = None,
    *,
    rows: Annotated[
        int | None, typer.Option("--rows", min=2, help="Rows of data to try; default 200.")
    ] = None,
    pilot: Annotated[
        int | None,
        typer.Option("--pilot", min=1, metavar="PROMPTS", help="Prompts to sample; default 64."),
    ] = None,
    no_pilot: Annotated[
        bool, typer.Option("--no-pilot", help="Do without the model and its samples.")
    ] = False,
    solutions: Annotated[
        Path | None,
        typer.Option("--solutions", metavar="FILE", help="Solutions, each labelled is_correct."),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option("--form", help="How an answer is written, as 'A: {answer}'; repeatable."),
    ] = None,
    accept_at: Annotated[
        float | None,
        typer.Option("--accept-at", help="First reward of an accepted answer; default 1."),
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option("--max-calls", min=1, help="Most answers that are scored.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try the reward of a recipe on its own rows; exit code 2 if the verdict is stop."""
    from surefoot.audit.reward import audit_reward as look

    if no_pilot and pilot is not None:
        raise RecipeError("audit reward: give one of --pilot and --no-pilot")
    report = look(
        recipe,
        joined(overrides),
        rows=rows,
        pilot=0 if no_pilot else pilot,
        labelled=solutions,
        forms=form or (),
        accept_at=accept_at,
        max_calls=max_calls,
        tell=lambda line: typer.echo(f"surefoot: {line}", err=True),
    )
    tell(report, out or Path(f"{Path(recipe).stem}-reward-audit"), as_json=as_json)
    exit_on_stop(report)


def _lengths(model: str | None, max_tokens: int | None) -> Lengths | None:
    if model is not None:
        from surefoot.audit.measure import lengths_of

        return lengths_of(model, max_tokens=max_tokens)
    if max_tokens is not None:
        raise RecipeError("--max-tokens: tokens are those of a model. Add --model PATH.")
    return None


def tell(report: AuditReport, folder: Path, *, as_json: bool) -> None:
    """The report on the terminal, and as files in `folder`; every audit ends here."""
    data, page = report.write(folder)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
        return
    typer.echo("\n".join(report.lines()))
    typer.echo(f"\nwrote {data} and {page}")


def exit_on_stop(report: AuditReport) -> None:
    """Exit code 2 where the verdict is stop."""
    if report.verdict == "stop":
        raise typer.Exit(EXIT_REFUSED)
