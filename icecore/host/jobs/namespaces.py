"""The namespaces of a job, and the options that tell CRIU of them. What is not dumped with the job
is named at the dump and supplied anew at each restore.

- pid, ipc: CRIU dumps and makes them itself.
- network: external to CRIU (``--external net[INODE]:NAME``); a restore gets a fresh one with
  loopback up.
- private root: the host's root and mounts, bound, with the job's own /proc, /dev/pts and /dev/shm.
  The binds are external (``--external mnt[…]``); the directory of the instance is bound at
  `INSTANCE_MOUNT`, so that a restore gives each instance its own logs there. CRIU keeps the content
  of the private /dev/shm in its images.

- tmp: directories of the instance are bound over /tmp and /var/tmp (`icecore.host.jobs.temporary`).

- copies: an instance may see some files as copies of its own (``restore --files-to``), which are
  bound over them (`icecore.host.jobs.mounts`); those that the snapshot's images do not have yet are
  added to them.

Without a private root, a tree with a private tmp or copies shares a mount namespace with the CRIU
that restores or dumps it. It differs from the host's in these binds alone, so CRIU dumps no mounts.
In a private root the binds are external mounts, as its other binds are.

Without a private root the instance's files (logs, status, init) are known to CRIU by path, and a
restore gives it the new instance's as inherited descriptors. CRIU then checks neither size nor
flags: they must be opened as the job had them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from icecore.errors import MissingTool, RestoreRefused, UsageError
from icecore.host.kernel import procfs
from icecore.private import make_parents, require_own

if TYPE_CHECKING:
    from icecore.host.jobs.logs import Stream

#: Where a job with a private root sees the directory of its instance.
INSTANCE_MOUNT = "/run/icecore/job"
#: Files of an instance that its processes have open: name in the directory → open(2) flags.
OWN_FILES = {
    "stdout.log": os.O_WRONLY | os.O_APPEND,
    "stderr.log": os.O_WRONLY | os.O_APPEND,
    "status": os.O_WRONLY | os.O_APPEND,
    "icecore-init": os.O_RDONLY,
}

_NETWORK_NAME = "icecore-network"
_INSTANCE_NAME = "icecore-instance"
_COPY_NAME = "icecore-copy-{}"
_TMP_NAME = "icecore{}"
#: What CRIU's option syntax cannot say of a mount point.
_UNSPEAKABLE = re.compile(r"[\]:\s]")
# File systems of the kernel's own that no job keeps data in; "cgroup" (version 1) would be a dozen
# mounts that another host lacks.
_NOT_BOUND = frozenset(
    (
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "configfs",
        "debugfs",
        "efivarfs",
        "fusectl",
        "mqueue",
        "nfsd",
        "nsfs",
        "proc",
        "pstore",
        "rpc_pipefs",
        "securityfs",
        "selinuxfs",
        "tracefs",
    )
)
OWN_MOUNTS = ("/proc", "/dev/pts", "/dev/shm", "/dev/mqueue", "/run/icecore")


class Isolation(msgspec.Struct, frozen=True):
    """The namespaces that a job gets.

    Attributes:
        pid: Its own process ids: it can then be restored anywhere and several times at once.
        ipc: Its own System V IPC and POSIX message queues.
        network: A network of its own that has loopback only.
        root: A mount namespace with a private root (see the module); needs ``pid``.
        tmp: A /tmp and a /var/tmp of its own.
    """

    pid: bool = True
    ipc: bool = True
    network: bool = False
    root: bool = False
    tmp: bool = False

    def __post_init__(self) -> None:
        if self.root and not self.pid:
            raise UsageError(
                "a private root needs its own pid namespace", cure="leave the pid namespace on"
            )

    def names(self) -> list[str]:
        """Return the namespaces by launch.py's names."""
        pairs = (
            ("pid", self.pid),
            ("ipc", self.ipc),
            ("network", self.network),
            ("mount", self.root or self.tmp),
        )
        return [name for name, own in pairs if own]


