"""Processes as /proc shows them. A process that is gone raises `NotFound`; no answer is half
filled.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from icecore.errors import IcecoreError, NotFound

PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
MAP_SHARED, MAP_PRIVATE = 1, 2

_PF_KTHREAD = 0x00200000
_PF_EXITING = 0x00000004


class Mapping(msgspec.Struct, frozen=True):
    """One line of /proc/PID/maps. ``protection`` are PROT_ bits, ``flags`` MAP_SHARED or
    MAP_PRIVATE, ``device`` is (major, minor).

    ``vm_flags`` are the two-letter VmFlags of smaps where they were asked for ("lo" locked, "ht"
    hugetlb, "gd" grows down, …).
    """

    start: int
    end: int
    protection: int
    flags: int
    offset: int
    device: tuple[int, int]
    inode: int
    path: str
    vm_flags: frozenset[str] = frozenset()

    @property
    def length(self) -> int:
        """Bytes."""
        return self.end - self.start

    @property
    def private(self) -> bool:
        """Return whether writes stay in this process."""
        return self.flags == MAP_PRIVATE

    @property
    def holds_private_data(self) -> bool:
        """Return whether it is a mapping of a file in which the process may have pages of its own:
        it is private and not executable. Files below /dev and huge pages do not count.
        """
        return (
            self.private
            and self.inode != 0
            and not self.protection & PROT_EXEC
            and self.path.startswith("/")
            and not self.path.startswith(("/dev/", "/anon_hugepage"))
        )

    @property
    def anonymous(self) -> bool:
        """Whether it is private memory of no file, but for stacks and what the kernel put there:
        heaps, arenas, threads' stacks.
        """
        return (
            self.private
            and self.inode == 0
            and (self.path in ("", "[heap]") or self.path.startswith("[anon:"))
        )


#: Start and end of code, start of the stack, start and end of data, start of the heap.
Layout = tuple[int, ...]


class Status(msgspec.Struct, frozen=True):
    """What /proc/PID/status and stat say. Memory in bytes; ``start_time`` in clock ticks after
    boot; ``own_pid`` as seen in its own pid namespace.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int
    user: int
    own_pid: int
    tracer: int
    seccomp: int
    resident: int
    virtual: int
    locked: int
    start_time: int
    kernel_thread: bool

    @property
    def zombie(self) -> bool:
        """Dead, but not yet waited for."""
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """Standing still by a signal or a tracer."""
        return self.state in "Tt"


class Descriptor(msgspec.Struct, frozen=True):
    """An open file of a process. ``target`` is what /proc/PID/fd links to, ``flags`` the open(2)
    flags, ``inode`` and ``device`` of what is open, ``special`` the device that a device file stands
    for, ``locks`` the process's locks set through it, each as a line of /proc/locks (proc(5)).
    """

    number: int
    target: str
    flags: int
    position: int
    mount: int
    mode: int
    device: int
    inode: int
    size: int
    links: int
    special: int
    locks: tuple[str, ...] = ()

    @property
    def writable(self) -> bool:
        """Return whether it was opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@contextmanager
def looking_at(pid: int | str) -> Iterator[None]:
    """Raise `NotFound` where the kernel reports that the process has ended.

    If the process ends after a link of /proc (ns/user, exe, fd/3) was found, the kernel refuses the
    link with EACCES (fs/proc/base.c, proc_pid_get_link), as if this process lacked permission.
    """
    try:
        yield
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"there is no process {pid}") from error
    except PermissionError as error:
        if exists(pid):
            raise
        raise NotFound(f"there is no process {pid}") from error


def exists(pid: int | str) -> bool:
    """Return whether the process exists; a zombie counts."""
    return os.path.exists(f"/proc/{pid}/stat")


def _stat_fields(pid: int, thread: str = "") -> tuple[str, list[str]]:
    """The name, and the fields of stat from the third (state) on; the name may itself hold blanks
    and parentheses.
    """
    with looking_at(pid), open(f"/proc/{pid}/{thread}stat", "rb") as file:
        text = file.read().decode(errors="surrogateescape")
    opening, closing = text.index("("), text.rindex(")")
    return text[opening + 1 : closing], text[closing + 2 :].split()


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks after boot: together with the pid this
    identifies a process for good.
    """
    return int(_stat_fields(pid)[1][19])


