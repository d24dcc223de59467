"""The registry: names, finding, following, removing, and what it makes of stale notes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.errors import Damaged, NotFound, UsageError
from icecore.host.jobs import registry as registry_module
from icecore.host.jobs.job import ExitStatus, Inits, Job, note_end, stopped_with
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.private import state_directory

from .criu_round import emptied, output, until

pytestmark = pytest.mark.criu


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


def sleeper(registry: Registry, name: str = "") -> Job:
    return registry.start(["sleep", "60"], name=name)


def ended(registry: Registry, name: str = "") -> Job:
    job = registry.start(["true"], name=name)
    job.wait(10)
    return job


def test_the_state_directory_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ICECORE_STATE", raising=False)
    assert state_directory() == Path("/var/lib/icecore")
    monkeypatch.setenv("ICECORE_STATE", str(tmp_path))
    assert Registry().state == tmp_path
    assert Registry().instances() == []


def test_finding(registry: Registry) -> None:
    first, second = sleeper(registry, "first"), sleeper(registry, "second")
    assert [job.name for job in registry.instances()] == ["first", "second"]
    assert registry.find("first").instance == first.instance
    assert registry.find(second.instance).name == "second"
    assert registry.find(second.pid).name == "second"
    assert registry.find(str(second.main_process())).name == "second"
    for nobody in ("third", os.getpid(), 1, 0, str(1 << 30)):
        with pytest.raises(NotFound, match="there is no job"):
            registry.find(nobody)


def test_the_living_instance_of_a_name_is_found_first(registry: Registry) -> None:
    living = sleeper(registry, "name")
    dead = ended(registry, "other")
    Job(dead.directory, replace(dead.description, name="name", created=time.time() + 5)).save()
    assert registry.find("name").instance == living.instance
    living.kill(signal.SIGKILL)
    living.wait(10)
    assert registry.find("name").instance == dead.instance  # of dead ones the newest


def test_names(registry: Registry) -> None:
    names = [sleeper(registry).name for _ in range(3)]
    assert names == ["sleep", "sleep-2", "sleep-3"]
    with pytest.raises(UsageError, match="runs"):
        sleeper(registry, "sleep-2")
    for bad in ("a/b", "-a", "..", "a b", "x" * 64):
        with pytest.raises(UsageError, match="no name"):
            sleeper(registry, bad)
    registry.find("sleep-2").kill(signal.SIGKILL)
    registry.find("sleep-2").wait(10)
    assert sleeper(registry).name == "sleep-2"
    assert sleeper(registry, "x" * 63).name == "x" * 63


def test_names_are_unique_among_threads(registry: Registry) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(sleeper(registry).name)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(names) == sorted(["sleep", *(f"sleep-{number}" for number in range(2, 9))])


def test_a_pid_that_is_another_process_by_now_is_not_the_job(registry: Registry) -> None:
    job = sleeper(registry)
    stale = Job(job.directory, replace(job.description, start_time=job.description.start_time - 1))
    stale.save()
    found = registry.find("sleep")
    assert (found.alive, found.state) == (False, "ended")
    with pytest.raises(NotFound, match="does not run"):
        found.kill(signal.SIGKILL)
    assert job.alive  # it was not hit
    job.save()


def test_a_command_whose_number_is_another_process_by_now(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pid namespace its number is given out again: nobody else is hit, and where there is
    no command the init is.
    """
    job = registry.start(["sleep", "60"], isolation=Isolation(pid=False))
    command = job.main_process()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Job, "main_process", lambda _: stranger.pid)
            with pytest.raises(NotFound, match="has ended"):
                job.kill(signal.SIGSTOP)
            assert job.alive
            job.kill(signal.SIGKILL)
            assert job.wait(10) == ExitStatus(signal=signal.SIGKILL)
        assert stranger.poll() is None
    finally:
        os.kill(command, signal.SIGKILL)  # its init is gone
        stranger.kill()
        stranger.wait(10)


def test_after_a_restart_of_the_machine_nobody_knows(registry: Registry) -> None:
    job = sleeper(registry)
    Job(job.directory, replace(job.description, boot="another")).save()
    found = registry.find("sleep")
    assert (found.alive, found.status()) == (False, ExitStatus())
    assert (str(found.wait(1)), found.wait(1).exit_code) == ("lost", 255)
    job.save()


def test_an_end_that_was_written_counts_after_a_restart_too(registry: Registry) -> None:
    job = registry.start(["sh", "-c", "exit 3"])
    job.wait(10)
    Job(job.directory, replace(job.description, boot="another")).save()
    assert registry.find("sh").status() == ExitStatus(code=3)


def test_waiting_has_an_end(registry: Registry) -> None:
    job = sleeper(registry)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="still runs"):
        job.wait(0.1)
    assert 0.09 < time.monotonic() - begun < 5
    assert job.status() is None


