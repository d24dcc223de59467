"""Open files as part of a consistent snapshot: which files the tree has open or mapped, and which of
them must be stored. The content of a writable file always must.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

import msgspec
from msgspec.structs import replace

from icecore.dumper.observe.temporary import MOST_TEMPORARY, TemporaryFiles
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, NotFound
from icecore.host.kernel import libc, procfs
from icecore.host.kernel.filesystem import may_be_in_memory
from icecore.host.kernel.map_files import MappedFiles
from icecore.host.kernel.timestamps import shows_later_writes
from icecore.store.format.manifest import FilePolicy, OpenFile

_DELETED = " (deleted)"
_PSEUDO = ("/proc/", "/sys/")
#: How /proc names memory that it shows as files: memfds, System V shared memory, rings of
#: asynchronous I/O; and shared anonymous memory, also on huge pages.
_MEMORY = ("/memfd:", "/SYSV", "/[aio]")
_ANONYMOUS = ("/dev/zero (deleted)", "/anon_hugepage (deleted)")
#: statfs(2): file systems that may be below /dev and whose regular files have no content of their
#: own: mqueue, devpts, proc, sysfs, cgroup and cgroup2.
_DEVICES = "/dev/"
_WITHOUT_CONTENT = (0x19800202, 0x1CD1, 0x9FA0, 0x62656572, 0x27E0EB, 0x63677270)


class FoundFile(msgspec.Struct, frozen=True):
    """A regular file that the tree has open or mapped.

    Attributes:
        about: The manifest's entry.
        reach: A path under /proc through which the file can be opened, whatever mount namespace it
            lies in.
        mapped_writable: Has a shared mapping that is or may become writable, so its mtime does not
            show whether it changed.
        deleted: It has no name left (CRIU keeps it as a ghost file), or lost this one (``links`` >
            0).
        links: Hard links left.
        lost: The paths under /proc through which it can be opened and that show a name it lost.
        changed_ns: Its ctime, ns since the epoch. Unlike the mtime, programs cannot set it.
        looked_ns: When the search that found it began, ns since the epoch.
        direct: It is open with O_DIRECT: a write changes the times before its data is there.
    """

    about: OpenFile
    reach: str
    mapped_writable: bool
    deleted: bool
    links: int
    changed_ns: int
    looked_ns: int
    lost: list[str] = msgspec.field(default_factory=list)
    direct: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode."""
        return self.about.device, self.about.inode


class Opened(msgspec.Struct, frozen=True):
    """What a process has open and mapped."""

    descriptors: Sequence[procfs.Descriptor]
    mappings: Sequence[procfs.Mapping]


def read_opened(
    pids: Iterable[int], maps: procfs.MapsReader, stop: threading.Event | None = None
) -> dict[int, Opened]:
    """Read what processes have open and mapped. Processes that have ended are left out.

    Args:
        stop: When set, reading ends.

    Raises:
        DumpFailed: ``stop`` was set.
    """
    found = {}
    for pid in pids:
        if stop is not None and stop.is_set():
            raise DumpFailed("the scan was stopped")
        with suppress(NotFound):
            found[pid] = Opened(procfs.descriptors(pid), maps.read(pid))
    return found


