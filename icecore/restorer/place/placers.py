"""The restorer's side of its placers (`icecore.restorer.place.placer_process`). A placer that does
not answer has placed nothing but what it was asked for under a lock that is still held.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import msgspec

from icecore.errors import RestoreFailed
from icecore.host.kernel.userfaultfd import Stop
from icecore.host.kernel.waiting import readable
from icecore.host.rpc import packets
from icecore.restorer.place.members import Member, Outcome
from icecore.restorer.place.placing import (
    Answer,
    Deliver,
    Delivered,
    Done,
    File,
    Forget,
    Move,
    Open,
    Part,
    PinnedRegion,
    Place,
    Request,
    Stage,
    Staged,
    Store,
    Stored,
    Target,
    WantedCell,
)
from icecore.restorer.plan.memory import Batch
from icecore.store.format.cell import Records
from icecore.store.format.cipher import encryption_of

_END_SECONDS = 5.0
#: What a placer takes: a batch as it is stored, its cells, and scratch.
_BYTES = 32 << 20
#: With fewer cores threads are as fast; with less memory the restore ends before a placer has
#: begun.
_LEAST_CORES = 5
_LEAST_BYTES = 512 << 20
_MOST = 16
#: The same beside placers that fill a file, and the bytes for which another placer pays.
_LEAST_BESIDE, _EACH_BESIDE, _MOST_BESIDE = 128 << 20, 64 << 20, 8


def placers_for(
    size: int, budget: int, cores: int | None = None, *, processes: int = 1, beside: bool = False
) -> int:
    """Return how many placers pay.

    Args:
        size: Bytes to place.
        budget: Bytes that all together may hold.
        cores: Of this machine.
        processes: How many wait for their memory at once: the driver moves the memory of each in a
            thread of its own.
        beside: Others fill a file meanwhile, and threads that place would keep this interpreter
            from calling the driver.
    """
    cores = cores or os.cpu_count() or 1
    if beside:
        return (
            0
            if cores < _LEAST_CORES or size < _LEAST_BESIDE
            else min(cores, size // _EACH_BESIDE, _MOST_BESIDE * processes, budget // _BYTES)
        )
    return (
        0
        if cores < _LEAST_CORES or size < _LEAST_BYTES
        else min(cores, _MOST * processes, budget // _BYTES)
    )


class PlacerLost(RestoreFailed):
    """A placer has ended: the kernel has freed what it held, and what it was asked for may be done
    in part and can be done again.
    """


class Placer:
    """One placer. Used by one thread at a time.

    Args:
        control: The socket to it.
        patience: Seconds that it may take to answer.
    """

    def __init__(self, control: socket.socket, patience: float) -> None:
        control.settimeout(patience)
        self._control = control
        self._patience = patience
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self._targets: dict[int, Member] = {}
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether it can be asked: it has begun, or has ended. It takes a while to load."""
        if not self._ready and readable([self.fileno()], 0.0):
            self._ready = True
            with suppress(PlacerLost):  # raised again by the first request
                self._hear()
        return self._ready

    def wait_ready(self) -> None:
        """Wait until it has begun, or has ended.

        Raises:
            PlacerLost: It does not begin.
        """
        if not self._ready:
            readable([self.fileno()], self._patience)
            if not self.ready:
                raise PlacerLost(f"a placer process did not begin within {self._patience:.0f} s")

    def deliver(
        self, batch: Batch, cells: Sequence[WantedCell], records: Records, pages: bytes
    ) -> Delivered:
        """Have the cells of a batch read, decoded, verified, and placed unless their process has
        changed the memory there.

        Args:
            cells: With the numbers of `target`.
            records: CELL[n], of these cells.
            pages: 32 bytes for each, the pages to place.

        Raises:
            PlacerLost: It has ended.
        """
        answer = self._ask(
            Deliver(list(batch.reads), list(cells), records.tobytes(), pages, batch.size)
        )
        assert isinstance(answer, Delivered)
        return answer

    def target(self, member: Member) -> int:
        """Return the number of a member's userfaultfd, which is handed over if the placer does not
        have it.
        """
        if member.keep not in self._targets:
            self._forget_gone()
            self._send(Target(member.keep), [member.descriptor])
            self._targets[member.keep] = member
        return member.keep

    def place(self, member: Member, moves: Sequence[Move]) -> list[Outcome]:
        """See `icecore.restorer.place.members.Placing`; sources are addresses that `deliver`
        returned.

        Raises:
            PlacerLost: It has ended, and places nothing any more.
            RestoreFailed: It does not answer.
        """
        answer = self._ask(Place(self.target(member), list(moves)))
        assert isinstance(answer, Done)
        if answer.error:
            raise OSError(answer.error, answer.why)
        return [Outcome(Stop(stop), unmapped) for stop, unmapped in answer.outcomes]

    def share(self, region: PinnedRegion, memory: int, gpus: Sequence[int]) -> None:
        """Hand over the memfd in which `stage` puts cells, and sockets to the GPUs' threads of the
        worker.
        """
        self._send(region, [memory, *gpus])

    def stage(self, parts: Sequence[Part], *, digested: bool) -> Staged:
        """Have cells read, decoded, verified, and copied to their GPUs.

        Args:
            digested: The caller verifies complete cells, on the GPUs.

        Raises:
            PlacerLost: It has ended.
        """
        answer = self._ask(Stage(list(parts), digested))
        assert isinstance(answer, Staged)
        return answer

    def open_file(self, about: File, file: int, table: int) -> None:
        """Hand over the file in which `store` puts cells, and their table."""
        self._send(about, [file, table])

    def fileno(self) -> int:
        """Return the descriptor that is readable when the placer has said something."""
        return self._control.fileno()

    def store(self, rows: range) -> None:
        """Ask a placer that has begun to put rows of the table into the file; `stored` returns the
        answer. Several requests may be pending.

        Raises:
            PlacerLost: It has ended.
        """
        self._send(Store(rows.start, rows.stop))

    def stored(self) -> Stored:
        """Return the answer to the oldest pending `store`.

        Raises:
            PlacerLost: It has ended.
        """
        answer = self._hear()
        assert isinstance(answer, Stored)
        return answer

    def close(self) -> None:
        """Let the placer end."""
        self._control.close()

    def _forget_gone(self) -> None:
        for number in [number for number, member in self._targets.items() if member.gone]:
            del self._targets[number]
            self._send(Forget(number))

    def _send(self, request: Request, descriptors: Sequence[int] = ()) -> None:
        try:
            packets.send(self._control, self._encode(request), descriptors)
        except (packets.PeerDied, TimeoutError) as error:
            raise self._failed(error) from error

    def _ask(self, request: Request) -> Answer:
        self.wait_ready()
        self._send(request)
        return self._hear()

    def _hear(self) -> Answer:
        try:
            data, _ = packets.receive(self._control)
        except (packets.PeerDied, TimeoutError) as error:
            raise self._failed(error) from error
        answer: Answer = self._decode(data)
        return answer

    def _failed(self, error: OSError) -> RestoreFailed:
        if isinstance(error, TimeoutError):
            return RestoreFailed(f"a placer process gave no answer for {self._patience:.0f} s")
        return PlacerLost("a placer process has ended")