class RunRecord(msgspec.Struct, frozen=True):
    """How a job was started: all that a restore needs besides CRIU's images. A snapshot records it as
    `icecore.store.format.contract.Run`, which has the same fields and says which values are valid.

    Attributes:
        name: The job's name.
        command: Its command line.
        cwd: The directory in which it was started.
        isolation: Its namespaces.
        files: Each of `OWN_FILES` → its path in CRIU's images, which is the path that the job's
            processes see.
        binds: The host's mount points that were bound into its private root, parents first.
        init: The init's program: a restore runs the very same bytes, whatever is installed there.
        files_to: Directory of the instance's own copies of files, each under its whole path; empty:
            it has none.
        copies: The files, by the path at which the processes see them.
        user, user_name: Whose job it is: the uid with which its command was started, and its name.
        data: Directories whose content is part of each snapshot, as the processes see them.
        log_limit: Size limit of each log, in bytes; 0: none.
        log_start: Of a snapshot: the offset before which output was removed from each log.
    """

    name: str
    command: list[str]
    cwd: str
    isolation: Isolation
    files: dict[str, str]
    binds: list[str]
    init: bytes
    files_to: str = ""
    copies: list[str] = msgspec.field(default_factory=list)
    user: int = 0
    user_name: str = "root"
    data: list[str] = msgspec.field(default_factory=list)
    log_limit: int = 0
    log_start: dict[Stream, int] = msgspec.field(default_factory=dict)

    @property
    def tmp(self) -> list[str]:
        """Return the private temporary directories among ``data``."""
        if not self.isolation.tmp:
            return []
        from icecore.host.jobs import temporary  # few jobs have them

        return temporary.private_points(self.data)

    def covers(self, directory: Path) -> list[tuple[str, str]]:
        """Return ``(source, mount point)`` of what is bound over ``tmp`` for an instance.

        Args:
            directory: The instance's.
        """
        from icecore.host.jobs import temporary

        return temporary.covers(directory, self.tmp)

    @property
    def own_view(self) -> bool:
        """Return whether the job has a mount namespace, but no private root."""
        return bool(self.copies or self.tmp) and not self.isolation.root

    def is_own(self, path: str) -> bool:
        """Return whether a path in CRIU's images is the instance's own: nothing may be read or put
        back at that path of the host.

        These are `OWN_FILES`, whatever lies in its own temporary directories, and in a private root
        on its private mounts (CRIU's images hold what is in them).
        """
        if path in self.files.values():
            return True
        own = (*(OWN_MOUNTS if self.isolation.root else ()), *self.tmp)
        return any(path == point or path.startswith(f"{point}/") for point in own)


def can_cover(path: str, isolation: Isolation) -> bool:
    """Return whether a job with this isolation can see a copy at a path: CRIU must be able to name
    it.
    """
    return not isolation.root or not _UNSPEAKABLE.search(path)


def init_program() -> Path:
    """Return the job init of this installation (init.c).

    Raises:
        MissingTool: It was not built.
    """
    path = Path(__file__).with_name("icecore-init")
    if not os.access(path, os.X_OK):
        raise MissingTool(
            f"the job init {path} was not built",
            cure="install a C compiler ('apt-get install gcc libc6-dev'), then install icecore again",
        )
    return path


def own_paths(directory: Path, isolation: Isolation) -> dict[str, str]:
    """Map each of `OWN_FILES` of the instance in ``directory`` to the path by which its processes
    (and CRIU's images) know it.
    """
    seen = INSTANCE_MOUNT if isolation.root else str(directory)
    return {name: f"{seen}/{name}" for name in OWN_FILES}


def bindable_mounts(hidden: Sequence[str] = ()) -> list[str]:
    """Return the mount points of this process that are bound into a private root, parents first,
    without "/".

    Left out: what the private root has anew, the kernel's own file systems, and paths that CRIU's
    option syntax cannot say.

    Args:
        hidden: Directories that are covered: what is mounted in them is left out, too.
    """
    found: list[str] = []
    for mount in procfs.mounts():
        point = mount.point
        own = any(point == own or point.startswith(f"{own}/") for own in (*OWN_MOUNTS, *hidden))
        if (
            point == "/"
            or own
            or point in found
            or mount.kind in _NOT_BOUND
            or _UNSPEAKABLE.search(point)
        ):
            continue
        if os.path.lexists(point):  # else hidden under a later mount
            found.append(point)
    return sorted(found, key=lambda point: point.split("/"))


