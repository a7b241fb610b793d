"""`surefoot audit data`: one file of preference pairs or prompts, looked at before a run.

Owns the order of the checks, what the report shows of them, and what --fix does with each row.
Refuses to own any check, and to change the file it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from surefoot.audit import flips, outside, pairs, prompts, reading
from surefoot.audit.features import sklearn
from surefoot.audit.fix import Fixed, Mend, fix, refuse_existing
from surefoot.audit.pairs import Checked
from surefoot.audit.reading import Kind, Left, Lengths, Raw
from surefoot.audit.report import AuditReport, Finding, Severity, Table
from surefoot.errors import DataError, RecipeError

FixFlips = Literal["drop", "swap"]
_SHOWN = 10
"""Rows shown of each check."""
_LARGE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What `audit data` is asked. `columns` maps parts to columns, as `data.columns` does."""

    kind: Kind | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    answer_format: str | None = None
    max_invalid: float = 0.01
    eval_file: Path | None = None
    trusted: Path | None = None
    verifier: str | None = None
    flips: bool = True
    fix: Path | None = None
    fix_flips: FixFlips = "drop"


@dataclass(frozen=True, slots=True)
class DataAudit:
    """The report, and the files that --fix wrote."""

    report: AuditReport
    fixed: Fixed | None


def options_of(
    *,
    kind: str | None,
    columns: Sequence[str],
    answer_format: str | None,
    max_invalid: float,
    eval_file: Path | None,
    verifier: str | None,
    trusted: Path | None,
    flips: bool,
    fix: Path | None,
    fix_flips: str,
) -> DataOptions:
    """The options as typed: `columns` are PART=NAME. RecipeError names the one that is wrong."""
    named: dict[str, str] = {}
    for entry in columns:
        part, mark, name = entry.partition("=")
        if not mark or not part or not name:
            raise RecipeError(f"--column {entry}: write PART=NAME, as in prompt=question.")
        if part in named:
            raise RecipeError(f"--column {entry}: {part} is {named[part]} already. Keep one.")
        named[part] = name
    return DataOptions(
        kind=_one_of("--kind", kind, get_args(Kind)) if kind is not None else None,
        columns=named,
        answer_format=answer_format,
        max_invalid=max_invalid,
        eval_file=eval_file,
        trusted=trusted,
        verifier=None if verifier is None else _one_of("--verifier", verifier, prompts.VERIFIERS),
        flips=flips,
        fix=fix,
        fix_flips=_one_of("--fix-flips", fix_flips, get_args(FixFlips)),
    )


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise RecipeError(f"{option} is {value!r}: it is one of {', '.join(known)}.")
    return value


def audit_data(
    file: Path | str, options: DataOptions, *, lengths: Lengths | None = None
) -> DataAudit:
    """Look at every row of a file. DataError and RecipeError where the file or an option is wrong.

    `lengths` measures rows with a model's tokenizer; without it no row is too long.
    """
    if options.fix is not None:
        refuse_existing(options.fix)
    raw = reading.read(
        file,
        kind=options.kind,
        columns=options.columns,
        answer_format=options.answer_format,
    )
    _refuse_unread(options, raw.kind)
    look = _pairs if raw.kind == "pairs" else _prompts
    checks, extra, figures, left = look(raw, options, lengths)
    checks = [*_left(left, options), *checks]
    mends = [mend for check in checks for mend in check.mends]
    fixed = None if options.fix is None else fix(raw, mends, options.fix)
    summary = {
        "kind": raw.kind,
        "rows": left.seen,
        "to_mend": len({mend.where for mend in mends}),
        "fixed": None if fixed is None else fixed.figures(),
    }
    report = AuditReport(
        kind="data",
        subject=str(file),
        findings=tuple(check.finding for check in checks),
        tables=(*extra, *_shown(raw, checks)),
        figures={**summary, **figures},
    )
    return DataAudit(report, fixed)


def _refuse_unread(options: DataOptions, kind: Kind) -> None:
    """RecipeError for an option that nothing would read (law 14)."""
    unread: dict[str, bool] = {
        "--eval": kind == "pairs" and options.eval_file is not None,
        "--verifier": kind == "pairs" and options.verifier is not None,
        "--answer-format": kind == "pairs" and options.answer_format is not None,
        "--trusted": kind == "prompts" and options.trusted is not None,
        "--no-flips": kind == "prompts" and not options.flips,
        "--fix-flips": options.fix_flips != "drop" and (kind == "prompts" or options.fix is None),
    }
    for name, given in unread.items():
        if given:
            raise RecipeError(f"{name}: nothing reads it for {kind} here. Leave it out.")


Looked = tuple[list[Checked], list[Table], dict[str, Any], Left]


