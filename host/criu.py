"""CRIU as a program that is found, started and understood; rule: it is never killed, and never left holding a tree:
its connection is hung up and it thaws the tree itself."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from icecore.errors import DumpFailed, IcecoreError, MissingTool, RestoreFailed
from icecore.host.criu_log import Diagnosis, diagnose
from icecore.host.page_server import Connection

LEAST_VERSION = (4, 0)
PREFIX = Path("/usr/local/lib/icecore/criu")
_SYSTEM_PYTHON = Path("/usr/lib/python3/dist-packages")
_CURE = "run tools/install-criu, or name a CRIU with ICECORE_CRIU"

NetworkLock = Literal["skip", "iptables", "nftables"]
Connections = Literal["refuse", "keep", "close"]


@dataclass(frozen=True)
class Criu:
    """A CRIU that starts: its path, version, and the folder that holds its pycriu (None where it has none)."""

    path: Path
    version: tuple[int, int, int]
    pycriu: Path | None

    def check(self, seconds: float = 60) -> None:
        """Have it look at the kernel (``criu check``).

        Raises:
            MissingTool: It found something lacking.
        """
        done = subprocess.run(
            [self.path, "check"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, cwd="/"
        )
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())[-500:]
            raise MissingTool(f"{self.path} cannot work on this kernel: {said}", cure=_CURE)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Version: (\d+)\.(\d+)(?:\.(\d+))?", done.stdout, re.MULTILINE)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def _from_prefix(prefix: Path) -> tuple[Path, Path] | None:
    """The binary and the pycriu folder that a prefix of tools/install-criu records."""
    try:
        record = json.loads((prefix / "criu.json").read_text())
        return Path(record["criu"]), Path(record["pycriu_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_criu(explicit: str | Path | None = None) -> Criu:
    """Find a CRIU: the one named, else ICECORE_CRIU, else install-criu's prefix (or ICECORE_CRIU_PREFIX), else PATH.

    Args:
        explicit: A criu binary, or a prefix of tools/install-criu.

    Raises:
        MissingTool: There is none of at least version 4.0; a named one is never replaced by another.
    """
    named = explicit or os.environ.get("ICECORE_CRIU")
    candidates: list[tuple[Path, Path | None]] = []
    if named:
        path = Path(named)
        recorded = _from_prefix(path) if path.is_dir() else _from_prefix(path.parent.parent)
        if path.is_dir() and recorded is None:
            raise MissingTool(f"{path} holds no criu.json", cure=_CURE)
        pycriu = recorded[1] if recorded else None
        candidates.append((recorded[0] if recorded and path.is_dir() else path, pycriu))
    else:
        recorded = _from_prefix(Path(os.environ.get("ICECORE_CRIU_PREFIX") or PREFIX))
        if recorded:
            candidates.append(recorded)
        system = shutil.which("criu", path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
        if system:
            candidates.append((Path(system), None))
    reasons = []
    for path, pycriu in candidates:
        version = _version(path)
        if version is None:
            reasons.append(f"{path} does not start")
        elif version[:2] < LEAST_VERSION:
            reasons.append(f"{path} is version {version[0]}.{version[1]}, older than 4.0")
        else:
            if pycriu is None and (_SYSTEM_PYTHON / "pycriu").is_dir():
                pycriu = _SYSTEM_PYTHON
            return Criu(path, version, pycriu)
    raise MissingTool("no usable CRIU: " + ("; ".join(reasons) or "none is installed"), cure=_CURE)


@dataclass(frozen=True)
class DumpArguments:
    """What a dump is told.

    Attributes:
        external: Resources that the restore will provide ("net[4026531840]:job").
        connections: Established TCP connections: refuse the dump, keep them, or have them closed at restore.
        network_lock: How to keep packets out meanwhile; None: CRIU's default.
        file_locks: Dump held file locks.
        shell_job: Allow a terminal that belongs to somebody else.
        external_unix: Allow unix sockets whose peer is outside.
        ghost_limit: Largest deleted-but-open file, in bytes, that CRIU copies into its images.
        cgroups: Whether CRIU records and recreates cgroups.
        verbosity: 1 errors, 2 warnings, 3 information (default), 4 everything: costs time in the window.
        extra: Further arguments, as they are.
    """

    external: tuple[str, ...] = ()
    connections: Connections = "refuse"
    network_lock: NetworkLock | None = None
    file_locks: bool = True
    shell_job: bool = False
    external_unix: bool = False
    ghost_limit: int = 1 << 20
    cgroups: bool = False
    verbosity: int = 3
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """As command-line arguments."""
        return [
            f"-v{self.verbosity}",
            *(word for name in self.external for word in ("--external", name)),
            *({"refuse": [], "keep": ["--tcp-established"], "close": ["--tcp-close"]}[self.connections]),
            *(["--network-lock", self.network_lock] if self.network_lock else []),
            *(["--file-locks"] if self.file_locks else []),
            *(["--shell-job"] if self.shell_job else []),
            *(["--ext-unix-sk"] if self.external_unix else []),
            *(["--ghost-limit", str(self.ghost_limit)] if self.ghost_limit else []),
            *([] if self.cgroups else ["--manage-cgroups=ignore"]),
            *self.extra,
        ]


@dataclass(frozen=True)
class RestoreArguments:
    """What a restore is told; as `DumpArguments`, and:

    Attributes:
        lazy: Leave lazy pages to the daemon that listens on ``lazy-pages.socket`` in the work folder.
        inherit: Descriptors of this process that stand for external resources: (descriptor, name).
        root: Folder that becomes the root of a private mount namespace.
        action_script: Program that CRIU runs at its stages (CRTOOLS_SCRIPT_ACTION); if it fails, so does the restore.
        sibling: The restored root becomes a child of this process, not of CRIU.
        stopped: Leave the tree stopped.
    """

    lazy: bool = True
    external: tuple[str, ...] = ()
    inherit: tuple[tuple[int, str], ...] = ()
    root: Path | None = None
    action_script: Path | None = None
    sibling: bool = True
    stopped: bool = False
    connections: Connections = "refuse"
    network_lock: NetworkLock | None = None
    file_locks: bool = True
    shell_job: bool = False
    external_unix: bool = False
    cgroups: bool = False
    verbosity: int = 3
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """As command-line arguments."""
        return [
            f"-v{self.verbosity}",
            *(["--lazy-pages"] if self.lazy else []),
            *(word for name in self.external for word in ("--external", name)),
            *(word for fd, name in self.inherit for word in ("--inherit-fd", f"fd[{fd}]:{name}")),
            *(["--root", str(self.root)] if self.root else []),
            *(["--action-script", str(self.action_script)] if self.action_script else []),
            *(["--restore-sibling"] if self.sibling else []),
            *(["--leave-stopped"] if self.stopped else []),
            *({"refuse": [], "keep": ["--tcp-established"], "close": ["--tcp-close"]}[self.connections]),
            *(["--network-lock", self.network_lock] if self.network_lock else []),
            *(["--file-locks"] if self.file_locks else []),
            *(["--shell-job"] if self.shell_job else []),
            *(["--ext-unix-sk"] if self.external_unix else []),
            *([] if self.cgroups else ["--manage-cgroups=ignore"]),
            *self.extra,
        ]


@dataclass
class _Run:
    """A running CRIU: in its own session, so that no terminal's signal reaches it in the middle of its work."""

    process: subprocess.Popen[bytes]
    log: Path
    output: Path
    what: str
    error: type[IcecoreError]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(
        cls,
        criu: Criu,
        arguments: list[str],
        work: Path,
        log: str,
        what: str,
        error: type[IcecoreError],
        fds: tuple[int, ...],
    ) -> _Run:
        output = work / f"{log}.stderr"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [criu.path, *arguments, "-o", log],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,
            )
        return cls(process, work / log, output, what, error)

    def diagnosis(self) -> Diagnosis:
        """What its log says went wrong so far."""
        text = ""
        for path in (self.log, self.output):
            try:
                text += path.read_text(errors="replace") + "\n"
            except FileNotFoundError:
                pass
        return diagnose(text)

    def failed(self) -> IcecoreError:
        """The error to raise for what its log says."""
        message, cure = self.diagnosis().sentence(self.what)
        status = self.process.poll()
        return self.error(f"{message} (criu's exit status {status})", cure=cure)

    def wait(self, seconds: float) -> None:
        """Wait for its end; raise if it failed or did not end in time."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise self.error(f"{self.what} did not end within {seconds:g} s") from error
        if status:
            raise self.failed()


class LazyDump:
    """``criu dump --lazy-pages --leave-running``: the tree stands still from some moment after the start until the
    connection is hung up.

    CRIU's page server gets one end of a socket pair (--ps-socket), so there is no port to choose and nothing to
    connect to: the other end is
    here, and when it is closed, by `finish`, `abandon` or this process's death, CRIU thaws the tree, at once if it
    serves, else as soon as it does.

    Args:
        criu: Which CRIU.
        pid: Root of the tree.
        images: Existing folder for the image files; they are complete once `wait_serving` returns, but for stats-dump.
        options: What CRIU is told.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, options: DumpArguments = DumpArguments()) -> None:
        self.images = images
        ours, theirs = socket.socketpair()
        ready, told = os.pipe()
        try:
            arguments = [
                *("dump", "-t", str(pid), "-D", str(images), "--lazy-pages", "--leave-running"),
                *("--ps-socket", str(theirs.fileno()), "--status-fd", str(told), *options.arguments()),
            ]
            self._run = _Run.start(
                criu, arguments, images, "dump.log", f"the dump of process {pid}", DumpFailed, (theirs.fileno(), told)
            )
        except BaseException:
            ours.close()
            os.close(ready)
            raise
        finally:
            theirs.close()
            os.close(told)
        self._ready: int | None = ready
        self.connection = Connection(ours, criu.version)

    def __enter__(self) -> LazyDump:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running CRIU. Never kill it before it serves: the parasite code would stay in the tree."""
        return self._run.process

    @property
    def log(self) -> Path:
        """CRIU's log."""
        return self._run.log

    def wait_serving(self, seconds: float) -> float:
        """Wait until the tree stands still and all metadata are written.

        Returns:
            Seconds since CRIU was started.

        Raises:
            DumpFailed: CRIU gave up (it has thawed the tree), or not in time: then call `abandon`.
        """
        assert self._ready is not None, "asked once already"
        readable, _, _ = select.select([self._ready], [], [], seconds)
        if not readable:
            raise DumpFailed(f"{self._run.what} did not reach the window within {seconds:g} s")
        told = os.read(self._ready, 1)
        os.close(self._ready)
        self._ready = None
        if told != b"\0":
            self._run.wait(30)
            raise self._run.failed()
        return time.monotonic() - self._run.started

    def serving(self) -> bool:
        """Whether CRIU still holds the tree."""
        return self.connection.serving()

    def finish(self, seconds: float = 60) -> None:
        """End the window: CRIU confirms that it held the tree until now, thaws it and ends.

        Raises:
            DumpFailed: It did not hold the tree to the end, or failed later.
        """
        try:
            self.connection.finish(seconds)
        except DumpFailed:
            self.connection.close()
            self._run.wait(seconds)  # its own reason, if it gives one
            raise
        self.connection.close()
        self._run.wait(seconds)
        if not (self.images / "stats-dump").exists():  # written last, only by a dump that succeeded
            raise self._run.failed()

    def abandon(self, seconds: float = 60) -> None:
        """Hang up: the tree is thawed, now or as soon as CRIU serves. Waits for CRIU's end; harmless after `finish`.

        Raises:
            DumpFailed: CRIU did not end in time: the tree may still stand still.
        """
        self.connection.close()
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None
        try:
            self._run.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise DumpFailed(f"{self._run.what} was abandoned, but CRIU did not end within {seconds:g} s") from error


