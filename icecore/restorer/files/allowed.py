"""Which files a restore may change for a job's user, and which the job may get.

A snapshot remembers what its user could open at that time. Since then, the user may have lost a
group, the file may have got another mode or owner, and its owner may have changed or removed it.
"""

from __future__ import annotations

import os
import pwd
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

from icecore.host.jobs.identity import Identity
from icecore.host.kernel.filesystem import acting_as

_ROOT = 0


def groups_now(identity: Identity) -> set[int]:
    """Return the groups of a user: those of the identity, and those in this machine's user
    database.
    """
    known: set[int] = set()
    with suppress(KeyError):
        entry = pwd.getpwuid(identity.user)
        known = {entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)}
    return {identity.group, *identity.groups, *known}


class Allowed:
    """What is allowed to a job's user; a context manager.

    Args:
        user: The job's user. Jobs of root may have everything.
        identity: For whom the snapshot is restored; None: an administrator, who may give the job
            files that its user could not open now.
        of_others: Put back files of users other than root, too, if an administrator restores.
    """

    def __init__(
        self, user: int = _ROOT, identity: Identity | None = None, *, of_others: bool = False
    ) -> None:
        self.user = user
        self._of_others = of_others and identity is None
        #: Whether the user must have the rights now.
        self.checks = user != _ROOT and identity is not None and identity.user != _ROOT
        group = identity.group if identity is not None else user
        self._rights = user, group, sorted(groups_now(identity)) if identity is not None else []
        # `acting_as` must not run in a thread in which signal handlers run.
        self._thread = ThreadPoolExecutor(1, "allowed") if self.checks else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def owns(self, *users: int) -> bool:
        """Return whether files of these users may be put back, made and removed."""
        return self.user == _ROOT or all(
            user == self.user or (self._of_others and user != _ROOT) for user in users
        )

    def may(self, path: str, *modes: int) -> bool:
        """Return whether the user may access a path in one of some ways (access(2))."""
        if self._thread is None:
            return True
        return self._thread.submit(self._may, path, modes).result()

    def _may(self, path: str, modes: tuple[int, ...]) -> bool:
        with acting_as(*self._rights):
            return any(os.access(path, mode, effective_ids=True) for mode in modes)


#: For jobs of root.
EVERYTHING = Allowed()
