"""Plans how the data directories of a job get the snapshot's content back. What did not change since
stays as it is. `icecore.restorer.files.put_back` carries the plan out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence, Set

import msgspec
import numpy as np
from msgspec.structs import replace

from icecore.host.kernel.filesystem import open_confined
from icecore.host.kernel.listing import Listing, TooMany, most_entries, walk
from icecore.host.kernel.timestamps import shows_later_writes
from icecore.restorer.files.jobpaths import JobPaths, PathRefused
from icecore.restorer.files.plan import Action, FilePlan, Problem
from icecore.restorer.files.rights import Inode, inode_of
from icecore.restorer.plan.cells import SpaceCells
from icecore.sizes import CELL_BYTES
from icecore.store.format.data import (
    MAX_ENTRIES,
    OF_ROOT,
    OPEN,
    DataDirectory,
    Entry,
    content_key,
)
from icecore.store.format.manifest import Manifest, OpenFile
from icecore.store.format.surroundings import Folder


class Content(msgspec.Struct, frozen=True):
    """Where the content of a file lies: cells of the space ``key`` from ``location`` on."""

    key: str
    location: int
    cells: int

    def of(self, cells: SpaceCells) -> SpaceCells:
        """Return the file's cells among those of the space, by offset in the file."""
        bounds = np.array([self.location, self.location + self.cells * CELL_BYTES], np.uint64)
        low, high = np.searchsorted(cells.base, bounds).tolist()
        start = np.uint64(self.location)
        rows = slice(low, high)
        return SpaceCells(
            cells.records[rows],
            cells.base[rows] - start,
            cells.low[rows] - start,
            cells.high[rows] - start,
        )


class DataPlan(msgspec.Struct, frozen=True):
    """What is done to the data directories.

    Attributes:
        files: The changes.
        contents: Path → where the content of a file lies that is written.
        handled: Open files that the job only reads, and that are compared here.
        present: Files that are there now and are replaced or removed, also within directories.
        left: Files that do not get all their attributes back (`Entry.attributes_for`).
    """

    files: FilePlan
    contents: Mapping[str, Content] = msgspec.field(default_factory=dict)
    handled: frozenset[str] = frozenset()
    present: tuple[Action, ...] = ()
    left: tuple[str, ...] = ()


NO_DATA = DataPlan(FilePlan([], []))


class _Planning(msgspec.Struct):
    """The plan of one directory so far."""

    about: DataDirectory
    owner: int
    taken: Set[str]
    since_ns: int
    mapped: Set[int]
    entries: dict[str, Entry]
    listing: Listing
    actions: list[Action] = msgspec.field(default_factory=list)
    removals: list[Action] = msgspec.field(default_factory=list)
    links: list[Action] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    folders: list[Folder] = msgspec.field(default_factory=list)
    settled: list[Folder] = msgspec.field(default_factory=list)
    attributes: dict[str, dict[bytes, bytes]] = msgspec.field(default_factory=dict)
    left: list[str] = msgspec.field(default_factory=list)
    contents: dict[str, Content] = msgspec.field(default_factory=dict)
    untouched: set[Inode] = msgspec.field(default_factory=set)
    kept: set[str] = msgspec.field(default_factory=set)
    cleared: set[str] = msgspec.field(default_factory=set)
    touched: set[str] = msgspec.field(default_factory=set)
    holding: set[str] = msgspec.field(default_factory=set)

    def path(self, name: str) -> str:
        """Return the whole path of an entry."""
        return f"{self.about.path}/{name}" if name else self.about.path

    def problem(self, name: str, message: str, cure: str) -> None:
        self.problems.append(Problem(self.path(name), message, cure))

    def change(self, name: str) -> None:
        """Note that an entry of a directory changes, whose time changes with it."""
        if name:
            self.touched.add(os.path.dirname(name))


def handled_files(manifest: Manifest, tables: Mapping[str, list[Entry]]) -> frozenset[str]:
    """Return the open files that the job only read, and whose content is data."""
    found: set[str] = set()
    for top, entries in tables.items():
        own = {os.fsdecode(one.path) for one in entries if one.kind == "file" and one.location >= 0}
        found |= {
            file.path
            for file in manifest.files
            if file.policy == "checked"
            and file.path.startswith(f"{top}/")
            and file.path[len(top) + 1 :] in own
        }
    return frozenset(found)


