"""Paths that no other user controls.

Neither the umask nor existing permissions decide who may read or replace icecore's files. "Others"
are all users except root and the user that this process runs as. An access control list shows in
the group bits of the mode (acl(5)), so checks of these cover it.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from icecore.errors import UsageError
from icecore.events import Event, Sink, discard

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40
#: The entries of a state directory.
STATE_ENTRIES = frozenset(
    {"jobs", "lock", "metrics", "opened", "places", "restores", "schedules", "seen", "service"}
)


def state_directory() -> Path:
    """Return ``$ICECORE_STATE``; if it is not set, /var/lib/icecore, or a directory below
    ~/.local/state for users other than root, who can only read.
    """
    named = os.environ.get("ICECORE_STATE", "")
    if named:
        return Path(named).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/icecore")
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "icecore"


def is_own(about: os.stat_result) -> bool:
    """Return whether a file belongs to root or to this process's user."""
    return about.st_uid in (0, os.geteuid())


def components(path: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every directory and symbolic link that the kernel visits to resolve ``path``, and
    ``path`` itself, each with its lstat(2) result.

    Raises:
        OSError: One of them does not exist, or there are too many links.
    """
    left, here, links = Path(os.path.abspath(path)).parts[::-1], "/", 0
    todo = list(left[:-1])
    yield here, os.lstat(here)
    while todo:
        name = todo.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        one = os.path.join(here, name)
        about = os.lstat(one)
        yield one, about
        if not stat.S_ISLNK(about.st_mode):
            here = one
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), one)
        target = os.readlink(one)
        todo += [part for part in target.split("/")[::-1] if part not in ("", ".")]
        if target.startswith("/"):
            here = "/"


def require_unchangeable(path: Path, about: os.stat_result, what: str) -> None:
    """Require that others can neither write to a file nor replace it.

    Args:
        about: The file's fstat(2) result.
        what: Why that matters, for the message.

    Raises:
        UsageError: Others can; the cure is the command that corrects it.
        OSError: The file no longer exists.
    """
    # An inherited pipe has no directories.
    passed = list(components(path)) if stat.S_ISREG(about.st_mode) else []
    for one, found in [*passed, (str(path), about)]:
        where = "it" if one == str(path) else one
        if not is_own(found):
            owner = f"user {found.st_uid}"
            raise UsageError(
                f"{path}: {where} belongs to {owner}, and {what}",
                cure=f"chown {os.geteuid()} {shlex.quote(one)}",
            )
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & _OTHERS_WRITE:
            continue
        # In a sticky directory, users cannot remove other users' files. A read-only mount cannot
        # change.
        if (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX) or os.statvfs(
            one
        ).f_flag & os.ST_RDONLY:
            continue
        raise UsageError(
            f"{path}: {where} can be written by others than you, and {what}",
            cure=f"chmod go-w {shlex.quote(one)}",
        )


def private_state(state: Path, *names: str, emit: Sink = discard) -> Path:
    """Make a state directory, or one below it, accessible to its owner alone.

    Args:
        state: The state directory. Missing parents are created with mode 0755.
        names: The path below it.
        emit: Gets ``state.tightened`` if others had access to a directory.

    Returns:
        The path of the last directory.

    Raises:
        UsageError: A directory belongs to another user, or is reached through another user's link.
        OSError: A directory cannot be created.
    """
    make_parents(state.parent)
    tighten(state, foreign=True, emit=emit)
    for name in names:
        state /= name
        tighten(state, foreign=False, emit=emit)
    return state


def make_parents(path: Path) -> None:
    """Create a directory and its missing parents with mode 0755, less the umask."""
    for one in [*reversed(path.parents), path]:
        with suppress(FileExistsError):
            os.mkdir(one, 0o755)


def require_own(path: Path) -> os.stat_result:
    """Return the stat(2) result of a directory that belongs to no other user.

    Raises:
        UsageError: It belongs to another user, or is reached through another user's link.
        OSError: It does not exist.
    """
    for one, found in components(path):
        if stat.S_ISLNK(found.st_mode) and not is_own(found):
            raise UsageError(
                f"{path}: the link {one} belongs to user {found.st_uid}",
                cure=f"remove it: rm {shlex.quote(one)}",
            )
    about = os.stat(path)
    if not is_own(about):
        cure = f"chown {os.geteuid()} {shlex.quote(str(path))} if you trust its contents, or name another directory"
        raise UsageError(
            f"the directory {path} belongs to user {about.st_uid}, who could replace icecore's files there",
            cure=cure,
        )
    return about


def tighten(path: Path, *, foreign: bool = False, emit: Sink = discard) -> None:
    """Create a directory with mode 0700, or restrict an existing one to its owner.

    Args:
        foreign: Leave a directory unchanged that holds more than icecore's state, because others
            may depend on it.
        emit: Gets ``state.tightened``.

    Raises:
        UsageError: The directory belongs to another user, or is reached through another user's
            link; or others can write to it, and it holds more than icecore's state.
        OSError: It cannot be created.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    required = require_own(path)
    descriptor = os.open(
        os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    )
    try:
        about = os.fstat(descriptor)
        if not os.path.samestat(about, required):
            raise UsageError(
                f"the directory {path} was replaced meanwhile",
                cure="try again, and check who can write to its parent",
            )
        if not about.st_mode & _OTHERS or (about.st_uid != os.geteuid() and os.geteuid() != 0):
            return
        if foreign and not set(os.listdir(descriptor)) <= STATE_ENTRIES:
            if about.st_mode & _OTHERS_WRITE:
                cure = "name a directory that only icecore uses (ICECORE_STATE)"
                raise UsageError(
                    f"others can write to the directory {path}, and it holds more than icecore's state",
                    cure=cure,
                )
            return
        os.fchmod(descriptor, 0o700)
        emit(
            Event(
                "state.tightened",
                {"directory": str(path), "before": f"{stat.S_IMODE(about.st_mode):04o}"},
            )
        )
    finally:
        os.close(descriptor)


def create_private(path: Path) -> int:
    """Open a file for writing; create it with mode 0600, or truncate it. The caller owns the
    descriptor.
    """
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
