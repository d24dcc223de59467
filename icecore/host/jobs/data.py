"""Which directories a job may have as its data: their content goes into each snapshot, and a
restore replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from icecore.errors import NotFound, UsageError
from icecore.host.jobs.identity import Identity
from icecore.host.kernel.filesystem import acting_as

#: File systems of the kernel's own, and what is gone after a start of the machine.
_NOT_DATA = ("/proc", "/sys", "/dev", "/run")


def data_directories(paths: Sequence[str], identity: Identity | None, state: Path) -> list[str]:
    """Return the directories with symbolic links resolved.

    Args:
        paths: Absolute.
        identity: The job's user, who must own each directory; None: this process's.
        state: icecore's state directory, which must be outside.

    Raises:
        NotFound: One does not exist.
        UsageError: One cannot be data, or two overlap.
    """
    # No signal handler runs there, between taking a user's identity and giving it back.
    with ThreadPoolExecutor(1, "data") as thread:
        found = [thread.submit(_resolved, path, identity).result() for path in paths]
    for number, path in enumerate(found):
        if path == "/" or any(_within(path, own) for own in _NOT_DATA):
            raise UsageError(
                f"{path} cannot be data of a job", cure="name a directory on a disk with --data"
            )
        if _within(path, str(state)) or _within(str(state), path):
            raise UsageError(
                f"{path} holds icecore's own state, or is part of it ({state})",
                cure="name another directory with --data, or another one in ICECORE_STATE",
            )
        for other in found[:number]:
            if _within(path, other) or _within(other, path):
                raise UsageError(
                    f"the data directories {other} and {path} overlap", cure="name only one of them"
                )
    return found


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _resolved(path: str, identity: Identity | None) -> str:
    """Look a directory up with the rights of the user."""
    if identity is None or not identity.user:
        return _looked_up(path, 0)
    with acting_as(identity.user, identity.group, identity.groups):
        return _looked_up(path, identity.user)


def _looked_up(path: str, user: int) -> str:
    try:
        real = os.path.realpath(path, strict=True)
        about = os.stat(real)
        os.listdir(real)
    except FileNotFoundError:
        raise NotFound(f"there is no directory {path}", cure=f"mkdir -p {path}") from None
    except OSError as error:
        raise UsageError(
            f"cannot use {path} as data: {error.strerror}",
            cure="name a directory that the job's user can read",
        ) from error
    if user and about.st_uid != user:
        raise UsageError(
            f"{real} belongs to user {about.st_uid}, not to the job's user {user}",
            cure="name a directory of the job's user with --data",
        )
    return real