def private_mounts() -> list[tuple[str, str, str | None]]:
    """Return ``(mount point, type, options)`` of the fresh mounts of a private root."""
    mounts: list[tuple[str, str, str | None]] = [
        ("/proc", "proc", None),
        ("/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=0620"),
        ("/dev/shm", "tmpfs", "mode=1777"),
        ("/dev/mqueue", "mqueue", None),
    ]
    return [entry for entry in mounts if os.path.isdir(entry[0])]


def make_instance_mount() -> None:
    """Make the (empty, host-wide) directory on which every private root mounts its instance's."""
    make_parents(Path(INSTANCE_MOUNT))
    require_own(Path(INSTANCE_MOUNT))


def dump_options(pid: int, record: RunRecord) -> list[str]:
    """Return the options of `criu dump` for the job whose init is ``pid``, besides ``-t pid``.

    File locks are dumped, and unix sockets may lead outside (to a log daemon, say). Connections of
    a private network have both ends inside, so they are dumped established, and nothing from
    outside can reach it that a lock should keep out.
    """
    options = ["--ext-unix-sk", "--file-locks"]
    if record.isolation.network:
        inode = procfs.namespaces(pid)["net"]
        options += [
            "--external",
            f"net[{inode}]:{_NETWORK_NAME}",
            "--tcp-established",
            "--network-lock",
            "skip",
        ]
    if record.isolation.root:
        for point in record.binds:
            options += ["--external", f"mnt[{point}]:{point}"]
        options += ["--external", f"mnt[{INSTANCE_MOUNT}]:{_INSTANCE_NAME}"]
        for point in record.tmp:
            options += ["--external", f"mnt[{point}]:{_TMP_NAME.format(point.replace('/', '-'))}"]
        for number, path in enumerate(record.copies):
            options += ["--external", f"mnt[{path}]:{_COPY_NAME.format(number)}"]
    return options


def dump_prefix(pid: int, record: RunRecord) -> list[str]:
    """Return the command before ``criu dump``: CRIU must see the copies and temporary directories
    where the job whose init is ``pid`` sees them.

    Raises:
        MissingTool: nsenter is missing.
    """
    if not record.own_view:
        return []
    return [_nsenter(), f"--mount=/proc/{pid}/ns/mnt", "--"]


def _nsenter() -> str:
    found = shutil.which("nsenter")
    if found is None:
        raise MissingTool("nsenter is missing", cure="apt-get install util-linux")
    return found


