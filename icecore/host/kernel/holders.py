"""Find the processes that have a file open. The kernel says whether there are any; /proc says only
which.

A write lease (fcntl(2), F_SETLEASE) is granted only on a file that no other process has open, and a
read lease only on one that no process has open for writing. Mappings count, and so do processes in
other mount and pid namespaces, which a search through /proc may miss. So a file without a holder
costs a few microseconds, and only one with a holder costs the search. Where a file system has no
leases, the search alone answers.

The answer holds for one moment: it misses a process that opens a file later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: Processes that were killed are given this long to close what they have.
_ENDING_SECONDS = 5.0
_POLL_SECONDS = 0.02
#: What fcntl(2) says where there are no leases, or none for this user.
_NO_LEASE = frozenset(
    (errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
)
_SHARED = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ...s ")
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)

#: Device and inode.
FileId = tuple[int, int]


class Holder(msgspec.Struct, frozen=True, order=True):
    """A process that has a file open.

    Attributes:
        pid: As this process sees it; 0: a holder that this process cannot see (another pid
            namespace, the kernel's own file server).
        name: The name of its program.
        writes: Whether it has the file open for writing, or mapped so.
    """

    pid: int
    name: str
    writes: bool

    def __str__(self) -> str:
        return (
            f"process {self.pid} ({self.name})"
            if self.pid
            else "a process that is not visible here"
        )


def find_holders(
    files: Mapping[str, int], patience: float = _ENDING_SECONDS
) -> dict[str, list[Holder]]:
    """Return the processes that have regular files open and will go on running.

    Args:
        files: Name → descriptor (O_PATH will do) of the file.
        patience: Seconds to wait for ending processes to close a file. Those that still have it
            open then count.

    Returns:
        Name → holders, writers first; names without a holder are left out.
    """
    until = time.monotonic() + patience
    while True:
        states = {name: _state(descriptor) for name, descriptor in files.items()}
        held = {name: state for name, state in states.items() if state != "free"}
        if not held:
            return {}
        ids = {name: _id(files[name]) for name in held}
        found = _search(ids, held)
        ending = any(_is_ending(holder) for holders in found.values() for holder in holders)
        if not ending or time.monotonic() > until:
            return {
                name: sorted(holders, key=lambda one: (not one.writes, one.pid))
                for name, holders in found.items()
                if holders
            }
        time.sleep(_POLL_SECONDS)


def _id(descriptor: int) -> FileId:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _state(descriptor: int) -> str:
    """Return ``free``, ``read``, ``written``, or ``unknown`` if the kernel does not say."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return "free"
    try:
        probe = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    try:
        # If a process opens the file while we have the lease, the kernel sends this signal; SIGIO,
        # its choice, would end this process.
        fcntl.fcntl(probe, fcntl.F_SETSIG, signal.SIGURG)
        for lease, state in ((fcntl.F_WRLCK, "free"), (fcntl.F_RDLCK, "read")):
            try:
                fcntl.fcntl(probe, fcntl.F_SETLEASE, lease)
            except OSError as error:
                if error.errno in _NO_LEASE:
                    return "unknown"
                continue
            fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return state
        return "written"
    except OSError:
        return "unknown"
    finally:
        os.close(probe)


def _search(ids: Mapping[str, FileId], states: Mapping[str, str]) -> dict[str, set[Holder]]:
    """Search all processes: their descriptors, and their mappings if descriptors do not explain the
    kernel's answer.
    """
    wanted: dict[FileId, list[str]] = {}
    for name, key in ids.items():
        wanted.setdefault(key, []).append(name)
    writers: dict[FileId, dict[int, bool]] = {key: {} for key in wanted}
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    for pid in pids:
        _look_at_descriptors(pid, writers)

    def unexplained(key: FileId) -> bool:
        state, known = states[wanted[key][0]], writers[key]
        return state == "unknown" or not known or (state == "written" and not any(known.values()))

    if mapped := {key for key in wanted if unexplained(key)}:
        for pid in pids:
            _look_at_mappings(pid, writers, mapped)
    out: dict[str, set[Holder]] = {}
    for key, names in wanted.items():
        state = states[names[0]]
        # A shared mapping counts as one for writing, unless the kernel knows better.
        holders = {
            Holder(pid, _name(pid), writes and state != "read")
            for pid, writes in writers[key].items()
        }
        if state == "written" and not any(one.writes for one in holders):
            holders.add(Holder(0, "", True))
        elif state == "read" and not holders:
            holders.add(Holder(0, "", False))
        out |= dict.fromkeys(names, holders)
    return out


def _look_at_descriptors(pid: int, writers: dict[FileId, dict[int, bool]]) -> None:
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it ended, or this process may not look at it
        return
    own = pid == os.getpid()
    try:
        for number in os.listdir(folder):
            try:
                about = os.stat(number, dir_fd=folder)
            except OSError:
                continue
            holders = writers.get((about.st_dev, about.st_ino))
            if holders is None:
                continue
            flags = _flags(pid, number)
            if flags & os.O_PATH or (own and flags & os.O_ACCMODE == os.O_RDONLY):
                continue  # it names the file and no more; or it is a descriptor of this look's
            holders[pid] = holders.get(pid, False) or flags & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        pass
    finally:
        os.close(folder)


def _flags(pid: int, number: str) -> int:
    try:
        with open(f"/proc/{pid}/fdinfo/{number}", "rb") as file:
            found = re.search(rb"^flags:\s*([0-7]+)", file.read(), re.MULTILINE)
    except OSError:
        return os.O_PATH  # closed meanwhile
    return int(found[1], 8) if found else os.O_RDWR


def _look_at_mappings(
    pid: int, writers: dict[FileId, dict[int, bool]], wanted: set[FileId]
) -> None:
    """Lines are chosen by inode, and what is mapped there is asked then: some file systems show
    other device numbers in ``maps`` than in stat(2).
    """
    with suppress(OSError):
        with open(f"/proc/{pid}/maps", "rb") as file:
            text = file.read()
        inodes = {b" %d " % inode for _, inode in wanted}
        if not any(inode in text for inode in inodes):
            return
        for line in _lines_with(text, inodes):
            with suppress(OSError):
                about = os.stat(f"/proc/{pid}/map_files/{_span(line)}")
                key = about.st_dev, about.st_ino
                if key in wanted:
                    writers[key][pid] = writers[key].get(pid, False) or bool(_SHARED.match(line))


def _lines_with(text: bytes, words: set[bytes]) -> Iterator[bytes]:
    for line in text.split(b"\n"):
        if any(word in line for word in words):
            yield line


def _span(line: bytes) -> str:
    """Return the name in map_files: as in maps, without leading zeros."""
    start, _, end = line.split(b" ", 1)[0].partition(b"-")
    return f"{int(start, 16):x}-{int(end, 16):x}"


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            raw = file.read().rstrip(b"\n")
    except OSError:
        return "ended"
    return "".join(sign if sign.isprintable() else "?" for sign in raw.decode(errors="replace"))


def _is_ending(holder: Holder) -> bool:
    """Return whether it has been killed: its files are closed after its memory is freed, which
    takes a while for a large process.

    For an invisible holder this is unknown; most often it is a process that ended between the
    kernel's answer and the search.
    """
    pid = holder.pid
    try:
        if not pid or procfs.is_over(pid) or procfs.is_zombie(pid):
            return True
        with open(f"/proc/{pid}/status", "rb") as file:
            pending = re.findall(rb"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except (NotFound, OSError):
        return True
    return any(int(bits, 16) & _SIGKILL_BIT for bits in pending)
