"""The job is never lost: whatever step of a dump fails, the job runs on within a second, nothing is
left behind, and the next dump is good.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import (
    DumpFailed,
    IcecoreError,
    NotFound,
    PreflightRefused,
    StoreError,
    StoreFull,
    WindowExceeded,
)
from icecore.events import Event
from icecore.host.criu.program import Criu, find_criu
from icecore.host.kernel import procfs
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.runtime.loop import LoopThread
from tests.host.target import eventually
from tests.moments import Due, at
from tests.programs import driving

from .conftest import Start
from .failing import Job, Witness, fails, members
from .world import Events, Stillness, Store, assert_same_memory, leftovers, standing

pytestmark = pytest.mark.criu


def wrapper(path: Path, script: str) -> Criu:
    """Make a CRIU that is a shell script; ``$CRIU`` is the real one."""
    criu = find_criu()
    path.write_text(f"#!/bin/bash\nCRIU={criu.path}\n{script}\n")
    path.chmod(0o755)
    return msgspec.structs.replace(criu, path=path)


# -- CRIU


#: What a CRIU does in place of the real one, and what the error says.
FAILING = {
    "fails": ("exit 1", "CRIU gave no reason"),
    "says nothing": ("exit 0", "CRIU"),
    "is killed": ("kill -9 $$", "CRIU"),
    "does not understand": ('exec $CRIU "${@//--lazy-pages/--no-such-option}"', "CRIU"),
    "has no directory": (
        'for w; do case $w in /dev/shm/*) rm -r $w;; esac; done; exec $CRIU "$@"',
        "failed",
    ),
    "cannot write": ("ulimit -f 1; trap '' XFSZ; exec $CRIU \"$@\"", "failed"),
}


def test_criu_that_fails(due: Due, job: Job, witness: Witness, tmp_path: Path) -> None:
    for how in due([*FAILING]):
        with at(how):
            script, words = FAILING[how]
            criu = wrapper(tmp_path / "criu", script)
            error = fails(job, witness, partial(witness.store.dump, job.pid, criu=criu))
            assert words in str(error)
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_criu_that_does_not_start(job: Job, witness: Witness, tmp_path: Path) -> None:
    criu = msgspec.structs.replace(find_criu(), path=tmp_path / "nowhere")
    fails(job, witness, lambda: witness.store.dump(job.pid, criu=criu))
    witness.next_dump_is_good()


def test_a_tree_that_criu_cannot_dump(start: Start, store: Store) -> None:
    running = start("tree-credentials")
    with pytest.raises(DumpFailed, match="queue"):
        store.dump(running.pid)
    assert not standing(running.pid)
    assert not leftovers(store.workdir)
    assert store.snapshots() == []
    driving.wait_progress(running.state_dir)
    driving.ask_finish(running.program, running.state_dir)
    assert driving.wait_finished(running.program, running.state_dir).passed


def test_criu_killed_while_it_holds_the_tree(job: Job, witness: Witness) -> None:
    def kill(_: Event) -> None:
        for pid in members(witness.store.workdir, "dump.log"):
            os.kill(pid, signal.SIGKILL)

    fails(
        job,
        witness,
        lambda: witness.store.dump(job.pid, events=Events({("dump.files", "begin"): kill})),
    )
    witness.next_dump_is_good()
    job.is_well()


def test_criu_or_its_script_killed_while_it_waits(due: Due, job: Job, witness: Witness) -> None:
    def dump(word: str) -> None:
        def kill(_: Event) -> None:
            assert not standing(job.pid)
            (pid,) = members(witness.store.workdir, word)
            os.kill(pid, signal.SIGKILL)

        witness.store.dump(job.pid, events=Events({("dump.criu", "end"): kill}))

    for who, word in due([("criu", "dump.log"), ("script", "/bin/sh")]):
        with at(who):
            fails(job, witness, partial(dump, word))
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_nothing_stands_still_before_the_window(job: Job, witness: Witness) -> None:
    """CRIU waits however long the dumper takes, and that time does not count."""

    def watch(_: Event) -> None:
        time.sleep(3.2)
        job.runs(time.time_ns())

    result = witness.store.dump(
        job.pid, DumpOptions(max_window=3.0), events=Events({("dump.criu", "end"): watch})
    )
    assert witness.store.snapshots() == [witness.first, result.snapshot]


# -- the store


Kind = tuple[str, str]
#: The manifest's, and the transaction's after it, which is the commit.
_MANIFEST, _TRANSACTION = ("create", "snapshots"), ("create", "log")


def kind_of(call: Call) -> Kind:
    """Return the operation and the kind of object."""
    return call.operation, call.name.split("/")[0]


def failing_from(kind: Kind | None) -> Callable[[Call], Outcome]:
    """Every call fails from the first of a kind on (None: from the commit), at the latest from the
    commit. Calls are not counted, because their number differs.
    """
    stored = failing = False

    def plan(call: Call) -> Outcome:
        nonlocal stored, failing
        own = kind_of(call)
        failing = failing or own == kind or (stored and own == _TRANSACTION)
        stored = stored or own == _MANIFEST
        return Outcome.FAIL if failing else Outcome.PASS

    return plan


def calls_of(store: Store, job: Job) -> list[Kind]:
    """Return the store's calls in a dump with much new data; deltas alone would not enter the
    index.
    """
    driving.change(job.running.state_dir, 1000, 50, 100)
    backend = FaultyBackend(store.backend)
    through = store.through(backend)
    opened = len(backend.calls)
    through.dump(job.pid)
    return [kind_of(call) for call in backend.calls[opened:]]


def from_call_on(
    number: int, kind: Kind | None, store: Store, job: Job, witness: Witness, *, stop: bool
) -> bool:
    """Dump with a store that fails from such a call on, and return whether the dump failed.
    ``number`` differs each time.
    """
    driving.change(job.running.state_dir, number, 50, 50)
    backend = FaultyBackend(store.backend)
    through = store.through(backend)
    backend.plan = failing_from(kind)
    before = len(store.snapshots())
    try:
        through.dump(job.pid, DumpOptions(stop=stop))
    except StoreError:
        failed = time.time_ns()
        assert not standing(job.pid) and not leftovers(store.workdir)
        job.runs(failed)
        witness.verify(before)
        return True
    return False


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store retry after a short wait."""
    monkeypatch.setattr("icecore.store.log.session._PUT_BACKOFF_SECONDS", 0.001)


