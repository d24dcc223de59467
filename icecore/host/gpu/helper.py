"""The helper: the one process of a dump or restore that initialises CUDA. When its client is gone,
it unlocks every process that it locked.

It is started by the guard of a dump (or by the restorer), outlives both where it must, and is never
part of a job. Over a SOCK_SEQPACKET socket it gets one JSON object a message, ``{"id": 1, "call":
"lock", "pid": 123, …}``, and answers ``{"id": 1, "value": …}`` or ``{"id": 1, "error": {…}}``; each
call has a thread of its own. When the socket ends (its client died, or is done), or the deadline
that it was given passes, it waits until CRIU lets it, or has let go of the processes that it locked
and has not unlocked, brings them back to running, and ends.

Arguments: the number of the socket's descriptor, that of a pipe which it only holds (whoever has
the other end learns of its end), and a word that stands in its command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from icecore.errors import IcecoreError, NotFound
from icecore.host.cuda.api import DeviceCheckpoint, DeviceError, IllegalState, State, device_error
from icecore.host.cuda.holder import Holder, NotHeld
from icecore.host.cuda.populate import Populating, host_thread
from icecore.host.gpu.backend import find_backend
from icecore.host.kernel import oom, procfs, ptrace
from icecore.host.resident.client import Agent

MESSAGE = 1 << 16
_TRACED_SECONDS = 300.0
_POLL_SECONDS = 0.005
_WORKER_SECONDS = 10.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.2
_STOP_SECONDS = 0.2
#: Calls that are refused once all is being undone.
_ACTING = frozenset(("lock", "checkpoint", "restore", "unlock", "hold", "go-on"))


class Undo:
    """Tracks which processes were locked here and do not run again yet, and makes them run."""

    def __init__(self, api: DeviceCheckpoint) -> None:
        self._api = api
        self._touched: dict[int, int] = {}
        self._agents: list[Agent] = []
        self._holder: Holder | None = None
        self._over = False
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()

    def locking(self, pid: int) -> None:
        """Note that a process is about to be locked."""
        with self._lock:
            self._touched[pid] = procfs.start_time(pid)

    def running(self, pid: int) -> None:
        """Note that a process runs again."""
        with self._lock:
            self._touched.pop(pid, None)

    def standing(self, agents: list[Agent]) -> None:
        """Note whose resident memory is being taken away; empty: nobody's any more."""
        with self._lock:
            self._agents = agents

    def held_by(self, holder: Holder) -> None:
        """Note that a CRIU holds the processes, or will."""
        self._holder = holder

    def begin(self) -> None:
        """Begin to undo everything: no other call begins any more."""
        self._over = True

    @property
    def over(self) -> bool:
        """Return whether everything is undone, or is being undone."""
        return self._over

    def hold(self, pids: Iterable[int], seconds: float) -> bool:
        """Wait until that CRIU holds the tree, and make it release the driver's threads in these
        processes.

        Returns:
            Whether it holds it: it may have ended, or take longer.

        Raises:
            NotHeld, DeviceError: They cannot be.
        """
        if self._holder is None or not self._holder.wait(seconds):
            return False
        self._holder.let_go([_drivers_thread(self._api, pid) for pid in pids])
        return True

    def bind(self, pids: Collection[int]) -> None:
        """Make these processes die with that CRIU if it ends before it releases them.

        Raises:
            NotHeld: They do not.
        """
        if self._holder is None:
            raise NotHeld("no CRIU holds the tree")
        self._holder.bind(pids)

    def go_on(self) -> None:
        """Let CRIU continue; nothing runs any more.

        Raises:
            NotHeld: It does not.
        """
        if self._holder is None:
            raise NotHeld("no CRIU holds the tree")
        self._holder.go_on()

    def leave(self) -> None:
        """Do nothing more while CRIU holds the processes: they are dead."""
        if self._holder is not None:
            self._holder.leave()

    def all(self) -> dict[int, str]:
        """Bring every process back to running; pid → why it could not be."""
        with self._one_at_a_time:
            return self._all()

    def _all(self) -> dict[int, str]:
        with self._lock:
            touched = dict(self._touched)
        failed: dict[int, str] = {}
        holder = self._holder
        reached = self._reach(holder, touched) if holder is not None else frozenset()
        if holder is not None and not reached:
            holder.leave()  # it may have come to where it waits for orders by now

        def one(pid: int, *, held: bool) -> None:
            try:
                back_to_running(self._api, pid, touched[pid], held=held)
                self.running(pid)
            except Exception as error:  # noqa: BLE001 - who is not known to run does not count as brought back
                failed[pid] = str(error) or type(error).__name__

        in_parallel(partial(one, pid, held=True) for pid in reached)
        if holder is not None:
            if reached:
                with suppress(NotHeld):
                    holder.go_on(failed=True)
            holder.leave()
        in_parallel(partial(one, pid, held=False) for pid in touched if pid not in reached)
        with self._lock:
            agents, self._agents = self._agents, []
        in_parallel(partial(give_back, agent) for agent in agents)
        return failed

    def _reach(self, holder: Holder, touched: Mapping[int, int]) -> frozenset[int]:
        """Wait until CRIU holds the processes, if it does or will; return those in which the driver
        can work then.
        """
        end = time.monotonic() + _TRACED_SECONDS
        while not holder.wait(_POLL_SECONDS):
            if holder.lost or time.monotonic() > end or not any(_traced(pid) for pid in touched):
                return frozenset()
        threads = {}
        for pid, started in touched.items():
            with suppress(DeviceError, NotFound):
                if _lives(pid, started):
                    threads[pid] = _drivers_thread(self._api, pid)
        try:
            holder.let_go(threads.values())
        except NotHeld:
            return frozenset()
        return frozenset(threads)


