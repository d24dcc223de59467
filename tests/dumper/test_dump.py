"""Dumps of real programs: what was recorded is, byte for byte, what was there, and what did not
change is not stored again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from icecore.dumper.dump import DumpResult, dump
from icecore.dumper.encode.encoders import Encoder
from icecore.dumper.memory.pipeline import Pipeline
from icecore.dumper.observe import temporary
from icecore.dumper.options import DumpOptions
from icecore.dumper.stopping import StopRequest
from icecore.dumper.target import Target
from icecore.errors import DumpFailed
from icecore.host.criu.program import find_criu
from icecore.host.kernel import procfs
from icecore.host.kernel.filesystem import may_be_in_memory
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.backend.local import LocalBackend
from icecore.store.format.manifest import OpenFile
from tests.coarse import begin_of_second, mounted_with_seconds
from tests.programs import driving, inference

from .conftest import Start
from .failing import Job
from .puppet import Puppet
from .world import Events, Recorded, Stillness, Store, assert_same_memory, leftovers, standing

pytestmark = pytest.mark.criu

#: A small Python process writes a few pages of its heap and stack whatever it does.
_RESTLESS = 1 << 20


def watching(root: int, *files: str | Path) -> tuple[Stillness, Events]:
    """Return a record of the tree and the events that take it in the window."""
    still = Stillness()
    events = Events({("dump.files", "begin"): lambda _: still.look(root, *files)})
    return still, events


def no_complaint(events: Events) -> bool:
    """Check that nothing of an earlier snapshot was found damaged or missing."""
    return not events.names() & {
        "dump.parent_damaged",
        "dump.hints_missing",
        "store.base_damaged",
        "index.damaged",
    }


def cells_between(recorded: Recorded, pid: int, start: int, end: int) -> dict[int, bytes]:
    """Map the addresses of a process's cells between two addresses to chunk ids."""
    space = recorded.space("process", str(pid))
    found = {}
    for region, records in zip(space.regions, recorded.reader.records(space), strict=True):
        for record in records:
            address = region.origin + int(record["cell"]) * CELL_BYTES
            if start <= address and address + CELL_BYTES <= end:
                found[address] = record["chunk"].tobytes()
    return found


# -- memory


def test_reserved_addresses_cost_nothing(store: Store) -> None:
    """CRIU's own table of them would take 4 GiB, copied in the window (icecore/host/criu/memcpy.c),
    which takes more than eight seconds on the test machine.
    """
    reserve = "import mmap; m = mmap.mmap(-1, 1 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 0)  # NORESERVE"
    program = f"{reserve}\nprint('ready', flush=True); import time; time.sleep(600)"
    words = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            process.stdout.close()
            result = store.dump(process.pid, DumpOptions(max_window=6.0))
        finally:
            process.kill()
    regions = [
        region
        for space in store.read(result.snapshot).reader.manifest.spaces
        for region in space.regions
    ]
    assert max(region.length for region in regions) >= 1 << 40


@pytest.mark.parametrize(
    "name",
    ["memory-pattern", "training", "many-vmas", "inference", "tree", "mutator", "sparse", "node"],
)
def test_every_page_is_recorded(name: str, start: Start, store: Store) -> None:
    running = start(name)
    if name == "mutator":
        driving.go(running.state_dir)
    still, events = watching(running.pid)
    result = store.dump(running.pid, events=events)
    assert set(still.states.values()) <= set("tZ")
    assert not standing(running.pid)
    assert assert_same_memory(store.read(result.snapshot), still) * PAGE > 1 << 20
    driving.wait_progress(running.state_dir)
    driving.ask_finish(running.program, running.state_dir)
    assert driving.wait_finished(running.program, running.state_dir).passed


