"""Length-prefixed JSON between the run and its reward workers.

Owns the framing and the few conversions that make ordinary column values JSON.
Refuses to own what a message means, and refuses pickle: a byte stream from a process that runs user
code is only ever parsed as JSON (DESIGN law 16).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from surefoot.errors import RewardError

_HEADER = struct.Struct(">Q")
_CHUNK = 1 << 16
MAX_BYTES = 1 << 32


def _plain(value: object) -> Any:
    """JSON for read-only mappings and for numpy scalars and arrays; TypeError for the rest."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def encode(message: Any) -> bytes:
    """UTF-8 JSON of `message`; TypeError or ValueError where it has none."""
    return json.dumps(message, default=_plain, separators=(",", ":")).encode()


def frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(frame(encode(message)))


def receive(connection: socket.socket) -> Any | None:
    """The next message of a blocking connection, or None at its end."""
    inbox = Inbox()
    while True:
        # Asking for exactly what is missing leaves the next message in the socket.
        data = connection.recv(min(inbox.missing, _CHUNK))
        if not data:
            return None
        messages = inbox.feed(data)
        if messages:
            return messages[0]


class Inbox:
    """Bytes in, whole messages out, for connections that are read as data arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Bytes until the header, or then the message, is whole."""
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size - len(self._buffer)
        return _HEADER.size + self._length() - len(self._buffer)

    def _length(self) -> int:
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise RewardError(
                f"a reward worker sent a message of {length} bytes, which is no message of ours: "
                "the reward function probably wrote to a file descriptor it did not open"
            )
        return int(length)

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _HEADER.size:
            end = _HEADER.size + self._length()
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return messages
