"""What the tests of putting files back share: files recorded as a snapshot would, and the plan
carried out up to a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from icecore.restorer.files.filewriter import FileWriter
from icecore.restorer.files.plan import Action, FilesMode, plan_files
from icecore.restorer.files.put_back import PutBack
from icecore.restorer.plan.cells import SpaceCells, space_cells
from icecore.sizes import PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import FilePolicy, Manifest, OpenFile, Region, Space
from icecore.store.format.surroundings import Folder, SocketName
from tests.restorer.places import empty_manifest

#: A user of no other file on the machine.
HOSTILE = 12345


def recorded(
    path: Path,
    *,
    root: str = "",
    writable: bool = True,
    policy: FilePolicy = "content",
    digest: str = "",
) -> OpenFile:
    """The file as it is now, as a snapshot would record it."""
    about = path.stat()
    return OpenFile(
        path=str(path).removeprefix(root),
        size=about.st_size,
        mtime_ns=about.st_mtime_ns,
        inode=about.st_ino,
        device=about.st_dev,
        mode=about.st_mode & 0o7777,
        user=about.st_uid,
        group=about.st_gid,
        writable=writable,
        policy=policy,
        digest=digest,
    )


def manifest_of(*files: OpenFile) -> Manifest:
    spaces = [
        Space("file", f.path, f.size, [Region(0, -(-f.size // PAGE) * PAGE, 0)])
        for f in files
        if f.policy == "content"
    ]
    return msgspec.structs.replace(empty_manifest(), files=list(files), spaces=spaces)


def cells_of(size: int) -> SpaceCells:
    """One cell whose pages are all there."""
    records = np.zeros(1, CELL)
    pages = np.zeros(256, np.uint8)
    pages[: -(-size // PAGE)] = 1
    records["data"] = np.packbits(pages, bitorder="little")
    return space_cells([Region(0, -(-size // PAGE) * PAGE, 0)], [records])


def written(
    actions: list[Action],
    content: bytes,
    state: Path,
    root: str = "",
    folders: Sequence[Folder] = (),
    sockets: Sequence[SocketName] = (),
    settled: Sequence[Folder] = (),
) -> PutBack:
    """Carry out actions up to the exchange; every file to be written has ``content``."""
    sizes = {action.file.path: action.file.size for action in actions}
    back = PutBack(
        actions,
        lambda path: cells_of(sizes[path]),
        state,
        root,
        folders=folders,
        sockets=sockets,
        settled=settled,
    )
    try:
        back.prepare()
        writer = FileWriter(back.targets)
        writer.create()
        padded = memoryview(content + bytes(-len(content) % PAGE))
        for row in writer.order():
            writer.place(row, padded)
    except BaseException:
        back.abandon()
        raise
    return back


def put_back(
    manifest: Manifest,
    content: bytes,
    state: Path,
    mode: FilesMode = "restore",
    root: str = "",
    *,
    planned: bool = True,
) -> list[str]:
    """Carry out the whole plan, as a restore does that succeeds; returns the files that had set-ID
    bits.

    Args:
        planned: False: take it that the plan was made before anything was in the way.
    """
    if planned:
        plan = plan_files(manifest, mode, root=root)
        assert plan.problems == []
        actions = plan.actions
    else:
        actions = [
            Action("replace" if mode == "restore" else "truncate", file) for file in manifest.files
        ]
    back = written(actions, content, state, root)
    try:
        without_bits = back.exchange()
    except BaseException:
        back.abandon()
        raise
    back.hand_over()
    assert back.finish() == []
    assert list((state / "restores").iterdir()) == []
    return without_bits


def look(top: Path, *, inodes: bool = True) -> dict[str, tuple[object, ...]]:
    """All below a directory: kind and mode, owner, time, content or target, and inode. Of
    directories no times: names come and go in them.
    """
    found: dict[str, tuple[object, ...]] = {}
    for folder, names, files in os.walk(top):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            content: object = None
            if os.path.islink(path):
                content = os.readlink(path)
            elif name in files and os.path.isfile(path):
                content = (Path(path).read_bytes(), about.st_mtime_ns)
            found[os.path.relpath(path, top)] = (
                oct(about.st_mode),
                about.st_uid,
                about.st_gid,
                content,
                about.st_ino if inodes else 0,
            )
    return found
