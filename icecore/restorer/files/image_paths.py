"""Checks, before CRIU runs, where the paths in its images lead. CRIU opens files and gives names to
sockets by these paths, as root, and follows links.

The content of a private temporary directory is the job's user's, links included, and was read while
that user could change it. Nobody sees the directory before the job runs, so what is checked stays.
Names of sockets elsewhere are checked when the restore is planned, and here once more: their
directories may change meanwhile, and a snapshot's record lacks some of them.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from icecore.errors import Damaged, RestoreRefused
from icecore.host.criu.images import GHOST, load_files, load_remaps
from icecore.host.criu.socket_images import UnixImage, load_unix
from icecore.host.jobs.namespaces import OWN_MOUNTS
from icecore.host.jobs.temporary import covering
from icecore.host.kernel.filesystem import open_confined
from icecore.restorer.files.jobpaths import JobPaths, components
from icecore.restorer.files.socket_names import name_problem

#: Links in it lead elsewhere for each process.
_PROCESSES = "/proc/"


def require_paths(
    images: Path,
    places: Mapping[str, Path],
    *,
    root: str = "",
    is_own: Callable[[str], bool] = lambda path: False,
    user: int = 0,
) -> None:
    """Return if no link that a user could make leads CRIU elsewhere.

    Args:
        images: CRIU's images.
        places: Private temporary directories → what will be bound over them, with their content.
        root: What other paths are relative to.
        is_own: Whether another path lies in a file system of the instance's own.
        user: The job's user.

    Raises:
        RestoreRefused: One does.
        Damaged: The kernel never shows such a path for an open file.
    """
    points, own = tuple(places), _OwnMounts(images, is_own)
    _require_files(images, places, own)
    with JobPaths(root) as paths:
        for one in load_unix(images):
            if not one.path:
                continue
            if one.path.startswith(_PROCESSES) and user and not one.external:
                raise _refused("socket", one.path)
            if one.leads_up and not one.external:  # CRIU drops others (peers.py)
                _require_steps(one, places, root, own)
            own.require("socket", one.path)
            if point := covering(points, one.path):
                # CRIU removes a link that has the name, but connects through it.
                _require_confined(places[point], point, one.path, "socket", last=one.external)
            elif not one.external and not is_own(one.path):
                _require_name(paths, one, points, user)


class _OwnMounts:
    """The file systems of a private root whose content CRIU restores from an archive."""

    def __init__(self, images: Path, is_own: Callable[[str], bool]) -> None:
        self._images = images
        self._is_own = is_own
        self._links: set[str] | None = None

    def require(self, kind: str, path: str) -> None:
        """Return if no directory on the way to a path is a link."""
        if path.startswith(_PROCESSES):
            return  # the kernel's
        mount = covering(OWN_MOUNTS, path)
        if not mount or not self._is_own(path):
            return
        steps = path.removeprefix(f"{mount}/").split("/")[:-1]
        if not steps:
            return
        if self._links is None:
            self._links = _archived_links(self._images)
        if any("/".join(steps[: number + 1]) in self._links for number in range(len(steps))):
            raise _refused(kind, path)


def _archived_links(images: Path) -> set[str]:
    """Return the paths of the links in the archives of CRIU's images."""
    found = set()
    for path in images.glob("tmpfs-*.img"):
        try:
            with tarfile.open(path) as archive:
                found |= {os.path.normpath(one.name) for one in archive if one.issym()}
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise Damaged("image", path.name, str(error)) from error
    return found


def _require_files(images: Path, places: Mapping[str, Path], own: _OwnMounts) -> None:
    remaps = {remap.original: remap for remap in load_remaps(images)}
    for file in load_files(images):
        if file.external:
            continue
        own.require("file", file.path)
        if not (point := covering(tuple(places), file.path)):
            continue
        components(file.path)
        remap = remaps.get(file.id)
        link = stat.S_ISLNK(file.mode)  # it was opened itself, and is again
        _require_confined(places[point], point, file.path, "file", last=remap is None and not link)
        if remap is not None and remap.kind == GHOST:
            if link:  # CRIU would make the link while it opens other files
                raise _refused("file", file.path)
            made = f"{file.path}.cr.{remap.target:x}.ghost"
            _require_confined(places[point], point, made, "file", last=True)


def _require_confined(place: Path, point: str, path: str, kind: str, *, last: bool) -> None:
    """Return if no component of a path below a point is a link.

    Args:
        last: Whether the last component counts.
    """
    start = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        below = os.path.relpath(path, point)
        found = open_confined(start, below, os.O_PATH | os.O_NOFOLLOW)
        try:
            is_link = stat.S_ISLNK(os.fstat(found).st_mode)
        finally:
            os.close(found)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _refused(kind, path) from error
    finally:
        os.close(start)
    if is_link and last:
        raise _refused(kind, path)


def _require_steps(one: UnixImage, places: Mapping[str, Path], root: str, own: _OwnMounts) -> None:
    """Return if each ``..`` in a socket's name leads where `UnixImage.path` says: no link is before
    it.
    """
    here = "/"
    for part in os.path.join("/", one.directory, os.fsdecode(one.name.rstrip(b"\0"))).split("/"):
        if part == "..":
            own.require("socket", f"{here}/..")
            point = covering(tuple(places), here)
            start = places[point] if point else Path(root or "/")
            _require_confined(start, point or "/", here, "socket", last=True)
            here = os.path.dirname(here)
        elif part not in ("", "."):
            here = os.path.join(here, part)


def _require_name(paths: JobPaths, one: UnixImage, points: tuple[str, ...], user: int) -> None:
    """Return if CRIU may give a name to a socket outside of the private directories."""
    path = one.path
    while True:
        try:
            problem = name_problem(paths, path, user)
            break
        except (FileNotFoundError, NotADirectoryError):
            if not one.deleted:
                return
            path = os.path.dirname(path)  # CRIU makes the directory, and removes it
    if problem is not None:
        raise RestoreRefused(f"{one.path}: {problem.message}", cure=problem.cure)
    top = paths.directory("/").descriptor
    root = os.readlink(f"/proc/self/fd/{top}").rstrip("/")
    found = os.readlink(f"/proc/self/fd/{paths.directory(os.path.dirname(path)).descriptor}")
    if covering(points, found.removeprefix(root)):
        raise _refused("socket", one.path)


def _refused(kind: str, path: str) -> RestoreRefused:
    if kind == "socket":
        return RestoreRefused(
            f"the job's unix socket {path} leads through a symbolic link that its user can change",
            cure="have the job bind the path without links, then take and restore another snapshot",
        )
    return RestoreRefused(
        f"the path {path} of a file that the job has open leads through a symbolic link in its private directory, which was made while the snapshot was taken",
        cure="restore another snapshot of the job",
    )
