"""Files in memory that have no name."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest

from icecore.host.kernel import huge_file, limits

_SIZE = 64 << 20


def rollup(word: str) -> int:
    """KiB of this process's memory of a kind."""
    return sum(
        int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith(f"{word}:")
    )


def test_a_file_takes_what_is_written_and_goes_with_who_has_it() -> None:
    gc.collect()  # what earlier tests left to be closed
    mounts, free = Path("/proc/self/mountinfo").read_text(), os.listdir("/proc/self/fd")
    file = huge_file.create(_SIZE)
    about = os.fstat(file)
    assert (about.st_size, about.st_nlink, about.st_blocks) == (_SIZE, 0, 0)
    with mmap.mmap(file, _SIZE) as mapped:
        mapped[5 << 20] = 1
        assert 0 < os.fstat(file).st_blocks * 512 <= 2 << 20
        assert os.pread(file, 1, 5 << 20) == b"\1"
        os.close(file)
        assert mapped[5 << 20] == 1
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert os.listdir("/proc/self/fd") == free


@pytest.mark.skipif(limits.huge_page_bytes() == 0, reason="this kernel makes no huge pages")
def test_it_is_of_huge_pages() -> None:
    if limits.free_huge_bytes() < 4 * _SIZE:
        pytest.skip("the machine's memory is too fragmented")
    file = huge_file.create(_SIZE)
    before = rollup("ShmemPmdMapped")
    with mmap.mmap(file, _SIZE) as mapped:
        for at in range(0, _SIZE, mmap.PAGESIZE):
            mapped[at] = 1
        assert rollup("ShmemPmdMapped") - before > _SIZE // 2 >> 10  # as far as there are some
    os.close(file)


def test_where_there_can_be_none() -> None:
    """Said with the name of the call: who is no administrator may make no tmpfs."""
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            huge_file.create(_SIZE)
        except OSError as error:
            os._exit(0 if "fsopen" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
