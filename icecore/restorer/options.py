"""The options of a restore; the defaults suit most jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from icecore.host.jobs.identity import Identity


@dataclass(frozen=True)
class RestoreOptions:
    """Options of one restore.

    Attributes:
        mode: ``full`` holds the tree until all its memory is loaded and verified; ``lazy`` lets it
            run at once, and loads its memory on page faults and in the background.
        files: Files that the job had open for writing: ``restore`` puts their content back,
            ``truncate`` cuts files that grew to the recorded size, ``leave`` does nothing. ``auto``
            is ``restore``, but refuses if a running process has one of them open for writing.
        files_to: Directory in which the instance gets its own copies of the files that would be
            written; it sees them at the old paths (jobs of `icecore run`). ``/`` puts the files of
            an instance with copies at their own paths again. Empty: where they were.
        verify_files: Compare the content of read-only open files with the recorded hash, not only
            size and mtime.
        workdir: Directory on tmpfs for CRIU's image files while the restore runs. Empty: /dev/shm.
        budget_bytes: Bound on the memory that holds fetched and not yet placed bytes; 0: 512 MiB
            for each process with device memory, at least one. The same amount again may hold device
            memory on its way into a file.
        threads: Threads that decode, verify and place; 0: one for each core, six at most, or
            placers.
        placers: Processes that do that instead, if the repository is a directory; 0: one for each
            core if there are many cores and much memory to restore; at most 16 for each process
            with device memory, or for the job.
        instance: Name of the restored instance. Empty: the job's name.
        detach: Leave the tree once its memory is loaded; otherwise `Restored.wait` returns its exit
            status.
        tcp: ``keep`` TCP connections that were open, or ``close`` them.
        root: Directory that is the root of the tree's file system (jobs with a private root).
            Empty: the root of this process.
        gpu_map: GPU that the job had → GPU of this machine that it gets: UUIDs, their beginnings,
            or numbers. Other GPUs stay the same if possible.
        from_resident: Device memory is still held on the GPUs (left there by a dump that ended the
            job, or by a crash of a job that keeps it): cells that equal the snapshot's are not
            fetched.
        criu_plugins: Directory of CRIU's plugins (``--libdir``), for AMD GPUs. Empty: none.
        register: Protect what is read from collection meanwhile. False is for repositories that
            cannot be written to: a collection may then make the restore fail, with ``mode`` lazy
            even after the tree ran.
        identity: On whose behalf it is restored: only snapshots of that user; the tree joins its
            cgroups and gets no higher limits than it has. None: on this process's.
        criu_seconds: Seconds that CRIU may take to build the tree, not counting memory.
        stall_seconds: Seconds without any byte after which the storage counts as failed.
        attempts: How often a read is tried.
    """

    mode: Literal["full", "lazy"] = "full"
    files: Literal["auto", "restore", "truncate", "leave"] = "auto"
    files_to: str = ""
    verify_files: bool = False
    workdir: str = ""
    budget_bytes: int = 0
    threads: int = 0
    placers: int = 0
    instance: str = ""
    detach: bool = True
    tcp: Literal["keep", "close"] = "keep"
    root: str = ""
    gpu_map: Mapping[str, str] = field(default_factory=dict)
    from_resident: bool = False
    criu_plugins: str = ""
    register: bool = True
    identity: Identity | None = None
    criu_seconds: float = 120.0
    stall_seconds: float = 60.0
    attempts: int = 4
