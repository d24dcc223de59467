"""CRIU's image files, typed. Fields are read by number, which CRIU keeps stable, so images of every
version from 4.0 on are understood.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.host.criu.pagemap_image import read_whole
from icecore.host.criu.protobuf import Message, WireError, decode_columns, read_varint

COMMON, SERVICE = 0x54564319, 0x55105940
INVENTORY, PSTREE, CORE, MM, FILES, FDINFO = (
    0x58313116,
    0x50273030,
    0x55053847,
    0x57492820,
    0x56303138,
    0x56213732,
)
REMAP_FPATH, GHOST_FILE, STATS = 0x59133954, 0x52583605, 0x57093306
SK_QUEUES = 0x56264026

#: VmaEntry.status bits (criu/include/image.h).
VMA_REGULAR = 1 << 0
VMA_STACK, VMA_VSYSCALL, VMA_VDSO, VMA_HEAP = 1 << 1, 1 << 2, 1 << 3, 1 << 5
VMA_FILE_PRIVATE, VMA_FILE_SHARED, VMA_ANON_SHARED, VMA_ANON_PRIVATE = (
    1 << 6,
    1 << 7,
    1 << 8,
    1 << 9,
)
VMA_SYSVIPC, VMA_SOCKET, VMA_VVAR, VMA_AIORING = (
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 13,
)
#: No mapping: guard pages (MADV_GUARD_INSTALL) within one. They come after all others.
VMA_GUARD = 1 << 16
#: The mapping is made without write access, because it gets no pages.
VMA_NO_WRITE = 1 << 29

MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS = 0x1, 0x2, 0x20
MAP_GROWSDOWN, MAP_LOCKED, MAP_HUGETLB = 0x100, 0x2000, 0x40000

#: One VMA of a mm image. ``shmid`` is the file's id for file mappings, the shared memory's for
#: shared anonymous ones.
VMA = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("offset", "<u8"),
        ("shmid", "<u8"),
        ("protection", "<u4"),
        ("flags", "<u4"),
        ("status", "<u4"),
        ("madvise", "<u8"),
    ]
)
Vmas = npt.NDArray[np.void]

ALIVE, DEAD, STOPPED = 1, 2, 3

#: Of an mm image: bytes before its message, and the number of the field of a VMA.
MM_HEAD, MM_VMA = 12, 14

#: file_entry.type of a regular file (images/fdinfo.proto).
REGULAR_FILE = 1

#: How a file without a name comes back (images/remap-file-path.proto): from another file's name or
#: from a copy of its content.
LINKED, GHOST = 0, 1


def read_image(path: Path, magic: int) -> list[Message]:
    """Return the messages of an image that has no extra bytes between them.

    Raises:
        Damaged: It is not of this kind, or is cut off.
        FileNotFoundError: It is not there.
    """
    return decode_image(read_whole(path), magic, path.name)


def decode_image(data: bytes, magic: int, name: str) -> list[Message]:
    """Decode the bytes of an image as `read_image` does."""
    try:
        first, second = struct.unpack_from("<II", data)
        if first in (COMMON, SERVICE):
            first, at = second, 8
        else:
            at = 4  # the inventory has one magic only
        if first != magic:
            raise WireError("wrong magic")
        messages = []
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4
            if size > len(data) - at:
                raise WireError("cut off")
            messages.append(Message.decode(data[at : at + size]))
            at += size
    except (WireError, struct.error) as error:
        raise Damaged("image", name, str(error)) from error
    return messages


def encode_image(messages: list[Message], magic: int) -> bytes:
    """Return an image file that contains the messages."""
    out = bytearray()
    if magic != INVENTORY:
        out += struct.pack("<I", SERVICE if magic == STATS else COMMON)
    out += struct.pack("<I", magic)
    for message in messages:
        body = message.encode()
        out += struct.pack("<I", len(body)) + body
    return bytes(out)


def write_image(path: Path, messages: list[Message], magic: int) -> None:
    """Write `encode_image` to a file."""
    path.write_bytes(encode_image(messages, magic))


class Task(msgspec.Struct, frozen=True):
    """A process of the tree. Its ids are those of its pid namespace, by which images are named."""

    pid: int
    parent: int
    group: int
    session: int
    threads: list[int]


class Core(msgspec.Struct, frozen=True):
    """The content of core-N.img: the process's name, ALIVE, DEAD or STOPPED, and the exit code of a
    dead one.
    """

    command: str
    state: int
    exit_code: int


class AddressSpace(msgspec.Struct, frozen=True):
    """The content of mm-N.img: VMAs in address order, the file id of the program, and the bounds of
    heap and arguments.
    """

    vmas: Vmas
    executable: int
    stack: int
    heap: tuple[int, int]
    arguments: tuple[int, int]
    environment: tuple[int, int]

    def lazy(self) -> npt.NDArray[np.bool_]:
        """Return, for each VMA, whether CRIU restores its pages through userfaultfd
        (vma_entry_can_be_lazy in criu/include/vma.h).

        Within such a VMA only the pages that a thread's stack pointer is in are not lazy: the
        pagemap says which.
        """
        flags, status = self.vmas["flags"], self.vmas["status"]
        wanted = MAP_ANONYMOUS | MAP_PRIVATE
        refused = MAP_LOCKED | MAP_HUGETLB
        lazy: npt.NDArray[np.bool_] = (flags & (wanted | refused)) == wanted
        lazy &= (status & (VMA_VDSO | VMA_VVAR | VMA_VSYSCALL)) == 0
        return lazy


class RegularFile(msgspec.Struct, frozen=True):
    """A regular file (or folder) of files.img. ``size`` is None where CRIU does not check it at
    restore; ``external`` ones come from outside.
    """

    id: int
    path: str
    flags: int
    position: int
    size: int | None
    mode: int
    mount: int
    external: bool


class Remap(msgspec.Struct, frozen=True):
    """A file that had no name any more: file ``original`` is restored from ``target``, a ghost
    image (GHOST) or another file (LINKED).
    """

    original: int
    target: int
    kind: int


def load_pstree(folder: Path) -> list[Task]:
    """Return the processes, parents before children."""
    return [
        Task(m.integer(1), m.integer(2), m.integer(3), m.integer(4), m.integers(5))
        for m in read_image(folder / "pstree.img", PSTREE)
    ]


def load_core(folder: Path, pid: int) -> Core:
    """Return the content of core-PID.img (the main thread)."""
    (message,) = read_image(folder / f"core-{pid}.img", CORE)
    task = message.message(3)
    return Core(task.text(6), task.integer(1), task.signed(2))


class Credentials(msgspec.Struct, frozen=True):
    """The credentials of a thread.

    Attributes:
        process: The id in the image's name, which is the thread's.
        users: Its real, effective, saved and file system user.
        group: Its effective group.
        groups: All its groups.
        capable: Whether it has capabilities.
    """

    process: int
    users: frozenset[int]
    group: int
    groups: frozenset[int]
    capable: bool


def load_credentials(folder: Path) -> list[Credentials]:
    """Return the credentials of all threads.

    Raises:
        Damaged: An image lacks them.
    """
    found = []
    for path in sorted(folder.glob("core-*.img")):
        (core,) = read_image(path, CORE)
        if not core.has(5):
            continue  # a process that has ended
        thread = core.message(5)
        if not thread.has(10):
            raise Damaged("image", path.name, "it has no credentials")
        own = thread.message(10)
        found.append(
            Credentials(
                int(path.stem.removeprefix("core-")),
                frozenset(own.integer(number) for number in (1, 3, 5, 7)),
                own.integer(4),
                frozenset([*(own.integer(number) for number in (2, 4, 6, 8)), *own.integers(14)]),
                any(word for number in (9, 10, 11, 19) for word in own.integers(number)),
            )
        )
    return found


class RseqAreas:
    """The threads' rseq areas (struct rseq), where the kernel stores processor numbers.

    Args:
        folder: The image directory. CRIU may still be writing: it only appends to an image.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[int, list[int]]] = {}

    def look(self) -> None:
        """Read the images that are complete so far."""
        for name, size in self._sizes().items():
            with suppress(Damaged):
                self._read(name, size)

    def addresses(self) -> list[int]:
        """Return the addresses of the areas of all threads that registered one.

        Raises:
            Damaged: An image is malformed.
        """
        return sorted(
            area for name, size in self._sizes().items() for area in self._read(name, size)
        )

    def _sizes(self) -> dict[str, int]:
        with os.scandir(self._folder) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if entry.name.startswith("core-") and entry.name.endswith(".img")
            }

    def _read(self, name: str, size: int) -> list[int]:
        if self._found.get(name, (-1, []))[0] != size:
            self._found[name] = size, _rseq_areas(self._folder / name)
        return self._found[name][1]


