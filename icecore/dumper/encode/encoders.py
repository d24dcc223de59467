"""The dumper's side of its encoders (`icecore.dumper.encode.encoder_process`). If an encoder fails,
the dumper does its work itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from icecore.dumper.encode.protocol import (
    ROOM_CELLS,
    Answer,
    Append,
    Appended,
    Cell,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    Named,
    Open,
    Ready,
)
from icecore.errors import Damaged, NotFound, ObjectMissing
from icecore.events import Event, Sink
from icecore.host.kernel import limits, procfs
from icecore.host.kernel.cpu import usable_cores
from icecore.host.kernel.waiting import readable
from icecore.host.rpc import packets
from icecore.host.rpc.family import Family, FamilyMember
from icecore.sizes import CELL_BYTES
from icecore.store.backend.base import Backend
from icecore.store.backend.local import write_at
from icecore.store.format.cipher import encryption_of
from icecore.store.format.codec import MAX_OVERHEAD
from icecore.store.log.repository import StoredRepository
from icecore.store.snapshot.bases import Fetch as Reader
from icecore.store.snapshot.forms import Appender, AppenderLost, Room, Wanted, Written
from icecore.store.snapshot.trial import Objective

#: Bytes that threads store before encoders are worth starting. All encoders together take a quarter
#: of a second of CPU time to start, and each takes a few hundredths more.
PAYS_BYTES = 512 << 20
#: Encoders start ahead if at least this many bytes will probably be stored.
EXPECTED_BYTES = 2 << 30
#: With fewer cores, threads are as fast. With more, the job and the writing threads need some.
_LEAST_CORES = 5
_MOST = 16
#: Memory that an encoder takes.
_BYTES = 64 << 20
#: Most bytes between two bases that are read at once.
_GAP_BYTES = 128 << 10
#: Most bytes that are read at once, whatever the parent's records say.
_MOST_BYTES = ROOM_CELLS * (CELL_BYTES + MAX_OVERHEAD + _GAP_BYTES)
#: Shorter reads are of parts of deltas, not of bases.
_LEAST_BASE = 1 << 10
_PROGRAM = "icecore.dumper.encode.encoder_process"
_PATIENCE_SECONDS = 60.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.02


def encoders_for(cores: int | None = None, memory: int | None = None) -> int:
    """Return how many encoders are worth starting for a dump that stores much.

    Args:
        cores: Number of cores that this process may use.
        memory: Bytes that all encoders together may take.
    """
    cores = cores or int(usable_cores())
    memory = limits.memory_available() // 8 if memory is None else memory
    return 0 if cores < _LEAST_CORES else min(cores * 7 // 8, _MOST, memory // _BYTES)


class EncoderLost(AppenderLost):
    """An encoder has ended, does not answer, or could not carry out a request."""


class _Bases:
    """Reads the bases that one encoder asks for.

    Attributes:
        together: Read adjacent bases at once: all chunks of the last request became deltas.
    """

    def __init__(self) -> None:
        self.together = False
        self._room = memoryview(b"")
        #: What ``_room`` holds: shard, first byte, and end.
        self._held = b"", 0, 0

    def read(self, asked: Fetch, wanted: Sequence[Wanted], fetch: Reader) -> memoryview:
        """Return the bytes that an encoder asked for. Raises as ``fetch``.

        Args:
            wanted: The chunks that the encoder is encoding.
        """
        shard, first, end = asked.shard, asked.offset, asked.offset + asked.length
        if asked.length < _LEAST_BASE:  # part of a delta; what is held is still needed
            room = memoryview(bytearray(asked.length))
            fetch(shard, first, room)
            return room
        if self._held[0] != shard or not self._held[1] <= first <= end <= self._held[2]:
            last = self._end(asked, wanted) if self.together else end
            self._held = b"", 0, 0
            if last - first > len(self._room):
                self._room = memoryview(bytearray(last - first))
            try:
                fetch(shard, first, self._room[: last - first])
            except (Damaged, ObjectMissing):
                if last == end:
                    raise
                last = end
                fetch(shard, first, self._room[: last - first])
            self._held = shard, first, last
        return self._room[first - self._held[1] :][: asked.length]

    def _end(self, asked: Fetch, wanted: Sequence[Wanted]) -> int:
        """Return the end of what was asked for and of the adjacent bases after it."""
        end = asked.offset + asked.length
        places = [one.base.place for one in wanted if one.base is not None]
        for place in sorted(places, key=lambda place: place.offset):
            last = place.offset + place.length
            if (
                place.shard == asked.shard
                and 0 <= place.offset - end <= _GAP_BYTES
                and last - asked.offset <= _MOST_BYTES
            ):
                end = last
        return end


class Encoder(FamilyMember, Appender):
    """One encoder: it reads cells, and writes their chunks to shards or other files.

    Args:
        control: The socket to the encoder.
        patience: Seconds that the encoder may take to answer.
        order: The first message.

    Attributes:
        pid: Its process, once it is `ready`.
    """

    def __init__(self, control: socket.socket, patience: float, order: Open) -> None:
        super().__init__(control, patience, Answer)
        self.pid = 0
        #: The name of the file that the encoder has open.
        self._file = b""
        self._bases = _Bases()
        self._packet = memoryview(bytearray(packets.PACKET))
        self._send(order)

    def load(self, cells: list[Cell]) -> list[Named]:
        """Have the encoder read at most `ROOM_CELLS` cells, and return what it read.

        Raises:
            EncoderLost: The encoder has ended, does not answer, or could not do it.
        """
        answer = self._answer(Load(cells))
        assert isinstance(answer, Loaded)
        return answer.cells

    def append(
        self, stream: int, place: Room, wanted: Sequence[Wanted], emit: Sink, fetch: Reader
    ) -> list[Written]:
        """See `icecore.store.snapshot.forms.Appender.append`. If it fails, the encoder is ended."""
        request = Append(stream, place.name, place.offset, place.sealed, place.spare, list(wanted))
        sent = [place.descriptor] if place.name != self._file else []
        self._file = place.name
        try:
            answer = self._carry_out(request, sent)
            while isinstance(answer, Fetch):
                answer = self._carry_out(self._fetch(answer, place, wanted, fetch))
        except BaseException:
            self._end()
            raise
        assert isinstance(answer, Appended)
        for fields in answer.damaged:
            emit(Event("store.base_damaged", fields))
        self._bases.together = all(chunk.base is not None for chunk in answer.chunks)
        return answer.chunks

    def _fetch(self, asked: Fetch, place: Room, wanted: Sequence[Wanted], fetch: Reader) -> Fetched:
        """Read what the encoder asked for, and put it into the encoder's file."""
        try:
            found = self._bases.read(asked, wanted, fetch)
        except (Damaged, ObjectMissing) as error:
            return Fetched(str(error))
        try:
            write_at(place.descriptor, [found], place.spare)
        except OSError as error:
            raise EncoderLost(f"cannot write a base for an encoder: {error}") from error
        return Fetched()

    def _carry_out(self, request: Append | Fetched, descriptors: Sequence[int] = ()) -> Answer:
        try:
            return self._answer(request, descriptors)
        except OSError as error:  # for instance: too many descriptors are on their way in sockets
            raise EncoderLost(f"an encoder cannot be asked: {error}") from error

    def _end(self) -> None:
        """Kill the encoder unless it has ended, and wait until it can no longer write. If the storage
        does not answer, that takes as long as the dumper's own writing would.
        """
        while True:
            if readable([self.fileno()], 0.0):
                try:
                    if not self._control.recv_into(self._packet):
                        return
                except ConnectionError:
                    return
            elif self._has_ended():  # something else still has its end of the socket
                return
            else:
                os.kill(self.pid, signal.SIGKILL)
                readable([self.fileno()], _END_SECONDS)

    def _has_ended(self) -> bool:
        try:
            return procfs.is_zombie(self.pid)
        except NotFound:
            return True

    def _answer(self, request: Load | Append | Fetched, descriptors: Sequence[int] = ()) -> Answer:
        answer: Answer = self._ask(request, descriptors)
        if isinstance(answer, Failed):
            raise EncoderLost(answer.why)
        return answer

    def _hear(self) -> Answer:
        # An answer carries no descriptors and is short, so one system call is enough. After each
        # system call, a thread waits for the interpreter's lock.
        try:
            length = self._control.recv_into(self._packet)
        except BlockingIOError as error:
            raise self._failed(TimeoutError(*error.args)) from error
        except ConnectionError:
            length = 0
        if not length:
            ended = packets.PeerDied()
            raise self._failed(ended) from ended
        answer: Answer = self._decode(self._packet[:length])
        return answer

    def _begin(self, first: Answer) -> None:
        assert isinstance(first, Ready)
        self.pid = first.pid

    def _failed(self, error: OSError | None) -> EncoderLost:
        if isinstance(error, packets.PeerDied):
            return EncoderLost("an encoder process has ended")
        return EncoderLost(f"an encoder process gave no answer for {self._patience:.0f} s")


