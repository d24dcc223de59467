"""Find what surrounds the job's open files: directories, FIFOs, names of sockets, pid and lock files,
empty temporary directories, and build ids. They are read after the window, from CRIU's images and the
file system.

The images tell what CRIU will look for. The job runs meanwhile: a directory that it has removed
since is recorded with the owner of the directory's content.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from icecore.dumper.observe.temporary import began_ns, temporary_folders
from icecore.errors import NotFound
from icecore.host.criu.images import (
    VMA_FILE_PRIVATE,
    VMA_FILE_SHARED,
    load_files,
    load_mm,
    load_remaps,
)
from icecore.host.criu.opened_images import OpenedImages
from icecore.host.criu.socket_images import load_unix
from icecore.host.kernel import procfs
from icecore.host.kernel.elf import build_id
from icecore.host.kernel.filesystem import birth_ns
from icecore.store.format.manifest import OpenFile, Process
from icecore.store.format.surroundings import (
    MAX_SMALL,
    Fifo,
    Folder,
    SmallFile,
    SocketName,
    Surroundings,
)

#: File systems of the kernel; a restore makes nothing there. Paths below /dev may be on other file
#: systems.
_PSEUDO = ("/proc", "/sys")
_DEVICES = "/dev"
_OF_DEVICES = frozenset(("devtmpfs", "devpts", "mqueue", "hugetlbfs", "proc", "sysfs"))
#: Where daemons put their pid files.
_PID_FOLDERS = ("/run", "/var/run")
_PID_NAMES = (".pid", ".lock", "-lock")
#: Bounds of the search, because files of other processes could make it long.
_MOST_SMALL, _MOST_TEMPORARY, _DEEPEST = 256, 1024, 8
_MOST_LINKS = 40


class _Search(msgspec.Struct):
    """Collects the surroundings of one tree.

    Attributes:
        top: A path under /proc through which the tree's root directory is reached.
        is_own: Whether a path is the instance's own.
        users: Users of the job's processes, except icecore's init.
        mounts: Mount points of the tree → types of file systems.
    """

    top: str
    is_own: Callable[[str], bool]
    users: frozenset[int]
    mounts: dict[str, str]
    folders: dict[str, Folder] = msgspec.field(default_factory=dict)
    fifos: dict[str, Fifo] = msgspec.field(default_factory=dict)
    sockets: dict[str, SocketName] = msgspec.field(default_factory=dict)
    small: dict[str, SmallFile] = msgspec.field(default_factory=dict)

    def skips(self, path: str) -> bool:
        """Return whether a restore makes nothing at a path."""
        if path == "/" or not path.startswith("/") or self.is_own(path):
            return True
        if not path.startswith(f"{_DEVICES}/"):
            return path in (*_PSEUDO, _DEVICES) or path.startswith(tuple(f"{p}/" for p in _PSEUDO))
        return path in self.mounts or self._mount(path) in _OF_DEVICES

    def _mount(self, path: str) -> str:
        """Return the type of the file system of a path."""
        above = [point for point in self.mounts if path.startswith(f"{point.rstrip('/')}/")]
        return self.mounts[max(above, key=len)] if above else ""

    def stat(self, path: str) -> os.stat_result | None:
        """Return what is at a path of the tree; None: nothing, or it cannot be examined."""
        try:
            return os.stat(self.top + path, follow_symlinks=False)
        except OSError:
            return None

    def resolve(self, path: str) -> str:
        """Return a path of the tree without symbolic links. The kernel shows those of open files
        so, but the name of a socket as it was bound.
        """
        pending, found, links = [*reversed(path.split("/"))], "", 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                found = os.path.dirname(found) if found not in ("", "/") else ""
                continue
            here = f"{found.rstrip('/')}/{part}"
            about = self.stat(here)
            if about is None or not stat.S_ISLNK(about.st_mode) or links == _MOST_LINKS:
                found = here
                continue
            links += 1
            target = os.readlink(self.top + here)
            found = "" if target.startswith("/") else found
            pending += reversed(target.split("/"))
        return found or "/"

    def folder(self, path: str, user: int, group: int, mode: int = 0o755) -> None:
        """Record a directory and those above it.

        Args:
            user, group, mode: Of what lies in it, or its own, if it is gone by now.
        """
        if self.skips(path) or path in self.folders:
            return
        self.folder(os.path.dirname(path), user, group)
        about = self.stat(path)
        if about is not None and stat.S_ISDIR(about.st_mode):
            user, group, mode = about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)
        time = about.st_mtime_ns if about is not None else 0
        self.folders[path] = Folder(path, mode, user, group, time)

    def opened(self, path: str, mode: int) -> None:
        """Record a directory that CRIU opens: it must have the mode of the images."""
        if self.skips(path):
            return
        self.folder(path, *self._owner(path), stat.S_IMODE(mode))
        known = self.folders[path]
        self.folders[path] = Folder(
            path, stat.S_IMODE(mode), known.user, known.group, known.mtime_ns, True
        )

    def around(self, path: str) -> None:
        """Record the parent directories of a path."""
        if not self.skips(path):
            self.folder(os.path.dirname(path), *self._owner(path))

    def _owner(self, path: str) -> tuple[int, int]:
        about = self.stat(path)
        return (about.st_uid, about.st_gid) if about is not None else (min(self.users), 0)


def find_surroundings(
    images: Path,
    pids: Mapping[int, int],
    processes: Sequence[Process],
    files: Sequence[OpenFile],
    removed: Set[str],
    before: Surroundings | None,
    is_own: Callable[[str], bool],
) -> Surroundings:
    """Find the surroundings of a tree.


    Args:
        images: CRIU's complete images.
        pids: Host pid → image id, root first.
        processes: Of the manifest.
        files: Of the manifest.
        removed: Paths of deleted files whose directories existed in the window.
        before: What the parent snapshot recorded. Its temporary directories were made before this
            instance began, if it was restored.
        is_own: Whether a path of the tree belongs to the instance itself; a restore makes nothing
            there.
    """
    root = next(iter(pids))
    first = 1 if processes and is_own(processes[0].executable) else 0
    users = frozenset(one.user for one in processes[first:] if one.alive) or frozenset({0})
    search = _Search(f"/proc/{root}/root", is_own, users, _mounts(root))
    _from_images(search, images, pids.values())
    for file in files:
        if file.policy != "absent" or file.path in removed:
            search.around(file.path)
    _sockets(search, images)
    places = _job_places(search, files)
    temporary = temporary_folders([root, *pids])
    _small_files(search, [*places, *_PID_FOLDERS, *temporary], frozenset(map(str, pids.values())))
    _empty_folders(search, root, temporary, before)
    return Surroundings(
        [search.folders[path] for path in sorted(search.folders, key=_depth)],
        list(search.fifos.values()),
        list(search.sockets.values()),
        list(search.small.values()),
        _programs(search.top, images, pids.values(), files),
    )


def _mounts(root: int) -> dict[str, str]:
    """Map the mount points of a tree, or of this process if the tree has ended, to the types of
    their file systems.
    """
    try:
        found = procfs.mounts(root)
    except OSError:
        found = procfs.mounts()
    return {mount.point: mount.kind for mount in found}


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path


def _from_images(search: _Search, images: Path, numbers: Iterable[int]) -> None:
    """Record the working directories of processes and the directories and FIFOs that they have open."""
    gone = {remap.original for remap in load_remaps(images)}
    opened = OpenedImages(images)
    for number in numbers:
        files = [*opened.descriptors(number).values(), *opened.directories(number).values()]
        for file in (one.file for one in files):
            if file.id in gone or file.external:
                continue
            if stat.S_ISDIR(file.mode):
                search.opened(file.path, file.mode)
            elif stat.S_ISFIFO(file.mode) and not search.skips(file.path):
                search.around(file.path)
                user, group = search._owner(file.path)
                search.fifos[file.path] = Fifo(file.path, stat.S_IMODE(file.mode), user, group)


def _sockets(search: _Search, images: Path) -> None:
    for one in load_unix(images):
        if not one.is_bound or search.skips(one.path):
            continue
        named = os.path.dirname(one.path)
        folder = search.resolve(named)
        search.folder(folder, one.user, one.group)
        search.sockets[one.path] = SocketName(
            one.path, one.mode, one.user, one.group, "" if folder in (named, "/") else folder
        )


def _job_places(search: _Search, files: Sequence[OpenFile]) -> list[str]:
    """Return the directories in which the job has something of its own: a name of a socket, a FIFO,
    a file that it writes to, or that it works in.
    """
    written = [file.path for file in files if file.writable and file.policy != "absent"]
    named = {os.path.dirname(path) for path in (*search.fifos, *written)}
    named |= {os.path.dirname(one.place) for one in search.sockets.values()}
    named |= {path for path, folder in search.folders.items() if folder.opened}
    return sorted(named)


def _small_files(search: _Search, folders: Iterable[str], pids: frozenset[str]) -> None:
    """Record pid and lock files: short files whose first word is the pid of a process of the tree,
    and that belong to one of its users.
    """
    for folder in dict.fromkeys(folders):
        if search.is_own(folder):
            continue
        with suppress(OSError), os.scandir(search.top + folder) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.name.endswith(_PID_NAMES) and not search.skips(path):
                    _small_file(search, path, pids)
        if len(search.small) > _MOST_SMALL:
            return


def _small_file(search: _Search, path: str, pids: frozenset[str]) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError), open(os.open(search.top + path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in search.users:
            return
        data = file.read(MAX_SMALL + 1)
        words = data.split(maxsplit=1)
        if not words or words[0].decode("latin-1") not in pids or len(data) > MAX_SMALL:
            return
        search.around(path)
        search.small[path] = SmallFile(
            path,
            stat.S_IMODE(about.st_mode),
            about.st_uid,
            about.st_gid,
            about.st_mtime_ns,
            base64.b64encode(data).decode(),
        )


def _empty_folders(
    search: _Search, root: int, places: Iterable[str], before: Surroundings | None
) -> None:
    """Record private, empty directories among temporary files that a user of the tree has made
    since its first process began, or that the parent snapshot recorded.
    """
    known = {folder.path for folder in before.folders} if before is not None else set()
    try:
        began = began_ns(root)
    except NotFound:
        return

    def is_jobs(path: str, about: os.stat_result) -> bool:
        if about.st_uid not in search.users or search.skips(path):
            return False
        return path in known or (about.st_mode & 0o077 == 0 and _born(search.top + path) >= began)

    # Those that the job has made for itself may hold some, too.
    made = [path for path in search.folders if _born(search.top + path) >= began]
    for place in (*places, *made):
        for path, about in islice(_skeletons(search, place, is_jobs, 0), _MOST_TEMPORARY):
            search.folder(path, about.st_uid, about.st_gid)


def _skeletons(
    search: _Search, top: str, is_jobs: Callable[[str, os.stat_result], bool], depth: int
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the empty directories below one, through directories of the job only."""
    try:
        with os.scandir(search.top + top) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in names:
        path = os.path.join(top, name)
        about = search.stat(path)
        if about is None or not is_jobs(path, about):
            continue
        with suppress(OSError):
            if not os.listdir(search.top + path):
                yield path, about
            elif depth < _DEEPEST:
                yield from _skeletons(search, path, is_jobs, depth + 1)