def test_waiters_in_other_threads_are_told(registry: Registry) -> None:
    job = sleeper(registry)
    told: list[ExitStatus] = []
    waiters = [
        threading.Thread(target=lambda: told.append(registry.find("sleep").wait(20)))
        for _ in range(3)
    ]
    for waiter in waiters:
        waiter.start()
    job.kill(signal.SIGTERM)
    for waiter in waiters:
        waiter.join(20)
    assert told == [ExitStatus(signal=signal.SIGTERM)] * 3


def test_logs_to_the_end(registry: Registry) -> None:
    job = registry.start(
        [
            "sh",
            "-c",
            "for i in 1 2 3 4 5; do echo $i; echo e$i >&2; sleep 0.3; done; printf last; exit 3",
        ]
    )
    followed = list(job.logs(follow=True))
    assert (
        b"".join(piece.data for piece in followed if piece.stream == "stdout")
        == b"1\n2\n3\n4\n5\nlast"
    )
    assert (
        b"".join(piece.data for piece in followed if piece.stream == "stderr")
        == b"e1\ne2\ne3\ne4\ne5\n"
    )
    assert len(followed) > 2  # as it came, not at the end
    assert job.status() == ExitStatus(code=3)
    assert (
        b"".join(piece.data for piece in job.logs() if piece.stream == "stdout")
        == b"1\n2\n3\n4\n5\nlast"
    )


def test_logs_so_far(registry: Registry) -> None:
    job = registry.start(["sh", "-c", "echo one; sleep 60"])
    until(lambda: output(job))
    assert [piece.data for piece in job.logs()] == [b"one\n"]


def test_sizes_of_the_logs_of_an_instance_that_is_being_removed(registry: Registry) -> None:
    job = ended(registry)
    job.log_path("stdout").write_bytes(b"abc")
    job.log_path("stderr").unlink()
    assert job.log_sizes() == {"stdout": 3, "stderr": 0}
    registry.remove(job)
    assert job.log_sizes() == {"stdout": 0, "stderr": 0}


def test_removing(registry: Registry) -> None:
    living, dead = sleeper(registry), ended(registry)
    with pytest.raises(UsageError, match="runs"):
        registry.remove(living)
    registry.remove(dead)
    assert [job.instance for job in registry.instances()] == [living.instance]
    assert not dead.directory.exists()
    recent = ended(registry)
    assert registry.ended(older_than=3600) == []
    assert [job.instance for job in registry.ended()] == [recent.instance]
    assert [job.instance for job in registry.instances()] == [living.instance, recent.instance]


