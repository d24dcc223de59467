"""The helper: the one process of a dump or restore in which CUDA is initialised; its rule: when its client is gone, every process it locked runs again.

It is started by the guard of a dump (or by the restorer), outlives both where it must, and is never part of a job. Over a SOCK_SEQPACKET socket
it gets one JSON object a message, ``{"id": 1, "call": "lock", "pid": 123, …}``, and answers ``{"id": 1, "value": …}`` or ``{"id": 1, "error": {…}}``; each call
has a thread of its own. When the socket ends (its client died, or is done), or the deadline that it was given passes, it waits until CRIU
has let go of the processes that it locked and has not unlocked, brings them back to running, and ends.

Arguments: the number of the socket's descriptor, that of a pipe which it only holds (whoever has the other end learns of its end), and a word that
stands in its command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from icecore.errors import IcecoreError, NotFound
from icecore.host import procfs
from icecore.host.cuda.api import DeviceCheckpoint, DeviceError, IllegalState, State
from icecore.host.cuda.backend import find_backend
from icecore.host.cuda.populate import Populating
from icecore.host.resident.client import Agent

MESSAGE = 1 << 16
_TRACED_SECONDS = 300.0
_POLL_SECONDS = 0.005
_WORKER_SECONDS = 10.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.2


class Undo:
    """Remembers which processes were locked here and are not running again, and makes them run."""

    def __init__(self, api: DeviceCheckpoint) -> None:
        self._api = api
        self._touched: dict[int, int] = {}
        self._agents: list[Agent] = []
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()

    def locking(self, pid: int) -> None:
        """A process is about to be locked."""
        with self._lock:
            self._touched[pid] = procfs.start_time(pid)

    def running(self, pid: int) -> None:
        """It runs again."""
        with self._lock:
            self._touched.pop(pid, None)

    def standing(self, agents: list[Agent]) -> None:
        """These are having their resident memory taken away, or have none standing any more."""
        with self._lock:
            self._agents = agents

    def all(self) -> dict[int, str]:
        """Bring every process back to running; pid → why it could not be."""
        with self._one_at_a_time:
            return self._all()

    def _all(self) -> dict[int, str]:
        with self._lock:
            touched = dict(self._touched)
        failed: dict[int, str] = {}

        def one(pid: int, started: int) -> None:
            try:
                back_to_running(self._api, pid, started)
                self.running(pid)
            except IcecoreError as error:
                failed[pid] = str(error)

        in_parallel(partial(one, pid, started) for pid, started in touched.items())
        with self._lock:
            agents, self._agents = self._agents, []
        in_parallel(partial(give_back, agent) for agent in agents)
        return failed


def give_back(agent: Agent) -> None:
    """Let a process have its resident memory again, whatever state it is in; where it cannot be, the end of its lease does it."""
    with suppress(IcecoreError):  # an older preload knows nothing of it
        agent.look(_WORKER_SECONDS)  # the worker of the dump may have it mapped until it has ended
    with suppress(IcecoreError):
        agent.map()
        agent.go()


def back_to_running(api: DeviceCheckpoint, pid: int, started: int) -> None:
    """Restore and unlock a process from whatever state it is in; one that has ended is left alone.

    Raises:
        DeviceError: It stays where it is.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        _wait_untraced(pid, started)
        try:
            for _ in State:
                if not _lives(pid, started):
                    return
                match api.state(pid):
                    case State.CHECKPOINTED:
                        api.restore(pid, {})
                    case State.LOCKED:
                        api.unlock(pid)
                    case _:
                        return
        except DeviceError:
            if not _lives(pid, started):
                return
            if attempt == _ATTEMPTS:
                raise
            time.sleep(_PAUSE_SECONDS * attempt)


def _lives(pid: int, started: int) -> bool:
    try:
        return procfs.start_time(pid) == started and not procfs.is_zombie(pid)
    except NotFound:
        return False


def _wait_untraced(pid: int, started: int) -> None:
    """Until CRIU has let go: the thread in which the driver restores a process must run."""
    end = time.monotonic() + _TRACED_SECONDS
    with suppress(NotFound):
        while time.monotonic() < end and _lives(pid, started) and procfs.status(pid).tracer:
            time.sleep(_POLL_SECONDS)