@pytest.mark.usefixtures("hasty")
def test_a_store_that_fails_from_some_call_on(job: Job, witness: Witness) -> None:
    calls = calls_of(witness.store, job)
    kinds = list(dict.fromkeys(calls[: len(calls) - 1 - calls[::-1].index(_TRANSACTION)]))
    assert {*kinds} >= {("get", "log"), ("get", "hints"), ("read_into", "nodes"), _MANIFEST}
    for number, kind in enumerate([*kinds, None], 1):
        assert from_call_on(number, kind, witness.store, job, witness, stop=False), kind
    witness.next_dump_is_good()
    job.is_well()


@pytest.mark.usefixtures("hasty")
def test_a_store_that_fails_while_a_stopped_tree_waits(job: Job, witness: Witness) -> None:
    kinds: list[Kind | None] = [
        ("create", kind) for kind in ("hints", "nodes", "snapshots", "index")
    ]
    assert {*kinds} <= {*calls_of(witness.store, job)}
    for number, kind in enumerate([*kinds, None], 1):
        assert from_call_on(number, kind, witness.store, job, witness, stop=True), kind
    job.is_well()


def test_a_full_disk(job: Job, loop: LoopThread, workdir: Path, tmp_path: Path) -> None:
    """Make a repository on a file system of its own, too small for a second snapshot."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", place], check=True, timeout=20
    )
    try:
        store = Store.make(loop, place / "repository", workdir)
        witness = Witness(store, job.pid)
        driving.change(job.running.state_dir, 1, 100, 100)
        fails(job, witness, lambda: store.dump(job.pid), StoreFull)
        fails(job, witness, lambda: store.dump(job.pid, DumpOptions(stop=True)), StoreFull)
        subprocess.run(["mount", "-o", "remount,size=64m", place], check=True, timeout=20)
        witness.next_dump_is_good()
        job.is_well()
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=20)


def test_a_full_working_directory(job: Job, witness: Witness, tmp_path: Path) -> None:
    """CRIU runs out of room for its images, although there was some when the dump began."""
    place = tmp_path / "work"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", place], check=True, timeout=20
    )
    try:

        def fill(_: Event) -> None:
            with open(place / "ballast", "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))

        small = replace(witness.store, workdir=place)
        fails(
            job,
            witness,
            lambda: small.dump(job.pid, events=Events({("dump.window", "begin"): fill})),
        )
        assert leftovers(place) == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=20)
    witness.next_dump_is_good()


# -- the target


def test_a_target_that_is_gone(store: Store) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    with pytest.raises(NotFound, match="no process"):
        store.dump(Target(gone.pid, "job"))
    assert store.snapshots() == []


@pytest.mark.parametrize(
    "moment",
    [
        ("dump.preflight", "end"),
        ("dump.precopy", "begin"),
        ("dump.precopy", "end"),
        ("dump.window", "begin"),
    ],
    ids=lambda moment: " ".join(moment),
)
def test_a_target_that_ends_before_the_window(
    moment: tuple[str, str], job: Job, store: Store
) -> None:
    events = Events({moment: lambda _: driving.kill_tree(job.pid)})
    with pytest.raises((DumpFailed, NotFound)):
        store.dump(job.pid, DumpOptions(pre_copy="on"), events=events)
    assert not leftovers(store.workdir)
    assert store.snapshots() == []


@pytest.mark.parametrize("delay", [0.0, 0.015, 0.03, 0.05])
def test_a_target_that_is_killed_while_criu_freezes_it(
    delay: float, job: Job, store: Store
) -> None:
    def kill() -> None:
        job.stopped_since(time.time_ns(), 60.0)
        time.sleep(delay)
        os.kill(job.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    while killer.is_alive():  # a check may miss a short window
        # Everything may be read by then, or the job may have ended before another dump begins.
        with suppress(DumpFailed, NotFound, PreflightRefused):
            store.dump(job.pid)
    assert eventually(lambda: procfs.is_over(job.pid))
    assert not leftovers(store.workdir)
    for snapshot in store.snapshots():
        assert store.read(snapshot).keys("process")


def test_a_target_that_is_killed_while_it_is_read(job: Job, store: Store) -> None:
    """A process is killed once all its memory is read but before CRIU lets it go: no snapshot of
    half a tree, and nothing is left behind.
    """
    events = Events({("dump.files", "begin"): lambda _: driving.kill_tree(job.pid)})
    with pytest.raises((DumpFailed, NotFound)):
        store.dump(job.pid, events=events)
    assert not leftovers(store.workdir)
    assert store.snapshots() == []


# -- limits


def test_a_window_that_is_over_before_criu_serves(due: Due, job: Job, witness: Witness) -> None:
    for limit in due([0.001, 0.005]):
        with at(limit, "s"):
            options = DumpOptions(max_window=limit)
            dump = partial(witness.store.dump, job.pid, options)
            assert "--max-window" in str(fails(job, witness, dump, WindowExceeded))
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_a_window_that_takes_too_long(job: Job, witness: Witness) -> None:
    ran: list[int] = []

    def dawdle(_: Event) -> None:
        begun = time.time_ns()
        time.sleep(4.0)
        ran.append(driving.steps(job.running.state_dir)[1] - begun)

    events = Events({("dump.files", "begin"): dawdle})
    fails(
        job,
        witness,
        lambda: witness.store.dump(job.pid, DumpOptions(max_window=2.0), events=events),
        WindowExceeded,
    )
    assert ran[0] > 0  # it ran while the dumper was still busy
    witness.next_dump_is_good()


@pytest.mark.parametrize("threads", [1, 16])
def test_staging_of_the_least_size(threads: int, start: Start, store: Store) -> None:
    running = start("memory-pattern", "--mib", "64")
    still = Stillness()
    events = Events({("dump.files", "begin"): lambda _: still.look(running.pid)})
    options = DumpOptions(staging_bytes=1, scan_threads=threads, pre_copy="off")
    result = store.dump(running.pid, options, events=events)
    assert result.spilled
    assert_same_memory(store.read(result.snapshot), still)


# -- hooks


def test_hooks(job: Job, witness: Witness, tmp_path: Path) -> None:
    note = tmp_path / "note"
    before = f"echo before $ICECORE_JOB $ICECORE_PID $ICECORE_SNAPSHOT >> {note}"
    after = f"echo after $ICECORE_JOB $ICECORE_PID $ICECORE_SNAPSHOT >> {note}"
    result = witness.store.dump(job.pid, DumpOptions(before=before, after=after))
    assert note.read_text().splitlines() == [
        f"before job {job.pid}",
        f"after job {job.pid} {result.snapshot}",
    ]
    note.unlink()
    error = fails(
        job,
        witness,
        lambda: witness.store.dump(job.pid, DumpOptions(before="echo no >&2; exit 3", after=after)),
    )
    assert "status 3: no" in str(error)
    assert note.read_text().splitlines() == [f"after job {job.pid}"]
    with pytest.raises(IcecoreError, match="is committed, but the hook") as caught:
        witness.store.dump(job.pid, DumpOptions(after="exit 4"))
    assert not isinstance(caught.value, DumpFailed)
    assert len(witness.store.snapshots()) == 3


def test_a_hook_that_takes_too_long(job: Job, witness: Witness) -> None:
    options = DumpOptions(before="sleep 60", hook_seconds=0.2)
    error = fails(job, witness, lambda: witness.store.dump(job.pid, options))
    assert "did not end within 0.2 s" in str(error)
