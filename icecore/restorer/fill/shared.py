"""Fills shared memory from the moment at which CRIU has made it: each object once, straight from the
repository.

CRIU waits until the restore's guard has opened the object (icecore/host/criu/placed.c), and then
builds the rest of the tree while the object is filled. The tree must not run before
`SharedFill.wait` has returned.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from icecore.errors import RestoreFailed
from icecore.events import Progress
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.files.filewriter import FileTarget, FileWriter
from icecore.restorer.files.images import PlacedMemory
from icecore.restorer.fill.charging import Allocator, paying_group, ranges_of
from icecore.restorer.guard.client import Message, RestoreGuard
from icecore.sizes import PAGE
from icecore.store.backend.base import Backend
from icecore.store.format.cell import data_pages
from icecore.store.runtime.loop import LoopThread

#: Its name in the image directory.
_SOCKET = "shared.socket"


class SharedFill:
    """The shared memory of one restore. `start` before CRIU starts, `close` in any case.

    Args:
        folder: CRIU's images.
        memory: What goes into the objects.
        backend: Holds the chunks.
        decoder: Decodes and verifies them.
        limits: Threads, memory, patience.
        loop: Where the repository lives.

    Attributes:
        failure: Why an object was not opened or not filled, the first; None: nothing failed.
    """

    def __init__(
        self,
        folder: Path,
        memory: Sequence[PlacedMemory],
        backend: Backend,
        decoder: Decoder,
        limits: Limits,
        loop: LoopThread,
    ) -> None:
        self._folder = folder
        self._expected = {part.number: part for part in memory}
        self._total = sum(int(data_pages(part.cells.records).sum()) * PAGE for part in memory)
        self._store = backend, decoder
        self._limits = limits
        self._loop = loop
        self._thread: threading.Thread | None = None
        #: Guards the rest.
        self._changed = threading.Condition()
        self._opened: list[FileTarget] = []
        self._filling = self._closed = False
        self._pid = 0
        self._fetcher: Fetcher | None = None
        self._allocator = Allocator()
        self._filled = 0
        self._progress: Progress | None = None
        self.failure: BaseException | None = None

    def start(self, guard: RestoreGuard) -> None:
        """Have the guard wait for CRIU; `take` gets what it says."""
        if not self._expected:
            return
        with _listen(self._folder) as listener:
            guard.share(listener)
        self._thread = threading.Thread(target=self._fill, name="shared-fill", daemon=True)
        self._thread.start()

    def take(self, message: Message) -> None:
        """Take an object that the guard has opened, and have it filled. `wait` raises any error:
        CRIU already has its answer, and builds the tree regardless.
        """
        try:
            self._take(message)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            for descriptor in message.descriptors:
                os.close(descriptor)
            self._fail(error)

    def _take(self, message: Message) -> None:
        if "error" in message.about:
            raise RestoreFailed(
                f"cannot open the shared memory that CRIU made: {message.about['error']}"
            )
        number = message.number("number")
        part = self._expected.pop(number, None)
        if part is None:
            raise RestoreFailed(f"CRIU made shared memory {number}, which it should not make now")
        (descriptor,) = message.descriptors
        size, name = os.fstat(descriptor).st_size, f"shared memory {number}"
        if _end(part) > -(-size // PAGE) * PAGE:
            raise RestoreFailed(f"CRIU made {name} of {size} bytes, which is too small")
        target = FileTarget(name, size, part.cells, descriptor=descriptor, offset=0)
        with self._changed:
            if self._closed:
                raise RestoreFailed("the restore was given up")
            self._pid = message.number("pid")  # CRIU makes the whole tree in one cgroup
            self._opened.append(target)
            self._changed.notify_all()

    def wait(self, progress: Progress | None = None) -> int:
        """Wait until all that CRIU has made is full; CRIU makes nothing more.

        Args:
            progress: Called, now and then, with the bytes that were filled, of all.

        Returns:
            Bytes that were filled.

        Raises:
            RestoreFailed: An object could not be opened or filled.
            Damaged, StoreError: Its content could not be read.
        """
        with self._changed:
            self._progress = progress
            self._changed.wait_for(
                lambda: self.failure is not None or not (self._opened or self._filling)
            )
            if self.failure is not None:
                raise self.failure
            if self._expected:
                raise RestoreFailed(f"CRIU did not make shared memory {min(self._expected)}")
            return self._filled

    def close(self) -> None:
        """End the thread, and close the objects that are open."""
        with self._changed:
            self._closed = True
            fetcher = self._fetcher
            self._changed.notify_all()
        self._allocator.end()
        if fetcher is not None:
            fetcher.fail(RestoreFailed("the restore was given up"))
        if self._thread is not None:
            self._thread.join()
        for target in self._opened:
            _close(target)
        self._opened = []

    # -- the thread

    def _fill(self) -> None:
        """Fill what is open, all at once, until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._opened)
                if self._closed:
                    return
                targets, self._opened, self._filling = self._opened, [], True
            try:
                self._write(targets)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._fail(error)
            finally:
                for target in targets:
                    _close(target)
                with self._changed:
                    self._filling, self._fetcher = False, None
                    self._changed.notify_all()

    def _write(self, targets: Sequence[FileTarget]) -> None:
        writer = FileWriter(targets)
        if not len(writer.records):
            return
        fetcher = Fetcher(*self._store, writer.records, writer, self._limits, self._loop)
        fetcher.progress = self._tell
        with self._changed:
            if self._closed:
                return
            self._fetcher = fetcher
            pid = self._pid
        group = paying_group(pid)
        if group is not None:
            pages = [(target.descriptor, ranges_of(target.cells)) for target in targets]
            self._allocator.allocate(
                group, [(number, one) for number, one in pages if number is not None]
            )
        fetcher.start(writer.order())
        try:
            fetcher.wait()
        except OSError as error:
            raise RestoreFailed(f"cannot fill {error.filename}: {error.strerror}") from error
        finally:
            fetcher.stop()
        with self._changed:
            self._filled += int(data_pages(writer.records).sum()) * PAGE

    def _tell(self, done: int, total: int) -> None:
        progress = self._progress
        if progress is not None:
            progress(self._filled + done, self._total)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()


def _end(part: PlacedMemory) -> int:
    """Return the offset behind the last page of an object."""
    rows = np.flatnonzero(part.cells.records["data"].any(axis=1))
    if not len(rows):
        return 0
    last = rows[np.argmax(part.cells.base[rows])]
    pages = np.flatnonzero(np.unpackbits(part.cells.records["data"][last], bitorder="little"))
    return int(part.cells.base[last]) + (int(pages[-1]) + 1) * PAGE


def _listen(folder: Path) -> socket.socket:
    """Listen in a directory whose path may be longer than an address can be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{_SOCKET}")
        finally:
            os.close(directory)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def _close(target: FileTarget) -> None:
    if target.descriptor is not None:
        os.close(target.descriptor)
