"""Find the files that CRIU opens by path for a process, from its images. CRIU creates whatever the
images do not record as a regular file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from icecore.errors import Damaged
from icecore.host.criu.images import (
    COMMON,
    FDINFO,
    FILES,
    GHOST,
    GHOST_FILE,
    REGULAR_FILE,
    VMA_AIORING,
    VMA_FILE_PRIVATE,
    VMA_FILE_SHARED,
    VMA_GUARD,
    VMA_SOCKET,
    VMA_SYSVIPC,
    RegularFile,
    load_files,
    load_mm,
    load_remaps,
    read_image,
)
from icecore.host.criu.protobuf import Message, WireError

_IDS, _FS = 0x54432030, 0x51403912
_FILE_ID, _FILE_TYPE, _FILE_DESCRIPTOR = 1, 3, 4
_FILES_ID, _GHOST_USER = 2, 1
_WORKS_IN, _ROOT = 1, 2
_FIFO = 3  # fdinfo.proto, fd_types
_ENTRY_TYPE, _ENTRY_ID, _ENTRY_FIFO, _FIFO_FILE = 1, 2, 17, 3
#: More than the message before a ghost file's content takes, whose one text is a symbolic link's
#: target.
_GHOST_HEAD = 8192
#: Mappings that carry a file's bits, and whose number is not a file's.
_OTHER = VMA_SYSVIPC | VMA_AIORING | VMA_SOCKET | VMA_GUARD


class OpenedFile(msgspec.Struct, frozen=True):
    """A regular file that CRIU opens by its path.

    Attributes:
        file: As the images record it.
        ghost_user: Whom the file belongs to that CRIU makes in its place, because it has no name
            any more; None: it has one.
    """

    file: RegularFile
    ghost_user: int | None


class OpenedImages:
    """The files that CRIU opens by their paths for all processes.

    Args:
        folder: CRIU's images.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ghosts = {
            remap.original: remap.target for remap in load_remaps(folder) if remap.kind == GHOST
        }
        users = {number: _ghost_user(folder, number) for number in set(ghosts.values())}
        self._files = {
            file.id: OpenedFile(file, users[ghosts[file.id]] if file.id in ghosts else None)
            for file in load_files(folder)
            if not file.external
        }
        self._fifos = _fifos(folder)

    def descriptors(self, pid: int) -> dict[int, OpenedFile]:
        """Return the descriptors of a process by number; ``pid`` as in the images. A process that
        had ended has none.
        """
        try:
            (ids,) = read_image(self._folder / f"ids-{pid}.img", _IDS)
        except FileNotFoundError:
            return {}
        entries = read_image(self._folder / f"fdinfo-{ids.integer(_FILES_ID)}.img", FDINFO)
        found = {}
        for entry in entries:
            number, kind = entry.integer(_FILE_ID), entry.integer(_FILE_TYPE)
            if kind == _FIFO:
                number = self._fifos.get(number, -1)
            if kind in (REGULAR_FILE, _FIFO) and number in self._files:
                found[entry.integer(_FILE_DESCRIPTOR)] = self._files[number]
        return found

    def directories(self, pid: int) -> dict[str, OpenedFile]:
        """Return the working and the root directory of a process, "cwd" and "root"; ``pid`` as in
        the images. A process that had ended has none.
        """
        try:
            (own,) = read_image(self._folder / f"fs-{pid}.img", _FS)
        except FileNotFoundError:
            return {}
        ids = {"cwd": own.integer(_WORKS_IN), "root": own.integer(_ROOT)}
        return {name: self._files[one] for name, one in ids.items() if one in self._files}

    def mappings(self, pid: int) -> Iterator[tuple[int, int, OpenedFile]]:
        """Yield start, end and file of a process's mappings in address order; ``pid`` as in the
        images. A process that had ended has none.
        """
        try:
            vmas = load_mm(self._folder, pid).vmas
        except FileNotFoundError:
            return
        status = vmas["status"]
        chosen = vmas[(status & (VMA_FILE_PRIVATE | VMA_FILE_SHARED) != 0) & (status & _OTHER == 0)]
        for vma in chosen[np.argsort(chosen["start"], kind="stable")]:
            if (opened := self._files.get(int(vma["shmid"]))) is not None:
                yield int(vma["start"]), int(vma["end"]), opened


def _fifos(folder: Path) -> dict[int, int]:
    """Map the id of each FIFO to that of the file that says where it lies."""
    return {
        entry.integer(_ENTRY_ID): entry.message(_ENTRY_FIFO).integer(_FIFO_FILE)
        for entry in read_image(folder / "files.img", FILES)
        if entry.integer(_ENTRY_TYPE) == _FIFO
    }


def _ghost_user(folder: Path, number: int) -> int:
    """Return the owner of a ghost file, whose content may follow in the image."""
    path = folder / f"ghost-file-{number:x}.img"
    with open(path, "rb") as file:
        data = file.read(_GHOST_HEAD)
    try:
        magic, kind, size = struct.unpack_from("<III", data)
        if (magic, kind) != (COMMON, GHOST_FILE) or size > len(data) - 12:
            raise WireError("wrong magic or length")
        return Message.decode(data[12 : 12 + size]).integer(_GHOST_USER)
    except (WireError, struct.error) as error:
        raise Damaged("image", path.name, str(error)) from error
