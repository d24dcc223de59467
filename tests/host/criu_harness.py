"""A round trip small enough to test CRIU's behaviour with: a worker process, its memory read in
place, a daemon that gives it back.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import IcecoreError
from icecore.host.criu import pagemap_image
from icecore.host.criu import program as criu_module
from icecore.host.criu.images import load_pstree
from icecore.host.criu.pagemap_image import PE_LAZY, PE_PRESENT
from icecore.host.criu.program import Criu, DumpArguments, RestoreArguments
from icecore.host.kernel import procfs, userfaultfd
from icecore.host.kernel.memory import HugeBuffer, RemoteReader
from icecore.sizes import PAGE
from tests.host.criu_run import LazyDump, Restore
from tests.host.target import PRELUDE, eventually
from tests.host.userfaultfd_events import read_events

PREFIXES = [Path("/usr/local/lib/icecore/criu"), Path("/usr/local/lib/icecore/criu-sid")]
FINISHED = 0x52535446


def crius() -> list[Criu]:
    """The CRIUs on this machine; empty without root."""
    found: dict[tuple[int, ...], Criu] = {}
    for explicit in (None, *PREFIXES):
        try:
            criu = criu_module.find_criu(explicit)
        except IcecoreError:
            continue
        found.setdefault(criu.version[:2], criu)
    return list(found.values()) if os.geteuid() == 0 else []


def parametrize(function):
    """Run a test with each CRIU of the machine; skipped where there is none."""
    found = crius()
    marks = [pytest.param(c, id=".".join(map(str, c.version))) for c in found]
    missing = [pytest.param(None, marks=pytest.mark.skip(reason="no usable CRIU, or not root"))]
    return pytest.mark.criu(pytest.mark.parametrize("criu", marks or missing)(function))


#: Fills memory with noise, then counts, rewriting a file (count, digest of the memory) a hundred
#: times a second.
WORKER = """
import hashlib, random, time
size = int(sys.argv[2]) << 20
a = anonymous(size)
libc.madvise(a, size, 15)
ctypes.memmove(a, random.Random(3).randbytes(size), size)
k = 0
out = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)  # rewritten in place: its size is the same at every restore
while True:
    k += 1
    ctypes.memmove(a + 4096 * (k % 100), k.to_bytes(8, "little"), 8)
    digest = hashlib.blake2b(ctypes.string_at(a, 1 << 20), digest_size=8).hexdigest()
    os.pwrite(out, f"{k:12} {digest}".encode(), 0)
    time.sleep(0.01)
"""


class Worker:
    """A running worker; ``progress`` is how far it counted."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.file = file

    def progress(self) -> int:
        words = self.file.read_text().split() if self.file.exists() else []
        return int(words[0]) if words else 0

    def works(self, seconds: float = 5) -> bool:
        """Whether it counts on."""
        before = self.progress()
        return eventually(lambda: self.progress() > before + 2, seconds)

    def kill(self) -> None:
        """End it and its descendants."""
        if self.process.poll() is None:
            for pid in procfs.tree(self.pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)


