"""Make every process that a helper has locked run again, and give its resident memory back, whichever
process holds it and in whatever state it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from icecore.errors import IcecoreError, NotFound
from icecore.host.cuda.api import DeviceCheckpoint, DeviceError, State, device_error
from icecore.host.cuda.holder import Holder, NotHeld
from icecore.host.cuda.populate import host_thread
from icecore.host.kernel import procfs, ptrace
from icecore.host.resident.client import Agent

_TRACED_SECONDS = 300.0
_POLL_SECONDS = 0.005
_WORKER_SECONDS = 10.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.2
_STOP_SECONDS = 0.2
_BOUND_AT_ONCE = 4096  # an order to CRIU has room for so many


class Undo:
    """Track the processes that were locked here and do not run yet, and make them run."""

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

    def bind(self, root: int) -> None:
        """Make a process and all its descendants die if that CRIU ends before it releases them.

        Raises:
            NotHeld: They do not.
        """
        if self._holder is None:
            raise NotHeld("no CRIU holds the tree")
        every = procfs.tree(root)
        for at in range(0, len(every), _BOUND_AT_ONCE):
            self._holder.bind(every[at : at + _BOUND_AT_ONCE])

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
    """Restore and unlock a process from any state; ignore a process that has ended.

    Args:
        held: CRIU traces it, but for the driver's thread.

    Raises:
        DeviceError: It stays in its state.
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
