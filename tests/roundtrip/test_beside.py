"""A restore beside processes that have the job's files open: who runs goes on writing, and every
file in the end is whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import NotFound, PreflightRefused, RestoreRefused, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import check, restore
from icecore.restorer.restored import Restored
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip

pytestmark = pytest.mark.criu

#: Writes its steps to a file that stays open, and reads back what it wrote; ends once the second
#: file is there.
WRITER = """
import os, sys, time
out = open(sys.argv[1], "r+" if os.path.exists(sys.argv[1]) else "w+")
step = 0
while not os.path.exists(sys.argv[2]):
    step += 1
    out.write(f"step {step}\\n")
    out.flush()
    time.sleep(0.005)
out.seek(0)
lines = out.read().split("\\n")[:-1]
again = open(sys.argv[1]).read().split("\\n")[:-1]
wanted = [f"step {number + 1}" for number in range(step)]
print("whole" if lines == wanted else "not whole", "same" if again == wanted else "other", flush=True)
"""


def steps(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def whole(lines: list[str]) -> bool:
    return lines == [f"step {number + 1}" for number in range(len(lines))]


def wait_steps(path: Path, more_than: int, seconds: float = 20.0) -> int:
    """Wait until a file has more than so many lines."""
    until = time.monotonic() + seconds
    while (count := len(steps(path))) <= more_than:
        assert time.monotonic() < until, f"{path} has {count} lines"
        time.sleep(0.01)
    return count


def opened_by(pid: int) -> set[str]:
    """The paths of a process's descriptors."""
    with suppress(NotFound):
        return {descriptor.target for descriptor in procfs.descriptors(pid)}
    return set()


class World:
    """A job that writes a file, and its snapshot."""

    def __init__(
        self, trip: Trip, registry: Registry, tmp_path: Path, isolation: Isolation | None = None
    ) -> None:
        self.trip, self.registry = trip, registry
        self.folder = tmp_path / "work"
        self.folder.mkdir()
        self.out, self.end, self.copies = (
            self.folder / "out.txt",
            self.folder / "end",
            tmp_path / "copies",
        )
        self.job = registry.start(
            [sys.executable, "-c", WRITER, str(self.out), str(self.end)],
            name="writer",
            isolation=isolation,
        )
        until = time.monotonic() + 20
        while not self.out.exists():
            assert time.monotonic() < until, self.job.log_path("stderr").read_text()
            time.sleep(0.01)
        wait_steps(self.out, 20)
        self.snapshot = self.dump(self.job)

    def dump(self, job: Job) -> str:
        target = Target(job.pid, job.name, record=job.record())
        return dump(
            self.trip.repository, self.trip.loop, target, DumpOptions(), criu=self.trip.criu
        ).snapshot

    def restore(self, emit: Sink = discard, snapshot: str = "", **options: object) -> Restored:
        chosen = RestoreOptions(**options)  # type: ignore[arg-type]
        restored = restore(
            self.trip.repository,
            self.trip.loop,
            snapshot or self.snapshot,
            chosen,
            criu=self.trip.criu,
            registry=self.registry,
            emit=emit,
        )
        restored.wait_resident(30)
        return restored

    def finish(self, *jobs: Job) -> list[str]:
        """End the jobs; the last line of each."""
        self.end.touch()
        for job in jobs:
            assert job.wait(20).exit_code == 0, job.log_path("stderr").read_text()
        return [job.log_path("stdout").read_text().split("\n")[-2] for job in jobs]

    def writer(self) -> int:
        """The process that writes."""
        return self.job.main_process()

    def name(self) -> str:
        """Its name."""
        return Path(f"/proc/{self.writer()}/comm").read_text().strip()

    def copy(self, directory: Path | None = None) -> Path:
        return Path(f"{directory or self.copies}{self.out}")


@pytest.fixture
def world(trip: Trip, registry: Registry, tmp_path: Path) -> World:
    return World(trip, registry, tmp_path)


