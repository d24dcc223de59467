"""Copies bound over files in a mount namespace: who is in it sees them, nobody else does, and no
link leads elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.jobs.mounts import bind, in_thread, new_view

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def view() -> Iterator[int]:
    descriptor = in_thread(new_view)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A file, and a copy of it below ``copies``."""
    file = tmp_path / "work" / "file"
    copy = Path(f"{tmp_path}/copies{file}")
    for path, text in ((file, "original"), (copy, "copy")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def seen(view: int, path: Path) -> str:
    """What a process in the namespace reads."""
    command = ["nsenter", f"--mount=/proc/self/fd/{view}", "--", "cat", str(path)]
    return subprocess.run(
        command, pass_fds=[view], capture_output=True, text=True, check=True
    ).stdout


def test_who_is_in_the_namespace_sees_the_copy(view: int, place: Path) -> None:
    file = place / "work" / "file"
    mounts, ours = Path("/proc/self/mountinfo").read_text(), os.stat("/proc/self/ns/mnt").st_ino
    bind(view, f"{place}/copies", [str(file)])
    assert (seen(view, file), file.read_text()) == ("copy", "original")
    assert (
        Path("/proc/self/mountinfo").read_text() == mounts
        and os.stat("/proc/thread-self/ns/mnt").st_ino == ours
    )


@pytest.mark.parametrize(
    "which", ["the copy", "a directory of the copy", "the file", "a directory of the file"]
)
def test_links_are_refused(which: str, view: int, place: Path) -> None:
    """Whoever could write to a directory on the way would choose what the job sees, or what it
    covers.
    """
    file, secret = place / "work" / "file", place / "secret"
    secret.mkdir()
    (secret / "file").write_text("secret")
    victim = Path(f"{place}/copies{file}") if "copy" in which else file
    if "directory" in which:
        victim.parent.rename(victim.parent.with_name("moved"))
        victim.parent.symlink_to(secret)
    else:
        victim.unlink()
        victim.symlink_to(secret / "file")
    with pytest.raises(OSError):
        bind(view, f"{place}/copies", [str(file)])
    assert (secret / "file").read_text() == "secret" and seen(view, secret / "file") == "secret"


def test_all_or_none_of_the_copies_exist(view: int, place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bind(view, f"{place}/copies", [str(place / "work" / "file"), str(place / "work" / "other")])
    assert seen(view, place / "work" / "file") == "original"


def test_what_is_mounted_and_unmounted_outside_is_so_inside(tmp_path: Path) -> None:
    """Else a job with copies would keep a disk busy that nobody sees any more."""
    program = """
import subprocess, sys
from icecore.host.jobs.mounts import in_thread, new_view
view, point = in_thread(new_view), sys.argv[1]
command = ["nsenter", f"--mount=/proc/self/fd/{view}", "--", "cat", "/proc/self/mountinfo"]
inside = lambda: point in subprocess.run(command, pass_fds=[view], capture_output=True, text=True).stdout
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], check=True)
print(inside())
subprocess.run(["umount", point], check=True)
print(inside())
"""
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "shared",
        sys.executable,
        "-P",
        "-c",
        program,
        str(tmp_path),
    ]
    assert subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split() == ["True", "False"]
