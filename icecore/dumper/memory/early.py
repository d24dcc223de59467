"""The early scan: read memory as soon as its processes stand still, while CRIU still works.

The result counts only if the tree still has the same threads once CRIU is done. A cell counts only
if CRIU's own pagemap has the same pages, or if CRIU did not see them.

CRIU stops every thread before it opens the images that the processes share (`ALL_STOPPED`), and
then begins with the first process. What it does to a process changes

- code: a system call is written over the program for a moment;
- mappings that CRIU makes in the process;
- through the kernel, the few bytes that tell each thread the number of its processor (rseq). CRIU
  records where they are, and those cells are read again.

So private memory that is not executable, and shared memory, can be read as soon as that image
exists and every thread is seen to be held. In a job with GPU processes, the private memory of all
other processes can be read even before: CRIU holds them while the driver works in the GPU
processes.

Asynchronous I/O in flight writes to memory without any thread. So processes with a ring for it are
left for later. If there is such a process, so is shared memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import EXTENT, CellPlan, plan_cells
from icecore.dumper.memory.forked import fork_sources, with_forked
from icecore.dumper.memory.frames import SharedFrames
from icecore.dumper.memory.grid import grid
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.present import (
    Present,
    has_shared_pages,
    pages_of,
    private_regions,
)
from icecore.dumper.memory.scan import ReadElsewhere
from icecore.dumper.memory.shared import SharedMemory
from icecore.dumper.memory.spaces import ScanContext, Scanned
from icecore.dumper.observe.asynchronous_io import has_ring
from icecore.dumper.observe.files import tree_pids
from icecore.dumper.observe.held import HeldTree
from icecore.dumper.observe.standing import Ahead, Standing, observe, read_ahead
from icecore.errors import DumpFailed, NotFound
from icecore.events import Sink, phase
from icecore.host.criu.images import RseqAreas
from icecore.host.criu.mappings import copy_mappings
from icecore.host.kernel import procfs
from icecore.host.kernel.memory import RemoteReader
from icecore.host.kernel.scanning import native_scan_lacks
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region

_T = TypeVar("_T")

_POLL_SECONDS = 0.001
#: Least private memory of a process for which the early scan pays off.
_LEAST_BYTES = 8 << 20
#: A shared memory object or file of fewer bytes is read by one thread.
_SMALL_BYTES = 32 << 20
#: Threads that copy mappings for CRIU.
_COPIERS = 2
#: An image that CRIU opens once every thread stands still (cr-dump.c: collect_pstree comes before
#: cr_glob_imgset_open).
ALL_STOPPED = "files.img"


class Early(msgspec.Struct, frozen=True):
    """What was read early.

    Attributes:
        threads: Host pid → the process's threads, which were held then.
        present: Image id → the process's private memory that is not executable, as it was then.
        processes: Image id → cells that were read.
        standing: Facts about the tree, read from /proc.
        rseq: Where the kernel may have written since.
        sharing: Image id → whether the process shares pages with others; only processes that were
            read.
        shared: Key of a shared memory object or file → its pages (EXTENT records), and cells that were
            read.
    """

    threads: Mapping[int, Sequence[int]]
    present: Mapping[int, Present]
    processes: Mapping[int, Scanned]
    standing: Standing
    rseq: RseqAreas
    shared: Mapping[str, tuple[npt.NDArray[np.void], Scanned]] = msgspec.field(default_factory=dict)
    sharing: Mapping[int, bool] = msgspec.field(default_factory=dict)

    def holds(self) -> bool:
        """Return whether the tree still has exactly the same threads. Call it once CRIU is done."""
        try:
            return all(procfs.threads(pid) == list(own) for pid, own in self.threads.items())
        except NotFound:
            return False


class _Read(msgspec.Struct):
    """What has been read so far.

    Attributes:
        threads: Host pid → the process's threads, for each process that was examined.
        present, processes: As in `Early`.
        own: Host pid → what was to be read, for each process that was read.
        scanned: Host pid → its cells that were read.
        shared: As in `Early`.
        rings: Whether a process has a ring for asynchronous I/O.
    """

    threads: dict[int, list[int]] = msgspec.field(default_factory=dict)
    present: dict[int, Present] = msgspec.field(default_factory=dict)
    processes: dict[int, Scanned] = msgspec.field(default_factory=dict)
    own: dict[int, _Own] = msgspec.field(default_factory=dict)
    scanned: dict[int, Scanned] = msgspec.field(default_factory=dict)
    shared: dict[str, tuple[npt.NDArray[np.void], Scanned]] = msgspec.field(default_factory=dict)
    rings: bool = False


class _Own(msgspec.Struct, frozen=True):
    """A process to read: its private memory, cut into cells; what is known of the cells; and
    whether the process shares pages with others.
    """

    image: int
    stream: int
    regions: list[Region]
    plan: CellPlan
    known: KnownCells
    shared: bool


class _SharedObject(NamedTuple):
    """A shared memory object, or a file, to read."""

    memory: SharedMemory
    key: str
    stream: int


class EarlyScan:
    """An early scan in a thread of its own. Used as a context manager: leaving it with an error
    ends the scan at once.

    Args:
        root: Host pid of the tree's root.
        images: CRIU's image directory.
        parent: The parent snapshot, if any.
        copied: What pre-copy learnt, by image id.
        device: Returns host pid → where the driver put device memory in the process's memory. Known
            only once the driver is done.
        shared: The tree's shared memory, and files that it has open for writing.
        maps: Reads its mappings.
        emit: Receives the phase ``dump.early``.
        hidden: The file that records what CRIU was kept from seeing. Copies of smaps lie beside it
            (`icecore.host.criu.mappings`). None: CRIU sees everything, and nothing is copied.
        apart: Host pids of processes in which the driver works while CRIU already holds the others
            (`driver_works`).
    """

    def __init__(
        self,
        root: int,
        images: Path,
        parent: Parent | None,
        copied: Mapping[int, PreCopied],
        device: Callable[[], Mapping[int, Sequence[tuple[int, int]]]],
        shared: Sequence[SharedMemory],
        maps: procfs.MapsReader,
        context: ScanContext,
        emit: Sink,
        hidden: Path | None = None,
        apart: Collection[int] = (),
    ) -> None:
        self._root = root
        self._hidden = hidden
        self._apart = frozenset(apart)
        self._driver_works = threading.Event()
        self._copying: list[Future[None]] = []
        self._images = images
        self._parent = parent
        self._copied = copied
        self._device = device
        self._shared = shared
        self._maps = maps
        self._context = context
        self._emit = emit
        self._rseq = RseqAreas(images)
        self._over = threading.Event()
        self._found: Early | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="early", daemon=True)

    def __enter__(self) -> EarlyScan:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if error is not None:
            self._context.stop.set()
        self._thread.join()

    def criu_is_done(self) -> None:
        """Keep the scan from beginning anything new. While it finishes the rest, read where the
        rseq areas are. Call it once CRIU is done.
        """
        self._over.set()
        self._rseq.look()

    def finish(self) -> Early | None:
        """Wait until the scan ends. Call `criu_is_done` first.

        Returns:
            What was read; None: nothing that counts.

        Raises:
            Whatever prevents the snapshot.
        """
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._found if self._found is not None and self._found.holds() else None

    def driver_works(self) -> None:
        """Note that CRIU holds every thread of the tree, except those of processes ``apart``."""
        self._driver_works.set()

    def _run(self) -> None:
        try:
            with (
                ThreadPoolExecutor(1, "standing") as standing,
                ThreadPoolExecutor(_COPIERS, "mappings") as mappings,
            ):
                self._found = self._read(standing, mappings)
        except NotFound:
            pass  # it was killed; the capture reports it
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._failure = error

    def _read(self, standing: ThreadPoolExecutor, mappings: ThreadPoolExecutor) -> Early | None:
        """Read what can be read before CRIU is done.

        Args:
            standing: The thread that reads facts about the tree.
            mappings: The threads that copy mappings for CRIU.

        Returns:
            What was read; None: nothing that counts.
        """
        read, ahead = _Read(), None
        if held := self._wait_for_driver():
            images = tree_pids(self._root)
            self._copy_mappings(held, images, mappings)
            ahead = standing.submit(read_ahead, list(held), self._maps, self._context.stop)
            self._scan(held, images, read, "driver")
        if not (held := self._wait_for_criu()):
            return None
        if any(held.get(pid) != threads for pid, threads in read.threads.items()):
            return None  # a process has ended since
        images = tree_pids(self._root)
        rest = {pid: threads for pid, threads in held.items() if pid not in read.threads}
        # By now CRIU has reached the first one, or is about to.
        self._copy_mappings(list(rest)[1:], images, mappings)
        facts = standing.submit(self._observe, ahead)
        self._scan(rest, images, read, "criu", self._shared)
        for copied in self._copying:
            copied.result()
        known = facts.result()
        sharing = {one.image: one.shared for one in read.own.values()}
        return Early(held, read.present, read.processes, known, self._rseq, read.shared, sharing)

    def _copy_mappings(
        self, pids: Iterable[int], images: Mapping[int, int], pool: ThreadPoolExecutor
    ) -> None:
        """Start copying the mappings of processes for CRIU."""
        if self._hidden is None or native_scan_lacks():
            return
        processes = iter([(pid, images[pid]) for pid in pids if pid in images])
        for _ in range(_COPIERS):
            future = pool.submit(copy_mappings, self._hidden, processes, self._is_over)
            self._copying.append(future)

    def _is_over(self) -> bool:
        return self._over.is_set() or self._context.stop.is_set()

    def _all_stopped(self) -> bool:
        return (self._images / ALL_STOPPED).exists()

    def _wait_for_driver(self) -> dict[int, list[int]] | None:
        """Wait until CRIU holds the processes in which the driver does not work, and return their
        threads by host pid. Return None if there are none, or if CRIU has continued meanwhile.
        """
        if not self._apart:
            return None
        while not self._driver_works.wait(_POLL_SECONDS):
            if self._over.is_set():
                return None
        tree = HeldTree(self._root, self._apart)
        if not tree.members():
            return None
        while not self._over.is_set() and not self._all_stopped():
            if held := tree.threads():
                return held
            time.sleep(_POLL_SECONDS)
        return None

    def _wait_for_criu(self) -> dict[int, list[int]] | None:
        """Wait until the whole tree is held, and return its threads by host pid. Return None if
        CRIU was done before.
        """
        tree = HeldTree(self._root)
        while not self._over.is_set():
            if self._all_stopped() and (held := tree.threads()):
                return held
            time.sleep(_POLL_SECONDS)
        return None

    def _observe(self, ahead: Future[Ahead] | None) -> Standing:
        known = ahead.result() if ahead is not None else None
        standing = observe(self._root, self._maps, self._context.stop, known)
        if not self._over.is_set():  # else `criu_is_done` reads them
            self._rseq.look()
        return standing

    def _scan(
        self,
        held: Mapping[int, list[int]],
        images: Mapping[int, int],
        read: _Read,
        during: str,
        memories: Sequence[SharedMemory] = (),
    ) -> None:
        """Read the memory of processes, then shared memory, and add it to ``read``.

        Args:
            held: Host pid → its threads, for each process to read.
            images: Host pid → image id, for all processes of the tree.
            during: What works meanwhile: "driver" or "criu".
            memories: The shared memory, and files, to read; skipped if a process has a ring.
        """
        copied = with_forked(self._copied, images, self._parent)
        alive = [image for pid, image in images.items() if not procfs.is_zombie(pid)]
        order = {image: number for number, image in enumerate(sorted(alive))}
        own: dict[int, _Own] = {}
        with phase(self._emit, "dump.early", during=during) as running:
            for pid, regions, extents in self._look(held):
                if (image := images.get(pid)) is None:
                    raise NotFound(f"process {pid} has ended")
                read.threads[pid] = held[pid]
                if regions is None:
                    read.rings = True
                    continue
                read.present[image] = regions, extents
                if int(extents["pages"].sum()) * PAGE >= _LEAST_BYTES:
                    stream = order[image] % self._context.streams
                    own[pid] = self._plan(pid, image, regions, extents, stream, copied.get(image))
            saved = 0
            for pid, scanned, elsewhere in self._scan_all(own, read):
                read.processes[own[pid].image] = scanned
                running.bytes += scanned.plan.bytes
                saved += elsewhere
            if not read.rings:
                # Not beside private memory: of content in both, perhaps only one has a parent against
                # which it can be stored as a delta. Private memory is more likely to have it.
                running.bytes += self._scan_shared(memories, len(alive), read)
            running.fields["shared"] = saved

    def _scan_shared(self, memories: Sequence[SharedMemory], first: int, read: _Read) -> int:
        """Read shared memory, and add it to ``read``. Small objects are read at the same time, each
        by one thread.

        Args:
            first: Stream number of the first object of each of ``memories``; the others follow.

        Returns:
            Bytes read.
        """
        small, large = list[_SharedObject](), list[_SharedObject]()
        for memory in memories:
            for number, (key, one) in enumerate(memory.objects.items(), first):
                if memory.must_be_read(key):
                    stream = number % self._context.streams
                    wanted = small if one.size < _SMALL_BYTES else large
                    wanted.append(_SharedObject(memory, key, stream))

        def scan(one: _SharedObject, threads: int) -> int:
            extents = one.memory.objects[one.key].extents(threads)
            scanned = one.memory.scan_early(
                one.key, extents, self._parent, one.stream, self._context, threads
            )
            read.shared[one.key] = extents, scanned
            return scanned.plan.bytes

        done = 0
        if len(small) < 2:
            large, small = [*small, *large], []
        if small:
            with ThreadPoolExecutor(min(self._context.threads, len(small)), "shared") as pool:
                done += sum(pool.map(lambda one: scan(one, 1), small))
        return done + sum(scan(one, self._context.threads) for one in large)

    def _look(
        self, pids: Collection[int]
    ) -> Iterator[tuple[int, list[Region] | None, npt.NDArray[np.void]]]:
        """Yield the host pid of each process, its memory that may be read now, and the pages in it
        that hold something (EXTENT records). Yield None for the memory if a ring for asynchronous
        I/O may change it.
        """

        def look(pid: int, threads: int) -> tuple[int, list[Region] | None, npt.NDArray[np.void]]:
            if self._context.stop.is_set():
                raise DumpFailed("the scan was stopped")
            mappings = self._maps.read(pid)
            if has_ring(mappings):
                return pid, None, np.empty(0, EXTENT)
            regions = [
                region
                for region in private_regions(mappings)
                if not region.protection & procfs.PROT_EXEC
            ]
            return pid, regions, pages_of(pid, regions, threads)

        sizes = {pid: procfs.resident_bytes(pid) for pid in pids}
        yield from share_out(look, sizes, self._context.threads)

    def _plan(
        self,
        pid: int,
        image: int,
        regions: list[Region],
        extents: npt.NDArray[np.void],
        stream: int,
        copied: PreCopied | None,
    ) -> _Own:
        parent = self._parent.space("process", str(image)) if self._parent else None
        known = copied.known if copied else parent.known if parent else KnownCells.none()
        shared = has_shared_pages(pid, extents)
        with RemoteReader(pid, shared=shared) as reader:
            wanted = grid(regions, extents, self._device().get(pid, ()), reader, parent, copied)
        return _Own(image, stream, wanted, plan_cells(wanted, extents), known, shared)

    def _scan_all(self, own: Mapping[int, _Own], read: _Read) -> Iterator[tuple[int, Scanned, int]]:
        """Scan processes, and add them to ``read``. Yield for each its host pid, its scanned cells,
        and the bytes of the cells that it shares with a process scanned before. Those are not read
        again.
        """
        before = [pid for pid, one in read.own.items() if one.shared]
        plans = {pid: one.plan for pid, one in own.items() if one.shared}
        context = self._context
        sources = {
            pid: source for pid, source in fork_sources([*before, *plans]).items() if pid in plans
        }
        earlier = {pid: read.own[pid].plan for pid in before if pid in sources.values()}
        shared = SharedFrames({**earlier, **plans}, sources, context.threads, context.stop)
        scanned = read.scanned

        def scan(pid: int, threads: int) -> tuple[int, Scanned, int]:
            one = own[pid]
            known, size = None, 0
            if len(one.known.key) and (found := shared.of(pid)) is not None:
                source, here, there = found
                fingerprint = scanned[source].result.fingerprint[there]
                same = ~one.known.differ(one.plan.key[here], fingerprint)
                known = ReadElsewhere(here[same], fingerprint[same])
                size = int(one.plan.length[known.row].sum())
            with RemoteReader(pid, shared=one.shared) as reader:
                result = context.scan(
                    reader,
                    one.stream,
                    one.plan,
                    one.regions,
                    one.known,
                    known,
                    shared.shared(pid),
                    threads,
                )
            return pid, result, size

        # Processes that others may be forks of come first; the others do not depend on each other.
        first = [pid for pid in own if pid in sources.values()]
        for pid in first:
            result = scan(pid, context.threads)
            scanned[pid] = result[1]
            yield result
        rest = {pid: one.plan.bytes for pid, one in own.items() if pid not in first}
        for result in share_out(scan, rest, context.threads):
            scanned[result[0]] = result[1]
            yield result
        read.own.update(own)


def share_out(
    work: Callable[[int, int], _T], sizes: Mapping[int, int], threads: int
) -> Iterator[_T]:
    """Do work for each process, with all threads. A process with more than an equal share of the
    work gets all threads; the others get one each.

    Args:
        work: Called with a pid and a number of threads.
        sizes: Pid → amount of work.

    Yields:
        What ``work`` returned.
    """
    most = sum(sizes.values()) / max(1, threads)
    small = [pid for pid, size in sizes.items() if size <= most]
    if len(small) < 2:
        small = []
    for pid in sizes:
        if pid not in small:
            yield work(pid, threads)
    if small:
        with ThreadPoolExecutor(min(threads, len(small)), "early") as pool:
            yield from pool.map(lambda pid: work(pid, 1), small)
