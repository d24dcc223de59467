"""Plan the missing directories, FIFOs, pid and lock files that a restore makes around the job's open
files. `icecore.restorer.files.put_back` carries the plan out. It changes nothing that exists.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Set

import msgspec

from icecore.errors import Damaged
from icecore.restorer.files.allowed import EVERYTHING, Allowed
from icecore.restorer.files.jobpaths import JobPaths, PathRefused, components
from icecore.restorer.files.plan import Action, FilePlan, FilesMode, Problem
from icecore.restorer.files.rights import Inode, inode_of
from icecore.restorer.files.socket_names import name_problem
from icecore.store.format.manifest import OpenFile
from icecore.store.format.surroundings import Folder, Named, SmallFile, SocketName, Surroundings

#: Number of paths whose directories stay open together.
_AT_ONCE = 200


class _Planning(msgspec.Struct):
    """The plan so far."""

    paths: JobPaths
    actions: list[Action] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    folders: list[Folder] = msgspec.field(default_factory=list)
    untouched: set[Inode] = msgspec.field(default_factory=set)
    exposed: bool = False

    def look(self, path: str) -> os.stat_result | None:
        """Return what is at a path; None: nothing.

        Raises:
            PathRefused: A component is a link that users other than root could make.
            OSError: It cannot be examined.
        """
        try:
            return self.paths.locate(path).stat()
        except FileNotFoundError:
            return None

    def note(self, path: str, about: os.stat_result | None) -> None:
        """Record something that the job must get, so that a replacement is detected."""
        if about is not None:
            self.untouched.add(inode_of(about))
        self.exposed = self.exposed or not self.paths.guarded(os.path.dirname(path))


def plan_surroundings(
    found: Surroundings | None,
    mode: FilesMode,
    *,
    root: str = "",
    is_own: Callable[[str], bool] = lambda path: False,
    allowed: Allowed = EVERYTHING,
) -> FilePlan:
    """Compare the record of the snapshot with the file system.

    Args:
        found: The record; None: the snapshot has none, and nothing is made.
        mode: As in `icecore.restorer.options.RestoreOptions`: without ``restore`` no pid or lock
            file is made.
        root: What the paths are relative to, for a job with a private root.
        is_own: Whether a path belongs to the new instance itself.
        allowed: What the job's user may have.
    """
    if found is None:
        return FilePlan([], [])
    with JobPaths(root) as paths:
        planning = _Planning(paths)
        every: list[Named] = [*found.folders, *found.fifos]
        if mode in ("auto", "restore"):
            every += found.small
        for number, one in enumerate(every):
            if number % _AT_ONCE == 0:
                paths.forget()
            if not is_own(one.path):
                _plan_one(planning, one, allowed)
        made = {folder.path for folder in planning.folders}
        named = [one for one in found.sockets if not is_own(one.path)]
        for one in named:
            if (problem := _socket_problem(paths, one, root, made, allowed.user)) is not None:
                planning.problems.append(problem)
    sockets = [
        msgspec.structs.replace(one, path=one.place, folder="")
        for one in named
        if os.path.dirname(one.place) in made
    ]
    return FilePlan(
        planning.actions,
        planning.problems,
        frozenset(planning.untouched),
        planning.exposed,
        tuple(planning.folders),
        tuple(sockets),
    )


def _socket_problem(
    paths: JobPaths, one: SocketName, root: str, made: Set[str], user: int
) -> Problem | None:
    """Return why CRIU may not or cannot give a name to a socket."""
    try:
        problem = name_problem(paths, one.path, user)
    except (FileNotFoundError, NotADirectoryError):
        problem = None
    except OSError as error:
        return Problem(one.path, f"cannot examine it: {error.strerror}", "run as root")
    if problem is not None or _leads_to(one, root, made):
        return problem
    message = "the job has a unix socket of this name, and its directory is missing"
    return Problem(one.path, message, f"make {os.path.dirname(one.path)}")


def _leads_to(one: SocketName, root: str, made: Set[str]) -> bool:
    """Return whether CRIU will find the directory of a socket's name: it binds the name as the job
    did, through symbolic links.
    """
    named, folder = os.path.dirname(one.path), os.path.dirname(one.place)
    if folder not in made:
        return os.path.isdir(root + named)
    top = os.path.realpath(root or "/").rstrip("/")
    return named == folder or os.path.realpath(root + named) == top + folder


def _plan_one(planning: _Planning, one: Named, allowed: Allowed) -> None:
    components(one.path)
    try:
        about = planning.look(one.path)
    except PathRefused as error:
        planning.problems.append(Problem(one.path, error.message, error.cure))
        return
    except NotADirectoryError:
        message = "a directory on the way to it is another kind of file now"
        planning.problems.append(Problem(one.path, message, "move that away"))
        return
    except OSError as error:
        planning.problems.append(
            Problem(
                one.path,
                f"cannot examine it: {error.strerror}",
                "run as a user who may read it",
            )
        )
        return
    if about is None and allowed.checks and not allowed.owns(one.user):
        if not isinstance(one, SmallFile):  # the job can do without such a file of others
            message = f"it is missing, and belonged to user {one.user}, not to the job's user"
            cure = f"let user {one.user} make it again"
            planning.problems.append(Problem(one.path, message, cure))
        return
    if isinstance(one, Folder):
        _plan_folder(planning, one, about)
    elif isinstance(one, SmallFile):
        if about is None:
            planning.actions.append(Action("create", _as_file(one), content=_content(one)))
    else:
        _plan_fifo(planning, one, about)


def _plan_folder(planning: _Planning, one: Folder, about: os.stat_result | None) -> None:
    if about is None:
        planning.folders.append(one)
    elif not stat.S_ISDIR(about.st_mode):
        planning.problems.append(Problem(one.path, "it is no directory any more", "move it away"))
    elif one.opened and (problem := _other_mode(one, about)):
        planning.problems.append(problem)
    if one.opened:
        planning.note(one.path, about)


def _plan_fifo(planning: _Planning, one: Named, about: os.stat_result | None) -> None:
    if about is None:
        planning.actions.append(Action("fifo", _as_file(one)))
    elif not stat.S_ISFIFO(about.st_mode):
        planning.problems.append(Problem(one.path, "it is no FIFO any more", "move it away"))
    elif problem := _other_mode(one, about):
        planning.problems.append(problem)
    planning.note(one.path, about)


def _other_mode(one: Named, about: os.stat_result) -> Problem | None:
    """Return the problem of something that CRIU would refuse to open."""
    now = stat.S_IMODE(about.st_mode)
    if now == one.mode:
        return None
    message = f"its mode is {now:o}, {one.mode:o} when the snapshot was taken"
    return Problem(one.path, message, f"'chmod {one.mode:o} {one.path}', or move it away")


def _as_file(one: Named) -> OpenFile:
    """Return a file as the manifest records open ones."""
    time = one.mtime_ns if isinstance(one, SmallFile) else 0
    size = len(_content(one)) if isinstance(one, SmallFile) else 0
    return OpenFile(
        path=one.path,
        size=size,
        mtime_ns=time,
        inode=0,
        device=0,
        mode=one.mode,
        user=one.user,
        group=one.group,
        writable=False,
        policy="content",
    )


def _content(one: SmallFile) -> bytes:
    try:
        return one.data
    except ValueError as error:
        raise Damaged("manifest", "of the snapshot", f"{one.path!a}: {error}") from error
