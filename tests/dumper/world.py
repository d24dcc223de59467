"""What the tests of whole dumps share: running programs, a repository, a record of the frozen tree,
and reading back a snapshot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.dumper.dump import DumpResult, dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.stopping import StopRequest
from icecore.dumper.target import Target
from icecore.errors import NotFound
from icecore.events import Event
from icecore.host.criu.program import Criu
from icecore.host.kernel import procfs
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.backend.local import LocalBackend
from icecore.store.format.manifest import Manifest, Space
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_PRESENT, _SWAPPED = np.uint64(1 << 63), np.uint64(1 << 62)
#: What the kernel makes anew in every process, and no snapshot holds.
_KERNELS_OWN = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]")

Hook = Callable[[Event], None]
Pages = dict[int, bytes]


class Events:
    """A sink that keeps everything and runs hooks: ``hooks["dump.files", "begin"]`` is called in
    the window, in the dumper's own thread.
    """

    def __init__(self, hooks: Mapping[tuple[str, str], Hook] | None = None) -> None:
        self.all: list[Event] = []
        self.hooks = dict(hooks or {})

    def __call__(self, event: Event) -> None:
        self.all.append(event)
        hook = self.hooks.get((event.name, str(event.fields.get("state", ""))))
        if hook is not None:
            hook(event)

    def named(self, name: str) -> list[Event]:
        """Return the events of one name."""
        return [event for event in self.all if event.name == name]

    def progress(self, name: str) -> list[tuple[int, int]]:
        """Return the progress that a phase reported: (bytes, of how many)."""
        told = [event.fields for event in self.named(name) if event.fields["state"] == "progress"]
        return [(fields["bytes"], fields["total"]) for fields in told]  # type: ignore[misc]

    def names(self) -> set[str]:
        """Return the names of all events."""
        return {event.name for event in self.all}


@dataclass
class Store:
    """A repository and its event loop."""

    loop: LoopThread
    backend: Backend
    repository: StoredRepository
    workdir: Path
    gpu_shared: bool = False

    @classmethod
    def make(
        cls, loop: LoopThread, root: Path, workdir: Path, *, gpu_shared: bool = False
    ) -> Store:
        """Make a new repository in a local directory. ``gpu_shared``: option of all dumps, which
        share no device memory.
        """

        async def create() -> tuple[Backend, StoredRepository]:
            backend = LocalBackend(root, create=True)
            return backend, await StoredRepository.create(backend)

        return cls(loop, *loop.run(create()), workdir, gpu_shared)

    def through(self, backend: Backend) -> Store:
        """Open the same repository through another back end."""

        async def reopen() -> StoredRepository:
            return await StoredRepository.open(backend)

        return Store(self.loop, backend, self.loop.run(reopen()), self.workdir, self.gpu_shared)

    def dump(
        self,
        target: Target | int,
        options: DumpOptions | None = None,
        *,
        events: Events | None = None,
        criu: Criu | None = None,
        stopping: StopRequest | None = None,
    ) -> DumpResult:
        """Dump, and check that nothing is left behind."""
        if isinstance(target, int):
            target = Target.of_process(target, "job")
        options = replace(options or DumpOptions(), gpu_shared=self.gpu_shared)
        return dump(
            self.repository,
            self.loop,
            target,
            options,
            criu=criu,
            workdir=str(self.workdir),
            stopping=stopping,
            emit=events or Events(),
        )

    def snapshots(self) -> list[str]:
        """Return the ids of the listed snapshots."""
        return [record.snapshot for record in self.loop.run(self.repository.snapshots())]

    def read(self, snapshot: str) -> Recorded:
        """Open a snapshot for reading."""
        return Recorded(SnapshotReader.open(self.repository, snapshot, self.loop.loop))

    def bytes(self) -> int:
        """Return the bytes that the repository takes on disk."""
        assert isinstance(self.backend, LocalBackend)
        return sum(path.stat().st_size for path in self.backend.root.rglob("*") if path.is_file())


class Recorded:
    """A snapshot's content, read back cell by cell; the reader verifies each one."""

    def __init__(self, reader: SnapshotReader) -> None:
        self.reader = reader

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest."""
        return self.reader.manifest

    def space(self, kind: str, key: str) -> Space:
        """Return a space by kind and key."""
        return next(s for s in self.manifest.spaces if (s.kind, s.key) == (kind, key))

    def keys(self, kind: str) -> list[str]:
        """Return the keys of the spaces of a kind."""
        return [s.key for s in self.manifest.spaces if s.kind == kind]

    def runs(self, space: Space) -> Iterator[tuple[int, bytes]]:
        """Yield ``(address, bytes)`` for every run of recorded pages, zero pages included."""
        room = memoryview(bytearray(CELL_BYTES))
        for region, records in zip(space.regions, self.reader.records(space), strict=True):
            for record in records:
                data = np.unpackbits(record["data"], bitorder="little").astype(bool)
                zero = np.unpackbits(record["zero"], bitorder="little").astype(bool)
                assert not (data & zero).any()
                whole = np.zeros((CELL_PAGES, PAGE), np.uint8)
                content = np.frombuffer(self.reader.read_cell(record, room), np.uint8).reshape(
                    -1, PAGE
                )
                whole[data] = content
                base = region.origin + int(record["cell"]) * CELL_BYTES
                for first, pages in page_runs(data | zero):
                    start = base + first * PAGE
                    assert (
                        region.start <= start
                        and start + pages * PAGE <= region.start + region.length
                    )
                    yield start, whole[first : first + pages].tobytes()

    def pages(self, space: Space) -> Pages:
        """Map addresses to pages."""
        found: Pages = {}
        for start, data in self.runs(space):
            for at in range(0, len(data), PAGE):
                assert start + at not in found
                found[start + at] = data[at : at + PAGE]
        return found

    def content(self, kind: str, key: str) -> bytes:
        """Return the bytes of a file, an image or a shared memory object; holes are zeros."""
        space = self.space(kind, key)
        size = space.size if kind != "shared" else sum(r.length for r in space.regions)
        out = bytearray(-(-size // PAGE) * PAGE)
        for start, data in self.runs(space):
            out[start : start + len(data)] = data
        return bytes(out[:size])


def page_runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs of true values as ``(first, count)``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@dataclass
class Stillness:
    """A tree as it stood in the window, read by other means than the dumper's.

    Attributes:
        pages: Host pid → address → page, of every page that a process has mapped.
        needed: Host pid → addresses of those that would not come back by themselves (as zeros, or
            as what their file holds): a snapshot must have them. Pages of shared memory are their
            object's, and not among them.
        mappings: Host pid → mappings.
        files: Path → bytes, of the files that were asked for.
        states: Host pid → the letter in /proc/PID/stat.
    """

    pages: dict[int, Pages] = field(default_factory=dict)
    needed: dict[int, set[int]] = field(default_factory=dict)
    mappings: dict[int, list[procfs.Mapping]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)

    def look(self, root: int, *files: str | Path) -> None:
        """Record everything."""
        for pid in procfs.tree(root):
            status = procfs.status(pid)
            self.states[pid] = status.state
            if status.zombie:
                continue
            self.mappings[pid] = [m for m in procfs.read_maps(pid) if m.path not in _KERNELS_OWN]
            self.pages[pid], self.needed[pid] = {}, set()
            self._look_at(pid)
        for path in files:
            self.files[str(path)] = Path(path).read_bytes()

    def _look_at(self, pid: int) -> None:
        pages, needed = self.pages[pid], self.needed[pid]
        with (
            open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap,
            open(f"/proc/{pid}/mem", "rb", buffering=0) as memory,
        ):
            for mapping in self.mappings[pid]:
                pagemap.seek(mapping.start // PAGE * 8)
                entries = np.frombuffer(pagemap.read(mapping.length // PAGE * 8), "<u8")
                runs = page_runs((entries & (_PRESENT | _SWAPPED)) != 0)
                file = b""
                if (
                    runs
                    and mapping.private
                    and mapping.inode
                    and not mapping.path.startswith(("/memfd:", "/dev/zero"))
                ):
                    file = Path(
                        f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
                    ).read_bytes()
                for first, count in runs:
                    start = mapping.start + first * PAGE
                    memory.seek(start)
                    data = memory.read(count * PAGE)
                    assert len(data) == count * PAGE
                    for at in range(0, len(data), PAGE):
                        page = pages[start + at] = data[at : at + PAGE]
                        offset = mapping.offset + start + at - mapping.start
                        if mapping.private and page != file[offset : offset + PAGE].ljust(
                            PAGE, b"\0"
                        ):
                            needed.add(start + at)


def assert_same_memory(recorded: Recorded, still: Stillness) -> int:
    """Every page in the snapshot is what was there, and every page is in it that would not come
    back by itself.

    Returns:
        Pages compared.
    """
    compared = 0
    for process in recorded.manifest.processes:
        if not process.alive:
            continue
        space = recorded.space("process", str(process.image_id))
        kernels = [range(r.start, r.start + r.length) for r in space.regions if r.kind == "vdso"]
        ours = {
            a: page for a, page in recorded.pages(space).items() if not any(a in k for k in kernels)
        }
        theirs, nothing = still.pages[process.pid], bytes(PAGE)
        different = [hex(a) for a, page in ours.items() if page != theirs.get(a, nothing)]
        assert not different, f"{process.pid}: {different[:5]} differ"
        missing = still.needed[process.pid] - ours.keys()
        assert not missing, f"{process.pid}: {[hex(a) for a in sorted(missing)[:5]]} are missing"
        compared += len(ours)
    return compared


def words_of(pid: int | str) -> bytes:
    """Return the command line of a process and, if it may be read, its working directory."""
    # Tests ask this of every process again and again: no pathlib.
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        words = file.read()
    with suppress(OSError):
        words += os.readlink(b"/proc/%s/cwd" % str(pid).encode())
    return words


def leftovers(workdir: Path) -> list[str]:
    """Return the processes that have ``workdir`` in their command line (CRIU, guards) or work in it
    (CRIU's script), and the files in it.
    """
    found = [entry.name for entry in workdir.iterdir()]
    own, wanted = str(os.getpid()), str(workdir).encode()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or entry == own:
            continue
        try:
            words = words_of(entry)
            if wanted not in words or b"driver.py" in words:
                continue
            with open(f"/proc/{entry}/stat", "rb") as file:
                state = file.read().rsplit(b")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in b"ZX":
            found.append(words.replace(b"\0", b" ").decode())
    return found


def until_clean(workdir: Path, seconds: float = 20.0) -> None:
    """Wait until a dump has left nothing behind."""
    end = time.monotonic() + seconds
    while left := leftovers(workdir):
        assert time.monotonic() < end, left
        time.sleep(0.005)


def standing(root: int) -> list[int]:
    """Return the processes of the tree that a tracer stops."""
    found = []
    for pid in procfs.tree(root):
        with suppress(NotFound):  # it has ended
            if procfs.status(pid).state == "t":
                found.append(pid)
    return found


@contextmanager
def within(seconds: float) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield an ``until(condition)`` that waits at most this long, counted from the beginning of the
    block.
    """
    end = time.monotonic() + seconds

    def until(condition: Callable[[], object]) -> None:
        while not condition():
            assert time.monotonic() < end, f"it did not come to pass within {seconds} s"
            time.sleep(0.002)

    yield until
