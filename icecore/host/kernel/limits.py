"""The limits of this machine: capabilities, kernel version, descriptors, pipes, memory and space.
Each call reads them anew, and only functions whose names say so change them.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from icecore.errors import UsageError
from icecore.host.kernel import procfs
from icecore.sizes import CELL_BYTES, PAGE

#: The most pages that CRIU puts into one pipe: it asks for 819 (criu/include/page-pipe.h,
#: PIPE_MAX_SIZE) and Linux rounds up to a power of two.
CRIU_PIPE_PAGES = 1024
#: Descriptors that CRIU has besides its page pipes, with room to spare: its log and images, and a
#: few a process.
CRIU_DESCRIPTORS = 64
CRIU_DESCRIPTORS_PER_PROCESS = 16

_BUDDYINFO, _MEMINFO = Path("/proc/buddyinfo"), Path("/proc/meminfo")
_HUGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_NAMES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
_CAPABILITIES = tuple(f"CAP_{name}" for name in _NAMES.split())


def capabilities(pid: int | None = None) -> frozenset[str]:
    """Return the effective capabilities of a process (default: this thread) by name, such as
    "CAP_SYS_PTRACE".
    """
    bits = int(procfs.status_fields("thread-self" if pid is None else pid)["CapEff"][0], 16)
    return frozenset(name for number, name in enumerate(_CAPABILITIES) if bits >> number & 1)


def kernel_version() -> tuple[int, int]:
    """Return major and minor version of the running kernel."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if found is None:
        raise ValueError(f"the kernel release {os.uname().release!r} is not a version")
    return int(found[1]), int(found[2])


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except FileNotFoundError:
        return None


def pipe_max_size() -> int:
    """Return the size in bytes to which a process without CAP_SYS_RESOURCE can grow a pipe
    (fs.pipe-max-size).
    """
    size = _sysctl("fs.pipe-max-size")
    return 1 << 20 if size is None else size


def pipe_capacity() -> int:
    """Return how many bytes CRIU gets into one of its page pipes on this machine."""
    most = CRIU_PIPE_PAGES * PAGE
    if "CAP_SYS_RESOURCE" in capabilities():
        return most
    # It doubles a pipe until that is refused, so the limit counts as the power of two at or below
    # it.
    return min(most, 1 << (pipe_max_size().bit_length() - 1))


