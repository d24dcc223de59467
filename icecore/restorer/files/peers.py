"""Whether CRIU may connect a job's datagram socket again to a socket outside of the tree.

CRIU connects as root, by the name. So the name has to lead where the job's user may connect, and
only root may be able to change where it leads, from the moment that it is examined.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

from icecore.errors import Damaged, RestoreFailed
from icecore.host.criu.socket_images import UnixImage
from icecore.host.kernel.filesystem import acting_as, open_confined
from icecore.restorer.files.jobpaths import JobPaths, root_only


def can_connect(one: UnixImage, root: str, user: int, *, own_network: bool) -> bool:
    """Return whether a datagram socket of a user's can be connected to this one's name here.

    Args:
        root: What its path is relative to, for a job with a private root.
        own_network: The job has a network namespace of its own, which has abstract names of its
            own.
    """
    if not one.path:
        return not own_network and _connects(one.name)
    if one.leads_up:  # CRIU resolves it otherwise than `path` says, if a component is a link
        return False
    # `acting_as` is not for a thread in which signal handlers run.
    with ThreadPoolExecutor(1, "peers") as pool:
        try:
            return pool.submit(_connects_as, user, root, one.path).result()
        except (OSError, Damaged, RestoreFailed):
            return False


def _connects_as(user: int, root: str, path: str) -> bool:
    with JobPaths(root) as paths:  # follows root's links only
        place = paths.locate(path)
        resolved = _path_of(place.directory.descriptor)
    here = os.open(root or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        below = os.path.relpath(resolved, _path_of(here))
        with acting_as(*rights(user)):
            for part in below.split("/") if below != "." else ():
                found = open_confined(here, part, os.O_PATH | os.O_DIRECTORY)
                above, here = here, found
                try:
                    if not _is_lasting(os.fstat(above), os.fstat(here)):
                        return False
                finally:
                    os.close(above)
            about = os.stat(place.name, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISSOCK(about.st_mode) or not _is_lasting(os.fstat(here), about):
                return False
            # The whole path may be longer than an address.
            return _connects(os.fsencode(f"/proc/self/fd/{here}/{place.name}"))
    finally:
        os.close(here)


def _is_lasting(directory: os.stat_result, entry: os.stat_result) -> bool:
    """Return whether only root can give the entry's name in a directory to something else."""
    if root_only(directory):
        return True
    ours = (0, os.geteuid())
    return (
        bool(directory.st_mode & stat.S_ISVTX)
        and directory.st_uid in ours
        and entry.st_uid in ours
        and directory.st_dev == entry.st_dev  # a user's mount can claim any owner
    )


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def rights(user: int) -> tuple[int, int, list[int]]:
    """Return a user's uid, gid and groups, as far as this machine knows them."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return user, user, [user]
    return user, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)


def _connects(address: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
