"""What a restore means to processes that run and have the job's files open; the rule: nobody's output is replaced, cut or shared unless the options ask for it.

Readers are told, and hinder nothing: a file is replaced under its name, so that whoever reads the old one loses no byte of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from icecore.host.holders import Holder, find_holders
from icecore.restorer.files import Action, FilesMode
from icecore.store.manifest import Manifest

_NAMED = 3


@dataclass(frozen=True)
class Conflict:
    """A file that the restored job writes, or that the restore writes, and that running processes have open.

    Attributes:
        path: The file's.
        message: Who, and what it would come to.
        cure: The choices.
        hard: Whether the restore is refused.
    """

    path: str
    message: str
    cure: str
    hard: bool


def find_conflicts(manifest: Manifest, actions: Sequence[Action], mode: FilesMode, *, root: str, skip: Set[str], directory: str = "", named: bool = True) -> list[Conflict]:
    """Look for running processes that have the files open.

    Args:
        manifest: The snapshot's: files that the job had open for writing count even where nothing is done to them.
        actions: What would be done to files.
        mode: As in the options; ``auto`` is refused beside writers.
        root: What the paths of files without an action are relative to.
        skip: Files that the instance has of its own, by the path at which it sees them, and copies.
        directory: Where the instance's copies are, if it has some.
        named: Whether the instance may have copies.
    """
    kinds = {action.path: action.kind for action in actions}
    shared = [root + file.path for file in manifest.files if file.writable and file.policy != "absent" and file.path not in skip]
    paths = dict.fromkeys([*kinds, *shared])
    with ExitStack() as stack:
        descriptors = dict(_opened(paths, stack))
        found = find_holders(descriptors) if descriptors else {}
    return [one for path, holders in found.items() for one in _conflicts(path, kinds.get(path, ""), holders, mode, directory, named)]


def _opened(paths: Iterable[str], stack: ExitStack) -> Iterator[tuple[str, int]]:
    for path in paths:
        with suppress(OSError):  # it is not there, and nobody holds it by this name
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            yield path, descriptor


def _conflicts(path: str, kind: str, holders: Sequence[Holder], mode: FilesMode, directory: str, named: bool) -> Iterator[Conflict]:
    writers, readers = [one for one in holders if one.writes], [one for one in holders if not one.writes]
    if writers and mode == "auto":
        yield Conflict(path, f"{_who(writers)} open for writing", _choices(path, directory, named), True)
    elif writers:
        comes = {
            "write": "keeps the old file, which has no name any more once it is replaced",
            "truncate": "goes on writing, and what it has written since the snapshot is cut off",
            "": "and the restored job both write to it",
        }[kind]
        yield Conflict(path, f"{_who(writers)} open for writing, {comes}", "", False)
    if readers and kind == "write":
        yield Conflict(path, f"{_who(readers)} open for reading, and goes on with the file that was there before", "", False)


def _who(holders: Sequence[Holder]) -> str:
    names = ", ".join(map(str, holders[:_NAMED]))
    more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
    return f"{names}{more} has it"


def _choices(path: str, directory: str, named: bool) -> str:
    if directory and path.startswith(f"{directory}/"):
        return "name another directory with --files-to, or end who uses this one"
    copies = "--files-to DIR gives the restored job copies of its own; " if named else ""
    return (
        f"end who writes the file, or choose: {copies}--files leave has both write to it; --files restore replaces it, and the running process keeps the old file, "
        "which has no name any more; --files truncate cuts it to its length in the snapshot, for both"
    )