def pipe_need(size: int, processes: int = 1) -> int:
    """Return how many descriptors CRIU's lazy dump needs to hold references to ``size`` bytes of
    private memory in pipes.

    Two a pipe, pipes filled to the brim but for the last of each process (criu/page-pipe.c: pages
    that may be restored lazily and the others never share one). At 1 MiB a pipe 16 GiB need 32 000,
    at 4 MiB, which is all that CRIU uses, 8 000.

    Args:
        size: Bytes of resident private memory of the whole tree.
        processes: Number of processes in the tree.
    """
    pipes = -(-size // pipe_capacity()) + 3 * processes
    return 2 * pipes + CRIU_DESCRIPTORS + CRIU_DESCRIPTORS_PER_PROCESS * processes


def descriptor_limit() -> int:
    """Return how many descriptors a CRIU that is started from here can have.

    CRIU sets its limit to fs.nr_open, which needs CAP_SYS_RESOURCE where the hard limit is lower;
    if that fails it keeps what it was started with: the hard limit, if `raise_descriptor_limit` was
    called before.
    """
    most = _sysctl("fs.nr_open") or 1 << 20
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= most or "CAP_SYS_RESOURCE" in capabilities():
        return most
    return hard


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit on descriptors to its hard limit, for itself and its
    children; return it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def soft_descriptor_limit() -> int:
    """Return how many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def threads_for(most: int) -> int:
    """Return one thread for each core, but at most ``most``.

    Between its calls into C every thread needs the interpreter's lock, and is woken for it by the
    one before: past some number the waking costs more than another thread brings
    (docs/results/2026-11-23-earlier.md, "Many cores").
    """
    return min(most, os.cpu_count() or 1)


def io_uring_disabled() -> int:
    """Return kernel.io_uring_disabled: 0 everybody may use io_uring, 1 only privileged processes, 2
    nobody.
    """
    return _sysctl("kernel.io_uring_disabled") or 0


def huge_pages() -> str:
    """Return when the kernel uses transparent huge pages: "always", "madvise" or "never"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except FileNotFoundError:
        return "never"
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else "never"


def huge_page_bytes() -> int:
    """Return the size of a transparent huge page; 0 if there are none."""
    try:
        return int(_HUGE_SIZE.read_text()) if huge_pages() != "never" else 0
    except OSError:
        return 0


def overcommits() -> bool:
    """Return whether memory can be mapped beyond what is available (vm.overcommit_memory is not 2)."""
    return _sysctl("vm.overcommit_memory") != 2


def spare_huge_bytes(processes: int = 1) -> int:
    """Return how many bytes of new memory each of some processes can have as huge pages, in whole
    cells, if it must ask for them with madvise(2). 0: do not ask.
    """
    if not huge_page_bytes() or huge_pages() != "madvise":
        return 0
    return free_huge_bytes() // processes // CELL_BYTES * CELL_BYTES


def free_huge_bytes() -> int:
    """Return the free memory in pieces of at least a huge page: for more, the kernel would have to
    compact, which takes longer than it gains (proc(5), buddyinfo).

    What counts as free and is in no list of free pieces belongs to it: memory that a virtual
    machine has not accepted or taken into use yet, which it does in pieces as large, when it is
    asked for.
    """
    order = (huge_page_bytes() // PAGE).bit_length() - 1
    if order < 0:
        return 0
    try:
        zones, memory = _BUDDYINFO.read_text(), _MEMINFO.read_text()
    except OSError:
        return 0  # the kernel does not say
    listed = found = 0
    for line in zones.splitlines():
        counts = [int(word) for word in line.partition("zone")[2].split()[1:]]
        listed += sum(count << at for at, count in enumerate(counts)) * PAGE
        found += sum(count << at for at, count in enumerate(counts) if at >= order) * PAGE
    free = re.search(r"^MemFree:\s*(\d+) kB$", memory, re.MULTILINE)
    return found + max(0, int(free[1]) * 1024 - listed) if free and listed else found


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def free_swap() -> int:
    """Return the bytes of swap that are free."""
    return _meminfo("SwapFree")


def memory_available() -> int:
    """Return how many bytes can be allocated without swapping (MemAvailable) or within the cgroup's
    limit, whichever is less.
    """
    available = _meminfo("MemAvailable")
    try:
        group = (
            os.fsdecode(Path("/proc/self/cgroup").read_bytes())
            .rsplit("::", 1)[1]
            .removesuffix("\n")
            .lstrip("/")
        )
        folder = Path("/sys/fs/cgroup", group)
        most = (folder / "memory.max").read_text().strip()
        if most != "max":
            available = min(
                available, max(0, int(most) - int((folder / "memory.current").read_text()))
            )
    except (OSError, IndexError):
        pass  # no cgroup of version 2, or none with a memory limit
    return available


def at_most_a_third(size: int) -> int:
    """Return ``size``, or a third of the available memory if that is less: what staging may take."""
    return min(size, memory_available() // 3)


def require_directory(path: str, option: str) -> None:
    """Require an existing directory.

    Raises:
        UsageError: There is none; ``option`` names who asked for it.
    """
    if not os.path.isdir(path):
        raise UsageError(
            f"{option} {path}: there is no such directory", cure="make it, or name another one"
        )


def free_space(path: str | Path) -> int:
    """Return how many bytes can still be written where ``path`` lies; on tmpfs at most the
    available memory.
    """
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize
