"""What a job has for itself and how CRIU is told; rule: what is not dumped with the job is named at the dump and given anew at every restore.

- pid, ipc: CRIU dumps and makes them itself.
- network: external to CRIU (``--external net[INODE]:NAME``); a restore gets a fresh one with loopback up.
- private root: the host's root and mounts, bound, with the job's own /proc, /dev/pts and /dev/shm. The binds are external
  (``--external mnt[…]``); the directory of the instance is bound at `INSTANCE_MOUNT`, so that a restore gives each
  instance its own logs there. CRIU keeps the content of the private /dev/shm in its images.

Without a private root the instance's files (logs, status, init) are known to CRIU by path, and a restore gives it the new
instance's as inherited descriptors. CRIU then checks neither size nor flags: they must be opened as the job had them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from icecore.errors import MissingTool, RestoreRefused, UsageError
from icecore.host import launch
from icecore.private import make_parents, require_own

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
# File systems of the kernel's own that no job keeps data in; "cgroup" (version 1) would be a dozen mounts that another host lacks.
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
_OWN_MOUNTS = ("/proc", "/dev/pts", "/dev/shm", "/dev/mqueue", "/run/icecore")


@dataclass(frozen=True)
class Isolation:
    """Which namespaces a job gets.

    Attributes:
        pid: Its own process ids: it can then be restored anywhere and several times at once.
        ipc: Its own System V IPC and POSIX message queues.
        network: A network of its own that has loopback only.
        root: A mount namespace with a private root (see the module); needs ``pid``.
    """

    pid: bool = True
    ipc: bool = True
    network: bool = False
    root: bool = False

    def __post_init__(self) -> None:
        if self.root and not self.pid:
            raise UsageError("a private root needs its own pid namespace", cure="leave the pid namespace on")

    def names(self) -> list[str]:
        """The namespaces in launch.py's words."""
        pairs = (("pid", self.pid), ("ipc", self.ipc), ("network", self.network), ("mount", self.root))
        return [name for name, own in pairs if own]


@dataclass(frozen=True)
class RunRecord:
    """What a snapshot keeps of how its job was started: all that a restore needs beside CRIU's images.

    Attributes:
        name: The job's name.
        command: Its command line.
        cwd: The directory in which it was started.
        isolation: Its namespaces.
        files: Each of `OWN_FILES` → its path in CRIU's images, which is the path that the job's processes see.
        binds: The host's mount points that were bound into its private root, parents first.
        init: The init's program: a restore runs the very same bytes, whatever is installed there.
    """

    name: str
    command: list[str]
    cwd: str
    isolation: Isolation
    files: dict[str, str]
    binds: list[str]
    init: bytes

    def is_own(self, path: str) -> bool:
        """Whether a path in CRIU's images is the instance's own: nothing may be read or put back at that path of the host.

        These are `OWN_FILES`, and in a private root whatever lies on its private mounts (CRIU's images hold what is in them).
        """
        if path in self.files.values():
            return True
        own = _OWN_MOUNTS if self.isolation.root else ()
        return any(path == point or path.startswith(f"{point}/") for point in own)

    def encode(self) -> str:
        """As text, for the manifest."""
        return json.dumps({**asdict(self), "init": base64.b64encode(self.init).decode()})

    @classmethod
    def decode(cls, text: str) -> RunRecord:
        """The inverse of `encode`.

        Raises:
            ValueError: It is none.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            isolation = Isolation(**fields.pop("isolation"))
            init = base64.b64decode(fields.pop("init"), validate=True)
            record = cls(**fields, isolation=isolation, init=init)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not the record of a run: {error}") from error
        if set(record.files) != set(OWN_FILES) or not all(path.startswith("/") for path in record.files.values()):
            raise ValueError("not the record of a run: its files are not an instance's")
        return record


def init_program() -> Path:
    """The job init that came with the installation (init.c).

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
    """Each of `OWN_FILES` of the instance in ``directory`` → the path under which its processes (and CRIU's images) know it."""
    seen = INSTANCE_MOUNT if isolation.root else str(directory)
    return {name: f"{seen}/{name}" for name in OWN_FILES}


def bindable_mounts() -> list[str]:
    """The mount points of this process that a private root gets bound, parents first, without "/".

    Left out: what the private root has anew, the kernel's own file systems, and paths that CRIU's option syntax cannot say.
    """
    found: list[str] = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
            own = any(point == own or point.startswith(f"{own}/") for own in _OWN_MOUNTS)
            if point == "/" or own or point in found or after.split()[0] in _NOT_BOUND or re.search(r"[\]:\s]", point):
                continue
            if os.path.lexists(point):  # else hidden under a later mount
                found.append(point)
    return sorted(found, key=lambda point: point.split("/"))


