"""Plain dumps and restores of jobs with the real CRIU, for the tests of namespaces and jobs;
everything has a time-out.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from icecore.errors import MissingTool, NotFound
from icecore.host.criu.program import PREFIX, Criu, find_criu
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import RunRecord, dump_options
from icecore.host.jobs.registry import Registry
from tests.recorded import through_manifest

SECONDS = 30


def installed() -> list[Criu]:
    """The CRIU in use, and the second one that tests may have (another version)."""
    found = [find_criu()]
    try:
        found.append(find_criu(f"{PREFIX}-sid"))
    except MissingTool:
        pass
    return list({criu.path: criu for criu in found}.values())


def dumps_internet_sockets(criu: Criu) -> bool:
    """Whether this CRIU can dump them on this kernel: newer kernels (6.18 does) refuse options that
    CRIU before 4.2 asks for.
    """
    with socket.socket() as probe:
        try:
            probe.getsockopt(socket.SOL_SOCKET, 34)  # SO_PASSSEC
        except OSError:
            return criu.version >= (4, 2, 0)
    return True


def dump(criu: Criu, job: Job, images: Path) -> RunRecord:
    """Dump a job, which runs on."""
    images.mkdir()
    record = job.record()
    command = [
        str(criu.path),
        "dump",
        "-t",
        str(job.pid),
        "-D",
        str(images),
        "-o",
        "dump.log",
        "-v2",
        "--leave-running",
    ]
    done = subprocess.run([*command, *dump_options(job.pid, record)], timeout=SECONDS, cwd="/")
    assert done.returncode == 0, (images / "dump.log").read_text()
    return through_manifest(record)


def restore_tree(
    criu: Criu,
    registry: Registry,
    record: RunRecord,
    images: Path,
    *,
    note: bool = True,
    **naming: str,
) -> Job:
    """A new instance from the images. ``note``: whether the restorer lives to note down the pid."""
    with registry.restoring(record, snapshot="s1", **naming) as new:
        work = new.job.directory / "restore"
        work.mkdir()
        command = [
            str(criu.path),
            "restore",
            "-D",
            str(images),
            "-W",
            str(work),
            "-o",
            "restore.log",
            "-v2",
            "-d",
        ]
        command += ["--pidfile", str(work / "pid"), *new.options]
        done = subprocess.run(
            [*new.prefix, *command], pass_fds=new.pass_fds, timeout=SECONDS, cwd="/"
        )
        assert done.returncode == 0, (work / "restore.log").read_text()
        if note:
            return new.started(int((work / "pid").read_text()))
        new._started = True  # what a restorer killed at this point leaves behind
    return new.job


def output(job: Job, stream: str = "stdout") -> str:
    """What a job has written so far."""
    return job.log_path("stderr" if stream == "stderr" else "stdout").read_text()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def emptied(registry: Registry) -> Iterator[Registry]:
    """The registry; all that runs in it is ended afterwards."""
    try:
        yield registry
    finally:
        for job in registry.instances():
            try:
                job.kill(signal.SIGKILL)
            except NotFound:
                pass
        for job in registry.instances():
            job.wait(10)
            reap(job.pid)


def reap(pid: int) -> None:
    """Wait for a process if it is this one's child (a restore may make it so)."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except (ChildProcessError, OverflowError):
        pass
