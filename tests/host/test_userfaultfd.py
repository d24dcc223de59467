"""userfaultfd against a process that really faults, forks, remaps, discards and unmaps."""

from __future__ import annotations

import array
import hashlib
import os
import select
import socket
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from icecore.errors import RestoreFailed
from icecore.host.kernel import userfaultfd as uffd
from icecore.host.kernel.memory import HugeBuffer
from icecore.host.kernel.userfaultfd import Fault, Fork, Remap, Remove, Stop, Unmap
from icecore.sizes import PAGE
from tests.host.target import Target, eventually, target
from tests.host.userfaultfd_events import read_events

MIB = 1 << 20

CHILD = f"""
import hashlib, socket, threading
from icecore.host.kernel import userfaultfd as uffd
u = uffd.create()
a = anonymous({MIB})
libc.madvise(a, {MIB}, 15)
uffd.register(u, a, {MIB})
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"."], [u])
say(a)
"""


@contextmanager
def faulting(code: str) -> Iterator[tuple[Target, int, int]]:
    """A process with 1 MiB registered, its userfaultfd, and the address."""
    ours, theirs = socket.socketpair()
    with target(
        CHILD + textwrap.dedent(code), theirs.fileno(), pass_fds=(theirs.fileno(),), site=True
    ) as it:
        theirs.close()
        ours.settimeout(20)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        try:
            yield it, fds[0], int(it.hear()[0])
        finally:
            os.close(fds[0])
            ours.close()


def next_event(descriptor, seconds=10):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(seconds * 1000), "no event in time"
    events = read_events(descriptor, 1)
    assert len(events) == 1
    return events[0]


def noise():
    buffer = HugeBuffer(MIB)
    buffer.array[:] = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    return buffer


def test_a_fault_is_reported_and_served_and_the_rest_placed():
    code = f"""
    hear()
    say(ctypes.string_at(a + 5 * 4096 + 17, 1)[0])
    hear()
    say(hashlib.sha256(ctypes.string_at(a, {MIB})).hexdigest()); hear()
    """
    source = noise()
    with faulting(code) as (it, descriptor, a):
        assert read_events(descriptor) == []
        it.tell("touch")
        event = next_event(descriptor)
        assert event == Fault(a + 5 * PAGE, 0, 0)
        uffd.wake(descriptor, event.address, PAGE)  # woken without a page, it reports again
        assert next_event(descriptor) == event
        assert uffd.copy(descriptor, event.address, source.address + 5 * PAGE, PAGE) == (PAGE, 0)
        assert it.hear() == [str(source.array[5 * PAGE + 17])]
        # the page that was served is passed over, all else filled
        placed = uffd.place(descriptor, a, source.address, MIB)
        assert placed == uffd.Placed(Stop.DONE, MIB, MIB - PAGE, PAGE, 0)
        it.tell("sum")
        assert it.hear() == [hashlib.sha256(source.view()).hexdigest()]
        again = uffd.place(descriptor, a, source.address, MIB)
        assert (again.filled, again.present, again.stop) == (0, MIB, Stop.DONE)


def test_zero_pages():
    code = f"\nhear(); say(ctypes.string_at(a, {MIB}) == bytes({MIB})); hear()"
    with faulting(code) as (it, descriptor, a):
        assert uffd.zero(descriptor, a, PAGE) == (PAGE, 0)
        placed = uffd.place_zero(descriptor, a, MIB)
        assert placed == uffd.Placed(Stop.DONE, MIB, MIB - PAGE, PAGE, 0)
        it.tell("look")
        assert it.hear() == ["True"]


def test_a_range_that_mprotect_split_is_still_filled():
    code = f"""
    libc.mprotect(a + 7 * 4096, 4096, 1)
    libc.mprotect(a + 100 * 4096, 31 * 4096, 1)
    say("split"); hear()
    say(hashlib.sha256(ctypes.string_at(a, {MIB})).hexdigest()); hear()
    """
    source = noise()
    with faulting(code) as (it, descriptor, a):
        it.hear()
        placed = uffd.place(descriptor, a, source.address, MIB)
        assert placed == uffd.Placed(Stop.DONE, MIB, MIB, 0, 0)
        it.tell("sum")
        assert it.hear() == [hashlib.sha256(source.view()).hexdigest()]


def test_unmap_stops_placements_until_it_is_read():
    code = "\nhear(); libc.munmap(a + 10 * 4096, 20 * 4096); say('done'); hear()"
    source = noise()
    with faulting(code) as (it, descriptor, a):
        it.tell("unmap")
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(10000)
        assert uffd.place(descriptor, a, source.address, MIB) == uffd.Placed(
            Stop.CHANGED, 0, 0, 0, 0
        )
        assert next_event(descriptor) == Unmap(a + 10 * PAGE, a + 30 * PAGE)
        assert it.hear() == ["done"]
        placed = uffd.place(descriptor, a, source.address, MIB)
        assert placed == uffd.Placed(Stop.DONE, MIB, MIB - 20 * PAGE, 0, 20 * PAGE)


