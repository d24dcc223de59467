"""A machine with fake GPUs, a keeper and CUDA processes; rule: all that it started and mounted is
gone when it is closed.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from icecore.errors import NotFound
from icecore.host.cuda.api import device_error
from icecore.host.kernel import procfs
from icecore.host.resident import keeper
from icecore.host.resident.client import Agent, Keeper
from tests import sanitized

HERE = Path(__file__).parent
MIB = 1 << 20
SECONDS = 30.0


def until(what: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return procfs.is_zombie(pid)
    except NotFound:
        return True


def uuid_of(gpu: int) -> str:
    """The UUID of a fake GPU."""
    return f"GPU-{uuid.UUID(bytes=bytes([0xA0 + gpu, *range(1, 16)]))}"


def build(folder: Path) -> None:
    """The fake libcuda and the stress program."""
    flags = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
    library = folder / "libcuda.so.1"
    for command in (
        [
            *flags,
            "-fPIC",
            "-shared",
            "-o",
            str(library),
            str(HERE / "fake_libcuda.c"),
            "-Wl,-soname,libcuda.so.1",
            f"-Wl,--version-script={HERE / 'fake_libcuda.map'}",
            "-lpthread",
            "-ldl",
        ],
        [*flags, "-o", str(folder / "stress"), str(HERE / "stress.c"), str(library), "-lpthread"],
    ):
        subprocess.run(command, check=True, timeout=120)


class Machine:
    """Fake GPUs, each a tmpfs of ``memory`` bytes, and a keeper.

    Args:
        programs: Where `build` put things.
        unfair: The driver's lock waits for a moment in which nobody is in a call.
        folder: Where all of it lies; a job with a private root does not see /dev/shm.
        world: It is the world of the fake driver, too (`icecore.host.cuda.fake`), which then locks
            and checkpoints its processes.
    """

    def __init__(
        self,
        programs: Path,
        gpus: int = 1,
        memory: int = 64 * MIB,
        unfair: bool = False,
        world: bool = False,
        folder: str = "/dev/shm",
    ) -> None:
        self.programs = programs
        self.unfair = unfair
        self.world = world
        self.root = Path(tempfile.mkdtemp(prefix="icecore-resident-", dir=folder))
        self.cuda = self.root / "cuda"
        self.directory = self.root / "resident"
        self.directory.mkdir()
        self._mounted: list[Path] = []
        self.processes: list[Process] = []
        for number in range(gpus):
            place = self.cuda / f"gpu{number}"
            place.mkdir(parents=True)
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={memory},mode=700", "none", str(place)],
                check=True,
                timeout=10,
            )
            self._mounted.append(place)
        if world:
            (self.cuda / "dev").mkdir()
            (self.cuda / "faults").mkdir()
            (self.cuda / "worker-faults").mkdir()
            for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
                (self.cuda / "dev" / name).touch()
            known = [
                {"uuid": uuid_of(number), "name": "Fake H200", "memory": memory, "minor": number}
                for number in range(gpus)
            ]
            (self.cuda / "inventory.json").write_text(
                json.dumps({"driver": "580.159.03", "gpus": known})
            )
        self.keeper = self.start_keeper()

    def start_keeper(self) -> Keeper:
        """A keeper, where none runs."""
        return keeper.start_keeper(self.directory)

    def keeper_pid(self) -> int:
        """The keeper's process."""
        wanted = str(self.directory / "keeper").encode()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                if file.read().split(b"\0")[1:2] == [wanted]:
                    return int(name)
        raise AssertionError("no keeper runs")

    def kill_keeper(self) -> None:
        """End the keeper as the kernel would."""
        pid = self.keeper_pid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid))

    def environment(self, resident: bool = True) -> dict[str, str]:
        """What a process needs."""
        base = {**os.environ, "LD_LIBRARY_PATH": str(self.programs), "FAKE_CUDA": str(self.cuda)}
        if self.world:
            base["FAKE_CUDA_WORLD"] = str(self.cuda)
        if not resident:
            return base
        ours = keeper.environment(str(self.directory), base)
        if sanitized.WANTED:
            ours["LD_PRELOAD"] = f"{sanitized.runtimes()}:{ours['LD_PRELOAD']}"
        return {**base, **ours}

    def target(self, resident: bool = True, **more: str) -> Target:
        """A process that evaluates expressions."""
        command = [sys.executable, "-I", str(HERE / "target.py")]
        made = Target(self, command, {**self.environment(resident), **more})
        assert made.read() == "ready"
        return made

    def stress(self, *arguments: int, **more: str) -> Process:
        """A process under load."""
        command = [str(self.programs / "stress"), *(str(one) for one in arguments)]
        made = Process(self, command, {**self.environment(), **more})
        assert made.line() == "ready"
        return made

    @contextmanager
    def pausing(self, call: str) -> Iterator[Callable[[], None]]:
        """Who comes into a call of the driver waits there until the end; what is given waits for
        somebody who does.
        """
        pause, paused = self.cuda / f"pause-{call}", self.cuda / f"paused-{call}"
        pause.touch()
        try:
            yield lambda: until(paused.exists)
        finally:
            pause.unlink()
            paused.unlink(missing_ok=True)

    def used(self, gpu: int = 0) -> int:
        """Bytes of a GPU in use, whoever holds them."""
        found = os.statvfs(self.cuda / f"gpu{gpu}")
        return (found.f_blocks - found.f_bfree) * found.f_bsize

    def close(self) -> None:
        """End and unmount all."""
        for process in self.processes:
            process.end()
        with suppress(AssertionError):
            self.kill_keeper()
        for place in self._mounted:
            subprocess.run(["umount", "-l", str(place)], check=False, timeout=10)
        shutil.rmtree(self.root, ignore_errors=True)


