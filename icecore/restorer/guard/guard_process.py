"""The guard process of a restore: it holds the first copy of every userfaultfd and is the parent of
CRIU and of the restored tree. While memory is missing the restorer may die at any instant, and no
process of the tree runs on zeros: the guard kills the tree first, and closes the descriptors
afterwards.

For that it is the server of CRIU's lazy-pages.socket, and it alone reads the descriptors' events: a
child's descriptor is created in the process that reads the fork event. The restorer holds
duplicates and tells the guard when to read, because it must hold its lock on the address map at
that moment (see `icecore.restorer.fill.daemon`). The guard also opens shared memory as soon as CRIU
has made it, and passes it on (`icecore.restorer.fill.shared`): CRIU waits for that, and the threads
of the restorer wait for each other.

It runs by its path under ``python -I -S`` and uses the standard library and modules of icecore that
use nothing else: it starts in a few milliseconds. Arguments: the number of its end of a
SOCK_SEQPACKET socket pair; CRIU's working directory, which becomes its own; the directory to remove
if the restorer dies before the tree is complete; and the number of a descriptor that it only holds
open, the lock of that directory (-1: none). The restorer names the command that undoes its changes
of files (``undo``) before it makes them. The answer to ``read`` carries the events as the kernel
returned them (`icecore.host.rpc.packets`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Sequence

if __name__ == "__main__":  # there is no package: after the standard library, look at its root
    sys.path.append(__file__.rpartition("/icecore/")[0])

from icecore.host.kernel import oom
from icecore.host.rpc import packets, peer

LAZY_SOCKET = "lazy-pages.socket"
RESTORE_FINISHED = 0x52535446
EVENT_BYTES = 32
EVENT_FORK = 0x13
MAX_EVENTS = 64
_PR_SET_CHILD_SUBREAPER = 36
#: What CRIU says: its number of the shared memory, and the address at which it is mapped.
_SHARED = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("iII")
#: How long CRIU may take for its few bytes, which it sends at once. This process does nothing else
#: meanwhile.
_SHARED_SECONDS = 2.0


def descendants(root: int) -> list[int]:
    """Return all processes below ``root``, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command in parentheses may contain anything; state and parent follow its
                    # last parenthesis.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has ended
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found.extend(below)
        pending.extend(below)
    return found