def runs(pid: int, started: int) -> bool:
    """Return whether the process with this pid and `start_time` is running. A zombie is not."""
    try:
        fields = _stat_fields(pid)[1]
    except NotFound:
        return False
    return int(fields[19]) == started and fields[0] not in "ZX"


def layout(pid: int) -> Layout:
    """Return the addresses of the program that a process runs. The start of the stack is 0 if the
    process has no memory any more or may not be inspected.
    """
    fields = _stat_fields(pid)[1]
    return tuple(int(fields[at - 3]) for at in (26, 27, 28, 45, 46, 47))  # as in proc(5)


def began(pid: int) -> float:
    """Return when the process started, in seconds since 1970."""
    since_boot = start_time(pid) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def is_kernel_thread(pid: int) -> bool:
    """Return whether it is a kernel thread."""
    return bool(int(_stat_fields(pid)[1][6]) & _PF_KTHREAD)


def is_zombie(pid: int) -> bool:
    """Return whether it is dead but not yet reaped."""
    return _stat_fields(pid)[1][0] in "ZX"


def is_over(pid: int) -> bool:
    """Return whether none of its threads runs the program again: each has ended or is about to. It
    may still be a zombie, or wait for others to end.
    """

    try:
        return all(thread_ends(pid, thread) for thread in threads(pid))
    except NotFound:
        return True


def thread_ends(pid: int, thread: int) -> bool:
    """Return whether a thread has ended or is about to."""
    try:
        return bool(int(_stat_fields(pid, f"task/{thread}/")[1][6]) & _PF_EXITING)
    except NotFound:
        return True


def thread_namespaces(pid: int, thread: int) -> dict[str, int]:
    """Return the inode numbers of the namespaces that one thread of a process can have for itself,
    by kind. A mount namespace is not among them: the thread then also has a working directory of
    its own.
    """
    with looking_at(f"{pid}/task/{thread}"):
        return {
            kind: os.stat(f"/proc/{pid}/task/{thread}/ns/{kind}").st_ino
            for kind in ("cgroup", "ipc", "net", "uts")
        }


def status_fields(pid: int | str, thread: int | str = "") -> dict[str, list[str]]:
    """Return /proc/PID/status, or a thread's: the words of each field but the name, by key.

    The name is the process's own choice. Only a newline ends a line: of what Python counts as line
    ends too, a name may hold any.
    """
    path = f"/proc/{pid}/task/{thread}/status" if thread else f"/proc/{pid}/status"
    with looking_at(pid), open(path, "rb") as file:
        text = file.read().decode("ascii", "replace")
    pairs = (line.partition(":") for line in text.split("\n"))
    return {key: value.split() for key, colon, value in pairs if colon and key != "Name"}


def status(pid: int) -> Status:
    """Return state, parents and sizes of a process."""
    name, stat = _stat_fields(pid)
    fields = status_fields(pid)

    def kilobytes(key: str) -> int:
        return (
            int(fields[key][0]) * 1024 if key in fields else 0
        )  # absent in kernel threads and zombies

    return Status(
        pid=pid,
        name=name,
        state=stat[0],
        parent=int(stat[1]),
        group=int(stat[2]),
        session=int(stat[3]),
        threads=int(stat[17]),
        user=int(fields["Uid"][1]),
        own_pid=int(fields.get("NSpid", [str(pid)])[-1]),
        tracer=int(fields["TracerPid"][0]),
        seccomp=int(fields.get("Seccomp", ["0"])[0]),
        resident=kilobytes("VmRSS"),
        virtual=kilobytes("VmSize"),
        locked=kilobytes("VmLck"),
        start_time=int(stat[19]),
        kernel_thread=bool(int(stat[6]) & _PF_KTHREAD),
    )


def resident_bytes(pid: int) -> int:
    """Return about how much memory a process has in RAM; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def tracer_in_stop(thread: int) -> int:
    """Return the tracer of a thread that is stopped; 0: it has none, or it is not stopped.

    Raises:
        NotFound: There is no such thread.
    """
    with looking_at(thread), open(f"/proc/{thread}/status", "rb") as file:
        text = file.read()
    state = text.find(b"\nState:\t") + 8  # a newline in the name is escaped
    if text[state : state + 1] not in (b"t", b"T"):
        return 0
    at = text.find(b"\nTracerPid:\t", state) + 12
    return int(text[at : text.find(b"\n", at)])


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process, ascending."""
    with looking_at(pid):
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))