class RestoreNamespaces:
    """The resources that `criu restore` needs for one new instance of a run: open until the restore
    has ended (a context manager).

    Args:
        record: From the snapshot, with the copies that the new instance gets.
        directory: The new instance's; its own files (`OWN_FILES`) must be there.
        dumped: The copies that the snapshot's instance had.

    Attributes:
        prefix: Command line to put before ``criu``: it enters the mount namespace in which the
            private root is being built.
        options: Options of ``criu restore``.
        pass_fds: Descriptors that ``criu`` must inherit under the same numbers.

    Raises:
        RestoreRefused: A mount point that the job had is missing here.
        OSError: The kernel refused a namespace or a mount.
    """

    def __init__(self, record: RunRecord, directory: Path, dumped: Sequence[str] = ()) -> None:
        from icecore.host.jobs.mounts import in_thread

        self._added: dict[str, str] = {}
        self.prefix: list[str] = []
        self.options = ["--ext-unix-sk", "--file-locks"]
        self._record = record
        self._view = -1
        self._fds: list[int] = []
        try:
            if record.isolation.network:
                fd = self._keep(in_thread(_new_network))
                self.options += ["--inherit-fd", f"fd[{fd}]:{_NETWORK_NAME}"]
                self.options += ["--tcp-established", "--network-lock", "skip"]
            if record.isolation.root:
                self._private_root(record, directory, dumped)
            else:
                own = (
                    in_thread(lambda: self._in_view(directory))
                    if record.own_view
                    else _open_own(directory)
                )
                for name, fd in own.items():
                    # CRIU's key is the path without its first slash.
                    self.options += [
                        "--inherit-fd",
                        f"fd[{self._keep(fd)}]:{record.files[name][1:]}",
                    ]
        except BaseException:
            self.close()
            raise

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _in_view(self, directory: Path) -> dict[str, int]:
        """Move the calling thread into the tree's mount namespace, and open the instance's own
        files there: CRIU finds files by mount.
        """
        from icecore.host.jobs.mounts import new_view

        nsenter = _nsenter()
        self._view = self._keep(new_view(self._record.covers(directory)))
        self.prefix = [nsenter, f"--mount=/proc/self/fd/{self._view}", "--"]
        return _open_own(directory)

    def bind_copies(self, images: Path) -> None:
        """Put the copies over the files, or, for a private root, have CRIU do so. They are written,
        and CRIU does not run yet.

        Args:
            images: CRIU's images.

        Raises:
            RestoreRefused: Processes of the job have mount namespaces of their own.
            OSError: A copy or what it is to cover is missing, or the kernel refused.
        """
        from icecore.host.jobs.mounts import bind

        if self._view >= 0 and self._record.copies:
            bind(self._view, self._record.files_to, self._record.copies)
        elif self._added:
            from icecore.host.criu.image_changes import add_external_mounts  # loads numpy

            add_external_mounts(images, self._added)

    def _private_root(self, record: RunRecord, directory: Path, dumped: Sequence[str]) -> None:
        missing = [point for point in record.binds if not os.path.lexists(point)]
        if missing:
            raise RestoreRefused(
                f"the job saw mounts that are missing here: {', '.join(missing)}",
                cure="mount the same file systems, or make empty directories (files) in their place",
            )
        from icecore.host.jobs.mounts import in_thread

        nsenter = _nsenter()
        make_instance_mount()
        root = directory / "root"
        root.mkdir(mode=0o700, exist_ok=True)
        # The bind on which CRIU builds is made in a mount namespace of its own: the host never sees
        # it, and it is gone with the last process in it.
        fd = self._keep(in_thread(lambda: _new_root(str(root))))
        self.prefix = [nsenter, f"--mount=/proc/self/fd/{fd}", "--"]
        self.options += ["--root", str(root), "--external", f"mnt[{_INSTANCE_NAME}]:{directory}"]
        for point in record.binds:
            self.options += ["--external", f"mnt[{point}]:{point}"]
        for source, point in record.covers(directory):
            name = _TMP_NAME.format(point.replace("/", "-"))
            self.options += ["--external", f"mnt[{name}]:{source}"]
        added = [path for path in record.copies if path not in dumped]
        for number, path in enumerate([*dumped, *added]):
            name = _COPY_NAME.format(number)
            # What is no copy any more is covered by the file itself.
            self.options += [
                "--external",
                f"mnt[{name}]:{record.files_to + path if path in record.copies else path}",
            ]
            if path in added:
                self._added[path] = name

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """See the class."""
        return tuple(self._fds)

    def close(self) -> None:
        """Close the descriptors; the restored tree has its own."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_own(directory: Path) -> dict[str, int]:
    """Open `OWN_FILES` of an instance as its processes have them open."""
    return {
        name: os.open(directory / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        for name, flags in OWN_FILES.items()
    }


def _new_network() -> int:
    from icecore.host.jobs import launch

    launch.unshare(launch.CLONE_NEWNET)
    launch.raise_loopback()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _new_root(root: str) -> int:
    from icecore.host.jobs import launch

    launch.unshare(launch.CLONE_NEWNS)
    launch.bind_root(root)
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
