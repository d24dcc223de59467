"""Small files in which a client remembers something outside a repository. A reader sees a complete
old or new file, and so does anyone after a crash.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from icecore.errors import StoreError
from icecore.private import private_state

#: Most bytes of a note that are read; no note is nearly as long.
_LIMIT = 1 << 20
_LOCK = ".lock"


def read(path: Path) -> bytes | None:
    """Return what the note holds, or None if there is none.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_LIMIT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed("read", path, error) from error


def write(path: Path, data: bytes) -> None:
    """Replace the note, durably; only its owner may read it. Create its folder if missing.

    Raises:
        StoreError: It cannot be written; the old one, if any, is still there.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        _make(path.parent)
        try:
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync(path.parent)
    except OSError as error:
        raise _failed("write", path, error) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the notes in ``folder`` against all other processes and threads. Hold it briefly: it
    blocks.

    Raises:
        StoreError: The folder cannot be written to.
    """
    try:
        _make(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failed("write", folder / _LOCK, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    new = not folder.is_dir()
    private_state(folder.parent, folder.name)
    if new:
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(doing: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot {doing} this client's record {path}: {error.strerror}",
        cure="correct its permissions or make room, or set ICECORE_STATE",
    )
