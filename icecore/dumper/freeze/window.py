"""The window: the time in which the job stands still. Whatever happens in it, the job runs again
within a second, unless the caller asked to stop it.

CRIU freezes the tree, writes everything except private pages, and keeps the tree frozen until the
socket that this process holds closes. Meanwhile the memory is read in place.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from icecore.dumper.freeze.guard import DumpGuard
from icecore.errors import DumpFailed, NotFound, WindowExceeded
from icecore.host.kernel import procfs

_PREPARE_SECONDS = 60.0
_THAW_SECONDS = 30.0
_POLL_SECONDS = 0.002
_LET_GO_SECONDS = 0.0005


class TreeRestless(DumpFailed):
    """CRIU could not stop the tree, whose processes and threads come and go; it runs on. Another
    window may succeed.

    Attributes:
        final: As many windows have failed as a dump tries.
    """

    final = False


class ConnectionUnaccepted(DumpFailed):
    """A connection waited for accept(2), and CRIU could not dump it. Another dump may succeed."""


class Window:
    """One window.

    Args:
        guard: Runs CRIU.
        version: CRIU's version.
        limit: Seconds the tree may stand still, unless the dump ends it.
        explain: Turns CRIU's log into an error once CRIU has failed.
        abandon: Called once, from another thread, when the limit is reached. It must stop the
            threads that read the tree.

    Use it as a context manager: leaving it with an error thaws the tree and waits until it runs.
    """

    def __init__(
        self,
        guard: DumpGuard,
        version: tuple[int, ...],
        *,
        limit: float,
        explain: Callable[[int], DumpFailed],
        abandon: Callable[[BaseException], None],
    ) -> None:
        self._guard = guard
        self._version = version
        self._limit: float | None = limit
        self._explain = explain
        self._abandon = abandon
        self._lock = threading.Lock()
        self._over = False
        self._exceeded: WindowExceeded | None = None
        self._watchdog: threading.Timer | None = None
        self._frozen = False
        self._ending = False
        self.started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._frozen:
            self._end_watch()
            if self._ending:
                with suppress(DumpFailed):  # raise what failed first
                    self._guard.ended(_THAW_SECONDS)
        else:
            self._end_watch()
            self._frozen = False
            try:
                self._guard.thaw(_THAW_SECONDS)
            except DumpFailed:
                if error is None:
                    raise
                # Raise what failed first. The page socket is closed, so CRIU lets go whatever became
                # of the guard, and the guard's release waits for that.
            self.seconds = time.monotonic() - self.started
        if self._exceeded is not None and error is not None and error is not self._exceeded:
            raise self._exceeded from error

    def prepare(
        self,
        command: Sequence[str],
        hidden: Path | None,
        devices: socket.socket | None = None,
        group: Path | None = None,
    ) -> None:
        """Start CRIU as far as it gets without touching the tree. `begin`, `go` and `freeze` follow,
        if nothing fails.

        Args:
            hidden: File in which CRIU notes what it was kept from seeing; None: it sees everything.
            devices: The end of its plugin for GPU processes (`icecore.host.cuda.holder`); None: no
                GPU processes.
            group: The cgroup that CRIU freezes; None: none.

        Raises:
            DumpFailed: CRIU failed.
        """
        ended = self._guard.prepare(
            command, _PREPARE_SECONDS, hidden=hidden, devices=devices, group=group
        )
        if ended is not None:
            raise self._explain(ended)

    def begin(self, *, limited: bool = True) -> None:
        """Start the time limit, if ``limited``: from now on the job stands still, or soon will."""
        self.started = time.monotonic()
        if not limited:
            self._limit = None
        if self._limit is not None:
            self._watchdog = threading.Timer(self._limit, self._expire)
            self._watchdog.daemon = True
            self._watchdog.start()

    @property
    def left(self) -> float | None:
        """Seconds until the limit; None: no limit."""
        return (
            None if self._limit is None else max(0.0, self.started + self._limit - time.monotonic())
        )

    def go(self) -> None:
        """Have the waiting CRIU freeze the tree, after `prepare` and `begin`.

        Raises:
            WindowExceeded: The limit has passed.
            DumpFailed: CRIU has ended.
        """
        self.check()
        self._frozen = True
        try:
            self._guard.go(self.left)
        except BaseException:
            self._frozen = False
            self._end_watch()
            raise

    def freeze(self, *, streamed: bool = False) -> None:
        """Wait, after `go`, until the tree stands still and CRIU has written everything except the
        memory that is read in place.

        With ``streamed``, wait until CRIU begins to send that memory. CRIU writes the rest once all
        is received.

        Raises:
            WindowExceeded: It took longer than the limit.
            DumpFailed: CRIU could not dump the tree, which runs on.
        """
        try:
            served = self._guard.frozen((self._limit or 600.0) + _THAW_SECONDS, streamed=streamed)
        except BaseException:
            self._frozen = False
            self._end_watch()
            raise
        if served is not None:
            self._frozen = False
            self._end_watch()
            raise self._exceeded or self._explain(served)
        self.check()

    def check(self) -> None:
        """Raise `WindowExceeded` if the limit has passed, even if the watchdog's thread has not run
        yet.
        """
        if self.left == 0.0:
            self._expire()
        if self._exceeded is not None:
            raise self._exceeded

    def thaw(self) -> None:
        """Have CRIU let the tree run again; `thawed` and `end` follow.

        Raises:
            WindowExceeded: The limit passed first, so what was read may not be consistent.
            DumpFailed: CRIU did not hold the tree until now.
        """
        self.check()
        self._end_watch()
        self.check()
        self._guard.confirm(self._version, _THAW_SECONDS)
        self._frozen = False
        self._ending = True
        self._guard.hang_up()

    def thawed(self, pids: Sequence[int]) -> None:
        """Wait, after `thaw`, until CRIU has let go of these processes. It has not ended yet.

        Raises:
            DumpFailed: It does not let go in time.
        """
        held = wait_untraced(pids, _THAW_SECONDS)
        self.over()
        if held:
            raise DumpFailed(
                f"CRIU does not let go of {len(held)} processes: {held[:5]}",
                cure="find what traces them ('grep TracerPid /proc/PID/status')",
            )

    def end(self) -> None:
        """Wait for CRIU's end after `thaw`.

        Raises:
            DumpFailed: CRIU reports that its part of the snapshot failed.
        """
        self._ending = False
        status = self._guard.ended(_THAW_SECONDS)
        if status != 0:
            error = self._explain(status)
            # The tree was stopped, and has been read: this is no case for another window.
            raise DumpFailed(str(error), cure=error.cure)

    def over(self) -> None:
        """Note that the job runs again."""
        self.seconds = time.monotonic() - self.started

    def kill(self, pids: Sequence[int]) -> None:
        """End the frozen tree: kill every process while it is still traced, then let CRIU go. For
        ``--stop``, after the commit.
        """
        self._end_watch()
        descriptors = {}
        for pid in pids:
            try:
                descriptors[pid] = os.pidfd_open(pid)
                signal.pidfd_send_signal(descriptors[pid], signal.SIGKILL)
            except ProcessLookupError:
                continue
        for descriptor in descriptors.values():
            os.close(descriptor)
        self._frozen = False
        # The snapshot is committed and the tree is dead, so failures of CRIU and the guard no longer
        # matter.
        with suppress(DumpFailed):
            self._guard.thaw(_THAW_SECONDS)
        self.seconds = time.monotonic() - self.started
        deadline = time.monotonic() + _THAW_SECONDS
        for pid in descriptors:
            while not _ended(pid):
                if time.monotonic() > deadline:
                    raise DumpFailed(f"process {pid} did not end after it was killed")
                time.sleep(_POLL_SECONDS)

    def _expire(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            self._exceeded = WindowExceeded(
                f"the job would have stood still for more than {self._limit:g} s",
                cure="raise --max-window, or let pre-copy run (--pre-copy on) so that less is left for the window",
            )
        # The tree first: it must run on whatever its readers do.
        self._guard.hang_up()
        self._abandon(self._exceeded)

    def _end_watch(self) -> None:
        with self._lock:
            self._over = True
        if self._watchdog is not None:
            self._watchdog.cancel()


def _ended(pid: int) -> bool:
    try:
        return procfs.is_zombie(pid)
    except NotFound:
        return True


def wait_running(pids: Sequence[int], timeout: float) -> list[int]:
    """Wait until no tracer stops any of the processes.

    Returns:
        The processes that are still stopped after ``timeout`` seconds.
    """
    return _wait_for_none(pids, timeout, _traced, _POLL_SECONDS)


def wait_untraced(pids: Sequence[int], timeout: float) -> list[int]:
    """Wait until no thread of the processes is traced. A thread that was let go runs before its
    tracer has ended.

    Returns:
        The processes that still have a traced thread after ``timeout`` seconds.
    """
    return _wait_for_none(pids, timeout, _has_tracer, _LET_GO_SECONDS)


def _wait_for_none(
    pids: Sequence[int], timeout: float, holds: Callable[[int], bool], pause: float
) -> list[int]:
    """Wait until ``holds`` is false for all of the processes; return those for which it is still
    true.
    """
    deadline = time.monotonic() + timeout
    left = list(pids)
    while left:
        left = [pid for pid in left if holds(pid)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(pause)
    return left


def _has_tracer(pid: int) -> bool:
    return _is_traced(pid) or any(_is_traced(thread) for thread in _threads(pid) if thread != pid)


def _is_traced(thread: int) -> bool:
    try:
        return procfs.status(thread).tracer != 0
    except NotFound:
        return False


def _threads(pid: int) -> list[int]:
    try:
        return procfs.threads(pid)
    except NotFound:
        return []


def _traced(pid: int) -> bool:
    try:
        return procfs.status(pid).state == "t"
    except NotFound:
        return False
