"""Large files on disk that a job has open for writing: stored before the window, and read in it only
if they may have changed since.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from icecore.dumper.options import DumpOptions
from icecore.errors import PreflightRefused
from icecore.events import Event
from icecore.host.kernel.libc import in_memory
from tests.dumper.puppet import Puppet

from .world import Events, Store

pytestmark = pytest.mark.criu

MIB = 1 << 20
AHEAD = DumpOptions(pre_copy="on")


@pytest.fixture
def file(puppet: Puppet) -> Iterator[Path]:
    """A file of 8 MiB that the puppet has open as `f`, written a while ago."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="icecore-test-") as folder:
        path = Path(folder) / "file"
        if in_memory(folder):
            pytest.skip("/var/tmp is in memory")
        path.write_bytes(os.urandom(8 * MIB))
        puppet.do(f"f = os.open({str(path)!r}, os.O_RDWR)")
        time.sleep(0.2)  # longer than a clock tick
        yield path


def read_in_window(events: Events) -> int:
    """Return the bytes of files that were read in the window."""
    (end,) = [one for one in events.named("dump.files") if one.fields["state"] == "end"]
    size = end.fields.get("bytes", 0)
    assert isinstance(size, int)
    return size


def test_what_did_not_change_is_not_read_in_the_window(
    puppet: Puppet, file: Path, store: Store
) -> None:
    events = Events()
    first = store.dump(puppet.pid, AHEAD, events=events)
    assert read_in_window(events) < MIB and first.pre_copied > 8 * MIB
    assert store.read(first.snapshot).content("file", str(file)) == file.read_bytes()
    events = Events()
    second = store.dump(puppet.pid, AHEAD, events=events)
    assert read_in_window(events) < MIB
    assert store.read(second.snapshot).content("file", str(file)) == file.read_bytes()
    puppet.do("os.pwrite(f, b'x', 5 << 20)")
    time.sleep(0.2)
    third = store.dump(puppet.pid, AHEAD, events=events)
    assert store.read(third.snapshot).content("file", str(file)) == file.read_bytes()
    assert third.sizes.stored < MIB  # the file is random


#: What a job does between the look and the window.
_CHANGES = {
    "written": "os.pwrite(f, b'x', 5 << 20)",
    "with its old times": "t = os.fstat(f); os.pwrite(f, b'x', 5 << 20); os.utime(f, ns=(t.st_atime_ns, t.st_mtime_ns))",
    "mapped": "m = mmap.mmap(f, 0); m[5 << 20] = 120",
    "mapped and unmapped": "m = mmap.mmap(f, 0); m[5 << 20] ^= 255; m.close()",
    "longer": "os.pwrite(f, b'x', (8 << 20) + 5)",
    "shorter": "os.ftruncate(f, 3 << 20)",
    "punched": "libc.fallocate(f, 3, ctypes.c_long(1 << 20), ctypes.c_long(1 << 20))",
    "another": "g = os.open(p + '.new', os.O_RDWR | os.O_CREAT); os.write(g, os.urandom(8 << 20)); os.rename(p + '.new', p); os.dup2(g, f)",
}


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("moment", ["dump.precopy", "dump.criu"])
def test_what_changes_after_it_was_stored(
    puppet: Puppet, file: Path, store: Store, change: str, moment: str
) -> None:
    def act(_: Event) -> None:
        puppet.do(f"p = {str(file)!r}; {_CHANGES[change]}")

    events = Events({(moment, "end" if moment == "dump.precopy" else "begin"): act})
    result = store.dump(puppet.pid, AHEAD, events=events)
    assert store.read(result.snapshot).content("file", str(file)) == file.read_bytes()


def test_a_file_that_is_written_without_the_page_cache(
    puppet: Puppet, file: Path, store: Store
) -> None:
    """Its times change before the data is there."""
    puppet.do(f"g = os.open({str(file)!r}, os.O_RDWR | os.O_DIRECT)")
    events = Events()
    result = store.dump(puppet.pid, AHEAD, events=events)
    assert store.read(result.snapshot).content("file", str(file)) == file.read_bytes()
    assert read_in_window(events) >= 8 * MIB


def test_a_file_that_was_written_just_before_it_was_looked_at(
    puppet: Puppet, file: Path, store: Store
) -> None:
    """A later change may have the same time."""
    puppet.do("os.pwrite(f, b'x', 0)")
    events = Events()
    result = store.dump(puppet.pid, AHEAD, events=events)
    assert store.read(result.snapshot).content("file", str(file)) == file.read_bytes()
    if time.time_ns() - file.stat().st_ctime_ns < 50_000_000:
        assert read_in_window(events) >= 8 * MIB


@pytest.mark.parametrize("act", [None, "os.pwrite(f, b'x', 5 << 20)"], ids=["still", "written"])
def test_the_budget_counts_only_what_the_window_reads(
    puppet: Puppet, file: Path, store: Store, act: str | None
) -> None:
    events = Events()
    if act is not None:
        events.hooks["dump.precopy", "end"] = lambda _: puppet.do(act)
    small = DumpOptions(pre_copy="on", file_budget=4 * MIB)
    dump: Callable[[], object] = lambda: store.dump(puppet.pid, small, events=events)  # noqa: E731
    if act is None:
        dump()
    else:
        with pytest.raises(PreflightRefused, match="file-budget") as refused:
            dump()
        assert str(file) in str(refused.value)
    with pytest.raises(PreflightRefused, match="file-budget"):
        store.dump(puppet.pid, DumpOptions(pre_copy="off", file_budget=4 * MIB))
