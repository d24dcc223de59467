"""Whether CRIU may give a name to a job's unix socket. CRIU does so as root, by the name as the job
bound it: it removes what has the name, binds the socket and gives it to the job's user.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor

from icecore.host.kernel.filesystem import acting_as
from icecore.restorer.files.jobpaths import JobPaths, PathRefused, Place
from icecore.restorer.files.peers import rights
from icecore.restorer.files.plan import Problem

_ROOT = 0


def name_problem(paths: JobPaths, path: str, user: int) -> Problem | None:
    """Return why a user's socket must not get a name; None: it may.

    The name must not lead through a link that users other than root could make, and the user must
    be allowed to make and remove it. Root's jobs may do so anywhere.

    Raises:
        OSError: FileNotFoundError, NotADirectoryError: its directory is missing. Others as open(2).
    """
    folder, name = os.path.split(path)
    try:
        place = Place(paths.directory(folder), name)
    except PathRefused as error:
        return Problem(path, error.message, error.cure)
    if user == _ROOT or _may_name(place, user):
        return None
    return Problem(
        path,
        f"the job has a unix socket of this name, which its user, {user}, may not make here",
        f"let user {user} write to {folder}, and remove what has the name",
    )


def _may_name(place: Place, user: int) -> bool:
    directory = place.directory.descriptor
    folder, about = os.fstat(directory), place.stat()
    if folder.st_uid == user:
        return True
    if folder.st_mode & stat.S_ISVTX and about is not None and about.st_uid != user:
        return False
    # `acting_as` is not for a thread in which signal handlers run.
    with ThreadPoolExecutor(1, "names") as pool:
        return pool.submit(_may_write, directory, user).result()


def _may_write(directory: int, user: int) -> bool:
    with acting_as(*rights(user)):
        return os.access(f"/proc/self/fd/{directory}", os.W_OK | os.X_OK, effective_ids=True)
