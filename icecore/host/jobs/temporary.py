"""The private temporary directories of a job (``icecore run --tmp private``): its own /tmp and
/var/tmp, which no other job sees. Their content is part of each snapshot, like that of data
directories.

Each is a directory of the instance (`place`), which is bound over the host's in a mount namespace
of the job. It belongs to root, with mode 1777, like the host's: the owner of a sticky directory may
rename and remove the files of others in it, such as those of a set-user-ID program of the job. It
is in a directory that only root can enter. It is removed when the job has ended, because the job's
snapshots have the content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from icecore.errors import RestoreRefused, UsageError
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.kernel.removal import remove_tree

#: What is covered, unless it is a link to another directory.
POINTS = ("/tmp", "/var/tmp")
#: The cure where the kernel refuses the mount namespace or the binds.
NO_MOUNTS = (
    "leave out --tmp private, or run icecore where root can mount: with CAP_SYS_ADMIN, and"
    " with 'sysctl user.max_mnt_namespaces' high enough"
)
#: How long a removal goes on with ever deeper directories, which a process may be adding.
REMOVAL_SECONDS = 60.0
_FOLDER = "tmp"
_MODE = 0o1777


def points_here() -> list[str]:
    """Return those of `POINTS` that are directories on this machine, and not links."""
    return [point for point in POINTS if os.path.isdir(point) and not os.path.islink(point)]


def private_points(paths: Sequence[str]) -> list[str]:
    """Return the points among some paths."""
    return [path for path in paths if path in POINTS]


def place(directory: Path, point: str) -> Path:
    """Return what is bound over a point for the instance in ``directory``."""
    return directory / _FOLDER / point.strip("/").replace("/", "-")


def covers(directory: Path, points: Sequence[str]) -> list[tuple[str, str]]:
    """Return ``(source, mount point)`` of each bind."""
    return [(str(place(directory, point)), point) for point in points]


def make(directory: Path, points: Sequence[str]) -> None:
    """Make the empty directories of the instance in ``directory``."""
    if points:
        (directory / _FOLDER).mkdir(mode=0o700)
    for point in points:
        own = place(directory, point)
        own.mkdir(mode=0o700)
        own.chmod(_MODE)


def remove(directory: Path, seconds: float = REMOVAL_SECONDS) -> None:
    """Remove the directories of an instance that has ended, with all their content. A process of
    the job's user that has kept its way into them cannot add anything to what is being removed.

    Args:
        seconds: As in `icecore.host.kernel.removal.remove_tree`.

    Raises:
        OSError: Something in them cannot be removed, or ``seconds`` are over.
    """
    with suppress(FileNotFoundError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(descriptor, _FOLDER, seize=True, seconds=seconds)
        finally:
            os.close(descriptor)


def is_left(directory: Path) -> bool:
    """Return whether an instance has private directories, which may be half removed."""
    return os.path.lexists(directory / _FOLDER)


def require_visible(points: Sequence[str], state: Path, cwd: str, data: Sequence[str]) -> None:
    """Require that the private points hide nothing that the job needs at its start.

    Args:
        state: icecore's state directory, which holds the job's logs.
        cwd: The job's working directory.
        data: Its data directories.

    Raises:
        UsageError: They hide one of these.
    """
    if point := covering(points, str(state)):
        raise UsageError(
            f"the job's logs are in {state}, which a private {point} hides from it",
            cure="name another state directory in ICECORE_STATE, or leave out --tmp private",
        )
    if (point := covering(points, cwd)) and cwd != point:
        raise UsageError(
            f"the working directory {cwd} is in {point}, and a private {point} is empty at first",
            cure="name another one with --cwd, or leave out --tmp private",
        )
    for path in data:
        if point := covering(points, path):
            raise UsageError(
                f"the data directory {path} is in {point}, and a private {point} is empty at"
                " first, and part of each snapshot anyway",
                cure="leave out this --data, or --tmp private",
            )
        if any(point.startswith(f"{path}/") for point in points):
            raise UsageError(
                f"the data directory {path} contains a directory that --tmp private replaces",
                cure="name its other directories with --data, or leave out --tmp private",
            )


def require_here(points: Sequence[str], state: Path) -> None:
    """Require that this machine can give a restored job its private points.

    Raises:
        RestoreRefused: It cannot.
    """
    if missing := [point for point in points if point not in points_here()]:
        raise RestoreRefused(
            f"the job has a private {missing[0]}, which is not a directory on this machine",
            cure=f"make the directory {missing[0]}",
        )
    if point := covering(points, str(state)):
        raise RestoreRefused(
            f"the job's logs would be in {state}, which its private {point} hides from it",
            cure="name another state directory in ICECORE_STATE",
        )


def refusal(points: Sequence[str], error: OSError) -> RestoreRefused:
    """Return what a restore raises if the directories of an instance cannot be made or bound."""
    return RestoreRefused(
        f"cannot make the job's private {points[0]}: {error.strerror}",
        cure=NO_MOUNTS.partition(", or ")[2],
    )


def hidden_from_criu(points: Sequence[str], workdir: str, criu: Path) -> tuple[str, str] | None:
    """Return what CRIU does not find in the mount namespace of a job with private points, and the
    cure; None: nothing.
    """
    for path, cure in (
        (workdir, "name another directory with --workdir"),
        (str(criu), "install CRIU elsewhere (tools/install-criu)"),
        (str(CRIU_LIBRARY), "install icecore elsewhere"),
    ):
        if point := covering(points, os.path.realpath(path)):
            return f"the job has a private {point}, in which CRIU does not find {path}", cure
    return None


def covering(points: Sequence[str], path: str) -> str:
    """Return the point in which a path lies; empty: in none."""
    return next((one for one in points if path == one or path.startswith(f"{one}/")), "")