def children(pid: int) -> list[int]:
    """Return the direct children of a process, of all its threads, in the order in which each
    thread created them. Zombies count.
    """
    found: list[int] = []
    for thread in threads(pid):
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(int(word) for word in file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # that thread ended: its children went to another one
    return found


def tree(pid: int, *, attempts: int = 50) -> list[int]:
    """Return the process and all its descendants, root first, parents before children.

    Args:
        pid: The root.
        attempts: How often to read; the answer is given once two readings in a row are equal.

    Raises:
        NotFound: There is no such process.
        IcecoreError: The tree kept changing.
    """
    before: list[int] = []
    for _ in range(attempts):
        found = [pid]
        for process in found:
            try:
                found.extend(children(process))
            except NotFound:
                if process == pid:
                    raise
        if found == before:
            return found
        before = found
    raise IcecoreError(
        f"the process tree of {pid} kept changing while it was read",
        cure="stop or slow down what forks, and try again",
    )


_MAPS_LINE = re.compile(
    rb"(?m)^([0-9a-f]+)-([0-9a-f]+) ([r-])([w-])([x-])([sp]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *([^\n]*)"
)


def _path(raw: bytes) -> str:
    if b"\\" in raw:  # the kernel writes a newline as \012; nothing else is escaped
        raw = raw.replace(b"\\012", b"\n")
    return os.fsdecode(raw)


def _exact(pid: int, mapping: Mapping) -> Mapping:
    """Return a mapping with its path as the file has it: maps write a newline like the four
    characters that a name may hold as well.
    """
    if "\n" not in mapping.path:
        return mapping
    try:
        return replace(
            mapping, path=os.readlink(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}")
        )
    except OSError:  # it was unmapped meanwhile, or this process may not look
        return mapping


def _mapping(fields: tuple[bytes, ...], vm_flags: frozenset[str]) -> Mapping:
    start, end, read, write, execute, share, offset, major, minor, inode, path = fields
    return Mapping(
        int(start, 16),
        int(end, 16),
        (read == b"r") * PROT_READ | (write == b"w") * PROT_WRITE | (execute == b"x") * PROT_EXEC,
        MAP_SHARED if share == b"s" else MAP_PRIVATE,
        int(offset, 16),
        (int(major, 16), int(minor, 16)),
        int(inode),
        _path(path),
        vm_flags,
    )


def read_maps(pid: int, *, vm_flags: bool = False) -> list[Mapping]:
    """Return the mappings of a process in address order, without the kernel's own [vsyscall].

    Args:
        pid: The process. A zombie and a kernel thread have none.
        vm_flags: Whether to read the VmFlags too, from smaps, which costs a walk through all page
            tables.
    """
    with looking_at(pid), open(f"/proc/{pid}/{'smaps' if vm_flags else 'maps'}", "rb") as file:
        data = file.read()
    if not vm_flags:
        found = parse_maps(data)
    else:
        sets: dict[bytes, frozenset[str]] = {}
        found = []
        heads = [*_MAPS_LINE.finditer(data)]
        bounds = [*(head.start() for head in heads), len(data)]
        for head, following in zip(heads, bounds[1:], strict=True):
            at = data.find(b"\nVmFlags:", head.end(), following)
            words = data[at + 9 : data.find(b"\n", at + 1)] if at >= 0 else b""
            if words not in sets:
                sets[words] = frozenset(words.decode().split())
            found.append(_mapping(head.groups(), sets[words]))
    return [_exact(pid, mapping) for mapping in found if mapping.path != "[vsyscall]"]


class MapsReader:
    """Reads the mappings of several processes. A line that they have in common is parsed once: a
    fork has nearly all lines of its parent.
    """

    def __init__(self) -> None:
        self._parsed: dict[bytes, Mapping | None] = {}

    def read(self, pid: int) -> list[Mapping]:
        """Return the same as `read_maps`.

        Raises:
            NotFound: There is no such process.
        """
        with looking_at(pid), open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().split(b"\n")
        found = []
        for line in lines:
            try:
                mapping = self._parsed[line]
            except KeyError:
                mapping = self._parsed[line] = next(iter(parse_maps(line)), None)
            if mapping is not None and mapping.path != "[vsyscall]":
                found.append(_exact(pid, mapping))
        return found


def parse_maps(text: bytes) -> list[Mapping]:
    """Parse the lines of a /proc/PID/maps."""
    none: frozenset[str] = frozenset()
    return [_mapping(fields, none) for fields in _MAPS_LINE.findall(text)]


def appeared(
    before: Sequence[Mapping], after: Sequence[Mapping], protection: int = PROT_READ
) -> list[tuple[int, int]]:
    """Return private anonymous memory that a process did not have before, as start and end of each
    piece. The driver puts GPU memory there.

    Args:
        before, after: In address order.
        protection: PROT_ bits that it has at least.
    """

    def counts(mapping: Mapping) -> bool:
        anonymous = mapping.inode == 0 and (mapping.path == "" or mapping.path.startswith("[anon:"))
        return anonymous and mapping.private and mapping.protection & protection == protection

    taken = [(m.start, m.end) for m in before if counts(m)]
    found: list[tuple[int, int]] = []
    first = 0
    for mapping in after:
        if not counts(mapping):
            continue
        at = mapping.start
        while first < len(taken) and taken[first][1] <= at:
            first += 1
        number = first
        while number < len(taken) and taken[number][0] < mapping.end:
            start, end = taken[number]
            if start > at:
                found.append((at, start))
            at, number = max(at, end), number + 1
        if at < mapping.end:
            found.append((at, mapping.end))
    return found


def descriptor_numbers(pid: int) -> list[int]:
    """Return the numbers of a process's open files, ascending."""
    with looking_at(pid):
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))


