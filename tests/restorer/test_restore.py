"""Round trips of real processes through import and restore: every byte, both modes, and what is
left when it fails.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import (
    Damaged,
    IcecoreError,
    ObjectMissing,
    RestoreFailed,
    RestoreRefused,
    StoreError,
)
from icecore.events import Event
from icecore.host.criu.pagemap_image import PE_LAZY, load_pagemap
from icecore.host.kernel import procfs
from icecore.host.kernel.memory import RemoteReader
from icecore.restorer.fill.tree_fill import TreeFill
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases import planning
from icecore.restorer.requirements import room
from icecore.restorer.restore import check
from icecore.restorer.tree import Tree
from icecore.sizes import PAGE
from icecore.store.snapshot.reader import SnapshotReader
from tests import zygote
from tests.host.target import eventually
from tests.programs import driving, kernel, plain_criu
from tests.restorer.criu_place import Dumped, await_gone, dumped
from tests.restorer.places import SlowBackend

pytestmark = pytest.mark.criu

FULL = RestoreOptions(mode="full")
LAZY = RestoreOptions(mode="lazy")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def differing_pages(it: Dumped, pid: int) -> int:
    """How many pages of the stopped process differ from the snapshot's."""
    reader = SnapshotReader(
        it.place.repository, it.place.run(it.place.repository.manifest(it.result.snapshot))
    )
    out = memoryview(bytearray(1 << 20))
    differ = 0
    (space,) = [s for s in reader.manifest.spaces if s.kind == "process"]
    with RemoteReader(pid) as memory:
        for region, records in zip(space.regions, reader.records(space), strict=True):
            if region.kind == "vdso":
                continue
            for record in records:
                data = reader.read_cell(record, out)
                base = region.origin + (int(record["cell"]) << 20)
                for bitmap, content in ((record["data"], data), (record["zero"], None)):
                    pages = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
                    for rank, page in enumerate(pages.tolist()):
                        found = memory.read(base + page * PAGE, PAGE)
                        expected = (
                            bytes(PAGE)
                            if content is None
                            else content[rank * PAGE : (rank + 1) * PAGE]
                        )
                        differ += found != expected
    return differ


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
def test_every_page_comes_back(tmp_path: Path, cache: Path, options: RestoreOptions) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "200")) as it:
        driving.forget(tmp_path)
        restored = it.restore(options)
        os.kill(restored.pid, signal.SIGSTOP)
        restored.wait_resident(60)
        # Some steps of the program may have been between the two moments, on a busy machine: what
        # it counts with lives on a few pages, and its pattern, which is all the rest, it checks
        # itself below.
        assert differing_pages(it, restored.pid) <= 32
        os.kill(restored.pid, signal.SIGCONT)
        driving.wait_progress(tmp_path)
        assert it.verdict().errors == ()
        names = [event.name for event in it.events]
        assert "restore.running" in names and "restore.resident" in names
        it.kill(restored.pid)
        assert it.remains() == []


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
@pytest.mark.parametrize("name", ["training", "tree", "many-vmas", "sparse", "inference", "logger"])
def test_programs_go_on_and_find_their_data_intact(
    tmp_path: Path, cache: Path, name: str, options: RestoreOptions
) -> None:
    with dumped(name, tmp_path, cache) as it:
        before = driving.forget(tmp_path)
        restored = it.restore(options)
        now = driving.wait_progress(tmp_path)
        assert before is not None and now.counter >= before.counter
        restored.wait_resident(60)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors
        assert "restore.warning" not in [event.name for event in it.events]


def test_a_process_that_forks_moves_unmaps_and_discards_while_it_is_filled(
    tmp_path: Path, cache: Path
) -> None:
    with dumped("mutator", tmp_path, cache, ("--mib", "300", "--burst", "20000")) as it:
        driving.forget(tmp_path)
        driving.go(tmp_path)
        restored = it.restore(LAZY)
        driving.wait_progress(tmp_path)
        restored.wait_resident(120)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors


def test_the_same_again_and_slowly(tmp_path: Path, cache: Path) -> None:
    """Every read takes milliseconds, so that the process does thousands of things while its memory
    is missing.
    """
    with dumped("mutator", tmp_path, cache, ("--mib", "100", "--burst", "4000")) as it:
        driving.forget(tmp_path)
        driving.go(tmp_path)
        backend = SlowBackend(it.place.root)
        backend.delay = 0.03
        restored = it.restore(LAZY, it.place.reopened(backend))
        driving.wait_progress(tmp_path)
        restored.wait_resident(120)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
