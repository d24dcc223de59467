"""The tree to dump, the job name under which its snapshots form a lineage, and how the job was
started.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from icecore.errors import NotFound
from icecore.host.jobs.namespaces import RunRecord
from icecore.host.kernel import procfs
from icecore.text import job_name


class Target(msgspec.Struct, frozen=True):
    """A tree to dump.

    Attributes:
        pid: Host pid of the tree's root.
        job: The job's name.
        parent: Id of the snapshot that the tree was last dumped to or restored from; empty: the
            job's newest snapshot, if any.
        record: How `icecore run` started it; None for any other tree.
        status: Where the tree's init writes how the job ended, if its resident device memory is to
            outlive a job that does not end well; empty: it is not.
        directory: Of the instance, where a dump that ends it notes so; empty: of no instance.
        guessed: The job is named after its program, which other jobs may run too.
    """

    pid: int
    job: str
    parent: str = ""
    record: RunRecord | None = None
    status: str = ""
    directory: str = ""
    guessed: bool = False

    @classmethod
    def of_process(cls, pid: int, job: str = "") -> Target:
        """Return the target for a tree that icecore did not start, named after its program unless
        ``job`` is given.
        """
        program = ""
        with suppress(NotFound, PermissionError):  # preflight reports it
            program = job_name(os.path.basename(procfs.executable(pid)))
        return cls(pid, job or program or f"pid-{pid}", guessed=not job)