def with_attributes(
    actions: Sequence[Action], tables: Mapping[str, list[Entry]], owner: int
) -> list[Action]:
    """Return what is done to open files, with the attributes of those that are data.

    Args:
        owner: The snapshot's.
    """
    known = {
        f"{top}/{os.fsdecode(entry.path)}": entry
        for top, entries in tables.items()
        for entry in entries
        if entry.kind == "file" and entry.location == OPEN
    }
    return [
        _with_attributes(action, known[action.file.path].attributes_for(owner))
        if action.file.path in known
        else action
        for action in actions
    ]


def _with_attributes(action: Action, attributes: Mapping[bytes, bytes]) -> Action:
    """Return the action with attributes; only a file that is made gets any."""
    return replace(action, attributes=attributes, keep=action.keep and not attributes)


def plan_data(
    manifest: Manifest,
    directories: Sequence[DataDirectory],
    tables: Mapping[str, list[Entry]],
    *,
    root: str,
    owner: int,
    taken: Set[str],
    handled: frozenset[str],
) -> DataPlan:
    """Compare the data directories with their tables.

    Args:
        tables: The entries, by path of the directory.
        root: What the paths are relative to, for a job with a private root.
        owner: The snapshot's owner. One other than root changes nothing of other users'.
        taken: Paths at which something else is done.
        handled: From `handled_files`.
    """
    plan, contents = FilePlan([], []), dict[str, Content]()
    present: list[Action] = []
    left: list[str] = []
    for one in directories:
        with JobPaths(root) as paths:
            listing = _listed(paths, one, privileged=not owner)
            if isinstance(listing, Problem):
                plan = plan.joined(FilePlan([], [listing]))
                continue
            entries = {os.fsdecode(entry.path): entry for entry in tables[one.path]}
            # Stores through such a mapping after the snapshot left no trace.
            mapped = {file.inode for file in manifest.files if file.mapped}
            since = manifest.created_ns
            planning = _Planning(one, owner, taken, since, mapped, entries, listing)
            _plan_directory(planning)
            exposed = any(
                not paths.guarded(os.path.dirname(path))
                for path in handled
                if path.startswith(f"{one.path}/")
            )
        untouched = {
            inode_of(about)
            for path in handled
            if path.startswith(f"{one.path}/")
            and path[len(one.path) + 1 :] in planning.kept
            and (about := listing.found.get(path[len(one.path) + 1 :])) is not None
        }
        plan = plan.joined(
            FilePlan(
                [*planning.removals, *planning.actions, *planning.links],
                planning.problems,
                frozenset(untouched),
                exposed,
                tuple(planning.folders),
                (),
                tuple(planning.settled),
                planning.attributes,
            )
        )
        contents |= planning.contents
        present += _present(planning)
        left += planning.left
    return DataPlan(plan, contents, handled, tuple(present), tuple(left))


def _present(planning: _Planning) -> list[Action]:
    """Return the regular files that are replaced or removed."""
    changed = {one.file.path for one in [*planning.actions, *planning.links]}
    out = []
    for name, about in planning.listing.found.items():
        path = planning.path(name)
        if not stat.S_ISREG(about.st_mode) or path in planning.taken:
            continue
        removed = name in planning.cleared or _cleared_above(planning, name)
        if removed or path in changed:
            entry = Entry("file", os.fsencode(name), size=about.st_size)
            file = _as_file(planning, name, entry)
            out.append(Action("remove" if removed else "replace", file, about.st_size, data=True))
    return out