class Placers:
    """The placers of one restore (a context manager: leaving it ends them).

    Args:
        count: How many.
        folder: Where the repository's objects are.
        key: The repository's chunk key.
        room: Stored bytes of a batch at most.
        patience: Seconds that a placer may take to answer.
        word: Shows in their command line.
        lock: Directory of the shared lock; empty: they only stage cells.
    """

    def __init__(
        self,
        count: int,
        folder: str,
        key: bytes,
        *,
        room: int,
        patience: float,
        word: str,
        lock: str,
    ) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "icecore.restorer.place.placer_process",
                    word,
                    *map(str, theirs),
                ],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # It forks once the libraries are loaded; none of these may have threads then.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        finally:
            for _, end in pairs:
                end.close()
        self.all = [Placer(own, patience) for own, _ in pairs]
        self.lock = lock
        self._order = Open(folder, bytes(key), encryption_of(key), room, lock)

    def begin(self) -> None:
        """Send the first message: the shared lock exists."""
        for placer in self.all:
            with suppress(PlacerLost):  # raised again by the first request
                placer._send(self._order)

    def kill(self) -> None:
        """Kill them, whatever they do; `close` waits for their end."""
        if self._process.poll() is None:
            # It leads a session, and all placers are in its group.
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End them; afterwards none holds a userfaultfd. May be called twice.

        Raises:
            RestoreFailed: A placer did not end, and was killed.
        """
        if self._process.poll() is None and not any(placer.ready for placer in self.all):
            self.kill()  # still loading: none has done anything
        for placer in self.all:
            placer.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(_END_SECONDS)
            raise RestoreFailed(
                f"a placer process did not end within {_END_SECONDS:.0f} s"
            ) from None

    def __enter__(self) -> Placers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
