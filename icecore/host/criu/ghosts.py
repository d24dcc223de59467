"""Open files and directories that no longer have a name ("ghosts"), in CRIU's images
(images/remap-file-path.proto, images/ghost-file.proto).

CRIU creates a ghost from its images, opens it, and removes its name. It names a file
PATH.cr.NUMBER.ghost, and each dump numbers its ghosts from 1. It creates a directory under its old
name. If another directory has that name, CRIU uses it, changes its owner and mode, and removes it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from icecore.errors import Damaged
from icecore.host.criu.image_changes import MOUNTS
from icecore.host.criu.images import (
    FILES,
    GHOST,
    REGULAR_FILE,
    REMAP_FPATH,
    load_remaps,
    read_image,
    write_image,
)

_ORIGINAL, _TARGET, _KIND = 1, 2, 3
#: images/fdinfo.proto, images/regfile.proto, images/mnt.proto.
_REGULAR, _ID, _PATH, _MOUNT, _MODE = 3, 1, 6, 7, 10
_MOUNT_ID, _POINT = 2, 7
#: Set in our numbers, and larger than any number that a dump gives to a ghost.
_UNUSED = 1 << 30
#: The most bytes of a name to which two suffixes can be added (NAME_MAX).
_LONGEST = 255 - 2 * len(".cr.40000000.ghost")
_SUFFIX = re.compile(r"\.cr\.[0-9a-f]+\.ghost\Z")


def make_unique(
    folder: Path, is_there: Callable[[str], bool], is_taken: Callable[[str], bool]
) -> list[str]:
    """Have CRIU create each ghost under a name that no other restore uses, and return these names.

    CRIU links a file to its old path while it opens it; /proc/PID/fd then shows that path. A file
    keeps its path except in three cases: something else has the path (CRIU would use PATH.cr_link,
    as would other restores), its directory is missing (CRIU would make it for a moment), or its name
    is too long for a suffix. Such a file, and each directory, gets a new path in the nearest
    existing directory above it on its mount.

    Args:
        folder: CRIU's images.
        is_there: Returns whether a directory exists.
        is_taken: Returns whether anything has a path.

    Raises:
        Damaged: The content of a ghost is missing.
    """
    ghosts = {one.original: one.target for one in load_remaps(folder) if one.kind == GHOST}
    if not ghosts:
        return []
    mask = _UNUSED | secrets.randbits(30)
    for number in set(ghosts.values()):
        image = folder / f"ghost-file-{number:x}.img"
        try:
            image.rename(folder / f"ghost-file-{number ^ mask:x}.img")
        except FileNotFoundError:
            raise Damaged("image", image.name, "it is missing") from None
    remaps = read_image(folder / "remap-fpath.img", REMAP_FPATH)
    for remap in remaps:
        if remap.integer(_KIND) == GHOST:
            remap.set(_TARGET, remap.integer(_TARGET) ^ mask)
    points = {
        mount.integer(_MOUNT_ID): os.fsdecode(mount.raw(_POINT))
        for image in folder.glob("mountpoints-*.img")
        for mount in read_image(image, MOUNTS)
    }
    names = []
    files = read_image(folder / "files.img", FILES)
    for entry in files:
        file = entry.message(_REGULAR)
        if entry.integer(1) != REGULAR_FILE or file.integer(_ID) not in ghosts:
            continue
        path, suffix = file.text(_PATH), f".cr.{ghosts[file.integer(_ID)] ^ mask:x}.ghost"
        is_directory = stat.S_ISDIR(file.integer(_MODE))
        above, name = os.path.split(path)
        is_long = len(os.fsencode(name)) > _LONGEST
        if is_directory or is_long or not is_there(above) or is_taken(path):
            top = points.get(file.zigzag(_MOUNT, -1), "/")
            while above not in (top, "/", "") and not is_there(above):
                above = os.path.dirname(above)
            short = os.fsencode(_SUFFIX.sub("", name))[:_LONGEST]
            path = os.path.join(above, os.fsdecode(short) + suffix)
            file.set(_PATH, path)
            entry.set(_REGULAR, file)
        names.append(path if is_directory else path + suffix)
    for name, entries, magic in (("remap-fpath", remaps, REMAP_FPATH), ("files", files, FILES)):
        (folder / f"{name}.img").unlink()  # it may be shared with the repository
        write_image(folder / f"{name}.img", entries, magic)
    return names
