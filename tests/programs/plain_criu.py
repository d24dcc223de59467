"""A round trip with nothing but CRIU: tells what is the program's or CRIU's doing from what is a
snapshot tool's.

What CRIU 4.2.1 loses without a word (Linux 6.18; measured, which is why no program here depends on
it):
    - of a datagram socket's queue, an empty message and all that wait behind it;
    - EFD_SEMAPHORE of an eventfd, which is restored as an ordinary one;
    - CPU affinity, I/O priority, personality, timer slack, NUMA policy and core dump filter (4.1.1
      also MADV_WIPEONFORK);
    - file locks, if dumped with --file-locks and restored without it;
    - what was appended after the dump stays in a file that is open O_WRONLY | O_APPEND: its size is
      not compared.
What it refuses to dump, the tree going on: messages waiting with SCM_CREDENTIALS (SCM_RIGHTS it
takes), System V memory outside an ipc namespace of one's own, with 4.1 on Linux 6.16 or newer every
inet socket. A restored tree lives in a time namespace: CLOCK_MONOTONIC goes on from the dump,
CLOCK_REALTIME is the machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.programs.driving import tree_of

PR_SET_CHILD_SUBREAPER = 36


class CriuFailed(Exception):
    """CRIU ended with an error; the message holds the errors of its log."""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes orphans children of this process for a while, so that it can wait for them: a pid is
    free once that is done.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def dump(
    criu: Path, pid: int, images: Path, options: Sequence[str], timeout_s: float = 60.0
) -> None:
    """Dumps a tree and kills it, and returns when all its pids are free.

    Raises:
        CriuFailed: The dump failed; the tree runs on.
    """
    tree = tree_of(pid)
    run(criu, images, "dump", ["--tree", str(pid), *options], timeout_s)
    until = time.monotonic() + 20
    for one in tree:
        while os.path.exists(f"/proc/{one}"):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one, os.WNOHANG)
            if time.monotonic() > until:
                raise CriuFailed(f"process {one} is still there after the dump")
            time.sleep(0.002)


def restore(criu: Path, images: Path, options: Sequence[str], timeout_s: float = 60.0) -> int:
    """Restores a tree as a child of this process and returns the pid of its first process.

    Raises:
        CriuFailed: The restore failed; nothing of the tree runs.
    """
    pid_file = images / "restored.pid"
    pid_file.unlink(missing_ok=True)
    run(
        criu,
        images,
        "restore",
        ["--restore-detached", "--restore-sibling", "--pidfile", str(pid_file), *options],
        timeout_s,
    )
    return int(pid_file.read_text())


def run(criu: Path, images: Path, action: str, options: Sequence[str], timeout_s: float) -> None:
    log = f"{action}.log"
    argv: list[str | Path] = [
        criu,
        action,
        "--images-dir",
        images,
        "--log-file",
        log,
        "-v3",
        *options,
    ]
    # Not captured: a restored process inherits CRIU's descriptors, and a pipe of them would never
    # end.
    status = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout_s,
    ).returncode
    if status != 0:
        lines = (images / log).read_text(errors="replace").splitlines()
        raise CriuFailed(
            f"criu {action}: status {status}: "
            + " | ".join(line for line in lines if "Error" in line)
        )
