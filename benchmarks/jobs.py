"""The measured jobs: a test program started, its own clock watched from outside, plain CRIU beside
it. Its rule: what was started is ended.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from benchmarks.common import CACHE
from icecore.host.criu.program import Criu
from tests.programs import driving
from tests.programs.catalogue import PROGRAMS
from tests.programs.driving import Running

_POLL_SECONDS = 0.001
_CRIU_SECONDS = 300.0


@contextmanager
def job(name: str, folder: Path, arguments: Sequence[str]) -> Iterator[Running]:
    """A test program, ready, in ``folder``; it and what was restored of it are killed afterwards."""
    state = folder / name
    state.mkdir()
    running = driving.start(PROGRAMS[name], state, CACHE, arguments)
    try:
        driving.wait_until(state, lambda now: now.counter > 0, 300.0, "ready")
        yield running
    finally:
        driving.stop(running)
        shutil.rmtree(state, ignore_errors=True)


class Watch:
    """Watches memory-pattern's own clock, which ticks every millisecond: how long did it stand
    still?

    Attributes:
        gap: The longest time between two ticks, in seconds, while the watch was on.
    """

    def __init__(self, state: Path) -> None:
        self.gap = 0.0
        with open(state / "progress", "rb") as file:
            self._page = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")

    def _tick(self) -> int:
        return int(struct.unpack_from("<Q", self._page, 8)[0])

    def _look(self) -> None:
        last = self._tick()
        while not self._stop.wait(_POLL_SECONDS):
            now = self._tick()
            self.gap = max(self.gap, (now - last) / 1e9)
            last = now

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        time.sleep(0.02)  # the first tick after the window
        self._stop.set()
        self._thread.join()
        self._page.close()


def plain_dump(criu: Criu, pid: int, images: Path, *, leave_running: bool = True) -> float:
    """``criu dump`` into ``images``, as plain as can be; returns its seconds."""
    images.mkdir()
    command: list[str | Path] = [
        criu.path,
        "dump",
        "-t",
        str(pid),
        "-D",
        images,
        "-o",
        "dump.log",
        "-v1",
    ]
    command += [
        "--network-lock",
        "skip",
        "--manage-cgroups=ignore",
        *(["--leave-running"] if leave_running else []),
    ]
    return criu_run(command, images / "dump.log")


def criu_run(command: Sequence[str | Path], log: Path) -> float:
    """Run CRIU to its end; returns its seconds.

    Raises:
        RuntimeError: It failed; with the end of its log.
    """
    started = time.perf_counter()
    # Not captured: a restored process inherits CRIU's descriptors, and a pipe of them would never
    # end.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_CRIU_SECONDS,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
        raise RuntimeError(f"{command[1]} ended with status {done.returncode}: {said}")
    return seconds


def page_bytes(images: Path) -> int:
    """Bytes of memory in an image directory."""
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def peers(prefix: Path) -> dict[str, Path]:
    """Where tools/install-peers put what it installed; empty where it did not."""
    try:
        record = json.loads((prefix / "peers.json").read_text())["peers"]
    except FileNotFoundError:
        return {}
    return {name: Path(found["path"]) for name, found in record.items()}
