"""Encoders: processes that encode a dump's cells. Dumps with encoders store the same as dumps with
threads only, and lose nothing if an encoder is lost.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from icecore.dumper.encode.encoders import (
    EXPECTED_BYTES,
    Encoder,
    EncoderLost,
    Encoders,
    _Bases,
    can_encode,
    encoders_for,
)
from icecore.dumper.encode.protocol import Answer, Append, Cell, Fetch, Fetched, Load
from icecore.dumper.gpu.resident_copy import Places
from icecore.dumper.memory.background import NICE
from icecore.dumper.memory.budget import CpuBudget
from icecore.dumper.memory.cells import EXTENT, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline
from icecore.dumper.memory.staging import Staging
from icecore.errors import Damaged, StoreError
from icecore.restorer.guard.guard_process import descendants
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.backend.local import LocalBackend, write_at
from icecore.store.backend.memory import MemoryBackend
from icecore.store.backend.s3 import S3Backend, S3Place
from icecore.store.format import codec
from icecore.store.format.fingerprints import FINGERPRINT
from icecore.store.format.manifest import Region
from icecore.store.format.rows import Place as Row
from icecore.store.snapshot.bases import Candidate
from icecore.store.snapshot.forms import Wanted, Written
from icecore.store.snapshot.stream import SharedFiles
from icecore.store.snapshot.trial import Objective
from icecore.store.snapshot.writer import SnapshotWriter
from tests.store.images import KINDS, Place, local_place, make_data
from tests.store.images import place as a_place

_CELLS = 24
_WAIT = 60.0


class Content:
    """Memory of this process with all kinds of data: whole cells, cells with pages of zeros, and
    cells of a few pages.
    """

    def __init__(self) -> None:
        size = _CELLS * CELL_BYTES
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.bytes = np.frombuffer(self.map, np.uint8)
        extents = []
        for cell in range(_CELLS):
            pages = 3 if cell % 8 == 7 else CELL_PAGES
            data = np.frombuffer(make_data(KINDS[cell % len(KINDS)], pages, cell), np.uint8).copy()
            if cell % 4 == 1:
                data.reshape(-1, PAGE)[5:40] = 0
            self.bytes[cell * CELL_BYTES : cell * CELL_BYTES + len(data)] = data
            extents.append((self.address + cell * CELL_BYTES, pages))
        self.regions = [Region(self.address, size, self.address, kind="anonymous", lazy=True)]
        self.plan = plan_cells(self.regions, np.array(extents, EXTENT))

    def change(self, seed: int) -> None:
        """Change some bytes of every third cell."""
        random = np.random.default_rng(seed)
        for cell in range(0, _CELLS, 3):
            at = cell * CELL_BYTES + int(random.integers(0, 3 * PAGE - 64))
            self.bytes[at : at + 64] = random.integers(0, 256, 64)

    def of(self, row: int) -> bytes:
        """Return the bytes of a cell."""
        start = row * CELL_BYTES
        return self.bytes[start : start + int(self.plan.length[row])].tobytes()

    def store(
        self, pipeline: Pipeline, staging: Staging, known: KnownCells
    ) -> npt.NDArray[np.void]:
        """Put all cells through the pipeline; return their records."""
        sink = pipeline.space(0, self.plan, self.regions, known)
        for row in range(len(self.plan)):
            slot, data = staging.acquire(), self.of(row)
            slot.view(0, len(data))[:] = data
            pipeline.put(sink, row, slot)
        pipeline.drain()
        return sink.records

    def known(self, records: npt.NDArray[np.void]) -> KnownCells:
        """Return these records as known cells."""
        return KnownCells(self.plan.key, np.zeros(len(records), FINGERPRINT), records)


@contextmanager
def storing(
    place: Place, parent: str | None = None, count: int = 3, *, eager: bool = True
) -> Iterator[tuple[SnapshotWriter, Staging, Pipeline, Encoders]]:
    """A pipeline of two threads with ``count`` encoders."""
    with (
        place.writer(parent) as writer,
        Encoders(count, place.repository, 1, Objective(), lambda _: None, eager=eager) as encoders,
        Staging(64 << 20) as staging,
        Pipeline(writer, staging, 2, encoders=encoders, emit=place.events.append) as pipeline,
    ):
        yield writer, staging, pipeline, encoders


def begin(encoders: Encoders) -> None:
    """Start the encoders, and wait until all have begun."""
    encoders.start()
    for encoder in encoders._all:
        encoder.wait_ready()


def reported(place: Place) -> list[tuple[str, str]]:
    """Return name and error of all events that report an error."""
    return [(e.name, str(e.fields["error"])) for e in place.events if "error" in e.fields]


def commit(
    place: Place, writer: SnapshotWriter, content: Content, records: npt.NDArray[np.void]
) -> str:
    space = writer.put_map("process", "1", 0, content.regions, [records], None)
    return writer.commit(place.manifest([space]))


def check(place: Place, snapshot: str, content: Content) -> None:
    """Compare the content of a snapshot with the memory, including zero pages."""
    reader = place.reader(snapshot)
    (records,) = reader.records(reader.manifest.spaces[0])
    room = memoryview(bytearray(CELL_BYTES))
    for row, record in enumerate(records):
        data = np.frombuffer(reader.read_cell(record, room), np.uint8).reshape(-1, PAGE)
        there = np.unpackbits(record["data"], bitorder="little").astype(np.bool_)
        whole = np.zeros((CELL_PAGES, PAGE), np.uint8)
        whole[there] = data
        length = int(content.plan.length[row])
        assert whole.reshape(-1)[:length].tobytes() == content.of(row)
        present = there | np.unpackbits(record["zero"], bitorder="little").astype(np.bool_)
        assert present.sum() * PAGE == length


def in_a_directory(root: Path, _: S3Place) -> Backend:
    return LocalBackend(root / "repository", create=True)


def in_a_bucket(_: Path, where: S3Place) -> Backend:
    """Encoders write to files in memory, and ask the dumper for bases."""
    return S3Backend(where)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("backend", [in_a_directory, in_a_bucket])
def test_encoders_store_what_threads_store(
    tmp_path: Path,
    s3_place: S3Place,
    backend: Callable[[Path, S3Place], Backend],
    encrypted: bool,
) -> None:
    with a_place(backend(tmp_path, s3_place), encrypted=encrypted) as place:
        content = Content()
        with storing(place) as (writer, staging, pipeline, encoders):
            begin(encoders)
            first = content.store(pipeline, staging, KnownCells.none())
            assert encoders.begun == 3
            pids = descendants(encoders._family.pid)  # type: ignore[union-attr]
            assert len(pids) == 3
            one = commit(place, writer, content, first)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        check(place, one, content)
        content.change(1)
        with storing(place, one) as (writer, staging, pipeline, encoders):
            begin(encoders)
            again = content.store(pipeline, staging, content.known(first))
            done = writer.statistics
            two = commit(place, writer, content, again)
        assert done.deltas >= 3 and done.reused_from["parent"] >= _CELLS // 2
        check(place, two, content)
        content.change(2)
        # A delta in the parent cannot be a base. Its own base is used, whose bitmap the encoders
        # look up.
        with storing(place, two) as (writer, staging, pipeline, encoders):
            begin(encoders)
            last = content.store(pipeline, staging, content.known(again))
            three = commit(place, writer, content, last)
        delta = (last["place"]["codec"] & codec.DELTA) != 0
        assert delta.sum() >= 3
        assert (last["base"][delta] != last["chunk"][delta]).any(axis=1).all()
        check(place, three, content)
        assert reported(place) == []


def test_an_encoder_that_ends_loses_nothing(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, count=2) as (writer, staging, pipeline, encoders):
            begin(encoders)
            pipeline.close_gate()
            sink = pipeline.space(0, content.plan, content.regions, KnownCells.none())
            for row in range(len(content.plan)):
                slot, data = staging.acquire(), content.of(row)
                slot.view(0, len(data))[:] = data
                pipeline.put(sink, row, slot)
            for encoder in encoders._all:
                os.kill(encoder.pid, signal.SIGKILL)
            pipeline.open_gate()
            pipeline.drain()
            snapshot = commit(place, writer, content, sink.records)
        check(place, snapshot, content)
        assert reported(place) == [("dump.encoder_lost", "an encoder process has ended")] * 2


def test_an_encoder_that_ends_between_its_two_answers_loses_nothing(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, count=1) as (writer, staging, pipeline, encoders):
            begin(encoders)
            (encoder,) = encoders._all
            take, left = writer._take, [encoder.pid]

            def end_and_take(chunk: bytes, length: int) -> object:
                if left:
                    os.kill(left.pop(), signal.SIGKILL)
                return take(chunk, length)

            writer._take = end_and_take  # type: ignore[method-assign,assignment]
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)
        assert reported(place) == [("dump.encoder_lost", "an encoder process has ended")]


@contextmanager
def before_append(act: Callable[[Encoder, Append, int], None]) -> Iterator[list[tuple[bytes, int]]]:
    """Call ``act`` before the first `Append` request is sent; yield the shard and offset of each
    request.
    """
    answer, asked = Encoder._answer, list[tuple[bytes, int]]()

    def instead(
        self: Encoder, request: Load | Append | Fetched, descriptors: Sequence[int] = ()
    ) -> Answer:
        if isinstance(request, Append):
            asked.append((request.name, request.offset))
            if len(asked) == 1:
                act(self, request, *descriptors)
        return answer(self, request, descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "_answer", instead)
        yield asked


def store_despite(place: Place, act: Callable[[Encoder, Append, int], None]) -> None:
    """Store with one encoder, which ``act`` makes fail before it is first asked to append. Check
    that it has ended, and what was stored.
    """
    content = Content()
    with storing(place, count=1) as (writer, staging, pipeline, encoders):
        begin(encoders)
        (encoder,) = encoders._all
        with before_append(act):
            records = content.store(pipeline, staging, KnownCells.none())
        until = time.monotonic() + _WAIT
        while not encoder._has_ended():  # if it lived, it could still write
            assert time.monotonic() < until
            time.sleep(0.01)
        snapshot = commit(place, writer, content, records)
    check(place, snapshot, content)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_an_encoder_that_ends_while_it_writes_loses_nothing(
    tmp_path: Path, encrypted: bool
) -> None:
    def write_and_end(encoder: Encoder, request: Append, file: int) -> None:
        write_at(file, [b"part of a chunk" * 100_000], request.offset)
        os.kill(encoder.pid, signal.SIGKILL)

    with local_place(tmp_path / "repository", encrypted=encrypted) as place:
        content = Content()
        with storing(place, count=1, eager=False) as (writer, staging, pipeline, encoders):
            # The shard must hold a chunk when the encoder ends, so that it is published.
            content.store(pipeline, staging, KnownCells.none())
            content.change(1)
            begin(encoders)
            with before_append(write_and_end) as asked:
                records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)
        assert reported(place) == [("dump.encoder_lost", "an encoder process has ended")]
        # Another chunk there would be encrypted with the same key and nonce.
        places = {(one["shard"].tobytes(), int(one["offset"])) for one in records["place"]}
        assert asked[0] not in places
        for shard in (tmp_path / "repository" / "shards").rglob("*"):
            assert not shard.is_file() or b"part of a chunk" not in shard.read_bytes()


def test_an_encoder_of_a_bucket_that_ends_while_it_writes_loses_nothing() -> None:
    def write_and_end(encoder: Encoder, request: Append, file: int) -> None:
        write_at(file, [b"part of a chunk" * 100_000], request.offset)
        os.kill(encoder.pid, signal.SIGKILL)

    with a_place(MemoryBackend()) as place:
        store_despite(place, write_and_end)
        assert reported(place) == [("dump.encoder_lost", "an encoder process has ended")]


def store_twice(place: Place, read: Callable[[bytes, int, memoryview], None]) -> None:
    """Store content twice with one encoder, so that it asks for bases; ``read`` reads them."""
    content = Content()
    with storing(place, count=1) as (writer, staging, pipeline, encoders):
        begin(encoders)
        first = content.store(pipeline, staging, KnownCells.none())
        one = commit(place, writer, content, first)
    content.change(1)
    with storing(place, one, 1) as (writer, staging, pipeline, encoders):
        begin(encoders)
        writer._read = read  # type: ignore[method-assign]
        again = content.store(pipeline, staging, content.known(first))
        two = commit(place, writer, content, again)
    check(place, two, content)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_bases_with_other_pages_than_their_deltas(encrypted: bool) -> None:
    """The bitmap of a base whose delta is in the parent is guessed, and then looked up."""
    backend = MemoryBackend()
    backend.direct = False
    with a_place(backend, encrypted=encrypted) as place:
        content, known, parent = Content(), KnownCells.none(), None
        pages = content.bytes.reshape(_CELLS, CELL_PAGES, PAGE)
        for seed in range(3):
            if seed:
                content.change(seed)
            if seed == 2:
                pages[:, 100] = 0
            with storing(place, parent) as (writer, staging, pipeline, encoders):
                begin(encoders)
                records = content.store(pipeline, staging, known)
                done = writer.statistics
                parent = commit(place, writer, content, records)
            before, known = known, content.known(records)
            check(place, parent, content)
        changed = (records["data"] != before.record["data"]).any(axis=1)
        delta = (records["place"]["codec"] & codec.DELTA) != 0
        assert done.deltas >= 3 and (changed & delta).any()
        assert reported(place) == []


def test_an_encoder_that_ends_while_it_waits_for_a_base_loses_nothing() -> None:
    with a_place(MemoryBackend()) as place:
        killed: list[int] = []

        def read(shard: bytes, offset: int, out: memoryview) -> None:
            for child in descendants(os.getpid()):
                if b"encoder_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
                    killed.append(child)
            out[:] = bytes(len(out))

        store_twice(place, read)
        assert killed
        assert reported(place) == [("dump.encoder_lost", "an encoder process has ended")]


def test_no_memory_for_chunks_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with a_place(MemoryBackend()) as place:
        content = Content()
        with storing(place, count=1) as (writer, staging, pipeline, encoders):
            begin(encoders)
            monkeypatch.setattr("icecore.store.snapshot.stream.os.memfd_create", refuse)
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)
        ((name, error),) = reported(place)
        assert name == "dump.encoder_lost" and "Too many open files" in error


def test_a_thread_lends_one_file_in_all_streams() -> None:
    files, before = SharedFiles(), len(os.listdir("/proc/self/fd"))
    first = files.get(1 << 20)
    assert files.get(4096) is first
    second = files.get(2 << 20)
    assert second is files.get(1 << 20) and second.name != first.name
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(files.get, 4096).result() is not second
    first.view.release()
    del first
    assert len(os.listdir("/proc/self/fd")) - before <= 4  # a mapping has a descriptor, too
    with a_place(MemoryBackend()) as place, place.writer(streams=3) as writer:
        lent = []
        for stream in writer._streams:
            with stream.lend(4096, 1) as room:
                lent.append(room.room.name)
        assert len(lent) == 3 and len(set(lent)) == 1


def test_where_encoders_can_be_used(tmp_path: Path) -> None:
    local = LocalBackend(tmp_path, create=True)
    assert can_encode(local) and can_encode(MemoryBackend())
    local.folder = ""
    assert not can_encode(local)


def test_a_machine_without_room_for_the_thread_that_starts_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "encoders":
            raise RuntimeError("can't start new thread")
        start(self)

    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, eager=False) as (writer, staging, pipeline, encoders):
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                pipeline.expect(EXPECTED_BYTES)
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
            assert not encoders.started
        check(place, snapshot, content)
        ((name, error),) = reported(place)
        assert name == "dump.encoder_lost" and "can't start new thread" in error


def test_a_base_in_a_bucket_that_is_damaged_is_reported() -> None:
    def read(shard: bytes, offset: int, out: memoryview) -> None:
        raise Damaged("object", shard.hex(), "it was cut off")

    with a_place(MemoryBackend()) as place:
        store_twice(place, read)
        assert {name for name, _ in reported(place)} == {"store.base_damaged"}
        assert all("it was cut off" in error for _, error in reported(place))


def test_a_bucket_that_does_not_answer_fails_the_snapshot() -> None:
    def read(shard: bytes, offset: int, out: memoryview) -> None:
        raise StoreError("no answer")

    with a_place(MemoryBackend()) as place, pytest.raises(StoreError, match="no answer"):
        store_twice(place, read)


def test_adjacent_bases_are_read_at_once() -> None:
    chunk, read = bytes(32), list[tuple[bytes, int, int]]()
    content = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8).tobytes()

    def wanted(shard: bytes, *places: tuple[int, int]) -> list[Wanted]:
        bases = [Candidate(chunk, Row(shard, *at, codec.RAW), b"") for at in places]
        return [Wanted(number, 0, base) for number, base in enumerate(bases)] + [Wanted(9, 0, None)]

    def fetch(shard: bytes, offset: int, out: memoryview) -> None:
        read.append((shard, offset, len(out)))
        if offset + len(out) > 35_000:
            raise Damaged("object", "x", "it ends")
        out[:] = content[offset : offset + len(out)]

    def got(shard: bytes, offset: int, length: int, cells: list[Wanted]) -> bool:
        found = bases.read(Fetch(shard, offset, length), cells, fetch)
        return bytes(found) == content[offset : offset + length]

    bases = _Bases()
    cells = wanted(b"a", (10_000, 5_000), (1_000, 3_000), (4_000, 6_000))
    assert got(b"a", 1_000, 3_000, cells) and got(b"a", 4_000, 6_000, cells)
    assert read == [(b"a", 1_000, 3_000), (b"a", 4_000, 6_000)]
    bases.together = True
    assert got(b"a", 1_000, 3_000, cells) and got(b"a", 4_000, 6_000, cells)
    assert read[2:] == [(b"a", 1_000, 14_000)]
    # The head of a delta does not replace what is held.
    assert got(b"c", 40, 32, cells) and got(b"a", 10_000, 5_000, cells)
    assert read[3:] == [(b"c", 40, 32)]
    # Another shard; then a read beyond the end of a shard.
    assert got(b"b", 4_000, 6_000, cells)
    assert read[4:] == [(b"b", 4_000, 6_000)]
    cells = wanted(b"b", (30_000, 4_000), (34_000, 4_000))
    assert got(b"b", 30_000, 4_000, cells)
    assert read[5:] == [(b"b", 30_000, 8_000), (b"b", 30_000, 4_000)]
    # Impossible records.
    assert got(b"d", 1_000, 3_000, wanted(b"d", (1_000, 3_000), (4_000, 1 << 32)))
    assert read[7:] == [(b"d", 1_000, 3_000)]


def test_encoders_are_started_ahead(tmp_path: Path) -> None:
    with (
        local_place(tmp_path / "repository") as place,
        storing(place, eager=False) as (_, _, pipeline, encoders),
    ):
        pipeline.expect(EXPECTED_BYTES - 1)
        time.sleep(0.2)
        assert not encoders.started
        pipeline.expect(EXPECTED_BYTES)
        pipeline.expect(EXPECTED_BYTES)
        until = time.monotonic() + _WAIT
        while not encoders.begun and time.monotonic() < until:  # by the thread that was added
            time.sleep(0.01)
        assert encoders._family is not None and len(pipeline._threads) == 3
        # They are forked one after the other, and the first may be ready before the last exists.
        while len(pids := descendants(encoders._family.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}
        assert len(pids) == 3 and nice == {os.getpriority(os.PRIO_PROCESS, 0) + NICE}


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1])
def test_encoders_that_end_as_they_start(after: float, tmp_path: Path) -> None:
    """They are no longer needed: none is reported as lost, and none is left running."""
    with (
        local_place(tmp_path / "repository") as place,
        storing(place, eager=False) as (_, _, pipeline, encoders),
    ):
        pipeline.expect(EXPECTED_BYTES)
        time.sleep(after)
        encoders.end()
        assert pipeline._starter is not None
        pipeline._starter.join(_WAIT)
        assert not pipeline._starter.is_alive() and not encoders.start()
        if encoders._family is not None:
            until = time.monotonic() + _WAIT
            while encoders._family.alive and time.monotonic() < until:
                time.sleep(0.01)
            assert not encoders._family.alive
    assert reported(place) == []


def test_an_encoder_that_hangs_while_it_writes_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icecore.dumper.encode.encoders._PATIENCE_SECONDS", 1.5)
    with local_place(tmp_path / "repository") as place:
        store_despite(place, lambda one, *_: os.kill(one.pid, signal.SIGSTOP))
        assert reported(place) == [
            ("dump.encoder_lost", "an encoder process gave no answer for 2 s")
        ]


def test_a_dump_waits_for_an_encoder_that_may_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the storage does not answer, a process that writes to it cannot be killed."""
    monkeypatch.setattr("icecore.dumper.encode.encoders._PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr("icecore.dumper.encode.encoders._END_SECONDS", 0.2)
    kill, tried = os.kill, list[float]()

    def stop(encoder: Encoder, *_: object) -> None:
        kill(encoder.pid, signal.SIGSTOP)

    def in_vain(pid: int, number: int) -> None:
        tried.append(time.monotonic())
        if len(tried) > 5:
            kill(pid, number)

    monkeypatch.setattr("icecore.dumper.encode.encoders.os.kill", in_vain)
    with local_place(tmp_path / "repository") as place:
        store_despite(place, stop)
    assert len(tried) == 6 and tried[-1] - tried[0] > 0.9
    assert reported(place) == [("dump.encoder_lost", "an encoder process gave no answer for 1 s")]


def test_a_request_that_cannot_be_sent_loses_nothing(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    with local_place(tmp_path / "repository") as place:
        store_despite(place, refuse)
        ((name, error),) = reported(place)
        assert name == "dump.encoder_lost" and "Too many references" in error


def test_an_answer_that_is_too_short_fails_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is gone, and with it chunks that count as stored."""
    append = Encoder.append

    def short(*words: Any) -> list[Written]:
        return append(*words)[1:]

    monkeypatch.setattr(Encoder, "append", short)
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with (
            pytest.raises((ValueError, StoreError), match="shorter"),
            storing(place, count=1) as (writer, staging, pipeline, encoders),
        ):
            begin(encoders)
            try:
                content.store(pipeline, staging, KnownCells.none())
            finally:
                until = time.monotonic() + _WAIT  # another thread may be storing a chunk
                while any(isinstance(one, threading.Event) for one in writer._chunks.values()):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                with pytest.raises(StoreError, match="shorter"):
                    writer._uploads.check()


def test_a_small_bound_on_cpu_time_allows_small_pieces_only() -> None:
    assert CpuBudget(lambda: 0.0).small is False
    budget = CpuBudget(lambda: 0.0)
    budget.bound(0.5)
    assert budget.small
    budget.bound(2.0)
    assert not budget.small


def test_equal_cells_are_stored_once(tmp_path: Path) -> None:
    """Threads that claim several equal cells do not deadlock."""
    with local_place(tmp_path / "repository") as place:
        content = Content()
        cells = content.bytes.reshape(_CELLS, CELL_BYTES)
        random = np.random.default_rng(1)
        kinds = [cells[cell].copy() for cell in (0, 2, 4)]
        with storing(place) as (writer, staging, pipeline, encoders):
            begin(encoders)
            for _ in range(20):
                for kind in kinds:
                    kind[:8] = random.integers(0, 256, 8)
                for cell in range(_CELLS):
                    cells[cell] = kinds[int(random.integers(0, 3))]
                before = writer.statistics.chunks
                records = content.store(pipeline, staging, KnownCells.none())
                whole = records[content.plan.length == CELL_BYTES]
                assert len({one.tobytes() for one in whole["chunk"]}) <= 3
                # The plan's small cells have content of their own.
                assert writer.statistics.chunks - before <= 6
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)
        assert reported(place) == []


def test_a_damaged_base_is_reported(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, count=1) as (writer, staging, pipeline, encoders):
            begin(encoders)
            first = content.store(pipeline, staging, KnownCells.none())
            one = commit(place, writer, content, first)
        at = first[0]["place"]
        name = at["shard"].tobytes().hex()
        (shard,) = (tmp_path / "repository" / "shards").rglob(name)
        with open(shard, "r+b") as file:
            file.seek(int(at["offset"]) + 12345)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        content.change(1)
        with storing(place, one, 1) as (writer, staging, pipeline, encoders):
            begin(encoders)
            again = content.store(pipeline, staging, content.known(first))
            two = commit(place, writer, content, again)
        check(place, two, content)
        ((name, error),) = reported(place)
        assert name == "store.base_damaged" and "do not match" in error


def test_encoders_are_started_once_much_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, eager=False) as (_, staging, pipeline, encoders):
            content.store(pipeline, staging, KnownCells.none())
            assert not encoders.started
        monkeypatch.setattr("icecore.dumper.memory.pipeline.PAYS_BYTES", 8 << 20)
        with storing(place, eager=False) as (_, staging, pipeline, encoders):
            until = time.monotonic() + _WAIT
            while encoders.begun < 3 and time.monotonic() < until:
                content.change(int(time.monotonic() * 1000) % 10_000)
                content.store(pipeline, staging, KnownCells.none())
            assert encoders.begun == 3
            assert len(pipeline._threads) == 3
            nice = {os.getpriority(os.PRIO_PROCESS, t.native_id or 0) for t in pipeline._threads}
            nice |= {os.getpriority(os.PRIO_PROCESS, encoder.pid) for encoder in encoders._all}
            assert nice == {os.getpriority(os.PRIO_PROCESS, 0) + NICE}


def test_an_encoder_that_hangs_costs_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icecore.dumper.encode.encoders._PATIENCE_SECONDS", 1.5)
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, count=2) as (writer, staging, pipeline, encoders):
            begin(encoders)
            pids = [encoder.pid for encoder in encoders._all]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
            for pid in pids:  # otherwise leaving the context would wait for them, and kill them
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        check(place, snapshot, content)
        assert set(reported(place)) == {
            ("dump.encoder_lost", "an encoder process gave no answer for 2 s")
        }


def test_an_encoder_that_cannot_read_the_dumpers_memory(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place, count=1) as (writer, staging, pipeline, encoders):
            begin(encoders)
            (encoder,) = encoders._all
            with pytest.raises(EncoderLost, match="read -1 of 4096 bytes"):
                encoder.load([Cell(1 << 20, 4096, bytes(32), False)])
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)


def test_a_sink_that_fails_leaves_no_dump_waiting(tmp_path: Path) -> None:
    def refuse(event: object) -> None:
        raise RuntimeError("as planned")

    with local_place(tmp_path / "repository") as place:
        content = Content()
        with (
            pytest.raises(RuntimeError, match="as planned"),
            storing(place, count=1) as (_, staging, pipeline, encoders),
        ):
            begin(encoders)
            pipeline.emit = refuse
            os.kill(encoders._all[0].pid, signal.SIGKILL)
            content.store(pipeline, staging, KnownCells.none())


def test_a_machine_without_room_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place) as (writer, staging, pipeline, _):

            class Full(threading.Thread):
                def start(self) -> None:
                    raise RuntimeError("can't start new thread")

            monkeypatch.setattr("icecore.dumper.memory.pipeline.threading.Thread", Full)
            records = content.store(pipeline, staging, KnownCells.none())
            monkeypatch.undo()
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)
        assert reported(place) == [
            ("dump.encoder_lost", "no thread for an encoder: can't start new thread")
        ]


def test_places_come_back() -> None:
    places = Places([0, 1, 2])
    assert places.take(2, lambda: None) == [0, 1]
    threading.Timer(0.05, places.give_back, [1]).start()
    assert places.take(2, lambda: None) == [2, 1]

    def check() -> None:
        raise RuntimeError("as planned")

    with pytest.raises(RuntimeError):
        places.take(1, check)


def test_places_are_taken_by_threads_that_want_different_numbers() -> None:
    places = Places([])
    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(places.take, count, lambda: None) for count in (1, 2, 3, 4)]
        for place in range(10):
            time.sleep(0.02)
            places.give_back(place)
        found = [place for one in taken for place in one.result(5)]
    assert sorted(found) == list(range(10))


def test_a_machine_without_room_for_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("icecore.dumper.encode.encoders.Encoder._send", full)
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place) as (writer, staging, pipeline, encoders):
            records = content.store(pipeline, staging, KnownCells.none())
            snapshot = commit(place, writer, content, records)
            family = encoders._family
        check(place, snapshot, content)
        assert family is not None and not family.alive
        ((name, error),) = reported(place)
        assert name == "dump.encoder_lost" and "Cannot allocate memory" in error


def test_an_encoder_that_answers_nonsense_fails_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump does not wait for the cells that the encoder's thread had taken."""

    def nonsense(self: Encoder, cells: object) -> object:
        raise ValueError("as planned")

    monkeypatch.setattr(Encoder, "load", nonsense)
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with (
            pytest.raises(ValueError, match="as planned"),
            storing(place) as (_, staging, pipeline, encoders),
        ):
            begin(encoders)
            content.store(pipeline, staging, KnownCells.none())


def test_a_closed_gate_with_few_slots(tmp_path: Path) -> None:
    """Threads that hold cells at the closed gate do not keep the scan waiting for slots forever."""
    with local_place(tmp_path / "repository") as place:
        content = Content()
        with storing(place) as (writer, _, pipeline, encoders), Staging(1, 1) as few:
            begin(encoders)
            pipeline._staging = few
            few.when_empty = pipeline._spill
            pipeline.close_gate()
            records = content.store(pipeline, few, KnownCells.none())
            assert pipeline.spilled and few.capacity < _CELLS
            snapshot = commit(place, writer, content, records)
        check(place, snapshot, content)


def test_a_dump_that_fails_ends_its_encoders(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as place:
        with pytest.raises(RuntimeError), storing(place) as (_, _, _, encoders):
            begin(encoders)
            pids = descendants(encoders._family.pid)  # type: ignore[union-attr]
            raise RuntimeError("as planned")
        assert pids
        until = time.monotonic() + _WAIT  # they were killed
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("cores", "memory", "count"),
    [
        (4, 64 << 30, 0),
        (5, 64 << 30, 4),
        (16, 64 << 30, 14),
        (200, 64 << 30, 16),
        (16, 256 << 20, 4),
    ],
)
def test_how_many_encoders_are_worth_starting(cores: int, memory: int, count: int) -> None:
    assert encoders_for(cores, memory) == count
