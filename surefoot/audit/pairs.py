"""What is wrong with preference pairs by themselves, without knowing which answer is better.

Owns identical, tied and near-identical answers, contradictions and cycles, repeated pairs, length
bias, prompts said twice, answers that belong to other prompts, and answers that were cut off.
Refuses to own labels (`flips.py`, `outside.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from surefoot.audit.fix import Mend
from surefoot.audit.reading import PairRow
from surefoot.audit.report import Finding, Severity
from surefoot.data.forms import Answer
from surefoot.data.prompts import contents_of, fingerprint
from surefoot.statistics import wilson

NEAR = 0.95
"""Of the words of two answers, the share in common and in order beyond which they hardly differ."""
LONGER = (0.40, 0.65)
"""The share of longer chosen answers outside of which length alone says much."""
_LOUD = 0.05
"""Share of rows from which a listed oddity is something to change."""
# Most answers of a set end a sentence, or endings say nothing about what was cut off.
_CLOSED_SHARE = 0.9
_CLOSED = frozenset(".!?\u2026:;)]}>\"'`\u201d\u2019\u00bb*_|$\u3002\uff01\uff1f")
_TOKEN = re.compile(r"[^\W\u3040-\u9fff\uac00-\ud7af]+|\S")
# Letters of a text compared for nearness; what differs later is rarely all that differs.
_COMPARED = 20_000


@dataclass(frozen=True, slots=True)
class Seen:
    """A pair as the checks see it: its prompt's key and text, and its two answers as text."""

    row: PairRow
    key: bytes
    prompt: str
    chosen: str
    rejected: str

    @property
    def where(self) -> str:
        return self.row.where


@dataclass(frozen=True, slots=True)
class Checked:
    """What one check found, the rows to mend, and rows to show, by place."""

    finding: Finding
    mends: tuple[Mend, ...] = ()
    shown: tuple[str, ...] = field(default=())


def seen(row: PairRow) -> Seen:
    form = row.form
    sides = [_words(answer) for answer in form.answers]
    prompt = "\n".join(contents_of(form.prompt, system=False))
    return Seen(row, fingerprint(form.prompt), prompt, sides[0], sides[1])


def check(pairs: Sequence[Seen]) -> list[Checked]:
    """Every check, in the order in which a reader wants them."""
    checks: tuple[Callable[[Sequence[Seen]], Checked], ...] = (
        identical,
        tied,
        near_identical,
        contradictory,
        cyclic,
        repeated,
        longer,
        prompt_repeated,
        strangers,
        truncated,
    )
    return [one(pairs) for one in checks]


def identical(pairs: Sequence[Seen]) -> Checked:
    """Two answers that differ in white space at most."""
    found = [pair for pair in pairs if _same(pair)]
    return _removing(
        "identical", pairs, found, "chosen and rejected are the same text", "leave them out (--fix)"
    )


def tied(pairs: Sequence[Seen]) -> Checked:
    """Equal scores, or a margin of 0."""
    known = [pair for pair in pairs if _lead(pair) is not None]
    found = [pair for pair in known if _lead(pair) == 0 and not _same(pair)]
    if not known:
        return _ok("tied", "no scores and no margins stand beside the pairs, so no tie can be seen")
    return _removing("tied", known, found, "both answers have one score", "leave them out (--fix)")


def near_identical(pairs: Sequence[Seen]) -> Checked:
    """Answers that share nearly all their words, in order."""
    found = [pair for pair in pairs if not _same(pair) and _near(pair.chosen, pair.rejected)]
    mend = (
        "training on them lowers both answers' probability: mix in the chosen one's likelihood "
        "(method.nll), or leave them out; --fix keeps them, since one digit may be the point"
    )
    return _listing("near-identical", pairs, found, f"share over {NEAR:.0%} of their words", mend)


def contradictory(pairs: Sequence[Seen]) -> Checked:
    """The same two answers to one prompt in both orders."""
    votes = _votes(pairs)
    found, mends = [], []
    for pair in pairs:
        one, other = _ends(pair)
        against = votes.get((other, one), 0)
        if one == other or not against:
            continue
        found.append(pair)
        # The minority goes; of equal numbers both, for nothing says which is right.
        if votes[one, other] <= against:
            mends.append(_mend(pair, "contradictory", f"{against} rows say the opposite"))
    text = f"{_count(found, pairs)} have another row that prefers their rejected answer"
    mend = "leave out the smaller side (--fix), or both where they are equal"
    severity = Severity.CHANGE if found else Severity.OK
    return Checked(
        Finding("contradictory", severity, text, mend if found else "", {"rows": len(found)}),
        tuple(mends),
        _places(found),
    )