def test_every_page_is_recorded_by_encoders(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits for an encoder here, so that encoders are used even on a busy machine."""
    find = Pipeline._find_encoder

    def wait_and_find(pipeline: Pipeline) -> Encoder | None:
        found = find(pipeline)
        return found or (pipeline._encoders.wait() if pipeline._encoders else None)

    monkeypatch.setattr(Pipeline, "_find_encoder", wait_and_find)
    running = start("memory-pattern", "--mib", "100")
    for _ in range(2):
        still, events = watching(running.pid)
        result = store.dump(running.pid, DumpOptions(encoders=2, pre_copy="on"), events=events)
        assert assert_same_memory(store.read(result.snapshot), still) * PAGE > 50 << 20
        assert no_complaint(events) and "dump.encoder_lost" not in events.names()
        (_, *_, end) = events.named("dump.store")
        assert end.fields["encoders"] == 2
    driving.wait_progress(running.state_dir)


@pytest.mark.parametrize("moment", ["at first", "dump.precopy", "dump.criu"])
@pytest.mark.parametrize("name", ["memory-pattern", "tree"])
def test_a_stopped_tree_stands_still_until_its_snapshot_is_committed(
    name: str, moment: str, start: Start, store: Store
) -> None:
    running = start(name)
    members = procfs.tree(running.pid)
    still, events = watching(running.pid)
    held: list[int] = []
    events.hooks["store.commit", "begin"] = lambda _: held.extend(standing(running.pid))
    # Bounds that no longer apply once the dump is asked to end the job.
    slow = 0.01 if moment == "dump.precopy" else 1.0
    late = DumpOptions(pre_copy="on", background_cpu=slow, max_window=1e-6)
    stopping = StopRequest()
    events.hooks[moment, "begin"] = lambda _: stopping.ask()
    options = DumpOptions(stop=True) if moment == "at first" else late
    result = store.dump(running.pid, options, events=events, stopping=stopping)
    assert stopping.ends
    assert held == [pid for pid, state in still.states.items() if state == "t"]
    assert not any(driving.alive(pid) for pid in members)
    assert assert_same_memory(store.read(result.snapshot), still) > 0


def test_after_the_window_a_dump_ends_nothing(job: Job, store: Store) -> None:
    stopping = StopRequest()
    events = Events({("dump.store", "begin"): lambda _: stopping.ask()})
    first = store.dump(job.pid, events=events, stopping=stopping)
    assert stopping.asked and not stopping.ends
    assert store.dump(job.pid).parent == first.snapshot
    job.is_well()


def test_what_did_not_change_is_not_stored_again(job: Job, store: Store) -> None:
    first = store.dump(job.pid)
    assert first.parent == "" and first.sizes.stored > 8 * CELL_BYTES
    before = store.bytes()
    still, events = watching(job.pid)
    second = store.dump(job.pid, events=events)
    assert (second.parent, second.lineage) == (first.snapshot, first.lineage)
    assert second.sizes.changed < first.sizes.logical / 20
    assert second.sizes.stored < first.sizes.stored / 100
    assert store.bytes() - before < 64 << 10
    assert_same_memory(store.read(second.snapshot), still)
    assert no_complaint(events)


def test_it_is_told_how_far_a_dump_is(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icecore.events._PROGRESS_SECONDS", 0.0)
    running = start("memory-pattern", "--mib", "32")
    _, events = watching(running.pid)
    store.dump(running.pid, DumpOptions(pre_copy="on"), events=events)
    driving.change(running.state_dir, 1, 100, 100)
    _, later = watching(running.pid)
    store.dump(running.pid, DumpOptions(pre_copy="off"), events=later)
    for told in (events.progress("dump.precopy"), later.progress("dump.store")):
        (total,) = {total for _, total in told}
        assert total >= 32 << 20
        assert len(told) > 1 and sorted(told) == told and told[-1][0] > 0.9 * total


@pytest.mark.parametrize("pre_copy", ["off", "on"])
def test_of_a_cell_with_one_changed_page_that_page_is_stored(
    pre_copy: str, start: Start, store: Store
) -> None:
    running = start("memory-pattern", "--mib", "64")
    store.dump(running.pid)
    pages = driving.change(running.state_dir, 1, 10, 1)
    assert 6 <= pages <= 24
    still, events = watching(running.pid)
    result = store.dump(running.pid, DumpOptions(pre_copy=pre_copy), events=events)  # type: ignore[arg-type]
    assert result.sizes.changed >= 6 * CELL_BYTES
    assert pages * PAGE <= result.sizes.stored < pages * PAGE * 1.2 + (64 << 10)
    assert_same_memory(store.read(result.snapshot), still)
    assert no_complaint(events)


def test_what_is_written_to_all_the_time_is_not_stored_in_vain(
    puppet: Puppet, store: Store
) -> None:
    """The memory of a busy process is held back, and so is what the first dump found to be
    restless; once it has come to rest, it is stored before the window again.
    """
    puppet.do("area = private(96 * MIB); put(area, os.urandom(MIB) * 96); going = True")
    puppet.do(
        "import threading\n"
        "def write():\n"
        "    number = 0\n"
        "    while going:\n"
        "        number += 1\n"
        "        for cell in range(96): put(area + cell * MIB, number.to_bytes(8, 'little'))\n"
        "        time.sleep(0.001)\n"
        "writer = threading.Thread(target=write); writer.start()"
    )
    pre_copied = []
    for number in range(4):
        if number == 2:
            puppet.do("going = False; writer.join()")
        still, events = watching(puppet.pid)
        result = store.dump(puppet.pid, DumpOptions(pre_copy="on"), events=events)
        assert_same_memory(store.read(result.snapshot), still)
        pre_copied.append(result.pre_copied)
    assert pre_copied[0] < 16 << 20
    assert pre_copied[1] < 16 << 20
    assert pre_copied[2] >= 96 << 20
    assert pre_copied[3] < 16 << 20


def test_memory_that_changes_between_pre_copy_and_window(start: Start, store: Store) -> None:
    """Each cell changes a little before pre-copy and again after it: the delta that pre-copy stored
    may still be on its way to the storage.
    """
    running = start("memory-pattern", "--mib", "32")
    store.dump(running.pid)
    driving.change(running.state_dir, 1, 100, 3)
    still, events = watching(running.pid)
    events.hooks["dump.precopy", "end"] = lambda _: (
        driving.change(running.state_dir, 2, 100, 2) and None
    )
    result = store.dump(running.pid, DumpOptions(pre_copy="on"), events=events)
    assert result.pre_copied >= 32 * CELL_BYTES
    assert_same_memory(store.read(result.snapshot), still)
    assert no_complaint(events)
    assert (
        result.sizes.stored < 4 * CELL_BYTES
    )  # 5 % of it, and not a whole cell for each that changed twice


def test_a_region_that_grows_keeps_its_cells(puppet: Puppet, store: Store) -> None:
    """Upwards in place, downwards by a merge with a new neighbour, and by mremap to another
    address.
    """
    puppet.do(
        "room = private(96 * MIB, protection=0); libc.munmap(ctypes.c_void_p(room), 96 * MIB)\n"
        "data = os.urandom(24 * MIB); at = private(24 * MIB, room + 40 * MIB); put(at, data)"
    )
    address = puppet.number("at")
    first = store.read(store.dump(puppet.pid).snapshot)
    cells = cells_between(first, puppet.pid, address, address + (24 << 20))
    assert len(cells) == 24
    grow = (
        "private(3 * MIB, at + 24 * MIB); put(at + 24 * MIB, os.urandom(3 * MIB))",
        "private(5 * 4096, at - 5 * 4096); put(at - 5 * 4096, os.urandom(5 * 4096))",
        "private(9 * MIB, at - 9 * MIB - 5 * 4096); put(at - 9 * MIB, os.urandom(MIB))",
    )
    for code in grow:
        puppet.do(code)
        still, events = watching(puppet.pid)
        result = store.dump(puppet.pid, events=events)
        recorded = store.read(result.snapshot)
        assert_same_memory(recorded, still)
        assert cells_between(recorded, puppet.pid, address, address + (24 << 20)) == cells, code
        assert result.sizes.stored < 4 << 20, code
    regions = recorded.space("process", str(puppet.pid)).regions
    (whole,) = [r for r in regions if r.start <= address < r.start + r.length]
    assert whole.length > 35 << 20
    puppet.do(
        "import ctypes\n"
        "new = libc.mremap(at, 24 * MIB, 30 * MIB, 1)\n"
        "assert new not in (None, at, ctypes.c_void_p(-1).value)"
    )
    still, events = watching(puppet.pid)
    result = store.dump(puppet.pid, events=events)
    assert_same_memory(store.read(result.snapshot), still)
    assert (
        result.sizes.stored < 3 << 20
    )  # at another address it counts as changed, but its chunks are found by their ids


def test_the_same_program_started_twice_shares_what_is_equal(start: Start, store: Store) -> None:
    first = store.dump(Target(start("inference", "--mib", "128", "--rate", "5").pid, "one"))
    second = store.dump(Target(start("inference", "--mib", "128", "--rate", "5").pid, "two"))
    assert second.lineage != first.lineage and second.parent == ""
    # How much is in caches, and what a request computes with just then, is luck (0.06 to 0.33 of
    # what the first stored). The weights are equal.
    shape = inference.Shape.of_size(128, seed=1)
    weights = shape.layers * sum(inference.room_for(shape, which).nbytes for which in range(4))
    assert second.sizes.changed - second.sizes.stored > 0.9 * weights > 80 << 20


def test_another_program_under_the_same_name_is_warned_of(store: Store) -> None:
    """A job without a name is named after its program, usually an interpreter."""
    words = [
        [sys.executable, "-S", "-c", f"import time; time.sleep(600 + {number})"]
        for number in range(2)
    ]
    told = []
    for command, name in [
        (words[0], ""),
        (words[0], ""),
        (words[1], ""),
        (words[0], "named"),
        (words[1], "named"),
    ]:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                events = Events()
                store.dump(Target.of_process(process.pid, name), events=events)
                told.append(
                    [
                        str(one.fields["message"])
                        for one in events.named("dump.warning")
                        if one.fields["name"] == "job"
                    ]
                )
            finally:
                process.kill()
    assert list(map(len, told)) == [0, 0, 1, 0, 0]
    assert "time.sleep(600 + 0)" in told[2][0]


def test_the_command_after_a_committed_snapshot_is_told_of_it_whatever_else_fails(
    job: Job, store: Store, tmp_path: Path
) -> None:
    def broken(_: DumpResult) -> None:
        raise DumpFailed("the job cannot be noted down")

    options = DumpOptions(after=f"echo $ICECORE_SNAPSHOT > {tmp_path}/told")
    with pytest.raises(DumpFailed, match="noted down"):
        dump(
            store.repository,
            store.loop,
            Target.of_process(job.pid, "job"),
            options,
            workdir=str(store.workdir),
            committed=broken,
        )
    assert (tmp_path / "told").read_text().split() == store.snapshots()


def test_allocations_are_found_again_wherever_the_kernel_joined_them(
    tmp_path: Path, store: Store
) -> None:
    """The second process makes one more allocation, so the mapping that holds all its allocations
    begins elsewhere.
    """
    allocate = (
        "import random; libc.malloc.restype = ctypes.c_void_p; libc.mallopt(-3, 128 << 10)\n"
        "for n in range(4):\n"
        "    put(libc.malloc(6 * MIB) + 100, random.Random(n).randbytes(6 * MIB - 1000))"
    )
    results = []
    for more in ("", "\nput(libc.malloc(MIB + 54321), os.urandom(MIB))"):
        folder = tmp_path / f"puppet{len(results)}"
        folder.mkdir()
        puppet = Puppet(folder)
        try:
            puppet.do(allocate + more)
            still, events = watching(puppet.pid)
            results.append(store.dump(Target(puppet.pid, folder.name), events=events))
            assert_same_memory(store.read(results[-1].snapshot), still)
            again = store.dump(Target(puppet.pid, folder.name), DumpOptions(pre_copy="on"))
            assert again.sizes.changed < 6 << 20  # of 30: the interpreter is not idle
        finally:
            puppet.end()
    first, second = results
    assert first.sizes.stored > 24 << 20
    assert second.sizes.stored < 6 << 20


def test_pages_that_may_not_be_read(puppet: Puppet, store: Store) -> None:
    puppet.do(
        "at = private(4 * MIB); put(at, os.urandom(4 * MIB))\n"
        "assert libc.mprotect(at + 4096, MIB, 0) == 0 and libc.mprotect(at + 3 * MIB, 8192, 0) == 0"
    )
    still, events = watching(puppet.pid)
    result = store.dump(puppet.pid, DumpOptions(pre_copy="on"), events=events)
    assert_same_memory(store.read(result.snapshot), still)


def test_huge_pages_of_hugetlbfs(puppet: Puppet, store: Store) -> None:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text(str(int(before) + 4))
        if int(setting.read_text()) < int(before) + 2:
            pytest.skip("this machine has no room for huge pages")
        puppet.do("at = private(4 * MIB, more=0x40000); put(at + 12345, os.urandom(MIB))")
        still, events = watching(puppet.pid)
        result = store.dump(puppet.pid, events=events)
        recorded = store.read(result.snapshot)
        assert_same_memory(recorded, still)
        address = puppet.number("at")
        (region,) = [
            r for r in recorded.space("process", str(puppet.pid)).regions if r.start == address
        ]
        assert not region.lazy
    finally:
        puppet.end()
        setting.write_text(before)


def test_shared_memory_and_memfds(puppet: Puppet, store: Store) -> None:
    puppet.do(
        "m = mmap.mmap(-1, 3 * MIB); m[: 2 * MIB] = os.urandom(2 * MIB); m[2 * MIB + 5] = 7\n"
        "f = os.memfd_create('held'); os.write(f, os.urandom(MIB + 12345))\n"
        "child = os.fork()\nif child == 0: time.sleep(1000)\n"
        "with open('m', 'wb') as file: file.write(m[:])\n"
        "with open('f', 'wb') as file: file.write(os.pread(f, 2 * MIB, 0))"
    )
    expected = [(puppet.folder / name).read_bytes() for name in ("m", "f")]
    for _ in range(2):
        still, events = watching(puppet.pid)
        result = store.dump(puppet.pid, events=events)
        recorded = store.read(result.snapshot)
        assert_same_memory(recorded, still)
        contents = [recorded.content("shared", key) for key in recorded.keys("shared")]
        for content in expected:
            whole = content.rstrip(b"\0")
            assert any(found.rstrip(b"\0") == whole for found in contents), len(content)
    assert result.sizes.stored < _RESTLESS
    assert len(recorded.manifest.processes) == 2


def test_criu_images_are_recorded_as_they_are_but_for_pagemaps(
    job: Job, store: Store, tmp_path: Path
) -> None:
    kept = tmp_path / "images"

    def keep(_: object) -> None:
        (images,) = store.workdir.iterdir()
        shutil.copytree(images, kept)

    result = store.dump(job.pid, events=Events({("dump.store", "begin"): keep}))
    recorded = store.read(result.snapshot)
    names = {
        path.name
        for path in kept.iterdir()
        if path.is_file()  # beside CRIU's plugins
        and not path.name.startswith(("pages-", "stats-"))
        and path.suffix != ".log"
    }
    assert {f"core-{job.pid}.img", f"mm-{job.pid}.img", "inventory.img", "pstree.img"} <= names
    assert set(recorded.keys("image")) == names
    for name in names - {f"pagemap-{job.pid}.img"}:
        assert recorded.content("image", name) == (kept / name).read_bytes()


def test_the_manifest_says_what_was_running(start: Start, store: Store) -> None:
    running = start("tree")
    result = store.dump(running.pid, DumpOptions(tags=("a", "b"), pinned=True))
    manifest = store.read(result.snapshot).manifest
    assert manifest.snapshot == result.snapshot and manifest.job == "job"
    assert (manifest.root_pid, manifest.processes[0].pid) == (running.pid, running.pid)
    assert len(manifest.processes) == len(procfs.tree(running.pid))
    assert sum(not process.alive for process in manifest.processes) == 1
    assert all(process.command for process in manifest.processes)
    by_id = {process.image_id: process for process in manifest.processes}
    assert all(process.parent in by_id for process in manifest.processes[1:])
    assert manifest.tags == ["a", "b"] and manifest.pinned
    assert manifest.requirements.criu == ".".join(map(str, find_criu().version))
    assert 0 < manifest.window_seconds < result.seconds


# -- open files


def files_of(recorded: Recorded) -> dict[str, OpenFile]:
    """By name."""
    return {Path(file.path).name: file for file in recorded.manifest.files}


_FILES = """
written = open('written', 'w+b'); written.write(os.urandom(300_000)); written.flush()
open('only-read', 'wb').write(os.urandom(100_000)); only_read = open('only-read', 'rb')
sparse = open('sparse', 'w+b'); sparse.truncate(64 * MIB + 17); sparse.seek(40 * MIB); sparse.write(b'island'); sparse.flush()
empty = open('empty', 'w')
log = open('log', 'ab'); log.write(os.urandom(200_000)); log.flush()
mapped = open('mapped', 'w+b'); mapped.truncate(MIB); mapping = mmap.mmap(mapped.fileno(), MIB); mapping[5000:5005] = b'hello'; mapped.close()
gone = open('gone', 'w+b'); gone.write(b'ghost'); gone.flush(); os.unlink('gone')
"""
_NAMES = ("written", "only-read", "sparse", "empty", "log", "mapped")


def test_open_files_by_policy(
    puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary, "MOST_TEMPORARY", -1)  # its folder is one for temporary files
    puppet.do(_FILES)
    paths = [puppet.folder / name for name in _NAMES]
    kept = {"written", "sparse", "empty", "log", "mapped"}
    for options, stored, digests in (
        (DumpOptions(), kept, False),
        (DumpOptions(files="check"), set(), False),
        (DumpOptions(with_files=True), kept | {"only-read"}, False),
        (DumpOptions(verify_files=True), kept, True),
    ):
        still, events = watching(puppet.pid, *paths)
        recorded = store.read(store.dump(puppet.pid, options, events=events).snapshot)
        files = files_of(recorded)
        assert {name for name in _NAMES if files[name].policy == "content"} == stored
        assert files["gone"].policy == "absent" and files["gone"].size == 5
        assert bool(files["only-read"].digest) == digests
        for name in _NAMES:
            path = puppet.folder / name
            assert (files[name].size, files[name].inode) == (
                path.stat().st_size,
                path.stat().st_ino,
            )
            assert files[name].writable == (name != "only-read")
            if name in stored:
                assert recorded.content("file", str(path)) == still.files[str(path)]
    assert recorded.space("file", str(puppet.folder / "sparse")).size == (64 << 20) + 17
    assert (
        sum(
            len(data)
            for _, data in recorded.runs(recorded.space("file", str(puppet.folder / "sparse")))
        )
        < 1 << 20
    )


def test_files_that_change_between_dumps(puppet: Puppet, store: Store) -> None:
    puppet.do(_FILES)
    paths = [puppet.folder / name for name in _NAMES]
    store.dump(puppet.pid)
    puppet.do("time.sleep(0.15)")  # longer than the time within which an mtime is not trusted
    changes = (
        "pass",
        "log.write(os.urandom(70_000)); log.flush()",
        "before = os.fstat(written.fileno()); written.seek(100_000); written.write(b'x'); written.flush()\n"
        "os.utime('written', ns=(before.st_atime_ns, before.st_mtime_ns))",  # in place, and the clock turned back
        "mapping[70_000] = 9",
        "sparse.seek(3 * MIB); sparse.write(b'another'); sparse.flush()",
        "written.truncate(1000)",
        "os.rename('log', 'log.1'); log = open('log', 'ab'); log.write(b'anew'); log.flush()",
        "written.close(); open('written.new', 'wb').write(b'replaced'); os.rename('written.new', 'written'); written = open('written', 'r+b')",
    )
    for change in changes:
        puppet.do(change)
        still, events = watching(puppet.pid, *paths)
        result = store.dump(puppet.pid, events=events)
        recorded = store.read(result.snapshot)
        for path in paths:
            if path.name != "only-read":
                assert recorded.content("file", str(path)) == still.files[str(path)], (
                    change,
                    path.name,
                )
        assert result.sizes.stored < _RESTLESS, change
        assert no_complaint(events)


def test_files_that_change_in_the_second_of_the_window(
    puppet: Puppet, store: Store, tmp_path: Path
) -> None:
    """The file system records seconds: writes before and after the window give the same times."""
    with mounted_with_seconds(tmp_path) as top:
        path = top / "file"
        path.write_bytes(b"before")
        puppet.do(f"f = open({str(path)!r}, 'r+b')")
        written: list[os.stat_result] = []

        def write(content: bytes) -> None:
            if not written:
                begin_of_second()
            path.write_bytes(content)
            written.append(path.stat())
            time.sleep(0.15)  # longer than finer times need

        events = Events(
            {
                ("dump.window", "begin"): lambda _: write(b"first "),
                ("dump.files", "end"): lambda _: write(b"second"),
            }
        )
        first = store.read(store.dump(puppet.pid, events=events).snapshot)
        if written[0].st_ctime_ns != written[1].st_ctime_ns:
            pytest.skip("this machine is too slow: the second was over")
        assert first.content("file", str(path)) == b"first "
        time.sleep(2.5)
        second = store.read(store.dump(puppet.pid).snapshot)
        assert second.content("file", str(path)) == b"second"
        puppet.do("f.close()")


@contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """Mount an overlay whose layers are directories in a folder."""
    lower, upper, work, top = (folder / name for name in ("lower", "upper", "work", "top"))
    for one in (lower, upper, work, top):
        one.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "x", "-o", layers, top], timeout=60, check=True)
    try:
        yield top
    finally:
        subprocess.run(["umount", "--lazy", top], timeout=60, check=True)


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Path]:
    """Make a directory on a disk, in memory, or on an overlay of either."""
    with ExitStack() as stack:
        if "memory" in kind:
            path = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            folder = Path(path)
        if "overlay" in kind:
            folder = stack.enter_context(overlay(folder))
        yield folder


@pytest.mark.parametrize("kind", ["disk", "memory", "overlay over disk", "overlay over memory"])
def test_files_that_were_mapped_between_dumps(
    kind: str, puppet: Puppet, store: Store, tmp_path: Path
) -> None:
    """Stores through a mapping leave no trace in a file's times, except the first store to a page;
    on tmpfs, if the page was read before, not even that.
    """
    with place(kind, tmp_path) as folder:
        path = folder / "mapped"
        puppet.do(
            f"f = open({str(path)!r}, 'w+b'); f.write(bytes(2 * MIB)); f.flush(); m = mmap.mmap(f.fileno(), 0); m[0] = 1"
        )
        changes = (
            "pass",
            "m[0] = 2; m.close()",
            "m = mmap.mmap(f.fileno(), 0); m[1] or None; m[0] = 3; m.close()",
        )
        for number, change in enumerate(changes, 1):
            puppet.do(f"time.sleep(0.15); {change}")
            recorded = store.read(store.dump(puppet.pid).snapshot)
            assert recorded.content("file", str(path))[0] == number
        [about] = [file for file in recorded.manifest.files if file.path == str(path)]
        assert about.writable and not about.mapped
        puppet.do("f.close(); del m")


@pytest.mark.parametrize("kind", ["memory", "overlay over memory"])
def test_files_that_were_open_for_writing_between_dumps(
    kind: str, puppet: Puppet, store: Store, tmp_path: Path
) -> None:
    with place(kind, tmp_path) as folder:
        path = folder / "mapped"
        path.write_bytes(bytes(8192))
        puppet.do(f"f = open({str(path)!r}, 'rb')")
        for number in (0, 1):
            puppet.do(
                f"g = open({str(path)!r}, 'r+b'); m = mmap.mmap(g.fileno(), 0); m[0] = m[0] + {number}; m.close(); g.close(); time.sleep(0.15)"
            )
            recorded = store.read(store.dump(puppet.pid, DumpOptions(with_files=True)).snapshot)
            assert recorded.content("file", str(path))[0] == number
        puppet.do("f.close()")


@pytest.mark.parametrize("kind", ["disk", "memory", "overlay over disk", "overlay over memory"])
def test_where_a_file_lies(kind: str, tmp_path: Path) -> None:
    with place(kind, tmp_path) as folder:
        for content in (b"", b"something"):
            (folder / "file").write_bytes(content)
            assert may_be_in_memory(str(folder / "file")) == ("memory" in kind)


def test_files_that_lost_their_name(puppet: Puppet, store: Store) -> None:
    """A deleted file with another hard link: CRIU will look for it under a name that it makes up."""
    puppet.do(
        "f = open('a', 'w+b'); f.write(b'linked'); f.flush(); os.link('a', 'b'); os.unlink('a')\n"
        "g = open('c', 'w+b'); g.write(b'nameless'); g.flush(); os.unlink('c')\n"
        "h = open('d (deleted)', 'w+b'); h.write(b'named'); h.flush()"
    )
    recorded = store.read(store.dump(puppet.pid).snapshot)
    files = files_of(recorded)
    (linked,) = [file for name, file in files.items() if name.startswith("link_remap.")]
    assert recorded.content("file", linked.path) == b"linked"
    assert linked.links == [str(puppet.folder / "b")]
    assert files["c"].policy == "absent"
    assert any(
        recorded.content("image", key).endswith(b"nameless")
        for key in recorded.keys("image")
        if "ghost" in key
    )
    assert recorded.content("file", str(puppet.folder / "d (deleted)")) == b"named"


# -- a parent that lost data


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
@pytest.mark.parametrize("part", ["hints", "manifest", "nodes"])
def test_a_parent_that_cannot_be_read(part: str, harm: str, job: Job, store: Store) -> None:
    assert isinstance(store.backend, LocalBackend)
    first = store.dump(job.pid)
    manifest = store.read(first.snapshot).manifest
    (record,) = store.loop.run(store.repository.snapshots())
    root = store.backend.root
    names = {"hints": [manifest.hints], "manifest": [record.manifest]}
    paths = (
        [root / name for name in names[part]]
        if part in names
        else list((root / "nodes").rglob("*"))
    )
    for path in paths:
        if path.is_file():
            damage(path) if harm == "damaged" else path.unlink()
    driving.change(job.running.state_dir, 1, 50, 10)
    still, events = watching(job.pid)
    fresh = store.through(store.backend)
    result = fresh.dump(job.pid, events=events)
    assert events.named("dump.hints_missing" if part == "hints" else "dump.parent_damaged")
    assert_same_memory(fresh.read(result.snapshot), still)
    assert result.lineage == first.lineage
    assert (
        result.sizes.stored < first.sizes.stored * 0.6
    )  # all of it counts as changed, but its chunks are found
    after = Events()
    fresh.dump(job.pid, events=after)
    assert no_complaint(after)


def test_nothing_is_left_behind(job: Job, store: Store) -> None:
    for _ in range(3):
        store.dump(job.pid)
        assert not leftovers(store.workdir)
        job.runs(0, seconds=1e18)
    assert np.unique(store.snapshots()).size == 3
