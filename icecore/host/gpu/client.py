"""The client of the helper: many calls at once, each of which returns or raises even if the helper
dies.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from icecore.errors import IcecoreError
from icecore.host.cuda.api import (
    Checkpointed,
    DeviceError,
    DriverMissing,
    Placement,
    State,
    device_error,
    helper_lost,
)
from icecore.host.rpc.calls import Call, Client, Refusal

#: A call that moves memory takes as long as the memory is large; this only ends what hangs.
CALL_SECONDS = 900.0
#: numpy's linear algebra library, which no program here uses, starts threads that spin for a while.
QUIET = {"OPENBLAS_NUM_THREADS": "1"}
_START_SECONDS = 60.0

#: Starts a program: its argument vector with ``{control}`` and ``{life}`` for descriptor numbers,
#: and the socket that becomes ``{control}``. Returns the process if it is a child of this one.
Start = Callable[[Sequence[str], socket.socket], "subprocess.Popen[bytes] | None"]


def program(module: str, word: str, gpus: Collection[str] = ()) -> list[str]:
    """Return the argument vector of a module of this package.

    Args:
        word: Shows in its command line.
        gpus: UUIDs of those that it uses; empty: any. CUDA takes some 0.2 s to initialise each that
            it sees.
    """
    words = [sys.executable, "-P", "-m", f"icecore.host.gpu.{module}", "{control}", "{life}", word]
    return [*words, ",".join(sorted(gpus))] if gpus else words


def start_here(command: Sequence[str], control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a program as a child of this process, in a session of its own."""
    life = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        numbers = {"{control}": str(control.fileno()), "{life}": str(life)}
        return subprocess.Popen(
            [numbers.get(word, word) for word in command],
            pass_fds=[control.fileno(), life],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **QUIET},
            start_new_session=True,
        )
    finally:
        os.close(life)


