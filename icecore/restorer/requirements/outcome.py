"""The outcome of the checks: each requirement, and what was planned meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from icecore.errors import RestoreRefused
from icecore.restorer.files.copies import Copies
from icecore.restorer.files.data import Content
from icecore.restorer.files.plan import FilePlan
from icecore.restorer.gpu.gpus import GpuPlan


class Requirement(msgspec.Struct, frozen=True):
    """One thing that the machine must offer.

    Attributes:
        name: For programs: ``container``, ``architecture``, ``criu``, ``cpu``, ``kernel``, ``pid``, ``port``,
            ``file``, ``holder`` (another process has a file open), ``data``, ``tmp``, ``memory``, ``space``,
            ``userfaultfd``, ``gpu``, ``gpu-driver``, ``gpu-memory``, ``device``.
        met: Whether it does.
        message: What was found.
        cure: What can be done if it does not.
        hard: Whether the restore is refused; False: only a warning.
    """

    name: str
    met: bool
    message: str
    cure: str = ""
    hard: bool = True


class Requirements(msgspec.Struct, frozen=True):
    """The outcome of all checks.

    Attributes:
        checks: Every check that was made.
        files: What will be done to the open files.
        copies: Which of them are the instance's own copies.
        gpus: The GPUs that the job gets; None: it used none, or cannot get them here.
        contents: Where the content of files in data directories lies, by path.
        shared: Files to which the restored job and running processes both write: their sizes may
            change at any time.
    """

    checks: list[Requirement]
    files: FilePlan
    copies: Copies
    gpus: GpuPlan | None = None
    shared: frozenset[str] = frozenset()
    contents: Mapping[str, Content] = msgspec.field(default_factory=dict)

    @property
    def failed(self) -> list[Requirement]:
        """What prevents a restore."""
        return [check for check in self.checks if not check.met and check.hard]

    @property
    def warnings(self) -> list[Requirement]:
        """What may make it fail."""
        return [check for check in self.checks if not check.met and not check.hard]

    def require(self) -> None:
        """Raise `RestoreRefused`, with all reasons and cures, if anything prevents the restore."""
        if self.failed:
            cures = dict.fromkeys(check.cure for check in self.failed if check.cure)
            raise RestoreRefused(
                "this machine does not meet what the snapshot requires: "
                + "; ".join(c.message for c in self.failed),
                cure="; ".join(cures),
            )