def can_encode(backend: Backend) -> bool:
    """Return whether encoders can be used. If the back end has drafts, they must be able to read
    its objects from a directory.
    """
    return not backend.drafts or (backend.direct and bool(backend.folder))


class Encoders:
    """The encoders of one dump (a context manager: leaving it ends them).

    Args:
        count: Number of encoders.
        repository: `can_encode` must be true for it.
        streams: Number of shard streams.
        objective: What to save, bytes or time.
        begun: Called with the pid of each process that has begun: the one that forks the encoders,
            and each encoder.
        eager: Start the encoders however little there is to store.
    """

    def __init__(
        self,
        count: int,
        repository: StoredRepository,
        streams: int,
        objective: Objective,
        begun: Callable[[int], None],
        *,
        eager: bool = False,
    ) -> None:
        self.count = count
        self.eager = eager
        self._repository = repository
        self._streams = streams
        self._objective = objective
        self._note_begun = begun
        self._change = threading.Lock()
        self._tried = False
        self._family: Family | None = None
        self._all: list[Encoder] = []
        self._free: list[Encoder] = []
        self._closing = threading.Event()

    @property
    def begun(self) -> int:
        """Number of encoders that have begun."""
        return sum(1 for encoder in self._all if encoder.pid)

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._tried

    def start(self) -> bool:
        """Start the encoders, unless they were started before. They load in the background.

        Returns:
            Whether this call started them: False if they were started before or are being ended.

        Raises:
            EncoderLost: The machine has no room for them.
        """
        with self._change:
            if self._tried or self._closing.is_set():
                return False
            self._tried = True
            backend, key = self._repository.backend, self._repository.keys.chunk
            order = Open(
                backend.folder if backend.direct else "",
                bytes(key),
                encryption_of(key),
                os.getpid(),
                self._streams,
                self._objective.link,
                self._objective.cores,
            )
            try:
                # The encoders inherit the nice value of this thread.
                self._family = Family(_PROGRAM, str(os.getpid()), self.count)
                if self._closing.is_set():  # set while the family started
                    self._family.kill()
                    return False
                self._note_begun(self._family.pid)
                for own in self._family.sockets:
                    self._all.append(Encoder(own, _PATIENCE_SECONDS, order))
            except (OSError, EncoderLost) as error:
                if self._family is not None:
                    self._family.kill()
                if self._closing.is_set():  # `end` has killed them
                    return False
                raise EncoderLost(f"encoders cannot be started: {error}") from error
            self._free = list(self._all)
        return True

    def take(self) -> Encoder | None:
        """Return an encoder that has begun and is not taken; None: there is none now."""
        if not self._free:
            return None
        with self._change:
            begun = readable([encoder.fileno() for encoder in self._free], 0.0)
            for encoder in self._free:
                if (encoder.pid or encoder.fileno() in begun) and encoder.ready:
                    self._free.remove(encoder)
                    if encoder.pid:
                        self._note_begun(encoder.pid)
                    return encoder
        return None

    def wait(self) -> Encoder | None:
        """Wait for an encoder that has begun and is not taken, and return it; None: all are taken,
        none has begun in time, or the dump ends.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._free and not self._closing.is_set() and time.monotonic() < until:
            encoder = self.take()
            if encoder is not None:
                return encoder
            time.sleep(_LOOK_SECONDS)
        return None

    def stop_waiting(self) -> None:
        """Make every thread in `wait` return, and start no more encoders."""
        self._closing.set()

    def end(self) -> None:
        """Kill the encoders and start no more, without waiting. They must have no work left."""
        self.stop_waiting()
        self.kill()

    def kill(self) -> None:
        """Kill the encoders, whose answers are no longer needed."""
        family = self._family
        if family is not None:
            family.kill()

    def close(self) -> None:
        """End the encoders. May be called twice."""
        self._closing.set()
        with self._change:
            family, self._family = self._family, None
            if family is None:
                return
            if not any(encoder.ready for encoder in self._all):
                family.kill()  # still loading
            for encoder in self._all:
                encoder.close()
            with suppress(subprocess.TimeoutExpired):  # what they encoded is stored already
                family.wait(_END_SECONDS)

    def __enter__(self) -> Encoders:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
