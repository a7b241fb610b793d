"""An OpenAI-compatible server on this machine that misbehaves on request.

Each request takes the next of its faults; once they are used up, it is answered by `reply`.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Messages = list[dict[str, str]]

_NONE: Mapping[str, str] = {}

TOKENS_IN, TOKENS_OUT = 1000, 10
"""What every reply says that it took."""


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    `kind`: ok (with `text`, if given), status, hang (no reply for `seconds`), slow (a byte now and
    then for `seconds`), half (a body that breaks off), reset, not_json, no_choices, refusal (the
    server's own field), filtered (the content filter ended it), cut (at max_tokens).
    """

    kind: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 30.0
    text: str | None = None


def status(code: int, message: str = "planted", *, code_word: str | None = None, **headers: str):
    """A reply with an error status; `Retry_After="1"` is the header Retry-After."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault("status", code, named, {"message": message, "code": code_word})


def says(text: str) -> Fault:
    return Fault("ok", text=text)


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    body: Mapping[str, Any]
    authorization: str
    path: str
    at: float

    @property
    def messages(self) -> Messages:
        return list(self.body["messages"])


class StubJudge:
    """Use as a context manager; `url` is its base_url."""

    def __init__(
        self,
        reply: Callable[[Messages], str] = lambda messages: '{"score": 7}',
        faults: Sequence[Fault] = (),
        *,
        usage: bool = True,
    ) -> None:
        self.reply = reply
        self.faults = list(faults)
        self.usage = usage
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> StubJudge:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def calls(self) -> int:
        return len(self.requests)

    def _begin(self, request: Request) -> Fault:
        with self._lock:
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.faults.pop(0) if self.faults else Fault("ok")

    def _end(self) -> None:
        with self._lock:
            self._at_once -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers.get("Authorization", "")
                request = Request(json.loads(raw), key, self.path, time.monotonic())
                fault = stub._begin(request)
                try:
                    self._serve(fault, request)
                except OSError:
                    self.close_connection = True
                finally:
                    stub._end()

            def _serve(self, fault: Fault, request: Request) -> None:
                if fault.kind == "status":
                    self._send(json.dumps({"error": fault.error}), fault.status, fault.headers)
                elif fault.kind == "hang":
                    stub._closing.wait(fault.seconds)
                    self.close_connection = True
                elif fault.kind == "reset":
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.close_connection = True
                elif fault.kind == "not_json":
                    self._send('{"choices": [{"mess')
                elif fault.kind == "no_choices":
                    self._send('{"error": {"message": "upstream is away"}}')
                else:
                    self._send_reply(fault, self._body(fault, request))

            def _body(self, fault: Fault, request: Request) -> str:
                text = stub.reply(request.messages) if fault.text is None else fault.text
                message = {"role": "assistant", "content": text}
                ended = "stop"
                if fault.kind == "refusal":
                    message |= {"content": None, "refusal": "I will not."}
                elif fault.kind == "filtered":
                    message["content"], ended = "", "content_filter"
                elif fault.kind == "cut":
                    message["content"], ended = "The answer is", "length"
                body: dict[str, Any] = {
                    "id": "x",
                    "object": "chat.completion",
                    "model": request.body["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": ended}],
                }
                if stub.usage:
                    counts = {"prompt_tokens": TOKENS_IN, "completion_tokens": TOKENS_OUT}
                    body["usage"] = counts | {"total_tokens": TOKENS_IN + TOKENS_OUT}
                return json.dumps(body)

            def _send_reply(self, fault: Fault, body: str) -> None:
                if fault.kind == "half":
                    self._head(200, {}, len(body) + 1000)
                    self.wfile.write(body.encode()[: len(body) // 2])
                    self.close_connection = True
                elif fault.kind == "slow":
                    self._head(200, {}, len(body))
                    for byte in body.encode():
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        if stub._closing.wait(fault.seconds / len(body)):
                            break
                else:
                    self._send(body)

            def _send(self, body: str, status: int = 200, headers: Mapping[str, str] = {}) -> None:
                data = body.encode()
                self._head(status, headers, len(data))
                self.wfile.write(data)

            def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(length))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

        return Handler
