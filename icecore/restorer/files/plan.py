"""Plans which open files a restore puts back, and what prevents it. Nothing is changed here
(`icecore.restorer.files.put_back` does that).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Literal

import blake3
import msgspec
from msgspec.structs import replace

from icecore.host.kernel import libc
from icecore.host.kernel.elf import build_id
from icecore.restorer.files.allowed import EVERYTHING, Allowed
from icecore.restorer.files.jobpaths import JobPaths, PathRefused, Place
from icecore.restorer.files.rights import Inode, inode_of
from icecore.store.format.manifest import Manifest, OpenFile
from icecore.store.format.surroundings import Folder, SocketName

FilesMode = Literal["auto", "restore", "truncate", "leave"]
_HASH_PIECE = 1 << 20
#: Files for which directories stay open together.
_AT_ONCE = 200
#: Attributes that the kernel's security modules give to every file.
_LABELS = frozenset(("security.selinux", "security.SMACK64", "security.evm", "security.ima"))
#: Most bytes of a file whose content is changed in place, and of all together: what they held is
#: saved in the state directory.
_KEPT_BYTES, _ALL_KEPT_BYTES = 64 << 20, 256 << 20


class Problem(msgspec.Struct, frozen=True):
    """Why a file stands in the way of a restore: what is the matter, and what can be done."""

    path: str
    message: str
    cure: str


class Action(msgspec.Struct, frozen=True):
    """What happens to one file.

    Attributes:
        kind: ``create`` it, ``replace`` it by another with the recorded content, ``rewrite`` its
            content in place (another name of it is still there), or ``truncate`` it to its recorded
            size; ``fifo``: make a FIFO; ``link``: make another name of a file. Only in data
            directories: ``symlink``: make a symbolic link; ``remove`` what is there.
        file: What the snapshot recorded.
        size, mtime_ns: Of the file that is there now; None if there is none.
        content: Its content, if that is known already; None: its cells hold it.
        data: Whether it is in a data directory or is a ``link``: it then replaces what is there,
            except a directory.
        target: What a symbolic link contains; the path of the file that a ``link`` names.
        attributes: Extended attributes of a file that is made; None: those that it inherits.
        cleared: Another action removes first what is there.
        keep: It stays the file that the job had open: a ``replace`` changes its content in place.
            Programs remember inode numbers (SQLite does, and refuses to write to another file).
    """

    kind: Literal["create", "replace", "rewrite", "truncate", "fifo", "symlink", "link", "remove"]
    file: OpenFile
    size: int | None = None
    mtime_ns: int | None = None
    content: bytes | None = None
    data: bool = False
    target: bytes = b""
    attributes: Mapping[bytes, bytes] | None = None
    cleared: bool = False
    keep: bool = False


class FilePlan(msgspec.Struct, frozen=True):
    """What is done to the open files, and what prevents it.

    Attributes:
        actions: One for each file that changes, and one for each further name that is made.
        problems: Why files cannot be restored.
        untouched: The files that stay as they are: the job must get these and no others.
        exposed: Whether users other than root can change where some path leads before CRIU opens
            it.
        folders: Directories that are missing and will be made, parents first.
        sockets: Names that CRIU makes in one of these.
        settled: Directories of data that are there, and get their recorded mode and time.
        attributes: Path → extended attributes of directories among ``folders`` and ``settled``;
            others keep what they have.
        resized: Files of other users, which stay as they are and may have another size now.
    """

    actions: list[Action]
    problems: list[Problem]
    untouched: frozenset[Inode] = frozenset()
    exposed: bool = False
    folders: tuple[Folder, ...] = ()
    sockets: tuple[SocketName, ...] = ()
    settled: tuple[Folder, ...] = ()
    attributes: Mapping[str, Mapping[bytes, bytes]] = msgspec.field(default_factory=dict)
    resized: frozenset[str] = frozenset()

    def joined(self, other: FilePlan) -> FilePlan:
        """Return one plan of both."""
        return FilePlan(
            [*self.actions, *other.actions],
            [*self.problems, *other.problems],
            self.untouched | other.untouched,
            self.exposed or other.exposed,
            self.folders + other.folders,
            self.sockets + other.sockets,
            self.settled + other.settled,
            {**self.attributes, **other.attributes},
            self.resized | other.resized,
        )


def plan_files(
    manifest: Manifest,
    mode: FilesMode,
    *,
    root: str = "",
    skip: Set[str] = frozenset(),
    verify: bool = False,
    programs: Mapping[str, str] | None = None,
    allowed: Allowed = EVERYTHING,
) -> FilePlan:
    """Compare the files on this machine with what the snapshot recorded.

    Args:
        manifest: The snapshot's.
        mode: As in `icecore.restorer.options.RestoreOptions`.
        root: What the paths are relative to, for a job with a private root.
        skip: Files that the new instance does not get by path.
        verify: Compare the content of read-only files whose hash was recorded.
        programs: Path of each mapped program or library → its build id, or empty.
        allowed: What the job's user may have and change. Files of others stay as they are.
    """
    programs = programs or {}
    actions: list[Action] = []
    problems: list[Problem] = []
    untouched: set[Inode] = set()
    resized: set[str] = set()
    exposed, kept = False, 0
    stored = {space.key for space in manifest.spaces if space.kind == "file"}
    with JobPaths(root) as paths:
        for number, file in enumerate(manifest.files):
            if number % _AT_ONCE == 0:
                paths.forget()
            if file.policy == "absent" or file.path in skip:
                continue
            has_content = file.policy == "content" and file.path in stored
            chosen: FilesMode = "restore" if mode == "auto" else mode
            if problem := _denied(allowed, root, file, file.path in programs):
                problems.append(problem)
                continue
            if file.path in programs and not file.writable:
                outcome = _plan_program(
                    paths, file, has_content, chosen, programs[file.path], verify, allowed
                )
            elif (found := _of_others(paths, file, allowed)) is not None:
                outcome = found
                resized.add(file.path)
            else:
                outcome = _plan_one(paths, file, has_content, chosen, verify, allowed)
            if isinstance(outcome, Action):
                if outcome.keep:
                    kept += max(outcome.size or 0, file.size)
                    outcome = replace(outcome, keep=kept <= _ALL_KEPT_BYTES)
                actions.append(outcome)
                if outcome.kind in ("create", "replace", "rewrite"):
                    stays = outcome.keep or outcome.kind == "rewrite"
                    named = [_plan_name(paths, file, name, allowed, stays) for name in file.links]
                    actions += [one for one in named if isinstance(one, Action)]
                    problems += [one for one in named if isinstance(one, Problem)]
                    exposed = exposed or not all(
                        paths.guarded(os.path.dirname(name)) for name in file.links
                    )
            elif isinstance(outcome, Problem):
                problems.append(outcome)
            else:
                untouched.add(outcome)
            exposed = exposed or not paths.guarded(os.path.dirname(file.path))
    return FilePlan(actions, problems, frozenset(untouched), exposed, resized=frozenset(resized))


def _denied(allowed: Allowed, root: str, file: OpenFile, mapped: bool) -> Problem | None:
    """Return the problem of an existing file that the job's user may not open now."""
    path = root + file.path
    with suppress(OSError):
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode) and allowed.owns(about.st_uid):
            # Its owner can change its mode, and only has to reach it.
            return (
                None
                if allowed.may(os.path.dirname(path), os.X_OK)
                else _closed(allowed, file, "reach")
            )
    modes = (os.W_OK,) if file.writable else (os.R_OK, os.X_OK) if mapped else (os.R_OK,)
    if allowed.may(path, *modes) or not os.path.lexists(path):
        return None
    return _closed(allowed, file, "write to" if file.writable else "read")


