"""What a dump may be told; every field has the default that serves most jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DumpOptions:
    """Options of one dump.

    Attributes:
        job: Name of the job; its snapshots form the lineage. Empty: the name of the running job, or
            ``<command>-<pid>``.
        stop: End the tree once the snapshot is committed; it stays frozen until then and goes on if
            the commit fails.
        max_window: Seconds the job may stand still; past it the snapshot is abandoned and the job
            thawed. Does not apply to ``stop``.
        staging_bytes: Bound on the memory that holds changed cells between the window and their
            storing; with GPUs their device memory comes on top.
        pre_copy: Scan the running job first, so that only what it changes meanwhile is left for the
            window. ``auto``: from 256 MiB of private memory on, and of resident device memory what
            has no room on its GPU, from 4 GiB on.
        files: Writable open files: ``content`` stores them, ``check`` records only size and mtime.
        with_files: Store the content of read-only open files too.
        verify_files: Hash read-only open files, so that a restore can compare content and not only
            size and mtime.
        file_budget: Bytes of open files that are read at most while the tree is frozen; more is
            refused in preflight.
        ghost_limit: Bytes a deleted-but-open file may have.
        tcp: What happens to TCP connections that leave the tree: ``keep`` (dumped established) or
            ``close`` (closed at restore).
        tags: Free labels of the snapshot.
        pinned: Never forget this snapshot by policy.
        scan_threads: Threads that scan, and that encode; 0: one per core, twelve (eight, where
            scanning takes the interpreter) and four at most.
        memory: ``in-place``: CRIU only refers to the memory, which is read where it is.
            ``streamed``: CRIU sends all of it, which makes the window longer by that time; for
            where the other way cannot work (too few descriptors or pipes that may not grow, a
            kernel without userfaultfd).
        before: Shell command run before anything is frozen; a failure gives the dump up.
        after: Shell command run at the end, once the job runs again, also when the dump failed
            (ICECORE_SNAPSHOT is then empty).
        hook_seconds: What each of the two may take.
        gpu_shared: Processes of the tree are known to share no device memory by CUDA IPC.
        gpu_lock: Seconds that a GPU process's submitted work may take to end before the dump; more
            than one attempt is made.
        populate: Make the mapping into which the driver moves device memory with all cores, of huge
            pages (`icecore.host.cuda.populate`).
        keep_resident: With ``stop``: leave resident device memory on its GPUs, for a restore from
            there (`RestoreOptions.from_resident`).
        criu_plugins: Directory of CRIU's plugins (``--libdir``), for AMD GPUs. Empty: none.
        link_rate: Bytes per second assumed between here and where the snapshot will be read; what
            codec trial optimises for. 0: the back end's default.
    """

    job: str = ""
    stop: bool = False
    max_window: float = 30.0
    staging_bytes: int = 2 << 30
    pre_copy: Literal["auto", "on", "off"] = "auto"
    files: Literal["content", "check"] = "content"
    with_files: bool = False
    verify_files: bool = False
    file_budget: int = 4 << 30
    ghost_limit: int = 1 << 30
    tcp: Literal["keep", "close"] = "keep"
    tags: tuple[str, ...] = field(default=())
    pinned: bool = False
    scan_threads: int = 0
    memory: Literal["in-place", "streamed"] = "in-place"
    before: str = ""
    after: str = ""
    hook_seconds: float = 300.0
    gpu_lock: float = 10.0
    gpu_shared: bool = False
    populate: bool = True
    keep_resident: bool = False
    criu_plugins: str = ""
    link_rate: float = 0.0
