"""One question to an OpenAI-compatible server, until it is answered or given up.

Owns the request, which failures are tried again and after how long, which end the run, and what a
request cost.
Refuses to own what is asked (`judge_prompts.py`) and what a reply means (`judge_verdict.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import ModuleType
from typing import Any

from surefoot import draws
from surefoot.errors import RewardError, StoppedOnFinding
from surefoot.recipe.schema import Judge
from surefoot.reward.judge_budget import Budget
from surefoot.reward.judge_prompts import Messages, size

ATTEMPTS = 6
"""Requests for one reply."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before the second attempt, and the most between two; a server may ask for more."""
_LARGEST_BODY = 4 << 20
_TRIED_AGAIN = (408, 409, 425, 429)
_ONE_QUESTION = ("context_length_exceeded", "string_above_max_length")
_FILTERED = ("content_filter", "content_policy_violation")
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the judge said; `refused` and `cut` are the server's own words for it."""

    text: str
    refused: bool = False
    cut: bool = False


class Unanswered(Exception):
    """This question alone has no reply. `down`: the server may be, and others have none either."""

    def __init__(self, why: str, *, down: bool, refused: bool = False) -> None:
        super().__init__(why)
        self.down = down
        self.refused = refused


class _Again(Exception):
    """The attempt failed, and another may not.

    `wait` is what the server asked for, in seconds; `busy`: it has too much to do for anyone.
    """

    def __init__(self, why: str, *, wait: float | None = None, busy: bool = False) -> None:
        super().__init__(why)
        self.wait = wait
        self.busy = busy


class _Renamed(Exception):
    """The server wants the cap on tokens under its newer name."""