def _drivers_thread(api: DeviceCheckpoint, pid: int) -> int:
    """Return the thread in which the driver works in a process, by its number here."""
    thread = host_thread(pid, api.restore_thread(pid))
    if not thread:
        raise device_error("restore-thread", pid, 1, "it has no such thread")
    return thread


def give_back(agent: Agent) -> None:
    """Give a process its resident memory back, whatever its state; if that fails, the end of its
    lease does it.
    """
    with suppress(IcecoreError):  # an older preload knows nothing of it
        agent.look(_WORKER_SECONDS)  # the worker of the dump may have it mapped until it has ended
    with suppress(IcecoreError):
        agent.map()
        agent.go()


def back_to_running(api: DeviceCheckpoint, pid: int, started: int, *, held: bool = False) -> None:
    """Restore and unlock a process from whatever state it is in; a process that has ended is left
    alone.

    Args:
        held: CRIU traces it, but for the driver's thread.

    Raises:
        DeviceError: It stays where it is.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        if not held:
            _wait_untraced(pid, started)
        try:
            for _ in State:
                if not _lives(pid, started):
                    return
                match api.state(pid):
                    case State.CHECKPOINTED if held:
                        api.restore(pid, {})
                    case State.CHECKPOINTED:
                        with _others_standing(api, pid):
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


@contextmanager
def _others_standing(api: DeviceCheckpoint, pid: int) -> Iterator[None]:
    """Stop all but the driver's thread of a process here, where no CRIU holds it (any more). For
    the calling thread.
    """
    drivers = _drivers_thread(api, pid)
    with ExitStack() as stack:
        seen = {drivers}
        while new := set(procfs.threads(pid)) - seen:
            for thread in new:
                stack.enter_context(ptrace.standing(thread, _STOP_SECONDS))
            seen |= new
        yield


def _lives(pid: int, started: int) -> bool:
    try:
        return procfs.start_time(pid) == started and not procfs.is_zombie(pid)
    except NotFound:
        return False


def _wait_untraced(pid: int, started: int) -> None:
    """Wait until CRIU has detached: the thread in which the driver restores a process must run."""
    end = time.monotonic() + _TRACED_SECONDS
    while time.monotonic() < end and _lives(pid, started) and _traced(pid):
        time.sleep(_POLL_SECONDS)


def _traced(pid: int) -> bool:
    try:
        return procfs.status(pid).tracer != 0
    except NotFound:
        return False


def in_parallel(work: Iterable[Callable[[], None]]) -> None:
    """Run each in a thread of its own; return when all have ended."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _checkpoint(api: DeviceCheckpoint, pid: int, *, populate: bool) -> list[object]:
    """Return the fields of `Checkpointed`."""
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
                data, descriptors, _, _ = socket.recv_fds(
                    self._control, MESSAGE, 1, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                break
            if not data:
                break
            request: dict[str, Any] = json.loads(data)
            if request["call"] == "holder":
                self._undo.held_by(Holder(socket.socket(fileno=descriptors[0]), self._undo_all))
                self.say({"id": request["id"], "value": None})
                continue
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
        """Undo everything once the calls under way have ended: two calls must not work on one
        process at a time.
        """
        self._undo.begin()
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
        except Exception as error:  # noqa: BLE001 - most often the process is gone; whatever it is, somebody waits for an answer
            name = (
                str(error)
                if isinstance(error, IcecoreError)
                else f"{type(error).__name__}: {error}"
            )
            about = {"call": request["call"], "pid": request.get("pid", 0), "code": 1, "name": name}
            self.say({"id": number, "error": about})

    def _make(self, request: dict[str, Any]) -> object:
        api, pid = self._api, int(request.get("pid", 0))
        if self._undo.over and request["call"] in _ACTING:
            raise device_error(
                request["call"], pid, 600, "it took too long, or failed, and is being undone"
            )
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
            case "hold":
                return self._undo.hold(request["pids"], float(request["seconds"]))
            case "bind":
                self._undo.bind(request["pids"])
            case "go-on":
                self._undo.go_on()
            case "leave":
                self._undo.leave()
            case "resident":
                self._undo.standing(
                    [Agent(Path(place), own, tracee=seen) for place, own, seen in request["agents"]]
                )
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
    """Run the helper: ``helper CONTROL_FD LIFE_FD WORD``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    for descriptor in (control.fileno(), int(sys.argv[2])):
        os.set_inheritable(descriptor, False)
    oom.protect()
    os.environ.pop(
        "CUDA_VISIBLE_DEVICES", None
    )  # its processes may use any GPU, whatever its starter sees
    try:
        api = find_backend().connect()
    except IcecoreError as error:
        with suppress(OSError):
            control.send(
                json.dumps(
                    {"id": 0, "error": {"message": error.message, "cure": error.cure}}
                ).encode()
            )
        return
    _Server(api, control).serve()


if __name__ == "__main__":
    main()