def test_removing_a_job_with_a_private_root_removes_nothing_of_the_host(
    registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("x")
    job = registry.start(["true"], isolation=Isolation(root=True))
    job.wait(10)
    registry.remove(job)
    assert (tmp_path / "precious").read_text() == "x"
    assert os.path.exists("/proc/self/status")


def test_whose_starter_died(registry: Registry) -> None:
    job = ended(registry)
    unborn = replace(job.description, pid=0, start_time=0)
    Job(job.directory, unborn).save()
    assert registry.find("true").state == "starting"  # by this process, as far as the note says
    with pytest.raises(TimeoutError, match="being started"):
        registry.find("true").wait(0.1)
    Job(job.directory, replace(unborn, owner=(unborn.owner[0], unborn.owner[1] - 1))).save()
    assert registry.find("true").state == "failed"
    assert [gone.instance for gone in registry.ended()] == [job.instance]


def test_half_made_and_foreign_entries(registry: Registry) -> None:
    job = ended(registry)
    (job.directory.parent / "inothing").mkdir()
    assert [found.instance for found in registry.instances()] == [job.instance]
    (job.directory / "job.json").write_text('{"name": 1}')
    with pytest.raises(Damaged, match=r"job\.json"):
        Job.load(job.directory)
    (job.directory / "job.json").unlink()


@pytest.mark.parametrize("spoilt", ["{}", "", "[1", '{"name": "\\udcff"}'])
def test_what_cannot_be_read_keeps_nobody_from_the_others(spoilt: str, registry: Registry) -> None:
    """As a crash of the machine may leave it."""
    job, lost = ended(registry), ended(registry, "lost")
    (lost.directory / "job.json").write_text(spoilt)
    assert [found.instance for found in registry.instances()] == [job.instance]
    assert list(registry.damaged()) == [lost.instance]
    assert registry.find("true").instance == job.instance
    assert ended(registry, "lost").name == "lost"
    with pytest.raises(Damaged, match=f"icecore rm {lost.instance}"):
        registry.find(lost.instance)
    with pytest.raises(NotFound, match="there is no damaged job"):
        registry.remove_damaged(job.instance)
    registry.remove_damaged(lost.instance)
    assert (registry.damaged(), lost.directory.exists(), job.directory.exists()) == (
        {},
        False,
        True,
    )


def test_who_runs_is_not_forgotten_though_its_note_is_damaged(registry: Registry) -> None:
    job = sleeper(registry)
    (job.directory / "job.json").write_text("{}")
    with pytest.raises(UsageError, match=f"runs, as process {job.pid}"):
        registry.remove_damaged(job.instance)
    job.save()
    assert registry.find("sleep").alive


def test_a_note_is_on_the_disk_before_it_is_the_note(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ended(registry)
    steps: list[str] = []
    sync, put = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def replaced(old: Path, new: Path) -> None:
        steps.append("replaced")
        put(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    job.save()
    written, *rest = steps
    assert re.fullmatch(r"job\.json\.[0-9a-f]{8}\.new", written)
    assert rest == ["replaced", job.instance]


def test_an_init_that_nobody_could_look_at(registry: Registry) -> None:
    """Its pid may be another's by now, as this process's is here."""
    job = ended(registry)
    with registry.restoring(job.record(), snapshot="s1") as new:
        assert new.started(job.pid).state == "ended"  # it is gone
    (new.job.directory / "status").write_text("exited 3\n")
    found = registry.find(new.job.instance)
    assert (found.alive, found.wait(1), found.description.restored_from) == (
        False,
        ExitStatus(code=3),
        "s1",
    )
    assert (found.with_lost(os.getpid()).state, registry.find(found.instance).alive) == (
        "ended",
        False,
    )
    registry.remove(found)


def test_notes_on_snapshots(registry: Registry) -> None:
    job = ended(registry).with_snapshot("s7", "lineage")
    assert (registry.find("true").description.snapshot, job.description.lineage) == (
        "s7",
        "lineage",
    )
    assert job.description.restored_from == ""
    with ThreadPoolExecutor(8) as pool:  # dumps that end at the same time
        ids = [f"s{number}" for number in range(64)]
        list(pool.map(lambda one: job.with_snapshot(one, "lineage"), ids))
    assert registry.find("true").description.snapshot in ids
    assert not list(job.directory.glob("*.new"))
    registry.remove(job)
    with pytest.raises(NotFound):
        job.with_snapshot("s8", "lineage")


def test_an_end_that_was_requested(registry: Registry) -> None:
    """Only what `Job.end` sent counts, for a time, and not after a restart of the machine."""
    first = sleeper(registry)
    first.kill(signal.SIGTERM)
    first.wait(10)
    assert not first.end_requested(60)
    second = registry.start(["sh", "-c", "trap : HUP; echo ready; while :; do sleep 0.1; done"])
    until(lambda: output(second))
    second.end(signal.SIGHUP)
    assert not second.end_requested(60)
    second.end(signal.SIGTERM)
    second.wait(10)
    assert second.end_requested(60)
    time.sleep(0.1)
    assert not second.end_requested(0.05)
    elsewhere = Job(second.directory, replace(second.description, boot="another"))
    assert not elsewhere.end_requested(60)


def test_a_stop_that_was_given_up_is_forgotten(registry: Registry) -> None:
    """A dump notes the snapshot, and was killed before it killed the job, which ran on."""
    killed, gone = sleeper(registry), registry.start(["sh", "-c", "sleep 0.5; exit 3"])
    for job in (killed, gone):
        note_end(job.directory, "1" * 32)
        assert not stopped_with(job) and not job.end_requested(60)
    gone.wait(10)
    assert not stopped_with(gone)
    killed.kill(signal.SIGKILL)
    killed.wait(10)
    assert stopped_with(killed) == "1" * 32


def test_what_is_known_is_read_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervised job may leave hundreds of instances, and many commands list them."""
    jobs = [registry.start(["true"], name=f"job-{number}") for number in range(5)]
    for job in jobs:
        job.wait(10)
    read: list[Path] = []
    load = Job.load

    def counting(directory: Path, inits: Inits | None = None) -> Job:
        read.append(directory)
        return load(directory, inits)

    monkeypatch.setattr(Job, "load", counting)
    assert {job.instance for job in registry.instances()} == {job.instance for job in jobs}
    read.clear()
    found = registry.instances()
    assert [registry.kept(job) for job in found] == [0] * 5
    assert not read
    # What was written, replaced or removed since is seen.
    jobs[0].directory.joinpath("job.json").write_text("{")
    registry.remove(jobs[1])
    later = registry.start(["true"], name="later")
    assert [job.name for job in registry.instances()] == ["job-2", "job-3", "job-4", "later"]
    assert set(registry.damaged()) == {jobs[0].instance}
    later.wait(10)


def test_an_instance_that_failed_is_looked_for_no_more(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all processes for each of hundreds would take long."""
    job = ended(registry)
    known = job.description
    gone = replace(known, pid=0, owner=(os.getpid(), 1))
    Job(job.directory, gone).save()
    looked: list[Path] = []
    of = Inits.of

    def counting(self: Inits, directory: Path) -> int:
        looked.append(directory)
        return of(self, directory)

    monkeypatch.setattr(Inits, "of", counting)
    for _ in range(2):
        assert [one.state for one in registry.instances()] == ["failed"]
    assert len(looked) == 2
    monkeypatch.setattr(registry_module, "_SETTLED_SECONDS", 0.0)
    for _ in range(3):
        assert [one.state for one in registry.instances()] == ["failed"]
    assert len(looked) == 3
    Job(job.directory, replace(gone, name="other")).save()  # a change is seen
    assert [one.name for one in registry.instances()] == ["other"]