def _born(path: str) -> int:
    """Return when a file was made, ns since the epoch; 0: unknown."""
    try:
        return birth_ns(path)
    except OSError:
        return 0


def _programs(
    top: str, images: Path, numbers: Iterable[int], files: Sequence[OpenFile]
) -> dict[str, str]:
    """Map each program and library that processes have mapped to its build id."""
    by_id = {file.id: file.path for file in load_files(images) if not file.external}
    mapped: set[int] = set()
    for number in numbers:
        try:
            space = load_mm(images, number)
        except FileNotFoundError:
            continue  # it had ended
        of_file = space.vmas["status"] & (VMA_FILE_PRIVATE | VMA_FILE_SHARED) != 0
        runs = space.vmas["protection"] & procfs.PROT_EXEC != 0
        mapped |= {space.executable, *map(int, space.vmas["shmid"][of_file & runs])}
    paths = {by_id[one] for one in mapped if one in by_id}
    return {
        file.path: _build_id(top, file)
        for file in files
        if file.path in paths and not file.writable and file.policy != "absent"
    }


def _build_id(top: str, file: OpenFile) -> str:
    """Return the build id of a file, if it is still the one that was mapped."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(top + file.path, flags)
    except OSError:
        return ""
    try:
        about = os.fstat(descriptor)
        same = (about.st_dev, about.st_ino) == (file.device, file.inode)
        return build_id(descriptor) if same else ""
    except OSError:
        return ""
    finally:
        os.close(descriptor)