def test_what_broke_is_told_and_not_that_criu_was_killed_for_it(
    tmp_path: Path, cache: Path, options: RestoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong but in the end, when CRIU holds the tree, or has let it go."""

    def fails(*_: object) -> None:
        raise RestoreFailed("the end does not come")

    monkeypatch.setattr(TreeFill, "complete", fails)
    with dumped("training", tmp_path, cache) as it:
        with pytest.raises(RestoreFailed, match="the end does not come"):
            it.restore(options).wait_resident(60)
        assert it.remains() == []


def broken_from(name: str, state: str | None = None) -> Callable[[Event], None]:
    """A sink whose reader is gone from some event on, as that of ``icecore --json restore | head``."""
    begun = False

    def emit(event: Event) -> None:
        nonlocal begun
        begun = begun or (event.name == name and event.fields.get("state") == state)
        if begun:
            raise BrokenPipeError("nobody reads")

    return emit


def sessions(it: Dumped) -> list[str]:
    return it.place.run(names(it, "sessions/"))


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("restore.images", "begin"),
        ("restore.memory", "begin"),
        ("restore.memory", "end"),
        ("restore.running", None),
    ],
)
def test_a_sink_that_fails_ends_the_restore_and_leaves_nothing(
    tmp_path: Path, cache: Path, options: RestoreOptions, name: str, state: str | None
) -> None:
    with dumped("training", tmp_path, cache) as it:
        before, beside = (
            sessions(it),
            set(descendants(os.getpid())),
        )  # beside us: the S3 servers of other tests
        with pytest.raises(BrokenPipeError):
            it.restore(options, emit=broken_from(name, state)).wait_resident(20)
        assert it.remains() == [] and sessions(it) == before
        assert set(descendants(os.getpid())) <= beside


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
def test_a_sink_that_fails_once_the_tree_lives_by_itself_changes_nothing(
    tmp_path: Path, cache: Path, options: RestoreOptions
) -> None:
    with dumped("training", tmp_path, cache) as it:
        before = sessions(it)
        driving.forget(tmp_path)
        restored = it.restore(options, emit=broken_from("restore.resident"))
        assert restored.wait_resident(20) == restored.seconds_to_resident
        driving.wait_progress(tmp_path)
        assert list(it.workdir.iterdir()) == [] and sessions(it) == before
        assert it.verdict().passed


@pytest.mark.parametrize(
    ("where", "detach"), [("guard", True), ("session", True), ("session", False)]
)
def test_breaking_off_when_the_tree_lives_by_itself_is_no_failure_of_its_restore(
    tmp_path: Path, cache: Path, where: str, detach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while what it has left is put away."""
    interrupted = False

    def interrupt(self: object, *arguments: object) -> None:
        nonlocal interrupted
        if not interrupted and threading.current_thread() is threading.main_thread():
            interrupted = True
            raise KeyboardInterrupt
        leave(self, *arguments)

    owner, name = (Tree, "leave") if where == "guard" else (planning, "_end_session")
    leave = getattr(owner, name)
    monkeypatch.setattr(owner, name, interrupt)
    with dumped("training", tmp_path, cache) as it:
        driving.forget(tmp_path)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            it.restore(RestoreOptions(mode="full", detach=detach))
        assert interrupted and time.monotonic() - began < 40  # a minute for a word that nobody says
        assert "restore.failed" not in [event.name for event in it.events]
        assert list(it.workdir.iterdir()) == []
        driving.wait_progress(tmp_path)
        assert it.verdict().passed


def test_one_snapshot_several_times(tmp_path: Path, cache: Path) -> None:
    with dumped("training", tmp_path, cache) as it:
        for options in (LAZY, FULL, LAZY):
            driving.forget(tmp_path)
            restored = it.restore(options)
            driving.wait_progress(tmp_path)
            restored.wait_resident(60)
            assert it.verdict().passed
            it.kill(restored.pid)
            await_gone([restored.pid])


def test_what_a_lazy_restore_touched_first_comes_first_the_next_time(
    tmp_path: Path, cache: Path
) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "100")) as it:
        for _ in range(2):
            driving.forget(tmp_path)
            backend = SlowBackend(it.place.root)
            backend.delay = 0.02
            restored = it.restore(LAZY, it.place.reopened(backend))
            driving.wait_progress(tmp_path)
            restored.wait_resident(60)
            it.kill(restored.pid)
            await_gone([restored.pid])
        faults = [
            int(str(e.fields["faults"]))
            for e in it.events
            if e.name == "restore.memory" and "faults" in e.fields
        ]
        assert len(faults) == 2 and faults[0] > 0
        listed = it.place.run(names(it, "hints/"))
        assert any("touched-" in name for name in listed)


