"""A process tree that holds one of nearly every kernel object, keeps using them, and checks them in
every process.

root ─┬─ pipes      answers over pipes, shares an open file description with the root
      ├─ sockets    answers over unix sockets, tries the root's file locks ├─ signals    answers
      queued signals through signalfd and eventfd, has signals and timers pending ├─ memory ───
      grandchild     rewrite shared memory by turns; the grandchild is a session of its own └─ a
      zombie

python tree.py STATE_DIR [--system-v 1] [--credentials 1]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

if not __package__:  # run as a program
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.programs import kernel
from tests.programs.report import Report, run
from tests.programs.tree_channels import CredentialPair, PassedDescriptor, StalledPair, StalledPipe
from tests.programs.tree_events import Events, Identity, PendingSignals, Timers
from tests.programs.tree_kept import Broken, Kept, content, same
from tests.programs.tree_storage import (
    Blackboard,
    DeletedFile,
    LinkedFile,
    Locks,
    Probe,
    SealedMemory,
    SystemV,
)

FINISH, ORPHANED = b"finish", 3
QUESTION = struct.Struct("<Q500s")
ROLES = ("pipes", "sockets", "signals", "memory", "grandchild")
RECORD = 16  # bytes of a record in the file whose description two processes share
RECORDS = 4096  # after so many the file starts anew


class Board:
    """One counter for each process, in anonymous memory that all share: how often each has checked
    everything.
    """

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def count(self, role: str) -> None:
        at = 8 * ROLES.index(role)
        struct.pack_into("<Q", self.memory, at, struct.unpack_from("<Q", self.memory, at)[0] + 1)

    def counts(self) -> dict[str, int]:
        return dict(zip(ROLES, struct.unpack_from(f"<{len(ROLES)}Q", self.memory, 0), strict=True))


class Member:
    """A process other than the root: serves its channels, checks what it keeps, tells its parent
    what is broken.
    """

    def __init__(self, role: str, control: socket.socket, board: Board) -> None:
        self.role, self.control, self.board = role, control, board
        self.kept: list[Kept] = [Identity(has_parent=True)]
        self.handlers: dict[int, Callable[[], None]] = {}
        self.at_end: Callable[[], None] = lambda: None
        self.broken = 0

    def say(self, what: str) -> None:
        self.broken += 1
        if self.broken <= 3:
            self.control.send(json.dumps(f"{self.role}: {what}"[:4000]).encode())

    def attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Broken as broken:
            self.say(str(broken))
        except OSError as failed:
            self.say(f"{call}: {failed}")

    def expect(self, what: str, found: Any, expected: Any) -> None:
        self.attempt(lambda: same(what, found, expected))

    def live(self) -> NoReturn:
        """Runs until told to finish; the exit status is 0 if nothing was ever broken."""
        poll = select.poll()
        for descriptor in (self.control.fileno(), *self.handlers):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(10):
                if descriptor == self.control.fileno():
                    if self.control.recv(100) != FINISH:
                        os._exit(ORPHANED)
                    self._finish()
                self.attempt(self.handlers[descriptor])
            for kept in self.kept:
                self.attempt(kept.check)
            self.board.count(self.role)

    def _finish(self) -> NoReturn:
        self.attempt(self.at_end)
        for kept in self.kept:
            self.attempt(kept.last)
        self.control.close()
        os._exit(1 if self.broken else 0)


class Root:
    """The first process: forks the others, questions them in turn, collects what they find."""

    def __init__(self, report: Report, *, system_v: bool, credentials: bool) -> None:
        self.report, self.system_v, self.credentials = report, system_v, credentials
        self.directory = report.state_dir / "tree"
        self.directory.mkdir()
        self.number = 0
        self.acknowledged = 0
        self.children: dict[int, tuple[str, socket.socket]] = {}
        self.statuses: dict[str, int] = {}
        self.board = Board()
        self.locks = Locks(self.directory)
        name = f"icecore-tree-{os.getpid()}-{secrets.token_hex(4)}"
        self.shm_names = (f"{name}-kept", f"{name}-unlinked")
        # What two processes talk over: made before the fork, each side closes the other's ends.
        self.to_pipes, self.from_pipes = os.pipe(), os.pipe()
        self.shared = os.open(
            self.directory / "shared-description", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
        )
        self.done = os.eventfd(0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.directory / "stream"))
        self.listener.listen()
        self.fork("pipes", self.live_pipes)
        self.fork("sockets", self.live_sockets)
        self.fork("signals", self.live_signals)
        self.fork("memory", self.live_memory)
        self.listener.close()
        os.close(self.to_pipes[0])
        os.close(self.from_pipes[1])
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.connect(str(self.directory / "stream"))
        self.datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagram.bind(str(self.directory / "root-datagram"))
        self.await_hello()
        self.datagram.connect(str(self.directory / "datagram"))
        self.zombie = self.fork_zombie()
        self.kept: list[Kept] = [
            Identity(has_parent=False),
            self.locks,
            DeletedFile(self.directory / "deleted-large", 2 << 20),
            LinkedFile(self.directory / "linked", self.directory / "linked-other-name"),
        ]

    def fork(self, role: str, live: Callable[[socket.socket], NoReturn]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for _, other in self.children.values():
                    other.close()
                for descriptor in (self.locks.flocked, self.locks.posix, self.locks.description):
                    os.close(descriptor)
                kernel.set_name(f"tree-{role}")
                live(theirs)
            except BaseException as failed:  # noqa: BLE001 - a child must never run on in its parent's code
                with contextlib.suppress(OSError):
                    theirs.send(json.dumps(f"{role}: crashed: {failed!r}").encode())
                os._exit(2)
        theirs.close()
        self.children[pid] = (role, ours)

    def fork_zombie(self) -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    # The other processes.

    def live_pipes(self, control: socket.socket) -> NoReturn:
        member = Member("pipes", control, self.board)
        os.close(self.to_pipes[1])
        os.close(self.from_pipes[0])
        self.listener.close()

        def answer() -> None:
            number, text = QUESTION.unpack(os.read(self.to_pipes[0], QUESTION.size))
            member.expect("question over a pipe", text, content(500, 20, number))
            os.write(self.shared, struct.pack("<QQ", number, 1))
            os.write(self.from_pipes[1], QUESTION.pack(number, content(500, 21, number)))

        member.handlers[self.to_pipes[0]] = answer
        fifo = self.directory / "fifo"
        member.kept += [StalledPipe(40_000, 256 << 10), StalledPipe(3_000, 64 << 10)]
        member.kept.append(StalledPipe(9_000, 64 << 10, fifo))
        member.live()

    def live_sockets(self, control: socket.socket) -> NoReturn:
        member = Member("sockets", control, self.board)
        os.close(self.shared)
        stream, _ = self.listener.accept()
        datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagram.bind(str(self.directory / "datagram"))
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        abstract.bind(f"\0{self.shm_names[0]}")
        abstract.listen()
        stream.send(b"hello")

        def answer_stream() -> None:
            number, text = QUESTION.unpack(stream.recv(QUESTION.size, socket.MSG_WAITALL))
            member.expect("question over a stream", text, content(500, 22, number))
            stream.sendall(QUESTION.pack(number, content(500, 23, number)))

        def answer_datagram() -> None:
            message, sender = datagram.recvfrom(1000)
            number, text = QUESTION.unpack(message)
            member.expect("question in a datagram", text, content(500, 24, number))
            datagram.sendto(QUESTION.pack(number, content(500, 25, number)), sender)

        member.handlers.update({stream.fileno(): answer_stream, datagram.fileno(): answer_datagram})
        member.kept += [
            StalledPair(kind)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
        ]
        member.kept += [
            PassedDescriptor(self.directory / "passed"),
            Probe(self.directory, os.getppid()),
        ]
        member.kept.append(CredentialPair(waiting=self.credentials))
        member.live()

    def live_signals(self, control: socket.socket) -> NoReturn:
        member = Member("signals", control, self.board)
        os.close(self.shared)
        asked = signal.SIGRTMIN + 6
        signal.pthread_sigmask(signal.SIG_BLOCK, [asked])
        requests = kernel.signalfd(asked)
        previous = 0

        def answer() -> None:
            nonlocal previous
            for number, value in kernel.read_signalfd(requests):
                member.expect("signal and value", (number, value), (asked, previous + 1))
                previous = value
                os.eventfd_write(self.done, 1)

        member.handlers[requests] = answer
        timers = Timers()
        member.kept += [PendingSignals(), timers, Events(timers.slow_descriptor)]
        control.send(b'"hello"')
        member.live()

    def live_memory(self, control: socket.socket) -> NoReturn:
        kernel.set_name("tree-memory")
        os.close(self.shared)
        blackboard = Blackboard(self.directory, self.shm_names)
        there, back = os.pipe(), os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        grandchild = os.fork()
        if grandchild == 0:
            ours.close()
            control.close()
            os.close(there[1])
            os.close(back[0])
            self.live_grandchild(theirs, blackboard, there[0], back[1])
        theirs.close()
        os.close(there[0])
        os.close(back[1])
        member = Member("memory", control, self.board)
        version = 0
        control.send(json.dumps({"blackboard": blackboard.address()}).encode())

        def turn() -> None:
            """The grandchild has written a version: look at it, write the next one, hand it back."""
            nonlocal version
            version = int.from_bytes(os.read(back[0], 8), "little")
            look = blackboard.verify_all if version % 32 == 0 else blackboard.verify_some
            member.attempt(lambda: look(version))
            time.sleep(0.01)
            version += 1
            blackboard.write(version)
            os.write(there[1], version.to_bytes(8, "little"))

        def hear() -> None:
            """Passes the grandchild's complaints on."""
            if message := ours.recv(5000):
                member.broken += 1
                control.send(message)

        def end() -> None:
            """With the turn in hand nobody writes: both sides verify everything, then the
            grandchild ends.
            """
            last = int.from_bytes(os.read(back[0], 8), "little")
            member.expect("version at the end", last, version + 1)
            member.attempt(lambda: blackboard.verify_all(last))
            ours.send(FINISH)
            while message := ours.recv(5000):
                member.broken += 1
                control.send(message)
            _, status = os.waitpid(grandchild, 0)
            member.expect("exit status of the grandchild", os.waitstatus_to_exitcode(status), 0)

        member.handlers.update({back[0]: turn, ours.fileno(): hear})
        member.at_end = end
        member.kept += [
            SealedMemory(),
            DeletedFile(self.directory / "deleted-mapped", 300 << 10, mapped=True),
        ]
        if self.system_v:
            member.kept.append(SystemV())
        os.write(there[1], version.to_bytes(8, "little"))
        member.live()

    def live_grandchild(
        self, control: socket.socket, blackboard: Blackboard, there: int, back: int
    ) -> NoReturn:
        os.setsid()
        work = self.directory / "grandchild"
        work.mkdir()
        os.chdir(work)
        os.umask(0o027)
        os.nice(5)
        kernel.set_name("tree-grandchild")
        kernel.set_death_signal(signal.SIGTERM)
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        member = Member("grandchild", control, self.board)
        version = 0

        def turn() -> None:
            nonlocal version
            version = int.from_bytes(os.read(there, 8), "little")
            member.attempt(lambda: blackboard.verify_some(version))
            version += 1
            blackboard.write(version)
            os.write(back, version.to_bytes(8, "little"))

        member.handlers[there] = turn
        member.at_end = lambda: blackboard.verify_all(version)
        member.live()

    # The root's own life.

    def await_hello(self) -> None:
        """Returns once every process has set up what it is asked for from outside its own code."""
        same("greeting", self.stream.recv(5), b"hello")
        for pid, (role, control) in self.children.items():
            if role == "signals":
                same("greeting", json.loads(control.recv(100)), "hello")
            elif role == "memory":
                told = json.loads(control.recv(5000))
                if not isinstance(told, dict):
                    raise Broken(str(told))
                self.report.region("blackboard", told["blackboard"], Blackboard.SIZE, pid)

    def round(self) -> None:
        self.number += 1
        number = self.number
        os.write(self.to_pipes[1], QUESTION.pack(number, content(500, 20, number)))
        self.await_answer(self.from_pipes[0])
        answer = QUESTION.unpack(os.read(self.from_pipes[0], QUESTION.size))
        same("answer over a pipe", answer, (number, content(500, 21, number)))
        self.share(number)
        self.stream.sendall(QUESTION.pack(number, content(500, 22, number)))
        self.await_answer(self.stream.fileno())
        answer = QUESTION.unpack(self.stream.recv(QUESTION.size, socket.MSG_WAITALL))
        same("answer over a stream", answer, (number, content(500, 23, number)))
        self.datagram.send(QUESTION.pack(number, content(500, 24, number)))
        self.await_answer(self.datagram.fileno())
        answer = QUESTION.unpack(self.datagram.recv(1000))
        same("answer in a datagram", answer, (number, content(500, 25, number)))
        kernel.sigqueue(self.pid_of("signals"), signal.SIGRTMIN + 6, number)
        while self.acknowledged < number:
            self.await_answer(self.done)
            self.acknowledged += os.eventfd_read(self.done)
        same("signals acknowledged", self.acknowledged, number)

    def await_answer(self, descriptor: int) -> None:
        """Waits until it can be read; finds out when the one who should answer is dead."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(1000):
            self.look_after_children()

    def share(self, number: int) -> None:
        """The child has just written a record; the offset that both share must show it, and ours
        goes after it.
        """
        at = 2 * RECORD * ((number - 1) % RECORDS)
        same("shared offset", os.lseek(self.shared, 0, os.SEEK_CUR), at + RECORD)
        os.write(self.shared, struct.pack("<QQ", number, 2))
        expected = struct.pack("<QQQQ", number, 1, number, 2)
        same("records in the shared file", os.pread(self.shared, 2 * RECORD, at), expected)
        if number % RECORDS == 0:
            os.ftruncate(self.shared, 0)
            os.lseek(self.shared, 0, os.SEEK_SET)

    def pid_of(self, role: str) -> int:
        return next(pid for pid, (name, _) in self.children.items() if name == role)

    def look_after_children(self) -> None:
        for pid, (role, control) in self.children.items():
            with contextlib.suppress(BlockingIOError):
                while message := control.recv(5000, socket.MSG_DONTWAIT):
                    self.report.violation(str(json.loads(message)))
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise Broken(f"the {role} process is dead")

    def attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Broken as broken:
            self.report.violation(f"root: {broken}")

    def facts(self) -> dict[str, Any]:
        pids = {role: pid for pid, (role, _) in self.children.items()}
        return {
            "checks": self.board.counts(),
            "pids": pids,
            "statuses": self.statuses,
            "shm": list(self.shm_names),
        }

    def live(self) -> int:
        while not self.report.finish_asked():
            self.round()
            for kept in self.kept:
                self.attempt(kept.check)
            self.look_after_children()
            self.report.write(self.number, **self.facts())
            time.sleep(0.01)
        for pid, (role, control) in self.children.items():
            control.send(FINISH)
            while message := control.recv(5000):
                self.report.violation(str(json.loads(message)))
            self.statuses[role] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if self.statuses[role] != 0:
                self.report.violation(f"the {role} process ended with {self.statuses[role]}")
        for kept in self.kept:
            self.attempt(kept.last)
        status = os.waitstatus_to_exitcode(os.waitpid(self.zombie, 0)[1])
        self.attempt(lambda: same("exit status of the zombie", status, 7))
        os.unlink(f"/dev/shm/{self.shm_names[0]}")
        return self.report.end(self.number, **self.facts())


def main(report: Report, *, system_v: bool, credentials: bool) -> int:
    kernel.set_name("tree-root")
    return Root(report, system_v=system_v, credentials=credentials).live()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir")
    parser.add_argument(
        "--system-v", type=int, default=0, help="1: System V shared memory, semaphore and queue too"
    )
    parser.add_argument(
        "--credentials",
        type=int,
        default=0,
        help="1: credentials wait in a queue; CRIU cannot dump them",
    )
    options = parser.parse_args()
    chosen = {"system_v": bool(options.system_v), "credentials": bool(options.credentials)}
    sys.exit(run(Report(options.state_dir, "tree"), lambda report: main(report, **chosen)))