def test_remap_moves_what_is_missing():
    code = f"""
    hear()
    b = libc.mremap(a, {MIB}, {MIB}, 3, anonymous({MIB}))
    say(b); hear()
    say(hashlib.sha256(ctypes.string_at(b, {MIB})).hexdigest()); hear()
    """
    source = noise()
    with faulting(code) as (it, descriptor, a):
        it.tell("move")
        event = next_event(descriptor)
        # the kernel then reports the source's unmapping as well: what has moved away is not there
        # to be dropped
        assert next_event(descriptor) == Unmap(a, a + MIB)
        (b,) = map(int, it.hear())
        assert event == Remap(a, b, MIB)
        assert uffd.place(descriptor, a, source.address, PAGE).unmapped == PAGE
        assert uffd.place(descriptor, b, source.address, MIB).filled == MIB
        it.tell("sum")
        assert it.hear() == [hashlib.sha256(source.view()).hexdigest()]


def test_remove_is_told_and_the_pages_fault_again():
    code = """
    hear(); libc.madvise(a, 16 * 4096, 4); say("done")
    hear(); say(ctypes.string_at(a, 1)[0]); hear()
    """
    source = noise()
    with faulting(code) as (it, descriptor, a):
        assert uffd.place(descriptor, a, source.address, MIB).filled == MIB
        it.tell("discard")
        assert next_event(descriptor) == Remove(a, a + 16 * PAGE)
        assert it.hear() == ["done"]
        it.tell("touch")
        assert next_event(descriptor) == Fault(a, 0, 0)
        assert uffd.place_zero(descriptor, a, 16 * PAGE).filled == 16 * PAGE
        assert it.hear() == ["0"]


def test_fork_brings_a_descriptor_of_the_child():
    code = """
    hear()
    pid = os.fork()
    if pid == 0:
        say("child", ctypes.string_at(a + 4096, 1)[0])
        os._exit(0)
    os.waitpid(pid, 0)
    say("parent", ctypes.string_at(a + 4096, 1)[0]); hear()
    """
    source = noise()
    with faulting(code) as (it, descriptor, a):
        it.tell("fork")
        event = next_event(descriptor)
        assert isinstance(event, Fork)
        try:
            assert not os.get_inheritable(event.descriptor)
            assert next_event(event.descriptor) == Fault(a + PAGE, 0, 0)
            assert uffd.place(event.descriptor, a, source.address, MIB).filled == MIB
            assert it.hear() == ["child", str(source.array[PAGE])]
            assert next_event(descriptor) == Fault(a + PAGE, 0, 0)
            assert uffd.place(descriptor, a, source.address + PAGE, PAGE * 2).filled == 2 * PAGE
            assert it.hear() == ["parent", str(source.array[2 * PAGE])]
            # the child is gone: its descriptor says so
            assert eventually(
                lambda: uffd.place(event.descriptor, a, source.address, PAGE).stop is Stop.DEAD
            )
        finally:
            os.close(event.descriptor)


def test_a_killed_process_is_dead():
    source = noise()
    with faulting("\nhear()") as (it, descriptor, a):
        it.process.kill()
        it.process.wait(10)
        assert uffd.place(descriptor, a, source.address, MIB).stop is Stop.DEAD


def test_unregister_gives_faults_back():
    code = "\nhear(); say(ctypes.string_at(a, 1)[0]); hear()"
    with faulting(code) as (it, descriptor, a):
        it.tell("touch")
        assert isinstance(next_event(descriptor), Fault)
        uffd.unregister(descriptor, a, MIB)
        assert it.hear() == ["0"]
        assert uffd.place(descriptor, a, noise().address, MIB).unmapped == MIB


def test_refusals_are_errors():
    with pytest.raises(OSError, match="UFFDIO_API"):
        uffd.create(features=1 << 60)
    descriptor = uffd.create()
    try:
        with pytest.raises(OSError, match="UFFDIO_REGISTER"):
            uffd.register(descriptor, 12345, PAGE)
        buffer = HugeBuffer(2 * MIB)
        with pytest.raises(OSError, match="placing"):
            uffd.place(descriptor, buffer.address + 1, buffer.address, PAGE)
        reader, writer = os.pipe()
        os.write(writer, array.array("Q", [0x55, 0, 0, 0]).tobytes())
        with pytest.raises(RestoreFailed, match="unknown"):
            read_events(reader)
        os.close(reader)
        os.close(writer)
    finally:
        os.close(descriptor)
