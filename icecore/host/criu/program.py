"""Find CRIU and build its command lines. CRIU is never killed while it holds a tree: closing its
connection makes it thaw the tree itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from icecore.errors import MissingTool, NotFound
from icecore.host.criu.log import Diagnosis, diagnose
from icecore.host.kernel.limits import kernel_version

LEAST_VERSION = (4, 0)
PREFIX = Path("/usr/local/lib/icecore/criu")
_CURE = "run tools/install-criu, or name a CRIU with ICECORE_CRIU"
#: CRIU's plugin for connections to unix sockets outside of the tree (icecore/host/criu/sockets.c).
SOCKETS_PLUGIN = Path(__file__).with_name("libicecore-sockets.so")

Version = tuple[int, int, int]
NetworkLock = Literal["skip", "iptables", "nftables"]
Connections = Literal["refuse", "keep", "close"]


class Criu(msgspec.Struct, frozen=True):
    """A CRIU that starts: its path and version."""

    path: Path
    version: Version

    def dumps_internet_sockets(self, kernel: tuple[int, int]) -> bool:
        """Return whether it can dump TCP or UDP sockets, listening ones too, on a kernel of this
        version.

        From Linux 6.16 on SO_PASSCRED is refused on sockets other than unix ones; CRIU 4.2 is the
        first not to ask for it.
        """
        return self.version >= (4, 2) or kernel < (6, 16)

    def keeps_guard_pages(self, kernel: tuple[int, int]) -> bool:
        """Return whether guard pages (MADV_GUARD_INSTALL, from Linux 6.13 on) are restored.

        CRIU 4.2 is the first to know them. Older ones fail, because they cannot read them: where
        nobody hides that memory from them.
        """
        return self.version >= (4, 2) or kernel < (6, 13)

    def check(self, seconds: float = 60) -> None:
        """Run ``criu check``, which tests the kernel.

        Raises:
            MissingTool: It found something lacking.
        """
        done = subprocess.run(
            [self.path, "check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=seconds,
            cwd="/",
        )
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())[-500:]
            raise MissingTool(f"{self.path} cannot work on this kernel: {said}", cure=_CURE)


def _version(path: Path) -> Version | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=20,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Version: (\d+)\.(\d+)(?:\.(\d+))?", done.stdout, re.MULTILINE)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def _from_prefix(prefix: Path) -> tuple[Path, Version | None] | None:
    """Return the binary and the version that a prefix of tools/install-criu records, which saves
    starting that CRIU.
    """
    try:
        record = json.loads((prefix / "criu.json").read_text())
        path = Path(record["criu"])
        if not path.is_file():
            return None
        numbers = [int(number) for number in str(record.get("version", "")).split(".") if number]
        version = (
            (numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 0)
            if len(numbers) > 1
            else None
        )
        return path, version
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newer_prefix(prefix: Path) -> Path:
    """Return where tools/install-criu puts a newer CRIU beside the one in ``prefix``."""
    return prefix.with_name(f"{prefix.name}-sid")


def find_criu(explicit: str | Path | None = None) -> Criu:
    """Find a CRIU: the one named, else ICECORE_CRIU, else install-criu's prefix (or
    ICECORE_CRIU_PREFIX), else PATH.

    Of those that nobody named, the first that can dump internet sockets and guard pages on this
    kernel is taken, if one can; a newer CRIU that install-criu put beside the first
    (``PREFIX-sid``) is looked at too.

    Args:
        explicit: A criu binary, or a prefix of tools/install-criu.

    Raises:
        MissingTool: There is none of at least version 4.0; a named one is never replaced by
            another.
    """
    named = explicit or os.environ.get("ICECORE_CRIU")
    candidates: list[tuple[Path, Version | None]] = []
    if named:
        path = Path(named)
        recorded = _from_prefix(path) if path.is_dir() else _from_prefix(path.parent.parent)
        if path.is_dir() and recorded is None:
            raise MissingTool(f"{path} holds no criu.json", cure=_CURE)
        same = recorded if recorded and (path.is_dir() or path == recorded[0]) else None
        candidates.append(same or (path, None))
    else:
        prefix = Path(os.environ.get("ICECORE_CRIU_PREFIX") or PREFIX)
        candidates += [
            found for found in (_from_prefix(prefix), _from_prefix(newer_prefix(prefix))) if found
        ]
        system = shutil.which(
            "criu", path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
        )
        if system:
            candidates.append((Path(system), None))
    reasons = []
    usable: list[Criu] = []
    for path, recorded_version in candidates:
        version = recorded_version or _version(path)
        if version is None:
            reasons.append(f"{path} does not start")
        elif version[:2] < LEAST_VERSION:
            reasons.append(f"{path} is version {version[0]}.{version[1]}, older than 4.0")
        else:
            criu = Criu(path, version)
            kernel = kernel_version()
            if named or (criu.dumps_internet_sockets(kernel) and criu.keeps_guard_pages(kernel)):
                return criu
            usable.append(criu)
    if usable:
        return usable[0]
    raise MissingTool("no usable CRIU: " + ("; ".join(reasons) or "none is installed"), cure=_CURE)


def has_plugin(folder: str, name: str) -> bool:
    """Return whether a directory of CRIU's plugins (``--libdir``) contains this one; "" contains
    none.
    """
    return bool(folder) and (Path(folder) / f"{name}_plugin.so").is_file()


def plugin_folder(folder: Path, others: str, own: Sequence[Path]) -> Path:
    """Make a directory of CRIU's plugins (``--libdir``), with ours. CRIU must not use its default
    directory: its plugin for CUDA would make the driver's calls a second time.

    Args:
        folder: Is made.
        others: A directory of other plugins that CRIU is to load too; "": none.
        own: Ours.

    Raises:
        NotFound: There is no such directory.
    """
    if others and not Path(others).is_dir():
        raise NotFound(
            f"there is no directory {others}",
            cure="name the one that has CRIU's plugins (--criu-plugins)",
        )
    folder.mkdir(exist_ok=True)
    every = (*(Path(others).glob("*.so") if others else ()), *own)
    for name, plugin in {plugin.name: plugin for plugin in every}.items():
        (folder / name).symlink_to(plugin.absolute())
    return folder


class _Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a dump and a restore have in common.

    Attributes:
        external: Resources outside the tree ("net[4026531840]:job"): the dump leaves them out, and
            the restore provides them.
        connections: Established TCP connections: refuse the dump, keep them, or have them closed at
            restore.
        network_lock: How to keep packets out meanwhile; None: CRIU's default.
        file_locks: Dump held file locks.
        shell_job: Allow a terminal that belongs to somebody else.
        external_unix: Allow unix sockets whose peer is outside.
        cgroups: Whether CRIU records and recreates cgroups.
        verbosity: 1 errors, 2 warnings, 3 information (default), 4 everything: costs time in the
            window.
        extra: Further arguments, as they are.
    """

    external: tuple[str, ...] = ()
    connections: Connections = "refuse"
    network_lock: NetworkLock | None = None
    file_locks: bool = True
    shell_job: bool = False
    external_unix: bool = False
    cgroups: bool = False
    verbosity: int = 3
    extra: tuple[str, ...] = ()

    def _with(self, *own: str) -> list[str]:
        """Return the command-line arguments, with those that only one of the two has."""
        return [
            f"-v{self.verbosity}",
            *(word for name in self.external for word in ("--external", name)),
            *own,
            *(
                {"refuse": [], "keep": ["--tcp-established"], "close": ["--tcp-close"]}[
                    self.connections
                ]
            ),
            *(["--network-lock", self.network_lock] if self.network_lock else []),
            *(["--file-locks"] if self.file_locks else []),
            *(["--shell-job"] if self.shell_job else []),
            *(["--ext-unix-sk"] if self.external_unix else []),
            *([] if self.cgroups else ["--manage-cgroups=ignore"]),
            *self.extra,
        ]