def in_parallel(work: Iterable[Callable[[], None]]) -> None:
    """Each in a thread of its own; returns when all have ended."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _checkpoint(api: DeviceCheckpoint, pid: int, *, populate: bool) -> list[object]:
    """The fields of `Checkpointed`."""
    if not populate:
        return [api.checkpoint(pid).value]
    thread = 0
    with suppress(DeviceError):
        thread = api.restore_thread(pid)
    with Populating(pid, thread) as made:
        placement = api.checkpoint(pid)
    return [placement.value, made.bytes, made.huge, made.why]


class _Server:
    def __init__(self, api: DeviceCheckpoint, control: socket.socket) -> None:
        self._api = api
        self._control = control
        self._undo = Undo(api)
        self._calls: list[threading.Thread] = []
        self._deadline: threading.Timer | None = None

    def say(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the client is gone: what was begun is undone
            self._control.send(json.dumps(message).encode())

    def serve(self) -> None:
        self.say({"id": 0, "value": os.getpid()})
        while True:
            try:
                data = self._control.recv(MESSAGE)
            except OSError:
                break
            if not data:
                break
            request: dict[str, Any] = json.loads(data)
            if request["call"] == "deadline":
                self._set_deadline(request["seconds"])
                self.say({"id": request["id"], "value": None})
                continue
            self._calls = [thread for thread in self._calls if thread.is_alive()]
            thread = threading.Thread(target=self._answer, args=(request,))
            self._calls.append(thread)
            thread.start()
        self._set_deadline(None)
        self._undo_all()

    def _undo_all(self) -> dict[int, str]:
        """Once the calls that are under way have ended: a process is not to be touched by two at a time."""
        for thread in self._calls:
            if thread is not threading.current_thread():
                thread.join()
        return self._undo.all()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = threading.Timer(seconds, self._undo_all)
            self._deadline.daemon = True
            self._deadline.start()

    def _answer(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            self.say({"id": number, "value": self._make(request)})
        except DeviceError as error:
            about = {"call": error.call, "pid": error.pid, "code": error.code, "name": error.name}
            self.say({"id": number, "error": about})
        except IcecoreError as error:  # the process is gone
            about = {"call": request["call"], "pid": request.get("pid", 0), "code": 1, "name": str(error)}
            self.say({"id": number, "error": about})

    def _make(self, request: dict[str, Any]) -> object:
        api, pid = self._api, int(request.get("pid", 0))
        match request["call"]:
            case "state":
                return api.state(pid).value
            case "lock":
                self._undo.locking(pid)
                try:
                    api.lock(pid, float(request["seconds"]))
                except IllegalState:
                    self._undo.running(pid)  # somebody else has it
                    raise
            case "checkpoint":
                return _checkpoint(api, pid, populate=request["populate"])
            case "restore":
                api.restore(pid, request["gpus"])
            case "unlock":
                api.unlock(pid)
                self._undo.running(pid)
            case "restore-thread":
                return api.restore_thread(pid)
            case "resident":
                self._undo.standing([Agent(Path(place), own, tracee=seen) for place, own, seen in request["agents"]])
            case "adopt":
                # Processes that another helper had locked when it died.
                for one in request["pids"]:
                    with suppress(NotFound):
                        self._undo.locking(one)
            case "undo":
                return {str(pid): why for pid, why in self._undo_all().items()}
            case unknown:
                raise ValueError(f"there is no call {unknown}")
        return None


def main() -> None:
    """Entry: ``helper CONTROL_FD LIFE_FD WORD``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    for descriptor in (control.fileno(), int(sys.argv[2])):
        os.set_inheritable(descriptor, False)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("-900")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # its processes may use any GPU, whatever its starter sees
    try:
        api = find_backend().connect()
    except IcecoreError as error:
        with suppress(OSError):
            control.send(json.dumps({"id": 0, "error": {"message": error.message, "cure": error.cure}}).encode())
        return
    _Server(api, control).serve()


if __name__ == "__main__":
    main()