class PlainDump:
    """``criu dump --leave-running``, memory and all into the images folder: for where lazy mode cannot work.
    Arguments as `LazyDump`.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, options: DumpArguments = DumpArguments()) -> None:
        arguments = ["dump", "-t", str(pid), "-D", str(images), "--leave-running", *options.arguments()]
        self._run = _Run.start(criu, arguments, images, "dump.log", f"the dump of process {pid}", DumpFailed, ())

    def wait(self, seconds: float) -> None:
        """Wait for its end.

        Raises:
            DumpFailed: It failed, or not in time.
        """
        self._run.wait(seconds)


class StreamDump:
    """``criu dump --page-server``: all memory comes through ``connection`` (`Connection.extents`) while the tree
    stands still. Arguments as `LazyDump`.

    For where lazy mode cannot work. CRIU writes no pagemap images then: whoever receives the extents does.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, options: DumpArguments = DumpArguments()) -> None:
        ours, theirs = socket.socketpair()
        try:
            arguments = [
                *("dump", "-t", str(pid), "-D", str(images), "--leave-running", "--page-server"),
                *("--ps-socket", str(theirs.fileno()), *options.arguments()),
            ]
            self._run = _Run.start(
                criu, arguments, images, "dump.log", f"the dump of process {pid}", DumpFailed, (theirs.fileno(),)
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection = Connection(ours, criu.version)

    def wait(self, seconds: float) -> None:
        """Hang up and wait for CRIU's end, after the last extent.

        Raises:
            DumpFailed: It failed, or not in time.
        """
        self.connection.close()
        self._run.wait(seconds)


class Restore:
    """``criu restore`` of a folder of images, detached: CRIU ends once the tree runs.

    Args:
        criu: Which CRIU.
        images: The image files.
        work: Folder for the log, the pid file and, in lazy mode, ``lazy-pages.socket``, on which somebody must
            already listen.
        options: What CRIU is told.
    """

    def __init__(self, criu: Criu, images: Path, work: Path, options: RestoreArguments = RestoreArguments()) -> None:
        self._pid_file = work / "restored.pid"
        self._pid_file.unlink(missing_ok=True)  # CRIU wants to create it
        arguments = [
            *("restore", "-D", str(images), "-W", str(work), "-d", "--pidfile", str(self._pid_file)),
            *options.arguments(),
        ]
        fds = tuple(fd for fd, _ in options.inherit)
        self._run = _Run.start(criu, arguments, work, "restore.log", f"the restore from {images}", RestoreFailed, fds)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running CRIU."""
        return self._run.process

    @property
    def log(self) -> Path:
        """CRIU's log."""
        return self._run.log

    def failed(self) -> IcecoreError:
        """The error to raise once it has failed, with the reason that its log gives."""
        return self._run.failed()

    def wait(self, seconds: float) -> int:
        """Wait until the tree runs.

        Returns:
            The root's pid as this process sees it.

        Raises:
            RestoreFailed: It failed (CRIU has then killed what it had restored), or not in time.
        """
        self._run.wait(seconds)
        return int(self._pid_file.read_text())
