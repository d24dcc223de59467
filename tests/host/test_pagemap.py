"""Which pages are there: both ways of asking must agree with what a process touched."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from icecore.errors import NotFound
from icecore.host.kernel import pagemap
from icecore.sizes import PAGE
from tests.host.target import dead_pid, target

PAGES = 600
#: Bit 61 of a pagemap entry: a page of a file or of shared memory.
FILE_OR_SHARED = np.uint64(1 << 61)


def test_both_ways_agree_with_what_was_touched():
    code = f"""
    a = anonymous({PAGES} * 4096)
    libc.madvise(a, {PAGES} * 4096, 15)  # no huge pages
    for page in range(0, {PAGES}, 3):
        ctypes.memset(a + page * 4096, 1, 1)
    for page in range(1, 30, 3):
        ctypes.string_at(a + page * 4096, 1)  # reads map the zero frame
    say(a); hear()
    """
    with target(code) as it:
        (a,) = map(int, it.hear())
        end = a + PAGES * PAGE
        touched = np.zeros(PAGES, bool)
        touched[::3] = True
        touched[1:30:3] = True
        with pagemap.Pagemap(it.pid) as pages:
            assert (pages.present(a, end) == touched).all()
            entries = pages.entries(a, end)
            assert ((entries & pagemap.PRESENT != 0) == touched).all()
            assert not (entries & FILE_OR_SHARED)[2:].any() or pagemap.scan_supported()
            if pagemap.scan_supported():
                runs = pages.runs(a, end)
                assert runs["start"][0] == a and (runs["end"] > runs["start"]).all()
                zero = runs[runs["categories"] & pagemap.SCAN_ZERO_FRAME != 0]
                assert (zero["start"] == a + np.arange(1, 30, 3) * PAGE).all()
            assert len(pages.entries(a, a)) == 0 and len(pages.present(a, a)) == 0


@pytest.mark.skipif(not pagemap.scan_supported(), reason="PAGEMAP_SCAN needs Linux 6.7")
def test_many_runs_come_in_batches():
    code = """
    a = anonymous(20000 * 4096)
    libc.madvise(a, 20000 * 4096, 15)
    for page in range(0, 20000, 2):
        ctypes.memset(a + page * 4096, 1, 1)
    say(a); hear()
    """
    with target(code) as it, pagemap.Pagemap(it.pid) as pages:
        (a,) = map(int, it.hear())
        runs = pages.runs(a, a + 20000 * PAGE)
        assert (runs["start"] == a + np.arange(0, 20000, 2) * PAGE).all()
        # the whole address space at once finds them too, among the rest
        everything = pages.runs(0, (1 << 47) - 4096)
        assert np.isin(runs["start"], everything["start"]).all()


def test_shared_and_file_pages_are_told_apart():
    code = """
    s = anonymous(16 * 4096, 3, 0x21)
    p = anonymous(16 * 4096)
    ctypes.memset(s, 1, 16 * 4096); ctypes.memset(p, 1, 16 * 4096)
    say(s, p); hear()
    """
    with target(code) as it, pagemap.Pagemap(it.pid) as pages:
        s, p = map(int, it.hear())
        assert (pages.entries(s, s + 16 * 4096) & FILE_OR_SHARED != 0).all()
        assert (pages.entries(p, p + 16 * 4096) & FILE_OR_SHARED == 0).all()
        if pagemap.scan_supported():
            assert (pages.runs(s, s + 16 * 4096)["categories"] & pagemap.SCAN_FILE).all()
            assert not (pages.runs(p, p + 16 * 4096)["categories"] & pagemap.SCAN_FILE).any()


@pytest.mark.parametrize("scanned", [True, False])
def test_what_holds_something_whoever_asks_how(scanned, monkeypatch):
    """Also on a kernel that has no PAGEMAP_SCAN."""
    if scanned and not pagemap.scan_supported():
        pytest.skip("PAGEMAP_SCAN needs Linux 6.7")
    code = """
    a = anonymous(400 << 20)
    libc.madvise(a, 400 << 20, 15)
    for page in (0, 1, 5, 32767, 32768, 65535, 65536, 102399):
        ctypes.memset(a + page * 4096, 1, 1)
    libc.munmap(a + (300 << 20), 10 << 20)
    say(a); hear()
    """
    with target(code) as it:
        (a,) = map(int, it.hear())
        monkeypatch.setattr(pagemap, "scan_supported", lambda: scanned)
        monkeypatch.setattr(pagemap, "_SHARE", PAGE)  # so that small processes get several threads
        ranges = [
            (a, a + 4 * 4096),
            (a + 4 * 4096, a + (300 << 20)),
            (a + (310 << 20), a + (400 << 20)),
        ]
        starts = [start for start, _ in ranges]
        for threads, anonymous in ((1, []), (3, []), (1, starts), (3, starts), (3, starts[1:2])):
            runs = pagemap.contents_of(it.pid, ranges, threads, anonymous=anonymous)
            found = [
                ((s - a) // 4096, (e - s) // 4096)
                for s, e in zip(runs["start"].tolist(), runs["end"].tolist(), strict=True)
            ]
            assert found == [(0, 2), (5, 1), (32767, 2), (65535, 2), (102399, 1)]
        assert len(pagemap.contents_of(it.pid, [], 2)) == 0


@pytest.mark.skipif(not pagemap.scan_supported(), reason="PAGEMAP_SCAN needs Linux 6.7")
def test_several_threads_share_the_memory_beside_a_large_reservation(monkeypatch):
    code = """
    a = anonymous(256 << 20)
    libc.madvise(a, 256 << 20, 15)
    for page in range(0, 65536, 2):
        ctypes.memset(a + page * 4096, 1, 1)
    r = anonymous(1 << 40, 3, 0x4022)  # MAP_NORESERVE
    ctypes.memset(r + (700 << 30), 1, 1)
    say(a, r); hear()
    """
    found = []
    contents = pagemap.Pagemap._contents

    def spy(self, wanted):
        runs = contents(self, wanted)
        found.append(len(runs))
        return runs

    monkeypatch.setattr(pagemap.Pagemap, "_contents", spy)
    with target(code) as it:
        a, r = map(int, it.hear())
        ranges = sorted([(a, a + (256 << 20)), (r, r + (1 << 40))])
        (one,) = [pagemap.contents_of(it.pid, ranges, 1)]
        monkeypatch.setattr(pagemap, "_SHARE", 16 << 20)
        several = pagemap.contents_of(it.pid, ranges, 4)
    assert (one == several).all() and len(one) == 32768 + 1
    assert len(found) == 1 + 4 and min(found[1:]) >= 32768 // 4
    assert (r + (700 << 30)) in several["start"].tolist()


@pytest.mark.skipif(
    not pagemap.guards_told(), reason="guard pages can be told from others from Linux 6.15 on"
)
def test_guard_pages_hold_nothing():
    code = """
    a = anonymous(16 * 4096); ctypes.memset(a, 1, 16 * 4096)
    assert libc.madvise(a + 4 * 4096, 2 * 4096, 102) == 0
    say(a); hear()
    """
    with target(code) as it, pagemap.Pagemap(it.pid) as pages:
        (a,) = map(int, it.hear())
        assert pages.contents([(a, a + 16 * 4096)])["start"].tolist() == [a, a + 6 * 4096]
        guards = pages.guards(a, a + 16 * 4096)
        assert guards[["start", "end"]].tolist() == [(a + 4 * 4096, a + 6 * 4096)]


def test_a_process_that_is_gone():
    with pytest.raises(NotFound):
        pagemap.Pagemap(dead_pid())


@pytest.mark.skipif(not pagemap.scan_supported(), reason="PAGEMAP_SCAN is not supported")
def test_a_process_that_ends_while_its_map_is_open():
    with target("say(anonymous(64 * 4096)); hear()") as it:
        (a,) = map(int, it.hear())
        pages = pagemap.Pagemap(it.pid)
    with pages, suppress(NotFound):  # or there is nothing, depending on the kernel
        assert not len(pages.contents([(a, a + 64 * PAGE)]))
