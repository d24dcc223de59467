"""What a restore may be told; every field has the default that serves most jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RestoreOptions:
    """Options of one restore.

    Attributes:
        mode: ``full`` holds the tree until all its memory is resident and verified; ``lazy`` lets
            it run at once and fills its memory as it is touched, and in the background.
        files: Files that the job had open for writing: ``restore`` puts their content back,
            ``truncate`` cuts files that grew to the recorded size, ``leave`` does nothing. ``auto``
            is ``restore``, but refuses where a running process has one of them open for writing.
        files_to: Directory in which the instance gets copies of its own of the files that would be
            written; it sees them at the old paths (jobs of `icecore run`). ``/`` puts the files of
            an instance with copies at their own paths again. Empty: where they were.
        verify_files: Compare the content of read-only open files with the recorded hash, not only
            size and mtime.
        workdir: Directory on tmpfs for CRIU's image files while the restore runs. Empty: /dev/shm.
        budget_bytes: Bound on the memory that holds fetched and not yet placed bytes; 0: 512 MiB,
            and as much for every further process with device memory. Once more as much may hold
            device memory on its way into a file.
        threads: Threads that decode, verify and place; 0: one per core, six at most, or placers.
        placers: Processes that do that instead, where the repository is a directory; 0: one per
            core if there are many cores, and much memory to restore; 16 at most for each process
            with device memory, or the job.
        instance: Name of the restored instance. Empty: the job's name.
        detach: Leave the tree to itself once it is resident; otherwise `Restored.wait` gives its
            exit status.
        tcp: TCP connections that were open: ``keep`` them or let them be found closed (``close``).
        root: Directory that is the root of the tree's file system (jobs with a private root).
            Empty: this one's.
        gpu_map: GPU that the job had → GPU of this machine that it gets: UUIDs, their beginnings,
            or numbers. The others stay where they are if they can.
        from_resident: Device memory is still held on the GPUs (a dump that ended the job left it
            there, or a crash of one that keeps it): cells that are as in the snapshot are not
            fetched.
        criu_plugins: Directory of CRIU's plugins (``--libdir``), for AMD GPUs. Empty: none.
        register: Keep what is read from being collected meanwhile; without, for repositories that
            cannot be written to: a collection may then make the restore fail, with ``mode`` lazy
            after the tree ran.
        criu_seconds: Seconds that CRIU may take to build the tree, memory left out.
        stall_seconds: Seconds without any byte arriving after which the storage counts as failed.
        attempts: How often a read is tried before its failure counts.
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
    criu_seconds: float = 120.0
    stall_seconds: float = 60.0
    attempts: int = 4
