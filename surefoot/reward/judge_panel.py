"""Many questions at once: kept verdicts first, the rest by threads, each asked once.

Owns the cache's keys, the second try for a reply without a verdict, the end of a call to a server
that is down, and the counts of a step.
Refuses to own transport (`judge_http.py`) and what verdicts are worth (`judge.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields

from surefoot.errors import SurefootError
from surefoot.recipe.schema import Judge
from surefoot.reward.cache import ScoreCache, content_key
from surefoot.reward.judge_http import Endpoint, Reply, Unanswered
from surefoot.reward.judge_prompts import VERSION, Messages, again
from surefoot.reward.judge_verdict import refuses

log = logging.getLogger(__name__)

Verdict = float | str
_DOWN = 3
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, the form of its verdict in words, and how one is read from a reply.

    `read` gives None where a reply, or a kept value, holds none.
    """

    messages: Messages
    form: str
    read: Callable[[str], Verdict | None]


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """Why a question has no verdict."""

    why: str


@dataclass(slots=True)
class Counts:
    """What the questions of a step took."""

    questions: int = 0
    cached: int = 0
    retries: int = 0
    unparsable: int = 0
    refused: int = 0
    pairs: int = 0
    flips: int = 0

    def clear(self) -> None:
        for entry in fields(self):
            setattr(self, entry.name, 0)


class _Call:
    """What the threads of one call share: whether it goes on, and how the server does."""

    def __init__(self, patience: int) -> None:
        self.halt = threading.Event()
        self._patience = patience
        self._lost = 0
        self._lock = threading.Lock()

    def answered(self) -> None:
        with self._lock:
            self._lost = 0

    def lost(self) -> None:
        with self._lock:
            self._lost += 1

    @property
    def down(self) -> bool:
        with self._lock:
            return self._lost >= self._patience


class Panel:
    """Asks the judge of a run, for all rewards that use it; safe to use from several threads."""

    def __init__(self, endpoint: Endpoint, cache: ScoreCache | None) -> None:
        self.endpoint = endpoint
        self._cache = cache
        self._lock = threading.Lock()
        self._told = False

    @property
    def settings(self) -> Judge:
        return self.endpoint.settings

    def verdicts(self, questions: Iterable[Question], counts: Counts) -> list[Verdict | NoVerdict]:
        """One verdict per question, in order; equal questions are asked once.

        StoppedOnFinding at the end of the budget: what was answered until then is kept.
        """
        keyed = [(self._key(question), question) for question in questions]
        found: dict[str, Verdict | NoVerdict] = {}
        open_: dict[str, Question] = {}
        for key, question in keyed:
            if key in found or key in open_:
                continue
            kept = self._kept(key, question)
            if kept is None:
                open_[key] = question
            else:
                found[key] = kept
        counts.cached += len(found)
        counts.questions += len(open_)
        found |= self._ask_all(open_, counts)
        return [found[key] for key, _ in keyed]

    def _key(self, question: Question) -> str:
        settings = self.settings
        return content_key(
            {
                "judge": VERSION,
                "base_url": settings.base_url,
                "model": settings.model,
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "messages": question.messages,
            }
        )

    def _kept(self, key: str, question: Question) -> Verdict | None:
        value = None if self._cache is None else self._cache.get(key)
        # The reply itself is kept, and read by the rule that holds now.
        reply = None if value is None else value.get("reply")
        return question.read(reply) if isinstance(reply, str) else None

    def _ask_all(
        self, questions: Mapping[str, Question], counts: Counts
    ) -> dict[str, Verdict | NoVerdict]:
        if not questions:
            return {}
        workers = min(self.settings.concurrency, len(questions))
        call = _Call(max(_DOWN, workers))
        left = dict(questions)
        found: dict[str, Verdict | NoVerdict] = {}
        if not self.endpoint.answered:
            # A wrong key or model is found by one request, not by as many as go at once.
            key = next(iter(left))
            found[key] = self._ask(key, left.pop(key), call, counts)
        with ThreadPoolExecutor(workers, thread_name_prefix="judge") as pool:
            under_way = {
                pool.submit(self._ask, key, question, call, counts): key
                for key, question in left.items()
            }
            try:
                for done in as_completed(under_way):
                    found[under_way[done]] = done.result()
            except BaseException:
                call.halt.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return found

    def _ask(
        self, key: str, question: Question, call: _Call, counts: Counts
    ) -> Verdict | NoVerdict:
        if call.down:
            return NoVerdict("given up, because the judge did not reply to the questions before")
        deadline = time.monotonic() + self.settings.deadline
        try:
            reply = self._reply(question.messages, deadline, call, counts)
            verdict = question.read(reply.text)
            if verdict is None:
                self._note_unread(reply, counts)
                messages = again(question.messages, reply.text, question.form)
                reply = self._reply(messages, deadline, call, counts)
                verdict = question.read(reply.text)
        except SurefootError:
            call.halt.set()
            raise
        except Unanswered as failure:
            if failure.down:
                call.lost()
            if failure.refused:
                self._note_unread(Reply("", refused=True), counts)
            return NoVerdict(str(failure))
        if verdict is None:
            self._tell(reply)
            return NoVerdict("no readable verdict in two replies")
        if self._cache is not None:
            self._cache.put(key, {"reply": reply.text})
        return verdict

    def _reply(self, messages: Messages, deadline: float, call: _Call, counts: Counts) -> Reply:
        reply, retries = self.endpoint.ask(messages, deadline=deadline, halt=call.halt)
        call.answered()
        with self._lock:
            counts.retries += retries
        return reply

    def _tell(self, reply: Reply) -> None:
        with self._lock:
            first, self._told = not self._told, True
        if first:
            log.warning("the judge's second reply without a verdict %s", _ending(reply))

    def _note_unread(self, reply: Reply, counts: Counts) -> None:
        with self._lock:
            if reply.refused or refuses(reply.text):
                counts.refused += 1
            else:
                counts.unparsable += 1


def _ending(reply: Reply) -> str:
    if reply.cut:
        return "was cut off; raise judge.max_tokens"
    text = " ".join(reply.text.split())
    return f"ends with {text[-_SHOWN:]!r}" if text else "is empty"


def rates(counts: Counts) -> dict[str, float]:
    """The counts of a step as metrics; a share of nothing is absent."""
    out = {
        "questions": float(counts.questions),
        "cached": float(counts.cached),
        "retries": float(counts.retries),
    }
    if counts.questions:
        out["unparsable"] = counts.unparsable / counts.questions
        out["refused"] = counts.refused / counts.questions
    if counts.pairs:
        out["position_flip"] = counts.flips / counts.pairs
    return out
