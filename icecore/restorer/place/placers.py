"""The restorer's side of its placers (`icecore.restorer.place.placer_process`). A placer that does
not answer has placed nothing but what it was asked for under a lock that is still held.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal

from icecore.errors import RestoreFailed
from icecore.host.kernel.userfaultfd import Stop
from icecore.host.rpc.family import Family, FamilyMember
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
#: While the driver restores device memory: the least bytes for which placers pay, and the bytes for
#: which each of them pays.
_LEAST_BESIDE, _EACH_BESIDE = 128 << 20, 32 << 20
#: Beside other placers that fill a file: the bytes for which each placer pays, and the most
#: placers.
_EACH_BESIDE_FILE, _MOST_BESIDE_FILE = 64 << 20, 8


#: What works beside placers: nothing; the driver, which restores device memory (threads that place
#: would delay this interpreter's work for it); or the driver, and other placers that fill the file
#: from which it reads.
Beside = Literal["nothing", "driver", "file"]


def placers_for(
    size: int,
    budget: int,
    cores: int | None = None,
    *,
    processes: int = 1,
    beside: Beside = "nothing",
) -> int:
    """Return how many placers pay.

    Args:
        size: Bytes to place.
        budget: Bytes that all together may hold.
        cores: Of this machine.
        processes: How many wait for their memory at once: the driver moves the memory of each in a
            thread of its own.
        beside: What works meanwhile.
    """
    cores = cores or os.cpu_count() or 1
    least = _LEAST_BYTES if beside == "nothing" else _LEAST_BESIDE
    if cores < _LEAST_CORES or size < least:
        return 0
    most = min(cores, budget // _BYTES)
    if beside == "file":
        return min(most, size // _EACH_BESIDE_FILE, _MOST_BESIDE_FILE * processes)
    if beside == "driver":
        most = min(most, size // _EACH_BESIDE)
    return min(most, _MOST * processes)


class PlacerLost(RestoreFailed):
    """A placer has ended: the kernel has freed what it held, and what it was asked for may be done
    in part and can be done again.
    """


class Placer(FamilyMember):
    """One placer."""

    def __init__(self, control: socket.socket, patience: float) -> None:
        super().__init__(control, patience, Answer)
        self._targets: dict[int, Member] = {}

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

    def _forget_gone(self) -> None:
        for number in [number for number, member in self._targets.items() if member.gone]:
            del self._targets[number]
            self._send(Forget(number))

    def _failed(self, error: OSError | None) -> RestoreFailed:
        if error is None:
            return PlacerLost(f"a placer process did not begin within {self._patience:.0f} s")
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
        self._family = Family("icecore.restorer.place.placer_process", word, count)
        self.all = [Placer(own, patience) for own in self._family.sockets]
        self.lock = lock
        self._order = Open(folder, bytes(key), encryption_of(key), room, lock)

    def begin(self) -> None:
        """Send the first message: the shared lock exists."""
        for placer in self.all:
            with suppress(PlacerLost):  # raised again by the first request
                placer._send(self._order)

    def kill(self) -> None:
        """Kill them, whatever they do; `close` waits for their end."""
        self._family.kill()

    def close(self) -> None:
        """End them; afterwards none holds a userfaultfd. May be called twice.

        Raises:
            RestoreFailed: A placer did not end, and was killed.
        """
        if self._family.alive and not any(placer.ready for placer in self.all):
            self._family.kill()  # still loading: none has done anything
        for placer in self.all:
            placer.close()
        if not self._family.wait(_END_SECONDS):
            raise RestoreFailed(f"a placer process did not end within {_END_SECONDS:.0f} s")

    def __enter__(self) -> Placers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