def _listed(paths: JobPaths, one: DataDirectory, *, privileged: bool) -> Listing | Problem:
    """Return what a directory contains now; nothing if it is missing."""
    try:
        place = paths.directory(one.path)
    except FileNotFoundError:
        return Listing()
    except PathRefused as error:
        return Problem(one.path, error.message, error.cure)
    except OSError as error:
        return Problem(one.path, f"cannot use it: {error.strerror}", "move away what is there")
    top = open_confined(place.descriptor, ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return walk(top, {}, min(4 * MAX_ENTRIES, most_entries()), privileged=privileged)
    except OSError as error:
        return Problem(
            f"{one.path}/{error.filename}", f"cannot list it: {error.strerror}", "run as root"
        )
    except TooMany as error:
        message = f"it has more than {error.most} entries, more than the available memory allows"
        return Problem(one.path, message, "move some away, or free memory")
    finally:
        os.close(top)


def _plan_directory(planning: _Planning) -> None:
    planning.holding = _holding(planning)
    for name in planning.listing.found:
        _plan_removal(planning, name)
    for name, entry in planning.entries.items():
        if planning.path(name) in planning.taken or entry.kind == "skipped":
            continue
        if entry.kind == "directory":
            continue
        now = None if name in planning.cleared else planning.listing.found.get(name)
        if now is not None and stat.S_ISDIR(now.st_mode):
            planning.problem(name, "it is a directory now that cannot be removed", "move it away")
        elif entry.kind == "link":
            _plan_link(planning, name, entry, now)
        else:
            _plan_entry(planning, name, entry, now)
    for name, entry in planning.entries.items():
        if entry.kind == "directory":
            _plan_folder(planning, name, entry)
    if planning.owner:
        _require_own(planning)


def _plan_removal(planning: _Planning, name: str) -> None:
    """Remove what the snapshot does not have at a name, unless what is above it is removed."""
    about = planning.listing.found[name]
    entry = planning.entries.get(name)
    if not name or planning.path(name) in planning.taken or _cleared_above(planning, name):
        return
    folder = stat.S_ISDIR(about.st_mode)
    if entry is not None and (entry.kind == "skipped" or not folder or entry.kind == "directory"):
        return
    if _must_stay(planning, name, about):
        return
    above = planning.listing.found[os.path.dirname(name)]
    file = OpenFile(
        path=planning.path(name),
        size=0 if folder else about.st_size,
        mtime_ns=about.st_mtime_ns,
        inode=about.st_ino,
        device=about.st_dev,
        mode=stat.S_IMODE(about.st_mode),
        user=above.st_uid,
        group=above.st_gid,
        writable=False,
        policy="content",
    )
    planning.removals.append(Action("remove", file, file.size, about.st_mtime_ns, data=True))
    planning.cleared.add(name)
    planning.change(name)


def _cleared_above(planning: _Planning, name: str) -> bool:
    """Return whether a directory above a name is removed or was skipped by the snapshot."""
    above = os.path.dirname(name)
    while above:
        entry = planning.entries.get(above)
        if above in planning.cleared or (entry is not None and entry.kind == "skipped"):
            return True
        above = os.path.dirname(above)
    return False


def _must_stay(planning: _Planning, name: str, about: os.stat_result) -> bool:
    """Return whether something is not data: a socket, a device, a mount; or has one in it."""
    return _is_special(about) or name in planning.listing.mounts or name in planning.holding


def _is_special(about: os.stat_result) -> bool:
    return any(kind(about.st_mode) for kind in (stat.S_ISSOCK, stat.S_ISCHR, stat.S_ISBLK))


def _holding(planning: _Planning) -> set[str]:
    """Return the directories that hold, however deep, what is not data or is changed elsewhere."""
    holding: set[str] = set()
    for name, about in planning.listing.found.items():
        if (
            _is_special(about)
            or name in planning.listing.mounts
            or planning.path(name) in planning.taken
        ):
            above = os.path.dirname(name)
            while above and above not in holding:
                holding.add(above)
                above = os.path.dirname(above)
    return holding


def _plan_entry(planning: _Planning, name: str, entry: Entry, now: os.stat_result | None) -> None:
    """Plan a file, a symbolic link or a FIFO."""
    if entry.kind == "file" and entry.location == OPEN:
        planning.problem(
            name, "its content is stored with the job's open files, which are left", "restore them"
        )
        return
    if now is not None and _is_unchanged(planning, entry, now):
        planning.kept.add(name)
        return
    if now is not None and _must_stay(planning, name, now):
        planning.problem(name, "it is a socket, a device or a mount now", "move it away")
        return
    kinds = {"symlink": "symlink", "fifo": "fifo"}
    attributes = entry.attributes_for(planning.owner)
    action = Action(
        kinds.get(entry.kind, "create" if now is None else "replace"),  # type: ignore[arg-type]
        _as_file(planning, name, entry),
        None if now is None else now.st_size,
        None if now is None else now.st_mtime_ns,
        data=True,
        target=entry.target,
        attributes=attributes,
        cleared=name in planning.cleared,
    )
    planning.actions.append(action)
    if len(attributes) < len(entry.attributes):
        planning.left.append(planning.path(name))
    if entry.kind == "file":
        planning.contents[planning.path(name)] = Content(
            content_key(planning.about.path), entry.location, entry.cells
        )
    planning.change(name)


def _plan_link(planning: _Planning, name: str, entry: Entry, now: os.stat_result | None) -> None:
    """Plan a further name of a file."""
    target = os.fsdecode(entry.target)
    there = planning.listing.found.get(target)
    same = now is not None and there is not None and inode_of(now) == inode_of(there)
    if same and target in planning.kept:
        planning.kept.add(name)
        return
    first = planning.entries[target]
    action = Action(
        "link",
        _as_file(planning, name, first),
        None if now is None else now.st_size,
        None if now is None else now.st_mtime_ns,
        data=True,
        target=os.fsencode(planning.path(target)),
        cleared=name in planning.cleared,
    )
    planning.links.append(action)
    planning.change(name)


def _is_unchanged(planning: _Planning, entry: Entry, now: os.stat_result) -> bool:
    """Return whether what is there is certainly what the snapshot has."""
    mine = (entry.ctime_ns, entry.mtime_ns, entry.inode)
    if mine != (now.st_ctime_ns, now.st_mtime_ns, now.st_ino):
        return False
    if entry.inode in planning.mapped:
        return False
    if not shows_later_writes(entry.ctime_ns, planning.since_ns):
        return False
    if entry.kind == "file":
        return stat.S_ISREG(now.st_mode) and now.st_size == entry.size
    return (stat.S_ISLNK if entry.kind == "symlink" else stat.S_ISFIFO)(now.st_mode)


def _plan_folder(planning: _Planning, name: str, entry: Entry) -> None:
    path = planning.path(name)
    now = planning.listing.found.get(name)
    wanted = entry.attributes_for(planning.owner)
    folder = Folder(path, entry.mode, entry.user, entry.group, entry.mtime_ns)
    if now is None:
        planning.folders.append(folder)
        planning.attributes[path] = wanted
        planning.change(name)
    elif not stat.S_ISDIR(now.st_mode):
        planning.problem(name, "it is no directory any more", "move it away")
    elif now.st_uid != entry.user:
        planning.problem(
            name,
            f"it belongs to user {now.st_uid}, but belonged to user {entry.user} when the snapshot"
            " was taken",
            f"'chown {entry.user} {path}', or move it away",
        )
    elif (
        name in planning.touched
        or stat.S_IMODE(now.st_mode) != entry.mode
        or (now.st_mtime_ns, now.st_gid) != (entry.mtime_ns, entry.group)
        or _attributes_now(planning, name, wanted) != wanted
    ):
        planning.settled.append(folder)
        planning.attributes[path] = wanted


def _attributes_now(
    planning: _Planning, name: str, wanted: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """Return the attributes of a directory, without those of root that a restore leaves."""
    now = planning.listing.attributes.get(name, {})
    return {
        key: value for key, value in now.items() if key in wanted or not key.startswith(OF_ROOT)
    }


def _require_own(planning: _Planning) -> None:
    """Refuse that the restore of a user's job changes what belongs to others, in the snapshot or
    now.
    """
    named = [
        (one.file.path, one.file.user)
        for one in [*planning.removals, *planning.actions, *planning.links]
    ]
    named += [(folder.path, folder.user) for folder in planning.folders]
    changed = [(path, user, True) for path, user in named]
    changed += [(folder.path, folder.user, False) for folder in planning.settled]
    for path, user, in_its_directory in changed:
        name = "" if path == planning.about.path else path[len(planning.about.path) + 1 :]
        # The owner of a directory may change every name in it.
        now = planning.listing.found.get(os.path.dirname(name) if in_its_directory else name)
        others = [one for one in (user, now.st_uid if now else user) if one != planning.owner]
        if others:
            message = f"it, or its directory, belongs to user {others[0]}, not to the job's user"
            planning.problems.append(Problem(path, message, "restore as root"))


def _as_file(planning: _Planning, name: str, entry: Entry) -> OpenFile:
    return OpenFile(
        path=planning.path(name),
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        inode=entry.inode or 1,
        device=0,
        mode=entry.mode,
        user=entry.user,
        group=entry.group,
        writable=False,
        policy="content",
    )