class Helper(Client):
    """A helper process (a context manager: on exit the helper first unlocks what it had locked,
    then ends).

    Args:
        start: How it is started.
        word, gpus: See `program`.
    """

    _patience = 60.0

    def __init__(self, start: Start, word: str, gpus: Collection[str] = ()) -> None:
        super().__init__(partial(start, program("helper", word, gpus)), "cuda")

    def wait_ready(self) -> int:
        """Wait until it has initialised CUDA, and return its pid.

        Raises:
            DriverMissing: It cannot be.
        """
        return int(self._value(self._ready, _START_SECONDS))

    def state(self, pid: int) -> State:
        """See `DeviceCheckpoint`, as the next ones."""
        return State(self._value(self._begin("state", pid)))

    def restore_thread(self, pid: int) -> int:
        """Return the thread in which the driver restores a process."""
        return int(self._value(self._begin("restore-thread", pid)))

    def holder(self) -> socket.socket:
        """Return the socket end, for the caller to close, of the plugin in the CRIU that will hold
        the processes. Does not wait until the helper is ready.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            self._begin("holder", 0, [ours.fileno()])
        return theirs

    def hold(self, pids: Collection[int], seconds: float) -> bool:
        """Wait until CRIU holds the tree, and let the driver's threads in these processes run.

        Returns:
            Whether it holds it: it may have ended, or take longer.

        Raises:
            DeviceError: They do not run.
        """
        call = self._begin("hold", 0, pids=list(pids), seconds=seconds)
        return bool(self._value(call, seconds + self._patience))

    def bind(self, root: int) -> None:
        """Make a process and all its descendants die if the CRIU that holds them ends before it
        releases them.

        Raises:
            DeviceError: No CRIU holds them, or the root has ended.
        """
        self._value(self._begin("bind", root))

    def find(self, root: int, own: Collection[int]) -> dict[int, int]:
        """Return the processes below ``root``, itself included, whose own pid is in ``own``: own
        pid (as the process sees itself) → pid here. Missing ones are left out.

        The helper searches because nothing else uses its interpreter. In the restorer, threads
        would wait for each other at each file of /proc.

        Raises:
            DeviceError: The root has ended.
        """
        return dict(self._value(self._begin("find", root, own=list(own))))

    def go_on(self) -> None:
        """Stop the driver's threads again and let CRIU continue.

        Raises:
            DeviceError: It does not.
        """
        self._value(self._begin("go-on", 0))

    def leave(self) -> None:
        """Tell CRIU not to wait for anything: the processes are dead."""
        self._value(self._begin("leave", 0))

    def lock(self, pids: Iterable[int], seconds: float) -> dict[int, DeviceError]:
        """Lock all at once; return the failures."""
        return self._each("lock", {pid: {"seconds": seconds} for pid in pids})[1]

    def checkpoint(
        self, pids: Iterable[int], *, populate: bool = False, copying: Container[int] = ()
    ) -> tuple[dict[int, Checkpointed], dict[int, DeviceError]]:
        """Checkpoint all at once; return where their memory is now, and the failures.

        Args:
            populate: Whether to create the driver's mappings for it.
            copying: The processes that create these mappings and make the driver's copies
                themselves.
        """
        done, failed = self._each(
            "checkpoint",
            {pid: {"populate": populate, "copies": pid in copying} for pid in pids},
        )
        return {
            pid: Checkpointed(Placement(placement), *made)
            for pid, (placement, *made) in done.items()
        }, failed

    def restore(self, gpus: Mapping[int, Mapping[str, str]]) -> dict[int, DeviceError]:
        """Restore all at once (pid → its pairs of GPUs); return the failures."""
        return self._each("restore", {pid: {"gpus": dict(pairs)} for pid, pairs in gpus.items()})[1]

    def begin_restore(self, pid: int, gpus: Mapping[str, str]) -> Call:
        """Begin to restore one; the call ends with an answer or a `DeviceError`."""
        return self._begin("restore", pid, gpus=dict(gpus))

    def unlock(self, pids: Iterable[int]) -> dict[int, DeviceError]:
        """Unlock all at once; return the failures."""
        return self._each("unlock", {pid: {} for pid in pids})[1]

    def deadline(self, seconds: float | None) -> None:
        """Set the time from which on everything locked is made to run again, whatever this process
        does. None: no such time.
        """
        self._value(self._begin("deadline", 0, seconds=seconds))

    def adopt(self, pids: Sequence[int]) -> None:
        """Take over processes that another helper had locked."""
        self._value(self._begin("adopt", 0, pids=list(pids)))

    def resident(self, agents: Sequence[tuple[str, int, int]]) -> None:
        """Set whose resident memory is also given back when everything is undone: directory, pid as
        the process sees itself, pid here. Empty: nobody's.
        """
        self._value(self._begin("resident", 0, agents=[list(one) for one in agents]))

    def undo(self) -> dict[int, str]:
        """Make everything that was locked here run again; return the failures."""
        found: dict[str, str] = self._value(self._begin("undo", 0), CALL_SECONDS)
        return {int(pid): why for pid, why in found.items()}

    # -- within

    def _value(self, call: Call, seconds: float | None = None) -> Any:
        return self._result(call, seconds).value

    def _each(
        self, name: str, arguments: Mapping[int, Mapping[str, object]]
    ) -> tuple[dict[int, Any], dict[int, DeviceError]]:
        end = time.monotonic() + CALL_SECONDS
        calls = {pid: self._begin(name, pid, (), **more) for pid, more in arguments.items()}
        done, failed = {}, {}
        for pid, call in calls.items():
            try:
                done[pid] = self._value(call, max(0.0, end - time.monotonic()))
            except DeviceError as error:
                failed[pid] = error
        return done, failed

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(
            subprocess.TimeoutExpired
        ):  # it undoes what it can; nothing is left to do here
            process.wait(CALL_SECONDS)

    def _refused(self, call: Call, why: Refusal) -> IcecoreError:
        if call is self._ready:
            return DriverMissing(why.text, cure=why.cure)
        return device_error(why.call or call.name, why.pid or call.of, why.code, why.text)

    def _died(self, call: Call) -> IcecoreError:
        if call is self._ready:
            return DriverMissing(
                "the helper that initialises CUDA ended", cure="look into the kernel's log: dmesg"
            )
        return helper_lost(call.name, call.of)

    def _late(self, call: Call, seconds: float) -> IcecoreError:
        if call is self._ready:
            return DriverMissing(
                f"CUDA was not initialised within {seconds:.0f} s",
                cure="look what 'nvidia-smi' says",
            )
        return device_error(call.name, call.of, 600, f"no answer within {seconds:.0f} s")
