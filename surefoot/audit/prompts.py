"""What is wrong with prompts and their golds, before anything is sampled.

Owns duplicates, near-duplicates and templates, prompts that the evaluation asks too, golds that
contradict each other, that their own verifier refuses or that stand in the prompt, and control
tokens of known templates. Refuses to own verifiers, which are the built-in rewards.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from surefoot.audit.fix import Mend
from surefoot.audit.pairs import Checked
from surefoot.audit.report import Finding, Severity
from surefoot.data.prompts import contents_of, fingerprint
from surefoot.data.rows import Row
from surefoot.records import ScoreStatus, StopReason
from surefoot.reward.contract import RewardSample
from surefoot.reward.figures import only_number, same_answer
from surefoot.reward.maths import require_math_verify
from surefoot.reward.options import fill
from surefoot.reward.resolve import BUILT_INS
from surefoot.reward.rules import Rule

VERIFIERS = ("numeric", "math", "boxed", "exact")
SIMILAR = 0.8
"""Jaccard similarity of two prompts' runs of five words from which they are near-duplicates."""
OVERLAP_WORDS = 13
"""Words of a run; a prompt is in the evaluation if most of its runs are."""
_MOST = 0.5
# A column whose golds are numbers to this share is read by the reward `numeric`.
_MOSTLY = 0.9
_BANDS, _ROWS = 20, 5
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
# Written out by a person these mean nothing; a tokenizer with such a template reads them as turns.
_CONTROL = re.compile(
    r"<\|[A-Za-z_]{2,40}\|>|\[/?INST\]|<</?SYS>>|</?s>|<(?:bos|eos|pad|unk)>"
    r"|<(?:start|end)_of_turn>|<\uff5c[^\uff5c>\s]{2,40}\uff5c>"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A row as the checks see it: the key that equal prompts share, and the prompt as text."""

    row: Row
    key: bytes
    text: str

    @property
    def where(self) -> str:
        return self.row.where


def asked(row: Row) -> Asked:
    return Asked(row, fingerprint(row.prompt), "\n".join(contents_of(row.prompt, system=False)))


def check(
    rows: Sequence[Asked], tested: Sequence[Asked] | None, *, verifier: str | None, tokens: bool
) -> list[Checked]:
    """Every check, in the order in which a reader wants them.

    `tokens` says that a tokenizer has looked for its control tokens already.
    """
    checks = [conflicting(rows), golds(rows, verifier), in_prompt(rows)]
    checks += [] if tokens else [control_tokens(rows)]
    checks += [duplicates(rows), near_duplicates(rows), templates(rows)]
    if tested is not None:
        checks.append(overlap(rows, tested))
    return checks


def conflicting(rows: Sequence[Asked]) -> Checked:
    """One prompt with different golds."""
    found: defaultdict[bytes, list[Asked]] = defaultdict(list)
    for row in rows:
        if row.row.answer is not None:
            found[row.key].append(row)
    bad = [
        row
        for group in found.values()
        if any(not same_answer(_gold(row), _gold(group[0])) for row in group[1:])
        for row in group
    ]
    text = f"{_count(bad, rows)} have a prompt that other rows answer differently"
    mend = "one of the answers is wrong: mend it, or leave all of them out (--fix)"
    return _removing("conflicting golds", bad, text, mend, "other rows give another answer")


def golds(rows: Sequence[Asked], verifier: str | None) -> Checked:
    """Golds that are not there, and those that their own verifier does not accept."""
    given = [row for row in rows if row.row.answer is not None]
    if not given:
        if verifier is not None:
            text = f"no row has an answer that {verifier} could read"
            mend = "name the column with --column answer=NAME"
            return Checked(Finding("golds", Severity.STOP, text, mend))
        return Checked(Finding("golds", Severity.OK, "no row has an answer to be checked"))
    name = verifier or _verifier(given)
    rule = rule_of(name)
    bad: list[tuple[Asked, str]] = [
        (row, "the row has no answer, and others have") for row in rows if row.row.answer is None
    ]
    for row in given:
        verdict = rule(_sample(row, name))
        if verdict.status is not ScoreStatus.SCORED or verdict.value is None:
            bad.append((row, verdict.detail or f"{name} gives no verdict"))
        elif verdict.value < 1:
            bad.append((row, f"{name} does not accept the row's own answer"))
    text = f"{_count([row for row, _ in bad], rows)} have no answer that {name} accepts as its own"
    mend = (
        "no completion can be right there: mend the answers, choose another --verifier, or leave "
        "the rows out (--fix)"
    )
    severity = Severity.OK
    if bad:
        severity = Severity.STOP if len(bad) > _MOST * len(rows) else Severity.CHANGE
    finding = Finding(
        "golds", severity, text, mend if bad else "", {"rows": len(bad), "verifier": name}
    )
    mends = tuple(Mend(row.where, row.row.id, "golds", why) for row, why in bad)
    return Checked(finding, mends, tuple(row.where for row, _ in bad))


def in_prompt(rows: Sequence[Asked]) -> Checked:
    """Golds that are no numbers and stand in their prompt as whole words."""
    found = []
    for row in rows:
        gold = _gold(row).strip()
        if len(gold) >= 4 and only_number(gold) is None:
            pattern = rf"(?<!\w){re.escape(gold.casefold())}(?!\w)"
            if re.search(pattern, row.text.casefold()):
                found.append(row)
    text = f"{_count(found, rows)} have their answer in the prompt"
    mend = "right for a choice among options; elsewhere the answer is given away" if found else ""
    severity = Severity.INFO if found else Severity.OK
    finding = Finding("answer in prompt", severity, text, mend, {"rows": len(found)})
    return Checked(finding, (), _places(found))


def control_tokens(rows: Sequence[Asked]) -> Checked:
    """Texts that look like the control tokens of a known template."""
    found = [row for row in rows if _CONTROL.search("\n".join(contents_of(row.row.prompt)))]
    text = f"{_count(found, rows)} have what looks like a control token of a chat template"
    mend = (
        "a run with such a tokenizer refuses them: write them without, or leave them out (--fix); "
        "--model PATH checks against one tokenizer"
    )
    return _removing("control tokens", found, text, mend, "looks like a control token")


def duplicates(rows: Sequence[Asked]) -> Checked:
    """Prompts that differ in case and white space at most, and how many there are in effect."""
    counts = Counter(row.key for row in rows)
    seen: set[bytes] = set()
    later = []
    for row in rows:
        if row.key in seen:
            later.append(row)
        seen.add(row.key)
    effective = len(rows) ** 2 / sum(count * count for count in counts.values()) if rows else 0.0
    text = (
        f"{_count(later, rows)} repeat an earlier prompt; by their weights there are "
        f"{effective:.0f} prompts in effect"
    )
    mend = "they are drawn more often, which may be meant; --fix keeps the first of each"
    figures = {"different": len(counts), "effective": effective}
    return _removing("duplicates", later, text, mend, "repeats an earlier prompt", figures)


def near_duplicates(rows: Sequence[Asked]) -> Checked:
    """Prompts with nearly the same runs of five words, by MinHash and then by counting."""
    first = list({row.key: row for row in reversed(rows)}.values())[::-1]
    runs = [_runs(row.text, 5) for row in first]
    near: set[int] = set()
    for one, other in _candidates(runs):
        shared = len(runs[one] & runs[other])
        if shared >= SIMILAR * (len(runs[one]) + len(runs[other]) - shared):
            near.add(max(one, other))
    found = [first[place] for place in sorted(near)]
    text = f"{_count(found, rows)} nearly repeat an earlier prompt (five-word runs, Jaccard 0.8)"
    mend = "they weigh like copies; a split by rows would leak into an eval set" if found else ""
    severity = Severity.INFO if found else Severity.OK
    finding = Finding("near-duplicates", severity, text, mend, {"rows": len(found)})
    return Checked(finding, (), _places(found))


def templates(rows: Sequence[Asked]) -> Checked:
    """Prompts that are one text with other numbers."""
    masked = Counter(
        _DIGITS.sub("#", " ".join(text.casefold().split()))
        for text in {row.key: row.text for row in rows}.values()
    )
    of_many = sum(count for count in masked.values() if count > 1)
    text = (
        f"{of_many} different prompts are {sum(c > 1 for c in masked.values())} texts with other "
        "numbers in them"
    )
    severity = Severity.INFO if of_many else Severity.OK
    return Checked(Finding("templates", severity, text, "", {"rows": of_many}))


def overlap(rows: Sequence[Asked], tested: Sequence[Asked]) -> Checked:
    """Prompts that are in the evaluation too: the same, or most of their 13-word runs."""
    keys = {row.key for row in tested}
    runs = {run for row in tested for run in _runs(row.text, OVERLAP_WORDS, short=False)}
    found = []
    for row in rows:
        own = _runs(row.text, OVERLAP_WORDS, short=False)
        if row.key in keys or (own and len(own & runs) >= SIMILAR * len(own)):
            found.append(row)
    text = f"{_count(found, rows)} are in the evaluation's {len(tested)} prompts too"
    mend = "the evaluation would measure memory: leave them out (--fix)"
    return _removing("overlap with evaluation", found, text, mend, "the evaluation asks it too")


def rule_of(name: str) -> Rule:
    """A built-in verifier, as a run would call it."""
    if name == "math":
        require_math_verify(name)
    built_in = BUILT_INS[name]
    return built_in.make(fill(built_in.schema, {}, reward=name))


def _verifier(given: Sequence[Asked]) -> str:
    numbers = sum(only_number(_gold(row)) is not None for row in given)
    return "numeric" if numbers >= _MOSTLY * len(given) else "exact"


def _sample(row: Asked, verifier: str) -> RewardSample:
    """The gold as a completion, in the form that its verifier looks for."""
    gold = _gold(row)
    text = f"\\boxed{{{gold}}}" if verifier in ("boxed", "math") and "boxed" not in gold else gold
    columns: Mapping[str, object] = row.row.columns
    return RewardSample(
        row.text, text, (), row.row.answer, row.row.task, columns, StopReason.STOP, None
    )


def _gold(row: Asked) -> str:
    return "" if row.row.answer is None else row.row.answer


def _runs(text: str, length: int, *, short: bool = True) -> frozenset[int]:
    """Hashes of the runs of `length` words; a shorter text is one run, or none."""
    words = [word.casefold() for word in _WORD.findall(text)]
    if len(words) < length:
        return frozenset([_hash(words)]) if short and words else frozenset()
    return frozenset(
        _hash(words[start : start + length]) for start in range(len(words) - length + 1)
    )


def _hash(words: Sequence[str]) -> int:
    joined = " ".join(words).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(joined, digest_size=4).digest())


def _candidates(runs: Sequence[frozenset[int]]) -> set[tuple[int, int]]:
    """Pairs of places that share a band of their MinHash signatures (Broder 1997)."""
    size = _BANDS * _ROWS
    prime = (1 << 31) - 1
    made = np.random.default_rng(0)
    times, plus = made.integers(1, prime, size), made.integers(0, prime, size)
    buckets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for place, own in enumerate(runs):
        if own:
            for band, part in enumerate(_signature(own, times, plus, prime)):
                buckets[band, part.tobytes()].append(place)
    # Of a crowded bucket each place is compared with its neighbour and the first one.
    found: set[tuple[int, int]] = set()
    for places in buckets.values():
        if len(places) <= 20:
            found.update(combinations(places, 2))
        else:
            found.update((places[0], place) for place in places[1:])
            found.update(pairwise(places))
    return found


def _signature(
    runs: frozenset[int], times: NDArray[np.int64], plus: NDArray[np.int64], prime: int
) -> NDArray[np.int64]:
    values = np.fromiter(runs, dtype=np.int64) % prime
    hashed = (values[:, None] * times[None, :] + plus[None, :]) % prime
    smallest: NDArray[np.int64] = hashed.min(axis=0).reshape(_BANDS, _ROWS)
    return smallest


def _removing(
    name: str,
    found: Sequence[Asked],
    text: str,
    mend: str,
    reason: str,
    figures: Mapping[str, float] | None = None,
) -> Checked:
    severity = Severity.CHANGE if found else Severity.OK
    numbers = {"rows": len(found), **(figures or {})}
    finding = Finding(name, severity, text, mend if found else "", numbers)
    mends = tuple(Mend(row.where, row.row.id, name, reason) for row in found)
    return Checked(finding, mends, _places(found))


def _count(found: Sequence[Asked], among: Sequence[Asked]) -> str:
    share = f" ({len(found) / len(among):.1%})" if found else ""
    return f"{len(found)} of {len(among)} rows{share}"


def _places(found: Sequence[Asked]) -> tuple[str, ...]:
    return tuple(row.where for row in found)