def _closed(allowed: Allowed, file: OpenFile, word: str) -> Problem:
    return Problem(
        file.path,
        f"user {allowed.user}, whose job had it open, may not {word} it now",
        f"let user {allowed.user} {word} it, or have an administrator restore the job, as root",
    )


def _of_others(paths: JobPaths, file: OpenFile, allowed: Allowed) -> Inode | None:
    """Return the file on this machine if it is or was another user's and the job had it open for
    writing; else None. Such a file stays as it is, because others may have changed it since.
    """
    found = _find(paths, file)
    if not file.writable or found is None or isinstance(found, Problem):
        return None
    _, now = found
    owners = (now.st_uid, file.user) if file.inode else (now.st_uid,)
    if allowed.owns(*owners) or _of_another(paths, file, now):
        return None
    return inode_of(now)


def _plan_one(
    paths: JobPaths,
    file: OpenFile,
    has_content: bool,
    mode: FilesMode,
    verify: bool,
    allowed: Allowed = EVERYTHING,
) -> Action | Problem | Inode:
    """Return what happens to a file, why it cannot be restored, or which one it is if it stays."""
    found = _find(paths, file)
    if isinstance(found, Problem):
        return found
    if found is None:
        return _plan_missing(paths, file, has_content, mode, allowed)
    place, now = found
    has_content = has_content and allowed.owns(file.user, now.st_uid)
    if has_content and mode == "restore" and file.writable:
        # Also if size and time are the same: a mapped file changes without its time.
        keep = can_keep(file, now) and _is_plain(place)
        return Action("replace", file, now.st_size, now.st_mtime_ns, keep=keep)
    same = now.st_size == file.size and (not file.mtime_ns or now.st_mtime_ns == file.mtime_ns)
    if file.temporary and not same and mode != "leave":
        return Problem(
            file.path,
            "it is a temporary file that was modified since the snapshot was taken, perhaps by another job",
            "move it away: the restore then makes it again",
        )
    if has_content and mode == "restore" and not same:
        return Action("replace", file, now.st_size, now.st_mtime_ns)
    may_cut = file.writable and allowed.owns(now.st_uid)
    if now.st_size > file.size and may_cut and mode == "truncate":
        return Action("truncate", file, now.st_size, now.st_mtime_ns)
    if now.st_size != file.size:
        message = f"it has {now.st_size} bytes, {file.size} when the snapshot was taken"
        return Problem(file.path, message, _cure_for_content(file, has_content, mode))
    if _of_another(paths, file, now):
        message = f"it belongs to user {now.st_uid}, but belonged to user {file.user} when the snapshot was taken; the job would get access to it"
        return Problem(
            file.path,
            message,
            f"'chown {file.user} {file.path}' if it is the job's, else move it away",
        )
    # CRIU only requires the same size.
    if (
        same
        or file.writable
        or mode == "leave"
        or (verify and file.digest and _digest_at(place) == file.digest)
    ):
        return inode_of(now)
    message = "it was modified since the snapshot was taken (same size, other time)"
    return Problem(
        file.path, message, "restore the old file, or accept the new one with --files leave"
    )


