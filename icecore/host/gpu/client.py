"""The client of the helper: many calls at once, each of which returns or raises even if the helper
dies.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from icecore.host.cuda.api import (
    Checkpointed,
    DeviceError,
    DriverMissing,
    Placement,
    State,
    device_error,
    helper_lost,
)
from icecore.host.gpu.helper import MESSAGE

#: A call that moves memory takes as long as the memory is large; this only ends what hangs.
CALL_SECONDS = 900.0
_BOUND_AT_ONCE = 4096
_START_SECONDS = 60.0
_STATE_SECONDS = 60.0

#: Starts a program: its argument vector with ``{control}`` and ``{life}`` for descriptor numbers,
#: and the socket that becomes ``{control}``. Returns the process if it is a child of this one.
Start = Callable[[Sequence[str], socket.socket], "subprocess.Popen[bytes] | None"]


def helper_command(word: str) -> list[str]:
    """Return the argument vector of a helper; ``word`` shows in its command line."""
    return [sys.executable, "-P", "-m", "icecore.host.gpu.helper", "{control}", "{life}", word]


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
            start_new_session=True,
        )
    finally:
        os.close(life)


class Helper:
    """A helper process (a context manager: on exit the helper first unlocks what it had locked,
    then ends).

    Args:
        start: How it is started.
        word: Shows in its command line.
    """

    def __init__(self, start: Start, word: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._waiting: dict[int, tuple[str, int, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._next = 1
        self._lost = False
        self._ready: Future[Any] = Future()
        self._waiting[0] = ("start", 0, self._ready)
        try:
            with theirs:
                self._process = start(helper_command(word), theirs)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._receive, name="cuda", daemon=True)
        self._thread.start()

    def wait_ready(self) -> int:
        """Wait until it has initialised CUDA, and return its pid.

        Raises:
            DriverMissing: It cannot be.
        """
        try:
            return int(self._ready.result(_START_SECONDS))
        except FutureTimeout:
            raise DriverMissing(
                f"CUDA was not initialised within {_START_SECONDS:.0f} s",
                cure="look what 'nvidia-smi' says",
            ) from None

    def state(self, pid: int) -> State:
        """See `DeviceCheckpoint`, as the next ones."""
        return State(self._result(self._send("state", pid), "state", pid, _STATE_SECONDS))

    def restore_thread(self, pid: int) -> int:
        """Return the thread in which the driver restores a process."""
        return int(
            self._result(self._send("restore-thread", pid), "restore-thread", pid, _STATE_SECONDS)
        )

    def holder(self) -> socket.socket:
        """Return the socket end, for the caller to close, of the plugin in the CRIU that will hold
        the processes. Does not wait until the helper is ready.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            self._pass("holder", 0, [ours.fileno()], {})
        return theirs

    def hold(self, pids: Collection[int], seconds: float) -> bool:
        """Wait until CRIU holds the tree, and let the driver's threads in these processes run.

        Returns:
            Whether it holds it: it may have ended, or take longer.

        Raises:
            DeviceError: They do not run.
        """
        found = self._result(
            self._send("hold", 0, pids=list(pids), seconds=seconds),
            "hold",
            0,
            seconds + _STATE_SECONDS,
        )
        return bool(found)

    def bind(self, pids: Collection[int]) -> None:
        """Make these processes die with the CRIU that holds them if it ends before it releases
        them.

        Raises:
            DeviceError: It does not hold them.
        """
        every = list(pids)
        for at in range(0, len(every), _BOUND_AT_ONCE):  # a message has room for so many
            self._result(
                self._send("bind", 0, pids=every[at : at + _BOUND_AT_ONCE]),
                "bind",
                0,
                _STATE_SECONDS,
            )

    def go_on(self) -> None:
        """Stop the driver's threads again and let CRIU continue.

        Raises:
            DeviceError: It does not.
        """
        self._result(self._send("go-on", 0), "go-on", 0, _STATE_SECONDS)

    def leave(self) -> None:
        """Tell CRIU not to wait for anything: the processes are dead."""
        self._result(self._send("leave", 0), "leave", 0, _STATE_SECONDS)

    def lock(self, pids: Iterable[int], seconds: float) -> dict[int, DeviceError]:
        """Lock all at once; return the failures."""
        return self._each("lock", {pid: {"seconds": seconds} for pid in pids})[1]

    def checkpoint(
        self, pids: Iterable[int], *, populate: bool = True
    ) -> tuple[dict[int, Checkpointed], dict[int, DeviceError]]:
        """Checkpoint all at once; return where their memory is now, and the failures. ``populate``:
        create the driver's mappings for it.
        """
        done, failed = self._each("checkpoint", {pid: {"populate": populate} for pid in pids})
        return {
            pid: Checkpointed(Placement(placement), *made)
            for pid, (placement, *made) in done.items()
        }, failed

    def restore(self, gpus: Mapping[int, Mapping[str, str]]) -> dict[int, DeviceError]:
        """Restore all at once (pid → its pairs of GPUs); return the failures."""
        return self._each("restore", {pid: {"gpus": dict(pairs)} for pid, pairs in gpus.items()})[1]

    def begin_restore(self, pid: int, gpus: Mapping[str, str]) -> Future[Any]:
        """Begin to restore one; the future ends with None or a `DeviceError`."""
        return self._send("restore", pid, gpus=dict(gpus))

    def unlock(self, pids: Iterable[int]) -> dict[int, DeviceError]:
        """Unlock all at once; return the failures."""
        return self._each("unlock", {pid: {} for pid in pids})[1]

    def deadline(self, seconds: float | None) -> None:
        """Set the time from which on everything locked is made to run again, whatever this process
        does. None: no such time.
        """
        self._result(self._send("deadline", 0, seconds=seconds), "deadline", 0, _STATE_SECONDS)

    def adopt(self, pids: Sequence[int]) -> None:
        """Take over processes that another helper had locked."""
        self._result(self._send("adopt", 0, pids=list(pids)), "adopt", 0, _STATE_SECONDS)

    def resident(self, agents: Sequence[tuple[str, int, int]]) -> None:
        """Set whose resident memory is also given back when everything is undone: directory, pid as
        the process sees itself, pid here. Empty: nobody's.
        """
        self._result(
            self._send("resident", 0, agents=[list(one) for one in agents]),
            "resident",
            0,
            _STATE_SECONDS,
        )

    def undo(self) -> dict[int, str]:
        """Make everything that was locked here run again; return the failures."""
        found: dict[str, str] = self._result(self._send("undo", 0), "undo", 0, CALL_SECONDS)
        return {int(pid): why for pid, why in found.items()}

    def close(self) -> None:
        """End the helper. May be called twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        if self._process is not None:
            with suppress(
                subprocess.TimeoutExpired
            ):  # it undoes what it can; nothing more can be done from here
                self._process.wait(CALL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- within

    def _send(self, call: str, pid: int, **more: object) -> Future[Any]:
        return self._pass(call, pid, [], more)

    def _pass(
        self, call: str, pid: int, descriptors: Sequence[int], more: Mapping[str, object]
    ) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            if self._lost:
                future.set_exception(helper_lost(call, pid))
                return future
            self._waiting[number] = (call, pid, future)
        try:
            message = json.dumps({"id": number, "call": call, "pid": pid, **more}).encode()
            socket.send_fds(self._socket, [message], descriptors)
        except OSError:
            self._end()
        return future

    def _each(
        self, call: str, arguments: Mapping[int, Mapping[str, object]]
    ) -> tuple[dict[int, Any], dict[int, DeviceError]]:
        end = time.monotonic() + CALL_SECONDS
        futures = {pid: self._send(call, pid, **more) for pid, more in arguments.items()}
        done, failed = {}, {}
        for pid, future in futures.items():
            try:
                done[pid] = self._result(future, call, pid, max(0.0, end - time.monotonic()))
            except DeviceError as error:
                failed[pid] = error
        return done, failed

    def _result(self, future: Future[Any], call: str, pid: int, seconds: float) -> Any:
        try:
            return future.result(seconds)
        except FutureTimeout:
            raise device_error(call, pid, 600, f"no answer within {seconds:.0f} s") from None

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(MESSAGE)
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            answer: dict[str, Any] = json.loads(data)
            with self._lock:
                call, _, future = self._waiting.pop(answer["id"], ("", 0, None))
            if future is None:
                continue
            error = answer.get("error")
            if error is None:
                future.set_result(answer["value"])
            elif call == "start":
                future.set_exception(DriverMissing(error["message"], cure=error["cure"]))
            else:
                future.set_exception(
                    device_error(error["call"], error["pid"], error["code"], error["name"])
                )

    def _end(self) -> None:
        """Fail all pending calls: the helper is gone."""
        with self._lock:
            self._lost = True
            waiting, self._waiting = self._waiting, {}
        for call, pid, future in waiting.values():
            if call == "start":
                future.set_exception(
                    DriverMissing(
                        "the helper that initialises CUDA ended",
                        cure="look into the kernel's log: dmesg",
                    )
                )
            else:
                future.set_exception(helper_lost(call, pid))
