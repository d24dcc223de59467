"""The clients of processes with resident memory and of their keeper. Every call returns in time or
raises.

The order around a checkpoint, with ``lock`` and ``unlock`` the driver's own: `Agent.park` with
patience, lock, `Agent.park`, unlock, `Agent.unmap`, lock, checkpoint, …, restore, unlock,
`Agent.map`, `Agent.go` (see `icecore.host.resident.window`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from errno import (
    EAGAIN,
    EALREADY,
    ECONNRESET,
    EINVAL,
    EIO,
    EMFILE,
    ENOENT,
    EPIPE,
    EPROTO,
    ETIMEDOUT,
)
from pathlib import Path
from typing import TypeVar

import msgspec

from icecore.errors import IcecoreError, NotFound
from icecore.host.kernel import procfs
from icecore.host.kernel.trusted import connect
from icecore.host.resident import signals
from icecore.host.resident.protocol import (
    OLDEST_VERSION,
    VERSION,
    Allocation,
    Counts,
    Message,
    Operation,
    explain,
    receive,
    send,
)

T = TypeVar("T")

_ANSWER_SECONDS = 10.0
_LEASE_SECONDS = 30.0
#: In which a job whose process broke off comes to its end: torchrun gives the others 30 s to end by
#: themselves.
_KEPT_SECONDS = 60.0
#: For a whole list; one of hundreds of thousands of allocations takes a second or two.
_LIST_SECONDS = 30.0
_MOST_LISTED = 1 << 23
_HUNG_UP = (EPROTO, ECONNRESET, EPIPE)


class ResidentFailed(IcecoreError):
    """A process or a keeper failed to carry out a request.

    Args:
        code: An errno, or 10000 + a CUresult.
    """

    def __init__(self, message: str, code: int, *, cure: str = "") -> None:
        super().__init__(f"{message}: {explain(code)}", cure=cure)
        self.code = code


class State(IntEnum):
    """The state of a process with resident memory."""

    RUNNING = 0
    PARKED = 1
    UNMAPPED = 2


class Report(msgspec.Struct, frozen=True):
    """The status of a process with resident memory.

    Attributes:
        token: Names it through checkpoint and restore.
        version: What it speaks; from 2 on it knows what it shares.
    """

    state: State
    token: bytes
    counts: Counts
    version: int = VERSION


#: RESIDENT_HAND_OVER and RESIDENT_COPIES of protocol.h.
_HAND_OVER = 1
_COPIES = 2


class Copies(msgspec.Struct, frozen=True):
    """How a process makes the driver's copies of a window itself
    (``icecore/host/resident/copies.c``).

    Attributes:
        threads: Threads in addition to the driver's; 0: the driver makes the copies.
        huge: Bytes of the driver's new mapping that may be huge pages.
    """

    threads: int = 0
    huge: int = 0


class Unmapped(msgspec.Struct, frozen=True):
    """The device memory that was unmapped from a process.

    Attributes:
        bytes: The size of this memory.
        copies: Whether the process makes the driver's copies itself.
    """

    bytes: int
    copies: bool


class _Speaker:
    """Whoever asks somebody who may be older: who hangs up at once is asked in the older way."""

    version = VERSION

    def _spoken(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except ResidentFailed as error:
            if self.version != VERSION or error.code not in _HUNG_UP:
                raise
            first = error
        self.version = OLDEST_VERSION
        try:
            return call()
        except ResidentFailed:
            self.version = VERSION
            raise first from None


class Agent(_Speaker):
    """The agent of one process. Each call uses a connection of its own, so that none is open when
    the process is checkpointed.

    Args:
        directory: ``ICECORE_RESIDENT`` of the process, as this machine sees it.
        pid: The process, as it knows itself (in its own pid namespace).
        tracee: The same as this machine sees it: who else listens there is not spoken to, and no
            thread of any other process is reached. Default: ``pid``, and any process of this user
            may listen.
    """

    def __init__(self, directory: Path, pid: int, tracee: int | None = None) -> None:
        self.directory = directory
        self.pid = pid
        self._tracee = pid if tracee is None else tracee
        self._peer = tracee

    @property
    def exists(self) -> bool:
        """Return whether the process has (or had) resident memory."""
        return self._path.is_socket()

    def report(self, *, hand_over: bool = True) -> Report:
        """Return the agent's status. Raises as all calls here: ``NotFound`` (no such agent),
        `ResidentFailed`.

        Args:
            hand_over: Have the process first give the keeper its recent allocations. Older preloads
                always do. Pass False while the driver is locked.
        """
        answer = self._ask(Message(Operation.AGENT_STATUS, flags=_HAND_OVER if hand_over else 0))
        if answer.result:  # EBUSY, between park and unmap: who has the table's lock waits for somebody that is parked
            raise ResidentFailed(f"process {self.pid} accepts no requests now", answer.result)
        return Report(State(answer.state), answer.token, Counts.unpack(answer.text), self.version)

    def allocations(self) -> list[Allocation]:
        """Its resident allocations, by address."""

        def ask() -> list[Allocation]:
            with _connected(self._path, _ANSWER_SECONDS, self._peer) as connection:
                send(connection, Message(Operation.AGENT_LIST), version=self.version)
                return [Allocation.of(one) for one, _ in _until(connection, Operation.AGENT_END)]

        return sorted(self._spoken(ask), key=lambda one: one.address)

    def park(
        self, seconds: float = 10.0, lease: float = _LEASE_SECONDS, patience: float = 0.0
    ) -> int:
        """Stop every thread but the agent's and the driver's; return their number.

        A thread that is inside one of the preload's own calls is parked as it leaves it, which
        `unmap` waits for.

        Args:
            seconds: After this time all run again, and the call fails.
            patience: Seconds to wait for threads to leave the driver's calls; shorter once none of
                those inside moves. Those that stay inside run until this is called again. 0: park
                all threads, wherever they are.
            lease: Seconds after this or any later call, without another, after which the process
                goes back to running by itself.
        """
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            message = Message(
                Operation.AGENT_PARK,
                nanoseconds=_ns(left),
                lease=_ns(lease),
                requested=_ns(min(patience, left)),
            )
            answer = self._ask(message, seconds)
            if answer.result == 0:
                return answer.count
            threads = [int(word) for word in answer.text.partition(b"\0")[0].split()]
            if answer.result != EAGAIN:
                which = f"threads {threads}" if threads else "the threads"
                raise ResidentFailed(
                    f"{which} of process {self.pid} could not be parked", answer.result
                )
            unreached = signals.reach(self._tracee, self._as_seen_here(threads), answer.ordinal)
            if unreached or time.monotonic() > until:
                self.go()
                raise ResidentFailed(
                    f"threads {unreached or threads} of process {self.pid} block all signals",
                    EAGAIN,
                    cure="icecore must be allowed to trace the process (CAP_SYS_PTRACE)",
                )

    def unmap(self, seconds: float = 10.0, copies: Copies | None = None) -> Unmapped:
        """Unmap the memory of a parked process once the keeper has all of it. If this fails, the
        process runs with its memory.

        Args:
            copies: How the process makes the driver's copies; None: it does not. With an older
                preload, or on another processor architecture than x86-64, it never does.

        Raises:
            ResidentFailed: With the code EAGAIN: a thread stood where the driver cannot do without
                it; lock, park, unlock and try again. EMFILE: it may not have as many descriptors as
                its memory would come back with.
        """
        how = copies or Copies()
        answer = self._ask(
            Message(
                Operation.AGENT_UNMAP,
                nanoseconds=_ns(seconds),
                count=how.threads,
                requested=how.huge,
            ),
            seconds,
        )
        if answer.result == EMFILE and answer.count:
            raise ResidentFailed(
                f"the device memory of process {self.pid} stays mapped: it is {answer.count} allocations, of each it would have a descriptor afterwards, "
                f"and besides those that it has open its hard limit of {answer.requested} does not allow that",
                EMFILE,
                cure="raise the hard limit of descriptors that the job is started with: ulimit -Hn 1048576",
            )
        if answer.result:
            raise ResidentFailed(
                f"the device memory of process {self.pid} could not be unmapped", answer.result
            )
        return Unmapped(answer.size, copies=bool(answer.flags & _COPIES))

    def map(self, descriptors: Mapping[int, int] | None = None, seconds: float = 60.0) -> None:
        """Give the process its memory back.

        Args:
            descriptors: A descriptor by the identity of each allocation; None: the process gets
                them from its keeper.

        Raises:
            ResidentFailed: Also with the code EALREADY: it was given descriptors, and runs: with
                what the keeper had, because its lease has ended.
        """
        given = descriptors or {}

        def ask() -> Message:
            with _connected(self._path, seconds, self._peer) as connection:
                send(
                    connection, Message(Operation.AGENT_MAP, count=len(given)), version=self.version
                )
                for identity, descriptor in given.items():
                    send(
                        connection,
                        Message(Operation.AGENT_MAP, identity=identity),
                        descriptor,
                        self.version,
                    )
                return _last_answer(connection, self._path)

        answer = self._spoken(ask)
        if answer.result:
            raise ResidentFailed(
                f"the device memory of process {self.pid} could not be mapped", answer.result
            )
        if given and State(answer.state) is State.RUNNING:
            raise ResidentFailed(
                f"process {self.pid} runs already, with other device memory", EALREADY
            )

    def go(self) -> None:
        """Let the threads run on."""
        answer = self._ask(Message(Operation.AGENT_GO))
        if answer.result:
            raise ResidentFailed(
                f"cannot resume process {self.pid}: its memory is not mapped", answer.result
            )

    def hold(self, lease: float) -> None:
        """Renew the lease, with this length in seconds."""
        self._ask(Message(Operation.AGENT_LEASE, lease=_ns(lease)))

    def look(self, seconds: float) -> None:
        """Announce that parts of its memory stay mapped elsewhere for this long, at most 10 s,
        while it runs: what it frees meanwhile may not be free at once, and an allocation that finds
        no memory waits. 0 ends this.

        Raises:
            ResidentFailed: Also with the code EINVAL: its preload is older, and its allocations
                would fail.
        """
        answer = self._ask(Message(Operation.AGENT_LOOK, nanoseconds=_ns(seconds)))
        if answer.result:
            raise ResidentFailed(
                f"cannot map the memory of process {self.pid} while it runs", answer.result
            )

    @property
    def _path(self) -> Path:
        return self.directory / f"agent-{self.pid}"

    def _ask(self, message: Message, seconds: float = 0.0) -> Message:
        def ask() -> Message:
            with _connected(self._path, seconds + _ANSWER_SECONDS, self._peer) as connection:
                send(connection, message, version=self.version)
                return _last_answer(connection, self._path)

        return self._spoken(ask)

    def _as_seen_here(self, threads: Sequence[int]) -> list[int]:
        """Thread ids of the process's own namespace as ids of this one; of the process alone,
        whatever it says of others.
        """
        wanted, found = set(threads), []
        for name in os.listdir(f"/proc/{self._tracee}/task"):
            try:
                fields = procfs.status_fields(self._tracee, name)
            except (NotFound, OSError):
                continue
            if int(fields["NSpid"][-1]) in wanted:
                found.append(int(name))
        return found


class HeldProcess(msgspec.Struct, frozen=True):
    """A process as its keeper knows it.

    Attributes:
        token: Names it through checkpoint and restore.
        pid: As the keeper sees it.
        alive: Whether it runs.
        retained: Whether its memory stays although it ends.
        allocations, size: How many, and their bytes.
    """

    token: bytes
    pid: int
    alive: bool
    retained: bool
    allocations: int
    size: int


class Keeper(_Speaker):
    """The keeper of a directory.

    Args:
        directory: ``ICECORE_RESIDENT`` of its processes, as this machine sees it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def _path(self) -> Path:
        return self.directory / "keeper"

    def processes(self) -> list[HeldProcess]:
        """All that it holds something of, or is connected to. Raises as all calls here:
        ``NotFound`` (no keeper), `ResidentFailed`.
        """

        def ask() -> list[HeldProcess]:
            with _connected(self._path, _ANSWER_SECONDS) as connection:
                send(connection, Message(Operation.KEEPER_PROCESSES), version=self.version)
                return [
                    HeldProcess(
                        one.token,
                        one.pid,
                        bool(one.flags & 1),
                        bool(one.flags & 2),
                        one.count,
                        one.size,
                    )
                    for one, _ in _until(connection, Operation.KEEPER_END)
                ]

        return self._spoken(ask)

    def allocations(self, token: bytes) -> list[Allocation]:
        """What it holds of a process, by address."""

        def ask() -> list[Allocation]:
            with _connected(self._path, _ANSWER_SECONDS) as connection:
                send(connection, Message(Operation.KEEPER_LIST, token=token), version=self.version)
                return [Allocation.of(one) for one, _ in _until(connection, Operation.KEEPER_END)]

        return sorted(self._spoken(ask), key=lambda one: one.address)

    def take(self, token: bytes) -> list[tuple[Allocation, int]]:
        """The same with a duplicate of each descriptor, the caller's to close."""

        def ask() -> list[tuple[Allocation, int]]:
            found: list[tuple[Allocation, int]] = []
            try:
                with _connected(self._path, _ANSWER_SECONDS) as connection:
                    send(
                        connection,
                        Message(Operation.KEEPER_TAKE, token=token),
                        version=self.version,
                    )
                    for one, descriptor in _until(connection, Operation.KEEPER_END):
                        if descriptor < 0:  # the kernel had none left for this process
                            cure = "raise the hard limit of descriptors: ulimit -Hn 1048576"
                            raise ResidentFailed(
                                "cannot open a descriptor of resident memory", EMFILE, cure=cure
                            )
                        found.append((Allocation.of(one), descriptor))
            except BaseException:
                for _, descriptor in found:
                    os.close(descriptor)
                raise
            return found

        return sorted(self._spoken(ask), key=lambda pair: pair[0].address)

    def fetch(self, token: bytes, identities: Sequence[int]) -> dict[int, int]:
        """Return duplicates of some of its descriptors by identity, which the caller closes.
        Descriptors that it no longer holds are left out.
        """

        def ask() -> dict[int, int]:
            found: dict[int, int] = {}
            try:
                with _connected(self._path, _ANSWER_SECONDS) as connection:
                    for identity in identities:
                        message = Message(Operation.KEEPER_FETCH, token=token, identity=identity)
                        send(connection, message, version=self.version)
                        answer, descriptor = receive(connection)
                        if descriptor >= 0:
                            found[identity] = descriptor
                        elif answer.result != ENOENT:
                            raise ResidentFailed(
                                f"the keeper {self._path} refused", answer.result or EPROTO
                            )
            except BaseException:
                for descriptor in found.values():
                    os.close(descriptor)
                raise
            return found

        return self._spoken(ask)

    def put(self, allocation: Allocation, descriptor: int) -> None:
        """Have it hold a descriptor (of which the caller keeps its own) for a process that will
        come back.
        """
        self._ask(
            Message(
                Operation.KEEPER_PUT,
                identity=allocation.identity,
                address=allocation.address,
                size=allocation.size,
                requested=allocation.requested,
                device=bytes.fromhex(allocation.device.removeprefix("GPU-").replace("-", "")),
                ordinal=allocation.ordinal,
                token=allocation.token,
                flags=allocation.flags,
            ),
            descriptor,
        )

    def forget(self, token: bytes) -> None:
        """Let go of all that it holds of a process; no error where that is nothing."""
        self._ask(Message(Operation.KEEPER_FORGET, token=token), good=(0, ENOENT))

    def keep(self, token: bytes, init: int, status: Path, seconds: float = _KEPT_SECONDS) -> None:
        """Keep the memory of a process beyond its end, unless its job ends well; no error if it has
        ended already.

        Args:
            init: The job's init, as this machine sees it. Its end is the job's.
            status: In this file it writes how the command ended (`icecore.host.jobs.job`). ``exited
                0`` is well.
            seconds: Where the process ends and the job runs on, its memory is let go of after this
                time at the latest.

        Raises:
            ResidentFailed: Also with the code EINVAL: the keeper is older.
        """
        message = Message(Operation.KEEPER_KEEP, token=token, pid=init, lease=_ns(seconds))
        file = os.open(status, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._ask(message, file, good=(0, ENOENT))
        finally:
            os.close(file)

    def unkeep(self, token: bytes) -> None:
        """Let its memory end with the process after all; no error if the process has ended, or if
        the keeper is older and keeps nothing.
        """
        self._ask(Message(Operation.KEEPER_KEEP, token=token), good=(0, ENOENT, EINVAL))

    def drop(self, token: bytes, identities: Sequence[int]) -> None:
        """Release some of what it holds of a process that has ended; no error if it does not hold
        them.
        """
        for identity in identities:
            self._ask(
                Message(Operation.KEEPER_DROP, token=token, identity=identity), good=(0, ENOENT)
            )

    def _ask(self, message: Message, descriptor: int = -1, good: tuple[int, ...] = (0,)) -> None:
        def ask() -> Message:
            with _connected(self._path, _ANSWER_SECONDS) as connection:
                send(connection, message, descriptor, self.version)
                return _answer(connection, self._path)

        answer = self._spoken(ask)
        if answer.result not in good:
            raise ResidentFailed(f"the keeper {self._path} refused", answer.result)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@contextmanager
def _connected(path: Path, seconds: float, pid: int | None = None) -> Iterator[socket.socket]:
    """Connect to a keeper, or with ``pid`` to the agent of that process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(seconds)
        try:
            connect(connection, path, pid=pid)
            yield connection
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotFound(f"nothing listens at {path}") from error
        except EOFError as error:
            raise ResidentFailed(f"{path} hung up", EPROTO) from error
        except (ValueError, OSError) as error:
            raise ResidentFailed(
                f"{path} did not answer ({error})", getattr(error, "errno", None) or EIO
            ) from error


def _until(connection: socket.socket, end: Operation) -> Iterator[tuple[Message, int]]:
    """Yield a list's messages: in its time as a whole, and no more than any process has
    allocations.
    """
    over = time.monotonic() + _LIST_SECONDS
    for _ in range(_MOST_LISTED):
        message, descriptor = receive(connection)
        if message.operation == end:
            return
        yield message, descriptor
        if time.monotonic() > over:
            raise TimeoutError(ETIMEDOUT, f"its list did not end within {_LIST_SECONDS:.0f} s")
    raise ValueError("its list does not end")


def _answer(connection: socket.socket, path: Path) -> Message:
    message, descriptor = receive(connection)
    if descriptor >= 0:
        os.close(descriptor)
        raise ValueError(f"{path} sent a descriptor")
    return message


def _last_answer(connection: socket.socket, path: Path) -> Message:
    """An agent's, which then closes its end: only after that may its process be checkpointed."""
    message = _answer(connection, path)
    try:
        receive(connection)
    except EOFError:
        return message
    raise ValueError(f"{path} went on after its answer")