@pytest.fixture(params=[Isolation(), Isolation(root=True)], ids=["host-root", "private-root"])
def either(request: pytest.FixtureRequest, trip: Trip, registry: Registry, tmp_path: Path) -> World:
    return World(trip, registry, tmp_path, request.param)


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_an_instance_with_copies_beside_the_original(mode: str, either: World) -> None:
    world = either
    inode = world.out.stat().st_ino
    restored = world.restore(mode=mode, files_to=str(world.copies)).job
    assert restored is not None
    wait_steps(world.copy(), 60)
    wait_steps(world.out, 60)
    assert world.out.stat().st_ino == inode
    assert world.finish(world.job, restored) == ["whole same", "whole same"]
    assert whole(steps(world.out)) and whole(steps(world.copy()))


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_an_instance_with_copies_is_dumped_and_restored_to_them(mode: str, either: World) -> None:
    world = either
    first = world.restore(files_to=str(world.copies)).job
    assert first is not None
    wait_steps(world.copy(), 60)
    snapshot = world.dump(first)
    assert first.record().copies == [str(world.out)]
    at = wait_steps(world.copy(), 80)
    first.kill(9)
    first.wait(10)
    second = world.restore(mode=mode, snapshot=snapshot).job
    assert second is not None and second.record().files_to == str(world.copies)
    wait_steps(world.copy(), at + 20)
    third = world.dump(second)
    elsewhere = world.copies.with_name("elsewhere")
    beside = world.restore(snapshot=third, files_to=str(elsewhere)).job
    assert beside is not None
    wait_steps(world.copy(elsewhere), at + 40)
    assert world.finish(world.job, second, beside) == ["whole same"] * 3
    assert all(whole(steps(path)) for path in (world.out, world.copy(), world.copy(elsewhere)))


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_beside_the_running_original_a_restore_is_refused_and_names_the_choices(
    mode: str, world: World
) -> None:
    """Before, it replaced the file, and what the original wrote from then on was lost."""
    inode, instances = world.out.stat().st_ino, len(world.registry.instances())
    events: list[Event] = []
    with pytest.raises(RestoreRefused) as refused:
        world.restore(events.append, mode=mode, instance="other")
    said = str(refused.value)
    choices = ("--files-to DIR", "--files leave", "--files truncate", "--files restore")
    assert all(
        word in said for word in (str(world.out), "open for writing", f"({world.name()})", *choices)
    )
    assert world.out.stat().st_ino == inode and len(world.registry.instances()) == instances
    assert [path.name for path in world.folder.iterdir()] == ["out.txt"]
    assert world.finish(world.job) == ["whole same"]


def test_a_dry_run_says_it_too(world: World) -> None:
    found = check(world.trip.repository, world.trip.loop, world.snapshot, criu=world.trip.criu)
    (holder,) = [one for one in found.checks if one.name == "holder"]
    assert holder.hard and not holder.met and "--files-to" in holder.cure
    asked = RestoreOptions(files="restore")
    found = check(
        world.trip.repository, world.trip.loop, world.snapshot, asked, criu=world.trip.criu
    )
    (holder,) = [one for one in found.checks if one.name == "holder"]
    assert not holder.hard and "keeps the old file, which loses its name" in holder.message


def test_replaced_as_asked_the_original_keeps_the_old_file(world: World) -> None:
    inode = world.out.stat().st_ino
    kept = os.open(f"/proc/{world.writer()}/fd/3", os.O_RDONLY)
    events: list[Event] = []
    other = world.restore(events.append, files="restore", instance="other").job
    assert other is not None and world.out.stat().st_ino != inode
    assert any(
        event.name == "restore.warning" and "which loses its name" in str(event.fields["message"])
        for event in events
    )
    wait_steps(world.out, 60)
    assert world.finish(world.job, other) == ["whole other", "whole same"]
    assert whole(steps(world.out)) and whole(os.pread(kept, 1 << 20, 0).decode().split("\n")[:-1])
    os.close(kept)


def test_left_as_asked_both_write_to_the_file(world: World) -> None:
    wait_steps(world.out, 60)
    inode = world.out.stat().st_ino
    other = world.restore(files="leave", instance="other").job
    assert other is not None and world.out.stat().st_ino == inode
    at = world.out.stat().st_size
    wait_steps(world.out, len(steps(world.out)) + 20)
    assert (
        os.stat(f"/proc/{other.main_process()}/fd/3").st_ino == inode
        and world.out.stat().st_size > at
    )
    world.finish(world.job, other)


def test_cut_as_asked_both_write_to_the_file(world: World) -> None:
    wait_steps(world.out, 60)
    inode = world.out.stat().st_ino
    other = world.restore(files="truncate", instance="other").job
    assert other is not None and world.out.stat().st_ino == inode
    assert os.stat(f"/proc/{other.main_process()}/fd/3").st_ino == inode
    world.finish(world.job, other)