async def names(it: Dumped, prefix: str) -> list[str]:
    return [info.name async for info in it.place.repository.backend.list(prefix)]


@pytest.mark.parametrize("name", ["tree", "training"])
def test_what_criu_copies_is_known_before(tmp_path: Path, cache: Path, name: str) -> None:
    with dumped(name, tmp_path, cache) as it:
        reader = SnapshotReader(
            it.place.repository, it.place.run(it.place.repository.manifest(it.result.snapshot))
        )
        known = sum(room._pages(space, reader.records) for space in reader.manifest.spaces)
        most = sum(room._most_pages(space) for space in reader.manifest.spaces)
        it.restore(FULL)
        [written] = [
            event.fields["page_image_bytes"]
            for event in it.events
            if "page_image_bytes" in event.fields
        ]
        # Few pages are there for a stack pointer's sake; of zeros there is room only.
        assert 0 < known <= int(str(written)) <= most + (1 << 20), [
            (hex(entry["address"]), int(entry["pages"]), int(entry["flags"]))
            for path in it.images.glob("pagemap-*.img")
            for entry in load_pagemap(path)[1]
            if not entry["flags"] & PE_LAZY and entry["pages"] > 64
        ]


# -- what fails


def shard_of_memory(it: Dumped, row: int = -1) -> tuple[Path, int, int, str]:
    """File, offset, length and chunk id of a cell of the process's memory."""
    reader = SnapshotReader(
        it.place.repository, it.place.run(it.place.repository.manifest(it.result.snapshot))
    )
    (space,) = [s for s in reader.manifest.spaces if s.kind == "process"]
    regions = zip(space.regions, reader.records(space), strict=True)
    records = np.concatenate([records for region, records in regions if region.lazy])
    records = records[records["place"]["length"] > 4096]
    record = records[row]
    name = record["place"]["shard"].tobytes().hex()
    path = it.place.root / "shards" / name[:2] / name
    return (
        path,
        int(record["place"]["offset"]),
        int(record["place"]["length"]),
        record["chunk"].tobytes().hex(),
    )


def flip(it: Dumped) -> str:
    path, offset, length, chunk = shard_of_memory(it)
    data = bytearray(path.read_bytes())
    data[offset + length // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    return chunk


def truncate(it: Dumped) -> str:
    path, offset, length, _ = shard_of_memory(it)
    os.truncate(path, offset + length // 2)
    return path.name


def remove(it: Dumped) -> str:
    path, _, _, _ = shard_of_memory(it)
    path.unlink()
    return path.name


@pytest.mark.parametrize(
    ("harm", "error"),
    [(flip, Damaged), (truncate, Damaged), (remove, ObjectMissing)],
    ids=["flip", "truncate", "remove"],
)
@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
def test_a_damaged_shard_is_named_and_nothing_runs_on(
    tmp_path: Path,
    cache: Path,
    harm: Callable[[Dumped], str],
    error: type[IcecoreError],
    options: RestoreOptions,
) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)
        name = harm(it)
        with pytest.raises(error) as caught:
            it.restore(options).wait_resident(60)
        assert name in str(caught.value)
        assert it.remains() == []
        assert "restore.failed" in [event.name for event in it.events]


@pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
def test_storage_that_fails_in_the_middle_kills_the_tree(
    tmp_path: Path, cache: Path, options: RestoreOptions
) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)
        backend = SlowBackend(it.place.root)
        repository = it.place.reopened(backend)
        options = replace(options, attempts=2)

        def break_it() -> None:
            backend.delay = 0.05
            backend.failures = [StoreError("the network is gone")] * 10000

        def emit(event: Event) -> None:
            if event.name == "restore.criu":
                break_it()

        with pytest.raises(StoreError, match="network is gone"):
            it.restore(options, repository, emit).wait_resident(60)
        assert it.remains() == []