def _pairs(raw: Raw, options: DataOptions, lengths: Lengths | None) -> Looked:
    rows, left = reading.read_pairs(raw, max_invalid=options.max_invalid, lengths=lengths)
    seen = [pairs.seen(row) for row in rows]
    if not seen:
        return [], [], {}, left
    checks = pairs.check(seen)
    gone = {mend.where for check in checks for mend in check.mends}
    clean = [pair for pair in seen if pair.where not in gone]
    trusted = None
    if options.trusted is not None:
        given = reading.read(
            options.trusted, kind="pairs", columns=options.columns, answer_format=None
        )
        found, _ = reading.read_pairs(given, max_invalid=options.max_invalid)
        trusted = [pairs.seen(row) for row in found]
    signals = list(outside.signals(clean, trusted))
    against = [_by_signal(signal, clean, options) for signal in signals]
    checks += against or [Checked(outside.unknown(clean))]
    if trusted is not None and not any("trusted" in signal.name for signal in signals):
        checks.append(Checked(outside.too_few(trusted)))
    figures = {"lengths": _lengths(seen)}
    if options.flips:
        flipped, more = _flips(clean, options)
        swapped = any(check.finding.severity is Severity.STOP for check in against)
        checks.append(_unjudged(flipped, clean, signals, swapped=swapped))
        figures |= more
    return checks, [], figures, left


def _unjudged(
    flipped: Checked,
    clean: Sequence[pairs.Seen],
    signals: Sequence[outside.Outside],
    *,
    swapped: bool,
) -> Checked:
    """The suspects of which no better evidence speaks.

    Of a swapped set the scorer suspects the few labels that are right, so none is left.
    """
    known = {
        pair.where
        for signal in signals
        if signal.sure
        for pair, lead in zip(clean, signal.leads, strict=True)
        if lead > 0 or lead < 0
    }
    mends = tuple(mend for mend in flipped.mends if not swapped and mend.where not in known)
    return Checked(flipped.finding, mends, flipped.shown)


def _by_signal(
    signal: outside.Outside, clean: Sequence[pairs.Seen], options: DataOptions
) -> Checked:
    finding = outside.judged(signal, clean)
    against = [p for p, lead in zip(clean, signal.leads, strict=True) if lead < 0]
    if not signal.sure:
        against = list(clean) if finding.severity is Severity.STOP else []
    action: Literal["removed", "swapped"] = "swapped" if options.fix_flips == "swap" else "removed"
    if options.fix is not None and action == "removed" and finding.severity is Severity.STOP:
        raise DataError(
            f"--fix: {finding.text}. Leaving them out would leave the rest of a swapped set: use "
            "--fix-flips swap, or map the columns the other way."
        )
    reason = f"{signal.name} says the opposite"
    mends = tuple(Mend(pair.where, pair.row.form.id, "swapped", reason, action) for pair in against)
    return Checked(finding, mends, tuple(pair.where for pair in against))


def _flips(clean: Sequence[pairs.Seen], options: DataOptions) -> tuple[Checked, dict[str, Any]]:
    sklearn("feature_extraction.text")
    found = flips.find(outside.compared(clean))
    agreed = found.agreement
    figures: dict[str, Any] = {
        "agreement": agreed.estimate,
        "agreement_low": agreed.low,
        "agreement_high": agreed.high,
        "rate": None,
    }
    if found.rate is None:
        text = f"the signal is too weak to estimate flipped labels: {found.weak}"
        mend = "more pairs, several pairs a prompt, or trusted ones (--trusted) would tell"
        return Checked(Finding("flipped labels", Severity.INFO, text, mend, figures)), {}
    rate = found.rate
    suspects = found.suspects()
    action: Literal["removed", "swapped"] = "swapped" if options.fix_flips == "swap" else "removed"
    mends = tuple(
        Mend(
            clean[place].where,
            clean[place].row.form.id,
            "flipped labels",
            f"probability {found.probabilities[place]:.2f} of a flipped label",
            action,
            {
                "probability": round(float(found.probabilities[place]), 4),
                "margin": round(float(found.margins[place]), 4),
            },
        )
        for place in suspects
    )
    figures |= {
        "rate": rate.estimate,
        "rate_low": rate.low,
        "rate_high": rate.high,
        "suspects": len(suspects),
    }
    text = (
        f"about {rate.estimate:.0%} [{rate.low:.0%}, {rate.high:.0%}] of {len(clean)} labels are "
        f"flipped, if not most are (see swapped); the scorer agrees with {agreed.estimate:.1%} of "
        f"labels of prompts it did not learn from; {len(suspects)} pairs are suspects"
    )
    finding = Finding("flipped labels", _severity(rate.low), text, _flip_mend(rate.low), figures)
    return Checked(finding, mends, tuple(mend.where for mend in mends)), {
        "margins": _margins(found.margins)
    }


def _severity(low: float) -> Severity:
    if low >= 0.3:
        return Severity.STOP
    return Severity.CHANGE if low >= 0.05 else Severity.INFO if low > 0 else Severity.OK


def _flip_mend(low: float) -> str:
    if low >= 0.3:
        return "the labels are close to a coin toss: find out where they come from before a run"
    if low >= 0.05:
        return "--fix takes out the suspects; train with label smoothing (cdpo, robust_dpo)"
    return ""


