"""What ``job.json`` holds about an instance."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from icecore.host.jobs.namespaces import Isolation
from icecore.host.kernel import procfs


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Description(msgspec.Struct, frozen=True):
    """The content of ``job.json``.

    Attributes:
        name: The job's; instances of one job may share it only while at most one of them lives.
        instance: Names this instance for good.
        pid: The init's, as this machine sees it; 0 while the instance is being started or restored.
        start_time: The init's, in clock ticks after boot; -1 where it ended too soon to be asked.
        boot: The boot of the machine in which ``pid`` counts.
        command: Command line (argv).
        cwd: Where it was started.
        isolation: Its namespaces.
        binds: The host's mount points in its private root.
        created: Unix time in seconds.
        restored_from: The snapshot it was restored from; empty where it was started.
        lineage: The lineage its snapshots belong to; empty before the first.
        snapshot: The one it was last dumped to or restored from: the parent of its next. Empty
            before the first.
        owner: Pid and start time of the process that starts or restores it.
        resident: Where the keeper of its device memory is, as this machine sees it
            (`icecore.host.resident`); empty: it has none, or icecore was older.
        keep_resident: From its first snapshot on that memory outlives it, unless it ends well.
        files_to: Directory of its own copies of files (``restore --files-to``); empty: it has none.
        copies: The files, by the path at which it sees them.
        user, user_name: Whose job it is: the uid with which its command was started, and its name
            at that time.
        data: Directories whose content is part of each snapshot (``run --data``).
        group: Directory of the cgroup of its own (`icecore.host.kernel.freezer`); empty: it has none.
        log_limit: Size limit of each log, in bytes (``run --log-limit``); 0: none.
    """

    name: str
    instance: str
    command: list[str]
    cwd: str
    isolation: Isolation
    binds: list[str]
    created: float
    boot: str
    owner: tuple[int, int]
    pid: int = 0
    start_time: int = 0
    restored_from: str = ""
    lineage: str = ""
    snapshot: str = ""
    resident: str = ""
    keep_resident: bool = False
    files_to: str = ""
    copies: list[str] = msgspec.field(default_factory=list)
    user: int = 0
    user_name: str = "root"
    group: str = ""
    data: list[str] = msgspec.field(default_factory=list)
    log_limit: int = 0


def describe(
    name: str,
    command: Sequence[str],
    cwd: str,
    isolation: Isolation,
    binds: Sequence[str],
    *,
    snapshot: str = "",
    lineage: str = "",
) -> Description:
    """Describe a new instance that this process starts."""
    import secrets  # few commands start a job

    return Description(
        name=name,
        instance=f"i{secrets.token_hex(4)}",
        command=[*command],
        cwd=cwd,
        isolation=isolation,
        binds=[*binds],
        created=time.time(),
        boot=boot_id(),
        owner=(os.getpid(), procfs.start_time(os.getpid())),
        restored_from=snapshot,
        snapshot=snapshot,
        lineage=lineage,
    )