class DumpArguments(_Arguments, frozen=True, kw_only=True):
    """The options of a dump.

    Attributes:
        ghost_limit: Largest deleted-but-open file, in bytes, that CRIU copies into its images.
        group: Directory of a cgroup that contains the whole tree, which CRIU freezes until it has
            stopped every thread; None: it stops one after the other.
    """

    ghost_limit: int = 1 << 20
    group: Path | None = None

    def arguments(self) -> list[str]:
        """Return the command-line arguments."""
        return self._with(
            *(["--ghost-limit", str(self.ghost_limit)] if self.ghost_limit else []),
            *(["--freeze-cgroup", str(self.group)] if self.group is not None else []),
        )


class RestoreArguments(_Arguments, frozen=True, kw_only=True):
    """The options of a restore.

    Attributes:
        lazy: Leave lazy pages to the daemon that listens on ``lazy-pages.socket`` in the work
            folder.
        inherit: Descriptors of this process that stand for external resources: (descriptor, name).
        root: Folder that becomes the root of a private mount namespace.
        action_script: Program that CRIU runs at its stages (CRTOOLS_SCRIPT_ACTION); if it fails, so
            does the restore.
        sibling: The restored root becomes a child of this process, not of CRIU.
        stopped: Leave the tree stopped.
    """

    lazy: bool = True
    inherit: tuple[tuple[int, str], ...] = ()
    root: Path | None = None
    action_script: Path | None = None
    sibling: bool = True
    stopped: bool = False

    def arguments(self) -> list[str]:
        """Return the command-line arguments."""
        return self._with(
            *(["--lazy-pages"] if self.lazy else []),
            *(word for fd, name in self.inherit for word in ("--inherit-fd", f"fd[{fd}]:{name}")),
            *(["--root", str(self.root)] if self.root else []),
            *(["--action-script", str(self.action_script)] if self.action_script else []),
            *(["--restore-sibling"] if self.sibling else []),
            *(["--leave-stopped"] if self.stopped else []),
        )