def find_files(
    opened: Mapping[int, Opened], options: DumpOptions, looked_ns: int
) -> list[FoundFile]:
    """Find every regular file that processes have open or mapped, once per inode, sorted by path.
    Pseudo files and devices are left out.

    Args:
        opened: What was read of each process.
        looked_ns: A time before the first of it was read, ns since the epoch.
    """
    found: dict[tuple[int, int], FoundFile] = {}
    direct: set[tuple[int, int]] = set()
    temporary = TemporaryFiles([*opened])
    with ExitStack() as owned:
        links = MappedFiles(owned)
        for pid, own in opened.items():
            # The process may end, but only before the window.
            with suppress(NotFound), procfs.looking_at(pid):
                for descriptor in own.descriptors:
                    if not stat.S_ISREG(descriptor.mode) or not descriptor.target.startswith("/"):
                        continue
                    writable = (descriptor.flags & os.O_ACCMODE) != os.O_RDONLY
                    if descriptor.flags & os.O_DIRECT:
                        direct.add((descriptor.device, descriptor.inode))
                    _add(
                        found,
                        f"/proc/{pid}/fd/{descriptor.number}",
                        descriptor.target,
                        writable,
                        False,
                        options,
                        temporary,
                        looked_ns,
                    )
                for mapping in own.mappings:
                    if not mapping.inode or not mapping.path.startswith("/"):
                        continue
                    reach = f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
                    key = (os.makedev(*mapping.device), mapping.inode)
                    known = key in found and not mapping.path.endswith(_DELETED)
                    if known and found[key].mapped_writable:
                        continue
                    shared_writable = _is_writable(pid, mapping, reach, links)
                    if known and not shared_writable:
                        continue
                    _add(
                        found,
                        reach,
                        mapping.path,
                        shared_writable,
                        shared_writable,
                        options,
                        temporary,
                        looked_ns,
                    )
    files = [replace(file, direct=file.identity in direct) for file in found.values()]
    return _bounded(sorted(files, key=lambda f: f.about.path))


def settle_temporary(
    files: Sequence[FoundFile],
    options: DumpOptions,
    recorded: Callable[[str], OpenFile | None],
    is_data: Callable[[str], bool],
) -> list[FoundFile]:
    """Decide which files are temporary where the tree alone does not tell. Return all files.

    A file that a restore has made before it started the processes is older than they are: it is
    temporary if it was in the parent snapshot. Data directories contain their files anyway.

    Args:
        recorded: Returns what the parent snapshot recorded of a path.
        is_data: Returns whether a path is in a data directory.
    """

    def was_temporary(about: OpenFile) -> bool:
        before = recorded(about.path)
        return before is not None and (before.temporary, before.size, before.mtime_ns) == (
            True,
            about.size,
            about.mtime_ns,
        )

    settled = []
    for file in files:
        about = file.about
        if about.temporary and is_data(about.path):
            file = _not_stored(file)
        elif (
            about.policy == "checked"
            and options.files == "content"
            and was_temporary(about)
            and not is_data(about.path)
        ):
            file = replace(file, about=replace(about, policy="content", temporary=True))
        settled.append(file)
    return _bounded(settled)


def _not_stored(file: FoundFile) -> FoundFile:
    """Return a temporary file as one that is only checked."""
    return replace(file, about=replace(file.about, policy="checked", temporary=False))


def _bounded(files: Sequence[FoundFile]) -> list[FoundFile]:
    """Return the files, of which so few are temporary that each window can read them: the smallest."""
    left, chosen = MOST_TEMPORARY, set()
    for file in sorted(files, key=lambda one: one.about.size):
        if file.about.temporary and file.about.size <= left:
            left -= file.about.size
            chosen.add(file.identity)
    return [
        _not_stored(file) if file.about.temporary and file.identity not in chosen else file
        for file in files
    ]


def _is_special(target: str, reach: str) -> bool:
    """Return whether a file that /proc shows belongs to the kernel, or is memory without a name.

    Args:
        target: The path that /proc shows.
        reach: A path under /proc through which it can be opened.
    """
    if target.startswith((*_MEMORY, *_PSEUDO)) or target in _ANONYMOUS:
        return True
    if not target.startswith(_DEVICES):
        return False
    try:
        return libc.file_system(reach) in _WITHOUT_CONTENT
    except (FileNotFoundError, ProcessLookupError):
        return True  # closed or unmapped since, which happens only before the window


def _is_writable(pid: int, mapping: procfs.Mapping, reach: str, links: MappedFiles) -> bool:
    """Return whether a mapping is shared, and is writable or can be made so by mprotect(2).

    The file's times may not show stores through it: those to dirty pages do not change them.

    Args:
        reach: The link in /proc/PID/map_files.
    """
    if not mapping.flags & procfs.MAP_SHARED:
        return False
    if mapping.protection & procfs.PROT_WRITE:
        return True
    return not _is_special(mapping.path, reach) and links.opened_for_writing(pid, mapping)


