"""Lists a directory: every name below it with what lstat(2) says. Nothing leads out of it, no
symbolic link and no mount.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping

import msgspec

from icecore.host.kernel.filesystem import open_confined
from icecore.host.kernel.limits import memory_available

#: Files that a restore has made beside others, and has not removed yet
#: (`icecore.restorer.files.put_back`): no part of a listing.
TEMPORARY = re.compile(r"\..*\.icecore-[0-9a-f]{12}(-old)?", re.DOTALL)
#: Bytes of memory that an entry takes in a dump or a restore (measured: 1.7 to 2.6 KiB), and entries
#: for which every machine has room.
_ENTRY_BYTES = 3 << 10
_LEAST_ENTRIES = 10_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK

Attributes = dict[bytes, bytes]
#: Beginnings of the names of extended attributes that owners of files can set, and that only root
#: can set.
OF_USERS = ("user.", "system.posix_acl_")
OF_ROOT = ("trusted.", "security.capability")


class Listing(msgspec.Struct, frozen=True):
    """What a directory contained.

    Attributes:
        found: Path relative to the directory → its status; the directory itself is the empty path,
            and parents precede their content.
        mounts: Paths on other mounts, which are not entered.
        attributes: Extended attributes of directories that changed.
    """

    found: dict[str, os.stat_result] = msgspec.field(default_factory=dict)
    mounts: set[str] = msgspec.field(default_factory=set)
    attributes: dict[str, Attributes] = msgspec.field(default_factory=dict)


class TooMany(Exception):
    """A directory has more entries than a listing may hold: ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


def most_entries() -> int:
    """Return how many entries a listing may hold: they and what is derived from them may take a
    quarter of the available memory.
    """
    return max(_LEAST_ENTRIES, memory_available() // 4 // _ENTRY_BYTES)


def walk(
    top: int, known: Mapping[str, os.stat_result], most: int, *, privileged: bool = False
) -> Listing:
    """List a directory.

    Args:
        top: Its descriptor.
        known: Directories whose attributes are known, if their ctime is still the same. The ctime
            must show later changes (`icecore.host.kernel.timestamps`).
        most: Entries that the listing may hold.
        privileged: As in `attributes_of`.

    Raises:
        OSError: A directory cannot be read.
        TooMany: There are more entries.
    """
    out = Listing()
    out.found[""] = os.fstat(top)
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            here = open_confined(top, folder or ".", _FOLDER, cross=False)
        except FileNotFoundError:
            continue  # removed meanwhile, which happens only before the window
        except OSError as error:
            if error.errno == errno.EXDEV:
                out.mounts.add(folder)
                continue
            raise OSError(error.errno, error.strerror, folder) from error
        try:
            pending += _list(here, folder, out, most)
            before, now = known.get(folder), out.found[folder]
            if before is None or before.st_ctime_ns != now.st_ctime_ns:
                out.attributes[folder] = attributes_of(here, privileged=privileged)
        finally:
            os.close(here)
    return out


def _list(here: int, folder: str, out: Listing, most: int) -> list[str]:
    """Add the entries of one directory; return its directories.

    Raises:
        TooMany: There are more than ``most`` in all.
    """
    inner = []
    prefix = f"{folder}/" if folder else ""
    with os.scandir(here) as entries:
        for entry in entries:
            if TEMPORARY.fullmatch(entry.name):
                continue
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if len(out.found) >= most:
                raise TooMany(most)
            path = prefix + entry.name
            out.found[path] = about
            if stat.S_ISDIR(about.st_mode):
                inner.append(path)
    return inner


def attributes_of(descriptor: int, *, privileged: bool = False) -> Attributes:
    """Return the extended attributes that a restore can give back: the user's own, and access
    control lists.

    Args:
        privileged: Also return those that only root can set: capabilities of programs, and
            ``trusted.*``.
    """
    wanted = OF_USERS + (OF_ROOT if privileged else ())
    try:
        names = os.listxattr(descriptor)
    except OSError:  # a file system without any
        return {}
    found = {}
    for name in names:
        if name.startswith(wanted):
            try:
                found[os.fsencode(name)] = os.getxattr(descriptor, name)
            except OSError:
                continue  # removed meanwhile: the status differs, too
    return found
