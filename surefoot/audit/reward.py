"""`audit reward`: every check of a recipe's grader, in order, and one report.

Owns the order of the checks, what is skipped and said to be, and the bound on paid calls.
Refuses to own any check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefoot.audit import exploits, golds, noise, odd, rewrites, shuffled, solutions
from surefoot.audit.bench import Bench, OutOfCalls, about_four_letters, gold_of
from surefoot.audit.forms import FORMS, HOLE, TRIED, Form, Reading, own_forms, read_forms
from surefoot.audit.pilot import pilot_findings
from surefoot.audit.report import AuditReport, Finding, Severity, Table
from surefoot.audit.sampling import Plan, first_rows, sample
from surefoot.data import build
from surefoot.data.jsonl import SUFFIXES
from surefoot.errors import DataError, RecipeError, StoppedOnFinding
from surefoot.recipe import DataSource, Recipe, leaves, load
from surefoot.records import Group, Prompt
from surefoot.reward import Grader

ROWS, PILOT, ACCEPT_AT = 200, 64, 1.0
PAID_CALLS = 2000
"""Most answers that are scored by a judge or a reward with a price, unless the caller says."""
JUDGE = "judge"
_NEED_GOLDS = "golds, wrong answers, youden, rewrites, exploits, shuffled reference"

Source = Path | str | Mapping[str, Any] | Recipe
Found = tuple[list[Finding], list[Table]]


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Rows without a tokenizer: the texts are kept, and their ids only have about their length."""

    has_template: bool
    max_context: int = 1 << 40

    def encode(self, messages: Sequence[Mapping[str, str]] | str) -> tuple[int, ...]:
        return about_four_letters(self.render(messages))

    def render(self, messages: Sequence[Mapping[str, str]] | str) -> str:
        if isinstance(messages, str):
            return messages
        return "\n".join(message["content"] for message in messages)

    def literal(self, text: str) -> bool:
        return True


@dataclass(slots=True)
class _Audit:
    """What the checks share, and what they have found so far."""

    bench: Bench
    plan: Recipe
    given: Sequence[Mapping[str, Any]] | None
    tell: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, check: Callable[[], Found]) -> None:
        """Add what a check finds; one for which no calls are left is named as not run."""
        try:
            findings, tables = check()
        except OutOfCalls:
            text = f"not run: {self.bench.calls} calls are made, and the bound is {self.bench.cap}"
            self.findings.append(Finding(name, Severity.INFO, text, "raise --max-calls"))
            return
        except StoppedOnFinding as stop:
            self.findings.append(Finding(name, Severity.CHANGE, f"not run: {stop}"))
            return
        self.findings += findings
        self.tables += tables

    def skip(self, name: str, why: str) -> None:
        self.findings.append(Finding(name, Severity.INFO, f"skipped: {why}"))

    @property
    def seed(self) -> int:
        return self.plan.run.seed

    @property
    def stopped(self) -> bool:
        return any(finding.severity is Severity.STOP for finding in self.findings)