class Process:
    """A CUDA process that talks over its standard input and output."""

    def __init__(
        self, machine: Machine, command: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.machine = machine
        self.log = machine.root / f"log-{len(machine.processes)}"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._rest = b""
        self.pid = self._process.pid
        machine.processes.append(self)

    @property
    def agent(self) -> Agent:
        """Its agent."""
        return Agent(self.machine.directory, self.pid)

    def line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        end = time.monotonic() + SECONDS
        while b"\n" not in self._rest:
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, end - time.monotonic())
            )
            assert ready, f"process {self.pid} says nothing"
            piece = os.read(self._process.stdout.fileno(), 65536)
            assert piece, (
                f"process {self.pid} ended: {self._process.wait(SECONDS)} {self.log.read_text()}"
            )
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> int:
        """End its standard input; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(SECONDS)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    # -- the driver's lock

    def lock(self, seconds: float = SECONDS) -> None:
        """As cuCheckpointProcessLock: callers wait at the door, and those within have left.

        Of an unfair machine it is had only in a moment in which nobody is within, as the real one
        seems to be.
        """
        with (
            open(self.machine.cuda / f"process-{self.pid}", "r+b") as file,
            mmap.mmap(file.fileno(), 4096) as door,
        ):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if not self.machine.unfair or door[4:8] == bytes(4):
                    door[0:4] = struct.pack("i", 1)
                    if door[4:8] == bytes(4):
                        return
                    if self.machine.unfair:
                        door[0:4] = bytes(4)
                        _wake(door)
                time.sleep(0.0005)
        self.unlock()
        raise device_error("lock", self.pid, 600, "CUDA_ERROR_NOT_READY")

    def unlock(self) -> None:
        """As cuCheckpointProcessUnlock."""
        with (
            open(self.machine.cuda / f"process-{self.pid}", "r+b") as file,
            mmap.mmap(file.fileno(), 4096) as door,
        ):
            door[0:4] = struct.pack("i", 0)
            _wake(door)


class Target(Process):
    """A process that evaluates expressions (``target.py``)."""

    def read(self) -> Any:
        """Its answer."""
        answer = json.loads(self.line())
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def __call__(self, expression: str) -> Any:
        """Evaluate there."""
        self.say(expression)
        return self.read()


def _wake(door: mmap.mmap) -> None:
    import ctypes

    at = ctypes.addressof(ctypes.c_char.from_buffer(door))
    ctypes.CDLL(None).syscall(202, ctypes.c_void_p(at), 1, 1 << 30, None, None, 0)