class Endpoint:
    """The server of a recipe's `judge`; safe to use from several threads.

    The key is read from the environment, and goes nowhere but into requests.
    """

    def __init__(self, settings: Judge, budget: Budget, *, seed: int) -> None:
        if settings.base_url is None or settings.model is None:
            missing = "base_url" if settings.base_url is None else "model"
            raise RewardError(
                f"judge.{missing}: a judge needs it; as in judge: {{base_url: "
                "http://127.0.0.1:8000/v1, model: NAME}"
            )
        self.settings = settings
        self.budget = budget
        self._seed = seed
        self._openai = _client_package()
        # The package's own choice between two HTTP libraries decides what a broken body raises.
        base = self._openai.DefaultHttpxClient.__mro__[1]
        self._http = importlib.import_module(base.__module__.partition(".")[0])
        self._key = os.environ.get(settings.api_key_env, "")
        self._client = self._openai.OpenAI(
            base_url=settings.base_url, api_key=self._key or "none", max_retries=0
        )
        self._cap_name = "max_tokens"
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self.answered = False
        """Whether any question has had a reply, so that address, model and key are right."""

    def close(self) -> None:
        self._client.close()

    def ask(
        self, messages: Messages, *, deadline: float, halt: threading.Event
    ) -> tuple[Reply, int]:
        """The reply and the number of attempts before it; `deadline` is on the monotonic clock.

        Unanswered where this question has none; RewardError or StoppedOnFinding where no question
        can have one. Once `halt` is set, no further request is sent.
        """
        attempt, ready, why = 0, 0.0, "no request was sent"
        while attempt < ATTEMPTS:
            self._pause(ready, deadline, halt, why)
            try:
                return self._once(messages, deadline), attempt
            except _Renamed:
                self._cap_name = "max_completion_tokens"
                continue
            except _Again as failure:
                why = str(failure)
                ready = self._ready(failure, messages, attempt)
            attempt += 1
        raise Unanswered(f"no reply in {ATTEMPTS} attempts; the last one: {why}", down=True)

    def _pause(self, ready: float, deadline: float, halt: threading.Event, why: str) -> None:
        """Wait until the next attempt may begin, if the question can still be answered then."""
        now = time.monotonic()
        with self._lock:
            begin = max(ready, self._quiet_until, now)
        if begin >= deadline:
            raise Unanswered(
                f"no reply within judge.deadline ({self.settings.deadline:g} s); the last attempt: "
                f"{why}",
                down=True,
            )
        if halt.wait(begin - now):
            raise Unanswered("the run stopped", down=False)

    def _ready(self, failure: _Again, messages: Messages, attempt: int) -> float:
        """When the next attempt may begin; of a busy server, any question's."""
        longest = min(FIRST_DELAY * 2.0**attempt, LONGEST_DELAY)
        key = zlib.crc32(messages[-1]["content"].encode())
        jitter = float(draws.uniform(self._seed, "judge/retry", key, attempt))
        delay = max(longest * (0.5 + 0.5 * jitter), failure.wait or 0.0)
        ready = time.monotonic() + delay
        if failure.busy:
            with self._lock:
                self._quiet_until = max(self._quiet_until, ready)
        return ready

    def _once(self, messages: Messages, deadline: float) -> Reply:
        most = self._most(messages)
        self.budget.take(most)
        # What was sent and not answered may have been billed.
        cost = most
        try:
            body = self._send(messages, deadline)
            cost = self._cost(body, most)
            reply = _read(body)
        except self._openai.APIStatusError as error:
            cost = 0.0
            raise self._status(error) from None
        except self._openai.APITimeoutError as error:
            cost = 0.0 if isinstance(error.__cause__, self._http.ConnectTimeout) else most
            raise _Again(f"timed out after {self.settings.timeout:g} s") from None
        except self._openai.APIConnectionError as error:
            cost = 0.0 if isinstance(error.__cause__, self._http.ConnectError) else most
            raise _Again(f"connection failed ({error.__cause__ or error})") from None
        except self._http.HTTPError as error:
            raise _Again(f"the reply broke off ({error})") from None
        finally:
            self.budget.settle(most, cost)
        self.answered = True
        return reply

    def _send(self, messages: Messages, deadline: float) -> Mapping[str, Any]:
        """The body of the reply, read in pieces so that a slow one cannot outlast the clock."""
        settings = self.settings
        ends = min(time.monotonic() + settings.timeout, deadline)
        extra = {} if settings.temperature is None else {"temperature": settings.temperature}
        extra[self._cap_name] = settings.max_tokens
        request = self._client.chat.completions.with_streaming_response.create(
            model=settings.model,
            messages=[dict(message) for message in messages],
            timeout=max(ends - time.monotonic(), 0.01),
            **extra,
        )
        pieces: list[bytes] = []
        length = 0
        with request as response:
            for piece in response.iter_bytes():
                pieces.append(piece)
                length += len(piece)
                if length > _LARGEST_BODY:
                    raise Unanswered("the reply is larger than 4 MiB", down=False)
                if time.monotonic() > ends:
                    raise _Again(f"timed out after {settings.timeout:g} s amid a reply")
        try:
            body = json.loads(b"".join(pieces))
        except (ValueError, RecursionError):
            raise _Again("a reply that is no JSON") from None
        if not isinstance(body, dict):
            raise _Again("a reply that is no chat completion")
        return body

    def _most(self, messages: Messages) -> float:
        """The most that a request may cost, in US dollars; 0 without prices."""
        return self._priced(size(messages), self.settings.max_tokens)

    def _cost(self, body: Mapping[str, Any], most: float) -> float:
        usage = body.get("usage")
        told = usage if isinstance(usage, dict) else {}
        counts = [told.get("prompt_tokens"), told.get("completion_tokens")]
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            return most
        return self._priced(*counts)

    def _priced(self, tokens_in: int, tokens_out: int) -> float:
        prices = self.settings.price_per_million_input, self.settings.price_per_million_output
        tokens = tokens_in, tokens_out
        return sum((p or 0.0) * n for p, n in zip(prices, tokens, strict=True)) / 1e6

    def _status(self, error: Any) -> Exception:
        """What a reply with an error status means for this question, or for the run."""
        status, said = error.status_code, self._said(error)
        code = error.code or ""
        if code in _NO_CREDIT:
            return self._hopeless(f"status {status}: {said}")
        if status in _TRIED_AGAIN or status >= 500:
            wait = retry_after(error.response.headers)
            return _Again(f"status {status}: {said}", wait=wait, busy=status in (429, 503))
        if status == 400 and self._cap_name == "max_tokens" and "max_completion_tokens" in said:
            return _Renamed()
        if code in _FILTERED:
            why = f"the server's filter refused the question: {said}"
            return Unanswered(why, down=False, refused=True)
        too_long = status == 413 or code in _ONE_QUESTION or "maximum context length" in said
        if too_long:
            return Unanswered(f"the question is too long for the judge: {said}", down=False)
        return self._hopeless(f"status {status}: {said}")

    def _hopeless(self, what: str) -> Exception:
        settings = self.settings
        key = "is not set" if not self._key else "is set"
        message = (
            f"the judge cannot be asked ({what}). judge.base_url is {settings.base_url}, "
            f"judge.model is {settings.model}, and the key is taken from the environment variable "
            f"{settings.api_key_env}, which {key}; mend the one that is wrong"
        )
        # Before the first reply nothing was trained that is not saved; later it must be saved.
        return StoppedOnFinding(message) if self.answered else RewardError(message)

    def _said(self, error: Any) -> str:
        """The server's message on one line, without the key that it may repeat."""
        body = error.body
        told = body.get("message") if isinstance(body, dict) else None
        text = " ".join(str(told or error.message).split())
        if self._key:
            text = text.replace(self._key, "***")
        return text if len(text) <= 300 else text[:297] + "..."


def _read(body: Mapping[str, Any]) -> Reply:
    try:
        choice = body["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
        ended = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        told = body.get("error")
        raise _Again(f"a reply that is no chat completion{f' ({told})' if told else ''}") from None
    if isinstance(content, list):
        content = "".join(
            str(part.get("text") or "") for part in content if isinstance(part, Mapping)
        )
    text = content if isinstance(content, str) else ""
    return Reply(
        text or (refusal if isinstance(refusal, str) else ""),
        refused=bool(refusal) or ended == "content_filter",
        cut=ended == "length",
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: a number, or a date from which on it may be asked."""
    exact = headers.get("retry-after-ms")
    given = headers.get("retry-after")
    with contextlib.suppress(TypeError, ValueError):
        return _seconds(float(exact or "") / 1000.0)
    if given is None:
        return None
    with contextlib.suppress(ValueError):
        return _seconds(float(given))
    try:
        date = parsedate_to_datetime(given)
    except (TypeError, ValueError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return _seconds((date - datetime.now(UTC)).total_seconds())


def _seconds(value: float) -> float | None:
    return max(value, 0.0) if math.isfinite(value) else None


def _client_package() -> ModuleType:
    if importlib.util.find_spec("openai") is None:
        raise RewardError(
            "reward.use: a judge is asked by the package openai, which is not installed; run: pip "
            "install 'surefoot[judge]'"
        )
    return importlib.import_module("openai")