@pytest.mark.parametrize("mode", ["lazy", "full"])
def test_a_restorer_that_is_killed_takes_the_tree_with_it(
    tmp_path: Path, cache: Path, mode: str
) -> None:
    """SIGKILL in the middle of a restore; lazily restored, the program looks at its memory all the
    time.
    """
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "128")) as it:
        driving.forget(tmp_path)
        it.workdir.mkdir()
        script = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from tests.restorer.places import SlowBackend
from icecore.restorer.restore import restore
from icecore.restorer.options import RestoreOptions
from icecore.store.runtime.loop import LoopThread
from icecore.store.log.repository import StoredRepository
with LoopThread() as loop:
    backend = SlowBackend({str(it.place.root)!r})
    repository = loop.run(StoredRepository.open(backend))
    def emit(event):
        if event.name == "restore.criu":
            backend.delay = 2.0
            if event.fields["state"] == "end":
                print("building", flush=True)
    options = RestoreOptions(mode={mode!r}, budget_bytes=1, workdir={str(it.workdir)!r})
    restored = restore(repository, loop, {it.result.snapshot!r}, options, emit=emit)
    restored.wait_resident()
"""
        restorer = zygote.program(script, stderr=False)
        try:
            assert restorer.stdout is not None and restorer.stdout.readline() == b"building\n"
            # The guard and the program; while CRIU holds the tree also CRIU and its script.
            assert eventually(
                lambda: len(descendants(restorer.pid)) == (2 if mode == "lazy" else 4)
            )
            time.sleep(0.2)
            tree = descendants(restorer.pid)
        finally:
            restorer.kill()
            restorer.wait(10)
        await_gone(tree)
        assert it.remains() == []
        last = driving.progress(tmp_path)
        assert last is None or last.errors == ()


def test_a_criu_that_is_killed_ends_a_restore_that_it_holds(tmp_path: Path, cache: Path) -> None:
    """It lets the tree go by that, long before it is filled: then the tree is killed, whatever the
    filling is at.
    """
    with dumped("memory-pattern", tmp_path, cache) as it:
        driving.forget(tmp_path)

        def emit(event: Event) -> None:
            if event.name == "restore.memory" and event.fields["state"] == "begin":
                tree = descendants(os.getpid())
                # Its script is one, too, until it has started the shell.
                criu = min(
                    (pid for pid in tree if procfs.executable(pid).endswith("/criu")),
                    key=tree.index,
                )
                members = [pid for pid in tree if "memory_pattern" in procfs.executable(pid)]
                assert members
                os.kill(criu, signal.SIGKILL)
                await_gone(members)

        with pytest.raises(RestoreFailed, match="criu"):
            it.restore(FULL, emit=emit).wait_resident(60)
        assert it.remains() == []


def test_a_guard_that_is_killed_ends_the_restore_and_the_tree(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)
        backend = SlowBackend(it.place.root)
        repository = it.place.reopened(backend)

        def emit(event: Event) -> None:
            if event.name == "restore.criu" and event.fields["state"] == "begin":
                backend.delay = 0.3

        restored = it.restore(RestoreOptions(mode="lazy", budget_bytes=1), repository, emit)
        guard = procfs.status(restored.pid).parent
        assert b"guard_process" in Path(f"/proc/{guard}/cmdline").read_bytes()
        os.kill(guard, signal.SIGKILL)
        with pytest.raises(RestoreFailed, match="guard"):
            restored.wait_resident(60)
        await_gone([pid for pid in [restored.pid] if driving.alive(pid)])
        assert it.remains() == []
        last = driving.progress(tmp_path)
        assert last is None or last.errors == ()


class Taker:
    """Takes an id of a tree while it is being built, and gives it back once the restore reports a
    retry.
    """

    def __init__(self, wanted: int, times: int) -> None:
        self.wanted, self.left = wanted, times
        self.warnings: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.name == "restore.criu" and event.fields["state"] == "begin" and self.left:
            self.left -= 1
            kernel.spawn_with_id(self.wanted, "sleep", "60")
        elif event.name == "restore.warning":
            self.warnings.append(event.fields["name"])
            self.give_back()

    def give_back(self) -> None:
        os.kill(self.wanted, signal.SIGKILL)
        await_gone([self.wanted])


@pytest.mark.parametrize("which", [0, -1], ids=["process", "thread"])
def test_an_id_that_another_process_gets_meanwhile(tmp_path: Path, cache: Path, which: int) -> None:
    with dumped("training", tmp_path, cache) as it, plain_criu.adopting():
        manifest = it.place.run(it.place.repository.manifest(it.result.snapshot))
        wanted = sorted(manifest.requirements.pids)[which]
        assert (wanted == it.running.pid) == (which == 0)
        stubborn = Taker(wanted, 3)
        with pytest.raises(RestoreFailed, match="in use on this machine"):
            it.restore(FULL, emit=stubborn)
        assert stubborn.warnings == ["pid", "pid"] and it.remains() == []
        stubborn.give_back()  # the restore did not kill the process with the id
        once = Taker(wanted, 1)
        restored = it.restore(FULL, emit=once)
        assert once.warnings == ["pid"] and restored.pid == it.running.pid
        assert it.verdict().errors == ()


def test_pids_in_use_are_refused_before_anything_starts(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "8")) as it:
        restored = it.restore(FULL)
        with pytest.raises(RestoreRefused, match=f"thread ids {restored.pid}"):
            it.restore(FULL)
        dry = check(it.place.repository, it.place.loop, it.result.snapshot, criu=it.criu)
        assert [c.name for c in dry.failed] == ["pid"]
        assert procfs.exists(restored.pid)
        it.kill(restored.pid)
        await_gone([restored.pid])
        assert not check(
            it.place.repository, it.place.loop, it.result.snapshot, criu=it.criu
        ).failed


def test_a_file_that_grew_is_refused_or_cut(tmp_path: Path, cache: Path) -> None:
    with dumped("logger", tmp_path, cache) as it:
        driving.forget(tmp_path)
        (log,) = (
            tmp_path.glob("*.log*")
            if not (tmp_path / "job.log").exists()
            else [tmp_path / "job.log"]
        )
        with open(log, "ab") as file:
            file.write(b"what was appended after the dump\n")
        with pytest.raises(RestoreRefused, match=log.name):
            it.restore(FULL)
        restored = it.restore(RestoreOptions(files="truncate"))
        driving.wait_progress(tmp_path)
        assert it.verdict().passed
        it.kill(restored.pid)


def test_criu_failing_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    """A file that CRIU wants is replaced by a directory after the check has passed: CRIU itself
    fails.
    """
    with dumped("logger", tmp_path, cache) as it:
        manifest = it.place.run(it.place.repository.manifest(it.result.snapshot))
        state = driving.progress(tmp_path)
        assert state is not None and manifest.files
        options = RestoreOptions(files="leave")

        def emit(event: Event) -> None:
            if event.name == "restore.criu" and event.fields["state"] == "begin":
                os.rename(tmp_path / "job.log", tmp_path / "moved")

        with pytest.raises(RestoreFailed, match=r"job\.log"):
            it.restore(options, emit=emit)
        assert it.remains() == []


def test_the_exit_status_of_a_tree_that_was_not_detached(tmp_path: Path, cache: Path) -> None:
    with dumped("training", tmp_path, cache) as it:
        driving.forget(tmp_path)
        restored = it.restore(RestoreOptions(detach=False))
        driving.wait_progress(tmp_path)
        with pytest.raises(TimeoutError):
            restored.wait(0.05)
        assert it.verdict().passed
        assert restored.wait(20).code == 0


def test_it_is_what_plain_criu_restores(tmp_path: Path, cache: Path) -> None:
    """The image directory that was imported still restores by itself: the import changed nothing."""
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "16")) as it:
        driving.forget(tmp_path)
        pid = plain_criu.restore(it.criu.path, it.images, it.program.restore_options)
        driving.wait_progress(tmp_path)
        assert it.verdict().passed
        it.kill(pid)


def test_progress_is_quick(tmp_path: Path, cache: Path) -> None:
    """Not a measurement: a lazily restored tree runs long before its memory could have been read."""
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        backend = SlowBackend(it.place.root)
        repository = it.place.reopened(backend)
        began = time.monotonic()

        def emit(event: Event) -> None:
            if event.name == "restore.criu" and event.fields["state"] == "begin":
                backend.delay = 1.0

        restored = it.restore(RestoreOptions(mode="lazy", budget_bytes=1), repository, emit)
        assert restored.seconds_to_running < 10
        seconds = restored.wait_resident(60)
        assert restored.seconds_to_running < seconds <= time.monotonic() - began
        it.kill(restored.pid)
