"""Find the preload, and start and claim keepers. A keeper outlives its starter, and ends once its
directory and its processes are gone.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from icecore.errors import MissingTool, NotFound, UsageError
from icecore.host.kernel.trusted import give, require_private
from icecore.host.resident.client import Keeper
from icecore.host.resident.protocol import VARIABLE
from icecore.private import make_parents, require_own, tighten

_START_SECONDS = 10.0
_FOLDER = Path(__file__).parent
#: What a job does without where the preload was not built.
COST = "device memory goes through the driver in every window (about 2 GB/s out, 5 GB/s in) instead of staying where it is"


def preload_path() -> Path:
    """Return the preload's path.

    Raises:
        MissingTool: It was not built.
    """
    return _built("libicecore-resident.so")


def keeper_path() -> Path:
    """Return the path of the keeper's program. Raises as `preload_path`."""
    return _built("icecore-keeper")


def _built(name: str) -> Path:
    path = _FOLDER / name
    if not path.exists():
        raise MissingTool(
            f"{name} was not built when icecore was installed, so {COST}",
            cure="install gcc and install icecore again, or run with --no-resident",
        )
    return path


def environment(directory: str, before: Mapping[str, str]) -> dict[str, str]:
    """Return what a job's environment needs: the preload, and the directory as the job sees it;
    other preloads stay.
    """
    preloads = [str(preload_path()), *(word for word in (before.get("LD_PRELOAD"),) if word)]
    return {"LD_PRELOAD": ":".join(preloads), VARIABLE: directory}


@contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Claim what the keeper of a directory has kept, so that nobody else takes or releases it
    meanwhile; yield whether that succeeded.

    Raises:
        OSError: There is no such directory.
    """
    # A regular file: NFS has no such locks on directories.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(directory / "restoring", flags, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours
    finally:
        os.close(lock)


def make_place(directory: Path, user: int = 0) -> None:
    """Make the directory of a keeper, accessible to root and to the job's user alone; no other user
    may own those above it.

    Args:
        user: Whose job it is; its processes make sockets there.

    Raises:
        UsageError: It belongs to somebody else.
        PermissionError: Others can write to the directory above it.
    """
    make_parents(directory.parent)
    if user in (0, os.geteuid()):
        tighten(directory)
        return
    require_own(directory.parent)
    parent = os.open(directory.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_private(parent, directory.parent)
        with suppress(FileExistsError):
            os.mkdir(directory.name, 0o700, dir_fd=parent)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(directory.name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        if os.fstat(made).st_uid not in (0, user):
            raise UsageError(f"the directory {directory} belongs to user {os.fstat(made).st_uid}")
        try:
            give(made, user)
        except OSError as error:
            raise MissingTool(
                f"cannot give {directory} to user {user}: {error.strerror}",
                cure="run the job with --no-resident",
            ) from error
    finally:
        os.close(made)


def start_keeper(directory: Path) -> Keeper:
    """Start the keeper of a directory, or find the one that runs. It is no child of this process
    and need not be reaped. The owner of the directory is the user whose job it serves.

    Raises:
        MissingTool: It was not built, or does not start.
    """
    keeper = Keeper(directory)
    try:
        keeper.processes()
        return keeper
    except NotFound:
        pass
    program = keeper_path()
    owner = os.stat(directory).st_uid
    foreign = [str(owner)] if owner not in (0, os.geteuid()) else []
    # Through a shell that ends at once, so that the keeper is the init's child, not ours.
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            '"$0" "$@" >/dev/null 2>&1 </dev/null & echo $!',
            str(program),
            str(directory / "keeper"),
            *foreign,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=_START_SECONDS,
        start_new_session=True,
        check=False,
        cwd="/",
    )
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        try:
            keeper.processes()
            return keeper
        except NotFound:
            time.sleep(0.01)
    raise MissingTool(
        f"the keeper in {directory} does not answer: {done.stderr.strip()}",
        cure=f"see what {program} says",
    )
