"""A CRIU that has started and waits. It touches nothing of the tree before `go`, and never without
it.

CRIU's start (its loader, the vdso, probing the kernel's features) takes 30 to 100 ms. It then runs
its action script for the stage ``pre-dump``, before it collects the tree or stops anything
(cr-dump.c: cr_dump_tasks). The script waits for a word through a pipe of this process. If the pipe
closes without the word, the script fails and CRIU ends.

The script is a file in memory, because directories on tmpfs are often mounted noexec. It opens its
pipes through this process's /proc, so CRIU inherits nothing for it.

CRIU would run the script again in the window: for ``post-dump`` and ``status-ready``, and to lock
and unlock a network namespace. CRIU's library prevents that (icecore/host/criu/scripts.c). Without
the library, the script starts and ends at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from icecore.host.criu.libraries import dump_environment
from icecore.host.cuda import holder
from icecore.host.kernel import frozen

# A process that waits for CRIU's end through the pipe `life` waits for the script's end too.
_SCRIPT = """#!/bin/sh
case $CRTOOLS_SCRIPT_ACTION in pre-dump) ;; *) exit 0 ;; esac
exec 9> {life} && echo > {arrived} && read -r word < {go} && [ "$word" = go ]
"""
#: memfd_create(2): since Linux 6.3, an executable file must be requested as one.
_MFD_EXEC = 0x10
#: Directories in which to try to make an executable file.
_FOLDERS = ("/run", "/var/tmp", "/tmp")


class WaitingCriu:
    """Starts CRIU; `arrives` tells whether it waits.

    Args:
        command: ``{pages}``, ``{status}`` and ``{hold}`` (CRIU's action script) are replaced.
        pages: CRIU's end of the page-server connection. This object takes it over.
        devices: The end of CRIU's plugin for GPU processes (`icecore.host.cuda.holder`), taken over
            too. None: no GPU processes.
        life: Writing end of a pipe, which CRIU and the script inherit.
        lock: Lock of the working directory, which CRIU inherits. -1: none.
        group: The cgroup that CRIU freezes and thaws; thawed once more after its end. None: none.
        hidden: File in which CRIU notes what it was kept from seeing
            (`icecore.host.criu.hidden`). None: it sees everything.

    Raises:
        OSError: CRIU cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        pages: socket.socket,
        devices: socket.socket | None,
        life: int,
        hidden: str | None,
        lock: int = -1,
        group: Path | None = None,
    ) -> None:
        self.pages = pages
        self._group = group
        self._open: set[int] = set()
        try:
            self._arrived, arrived = self._pipe()
            go, self._go = self._pipe()
            #: Carries one zero byte once the tree stands still and CRIU serves; ends with CRIU.
            self.status, status = self._pipe()
            script = _executable(
                _SCRIPT.format(life=_path(life), arrived=_path(arrived), go=_path(go))
            )
            self._open.add(script)
            numbers = {
                "{pages}": str(pages.fileno()),
                "{status}": str(status),
                "{hold}": _path(script),
            }
            environment = dump_environment(hidden, numbers["{hold}"])
            given = [] if lock < 0 else [lock]
            if devices is not None:
                # Most dumps have no GPU process, and this takes as long as half of a guard's start.
                from icecore.host.gpu.backend import find_backend

                given.append(devices.fileno())
                environment |= holder.dump_environment(devices.fileno(), find_backend().kinds())
            self.criu = subprocess.Popen(
                [numbers.get(word, word) for word in command],
                env=environment,
                pass_fds=[pages.fileno(), life, status, *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            self._close()
            raise
        finally:
            if devices is not None:
                devices.close()
        self._close(status)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *which: int) -> None:
        for descriptor in which or tuple(self._open):
            os.close(descriptor)
            self._open.remove(descriptor)
        if not which:
            self.pages.close()

    def arrives(self, control: socket.socket) -> bool:
        """Wait until CRIU waits.

        Returns:
            False if CRIU ended or went on without `go`, or if the peer of ``control`` is gone.
        """
        poll = select.poll()
        poll.register(self._arrived, select.POLLIN)
        poll.register(self.status, select.POLLIN)
        poll.register(control, select.POLLRDHUP)
        return self._arrived in {number for number, _ in poll.poll()}

    def go(self) -> None:
        """Let CRIU go on: it stops the tree."""
        os.write(self._go, b"go\n")

    def hang_up(self) -> None:
        """Shut down the page-server connection, whose end here is CRIU's own. CRIU then lets go of a
        tree that it has stopped or is about to stop.
        """
        with contextlib.suppress(OSError):  # CRIU may be gone already
            self.pages.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Wait for CRIU's end, without a time-out: killing CRIU while its parasite is in the job
        would lose the job.

        Returns:
            CRIU's exit status.
        """
        status = self.criu.wait()
        if self._group is not None:
            frozen.thaw(self._group)
        self._close()
        return status

    def drop(self) -> int:
        """End CRIU before it touches anything.

        Returns:
            CRIU's exit status.
        """
        self._close(self._go)
        self.hang_up()
        return self.end()


def _path(descriptor: int) -> str:
    """Return the path by which other processes open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _executable(text: str) -> int:
    """Return a descriptor of an executable script: a file in memory, or, where the kernel forbids
    that (vm.memfd_noexec=2), an unlinked file.
    """
    try:
        descriptor = os.memfd_create("icecore-hold", os.MFD_CLOEXEC | _MFD_EXEC)
    except OSError as error:
        if error.errno == errno.EACCES:
            return _file(text, error)
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("icecore-hold", os.MFD_CLOEXEC)
    os.write(descriptor, text.encode())
    return descriptor


def _file(text: str, why: OSError) -> int:
    for folder in _FOLDERS:
        try:
            if os.statvfs(folder).f_flag & os.ST_NOEXEC:
                continue
            writing, path = tempfile.mkstemp(prefix="icecore-hold-", dir=folder)
        except OSError:
            continue
        try:
            os.write(writing, text.encode())
            os.fchmod(writing, 0o700)
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writing)  # a file that is open for writing cannot be executed
            os.unlink(path)
    raise why
