"""Bearer tokens of callers on TCP, in ``STATE/service/tokens.json``.

A token is 256 random bits, which cannot be guessed from their hash, so SHA-256 suffices; a password
would require a slow hash. The token itself is shown once and not stored.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from icecore.errors import Damaged, NotFound, UsageError
from icecore.private import create_private, private_state

FOLDER = "service"
PREFIX = "icecore_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MOST = 10_000
RoleName = Literal["read", "operate", "admin"]


class Token(msgspec.Struct, frozen=True):
    """A token, without its secret.

    Attributes:
        name: For people and the audit log.
        digest: SHA-256 of the secret, in hexadecimal.
        role: Permissions of its holder.
        jobs: Patterns of the names of jobs that its holder may access.
        uid: The user whose jobs its holder sees and starts; None: sees the jobs of all users, starts
            none.
        created, expires: Unix times in seconds; ``expires`` 0: never.
    """

    name: str
    digest: str
    role: RoleName
    jobs: list[str]
    uid: int | None
    created: float
    expires: float = 0.0


class Tokens:
    """The tokens of a node.

    Args:
        state: icecore's state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._path = state / FOLDER / "tokens.json"
        self._read: tuple[tuple[int, int, int], list[Token]] | None = None

    def all(self) -> list[Token]:
        """Return the tokens, including expired ones, in the order of their creation.

        Raises:
            Damaged: The file cannot be read.
        """
        try:
            about = os.stat(self._path)
        except FileNotFoundError:
            return []
        version = (about.st_ino, about.st_mtime_ns, about.st_size)
        if self._read is None or self._read[0] != version:
            try:
                found = msgspec.json.decode(self._path.read_bytes(), type=list[Token])
            except msgspec.DecodeError as error:
                raise Damaged(
                    "list of tokens", str(self._path), str(error), cure="remove it; add tokens anew"
                ) from error
            self._read = (version, found)
        return self._read[1]

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret that has not expired."""
        digest = _digest(secret)
        found = None
        for token in self.all():  # compare all: the time must not reveal the position
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None or (found.expires and found.expires <= time.time()):
            return None
        return found

    def add(
        self,
        name: str,
        role: RoleName,
        *,
        jobs: list[str] | None = None,
        uid: int | None = None,
        seconds: float = 0.0,
    ) -> str:
        """Add a token; return its secret.

        Args:
            seconds: How long it is valid; 0: until it is removed.

        Raises:
            UsageError: The name is invalid or taken.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a valid name for a token",
                cure="use at most 63 letters, digits, '.', '_' and '-'",
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        now = time.time()
        token = Token(
            name=name,
            digest=_digest(secret),
            role=role,
            jobs=jobs or ["*"],
            uid=uid,
            created=now,
            expires=now + seconds if seconds else 0.0,
        )
        with self._changing() as tokens:
            if any(one.name == name for one in tokens):
                raise UsageError(
                    f"token {name} already exists",
                    cure=f"remove it first: icecore token remove {name}",
                )
            if len(tokens) >= _MOST:
                raise UsageError(f"there are {_MOST} tokens", cure="remove some")
            tokens.append(token)
        return secret

    def remove(self, name: str) -> None:
        """Remove a token.

        Raises:
            NotFound: There is none of this name.
        """
        with self._changing() as tokens:
            left = [one for one in tokens if one.name != name]
            if len(left) == len(tokens):
                raise NotFound(f"there is no token {name}", cure="'icecore token list' lists them")
            tokens[:] = left

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Lend the list; write it afterwards, durably and atomically."""
        private_state(self._state, FOLDER)
        lock = os.open(
            self._path.with_suffix(".lock"),
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = list(self.all())
            yield tokens
            new = self._path.with_suffix(".new")
            with open(create_private(new), "wb") as file:
                file.write(msgspec.json.encode(tokens))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        finally:
            os.close(lock)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
