"""What is dumped: a process tree, the name under which its snapshots form a lineage, and how its
job was started.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from icecore.errors import NotFound
from icecore.host.jobs.namespaces import RunRecord
from icecore.host.kernel import procfs
from icecore.text import job_name


@dataclass(frozen=True)
class Target:
    """A tree to dump.

    Attributes:
        pid: Host pid of its root.
        job: The job's name.
        parent: Snapshot id that the tree was last dumped to or restored from; empty: the job's
            newest snapshot, if there is one.
        record: How `icecore run` started it; None for any other tree.
        status: Where its init writes how it ended, if its resident device memory is to outlive it
            unless that is well; empty: it is not.
        guessed: The name is the program's, which others may run, too.
    """

    pid: int
    job: str
    parent: str = ""
    record: RunRecord | None = None
    status: str = ""
    guessed: bool = False

    @classmethod
    def of_process(cls, pid: int, job: str = "") -> Target:
        """A tree that icecore did not start; named after its program unless ``job`` says otherwise."""
        program = ""
        with suppress(NotFound, PermissionError):  # preflight says what is wrong with it
            program = job_name(os.path.basename(procfs.executable(pid)))
        return cls(pid, job or program or f"pid-{pid}", guessed=not job)
