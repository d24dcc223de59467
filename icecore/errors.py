"""Every error icecore raises on purpose: a class per cause, an exit code per class, the cure in the
message.
"""

from __future__ import annotations

from typing import ClassVar

#: What to do where the repository itself has lost something.
REPAIR = "'icecore check --read-data' names all damage, 'icecore repair --dry-run' says what can be brought back, 'icecore repair' does it"


class IcecoreError(Exception):
    """Base of all errors.

    Args:
        message: What happened, in one sentence.
        cure: What the user can do about it; empty when nothing helps.

    ``exit_code`` is the process exit status of the command line for this class; the numbers are
    stable (docs/cli.md).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.message} ({self.cure})" if self.cure else self.message


class UsageError(IcecoreError):
    """The call itself is wrong: a bad argument, option or configuration value."""

    exit_code = 2


class NotFound(IcecoreError):
    """A named thing (repository, snapshot, job, process) does not exist."""

    exit_code = 3


class PreflightRefused(IcecoreError):
    """Something that would lose or hang the job was found before anything was frozen.

    Args:
        reasons: ``(name, message, cure)`` of every failed check, in the order in which they were
            made.
    """

    exit_code = 4

    def __init__(self, reasons: list[tuple[str, str, str]]) -> None:
        self.reasons = reasons
        super().__init__(
            "; ".join(f"{name}: {message}" for name, message, _ in reasons),
            cure="; ".join(cure for _, _, cure in reasons if cure),
        )


class DumpFailed(IcecoreError):
    """A snapshot was abandoned; the job runs on and the repository holds nothing of it."""

    exit_code = 5


class WindowExceeded(DumpFailed):
    """The job would have stood still for longer than ``--max-window`` allows; it was thawed."""


class HookFailed(IcecoreError):
    """A hook ended with an error or took too long; what it was to follow is done all the same."""


class RestoreRefused(IcecoreError):
    """This machine does not meet what the snapshot requires; nothing was started."""

    exit_code = 6


class RestoreFailed(IcecoreError):
    """A restore broke off; the half-restored tree was killed."""

    exit_code = 7


class StoreError(IcecoreError):
    """The storage behind the repository failed (unreachable, full, denied)."""

    exit_code = 8


class StoreFull(StoreError):
    """No space left where the repository lives."""


class StoreDenied(StoreError):
    """The storage refuses: credentials, permissions, region, configuration; the same request will
    fail again.
    """


class ObjectMissing(StoreError):
    """An object that should be there is not."""

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message, cure=cure or REPAIR)


class ObjectExists(StoreError):
    """Create-if-absent found the name taken."""


class Damaged(IcecoreError):
    """Bytes read from the repository are not what was written; ``name`` is the object, ``kind``
    what it is.
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
    """This writer was declared dead by another while it was working; its work is void, nothing else
    is.
    """

    exit_code = 11


class RollbackDetected(IcecoreError):
    """The repository shows an older state than this client has already seen."""

    exit_code = 12


class WrongPassphrase(IcecoreError):
    """The repository is encrypted, and the passphrase is missing or opens none of its slots."""

    exit_code = 14


class MissingTool(IcecoreError):
    """A program that icecore drives (CRIU) is absent or too old."""

    exit_code = 13


class Distrusted(IcecoreError):
    """What is at a place is not what this client knows, or may expect, there."""

    exit_code = 15


class RepositoryReplaced(Distrusted):
    """Another repository, or one that is not encrypted, is at a place where this client knows one."""


class PlainRefused(Distrusted):
    """The repository is not encrypted, a passphrase is configured, and nothing says that this is
    meant.
    """


class RecordDamaged(Distrusted):
    """A file in which this client remembers a place or a repository is not what was written."""


class JobHeld(IcecoreError):
    """Another process, maybe on another node, runs the job of this name."""

    exit_code = 16


class ResumeFailed(IcecoreError):
    """No snapshot of a job could be restored, so the job does not run."""

    exit_code = 17
