"""A Redis client over one plain socket, and a load that knows what every key must hold."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import numpy as np

Reply = bytes | int | None | list[Any]


class RedisError(Exception):
    """The server answered with an error, or the connection ended."""


class Connection:
    """One connection; requests may be pipelined.

    Args:
        port: TCP port on the loopback address.
        timeout_s: Time-out of each read and write in seconds; None, for a program that may be
            frozen, waits for ever.
    """

    def __init__(self, port: int, *, timeout_s: float | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.settimeout(timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")

    def close(self) -> None:
        self.reader.close()
        self.socket.close()

    def call(self, *words: bytes | str | int) -> Reply:
        return self.pipeline([words])[0]

    def pipeline(self, requests: list[tuple[bytes | str | int, ...]]) -> list[Reply]:
        """Sends all requests, then reads one reply for each."""
        self.socket.sendall(b"".join(encode(words) for words in requests))
        return [self._reply() for _ in requests]

    def _reply(self) -> Reply:
        line = self.reader.readline()
        if not line.endswith(b"\r\n"):
            raise RedisError("the connection was closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise RedisError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        if rest == b"-1":
            return None
        content = self.reader.read(int(rest) + 2)
        if len(content) != int(rest) + 2:
            raise RedisError("the connection was closed within a value")
        return content[:-2]


def encode(words: tuple[bytes | str | int, ...]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in parts
    )


class Load:
    """Writes, increments, appends and deletes, and verifies each value against its own model.

    Args:
        prefix: What the keys begin with; two loads with different prefixes do not meet.
        keys: How many string keys there are at most.
    """

    LIST_LENGTH = 200

    def __init__(self, connection: Connection, prefix: str, keys: int, seed: int = 1) -> None:
        self.connection, self.prefix, self.keys, self.seed = connection, prefix, keys, seed
        self.version: dict[int, int] = {}
        self.turn = 0
        self.listed = 0

    def value(self, key: int, version: int) -> bytes:
        """What key holds in that version: 16 to about 4000 bytes, some of it compressible."""
        generator = np.random.Generator(np.random.SFC64([self.seed, key, version]))
        size = int(generator.integers(8, 2000))
        return generator.bytes(size) + b"%d:%d " % (key, version) * (size // 12)

    def round(self, size: int = 50) -> list[str]:
        """One pipelined batch of reads with the writes that follow; returns what was wrong, in
        words.
        """
        self.turn += 1
        draw = np.random.Generator(np.random.SFC64([self.seed, 1 << 40, self.turn])).integers(
            0, self.keys, size
        )
        chosen = list(dict.fromkeys(int(key) for key in draw))
        wrong = self.read(chosen)
        requests: list[tuple[bytes | str | int, ...]] = []
        expected: list[Reply] = []
        for n, key in enumerate(chosen):
            if n % 10 == 9:
                requests.append(("DEL", self.name(key)))
                expected.append(1 if key in self.version else 0)
                self.version.pop(key, None)
                continue
            self.version[key] = self.turn
            requests.append(("SET", self.name(key), self.value(key, self.turn)))
            expected.append(b"OK")
        requests.append(("INCR", f"{self.prefix}:turns"))
        expected.append(self.turn)
        requests.append(("RPUSH", f"{self.prefix}:list", self.turn))
        self.listed = min(self.LIST_LENGTH, self.listed + 1)
        expected.append(self.listed + (1 if self.turn > self.LIST_LENGTH else 0))
        requests.append(("LTRIM", f"{self.prefix}:list", -self.LIST_LENGTH, -1))
        expected.append(b"OK")
        for request, found, wanted in zip(
            requests, self.connection.pipeline(requests), expected, strict=True
        ):
            if found != wanted:
                wrong.append(
                    f"turn {self.turn}: {request[0]!r} {request[1]!r} answered {found!r}, not {wanted!r}"
                )
        return wrong

    def read(self, keys: list[int]) -> list[str]:
        """Reads these keys and compares each with the model."""
        wrong = []
        found = self.connection.pipeline([("GET", self.name(key)) for key in keys])
        for key, content in zip(keys, found, strict=True):
            version = self.version.get(key)
            expected = None if version is None else self.value(key, version)
            if content != expected:
                wrong.append(
                    f"turn {self.turn}: {self.name(key)} is not its version {version}: {describe(content)}"
                )
        return wrong

    def verify_all(self) -> list[str]:
        """Compares every key, the counter and the list with the model."""
        wrong = []
        for start in range(0, self.keys, 500):
            wrong += self.read(list(range(start, min(self.keys, start + 500))))
        found = self.connection.call("GET", f"{self.prefix}:turns")
        if found != (b"%d" % self.turn if self.turn else None):
            wrong.append(f"the counter is {found!r}, not {self.turn}")
        listed = self.connection.call("LRANGE", f"{self.prefix}:list", 0, -1)
        if listed != [b"%d" % n for n in range(self.turn - self.listed + 1, self.turn + 1)]:
            wrong.append(f"the list after turn {self.turn} is {describe(listed)}")
        return wrong

    def name(self, key: int) -> str:
        return f"{self.prefix}:{key}"


def describe(reply: Reply) -> str:
    if not isinstance(reply, bytes):
        return repr(reply)[:200]
    return f"{len(reply)} bytes, blake2b {hashlib.blake2b(reply, digest_size=8).hexdigest()}, {reply[:20]!r}…"