def cyclic(pairs: Sequence[Seen]) -> Checked:
    """Preferences that run in a circle: A over B over C over A, to one prompt."""
    votes = _votes(pairs)
    names = {name: place for place, name in enumerate(dict.fromkeys(n for e in votes for n in e))}
    edges = [
        (names[one], names[other])
        for (one, other), count in votes.items()
        if one != other and count > votes.get((other, one), 0)
    ]
    component = np.arange(len(names))
    if edges:
        ends = np.array(edges).T
        graph = sparse.csr_matrix((np.ones(len(edges)), ends), (len(names), len(names)))
        component = csgraph.connected_components(graph, directed=True, connection="strong")[1]
    found = []
    for pair in pairs:
        one, other = _ends(pair)
        winning = votes[one, other] > votes.get((other, one), 0)
        if winning and one != other and component[names[one]] == component[names[other]]:
            found.append(pair)
    text = f"{_count(found, pairs)} are part of a circle of preferences"
    mend = (
        "in each circle one label at least is wrong, or the answers are about equal; --fix takes "
        "out those that the scorer doubts"
    )
    severity = Severity.CHANGE if found else Severity.OK
    finding = Finding("cyclic", severity, text, mend if found else "", {"rows": len(found)})
    return Checked(finding, (), _places(found))


def repeated(pairs: Sequence[Seen]) -> Checked:
    """Pairs that say what an earlier one says."""
    count = len(pairs) - len(_votes(pairs))
    severity = Severity.INFO if count else Severity.OK
    text = f"{count} of {len(pairs)} pairs repeat an earlier one"
    mend = "they count twice in training; that may be meant" if count else ""
    return Checked(Finding("repeated", severity, text, mend, {"rows": count}))


def longer(pairs: Sequence[Seen]) -> Checked:
    """How often the chosen answer is the longer one, among answers of different length."""
    gaps = np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs])
    unequal = int(np.count_nonzero(gaps))
    if not unequal:
        return _ok("length bias", "all answers of a pair are equally long")
    wins = int(np.sum(gaps > 0))
    low, high = wilson(wins, unequal)
    share = wins / unequal
    biased = low > LONGER[1] or high < LONGER[0]
    outside = not LONGER[0] <= share <= LONGER[1]
    severity = Severity.CHANGE if biased else Severity.INFO if outside else Severity.OK
    side = "longer" if share > 0.5 else "shorter"
    mend = (
        f"the rule 'the {side} answer is better' is right on {max(share, 1 - share):.0%}: use a "
        "row that divides by length (simpo, dpo_norm), balance the pairs, and watch the length of "
        "completions"
    )
    text = (
        f"the chosen answer is the longer one in {share:.1%} [{low:.1%}, {high:.1%}] of {unequal} "
        "pairs of unequal length"
    )
    figures = {"share": share, "low": low, "high": high, "pairs": unequal}
    return Checked(Finding("length bias", severity, text, mend if outside else "", figures))


def prompt_repeated(pairs: Sequence[Seen]) -> Checked:
    """Answers that begin with their own prompt."""
    found = []
    for pair in pairs:
        asked = " ".join(pair.prompt.split())
        sides = (" ".join(side.split()) for side in (pair.chosen, pair.rejected))
        if len(asked) >= 10 and all(side.startswith(asked) for side in sides):
            found.append(pair)
    mend = "the prompt would stand there twice: cut it from the answers, or drop the column prompt"
    return _listing("prompt said twice", pairs, found, "begin both answers with the prompt", mend)


def strangers(pairs: Sequence[Seen]) -> Checked:
    """Whether each side's answers have more to do with their own prompts than with the next ones.

    Of the words of a prompt, the share that an answer says, less the share that the answer of the
    next row with another prompt says; words of a tenth of all prompts or more do not count.
    """
    sides = {"chosen": _own_less_next(pairs, 0), "rejected": _own_less_next(pairs, 1)}
    figures = {name: gain for name, gain in sides.items() if gain is not None}
    if len(figures) < 2:
        return _ok("prompt mismatch", "too few different prompts to tell whose answers are whose")
    related = {name: low > 0 for name, (_, low) in figures.items()}
    told = {name: {"gain": gain, "low": low} for name, (gain, low) in figures.items()}
    if related["chosen"] == related["rejected"]:
        some = "answers take up" if related["chosen"] else "no answers take up"
        text = f"{some} words of their own prompts more than of others, on both sides alike"
        return Checked(Finding("prompt mismatch", Severity.OK, text, "", told))
    stray = "rejected" if related["chosen"] else "chosen"
    text = (
        f"{stray} answers have no more to do with their own prompts than with the next row's, and "
        "the others have: that column seems to be shifted or shuffled"
    )
    mend = "join the columns again by their ids; a model would learn which answers are on topic"
    return Checked(Finding("prompt mismatch", Severity.STOP, text, mend, told))


