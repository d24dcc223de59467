"""CRIU at work: a lazy, plain or streamed dump, a restore; rule: CRIU is never killed, and never
left holding a tree: its connection is hung up and it thaws the tree itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from icecore.errors import DumpFailed, IcecoreError, RestoreFailed
from icecore.host.criu.page_server import Connection
from icecore.host.criu.program import (
    Criu,
    DumpArguments,
    RestoreArguments,
    explain,
    lazy_dump_command,
    plain_dump_command,
    restore_command,
    stream_dump_command,
)
from icecore.host.kernel.waiting import readable


@dataclass
class _Run:
    """A running CRIU: in its own session, so that no terminal's signal reaches it in the middle of
    its work.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    what: str
    error: type[IcecoreError]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(
        cls,
        command: list[str],
        work: Path,
        log: str,
        what: str,
        error: type[IcecoreError],
        fds: tuple[int, ...],
    ) -> _Run:
        with open(work / f"{log}.stderr", "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,
            )
        return cls(process, work, work / log, what, error)

    def failed(self) -> IcecoreError:
        """The error to raise for what its log says."""
        message, cure = explain(self.folder, self.log.name).sentence(self.what)
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
    """``criu dump --lazy-pages --leave-running``: the tree stands still from some moment after the
    start until the connection is hung up.

    CRIU's page server gets one end of a socket pair (--ps-socket), so there is no port to choose
    and nothing to connect to: the other end is here, and when it is closed, by `finish`, `abandon`
    or this process's death, CRIU thaws the tree, at once if it serves, else as soon as it does.

    Args:
        criu: Which CRIU.
        pid: Root of the tree.
        images: Existing folder for the image files; they are complete once `wait_serving` returns,
            but for stats-dump.
        arguments: What CRIU is told.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, arguments: DumpArguments) -> None:
        self.images = images
        ours, theirs = socket.socketpair()
        ready, told = os.pipe()
        try:
            command = lazy_dump_command(
                criu, pid, images, arguments, pages=theirs.fileno(), status=told
            )
            fds = (theirs.fileno(), told)
            self._run = _Run.start(
                command, images, "dump.log", f"the dump of process {pid}", DumpFailed, fds
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running CRIU. Never kill it before it serves: the parasite code would stay in the
        tree.
        """
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
        # Its end is watched too: a CRIU that was killed may leave a stopped child that keeps the
        # pipe open.
        end = os.pidfd_open(self.process.pid)
        try:
            heard = readable([self._ready, end], seconds)
        finally:
            os.close(end)
        if not heard:
            raise DumpFailed(f"{self._run.what} did not reach the window within {seconds:g} s")
        told = os.read(self._ready, 1) if self._ready in heard else b""
        os.close(self._ready)
        self._ready = None
        if told != b"\0":
            self._run.wait(30)
            raise self._run.failed()
        return time.monotonic() - self._run.started

    def serving(self) -> bool:
        """Whether CRIU still holds the tree."""
        try:
            peeked = self.connection.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return peeked != b""

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
        """Hang up: the tree is thawed, now or as soon as CRIU serves. Waits for CRIU's end;
        harmless after `finish`.

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
            raise DumpFailed(
                f"{self._run.what} was abandoned, but CRIU did not end within {seconds:g} s"
            ) from error


class PlainDump:
    """``criu dump --leave-running``, memory and all into the images folder: for where lazy mode
    cannot work. Arguments as `LazyDump`.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, arguments: DumpArguments) -> None:
        command = plain_dump_command(criu, pid, images, arguments)
        self._run = _Run.start(
            command, images, "dump.log", f"the dump of process {pid}", DumpFailed, ()
        )

    def wait(self, seconds: float) -> None:
        """Wait for its end.

        Raises:
            DumpFailed: It failed, or not in time.
        """
        self._run.wait(seconds)


class StreamDump:
    """``criu dump --page-server``: all memory comes through ``connection`` (`Connection.extents`)
    while the tree stands still. Arguments as `LazyDump`.

    For where lazy mode cannot work. CRIU writes no pagemap images then: whoever receives the
    extents does.
    """

    def __init__(self, criu: Criu, pid: int, images: Path, arguments: DumpArguments) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = stream_dump_command(criu, pid, images, arguments, pages=theirs.fileno())
            what = f"the dump of process {pid}"
            self._run = _Run.start(
                command, images, "dump.log", what, DumpFailed, (theirs.fileno(),)
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
        work: Folder for the log, the pid file and, in lazy mode, ``lazy-pages.socket``, on which
            somebody must already listen.
        arguments: What CRIU is told.
    """

    def __init__(self, criu: Criu, images: Path, work: Path, arguments: RestoreArguments) -> None:
        self._pid_file = work / "restored.pid"
        self._pid_file.unlink(missing_ok=True)  # CRIU wants to create it
        command = restore_command(criu, images, work, arguments, pid_file=self._pid_file)
        fds = tuple(fd for fd, _ in arguments.inherit)
        self._run = _Run.start(
            command, work, "restore.log", f"the restore from {images}", RestoreFailed, fds
        )

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