def test_after_a_kill_nothing_is_asked(world: World) -> None:
    """What was killed has its files open until its memory is given back."""
    world.job.kill(9)
    other = world.restore().job
    assert other is not None
    wait_steps(world.out, 60)
    assert world.finish(other) == ["whole same"]


def test_a_reader_hinders_nothing_and_is_told(world: World) -> None:
    world.job.kill(9)
    world.job.wait(10)
    with subprocess.Popen(["tail", "-f", str(world.out)], stdout=subprocess.DEVNULL) as reader:
        try:
            assert eventually(lambda: str(world.out) in opened_by(reader.pid), 10)
            events: list[Event] = []
            other = world.restore(events.append).job
            assert other is not None
            assert any(
                f"process {reader.pid} (tail)" in str(event.fields.get("message"))
                for event in events
            )
            assert world.finish(other) == ["whole same"]
        finally:
            reader.kill()


def test_at_their_own_paths_again(world: World) -> None:
    first = world.restore(files_to=str(world.copies)).job
    assert first is not None
    wait_steps(world.copy(), 60)
    snapshot = world.dump(first)
    for job in (first, world.job):
        job.kill(9)
        job.wait(10)
    kept = world.copy().stat().st_ino
    last = world.restore(snapshot=snapshot, files_to="/").job
    assert last is not None and last.record().copies == []
    assert opened_by(last.main_process()) >= {str(world.out)} and world.copy().stat().st_ino == kept
    assert world.finish(last) == ["whole same"] and whole(steps(world.out))


def test_a_second_instance_in_the_same_directory_is_refused(world: World) -> None:
    first = world.restore(files_to=str(world.copies)).job
    assert first is not None
    inode = world.copy().stat().st_ino
    with pytest.raises(RestoreRefused, match="open for writing") as refused:
        world.restore(files_to=str(world.copies))
    assert "name another directory with --files-to" in str(refused.value)
    assert world.copy().stat().st_ino == inode
    assert world.finish(world.job, first) == ["whole same", "whole same"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "a copy must cover a file at this path, and there is none"),
        ("open directory", "users other than root can change its contents"),
        ("somebody's parent", "users other than root can change its contents"),
        ("a file", "it is not a directory"),
        ("a link", "leads through a symbolic link"),
    ],
)
def test_copies_that_cannot_be(change: str, said: str, world: World) -> None:
    world.job.kill(9)
    world.job.wait(10)
    if change == "missing":
        world.out.unlink()
    elif change == "open directory":
        world.copies.mkdir()
        world.copies.chmod(0o777)
    elif change == "somebody's parent":
        world.copies.mkdir()
        os.chown(world.copies, 65534, 65534)
        world.copies = world.copies / "own"
    elif change == "a file":
        world.copies.touch()
    else:
        world.folder.rename(world.folder.with_name("moved"))
        world.folder.symlink_to(world.folder.with_name("moved"))
    before = sorted(world.folder.parent.iterdir())
    with pytest.raises(RestoreRefused, match=said):
        world.restore(files_to=str(world.copies))
    assert (
        sorted(world.folder.parent.iterdir()) == before
        and not world.copies.joinpath("tmp").exists()
    )


@pytest.mark.parametrize("options", [{"files": "truncate"}, {"files": "leave"}, {"root": "/"}])
def test_what_copies_exclude(options: dict[str, str], world: World) -> None:
    with pytest.raises(UsageError):
        world.restore(files_to=str(world.copies), **options)