def truncated(pairs: Sequence[Seen]) -> Checked:
    """Chosen answers that stop in the middle: an open code fence, or no end as others have."""
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected) if text.strip()]
    closed = sum(text.rstrip()[-1] in _CLOSED for text in texts)
    told = bool(texts) and closed >= _CLOSED_SHARE * len(texts)
    found = [
        pair
        for pair in pairs
        if pair.chosen.count("```") % 2
        or (told and pair.chosen.strip() and pair.chosen.rstrip()[-1] not in _CLOSED)
    ]
    mend = "they teach to stop in the middle: make them whole, or raise the limit that cut them"
    return _listing("truncated", pairs, found, "have a chosen answer that seems cut off", mend)


def _own_less_next(pairs: Sequence[Seen], side: int) -> tuple[float, float] | None:
    """(mean, its low limit at two standard errors), by prompt."""
    first: dict[bytes, Seen] = {}
    for pair in pairs:
        first.setdefault(pair.key, pair)
    rows = list(first.values())
    asked = [_content(pair.prompt) for pair in rows]
    common = Counter(word for words in asked for word in words)
    rare = [{word for word in words if common[word] <= max(1, len(rows) // 10)} for words in asked]
    said = [_content((pair.chosen, pair.rejected)[side]) for pair in rows]
    gains = [
        (len(words & said[place]) - len(words & said[(place + 1) % len(rows)])) / len(words)
        for place, words in enumerate(rare)
        if words
    ]
    if len(gains) < 30:
        return None
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1)) / len(gains) ** 0.5
    return mean, mean - 2 * error


def _content(text: str) -> set[str]:
    return {word.casefold() for word in _TOKEN.findall(text) if len(word) > 2}


def _near(one: str, other: str) -> bool:
    first, second = _TOKEN.findall(one[:_COMPARED]), _TOKEN.findall(other[:_COMPARED])
    total = len(first) + len(second)
    shorter = min(len(first), len(second))
    # Two upper bounds, each much cheaper than the words in common and in order.
    if 2 * shorter <= NEAR * total:
        return False
    if 2 * sum((Counter(first) & Counter(second)).values()) <= NEAR * total:
        return False
    return SequenceMatcher(None, first, second, autojunk=False).ratio() > NEAR


def _votes(pairs: Sequence[Seen]) -> Counter[tuple[tuple[bytes, str], tuple[bytes, str]]]:
    return Counter(_ends(pair) for pair in pairs)


def _ends(pair: Seen) -> tuple[tuple[bytes, str], tuple[bytes, str]]:
    """The pair as an edge from its chosen answer to its rejected one."""
    return (pair.key, " ".join(pair.chosen.split())), (pair.key, " ".join(pair.rejected.split()))


def _same(pair: Seen) -> bool:
    return pair.chosen.split() == pair.rejected.split()


def _lead(pair: Seen) -> float | None:
    """By how much the chosen answer is better, where the row says so."""
    row = pair.row
    if row.score_chosen is not None and row.score_rejected is not None:
        return row.score_chosen - row.score_rejected
    return row.form.margin


def _words(answer: Answer) -> str:
    return "\n".join(contents_of(answer))


def _removing(
    check: str, among: Sequence[Seen], found: Sequence[Seen], reason: str, mend: str
) -> Checked:
    text = f"{_count(found, among)}: {reason}"
    severity = Severity.CHANGE if found else Severity.OK
    finding = Finding(check, severity, text, mend if found else "", {"rows": len(found)})
    return Checked(finding, tuple(_mend(pair, check, reason) for pair in found), _places(found))


def _listing(
    check: str, among: Sequence[Seen], found: Sequence[Seen], what: str, mend: str
) -> Checked:
    """Rows to look at, which --fix keeps."""
    many = len(found) > _LOUD * len(among)
    severity = Severity.OK if not found else Severity.CHANGE if many else Severity.INFO
    text = f"{_count(found, among)} {what}"
    finding = Finding(check, severity, text, mend if found else "", {"rows": len(found)})
    return Checked(finding, (), _places(found))


def _ok(check: str, text: str) -> Checked:
    return Checked(Finding(check, Severity.OK, text))


def _mend(pair: Seen, check: str, reason: str) -> Mend:
    return Mend(pair.where, pair.row.form.id, check, reason)


def _count(found: Sequence[Seen], among: Sequence[Seen]) -> str:
    share = f" ({len(found) / len(among):.1%})" if found else ""
    return f"{len(found)} of {len(among)} pairs{share}"


def _places(found: Sequence[Seen]) -> tuple[str, ...]:
    return tuple(pair.where for pair in found)