def _prompts(raw: Raw, options: DataOptions, lengths: Lengths | None) -> Looked:
    rows, left = reading.read_prompts(raw, max_invalid=options.max_invalid, lengths=lengths)
    seen = [prompts.asked(row) for row in rows]
    if not seen:
        return [], [], {}, left
    tested = None
    if options.eval_file is not None:
        given = reading.read(
            options.eval_file,
            kind="prompts",
            columns=options.columns,
            answer_format=options.answer_format,
        )
        found, _ = reading.read_prompts(given, max_invalid=1.0)
        tested = [prompts.asked(row) for row in found]
    checks = prompts.check(seen, tested, verifier=options.verifier, tokens=lengths is not None)
    sizes = np.array([len(row.text) for row in seen], dtype=np.float64)
    return checks, [], {"lengths": _histogram("Letters of a prompt", sizes)}, left


def _left(left: Left, options: DataOptions) -> list[Checked]:
    """Rows that a run would not read, as checks of their own."""
    listed = [row for row in left.listed if row.kind != "control_tokens"]
    control = [row for row in left.listed if row.kind == "control_tokens"]
    reads = left.seen - len(left.listed) - len(left.too_long)
    severity = Severity.CHANGE if listed else Severity.OK
    mend = "mend them, or leave them out (--fix)" if listed else ""
    if left.lost is not None:
        severity = Severity.STOP
        mend = f"a run refuses this file. {left.lost}"
    text = f"{len(listed)} of {left.seen} rows cannot be read"
    if listed:
        text += f"; the first, {listed[0].where}: {listed[0].reason}"
    if reads == 0:
        severity, text = Severity.STOP, f"no row of {left.seen} can be read. {text}"
    figures = {"rows": len(listed), "seen": left.seen, "mended_strings": left.mended}
    checks = [
        _unread("invalid rows", Finding("invalid rows", severity, text, mend, figures), listed)
    ]
    if left.mended:
        text = f"{left.mended} strings had lone surrogates, which are read as U+FFFD"
        checks.append(Checked(Finding("surrogates", Severity.INFO, text)))
    if control:
        text = f"{len(control)} rows have a control token of the tokenizer"
        finding = Finding("control tokens", Severity.CHANGE, text, "leave them out (--fix)")
        checks.append(_unread("control tokens", finding, control))
    if left.limit is not None:
        checks.append(_too_long(left))
    return checks


def _unread(name: str, finding: Finding, rows: Sequence[Any]) -> Checked:
    mends = tuple(Mend(row.where, None, name, row.reason) for row in rows)
    return Checked(finding, mends, tuple(row.where for row in rows))


def _too_long(left: Left) -> Checked:
    count = len(left.too_long)
    share = count / left.seen
    severity = Severity.OK if not count else Severity.CHANGE
    if share > _LARGE_SHARE:
        severity = Severity.STOP
    text = f"{count} of {left.seen} rows are longer than {left.limit} tokens with the template"
    mend = "a run leaves them out: raise the limit, shorten them, or --fix" if count else ""
    finding = Finding("too long", severity, text, mend, {"rows": count, "limit": left.limit})
    mends = tuple(
        Mend(where, id, "too long", f"{tokens} tokens, over {left.limit}", "removed")
        for where, id, tokens in left.too_long
    )
    return Checked(finding, mends, tuple(where for where, _, _ in left.too_long))


def _shown(raw: Raw, checks: Sequence[Checked]) -> list[Table]:
    """The first rows of every check that lists any, with the reason where one differs by row."""
    tables = []
    rows = dict(raw.items)
    for check in checks:
        if not check.shown:
            continue
        reasons = {mend.where: mend.reason for mend in check.mends}
        cells = tuple(
            (str(reading.number_of(where)), reasons.get(where, ""), _beginning(rows[where]))
            for where in check.shown[:_SHOWN]
        )
        of = f", {_SHOWN} of {len(check.shown)}" if len(check.shown) > _SHOWN else ""
        tables.append(Table(f"{check.finding.check}{of}", ("row", "reason", "begins"), cells))
    return tables


def _beginning(row: object) -> str:
    if not isinstance(row, Mapping):
        return "" if isinstance(row, Exception) else str(row)[:200]
    return " | ".join(f"{key}: {str(value)[:120]}" for key, value in list(row.items())[:4])


def _lengths(seen: Sequence[pairs.Seen]) -> dict[str, Any]:
    gaps = np.array([len(p.chosen) - len(p.rejected) for p in seen], dtype=np.float64)
    return _histogram("Letters of the chosen answer less those of the rejected one", gaps)


def _margins(margins: Any) -> dict[str, Any]:
    made = _histogram("Margin of the scorer, out of fold", np.asarray(margins))
    return {**made, "caption": "left of 0 the scorer disagrees with the label"}


def _histogram(title: str, values: Any) -> dict[str, Any]:
    """Thirty bins over the middle 98 %; what lies outside is in the outer ones."""
    low, high = np.quantile(values, [0.01, 0.99])
    if low == high:
        low, high = low - 1, high + 1
    counts, edges = np.histogram(np.clip(values, low, high), 30, (low, high))
    return {"title": title, "edges": edges.tolist(), "counts": counts.tolist()}
