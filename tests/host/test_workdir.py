"""Working directories: what nobody uses any more is removed, and never what somebody uses or what
is not icecore's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from icecore.events import Event
from icecore.host.workdir import LOCK, make_work_directory, sweep

NOBODY = 65534
_MAKES = "import sys; from icecore.host.workdir import make_work_directory as make; print(make('icecore-dump-', sys.argv[1])[0], flush=True); sys.stdin.read()"


def maker(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a working directory."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAKES, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    (dead, left), (alive, used) = maker(tmp_path), maker(tmp_path)
    (left / "deep" / "deeper").mkdir(parents=True)
    (left / "deep" / "pages-1.img").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (left / "link").symlink_to(outside)
    try:
        dead.kill()
        dead.wait(20)
        events: list[Event] = []
        sweep(tmp_path, events.append)
        assert [event.fields for event in events] == [{"directory": str(left)}]
        assert not left.exists() and used.is_dir() and (outside / "kept").exists()
    finally:
        for process in (dead, alive):
            process.kill()
            process.communicate(timeout=20)


def test_a_lock_that_was_inherited_counts(tmp_path: Path) -> None:
    """The guard and CRIU outlive a dumper that is killed."""
    made, lock = make_work_directory("icecore-restore-", tmp_path)
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[lock])
    os.close(lock)
    try:
        sweep(tmp_path)
        assert made.is_dir()
    finally:
        child.kill()
        child.wait(20)
    sweep(tmp_path)
    assert not made.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory away")
def test_what_is_not_icecores_stays(tmp_path: Path) -> None:
    """Other names, somebody else's directories, links, and what another version left with something
    in it.
    """
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / LOCK).touch()
    (tmp_path / "icecore-dump-aaaaaaaa").symlink_to(target)
    for name in (
        "icecore-dump-toolongname",
        "icecore-dump-",
        "other-dump-aaaaaaaa",
        "icecore-dump-bbbbbbbb",
        "icecore-dump-cccccccc",
        "icecore-dump-dddddddd",
    ):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / LOCK).touch()
    os.chown(tmp_path / "icecore-dump-bbbbbbbb", NOBODY, NOBODY)
    (tmp_path / "icecore-dump-cccccccc" / LOCK).rename(
        tmp_path / "icecore-dump-cccccccc" / "images"
    )
    (tmp_path / "icecore-dump-dddddddd").chmod(0o755)
    (tmp_path / "icecore-dump-eeeeeeee").touch()
    before = sorted(tmp_path.rglob("*"))
    sweep(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    sweep(tmp_path / "nowhere")


def test_a_planted_lock_is_not_followed_nor_waited_for(tmp_path: Path) -> None:
    linked, piped = tmp_path / "icecore-dump-aaaaaaaa", tmp_path / "icecore-dump-bbbbbbbb"
    for folder in (linked, piped):
        folder.mkdir(mode=0o700)
    (linked / LOCK).symlink_to("/etc/passwd")
    os.mkfifo(piped / LOCK)
    sweep(tmp_path)
    assert linked.is_dir()


def test_makers_and_sweepers_at_the_same_time(tmp_path: Path) -> None:
    """A maker's directory is its own from the moment that it has it, however many look for
    leftovers meanwhile.
    """
    done, lost = threading.Event(), []

    def sweeps() -> None:
        while not done.is_set():
            sweep(tmp_path)

    code = f"from icecore.host.workdir import sweep\nwhile True: sweep({str(tmp_path)!r})"
    sweepers = [subprocess.Popen([sys.executable, "-P", "-c", code]) for _ in range(2)]
    thread = threading.Thread(target=sweeps)
    thread.start()
    try:
        for _ in range(300):
            made, lock = make_work_directory("icecore-dump-", tmp_path)
            try:
                (made / "images").touch()
                os.sched_yield()
                if not (made / "images").exists():
                    lost.append(made)
            except FileNotFoundError:
                lost.append(made)
            else:
                shutil.rmtree(
                    made, ignore_errors=True
                )  # a sweeper may help, once the lock's file is gone
            finally:
                os.close(lock)
    finally:
        done.set()
        thread.join(20)
        for sweeper in sweepers:
            sweeper.kill()
            sweeper.wait(20)
    assert not lost
    assert not list(tmp_path.iterdir())


def test_a_maker_that_is_killed_at_any_moment_leaves_nothing_for_good(tmp_path: Path) -> None:
    """Between the directory and its lock, too."""
    for moment in ("os.open", "fcntl.flock", "_is_at"):
        name = moment.split(".")[-1]
        owner = "workdir" if moment == "_is_at" else f"workdir.{moment.split('.')[0]}"
        code = (
            f"import os, signal, sys\nfrom icecore.host import workdir\n"
            f"def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n{owner}.{name} = die\n"
            f"workdir.sweep = lambda *_: None\nworkdir.make_work_directory('icecore-dump-', sys.argv[1])"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(tmp_path)], timeout=20, check=False
        )
        assert done.returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1, moment
        sweep(tmp_path)
        assert not list(tmp_path.iterdir()), moment


def test_a_maker_tries_again_when_its_directory_was_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody sweeps between the lock's file and the lock."""
    lock = fcntl.flock
    swept: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        if not swept and not operation & fcntl.LOCK_NB:
            swept.append(1)
            sweep(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    made, descriptor = make_work_directory("icecore-dump-", tmp_path)
    assert swept and [entry.name for entry in made.iterdir()] == [LOCK]
    os.close(descriptor)
