"""Finds running processes that have a job's files open. No process's output is replaced, cut or
shared unless the options ask for it.

Readers cause a warning only: a file is replaced under its name, so a process that reads the old one
loses no byte of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress

import msgspec

from icecore.host.kernel.holders import Holder, find_holders
from icecore.restorer.files.jobpaths import JobPaths, PathRefused
from icecore.restorer.files.plan import Action, FilesMode
from icecore.store.format.manifest import Manifest

_NAMED = 3
#: Files that are open together.
_AT_ONCE = 64


class Conflict(msgspec.Struct, frozen=True):
    """A file that the restored job writes, or that the restore writes, and that running processes
    have open.

    Attributes:
        file: The file's path as the job sees it.
        path: Where it is on this machine.
        message: Who has it, and what follows.
        cure: The choices.
        hard: Whether the restore is refused.
        shared: Whether the restored job and running processes will both write to it.
    """

    file: str
    path: str
    message: str
    cure: str = ""
    hard: bool = False
    shared: bool = False


def find_conflicts(
    manifest: Manifest,
    actions: Sequence[Action],
    mode: FilesMode,
    *,
    root: str,
    skip: Set[str],
    directory: str,
    copies: bool,
) -> list[Conflict]:
    """Look for running processes that have the files open.

    Args:
        manifest: The snapshot's: files that the job had open for writing count even if they do not
            change.
        actions: What would be done to files.
        mode: As in the options; ``auto`` is refused beside writers.
        root: What the paths of files without an action are relative to.
        skip: Files without an action that are the instance's own, by the path at which it sees
            them.
        directory: Where the instance's copies are; empty: it has none.
        copies: Whether it could have copies.
    """
    kinds = {path: (action.file.path, action.kind) for action in actions for path in _names(action)}
    untouched = {
        file.path: (file.path, "")
        for file in manifest.files
        if file.writable and file.policy != "absent" and file.path not in skip
    }
    files = {**untouched, **kinds}
    found = _holders([*files], root)
    out: list[Conflict] = []
    for path, holders in found.items():
        file, kind = files[path]
        writers, readers = (
            [one for one in holders if one.writes],
            [one for one in holders if not one.writes],
        )
        if writers and mode == "auto":
            out.append(
                Conflict(
                    file,
                    root + path,
                    f"{_who(writers)} it open for writing",
                    _choices(path, directory, copies),
                    hard=True,
                )
            )
        elif writers:
            out.append(
                Conflict(
                    file,
                    root + path,
                    f"{_who(writers)} it open for writing, and {_OUTCOMES[kind]}",
                    shared=kind in ("", "truncate"),
                )
            )
        if readers and kind in ("replace", "remove", "link"):
            out.append(
                Conflict(
                    file,
                    root + path,
                    f"{_who(readers)} it open for reading, and will continue to read the old file",
                )
            )
    return out


#: What happens to a writer, by what is done to its file.
_OUTCOMES = {
    "replace": "keeps the old file, which loses its name",
    "link": "keeps the old file, which loses its name",
    "symlink": "keeps the old file, which loses its name",
    "remove": "keeps the old file, which loses its name",
    "rewrite": "its content is replaced under it",
    "truncate": "what it has written since the snapshot is cut off",
    "": "the restored job writes to the same file",
}


def _names(action: Action) -> Sequence[str]:
    """Return the names of the file that an action changes."""
    return action.file.links if action.kind == "rewrite" else [action.file.path]


def _holders(names: Sequence[str], root: str) -> dict[str, list[Holder]]:
    """Return who has the files open, by name."""
    found: dict[str, list[Holder]] = {}
    for first in range(0, len(names), _AT_ONCE):
        with ExitStack() as stack:
            descriptors = dict(_opened(names[first : first + _AT_ONCE], root, stack))
            found |= find_holders(descriptors) if descriptors else {}
    return found


def _opened(names: Iterable[str], root: str, stack: ExitStack) -> Iterator[tuple[str, int]]:
    """Open the files to check, where the restore would write them."""
    paths = stack.enter_context(JobPaths(root))
    for name in names:
        # A file that does not exist is not open by this name; the plan reports a refused path.
        with suppress(OSError, PathRefused):
            place = paths.locate(name)
            descriptor = os.open(
                place.name,
                os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW,
                dir_fd=place.directory.descriptor,
            )
            stack.callback(os.close, descriptor)
            yield name, descriptor


def _who(holders: Sequence[Holder]) -> str:
    names = ", ".join(map(str, holders[:_NAMED]))
    if len(holders) > _NAMED:
        names += f" and {len(holders) - _NAMED} more"
    return f"{names} {'has' if len(holders) == 1 else 'have'}"


def _choices(path: str, directory: str, copies: bool) -> str:
    if directory and path.startswith(f"{directory}/"):
        return "name another directory with --files-to, or end the process that has the copy open"
    own = "--files-to DIR gives the restored job its own copies; " if copies else ""
    return (
        f"end the writing process, or choose what happens to the file: {own}--files leave lets both write to it; --files truncate cuts it to its length in the "
        "snapshot, for both; --files restore replaces it, and the running process keeps the old file without a name"
    )