def _add(
    found: dict[tuple[int, int], FoundFile],
    reach: str,
    target: str,
    writable: bool,
    mapped: bool,
    options: DumpOptions,
    temporary: TemporaryFiles,
    looked_ns: int,
) -> None:
    try:
        about = os.stat(reach)
    except (FileNotFoundError, ProcessLookupError):
        return  # closed or unmapped since, which happens only before the window
    deleted = target.endswith(_DELETED) and not _is_there(reach, target, about)
    path = target.removesuffix(_DELETED) if deleted else target
    if not stat.S_ISREG(about.st_mode) or _is_special(target, reach):
        return
    lost = [reach] if deleted else []
    before = found.get((about.st_dev, about.st_ino))
    if before is not None:
        writable = writable or before.about.writable
        mapped = mapped or before.mapped_writable
        before.lost.extend(lost)
        lost = before.lost
        if deleted and not before.deleted:
            pass  # use the lost name, under which a restore makes the file
        elif before.about.writable == writable and before.mapped_writable == mapped:
            return
        else:
            reach, path, deleted = before.reach, before.about.path, before.deleted
    policy: FilePolicy = "checked"
    made = False
    if deleted and about.st_nlink == 0:
        policy = "absent"  # CRIU's ghost file has the content
    elif (writable and options.files == "content") or deleted or options.with_files:
        policy = "content"
    elif options.files == "content" and temporary.contain(path, about):
        policy, made = "content", True
    found[about.st_dev, about.st_ino] = FoundFile(
        OpenFile(
            path=path,
            size=about.st_size,
            mtime_ns=about.st_mtime_ns,
            inode=about.st_ino,
            device=about.st_dev,
            mode=stat.S_IMODE(about.st_mode),
            user=about.st_uid,
            group=about.st_gid,
            writable=writable,
            policy=policy,
            mapped=mapped,
            temporary=made,
        ),
        reach,
        mapped,
        deleted,
        about.st_nlink,
        about.st_ctime_ns,
        looked_ns,
        lost,
    )


def _is_there(reach: str, target: str, about: os.stat_result) -> bool:
    """Return whether a file really has this name, which ends like that of a deleted file."""
    if about.st_nlink == 0:
        return False
    process = reach.split("/")[2]
    try:
        there = os.stat(f"/proc/{process}/root{target}")
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (about.st_dev, about.st_ino)


def ghosts(files: Sequence[FoundFile]) -> list[FoundFile]:
    """Return the files that have no name left."""
    return [f for f in files if f.deleted and f.links == 0]


def unchanged_since(file: FoundFile, before: OpenFile | None, captured_ns: int) -> bool:
    """Return whether a file certainly has the content that was stored before: same inode, size and
    mtime, and a ctime well before that capture.

    A store through a mapping changes the times only if it is the first one to its page. A process
    that had the file mapped at the capture may have written since, and unmapped it. For files in
    memory, even the first store leaves the times as they are if the page was read before; a file
    that is open for reading now may have been open for writing in between.

    Args:
        captured_ns: When the earlier content was read, ns since the epoch.
    """
    if before is None or file.mapped_writable or before.policy != "content":
        return False
    if before.writable and before.mapped:
        return False
    now = file.about
    same = (now.inode, now.device, now.size, now.mtime_ns) == (
        before.inode,
        before.device,
        before.size,
        before.mtime_ns,
    )
    return (
        same
        and shows_later_writes(file.changed_ns, captured_ns)
        and not may_be_in_memory(file.reach)
    )


def tree_pids(root: int) -> dict[int, int]:
    """Map the host pids of a tree to the pids in its own pid namespace (CRIU's image ids)."""
    out = {}
    for pid in procfs.tree(root):
        try:
            out[pid] = procfs.status(pid).own_pid
        except NotFound:
            continue
    return out