def _is_plain(place: Place) -> bool:
    """Return whether a file has no extended attributes that a change of its content would have to
    keep. False if that cannot be determined: it may just have been removed.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(place.name, flags, dir_fd=place.directory.descriptor)
    except OSError:
        return False
    try:
        return _LABELS.issuperset(os.listxattr(f"/proc/self/fd/{descriptor}"))
    except OSError as error:
        return error.errno == errno.ENOTSUP
    finally:
        os.close(descriptor)


def can_keep(file: OpenFile, now: os.stat_result) -> bool:
    """Return whether a file is still the one that the job had open, and its content may be changed
    in place: it has no other name (a backup, perhaps) that would change too, and saving its old
    content is quick.
    """
    return (
        inode_of(now) == (file.device, file.inode)
        and now.st_nlink == 1
        and (now.st_uid, now.st_gid) == (file.user, file.group)
        and stat.S_IMODE(now.st_mode) == stat.S_IMODE(file.mode)
        and max(now.st_size, file.size) <= _KEPT_BYTES
    )


def _find(paths: JobPaths, file: OpenFile) -> tuple[Place, os.stat_result] | Problem | None:
    """Return where a regular file is, why it cannot be used, or None: it is missing."""
    try:
        place = paths.locate(file.path)
        now = place.stat()
    except FileNotFoundError:
        return None
    except PathRefused as error:
        return Problem(file.path, error.message, error.cure)
    except OSError as error:
        return Problem(
            file.path, f"cannot examine it: {error.strerror}", "run as a user who may read it"
        )
    if now is None:
        return None
    if not stat.S_ISREG(now.st_mode):
        return Problem(file.path, "it is not a regular file any more", "move it away")
    return place, now


def _plan_missing(
    paths: JobPaths, file: OpenFile, has_content: bool, mode: FilesMode, allowed: Allowed
) -> Action | Problem:
    if not allowed.owns(file.user):
        return Problem(
            file.path,
            f"it is missing, and belonged to user {file.user}; the job is user {allowed.user}'s",
            f"let user {file.user} make it again",
        )
    if not _may_make(paths, file.path, allowed):
        return Problem(
            file.path,
            f"it is missing, and user {allowed.user} may not make it there now",
            "restore the file, or have an administrator restore the job, as root",
        )
    if mode != "restore" or not (has_content or not file.size):
        return Problem(file.path, "it is missing", _cure_for_content(file, has_content, mode))
    content = None if has_content else b""
    if same_inode(paths.locate, file):
        return Action("rewrite", file, content=content)
    return Action("create", file, content=content)


def _plan_name(
    paths: JobPaths, file: OpenFile, name: str, allowed: Allowed, stays: bool
) -> Action | Problem | None:
    """Plan another name of a file that a restore makes or changes: processes may open it by that
    name. Another file that has the name now is replaced, as if the job had opened it by that name. If
    the job only read its file, this is done in memory alone (on tmpfs).

    Args:
        stays: The file stays the one that the job had open.

    Returns:
        None if the name stays what it is.
    """
    if name == file.path:
        return None
    named = replace(file, path=name, links=[])
    found = _find(paths, named)
    if isinstance(found, Problem):
        return found
    if stays and found is not None and inode_of(found[1]) == (file.device, file.inode):
        return None
    if not _may_make(paths, name, allowed):
        return Problem(
            name,
            f"it is another name of {file.path}, and user {allowed.user} may not make it now",
            f"let user {allowed.user} write to the directory, or have an administrator restore the job",
        )
    if found is None:
        return Action("link", named, data=True, target=os.fsencode(file.path))
    place, now = found
    if not file.writable and not libc.in_memory(f"/proc/self/fd/{place.directory.descriptor}"):
        return None
    if now.st_uid != file.user or not allowed.owns(now.st_uid):
        return Problem(
            name,
            f"it belongs to user {now.st_uid}, but belonged to user {file.user} when the snapshot was taken",
            "move it away, or have an administrator restore the job as root",
        )
    return Action(
        "link", named, now.st_size, now.st_mtime_ns, data=True, target=os.fsencode(file.path)
    )


def _may_make(paths: JobPaths, path: str, allowed: Allowed) -> bool:
    """Return whether the user may make something in the nearest existing directory above a path."""
    folder = os.path.dirname(path)
    while folder != "/" and not os.path.lexists(paths.root + folder):
        folder = os.path.dirname(folder)
    return allowed.may(paths.root + folder, os.W_OK | os.X_OK)


def _plan_program(
    paths: JobPaths,
    file: OpenFile,
    has_content: bool,
    mode: FilesMode,
    expected: str,
    verify: bool,
    allowed: Allowed = EVERYTHING,
) -> Action | Problem | Inode:
    """Plan as `_plan_one` for a program or library, which is never replaced: other processes may
    have it mapped, and others rely on it.

    Args:
        expected: Its build id; empty: size and mtime tell.
    """
    found = _find(paths, file)
    if isinstance(found, Problem):
        return found
    if found is None:
        return _plan_missing(paths, file, has_content, mode, allowed)
    place, now = found
    actual = _build_id_at(place) if expected else ""
    if expected and actual != expected:
        message = f"it is another build: the job has mapped build id {expected}, this file has {actual or 'none'}"
    elif now.st_size != file.size:
        message = f"it has {now.st_size} bytes, {file.size} when the snapshot was taken"
    elif (
        not expected
        and mode != "leave"
        and file.mtime_ns not in (0, now.st_mtime_ns)
        and not (verify and file.digest and _digest_at(place) == file.digest)
    ):
        message = "it was modified since the snapshot was taken (same size, other time)"
    elif _of_another(paths, file, now):
        message = f"it belongs to user {now.st_uid}, but belonged to user {file.user} when the snapshot was taken; the job would get access to it"
    else:
        return inode_of(now)
    return Problem(file.path, message, _cure_for_program(has_content, expected))


def _cure_for_program(has_content: bool, expected: str) -> str:
    install = "install the version that the job ran with"
    if not expected:
        install += ", or accept a file of the same size with --files leave"
    if has_content:
        return f"{install}, or give the job the one in the snapshot: --files-to DIR"
    return f"{install}; a dump with --with-files keeps it in the snapshot, for --files-to DIR"


def _build_id_at(place: Place) -> str:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(place.name, flags, dir_fd=place.directory.descriptor)
    except OSError:
        return ""
    try:
        return build_id(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _of_another(paths: JobPaths, file: OpenFile, now: os.stat_result) -> bool:
    """Return whether a user who controls the path may have put another user's file there, to which
    the job would get access.
    """
    unknown = not file.inode  # of imported images
    if unknown or now.st_uid == file.user or paths.guarded(os.path.dirname(file.path)):
        return False
    return file.writable or not now.st_mode & stat.S_IROTH


def same_inode(locate: Callable[[str], Place], file: OpenFile) -> str:
    """Return another name of the same file, because all its names must continue to name one file.
    Empty: there is none.
    """
    for name in file.links:
        with suppress(OSError, PathRefused):
            about = locate(name).stat()
            if (
                about is not None
                and stat.S_ISREG(about.st_mode)
                and inode_of(about) == (file.device, file.inode)
            ):
                return name
    return ""


def _cure_for_content(file: OpenFile, has_content: bool, mode: FilesMode) -> str:
    if has_content and mode != "restore":
        return "use --files restore"
    if file.writable and mode != "truncate":
        return "give the file its old size, or use --files truncate if it only grew"
    return "restore the file; a dump with --with-files keeps its content in the snapshot"


def _digest_at(place: Place) -> str:
    """Return the BLAKE3 of a file's content in hexadecimal, as manifests record it."""
    state = blake3.blake3()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(
        os.open(place.name, flags, dir_fd=place.directory.descriptor), "rb", buffering=0
    ) as file:
        while piece := file.read(_HASH_PIECE):
            state.update(piece)
    return state.hexdigest()
