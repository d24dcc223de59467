"""Every error that icecore raises on purpose.

Each cause has a class, each class an exit code, and each message names the cure.
"""

from __future__ import annotations

#: As `typing.TYPE_CHECKING`: the guard of every dump imports this module, and `typing` is slow to
#: load.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, ClassVar

#: The cure where the repository itself has lost something.
REPAIR = "'icecore check --read-data' names all damage, 'icecore repair --dry-run' shows what can be repaired, 'icecore repair' repairs it"


class IcecoreError(Exception):
    """Base of all errors.

    Args:
        message: What failed, in one sentence.
        cure: What the user can do about it; empty if nothing helps.

    ``exit_code`` is the exit status of the command line for this class. The numbers are stable.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.message} ({self.cure})" if self.cure else self.message


class UsageError(IcecoreError):
    """An argument, option or configuration value is invalid."""

    exit_code = 2


class NameTaken(UsageError):
    """Another job of this node has the name."""


class NotFound(IcecoreError):
    """A named thing (repository, snapshot, job, process) does not exist."""

    exit_code = 3


class PreflightRefused(IcecoreError):
    """A check found a condition that would lose or hang the job, before anything was frozen.

    Args:
        reasons: ``(name, message, cure)`` of every failed check, in the order of the checks.
    """

    exit_code = 4

    def __init__(self, reasons: list[tuple[str, str, str]]) -> None:
        self.reasons = reasons
        super().__init__(
            "; ".join(f"{name}: {message}" for name, message, _ in reasons),
            cure="; ".join(cure for _, _, cure in reasons if cure),
        )


class DumpFailed(IcecoreError):
    """The snapshot was abandoned; the job continues, and the repository is unchanged."""

    exit_code = 5


class WindowExceeded(DumpFailed):
    """The window would have exceeded ``--max-window``; the job was thawed."""


class HookFailed(IcecoreError):
    """A hook failed or timed out; the operation that it follows is complete nevertheless.

    Attributes:
        result: What the operation would have returned: a `DumpResult`, or a `Restored`.
    """

    result: Any = None


class RestoreRefused(IcecoreError):
    """This machine does not meet the snapshot's requirements; nothing was started."""

    exit_code = 6


class RestoreFailed(IcecoreError):
    """The restore failed; the partially restored tree was killed."""

    exit_code = 7


class StoreError(IcecoreError):
    """The storage behind the repository failed (unreachable, full, denied)."""

    exit_code = 8


class StoreFull(StoreError):
    """The repository's storage is full."""


class StoreDenied(StoreError):
    """The storage denies access because of credentials, permissions, region or configuration; a
    retry would fail again.
    """


class ObjectMissing(StoreError):
    """An object that should exist is missing."""

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message, cure=cure or REPAIR)


class ObjectExists(StoreError):
    """A conditional create failed because the name is taken."""


class Damaged(IcecoreError):
    """Bytes read from the repository are not what was written.

    Args:
        kind: The kind of the object.
        name: Its name.
        why: What is wrong with it.
    """

    exit_code = 9

    def __init__(self, kind: str, name: str, why: str, *, cure: str = "") -> None:
        super().__init__(f"{kind} {name} is damaged: {why}", cure=cure or REPAIR)
        self.kind = kind
        self.name = name
        self.why = why


class FormatTooNew(IcecoreError):
    """The repository was written by a later version of icecore."""

    exit_code = 10


class SessionFenced(IcecoreError):
    """Another client declared this writer dead while it was working; only its own work is void."""

    exit_code = 11


class RollbackDetected(IcecoreError):
    """The repository shows an older state than this client has seen before."""

    exit_code = 12


class WrongPassphrase(IcecoreError):
    """The repository is encrypted, and the passphrase is missing or wrong."""

    exit_code = 14


class MissingTool(IcecoreError):
    """A program that icecore requires, such as CRIU, is missing or too old."""

    exit_code = 13


class Distrusted(IcecoreError):
    """The repository at a place is not the one that this client knows or expects there."""

    exit_code = 15


class RepositoryReplaced(Distrusted):
    """Another repository, or a plain one, replaced the one that this client knows at a place."""


class PlainRefused(Distrusted):
    """The repository is plain although a passphrase is configured, and nothing marks it as plain
    on purpose.
    """


class RecordDamaged(Distrusted):
    """This client's record of a place or a repository is damaged."""


class JobHeld(IcecoreError):
    """Another process, maybe on another node, runs the job of this name."""

    exit_code = 16


class ResumeFailed(IcecoreError):
    """No snapshot of a job could be restored, or the job failed again from each of them."""

    exit_code = 17


class Denied(IcecoreError):
    """The node service refuses the caller, which is not authenticated or lacks the role."""

    exit_code = 18


class ServiceFailed(IcecoreError):
    """The node service cannot be reached, is too busy, or sends an invalid response."""

    exit_code = 19