def private_mounts() -> list[tuple[str, str, str | None]]:
    """``(mount point, type, options)`` of what a private root has anew."""
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
    """What `criu dump` must be told of the job whose init is ``pid``, beside ``-t pid``.

    File locks are dumped, and unix sockets may lead outside (to a log daemon, say). Connections of a private network have
    both ends inside, so they are dumped established, and nothing from outside can reach it that a lock should keep out.
    """
    options = ["--ext-unix-sk", "--file-locks"]
    if record.isolation.network:
        inode = os.stat(f"/proc/{pid}/ns/net").st_ino
        options += ["--external", f"net[{inode}]:{_NETWORK_NAME}", "--tcp-established", "--network-lock", "skip"]
    if record.isolation.root:
        for point in record.binds:
            options += ["--external", f"mnt[{point}]:{point}"]
        options += ["--external", f"mnt[{INSTANCE_MOUNT}]:{_INSTANCE_NAME}"]
    return options


class RestoreNamespaces:
    """What `criu restore` needs for one new instance of a run: open until the restore has ended (a context manager).

    Args:
        record: From the snapshot.
        directory: The new instance's; its own files (`OWN_FILES`) must be there.

    Attributes:
        prefix: Command line to put before ``criu``: it enters the mount namespace in which the private root is being built.
        options: Options of ``criu restore``.
        pass_fds: Descriptors that ``criu`` must inherit under the same numbers.

    Raises:
        RestoreRefused: A mount point that the job had is missing here.
        OSError: The kernel refused a namespace or a mount.
    """

    def __init__(self, record: RunRecord, directory: Path) -> None:
        self.prefix: list[str] = []
        self.options = ["--ext-unix-sk", "--file-locks"]
        self._fds: list[int] = []
        try:
            if record.isolation.network:
                fd = self._keep(_in_thread(_new_network))
                self.options += ["--inherit-fd", f"fd[{fd}]:{_NETWORK_NAME}"]
                self.options += ["--tcp-established", "--network-lock", "skip"]
            if record.isolation.root:
                self._private_root(record, directory)
            else:
                for name, flags in OWN_FILES.items():
                    fd = self._keep(os.open(directory / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
                    # CRIU's key is the path without its first slash.
                    self.options += ["--inherit-fd", f"fd[{fd}]:{record.files[name][1:]}"]
        except BaseException:
            self.close()
            raise

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _private_root(self, record: RunRecord, directory: Path) -> None:
        missing = [point for point in record.binds if not os.path.lexists(point)]
        if missing:
            raise RestoreRefused(
                f"the job saw mounts that are missing here: {', '.join(missing)}",
                cure="mount the same file systems, or make empty directories (files) in their place",
            )
        nsenter = shutil.which("nsenter")
        if nsenter is None:
            raise MissingTool("nsenter is missing", cure="apt-get install util-linux")
        make_instance_mount()
        root = directory / "root"
        root.mkdir(mode=0o700, exist_ok=True)
        # The bind on which CRIU builds is made in a mount namespace of its own: the host never sees it, and it is gone with the last process in it.
        fd = self._keep(_in_thread(lambda: _new_root(str(root))))
        self.prefix = [nsenter, f"--mount=/proc/self/fd/{fd}", "--"]
        self.options += ["--root", str(root), "--external", f"mnt[{_INSTANCE_NAME}]:{directory}"]
        for point in record.binds:
            self.options += ["--external", f"mnt[{point}]:{point}"]

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """See the class."""
        return tuple(self._fds)

    def close(self) -> None:
        """Close the descriptors: the restored tree holds what it needs."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _new_network() -> int:
    launch.unshare(launch.CLONE_NEWNET)
    launch.raise_loopback()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _new_root(root: str) -> int:
    launch.unshare(launch.CLONE_NEWNS)
    launch.bind_root(root)
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _in_thread(make: Callable[[], int]) -> int:
    """Run ``make`` in a thread that ends right after: namespaces are a thread's own, and this process must keep its own."""
    made: list[int] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            made.append(make())
        except (OSError, launch.StepFailed) as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="namespaces")
    thread.start()
    thread.join()
    if failed:
        error = failed[0]
        if isinstance(error, launch.StepFailed):
            raise OSError(error.error.errno, f"{error.step}: {error.error.strerror}") from error
        raise error
    return made[0]


#: Keeps libraries off io_uring, which CRIU cannot dump: libuv (Node.js) and PyTorch's TCPStore. The kernel has no switch per process.
RESTORABLE_ENVIRONMENT: Mapping[str, str] = {"UV_USE_IO_URING": "0", "USE_LIBUV": "0"}