def audit_reward(
    recipe: Source,
    overrides: Sequence[str] = (),
    *,
    rewards: Iterable[Callable[..., Any]] = (),
    data: Iterable[Mapping[str, Any]] | None = None,
    rows: int | None = None,
    pilot: int | None = None,
    labelled: Path | str | None = None,
    forms: Sequence[str] = (),
    accept_at: float | None = None,
    max_calls: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> AuditReport:
    """Audit the rewards of a recipe on its own rows, without training.

    `rewards` are functions after the recipe's, `data` rows in its place. `rows` (default 200) are
    tried, and `pilot` prompts (default 64, 0: none) are sampled with the real model. `labelled` is
    a file of labelled solutions (`solutions.FORM`). `forms` are texts with {answer} in them. An
    answer is accepted when the first reward gives `accept_at` (default 1). `max_calls` bounds the
    answers that are scored; `tell` hears what it will cost before anything is scored.
    Deterministic but for the reward itself and the times.
    """
    rows = ROWS if rows is None else rows
    pilot = PILOT if pilot is None else pilot
    accept_at = ACCEPT_AT if accept_at is None else accept_at
    if rows < 2 or pilot < 0:
        raise RecipeError(
            f"audit reward: rows is {rows} and pilot is {pilot}; give 2 rows or more, and a pilot "
            "of 0 prompts or more"
        )
    functions, given = tuple(rewards), None if data is None else [dict(row) for row in data]
    outside = [*(["reward"] if functions else []), *(["data"] if given is not None else [])]
    plan = load(recipe, overrides, outside=outside)
    if given is not None and not plan.data:
        plan = replace(plan, data=(DataSource(source="rows"),))
    if "method.group_size" not in leaves(plan):
        raise RecipeError(
            f"audit reward: method {plan.method.name} learns from data and reads no reward; "
            "audit the data instead (surefoot audit data FILE)"
        )
    own = own_forms(forms)
    with _grader(plan, functions) as grader:
        encoder = TextEncoder(plan.model.template != "none")
        held = build(plan, encoder, base_dir=plan.base_dir, rows=given)
        prompts = _first(held.stream.take(min(rows, len(held.stream)), step=1))
        answers = None
        if labelled is not None:
            everything = [*held.stream.rows, *held.eval_prompts]
            answers = solutions.read_solutions(_solution_file(labelled), everything, most=rows)
        bench = Bench(grader, accept_at=accept_at, cap=max_calls)
        prompts = _afford(bench, prompts, plan, pilot, answers, tell)
        audit = _Audit(bench, plan, given, tell)
        _check(audit, prompts, answers, own, pilot)
        figures = {"calls": bench.calls, "rows": len(prompts), **audit.pictures}
    subject = str(recipe) if isinstance(recipe, Path | str) else plan.method.name
    return AuditReport("reward", subject, tuple(audit.findings), tuple(audit.tables), figures)


def _grader(plan: Recipe, functions: Sequence[Callable[..., Any]]) -> Grader:
    setup = None
    if any(part.use == JUDGE for part in plan.reward):
        from surefoot.reward.judge import JudgeSetup

        # Without the table of kept verdicts: asked again, a judge must be free to differ.
        setup = JudgeSetup(plan.judge, seed=plan.run.seed)
    return Grader(
        plan.reward,
        base_dir=plan.base_dir,
        functions=functions,
        max_new_tokens=plan.rollout.max_new_tokens,
        allow=plan.run.allow,
        judge=setup,
    )


def _first(prompts: Sequence[Prompt]) -> list[Prompt]:
    return first_rows(prompts, len(prompts))


def _solution_file(name: Path | str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise DataError(f"--solutions {name}: is no file of {', '.join(SUFFIXES)}; name one")
    return path


def _check(
    audit: _Audit,
    prompts: Sequence[Prompt],
    answers: solutions.SolutionFile | None,
    own: Sequence[Form],
    prompts_of_pilot: int,
) -> None:
    """The checks in order: cheap ones first, those with real completions where they are known."""
    bench = audit.bench
    audit.run("odd inputs", lambda: odd.odd_findings(bench, prompts))
    real: list[Group] = []
    what = ""
    form: Form | None = None
    if answers is not None:
        judged = _solutions(audit, answers)
        if judged is not None:
            (judgement, real), what = judged, "labelled solutions"
            own = [*own, *_form_of(judgement)]
    with_gold = [prompt for prompt in prompts if gold_of(prompt) is not None]
    if with_gold:
        if len(with_gold) < len(prompts):
            missing = len(prompts) - len(with_gold)
            audit.skip("golds of some rows", f"{missing} of {len(prompts)} rows have no answer")
        form = _with_golds(audit, with_gold, own, accepted_elsewhere=_any_accepted(audit))
    else:
        audit.skip(
            _NEED_GOLDS,
            f"none of {len(prompts)} rows has an answer (if the data has one under another name, "
            "set data.columns.answer)",
        )
    if prompts_of_pilot and audit.stopped:
        audit.skip("pilot", "the reward is stopped already; mend it first")
    elif prompts_of_pilot:
        sampled = _pilot(audit, prompts_of_pilot)
        real, what = (sampled, "sampled by the model") if sampled else (real, what)
    else:
        audit.skip("pilot", "not asked for; nothing is known of what the model solves")
    _again(audit, real, what, with_gold, form)


def _again(
    audit: _Audit, real: list[Group], what: str, prompts: Sequence[Prompt], form: Form | None
) -> None:
    """The checks that score completions anew: real ones, else such as are made from golds."""
    bench, seed = audit.bench, audit.seed
    made = [] if real or form is None else _made(bench, prompts, form)
    if real or made:
        shown = what or "right and wrong answers made from golds"
        audit.run("noise", lambda: noise.noise_findings(bench, real or made, shown, seed=seed))
    else:
        audit.skip("noise", "there are no completions to score again without golds or a pilot")
    if form is not None:
        # The first of each is the gold; the wrong ones may be the other row's.
        right = real or [replace(g, completions=g.completions[:1]) for g in made]
        named = what or "golds"
        audit.run(
            "shuffled reference",
            lambda: ([shuffled.shuffled_findings(bench, right, named, seed=seed)], []),
        )


def _solutions(
    audit: _Audit, answers: solutions.SolutionFile
) -> tuple[solutions.Judged, list[Group]] | None:
    kept: list[tuple[solutions.Judged, list[Group]]] = []

    def check() -> Found:
        kept.append(solutions.judge_solutions(audit.bench, answers.rows))
        return solutions.solution_findings(kept[0][0], answers.unmatched)

    audit.run("youden on solutions", check)
    return kept[0] if kept else None


def _any_accepted(audit: _Audit) -> bool:
    """Whether right solutions were accepted, so that golds in no form only lack theirs."""
    found = [f.figures for f in audit.findings if f.check == "youden on solutions"]
    return any("tpr" in figures and figures["tpr"]["estimate"] > 0 for figures in found)


def _form_of(judgement: solutions.Judged) -> list[Form]:
    """The last line of an accepted right solution, with its gold taken out."""
    for row, marks in judgement.rows:
        gold = gold_of(row.prompt)
        for solution, mark in zip(row.solutions, marks, strict=True):
            line = solution.text.rpartition("\n")[2]
            before, found, after = line.rpartition(gold or "\0")
            if mark.accepted and solution.is_correct and found:
                return [Form("as in the solutions", before + HOLE + after)]
    return []


def _with_golds(
    audit: _Audit, prompts: Sequence[Prompt], own: Sequence[Form], *, accepted_elsewhere: bool
) -> Form | None:
    """The checks that need a row's answer; the form in which answers are read best."""
    bench = audit.bench
    kept: list[Reading] = []

    def forms() -> Found:
        kept.append(read_forms(bench, prompts, own))
        return [], [kept[0].table()]

    audit.run("forms", forms)
    if not kept:
        return None
    reading = kept[0]
    if not reading.read and accepted_elsewhere:
        audit.skip(
            "golds, wrong answers, youden, rewrites",
            "the grader accepts solutions, but no gold in a form that was tried; show it one with "
            "--form 'A: {answer}'",
        )
    else:
        audit.run("golds", lambda: _golds(bench, prompts, reading.best))
        audit.run("rewrites", lambda: rewrites.rewrite_findings(bench, prompts, reading.best))
    audit.run(
        "exploits",
        lambda: exploits.exploit_findings(exploits.try_exploits(bench, prompts, reading.read)),
    )
    return reading.best


def _golds(bench: Bench, prompts: Sequence[Prompt], form: Form) -> Found:
    return golds.gold_findings(golds.try_golds(bench, prompts, form), form)


def _made(bench: Bench, prompts: Sequence[Prompt], form: Form) -> list[Group]:
    """Right and wrong answers of each row as one group."""
    others = [gold for prompt in prompts if (gold := gold_of(prompt)) is not None]
    groups = []
    for place, prompt in enumerate(prompts[: shuffled.GROUPS]):
        gold = others[place]
        texts = [gold, *golds.wrong_answers(gold, others, place=place + 1).values()]
        groups.append(bench.group(prompt, [form.of(text) for text in texts]))
    return groups


def _pilot(audit: _Audit, prompts: int) -> list[Group]:
    """The completions that the real model gave, once they are scored and judged."""
    wanted = Plan.of(audit.plan)
    audit.tell(
        f"pilot: {prompts} prompts, {wanted.samples} completions each, at most "
        f"{wanted.max_new_tokens} tokens"
    )
    groups: list[Group] = []

    def check() -> Found:
        sampled = sample(audit.plan, prompts=prompts, samples=wanted.samples, rows=audit.given)
        graded = audit.bench.graded(sampled)
        findings, tables, pictures = pilot_findings(audit.bench, graded, wanted, seed=audit.seed)
        audit.pictures |= pictures
        groups.extend(sampled)
        return findings, tables

    audit.run("pilot", check)
    return groups


def _afford(
    bench: Bench,
    prompts: Sequence[Prompt],
    plan: Recipe,
    prompts_of_pilot: int,
    answers: solutions.SolutionFile | None,
    tell: Callable[[str], None],
) -> list[Prompt]:
    """As many rows as the bound on calls allows; says what they cost before any is scored."""
    judged = any(part.use == JUDGE for part in plan.reward)
    if bench.cap is None and (bench.price is not None or judged):
        bench.cap = PAID_CALLS
    fixed = 4 * len(odd.odd_texts(prompts[0])) + 1
    sampled = prompts_of_pilot * Plan.of(plan).samples
    solved = sum(len(row.solutions) for row in answers.rows) if answers is not None else 0
    again = max(sampled, solved, 6 * len(prompts))

    def calls(rows: int) -> int:
        corpus = 3 * len(exploits.CORPUS) * min(rows, exploits.GOLDS)
        by_row = len(FORMS) * min(rows, TRIED) + 6 * rows + 7 * min(rows, rewrites.ROWS)
        return fixed + sampled + solved + by_row + corpus + min(again, 6 * rows) * 2

    kept = len(prompts)
    while bench.cap is not None and kept > 2 and calls(kept) > bench.cap:
        kept -= 1
    count = calls(kept) if bench.cap is None else min(calls(kept), bench.cap)
    if bench.price is not None:
        tell(f"about {count} answers are scored on {kept} rows, for {count * bench.price:.2f} USD")
    elif judged or kept < len(prompts):
        tell(f"about {count} answers are scored, on {kept} of {len(prompts)} rows")
    return list(prompts[:kept])
