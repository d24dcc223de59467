"""Placers that fill a file, kept busy by one thread: every row is there or left over, whoever ends,
hangs or does not begin.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from icecore.errors import RestoreFailed
from icecore.host.kernel import huge_file
from icecore.restorer.fetch.spans import hand_out
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.place.file_table import FileTable
from icecore.restorer.place.placers import Placer, Placers
from icecore.restorer.place.placing import File, Stored
from icecore.sizes import CELL_BYTES
from tests.host.target import eventually
from tests.restorer.places import repository_place, store_cells

ROWS = 100
_WHOLE = bytes([255]) * 32


@dataclass
class Scene:
    """Placers of a file, its table, what is to be in it, and what they have said is there."""

    placers: Placers
    table: FileTable
    content: list[bytes]
    file: int
    root: str
    there: list[int] = field(default_factory=list)

    def came(self, first: int, answer: Stored) -> None:
        self.there += [first + number for number, there in enumerate(answer.there) if there]

    def hand_out(self, patience: float = 20.0) -> list[int]:
        return hand_out(self.placers.all, len(self.table), self.came, lambda: False, patience)

    def pids(self) -> list[int]:
        """Those of the placers, in their order."""
        assert eventually(
            lambda: len(descendants(self.placers._family.pid)) == len(self.placers.all)
        )
        return sorted(descendants(self.placers._family.pid))

    def is_right(self, left: list[int]) -> None:
        """Each row is in the file, or left over."""
        assert sorted(self.there + left) == list(range(ROWS))
        for row in self.there:
            assert os.pread(self.file, CELL_BYTES, row * CELL_BYTES) == self.content[row]


@contextmanager
def scene(count: int = 3) -> Iterator[Scene]:
    """Every fourth cell is like one before."""
    with repository_place() as place:
        content: list[bytes] = []
        for row in range(ROWS):
            content.append(content[row // 2] if row % 4 == 3 else os.urandom(CELL_BYTES))
        _, records = store_cells(place, [(_WHOLE, data) for data in content])
        table = FileTable(
            records,
            np.full((ROWS, 32), 255, np.uint8),
            np.arange(ROWS, dtype=np.int64) * CELL_BYTES,
        )
        file, shared = huge_file.create(ROWS * CELL_BYTES), table.share()
        with Placers(
            count,
            str(place.root),
            place.repository.keys.chunk,
            room=20 << 20,
            patience=20,
            word="test",
            lock="",
        ) as placers:
            placers.begin()
            for placer in placers.all:
                placer.open_file(File(ROWS * CELL_BYTES, ROWS), file, shared)
            os.close(shared)
            yield Scene(placers, table, content, file, str(place.root))
        os.close(file)


def test_all_of_it() -> None:
    with scene() as it:
        assert it.hand_out() == []
        it.is_right([])


def test_what_a_table_shares() -> None:
    with scene(1) as it:
        for rows in (ROWS, 1, 0):
            part = FileTable(
                it.table.records[:rows], it.table.wanted[:rows], it.table.position[:rows]
            )
            found = FileTable.shared(part.share(), rows)
            assert len(found) == rows and found.records.tobytes() == part.records.tobytes()
            assert np.array_equal(found.wanted, part.wanted) and np.array_equal(
                found.position, part.position
            )


def test_one_that_ends_leaves_over_what_it_was_asked_for() -> None:
    with scene() as it:
        victim = it.pids()[1]

        def came(first: int, answer: Stored) -> None:
            it.came(first, answer)
            if len(it.there) <= 16:
                os.kill(victim, signal.SIGKILL)

        left = hand_out(it.placers.all, ROWS, came, lambda: False, 20.0)
        assert len(left) <= 32
        it.is_right(left)


def test_when_all_have_ended_the_rest_is_left_over() -> None:
    with scene() as it:
        for pid in it.pids():
            os.kill(pid, signal.SIGKILL)
        assert sorted(it.hand_out()) == list(range(ROWS))


def test_one_that_hangs_is_named() -> None:
    with scene() as it:
        victim = it.pids()[1]
        assert eventually(lambda: all(placer.ready for placer in it.placers.all))
        os.kill(victim, signal.SIGSTOP)
        try:
            with pytest.raises(RestoreFailed, match="no answer"):
                it.hand_out(1.0)
        finally:
            os.kill(victim, signal.SIGCONT)


def test_who_does_not_begin_is_not_waited_for_as_long_as_others_work() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with scene() as it, ours, theirs:
        began = time.monotonic()
        assert (
            hand_out([Placer(ours, 60.0), *it.placers.all], ROWS, it.came, lambda: False, 60.0)
            == []
        )
        assert time.monotonic() - began < 30
        it.is_right([])


def test_when_none_begins_all_is_left_over() -> None:
    with scene() as it:
        os.kill(it.placers._family.pid, signal.SIGSTOP)  # before it has forked any of them
        assert sorted(it.hand_out(0.5)) == list(range(ROWS))


def test_what_cannot_be_had_is_left_over() -> None:
    with scene() as it:
        for folder, _, names in os.walk(f"{it.root}/shards"):
            for name in names:
                os.truncate(f"{folder}/{name}", 40 << 20)
        left = it.hand_out()
        assert 0 < len(left) < ROWS
        it.is_right(left)


def test_nothing_is_asked_for_once_nobody_wants_it() -> None:
    with scene() as it:
        left = hand_out(it.placers.all, ROWS, it.came, lambda: len(it.there) >= 16, 20.0)
        assert 16 <= len(it.there) < ROWS
        it.is_right(left)