def _rseq_areas(path: Path) -> list[int]:
    cores = read_image(path, CORE)
    if len(cores) != 1:
        raise Damaged("image", path.name, "it is not complete")
    (core,) = cores
    if core.has(5) and (thread := core.message(5)).has(15):
        return [thread.message(15).integer(1)]
    return []


def load_mm(folder: Path, pid: int) -> AddressSpace:
    """Return the address space of a process; 20 000 VMAs take a few hundredths of a second."""
    path = folder / f"mm-{pid}.img"
    data = read_whole(path)
    try:
        magic, kind, size = struct.unpack_from("<III", data)
        if (magic, kind) != (COMMON, MM) or size != len(data) - MM_HEAD:
            raise WireError("wrong magic or length")
        start, end, rest = [], [], bytearray()
        at, one = MM_HEAD, MM_VMA << 3 | 2
        while at < len(data):
            # Nearly all fields are VMAs, of less than 128 bytes.
            if (
                data[at] == one
                and at + 1 < len(data)
                and data[at + 1] <= min(127, len(data) - at - 2)
            ):
                start.append(at + 2)
                at += 2 + data[at + 1]
                end.append(at)
                continue
            begin = at
            key, at = read_varint(data, at)
            if key & 7 == 0:
                _, at = read_varint(data, at)
            elif key & 7 == 2:
                length, at = read_varint(data, at)
                if length > len(data) - at:
                    raise WireError("cut off")
                at += length
                if key >> 3 == MM_VMA:
                    start.append(at - length)
                    end.append(at)
                    continue
            else:
                raise WireError("an unknown kind of field")
            rest += data[begin:at]
        columns = decode_columns(
            data, np.array(start, np.int64), np.array(end, np.int64), (1, 2, 3, 4, 5, 6, 7, 9)
        )
        mm = Message.decode(bytes(rest))
    except (WireError, struct.error) as error:
        raise Damaged("image", path.name, str(error)) from error
    vmas = np.zeros(len(start), VMA)
    for number, name in {
        1: "start",
        2: "end",
        3: "offset",
        4: "shmid",
        5: "protection",
        6: "flags",
        7: "status",
        9: "madvise",
    }.items():
        vmas[name] = columns[number]
    return AddressSpace(
        vmas,
        mm.integer(12),
        mm.integer(5),
        (mm.integer(6), mm.integer(7)),
        (mm.integer(8), mm.integer(9)),
        (mm.integer(10), mm.integer(11)),
    )