def open_shared(pid: int, start: int) -> int:
    """Open for writing the shared memory that a process maps at ``start``, and nothing else that
    forged images could lead to.

    Raises:
        OSError: It cannot be opened, or something else is there.
    """
    folder, beginning = f"/proc/{pid}/map_files", f"{start:x}-"
    name = next((name for name in os.listdir(folder) if name.startswith(beginning)), "")
    if not name:
        raise FileNotFoundError(errno.ENOENT, f"process {pid} maps no file at {start:#x}")
    sample = os.memfd_create("icecore", os.MFD_CLOEXEC)
    try:
        seen = os.open(f"{folder}/{name}", os.O_PATH | os.O_CLOEXEC)
        try:
            about = os.fstat(seen)
            if not stat.S_ISREG(about.st_mode) or about.st_dev != os.fstat(sample).st_dev:
                raise OSError(errno.EINVAL, f"process {pid} maps something else at {start:#x}")
            return os.open(f"/proc/self/fd/{seen}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(seen)
    finally:
        os.close(sample)


class GuardProcess:
    """The guard's loop and state."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        # One descriptor for each process and each forked child, and those for CRIU; CRIU itself
        # gets the limit that this process was given.
        self.soft_limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(LAZY_SOCKET)
        self.listener.listen(1)
        self.criu_connection: socket.socket | None = None
        self.shared: socket.socket | None = None
        self.kept: dict[int, int] = {}
        self.next_kept = 0
        self.criu = 0
        self.released = False
        self.alone = False
        self.undo: list[str] = []
        self.journal = ""
        self.child_ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poll = select.poll()
        for descriptor in (control.fileno(), self.listener.fileno(), self.child_ended):
            self.poll.register(descriptor, select.POLLIN)

    def say(
        self, message: dict[str, object], data: bytes = b"", descriptors: Sequence[int] = ()
    ) -> None:
        try:
            packets.tell(self.control, message, descriptors, data)
        except OSError:
            self.alone = True

    def serve(self) -> None:
        """Serve until the tree is released or the restorer has ended; the caller kills a tree that
        was not released.
        """
        self.say({"say": "ready"})
        while not self.alone:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.child_ended:
                    self.reap()
                elif descriptor == self.listener.fileno():
                    self.accept()
                elif (
                    self.criu_connection is not None and descriptor == self.criu_connection.fileno()
                ):
                    self.hear_criu()
                elif self.shared is not None and descriptor == self.shared.fileno():
                    self.hear_of_shared(self.shared)
                elif descriptor == self.control.fileno() and not self.obey():
                    return

    def obey(self) -> bool:
        """Carry out one request of the restorer; return False when there is nothing left to do."""
        try:
            request, _, descriptors = packets.hear(self.control)
        except packets.DescriptorsLost as error:  # they come with what CRIU needs
            self.say({"say": "ended", "status": 127, "why": str(error)})
            return True
        except OSError:
            self.alone = True
            return False
        what = request["do"]
        if what == "read":
            self.read_events(request["keep"])
        elif what == "close":
            os.close(self.kept.pop(request["keep"]))
        elif what == "share":
            self.shared = socket.socket(fileno=descriptors[0])
            self.poll.register(self.shared.fileno(), select.POLLIN)
        elif what == "run":
            self.run(request["argv"], descriptors, request["numbers"], request["environment"])
        elif what == "undo":
            self.undo, self.journal = request["argv"], request["journal"]
        elif what == "kill":
            self.kill_tree()
            self.say({"say": "killed"})
        elif what == "release":
            self.close_all()
            self.released = True
            return bool(request["stay"])
        return True

    def run(
        self,
        argv: list[str],
        descriptors: list[int],
        numbers: list[int],
        environment: dict[str, str],
    ) -> None:
        """Start CRIU, with the descriptors that came along under the given numbers."""
        # Move all descriptors above these numbers first, so that none is overwritten before it has
        # its number.
        above = max(numbers, default=2) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        ours = list(descriptors)
        try:
            ours += (
                moved := [
                    fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
                    for descriptor in descriptors
                ]
            )
            ours.append(
                output := os.open(
                    "restore.log.stderr",
                    os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                    0o600,
                )
            )
            # The limit that CRIU would have without this process; but it cannot get descriptors
            # above its limit.
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(self.soft_limit, *(one + 1 for one in ours)), hard)
            )
            # The tree inherits the score from CRIU, with the minimum to which it may lower it: a
            # job must not be protected.
            with oom.ordinary():
                self.criu = os.posix_spawn(
                    argv[0],
                    argv,
                    {**os.environ, **environment},
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, output, 1),
                        (os.POSIX_SPAWN_DUP2, output, 2),
                        *(
                            (os.POSIX_SPAWN_DUP2, old, new)
                            for old, new in zip(moved, numbers, strict=True)
                        ),
                    ],
                    setsigdef=[*peer.IGNORED, signal.SIGCHLD, signal.SIGPIPE],
                    setsigmask=[],
                )
            self.say({"say": "started", "pid": self.criu})
        except (OSError, ValueError) as error:
            # ValueError: a number above the hard limit, or a descriptor that did not arrive.
            self.say({"say": "ended", "status": 127, "why": str(error)})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for descriptor in ours:
                os.close(descriptor)

    def accept(self) -> None:
        self.criu_connection, _ = self.listener.accept()
        self.poll.unregister(self.listener.fileno())
        self.listener.close()
        os.unlink(LAZY_SOCKET)
        self.poll.register(self.criu_connection.fileno(), select.POLLIN)

    def hear_criu(self) -> None:
        """Read one message of CRIU: a task's id and its userfaultfd, or that CRIU has finished."""
        assert self.criu_connection is not None
        word = self.criu_connection.recv(4, socket.MSG_WAITALL)
        if len(word) < 4:
            self.poll.unregister(self.criu_connection.fileno())
            self.criu_connection.close()
            self.criu_connection = None
            return
        (number,) = struct.unpack("<i", word)
        if number == RESTORE_FINISHED:
            self.stop_sharing()
            self.say({"say": "restored"})
        elif number >= 0:  # the id of a zombie, which has no memory, is negative
            _, descriptors, flags, _ = socket.recv_fds(
                self.criu_connection, 1, 1, socket.MSG_CMSG_CLOEXEC
            )
            if descriptors:
                self.say(
                    {"say": "task", "process": number, "keep": self.keep(descriptors[0])},
                    b"",
                    descriptors,
                )
            elif flags & socket.MSG_CTRUNC:
                self.say({"say": "task", "process": number, "error": os.strerror(errno.EMFILE)})

    def hear_of_shared(self, listener: socket.socket) -> None:
        """Open the shared memory that CRIU has made, pass it on, and let CRIU continue. If it cannot
        be opened, CRIU fails.
        """
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_SHARED_SECONDS)
            about: dict[str, object] = {"say": "shared"}
            opened: list[int] = []
            try:
                request = connection.recv(_SHARED.size, socket.MSG_WAITALL)
                number, start = _SHARED.unpack(request)
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
                pid = _CREDENTIALS.unpack(credentials)[0]
                about |= {"number": number, "pid": pid}
                opened.append(open_shared(pid, start))
            except (OSError, struct.error) as error:
                about["error"] = str(error)
            self.say(about, b"", opened)
            for descriptor in opened:
                os.close(descriptor)
            if opened:
                with contextlib.suppress(OSError):
                    connection.sendall(b"y")

    def stop_sharing(self) -> None:
        """Listen no longer: CRIU has made all shared memory, and the tree is about to run."""
        if self.shared is not None:
            self.poll.unregister(self.shared.fileno())
            self.shared.close()
            self.shared = None

    def keep(self, descriptor: int) -> int:
        self.next_kept += 1
        self.kept[self.next_kept] = descriptor
        return self.next_kept

    def read_events(self, number: int) -> None:
        """Read the events of one descriptor; keep the child's descriptor of each fork in them, and
        pass it on.
        """
        try:
            data = os.read(self.kept[number], EVENT_BYTES * MAX_EVENTS)
        except BlockingIOError:
            data = b""
        except (KeyError, OSError) as error:
            self.say(
                {
                    "say": "events",
                    "keep": number,
                    "children": [],
                    "error": str(error),
                    "errno": getattr(error, "errno", None),
                }
            )
            return
        born = [
            struct.unpack_from("<I", data, at + 8)[0]
            for at in range(0, len(data), EVENT_BYTES)
            if data[at] == EVENT_FORK
        ]
        children = [self.keep(descriptor) for descriptor in born]
        self.say({"say": "events", "keep": number, "children": children}, data, born)

    def reap(self) -> None:
        """Reap processes that have ended. CRIU's tasks become children of this process when CRIU
        ends.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.child_ended, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self.criu:
                self.criu = 0
                self.say({"say": "ended", "status": code})
            else:
                self.say({"say": "exited", "pid": pid, "status": code})

    def kill_tree(self) -> None:
        """Kill all descendants and wait for their end. The tasks come first: CRIU traces them, and
        those that it holds would run if it died before them.
        """
        while True:
            below = descendants(os.getpid())
            for pid in [*(p for p in below if p != self.criu), *([self.criu] if self.criu else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if not below:
                return
            time.sleep(0.001)

    def undo_files(self) -> None:
        """Have the job's files put back as they were before the restore, unless the restorer has
        done so.
        """
        if not self.undo or not os.path.exists(self.journal):
            return
        with contextlib.suppress(OSError):
            pid = os.posix_spawn(
                self.undo[0],
                self.undo,
                os.environ,
                setsigdef=[*peer.IGNORED, signal.SIGCHLD, signal.SIGPIPE],
                setsigmask=[],
            )
            os.waitpid(pid, 0)

    def close_all(self) -> None:
        for descriptor in self.kept.values():
            os.close(descriptor)
        self.kept.clear()


def main() -> None:
    """Entry: ``guard_process.py CONTROL_FD WORKDIR TEMPORARY LOCK_FD``."""
    peer.ignore_signals()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    oom.protect()
    control = peer.take_over(int(sys.argv[1]), int(sys.argv[4]))
    temporary = os.path.abspath(sys.argv[3])
    os.chdir(sys.argv[2])
    guard = GuardProcess(control)
    try:
        guard.serve()
    finally:
        if not guard.released:
            guard.kill_tree()
            guard.undo_files()
            import shutil  # not at the start, where it costs milliseconds

            shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