@contextmanager
def worker(mib: int = 16, code: str = "") -> Iterator[Worker]:
    """A worker in a session of its own, without terminal or pipes."""
    folder = Path(tempfile.mkdtemp(prefix="icecore-test-"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            PRELUDE + textwrap.dedent(code) + WORKER,
            str(folder / "count"),
            str(mib),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    it = Worker(process, folder / "count")
    try:
        assert eventually(lambda: it.progress() > 3, 20)
        yield it
    finally:
        it.kill()
        shutil.rmtree(folder)


@contextmanager
def images_folder() -> Iterator[Path]:
    """A folder on tmpfs."""
    folder = Path(tempfile.mkdtemp(prefix="icecore-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def capture(
    criu: Criu, pid: int, images: Path, arguments: DumpArguments | None = None
) -> dict[int, HugeBuffer]:
    """Dump lazily; returns the lazy memory by address."""
    with LazyDump(criu, pid, images, arguments or DumpArguments(network_lock="skip")) as dump:
        dump.wait_serving(30)
        memory = {}
        _, entries = pagemap_image.load_pagemap(images / f"pagemap-{pid}.img")
        with RemoteReader(pid) as reader:
            for entry in entries[entries["flags"] & PE_LAZY != 0]:
                size = int(entry["pages"]) * PAGE
                buffer = HugeBuffer(size)
                iovec = np.array([(entry["address"], size)], [("base", "u8"), ("length", "u8")])
                reader.read_into(iovec.ctypes.data, 1, buffer, size)
                memory[int(entry["address"])] = buffer
        dump.finish(30)
    return memory


class Daemon:
    """Listens where CRIU looks for a lazy-pages daemon; serves faults until all is placed."""

    def __init__(self, work: Path, memory: dict[int, HugeBuffer]) -> None:
        self.memory = memory
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(work / "lazy-pages.socket"))
        self.listener.listen()
        self.listener.settimeout(30)
        self.uffds: dict[int, int] = {}
        self.faults = 0
        self.finished = threading.Event()
        self.over = threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def place_all(self) -> None:
        for uffd in self.uffds.values():
            for address, buffer in self.memory.items():
                userfaultfd.place(uffd, address, buffer.address, buffer.size)

    def close(self) -> None:
        self.over.set()
        self.thread.join(30)
        self.listener.close()
        for uffd in self.uffds.values():
            os.close(uffd)

    def _run(self) -> None:
        try:
            connection = None
            poll = select.poll()
            poll.register(self.listener, select.POLLIN)
            while not self.over.is_set():
                for fd, _ in poll.poll(50):
                    if fd == self.listener.fileno():
                        connection, _ = self.listener.accept()
                        connection.settimeout(30)
                        poll.register(connection, select.POLLIN)
                    elif connection is not None and fd == connection.fileno():
                        word = connection.recv(4, socket.MSG_WAITALL)
                        if not word:
                            poll.unregister(fd)
                        elif struct.unpack("<I", word)[0] == FINISHED:
                            self.finished.set()
                        else:
                            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
                            self.uffds[struct.unpack("<i", word)[0]] = fds[0]
                            poll.register(fds[0], select.POLLIN)
                    else:
                        self._events(fd)
        except BaseException as error:  # noqa: BLE001 (told by the test that sees it)
            self.failure = error

    def _events(self, uffd: int) -> None:
        for event in read_events(uffd):
            if isinstance(event, userfaultfd.Fault):
                self.faults += 1
                for address, buffer in self.memory.items():
                    if address <= event.address < address + buffer.size:
                        userfaultfd.place(
                            uffd, event.address, buffer.address + event.address - address, PAGE
                        )
                        break
                else:
                    userfaultfd.place_zero(uffd, event.address, PAGE)


@contextmanager
def restored(
    criu: Criu,
    images: Path,
    memory: dict[int, HugeBuffer],
    arguments: RestoreArguments | None = None,
) -> Iterator[tuple[Restore, Daemon]]:
    """Begin a restore with a daemon; whatever came up is killed at the end."""
    work = Path(tempfile.mkdtemp(prefix="icecore-test-"))
    arguments = arguments or RestoreArguments(network_lock="skip")
    daemon = Daemon(work, memory)
    restore = Restore(criu, images, work, arguments)
    try:
        yield restore, daemon
    finally:
        pid = load_pstree(images)[0].pid
        try:
            # As a sibling the root is our child, also where CRIU killed it because the restore
            # failed: it must be waited for.
            os.waitpid(pid, os.WNOHANG)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # nothing came up, or it is not ours
        daemon.close()
        restore.process.wait(30)
        shutil.rmtree(work)


def lazy_only_removed(images: Path, pid: int, version: tuple[int, ...]) -> int:
    """Rewrite a pagemap image without the entries that have no content in the pages image; returns
    how many were dropped.
    """
    path = images / f"pagemap-{pid}.img"
    pages_id, entries = pagemap_image.load_pagemap(path, merge=False)
    kept = entries[entries["flags"] & PE_PRESENT != 0]
    pagemap_image.write_pagemap(path, pages_id, kept, version)
    return len(entries) - len(kept)


def stopped(pid: int) -> bool:
    """Whether a process stands still under a tracer."""
    return procfs.status(pid).state == "t"


def wait_for(path: Path, seconds: float = 20) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.005)
