"""Jobs on real GPUs, their snapshots and restores, and what was measured; needs neither pytest nor
anything of the other tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import icecore
from icecore.config import Config
from icecore.errors import NotFound
from icecore.events import Event
from icecore.host.jobs.namespaces import Isolation
from icecore.host.kernel import procfs
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.keeper import environment, start_keeper

HERE = Path(__file__).resolve().parent
WINDOW_SECONDS = 240.0


def lack(gpus: int = 1, *modules: str) -> str:
    """Why a test cannot run here; "": it can."""
    from icecore.errors import IcecoreError
    from icecore.host.cuda.inventory import read_inventory

    if not os.path.exists("/dev/nvidiactl"):
        return "this machine has no NVIDIA GPU"
    if os.geteuid() != 0:
        return "CRIU needs root"
    try:
        found = len(read_inventory().gpus)
    except IcecoreError as error:
        return str(error)
    if found < gpus:
        return f"this machine has {found} GPUs, {gpus} are needed"
    for module in ("cuda.bindings", *modules):
        try:
            __import__(module)
        except ImportError as error:
            return f"{sys.executable} has no {module}: {error}"
    return ""


class Lab:
    """A folder with a repository, the jobs that were started in it, and a table of what was
    measured.

    Args:
        folder: Empty; on a disk that exists in a private root too (not /dev/shm).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = Config(state=str(folder / "state"))
        self.repository = icecore.Repository.create(folder / "repository")
        self.rows: list[dict[str, Any]] = []
        # Restored trees become children of this process once nobody else is their parent: their
        # pids are then free again.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._started: list[subprocess.Popen[bytes]] = []
        self._place = Path(f"/run/icecore/resident/test-{os.getpid()}-{folder.name}")
        self.keeper: Keeper | None = None

    def close(self) -> None:
        """End every job."""
        for job in icecore.Registry(Path(self.config.state)).instances():
            if job.alive:
                job.kill(signal.SIGKILL)
            if job.description.keep_resident:
                job.wait(60)
                icecore.Registry(Path(self.config.state)).remove(job)
        for process in self._started:
            self.kill(process.pid)
        if self.keeper is not None:
            for held in self.keeper.processes():
                self.keeper.forget(held.token)
            shutil.rmtree(self._place)
        self.repository.close()

    # -- jobs

    def resident(self) -> dict[str, str]:
        """What a process has in its environment whose device memory is to stay where it is."""
        if self.keeper is None:
            self._place.mkdir(parents=True)
            self.keeper = start_keeper(self._place)
        return environment(str(self._place), {})

    def resident_bytes(self, pid: int) -> int:
        """What a process of this machine, or one of its children, has in resident memory."""
        agents = (Agent(self._place, one) for one in (pid, *procfs.children(pid)))
        return sum(one.report().counts.resident_bytes for one in agents if one.exists)

    def plain(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        program: str | Path = sys.executable,
    ) -> int:
        """A process of this machine, as a user would have started it; its pid."""
        log = open(self.folder / f"log{len(self._started)}", "wb")  # noqa: SIM115 - inherited
        with log:
            process = subprocess.Popen(
                [program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env={**os.environ, "USE_LIBUV": "0", **(environment or {})},
            )
        self._started.append(process)
        return process.pid

    def run(
        self,
        name: str,
        *words: str,
        network: bool = False,
        resident: bool = True,
        keep_resident: bool = False,
        environment: Mapping[str, str] | None = None,
        private_tmp: bool = False,
        data: Sequence[Path] = (),
    ) -> icecore.Job:
        """A job of `icecore run --gpu`."""
        isolation = (
            Isolation(network=network, root=True, tmp=private_tmp)
            if network or private_tmp
            else None
        )
        return icecore.run(
            [sys.executable, *words],
            name=name,
            isolation=isolation,
            cwd=self.folder,
            environment={**os.environ, **(environment or {})},
            gpu=True,
            keep_resident=keep_resident,
            data=data,
            config=replace(self.config, run=replace(self.config.run, resident=resident)),
            emit=self.tell,
        )

    def kill(self, root: int, seconds: float = 60.0) -> None:
        """Kill a tree, and wait until all its pids are free."""
        with suppress(NotFound):
            tree = procfs.tree(root)
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap(tree, seconds)

    def reap(self, pids: Sequence[int], seconds: float = 60.0) -> None:
        """Wait until these, which were killed, are gone: they may have become children of this
        process.
        """
        end = time.monotonic() + seconds
        for pid in pids:
            while os.path.exists(f"/proc/{pid}"):
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                if time.monotonic() > end:
                    raise TimeoutError(f"process {pid} does not go away: {procfs.status(pid)}")
                time.sleep(0.01)

    def reap_ended(self, seconds: float = 1.0) -> None:
        """Reap all ended children, whatever their pids, until none has ended for ``seconds``."""
        until = time.monotonic() + seconds
        with suppress(ChildProcessError):
            while time.monotonic() < until:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    until = time.monotonic() + seconds
                else:
                    time.sleep(0.01)

    # -- snapshots

    def dump(
        self,
        target: int | str,
        *,
        at: Mapping[tuple[str, str], Callable[[], None]] | None = None,
        **options: Any,
    ) -> icecore.DumpResult:
        """Take a snapshot, and note what it took.

        Args:
            at: What is called at an event (name and state).
        """
        events: list[Event] = []
        began = time.monotonic()
        chosen = icecore.DumpOptions(max_window=WINDOW_SECONDS, **options)

        def emit(event: Event) -> None:
            events.append(event)
            hook = (at or {}).get((event.name, str(event.fields.get("state", ""))))
            if hook is not None:
                hook()

        result = icecore.dump(target, self.repository, chosen, config=self.config, emit=emit)
        copied = {
            event.name: event.fields.get("bytes", 0)
            for event in events
            if event.name in ("dump.resident.precopy", "dump.resident.copy")
            and event.fields.get("state") == "end"
        }
        self.note(
            "dump",
            time.monotonic() - began,
            events,
            window=result.window_seconds,
            device=result.sizes.device,
            logical=result.sizes.logical,
            changed=result.sizes.changed,
            stored=result.sizes.stored,
            copied=copied,
            encoders=[
                event.fields["encoders"]
                for event in events
                if event.name == "dump.store" and event.fields.get("state") == "end"
            ],
            early={
                key: event.fields.get(key)
                for event in events
                if event.name == "dump.early" and event.fields.get("state") == "end"
                for key in ("bytes", "shared")
            },
        )
        return result

    def restore(self, snapshot: str, **options: Any) -> icecore.Restored:
        """Bring a snapshot back, and note what it took."""
        events: list[Event] = []
        began = time.monotonic()
        chosen = icecore.RestoreOptions(**options)
        restored = icecore.restore(
            snapshot, self.repository, chosen, config=self.config, emit=events.append
        )
        running = time.monotonic() - began
        restored.wait_resident(600)
        self.note("restore", running, events, mode=chosen.mode)
        return restored

    def note(self, what: str, seconds: float, events: Sequence[Event], **more: Any) -> None:
        """A row of the table."""
        phases = {
            event.name: round(float(event.fields["seconds"]), 3)  # type: ignore[arg-type]
            for event in events
            if event.fields.get("state") == "end" and "seconds" in event.fields
        }
        row = {"what": what, "seconds": round(seconds, 3), **more, "phases": phases}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def logs(self) -> str:
        """What the plain processes said last."""
        return "\n".join(
            path.read_text(errors="replace")[-2000:] for path in self.folder.glob("log*")
        )

    @staticmethod
    def tell(event: Event) -> None:
        """Show an event."""
        print(json.dumps(event.as_json(), default=str), flush=True)


def lines(path: Path) -> list[str]:
    """The whole lines of a file."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def wait_lines(
    path: Path, count: int, what: Callable[[], str] = str, seconds: float = 180.0
) -> list[str]:
    """Wait until a file has that many lines.

    Args:
        what: Says more where it does not.
    """
    end = time.monotonic() + seconds
    while len(found := lines(path)) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{path} has {len(found)} lines, not {count}: {what()}")
        time.sleep(0.01)
    return found


def same(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Every line is the wanted one, bit for bit."""
    if len(found) > len(wanted):
        raise AssertionError(f"{len(found)} lines, of which {len(wanted)} are known")
    differ = [
        number
        for number, (one, other) in enumerate(zip(found, wanted, strict=False))
        if one != other
    ]
    if differ:
        first = max(differ[0] - 2, 0)
        raise AssertionError(
            f"{len(differ)} of {len(found)} lines are others, from {differ[0] + 1} to {differ[-1] + 1}: {found[first : first + 8]}, "
            f"not {wanted[first : first + 8]}"
        )
