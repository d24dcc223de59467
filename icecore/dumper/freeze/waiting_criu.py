"""A CRIU that has started but waits; its one rule: nothing of the tree is touched before `go`, and
never if that does not come.

CRIU's start (its loader, the vdso, probing what the kernel can do) takes 30 to 100 ms. It then runs
its action script for the stage ``pre-dump``, before it collects the tree or stops anything
(cr-dump.c: cr_dump_tasks); the script waits for a word through a pipe of this process. Where that
ends without the word, the script fails, and CRIU ends. The script lies in memory, because
directories on tmpfs often forbid that anything of theirs is executed, and it finds everything
through this process's /proc, so that CRIU inherits nothing for it. CRIU runs it twice more in the
window, ``post-dump`` and ``status-ready``, and in a network namespace for its lock: then it ends at
once.
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

from icecore.host.criu.program import dump_environment
from icecore.host.cuda import holder
from icecore.host.gpu.backend import find_backend

# Whoever waits for the end of CRIU through the pipe `life` waits for the script's too.
_SCRIPT = """#!/bin/sh
case $CRTOOLS_SCRIPT_ACTION in pre-dump) ;; *) exit 0 ;; esac
exec 9> {life} && echo > {arrived} && read -r word < {go} && [ "$word" = go ]
"""
#: memfd_create(2): from Linux 6.3 on an executable file is to be asked for as one.
_MFD_EXEC = 0x10
#: Where files may be made, and perhaps executed.
_FOLDERS = ("/run", "/var/tmp", "/tmp")


class WaitingCriu:
    """Starts CRIU; `arrives` says whether it waits.

    Args:
        command: ``{pages}``, ``{status}`` and ``{hold}`` (CRIU's action script) are replaced.
        pages: CRIU's end of the page-server connection; from now on this object's.
        devices: The end of CRIU's plugin for GPU processes (`icecore.host.cuda.holder`); from now
            on this object's. None: there are none.
        life: Writing end of a pipe, which CRIU and the script inherit.
        lock: Says that the working directory is in use; CRIU inherits it. -1: there is none.
        hidden: Path of the file for what CRIU is kept from seeing (`icecore.host.criu.hidden`);
            None: it sees everything.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        pages: socket.socket,
        devices: socket.socket | None,
        life: int,
        hidden: str | None,
        lock: int = -1,
    ) -> None:
        self.pages = pages
        self._open: set[int] = set()
        try:
            self._arrived, arrived = self._pipe()
            go, self._go = self._pipe()
            #: One zero byte comes through it once the tree stands still and CRIU serves; it ends
            #: with CRIU.
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
            environment = dump_environment(hidden)
            given = [] if lock < 0 else [lock]
            if devices is not None:
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
        """Wait until CRIU waits. False: it ended, or went on unasked, or nobody is at the other end
        of ``control``.
        """
        poll = select.poll()
        poll.register(self._arrived, select.POLLIN)
        poll.register(self.status, select.POLLIN)
        poll.register(control, select.POLLRDHUP)
        return self._arrived in {number for number, _ in poll.poll()}

    def go(self) -> None:
        """Let it go on: it stops the tree."""
        os.write(self._go, b"go\n")

    def hang_up(self) -> None:
        """Shut down the page-server connection, of which this end is CRIU's too: a tree that it has
        stopped, or will, it lets go.
        """
        with contextlib.suppress(OSError):  # CRIU may be gone already
            self.pages.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Wait for CRIU's end. There is no time-out: killing it while the parasite is in the job
        would lose the job.

        Returns:
            Its exit status.
        """
        status = self.criu.wait()
        self._close()
        return status

    def drop(self) -> int:
        """Not let it go: it ends without having touched anything.

        Returns:
            Its exit status.
        """
        self._close(self._go)
        self.hang_up()
        return self.end()


def _path(descriptor: int) -> str:
    """Where others find a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _executable(text: str) -> int:
    """A script as a descriptor: in memory, or where the kernel forbids that (vm.memfd_noexec=2), a
    file without a name.
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
            os.close(writing)  # what is open for writing cannot be executed
            os.unlink(path)
    raise why
