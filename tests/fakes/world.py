"""A machine with fake GPUs, and programs that use them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes import fake_cuda
from tests.fakes.foreseen import Foreseen, lines_after, size_of
from tests.programs import driving

PROGRAM = Path(fake_cuda.__file__)
GPUS = tuple(f"GPU-{n:08x}-0000-4000-8000-00000000000{n}" for n in range(4))
MIB = 3


@functools.cache
def library() -> str:
    """What `PROGRAM` loads, compiled for this session, where jobs with a private /dev/shm see it
    too.
    """
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="icecore-fake-device-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built, source = folder / "fake_device.so", PROGRAM.with_name("fake_device.c")
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["cc", *flags, "-o", built, source], check=True, timeout=60)
    return str(built)


class World:
    """A fake driver's world in a directory on tmpfs; everything in its environment variable
    ``ICECORE_CUDA``.

    Args:
        nodes: Its device files are some, and not plain files: of drivers that CRIU cannot dump, of
            which loop devices can be mapped.
    """

    def __init__(self, root: Path, *, nodes: bool = False) -> None:
        self.root = root
        (root / "dev").mkdir(parents=True)
        (root / "faults").mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(len(GPUS)))):
            if nodes:
                path = (
                    "/dev/fuse"
                    if name == "nvidiactl"
                    else "/dev/loop-control"
                    if name == "nvidia-uvm"
                    else f"/dev/loop{name[-1]}"
                )
                about = os.stat(path)
                os.mknod(root / "dev" / name, about.st_mode, about.st_rdev)
            else:
                (root / "dev" / name).touch()
        for gpu in GPUS:
            (root / "gpu" / gpu).mkdir(parents=True)
        self.driver = "580.159.03"
        self.gpus = [
            {"uuid": gpu, "name": "Fake H200", "memory": 8 << 30, "minor": n}
            for n, gpu in enumerate(GPUS)
        ]
        self.more: dict[str, object] = {}
        self.write()
        self._faults = 0

    def write(self) -> None:
        """The inventory as it is now."""
        text = json.dumps({"driver": self.driver, "gpus": self.gpus, **self.more})
        (self.root / "inventory.json").write_text(text)

    def fault(self, call: str, **how: object) -> None:
        """The next such call goes wrong."""
        self._faults += 1
        (self.root / "faults" / f"{self._faults:04d}").write_text(json.dumps({"call": call, **how}))

    def clear_faults(self) -> None:
        """No call goes wrong any more."""
        for path in (self.root / "faults").iterdir():
            path.unlink()

    def clear(self) -> None:
        """What killed processes have left on the GPUs is gone, as the real driver sees to."""
        for path in (self.root / "gpu").glob("*/*"):
            path.unlink()

    def move(self, folder: Path) -> None:
        """To a path that a job with a private /dev/shm sees too."""
        shutil.move(self.root, folder / "world")
        self.root = folder / "world"

    def on(self, gpu: str) -> int:
        """How many pieces of device memory there are on a GPU."""
        return len(list((self.root / "gpu" / gpu).iterdir()))


class Target:
    """A running program.

    Args:
        folder: Its output goes there.
        gpus: One for each process.
        lent: Each uses memory of the driver in a thread that nothing but being stopped holds back
            from it.
        workers: Each forks so many.
        late: A GPU that one more child begins to use when it is sent SIGUSR2.
        gpuless: The first process uses none.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        gpus: Sequence[str] = GPUS[:1],
        *,
        mib: int = MIB,
        busy: float = 0.0,
        also: Sequence[str] = (),
        out: str = "",
        lent: bool = False,
        workers: int = 0,
        late: str = "",
        gpuless: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mib = mib
        self.out = folder / "lines"
        self.outs = [self.out, *(folder / f"lines.{n}" for n in range(1, len(gpus)))]
        self.order = {
            "library": library(),
            "world": str(world.root),
            "gpu": gpus[0],
            "children": list(gpus[1:]),
            "mib": mib,
            "out": out or str(self.out),
            "busy": busy,
            "also": list(also),
            "lent": lent,
            "workers": workers,
            "late": late,
            "gpuless": gpuless,
        }
        self.command = [sys.executable, "-S", str(PROGRAM), json.dumps(self.order)]
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self._foreseen = Foreseen(fake_cuda.foreseen(mib))

    def start(self, environment: dict[str, str] | None = None) -> int:
        """Start it, and wait until all its processes make steps; its pid."""
        log = open(self.out.with_name("log"), "ab")  # noqa: SIM115 - inherited
        with log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.out.parent,
                env={**os.environ, **(environment or {})},
            )
        self.wait_steps(3)
        self.pids = driving.tree_of(self.process.pid)
        return self.process.pid

    @property
    def pid(self) -> int:
        """Its first process."""
        assert self.process is not None
        return self.process.pid

    def lines(self, number: int = 0) -> list[str]:
        """What one of its processes has written."""
        with suppress(FileNotFoundError):
            return self.outs[number].read_text().split("\n")[:-1]
        return []

    def wait_steps(self, more: int, seconds: float = 20.0) -> None:
        """Wait until every process has made so many steps more than now."""
        before = [(out, size_of(out)) for out in self.outs]
        end = time.monotonic() + seconds
        while any(lines_after(out, size) < more for out, size in before):
            assert time.monotonic() < end, (
                f"no steps: {self.out.with_name('log').read_text()[-2000:]}"
            )
            time.sleep(0.005)

    def is_right(self) -> None:
        """Every line is what an undisturbed process would have written."""
        for number in range(len(self.outs)):
            lines = self.lines(number)
            assert lines == self._foreseen.first(len(lines))

    def reap(self) -> None:
        """After a dump that stopped it, or a kill: no pid of it is taken any more."""
        end = time.monotonic() + 20
        for pid in self.pids:
            while os.path.exists(f"/proc/{pid}"):
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                assert time.monotonic() < end, f"process {pid} is still there"
                time.sleep(0.002)

    def kill(self) -> None:
        """End it, restored or not."""
        for pid in driving.members(self.out.parent):
            driving.kill_tree(pid)
        self.reap()