def load_files(folder: Path) -> list[RegularFile]:
    """Return the regular files that any process has open, mapped or runs from."""
    found = []
    for entry in read_image(folder / "files.img", FILES):
        if entry.integer(1) == REGULAR_FILE:
            m = entry.message(3)
            size = m.integer(8) if m.has(8) else None
            found.append(
                RegularFile(
                    m.integer(1),
                    m.text(6),
                    m.integer(2),
                    m.integer(3),
                    size,
                    m.integer(10),
                    m.zigzag(7, -1),
                    bool(m.integer(9)),
                )
            )
    return found


def load_remaps(folder: Path) -> list[Remap]:
    """Return how files without a name are restored; empty if there are none."""
    path = folder / "remap-fpath.img"
    if not path.exists():
        return []
    return [Remap(m.integer(1), m.integer(2), m.integer(3)) for m in read_image(path, REMAP_FPATH)]


def pagemaps(folder: Path) -> tuple[list[int], list[int]]:
    """Return the numbers of the pagemap images: of processes (pagemap-N.img, N the pid) and of
    shared memory (pagemap-shmem-N.img).
    """
    processes, shared = [], []
    for path in folder.glob("pagemap-*.img"):
        number = path.stem.removeprefix("pagemap-")
        if number.isdecimal():
            processes.append(int(number))
        elif number.startswith("shmem-"):
            shared.append(int(number.removeprefix("shmem-")))
    return sorted(processes), sorted(shared)
