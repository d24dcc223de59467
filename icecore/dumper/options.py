"""The options of a dump; every field has the default that serves most jobs."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Literal

from icecore.config.kinds import check_cpu_share
from icecore.errors import UsageError


@dataclass(frozen=True)
class DumpOptions:
    """Options of one dump.

    Attributes:
        job: Name of the job, whose snapshots form the lineage. Empty: the name of the running job,
            or ``<command>-<pid>``.
        stop: End the tree once the snapshot is committed; it stays frozen until then and goes on if
            the commit fails.
        max_window: Seconds the job may stand still; after that the snapshot is abandoned and the
            job thawed. Does not apply with ``stop``.
        staging_bytes: Bound on the memory that holds changed cells between the window and storage;
            with GPUs, their device memory comes on top.
        pre_copy: Scan the running job first, so that only what it changes meanwhile is left for the
            window. ``auto``: with at least 256 MiB of private memory, and with at least 4 GiB of
            resident device memory that has no room on its GPU.
        files: Open files that are writable or temporary: ``content`` stores them, ``check``
            records only size and mtime.
        with_files: Store the content of read-only open files too.
        verify_files: Hash read-only open files, so that a restore can compare content and not only
            size and mtime.
        file_budget: Upper bound on the bytes of open files to read while the tree is frozen;
            preflight refuses more.
        data_budget: Upper bound on the bytes of files of one data directory (`icecore run --data`)
            that are read while the tree is frozen; if more changed since the last look before the
            window, the snapshot fails. Files that can be cloned (reflinks) do not count.
        ghost_limit: Upper bound on the bytes of a deleted file that is open.
        connections: What happens to TCP connections that leave the tree: ``keep`` (dumped
            established) or ``close`` (closed at restore). Connections of unix sockets that leave it
            are always closed at restore: their other end cannot be found again.
        tcp: Old name of ``connections``; empty: not given.
        tags: Free tags of the snapshot.
        pinned: Never forget this snapshot by policy.
        encoders: Number of processes that encode in place of threads. 0: seven for every eight
            cores, up to 16, on machines with five cores or more, once half a gigabyte is stored and
            more cells are waiting, or from the beginning if 2 GiB or more will probably be stored.
        scan_threads: Number of scan threads, and of encoding threads. 0: one scan thread per core,
            up to twelve (eight, if scanning needs the interpreter), and up to four encoding threads.
            With another number, there are no encoders unless ``encoders`` is set.
        background_cpu: Share of the cores that scanning and storing may use while the job runs, at
            least 0.01. The bound does not apply to the window, nor to a dump with ``stop``. 0: as
            many cores as are idle when the dump begins, and at least an eighth of all.
        memory: ``in-place``: CRIU only refers to the memory, which is read where it is.
            ``streamed``: CRIU sends all of it, which makes the window longer; for machines on which
            the other way does not work (too few descriptors, pipes that may not grow, a kernel
            without userfaultfd).
        before: Shell command to run before anything is frozen; if it fails, so does the dump.
        after: Shell command to run at the end, once the job runs again, also after a failed dump
            (ICECORE_SNAPSHOT is then empty).
        hook_seconds: Time limit of each of the two commands.
        gpu_shared: The tree's processes are known to share no device memory by CUDA IPC.
        gpu_lock: Seconds that a GPU process's submitted work may take to end before the dump; it is
            attempted more than once.
        populate: Make the mapping into which the driver moves device memory with all cores, of huge
            pages (`icecore.host.cuda.populate`).
        keep_resident: With ``stop``: leave resident device memory on its GPUs, for a restore from
            there (`RestoreOptions.from_resident`).
        criu_plugins: Directory of CRIU's plugins (``--libdir``), for AMD GPUs. Empty: none.
        link_rate: Bytes per second assumed between this machine and where the snapshot will be read,
            which codec trial optimises for. 0: the back end's default.
        under: Session of the repository without which the snapshot is not committed, such as the
            lease of the job's name. Empty: none.
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
    data_budget: int = 1 << 30
    ghost_limit: int = 1 << 30
    connections: Literal["keep", "close"] = "keep"
    tags: tuple[str, ...] = field(default=())
    pinned: bool = False
    scan_threads: int = 0
    encoders: int = 0
    background_cpu: float = 0.0
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
    under: str = ""
    tcp: InitVar[Literal["", "keep", "close"]] = ""

    def __post_init__(self, tcp: Literal["", "keep", "close"]) -> None:
        try:
            check_cpu_share(self.background_cpu)
        except ValueError as error:
            raise UsageError(str(error), cure="set background_cpu to 0.01 or more") from None
        if tcp:
            object.__setattr__(self, "connections", tcp)
