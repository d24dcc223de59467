"""A container of a real Podman: checkpointed, imported, exported, and restored by Podman from what was
exported. Skipped, with Podman's words, where it cannot run containers or checkpoint them.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.criu.program import find_criu
from tests.archives import making
from tests.cli.conftest import Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

_PROGRAMS = ("/bin/sh", "/bin/sleep")
_COUNT = "i=0; while sleep 0.1; do i=$((i+1)); echo line $i; done"


class Podman:
    """Podman with storage of its own.

    Debian's crun has no CRIU, so runc runs the containers; it finds our CRIU in PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words = [
            *("podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run")),
            *("--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--runtime", "runc"),
            *("--events-backend", "file", "--tmpdir", str(folder / "tmp")),
        ]
        self.environment = {
            **os.environ,
            "PATH": f"{find_criu().path.parent}:{os.environ['PATH']}",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Podman's."""
        return subprocess.run(
            [*self.words, *words],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def done(self, *words: str, skip: bool = False) -> str:
        """Run a command that has to succeed, or else the test is skipped or fails."""
        found = self.run(*words)
        if found.returncode and skip:
            pytest.skip(f"podman {words[0]} fails here: {found.stderr.strip()[-300:]}")
        assert found.returncode == 0, f"{words}: {found.stdout}{found.stderr}"
        return found.stdout

    def lines(self) -> list[str]:
        """Return what the container wrote."""
        return self.run("logs", "web").stdout.splitlines()

    def image(self) -> None:
        """Make an image of a shell and a sleep."""
        root = self.folder / "root"
        for path in [*_PROGRAMS, *self._libraries()]:
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        for name in ("proc", "sys", "dev", "tmp", "etc"):
            (root / name).mkdir()
        tar = self.folder / "root.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True, timeout=60)
        self.done("import", str(tar), "local/web:1", skip=True)

    def _libraries(self) -> set[str]:
        found = subprocess.run(
            ["ldd", *_PROGRAMS], check=True, capture_output=True, text=True, timeout=60
        )
        return {word for word in found.stdout.split() if word.startswith("/lib")}

    def start(self) -> None:
        """Start the container, with limits that this machine can give."""
        limits = [
            f"--ulimit={name}={min(1024, resource.getrlimit(kind)[1])}"
            for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
        ]
        words = ("run", "-d", "--name", "web", "--network", "none", "--log-driver", "k8s-file")
        self.done(*words, *limits, "local/web:1", "/bin/sh", "-c", _COUNT, skip=True)


@pytest.fixture
def podman() -> Iterator[Podman]:
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("podman and runc are not installed")
    # Podman refuses a run root of more than 50 characters.
    folder = Path(tempfile.mkdtemp("", "ice-", "/tmp"))
    made = Podman(folder)
    try:
        made.image()
        made.start()
        yield made
    finally:
        made.run("rm", "-f", "-a", "-t", "0")
        # A process that Podman has started may still write there when 'rm' is done.
        until(lambda: _removed(folder), "the folder is removed")


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_podman_restores_what_was_exported(cli: Cli, podman: Podman) -> None:
    cli.run("init")
    until(lambda: len(podman.lines()) >= 5, "the container counts")
    archive = cli.folder / "one.tar.zst"
    podman.done("container", "checkpoint", "web", "--export", str(archive), skip=True)
    tar = making.unpacked(archive.read_bytes())
    last = podman.lines()[-1]
    cli.run("import", archive.name)
    details = cli.one("snapshot.details", "show", "web")
    assert details["container"] == "web (localhost/local/web:1, runc, libpod)"
    copy = cli.folder / "copy.tar.zst"
    cli.run("export", "web", copy.name)
    assert making.unpacked(copy.read_bytes()) == tar
    podman.done("rm", "web")
    podman.done("container", "restore", "--import", str(copy))
    number = int(last.split()[1])
    until(lambda: bool(podman.lines()) and _last(podman) > number + 3, "it counts on")
    lines = podman.lines()
    assert f"line {number + 1}" in lines and lines.count("line 1") <= 1

    podman.done(
        *("container", "checkpoint", "--leave-running", "web"),
        *("--compress", "none", "--export", str(cli.folder / "two.tar")),
    )
    second = cli.one("import.done", "import", "two.tar")
    assert second["parent"] and second["changed"] < second["logical"]
    cli.run("export", "web", "two.copy")
    assert (cli.folder / "two.copy").read_bytes() == (cli.folder / "two.tar").read_bytes()


def _last(podman: Podman) -> int:
    return int(podman.lines()[-1].split()[1])
