"""Edit CRIU's images before a restore. Fields that an edit does not name stay as they were dumped.

Mounts are in mountpoints-N.img (CRIU's images/mnt.proto), mappings in mm-N.img (mm.proto, vma.proto),
open files in files.img (fdinfo.proto, regfile.proto, timerfd.proto), limits in core-N.img (core.proto,
rlimit.proto).
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from icecore.errors import RestoreRefused
from icecore.host.criu.images import (
    CORE,
    FILES,
    MAP_ANONYMOUS,
    MM_HEAD,
    MM_VMA,
    REGULAR_FILE,
    VMA_ANON_PRIVATE,
    VMA_FILE_PRIVATE,
    VMA_GUARD,
    VMA_NO_WRITE,
    Vmas,
    read_image,
    write_image,
)
from icecore.host.criu.pagemap_image import read_whole
from icecore.host.criu.protobuf import Message

MOUNTS = 0x55563928

_ID, _PARENT, _ROOT, _POINT, _SHARED, _MASTER, _KEY = 2, 4, 6, 7, 10, 11, 18
_VARINT, _BYTES = 0, 2
_VMA_START, _VMA_END, _VMA_OFFSET, _VMA_FILE, _VMA_FLAGS, _VMA_STATUS = 1, 2, 3, 4, 6, 7
_ENTRY_TYPE, _ENTRY_FILE, _ENTRY_TIMER = 1, 3, 12
_FILE_NAME, _FILE_SIZE = 6, 8
#: images/timerfd.proto: seconds and nanoseconds; TFD_TIMER_ABSTIME.
_TIMER, _TICKS, _TIMER_FLAGS, _VALUE, _INTERVAL, _ABSTIME = 17, 5, 6, (7, 8), (9, 10), 1
_TASK, _TASK_LIMITS, _LIMITS, _SOFT, _HARD = 3, 8, 1, 1, 2
_TASK_SIGNALS, _THREAD, _THREAD_SIGNALS, _SIGNAL, _SIGINFO = 10, 5, 9, 1, 1
_UNLIMITED = (1 << 64) - 1


def add_external_mounts(folder: Path, names: Mapping[str, str]) -> None:
    """Add external mounts of single files.

    Args:
        folder: CRIU's images.
        names: Path of a file in the root → the name under which ``criu restore --external`` says
            what is mounted there.

    Raises:
        RestoreRefused: There are several mount namespaces: processes in the others would not see
            the mounts.
    """
    images = sorted(folder.glob("mountpoints-*.img"))
    if len(images) != 1:
        raise RestoreRefused(
            f"the job has {len(images)} mount namespaces: only its first process could get copies of files",
            cure="choose --files restore or leave",
        )
    mounts = read_image(images[0], MOUNTS)
    number = max(mount.integer(_ID) for mount in mounts)
    points = {
        _point(mount): mount for mount in reversed(mounts)
    }  # newest first: of those at one point the newest is on top
    for path, name in names.items():
        number += 1
        parent = points[max((point for point in points if _is_below(path, point)), key=len)]
        mounts.insert(0, _external(parent, number, path, name))
    write_image(images[0], mounts, MOUNTS)


def _point(mount: Message) -> str:
    return os.fsdecode(mount.raw(_POINT))


def _is_below(path: str, point: str) -> bool:
    return point == "/" or path.startswith(f"{point}/")


def _external(parent: Message, number: int, path: str, name: str) -> Message:
    """Return a mount like its parent, but external and without peers."""
    changed = (_ID, _PARENT, _ROOT, _POINT, _SHARED, _MASTER, _KEY)
    fields = [one for one in parent.fields if one[0] not in changed]
    fields += [
        (_ID, _VARINT, number),
        (_PARENT, _VARINT, parent.integer(_ID)),
        (_ROOT, _BYTES, os.fsencode(path)),
        (_POINT, _BYTES, os.fsencode(path)),
        (_KEY, _BYTES, name.encode()),
    ]
    return Message(sorted(fields, key=lambda one: one[0]))


def map_in_place(folder: Path, pid: int, starts: Collection[int]) -> None:
    """Have CRIU map private anonymous memory without pages at its address, once the address space
    of the process is built.

    CRIU (criu/mem.c, prepare_mappings) first makes room for all private memory in one block
    elsewhere, and later moves each mapping to its place. A process that has reserved much of its
    address space has no such room. Without VMA_ANON_PRIVATE a mapping is made directly at its
    address (criu/pie/restorer.c, restore_mapping): it gets no pages and no userfaultfd, and a child
    does not inherit it from CRIU's copy of its parent.

    Args:
        starts: Where the mappings begin.
    """
    _change_vmas(
        folder,
        pid,
        starts,
        lambda vma: [
            _changed(
                vma,
                {_VMA_STATUS: vma.integer(_VMA_STATUS) & ~VMA_ANON_PRIVATE | VMA_NO_WRITE},
            )
        ],
    )


def map_file(
    folder: Path, pid: int, vmas: Vmas, pieces: Sequence[tuple[int, int, int]], file: int
) -> None:
    """Have CRIU map a file, privately, where a process had private anonymous memory.

    Args:
        vmas: Of the process (`load_mm`).
        pieces: Start, end, and what of the file it begins with, each within one VMA; what is left
            of that stays anonymous.
        file: The file's id (`add_file`).
    """
    vmas = vmas[vmas["status"] & VMA_GUARD == 0]
    within: dict[int, list[tuple[int, int, int]]] = {}
    for piece in pieces:
        at = int(np.searchsorted(vmas["start"], piece[0], side="right")) - 1
        assert at >= 0 and piece[1] <= int(vmas["end"][at]), "a piece lies in one VMA"
        within.setdefault(int(vmas["start"][at]), []).append(piece)
    _change_vmas(
        folder, pid, within, lambda vma: list(_cut(vma, within[vma.integer(_VMA_START)], file))
    )


def _change_vmas(
    folder: Path, pid: int, starts: Collection[int], change: Callable[[Message], list[bytes]]
) -> None:
    """Put what ``change`` returns in place of the VMAs that begin there."""
    path = folder / f"mm-{pid}.img"
    data = read_whole(path)
    mm = Message.decode(memoryview(data)[MM_HEAD:])
    begins = {Message([(_VMA_START, _VARINT, start)]).encode() for start in starts}
    lengths = {len(begin) for begin in begins}  # so that few of many VMAs are decoded
    fields: list[tuple[int, int, int | bytes]] = []
    for field in mm.fields:
        number, kind, value = field
        if (
            number == MM_VMA
            and isinstance(value, bytes)
            and any(value[:length] in begins for length in lengths)
        ):
            vma = Message.decode(value)
            if vma.integer(_VMA_START) in starts and not vma.integer(_VMA_STATUS) & VMA_GUARD:
                fields += [(number, kind, part) for part in change(vma)]
                continue
        fields.append(field)
    body = Message(fields).encode()
    path.unlink()
    path.write_bytes(data[: MM_HEAD - 4] + struct.pack("<I", len(body)) + body)


def _cut(vma: Message, pieces: Sequence[tuple[int, int, int]], file: int) -> Iterator[bytes]:
    """Yield the parts of a VMA of private anonymous memory, in address order: pieces (start, end,
    offset) of a file, and the rest.
    """
    at, last = vma.integer(_VMA_START), vma.integer(_VMA_END)
    for start, end, offset in sorted(pieces):
        if at < start:
            yield _changed(vma, {_VMA_START: at, _VMA_END: start})
        yield _changed(
            vma,
            {
                _VMA_START: start,
                _VMA_END: end,
                _VMA_OFFSET: offset,
                _VMA_FILE: file,
                _VMA_FLAGS: vma.integer(_VMA_FLAGS) & ~MAP_ANONYMOUS,
                _VMA_STATUS: vma.integer(_VMA_STATUS) & ~VMA_ANON_PRIVATE | VMA_FILE_PRIVATE,
            },
        )
        at = end
    if at < last:
        yield _changed(vma, {_VMA_START: at, _VMA_END: last})


def _changed(message: Message, values: Mapping[int, int]) -> bytes:
    changed = Message(list(message.fields))
    for number, value in values.items():
        changed.set(number, value)
    return changed.encode()


def add_file(folder: Path, name: str) -> int:
    """Add a regular file of that name to files.img, which CRIU receives as a descriptor
    (``--inherit-fd``), and return its id.
    """
    entries = read_image(folder / "files.img", FILES)
    free = 1 + max((entry.integer(2) for entry in entries), default=0)
    owner = Message([(number, 0, 0) for number in range(1, 6)])
    file = Message(
        [
            (1, 0, free),
            (2, 0, os.O_RDWR),
            (3, 0, 0),
            (5, 2, owner.encode()),
            (6, 2, f"/{name}".encode()),
        ]
    )
    (folder / "files.img").unlink()
    write_image(
        folder / "files.img",
        [*entries, Message([(1, 0, REGULAR_FILE), (2, 0, free), (3, 2, file.encode())])],
        FILES,
    )
    return free


def forget_sizes(folder: Path, paths: Set[str]) -> None:
    """Make CRIU open regular files whatever their size is at the restore.

    Args:
        folder: CRIU's images.
        paths: The files.
    """
    if not paths:
        return
    entries = read_image(folder / "files.img", FILES)
    for entry in entries:
        if (
            entry.integer(_ENTRY_TYPE) == REGULAR_FILE
            and (file := entry.message(_ENTRY_FILE)).text(_FILE_NAME) in paths
        ):
            entry.set(_ENTRY_FILE, Message([one for one in file.fields if one[0] != _FILE_SIZE]))
    (folder / "files.img").unlink()  # it may be shared with the repository
    write_image(folder / "files.img", entries, FILES)


def rearm_timers(folder: Path) -> None:
    """Make timers of timerfd_create(2) continue as they would have without the dump.

    The kernel shows the time that a timer has left, and 0 for one that has expired: it arms a
    periodic timer again only when the timer is read. CRIU (criu/pie/restorer.c, timerfd_arm) takes
    0 for a disarmed timer. It sets an absolute timer to the current time, without its fraction of a
    second, plus the time left: up to a second too early.

    Args:
        folder: CRIU's images.
    """
    entries = read_image(folder / "files.img", FILES)
    changed = False
    for entry in entries:
        if entry.integer(_ENTRY_TYPE) != _TIMER or not entry.has(_ENTRY_TIMER):
            continue
        timer = entry.message(_ENTRY_TIMER)
        value, interval = ([timer.integer(n) for n in both] for both in (_VALUE, _INTERVAL))
        if timer.integer(_TICKS) and any(interval) and not any(value):
            for number, part in zip(_VALUE, interval, strict=True):
                timer.set(number, part)
        elif timer.integer(_TIMER_FLAGS) != _ABSTIME or not any(value):
            continue
        # With TFD_TIMER_CANCEL_ON_SET it must stay absolute.
        if timer.integer(_TIMER_FLAGS) == _ABSTIME:
            timer.set(_TIMER_FLAGS, 0)
        entry.set(_ENTRY_TIMER, timer)
        changed = True
    if changed:
        (folder / "files.img").unlink()  # it may be shared with the repository
        write_image(folder / "files.img", entries, FILES)


def forget_signals(folder: Path, process: int) -> None:
    """Remove the pending signals of a job's init, except SIGCHLD.

    The init received them in the window, and would pass them on to the command. They were meant for
    the instance that was running then. A signal that asked it to end would end each restored
    instance.

    Args:
        folder: CRIU's images.
        process: The init's image id.
    """
    path = folder / f"core-{process}.img"
    (core,) = read_image(path, CORE)
    changed = False
    for part, queue in ((_TASK, _TASK_SIGNALS), (_THREAD, _THREAD_SIGNALS)):
        if not core.has(part) or not core.message(part).has(queue):
            continue
        owner = core.message(part)
        pending = owner.message(queue).messages(_SIGNAL)
        kept = [one for one in pending if _number(one) == signal.SIGCHLD]
        if len(kept) == len(pending):
            continue
        owner.set(queue, Message([(_SIGNAL, _BYTES, one.encode()) for one in kept]))
        core.set(part, owner)
        changed = True
    if changed:
        path.unlink()  # it may be shared with the repository
        write_image(path, [core], CORE)


def _number(pending: Message) -> int:
    """Return the number of a signal: siginfo_t begins with it."""
    return int.from_bytes(pending.raw(_SIGINFO)[:4], sys.byteorder)


def bound_limits(
    folder: Path, most: Mapping[int, int], unsaid: int = 0
) -> dict[int, tuple[int, int]]:
    """Bound the limits (setrlimit(2)) of all processes.

    CRIU (criu/pie/restorer.c, restore_rlims) ignores that a hard limit cannot be raised, and then
    leaves the soft limit too at what CRIU itself has.

    Args:
        folder: CRIU's images.
        most: Number of a limit → the highest hard limit.
        unsaid: A process whose limits need no mention; 0: none.

    Returns:
        Number of each limit that was lowered → the highest hard limit that a process had, and the
        one that it gets; `_UNLIMITED` is -1 there.
    """
    lowered: dict[int, tuple[int, int]] = {}
    for path in sorted(folder.glob("core-*.img")):
        entries = read_image(path, CORE)
        changed = False
        for entry in entries:
            task = entry.message(_TASK)
            limits = task.message(_TASK_LIMITS)
            values = limits.messages(_LIMITS)
            for number, value in enumerate(values):
                bound = most.get(number)
                if bound is None or value.integer(_HARD) <= bound:
                    continue
                if path.name != f"core-{unsaid}.img":
                    before = max(value.integer(_HARD), lowered.get(number, (0, 0))[0])
                    lowered[number] = (before, bound)
                value.set(_HARD, bound)
                value.set(_SOFT, min(bound, value.integer(_SOFT)))
                changed = True
            if changed:
                packed = [(_LIMITS, _BYTES, value.encode()) for value in values]
                task.set(_TASK_LIMITS, Message([*packed]))
                entry.set(_TASK, task)
        if changed:
            path.unlink()  # it may be shared with the repository
            write_image(path, entries, CORE)
    return {
        number: (-1 if before == _UNLIMITED else before, bound)
        for number, (before, bound) in lowered.items()
    }