def lazy_dump_command(
    criu: Criu,
    pid: int,
    images: Path,
    arguments: DumpArguments,
    *,
    pages: int | str,
    status: int | str,
) -> list[str]:
    """Return the command line of a lazy dump.

    Args:
        pages: Descriptor that CRIU inherits: one end of a stream socket pair; the tree is thawed
            when the other end is closed.
        status: Descriptor that CRIU inherits: one zero byte is written to it when the tree stands
            still; it ends without one if the dump failed.
    """
    return [
        *plain_dump_command(criu, pid, images, arguments),
        "--lazy-pages",
        "--ps-socket",
        str(pages),
        "--status-fd",
        str(status),
    ]


def plain_dump_command(criu: Criu, pid: int, images: Path, arguments: DumpArguments) -> list[str]:
    """Return the command line of a dump that also writes the memory into the images folder."""
    return [
        str(criu.path),
        "dump",
        "-t",
        str(pid),
        "-D",
        str(images),
        "-o",
        "dump.log",
        "--leave-running",
        *arguments.arguments(),
    ]


def stream_dump_command(
    criu: Criu, pid: int, images: Path, arguments: DumpArguments, *, pages: int | str
) -> list[str]:
    """Return the command line of a dump that sends the memory through an inherited descriptor, in
    the page-server protocol.
    """
    return [
        *plain_dump_command(criu, pid, images, arguments),
        "--page-server",
        "--ps-socket",
        str(pages),
    ]


def restore_command(
    criu: Criu, images: Path, work: Path, arguments: RestoreArguments, *, pid_file: Path
) -> list[str]:
    """Return the command line of a restore; CRIU creates ``pid_file``, which must not exist."""
    return [
        *(str(criu.path), "restore", "-D", str(images), "-W", str(work), "-o", "restore.log", "-d"),
        *("--pidfile", str(pid_file), *arguments.arguments()),
    ]


def explain(folder: Path, log: str = "dump.log") -> Diagnosis:
    """Explain a failure from a log in ``folder`` and from CRIU's output before it had one
    (LOG.stderr).
    """
    text = ""
    for path in (folder / log, folder / f"{log}.stderr"):
        try:
            text += os.fsdecode(path.read_bytes()) + "\n"
        except FileNotFoundError:
            pass
    return diagnose(text)
