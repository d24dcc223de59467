"""icecore in a process of its own, driven by JSON lines: so that its memory can be measured, and
what it starts ends with it.

Rule: one request, one answer; a failure is an answer too.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve()
_SECONDS = 600.0


class WorkerFailed(Exception):
    """The worker could not do what it was asked; the message is its traceback."""


class Worker:
    """The other side: starts the process and asks it; a context manager."""

    def __init__(self) -> None:
        # As installed: its modules are not compiled anew at each start.
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=environment,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Have it do ``request``.

        Raises:
            WorkerFailed: It could not.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        self._process.stdin.flush()
        watchdog = threading.Timer(_SECONDS, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise WorkerFailed(f"the worker ended with status {self._process.wait(60)}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise WorkerFailed(answer["failed"])
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process.stdout.close()


# -- the process


def _kib(name: str) -> int:
    return next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name)
    )


class _Serving:
    """What the process keeps between requests."""

    def __init__(self) -> None:
        from icecore.store.runtime.loop import LoopThread

        self.loop = LoopThread()
        self.repository: Any = None
        self.restored: Any = None

    def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process so far."""
        return {"seconds": time.process_time()}

    def open(self, path: str, create: bool = False, encrypted: bool = False) -> dict[str, Any]:
        """Open or make the repository in ``path``."""
        from icecore.store.backend.local import LocalBackend
        from icecore.store.log.repository import StoredRepository

        make = StoredRepository.create if create else StoredRepository.open
        passphrase = (lambda: b"a passphrase for measuring") if encrypted else None
        self.repository = self.loop.run(
            make(LocalBackend(Path(path), create=create), passphrase=passphrase)
        )
        return {}

    def dump(self, pid: int, job: str, **options: Any) -> dict[str, Any]:
        """Take a snapshot; memory before and at the most, in bytes."""
        from icecore.dumper.dump import dump
        from icecore.dumper.options import DumpOptions
        from icecore.dumper.target import Target
        from icecore.events import Event

        events: dict[str, dict[str, Any]] = {}
        at: dict[str, float] = {}

        def emit(event: Event) -> None:
            state = event.fields.get("state")
            if state in ("begin", "end"):
                at[event.name + ("+" if state == "begin" else "")] = time.monotonic()
            if state == "end" or event.name == "dump.done":
                events[event.name] = event.fields

        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _kib("VmRSS")
        done = dump(
            self.repository,
            self.loop,
            Target.of_process(pid, job),
            DumpOptions(**options),
            emit=emit,
        )
        window = events["dump.window"]
        return {
            "snapshot": done.snapshot,
            "window": done.window_seconds,
            "freeze": window["freeze_seconds"],
            "scanned": window["bytes"],
            "inside": window["seconds"],
            "seconds": done.seconds,
            "changed": done.sizes.changed,
            "stored": done.sizes.stored,
            "spilled": done.spilled,
            "grown": _kib("VmHWM") - before,
            "at": {
                name: seconds - at["dump.window+"]
                for name, seconds in at.items()
                if seconds >= at["dump.window+"]
            },
            "phases": {name: fields.get("seconds") for name, fields in events.items()},
            "events": events,
        }

    def scan(self, pid: int, rounds: int, threads: int) -> dict[str, Any]:
        """Scan a process's private memory with nothing changed, and read it with nothing done to
        it: bytes per second of each, in turns.
        """
        import numpy as np

        from icecore.dumper.memory.cells import plan_cells
        from icecore.dumper.memory.known import KnownCells
        from icecore.dumper.memory.present import pages_of, private_regions
        from icecore.dumper.memory.scan import scan
        from icecore.dumper.memory.staging import Slot, Staging
        from icecore.host.kernel import libc, procfs
        from icecore.host.kernel.memory import HugeBuffer, RemoteReader
        from icecore.sizes import CELL_BYTES
        from icecore.store.format.cell import CELL

        regions = private_regions(procfs.read_maps(pid))
        plan = plan_cells(regions, pages_of(pid, regions, threads))
        firsts = plan.first_run.tolist()
        addresses = plan.runs.ctypes.data
        staging = Staging(64 * CELL_BYTES)
        staging.reserve(32)

        def release(_row: int, slot: Slot) -> None:
            staging.release(slot)

        def read(first: int, buffer: HugeBuffer) -> None:
            for row in range(first, len(plan), threads):
                count = firsts[row + 1] - firsts[row]
                libc.process_vm_readv(pid, buffer.iovec, 1, addresses + 16 * firsts[row], count, 0)

        def together(work: Callable[[int, HugeBuffer], None]) -> float:
            buffers = [HugeBuffer(CELL_BYTES) for _ in range(threads)]
            workers = [threading.Thread(target=work, args=(k, buffers[k])) for k in range(threads)]
            started = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return plan.bytes / (time.perf_counter() - started)

        floors, scans, stop = [], [], threading.Event()
        with RemoteReader(pid) as reader:
            arguments: Any = {
                "seed": 1,
                "staging": staging,
                "threads": threads,
                "keep": release,
                "stop": stop,
            }
            first = scan(plan, reader, KnownCells.none(), **arguments)
            known = KnownCells(plan.key, first.fingerprint, np.zeros(len(plan), CELL))
            for _ in range(rounds):
                floors.append(together(read))
                started = time.perf_counter()
                scan(plan, reader, known, **arguments)
                scans.append(plan.bytes / (time.perf_counter() - started))
        return {"bytes": plan.bytes, "floors": floors, "scans": scans}

    def restore(self, snapshot: str, mode: str, threads: int = 0, **more: Any) -> dict[str, Any]:
        """Restore; the wall clock at the call, seconds until it returned, and the fields of what
        had ended by then.
        """
        from icecore.restorer.options import RestoreOptions
        from icecore.restorer.restore import restore

        phases: dict[str, Any] = {}
        events: dict[str, dict[str, Any]] = {}

        def emit(event: Any) -> None:
            if event.fields.get("state") == "end":
                events[event.name] = event.fields
            phases[f"{event.name}{'+' if event.fields.get('state') == 'begin' else ''}"] = (
                time.time_ns() - called_ns
            )

        called_ns, called = time.time_ns(), time.perf_counter()
        assert mode in ("full", "lazy")
        options = RestoreOptions(
            mode="lazy" if mode == "lazy" else "full", threads=threads, detach=False, **more
        )
        self.restored = restore(self.repository, self.loop, snapshot, options, emit=emit)
        seconds = time.perf_counter() - called
        return {
            "called_ns": called_ns,
            "seconds": seconds,
            "pid": self.restored.pid,
            "at": phases,
            "events": dict(events),
        }

    def resident(self) -> dict[str, Any]:
        """Seconds from the call of `restore` until all memory was there."""
        return {"seconds": self.restored.wait_resident(120)}

    def ended(self) -> dict[str, Any]:
        """Wait for the end of the restored tree, which somebody else has killed."""
        self.restored.wait(60)
        return {}

    def import_directory(self, directory: str, job: str) -> dict[str, Any]:
        """Import an image directory."""
        from icecore.dumper.importer import import_images

        started = time.perf_counter()
        done = import_images(self.repository, self.loop, directory, job)
        return {
            "snapshot": done.snapshot,
            "seconds": time.perf_counter() - started,
            "stored": done.sizes.stored,
        }

    def export(self, snapshot: str, directory: str) -> dict[str, Any]:
        """Write a snapshot as an image directory."""
        from icecore.restorer.files.exporter import export

        started = time.perf_counter()
        export(self.repository, self.loop, snapshot, Path(directory))
        return {"seconds": time.perf_counter() - started}


def main() -> None:
    """Serve requests until standard input ends."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: never outlive the benchmark
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serving = _Serving()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(serving, request.pop("request"))(**request)
        except Exception:  # noqa: BLE001 - told to the other side
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    serving.loop.close()


if __name__ == "__main__":
    main()