def descriptors(pid: int) -> list[Descriptor]:
    """Return the open files of a process by number; those that are closed meanwhile are left out."""
    found = []
    for number in descriptor_numbers(pid):
        link = f"/proc/{pid}/fd/{number}"
        try:
            with looking_at(pid):
                target = os.readlink(link)
                about = os.stat(link)
                with open(f"/proc/{pid}/fdinfo/{number}", "rb") as file:
                    lines = [
                        line.split(b":", 1) for line in file.read().splitlines() if b":" in line
                    ]
                info = dict(lines)
        except NotFound:
            continue
        found.append(
            Descriptor(
                number,
                target,
                int(info[b"flags"], 8),
                int(info[b"pos"]),
                int(info.get(b"mnt_id", b"0")),
                about.st_mode,
                about.st_dev,
                about.st_ino,
                about.st_size,
                about.st_nlink,
                about.st_rdev,
                tuple(value.decode().strip() for key, value in lines if key == b"lock"),
            )
        )
    if not found and not exists(pid):
        raise NotFound(f"there is no process {pid}")
    return found


def namespaces(pid: int) -> dict[str, int]:
    """Return the inode numbers of a process's namespaces by kind ("net", "pid", "mnt", …): equal
    numbers are one namespace.
    """
    with looking_at(pid):
        found = {}
        for kind in os.listdir(f"/proc/{pid}/ns"):
            try:
                found[kind] = os.stat(f"/proc/{pid}/ns/{kind}").st_ino
            except FileNotFoundError:
                if kind != "pid_for_children":  # there is none until the first child was made in it
                    raise
        return found


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process as it shows them; empty for kernel threads and zombies."""
    with looking_at(pid), open(f"/proc/{pid}/cmdline", "rb") as file:
        data = file.read()
    return [os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")] if data else []


class Mount(msgspec.Struct, frozen=True):
    """One line of /proc/PID/mountinfo: the mount's id, where it is, and the type of its file
    system.
    """

    id: int
    point: str
    kind: str


def mounts(pid: int | str = "self") -> list[Mount]:
    """Return the mounts that a process sees, in the kernel's order."""
    found = []
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        for line in file.read().split(b"\n"):
            before, separator, after = line.partition(b" - ")
            if separator:  # blanks, newlines and backslashes within a name are escaped
                words = before.split(b" ")
                kind = os.fsdecode(after.split(b" ", 1)[0])
                found.append(Mount(int(words[0]), unescaped(words[4]), kind))
    return found


def unescaped(name: bytes) -> str:
    """Return a path of mountinfo, in which blanks, newlines and backslashes are octal escapes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), name))


def executable(pid: int) -> str:
    """Return the path of a process's program; empty for kernel threads and zombies."""
    with looking_at(pid):
        try:
            return os.readlink(f"/proc/{pid}/exe")
        except FileNotFoundError:
            if not exists(pid):
                raise
            return ""
