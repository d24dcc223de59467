"""The POSIX locks of files in CRIU's images (images/file-lock.proto).

CRIU (4.0 to 4.2: criu/files.c, do_dump_gen_file) omits the locks of a process that inherited the open
file: it takes them for locks of the process in which it saw the open file first. Locks of other kinds
belong to the open file, but a POSIX lock (fcntl(2), F_SETLK) belongs to the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from icecore.host.criu.images import read_image, write_image
from icecore.host.criu.protobuf import Message
from icecore.host.kernel.procfs import Descriptor

_NAME, _MAGIC = "filelocks.img", 0x54323616
_KIND, _MODE, _PROCESS, _DESCRIPTOR, _START, _LENGTH = range(1, 7)
_VARINT, _POSIX = 0, 1
#: F_RDLCK, F_WRLCK.
_MODES = {"READ": 0, "WRITE": 1}


def write_posix_locks(folder: Path, opened: Mapping[int, Sequence[Descriptor]]) -> None:
    """Write the POSIX locks of all processes into the images of a finished dump.

    Args:
        opened: Image id of each process → its descriptors while it stood still.
    """
    entries = [
        Message([(number, _VARINT, value) for number, value in enumerate(lock, 1)])
        for process, descriptors in opened.items()
        for lock in _of_process(process, descriptors)
    ]
    if not entries:
        return
    path = folder / _NAME
    entries += [e for e in read_image(path, _MAGIC) if e.integer(_KIND) != _POSIX]
    path.unlink()  # it may be shared with the repository
    write_image(path, entries, _MAGIC)


def _of_process(process: int, descriptors: Sequence[Descriptor]) -> Iterator[tuple[int, ...]]:
    """Yield the fields of each lock once; every descriptor of its open file shows the lock."""
    seen = set()
    for one in descriptors:
        for lock in one.locks:
            _, kind, _, mode, _, file, start, end = lock.split()
            key = one.device, file, start, end  # the kernel shows one device for a whole Btrfs
            if kind != "POSIX" or key in seen:
                continue
            seen.add(key)
            length = 0 if end == "EOF" else int(end) + 1 - int(start)
            yield _POSIX, _MODES[mode], process, one.number, int(start), length