def test_what_the_kernel_allows_with_a_copy(world: World) -> None:
    """The instance cannot rename its copy or anything to its path. Who is outside can, and the
    instance then sees what others see there.
    """
    first = world.restore(files_to=str(world.copies)).job
    assert first is not None
    inside = Path(f"/proc/{first.main_process()}/root{world.out}")
    script = f"import os; os.replace({str(world.out)!r}, {str(world.out) + '.1'!r})"
    rotated = subprocess.run(
        [
            "nsenter",
            f"--mount=/proc/{first.main_process()}/ns/mnt",
            "--",
            sys.executable,
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
    )
    assert "Device or resource busy" in rotated.stderr
    assert inside.stat().st_ino == world.copy().stat().st_ino
    new = world.folder / "new"
    new.write_text("")
    new.replace(world.out)
    assert inside.stat().st_ino == world.out.stat().st_ino
    wait_steps(world.copy(), 60)  # it goes on writing to what it has open
    with pytest.raises(PreflightRefused, match="uses files on mounts that it does not see"):
        world.dump(first)


def test_a_job_with_copies_and_a_mount_namespace_within_is_not_dumped(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    """CRIU would take the inner one for one of its own to restore, which needs a private root."""
    out, go, copies = tmp_path / "out.txt", tmp_path / "go", tmp_path / "copies"
    program = (
        f"import os, subprocess, time\nout = open({str(out)!r}, 'w')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "subprocess.run(['unshare', '--mount', 'sh', '-c', 'exec sleep 1000 0< /dev/null 1> /dev/null 2>&1'])"
    )
    job = registry.start([sys.executable, "-c", program], name="nested")
    assert eventually(lambda: str(out) in opened_by(job.main_process()), 20)

    def take(job: Job) -> str:
        return dump(
            trip.repository,
            trip.loop,
            Target(job.pid, job.name, record=job.record()),
            DumpOptions(),
            criu=trip.criu,
        ).snapshot

    snapshot = take(job)
    other = restore(
        trip.repository,
        trip.loop,
        snapshot,
        RestoreOptions(files_to=str(copies)),
        criu=trip.criu,
        registry=registry,
    ).job
    assert other is not None
    go.touch()
    assert eventually(
        lambda: any(
            procfs.command_line(pid) == ["sleep", "1000"] for pid in procfs.tree(other.pid)
        ),
        20,
    )
    with pytest.raises(PreflightRefused, match="mount namespaces of their own"):
        take(other)
    assert other.alive


def test_a_name_that_no_copy_covers_is_refused(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    out, alias, copies = tmp_path / "out.txt", tmp_path / "alias.txt", tmp_path / "copies"
    program = f"import os, time; a = open({str(out)!r}, 'w'); os.link({str(out)!r}, {str(alias)!r}); b = open({str(alias)!r}, 'r+'); time.sleep(1000)"
    job = registry.start([sys.executable, "-c", program], name="alias")
    assert eventually(lambda: opened_by(job.main_process()) >= {str(out), str(alias)}, 20)
    snapshot = dump(
        trip.repository,
        trip.loop,
        Target(job.pid, job.name, record=job.record()),
        DumpOptions(),
        criu=trip.criu,
    ).snapshot
    with pytest.raises(RestoreRefused, match="another name of a file that gets a copy"):
        restore(
            trip.repository,
            trip.loop,
            snapshot,
            RestoreOptions(files_to=str(copies)),
            criu=trip.criu,
            registry=registry,
        )
    assert out.stat().st_ino == alias.stat().st_ino and not copies.exists()


_OPENS_LATER = """
import os, sys, time
out = open(sys.argv[1], "w+b", buffering=0)
out.write(b"out")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
ordinary = open(sys.argv[3], "w+b", buffering=0)
ordinary.write(b"ordinary")
time.sleep(600)
"""


def test_an_ordinary_file_in_the_directory_of_copies_is_put_back_as_itself(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    copies, out, more = tmp_path / "copies", tmp_path / "out", tmp_path / "more"
    ordinary = copies / "ordinary"

    def taken(job: Job, path: Path, **options: bool) -> str:
        assert eventually(lambda: path.exists() and path.stat().st_size > 0), job.log_path(
            "stderr"
        ).read_text()
        target = Target(job.pid, job.name, record=job.record())
        return dump(
            trip.repository, trip.loop, target, DumpOptions(**options), criu=trip.criu
        ).snapshot  # type: ignore[arg-type]

    def restored(snapshot: str, **options: str) -> Job:
        found = restore(
            trip.repository,
            trip.loop,
            snapshot,
            RestoreOptions(**options),
            criu=trip.criu,
            registry=registry,
        )  # type: ignore[arg-type]
        found.wait_resident(30)
        assert found.job is not None
        return found.job

    job = registry.start(
        [sys.executable, "-c", _OPENS_LATER, str(out), str(more), str(ordinary)], name="ordinary"
    )
    copied = restored(taken(job, out), files_to=str(copies))
    more.touch()
    job.kill(9)
    job.wait(20)
    snapshot = taken(copied, ordinary, stop=True)
    copied.wait(20)
    ordinary.write_bytes(b"newer than the snapshot")
    restored(snapshot, files="restore")
    assert ordinary.read_bytes() == b"ordinary" and Path(f"{copies}{out}").read_bytes() == b"out"
