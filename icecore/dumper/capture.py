"""Read a frozen tree: in the window only what the running job would change, after it everything that
CRIU has written.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import blake3
import msgspec
import numpy as np

from icecore.dumper.data.directories import DataDirectories
from icecore.dumper.memory.cells import EXTENT, inherit_origins
from icecore.dumper.memory.early import Early
from icecore.dumper.memory.forked import with_forked
from icecore.dumper.memory.grid import grid
from icecore.dumper.memory.hidden import complete, find_hidden, find_shared
from icecore.dumper.memory.images import ImageSet, Pagemap, image_files
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.open_files import OpenFiles
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.present import has_shared_pages
from icecore.dumper.memory.shared import SharedMemory
from icecore.dumper.memory.sources import FileSource, PagesImage
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.observe import asynchronous_io
from icecore.dumper.observe.files import FoundFile, settle_temporary, unchanged_since
from icecore.dumper.observe.standing import Standing, observe
from icecore.dumper.observe.surroundings import find_surroundings
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, NotFound
from icecore.events import Sink, phase
from icecore.host.criu.hidden import read_hidden, read_shared
from icecore.host.criu.images import GHOST, load_files, load_remaps
from icecore.host.criu.lock_images import write_posix_locks
from icecore.host.criu.lost_names import LostNames
from icecore.host.criu.mappings import remove_copies
from icecore.host.criu.opened_images import OpenedImages
from icecore.host.criu.queue_images import files_in_flight
from icecore.host.criu.socket_images import close_outside
from icecore.host.kernel import procfs
from icecore.host.kernel.memory import RemoteReader
from icecore.sizes import PAGE
from icecore.store.format.manifest import OpenFile, Region, Space
from icecore.store.format.surroundings import Surroundings, read_surroundings

#: File in CRIU's image directory that lists what CRIU was kept from seeing. As a log, it is not
#: part of the snapshot.
HIDDEN_FILE = "hidden.log"
_OF_PROCESS = re.compile(r"/?proc/(\d+)/")
#: The C library creates a semaphore under such a name, and then links it to its own.
_SEMAPHORE = re.compile(r"/dev/shm/sem\.[A-Za-z0-9]{6}")
_HASH_BYTES = 1 << 20


class ProcFileOpen(DumpFailed):
    """A file that a restore would not find was open. Programs open such files only briefly:
    another dump may succeed.
    """


class FileInFlight(DumpFailed):
    """A file that was open for writing was only in the queue of a socket (SCM_RIGHTS), and its content
    was not stored. Another dump may succeed once the file has been received.
    """


class SemaphoreInMaking(DumpFailed):
    """A POSIX semaphore was being created and still had its temporary name, too (sem_open(3)). A
    restore would bring back only that name. Another dump may succeed.
    """


class Lost(msgspec.Struct):
    """An open file that lost its name.

    Attributes:
        reached: The paths under /proc through which processes have it open or mapped.
        content: The space with its content, if that is stored.
    """

    reached: list[str]
    content: SpaceCapture | None = None


class Captured(msgspec.Struct):
    """A consistent image of the tree, as far as it has been read.

    Attributes:
        standing: Facts of the tree, read from /proc while it stood still.
        spaces: Captures of processes, files, shared memory and image files.
        reused: Spaces taken over from the parent as they are.
        files: What the manifest records of open files.
        lost: Open files that lost the name in ``files`` but have others, by device and inode: two
            files may have lost the same name, and another file may have the lost name now.
        removed: Paths of deleted files whose directories existed in the window.
        scanned: Bytes read in the window.
        surroundings: What a restore needs around open files; read after the window.
    """

    standing: Standing
    images: ImageSet
    spaces: list[SpaceCapture] = msgspec.field(default_factory=list)
    reused: list[Space] = msgspec.field(default_factory=list)
    files: list[OpenFile] = msgspec.field(default_factory=list)
    lost: dict[tuple[int, int], Lost] = msgspec.field(default_factory=dict)
    removed: set[str] = msgspec.field(default_factory=set)
    scanned: int = 0
    surroundings: Surroundings = msgspec.field(default_factory=Surroundings)

    @property
    def hidden(self) -> int:
        """Bytes of pages that CRIU was kept from seeing."""
        pagemaps = [*self.images.processes, *self.images.shared]
        return sum(int(pagemap.hidden["pages"].sum()) for pagemap in pagemaps) * PAGE


class Capture:
    """Reads a frozen tree and what CRIU wrote of it.

    Args:
        images: CRIU's image directory.
        version: Of the CRIU that writes there.
        parent: The parent snapshot, if there is one.
        copied: What pre-copy learnt, by image id.
        shared: Shared memory that CRIU may have been kept from seeing.
        opened: Files that were stored before the window.
        is_own: Whether the instance has something of its own at a path of the tree.
        data: The job's data directories; None: it has none.
    """

    def __init__(
        self,
        options: DumpOptions,
        images: Path,
        version: tuple[int, ...],
        parent: Parent | None,
        copied: Mapping[int, PreCopied],
        shared: SharedMemory,
        opened: OpenFiles,
        context: ScanContext,
        emit: Sink,
        is_own: Callable[[str], bool] = lambda path: False,
        data: DataDirectories | None = None,
    ) -> None:
        self._data = data
        self._is_own = is_own
        self._options = options
        self._images = images
        self._version = version
        self._parent = parent
        self._copied = copied
        self._shared = shared
        self._opened = opened
        self._context = context
        self._emit = emit

    def in_window(
        self,
        root: int,
        device: Mapping[int, Sequence[tuple[int, int]]],
        images: ImageSet,
        early: Early | None = None,
    ) -> Captured:
        """Read everything that must be read while the tree stands still.

        Args:
            root: Host pid of the tree's root.
            device: Host pid → where device memory lies in the process's memory, (start, end),
                ascending.
            images: The page maps that CRIU wrote.
            early: What was read while CRIU was at work.
        """
        standing = early.standing if early else observe(root, procfs.MapsReader())
        pids = standing.pids
        images = self._complete(images, pids, early)
        captured = Captured(standing, images)
        copied = with_forked(self._copied, pids, self._parent)
        touched = early.rseq.addresses() if early else []
        by_image = {image: pid for pid, image in pids.items()}
        for number, pagemap in enumerate(images.processes):
            if pagemap.number not in by_image:
                raise NotFound(
                    f"CRIU dumped a process {pagemap.number} that is not in the tree of {root}"
                )
            pid = by_image[pagemap.number]
            shared = early.sharing.get(pagemap.number) if early else None
            if shared is None:
                shared = has_shared_pages(pid, pagemap.extents)
            with RemoteReader(pid, shared=shared) as reader:
                learnt = copied.get(pagemap.number)
                capture = self._process(pagemap, number, reader, device.get(pid, ()), learnt)
                captured.spaces.append(capture)
                done = early.processes.get(pagemap.number) if early else None
                captured.scanned += capture.scan(
                    reader, pagemap.extents, self._context, done, touched
                )
        for number, pagemap in enumerate(images.shared, len(images.processes)):
            if len(pagemap.hidden):
                captured.scanned += self._hidden_shared(pagemap, number, early, captured)
        with phase(self._emit, "dump.files") as running:
            files = settle_temporary(
                standing.find_files(self._options),
                self._options,
                self._parent.file if self._parent is not None else lambda path: None,
                self._data.contain if self._data is not None else lambda path: False,
            )
            for file in files:
                running.bytes += self._file(file, captured, early)
                if file.about.policy == "absent" and os.path.isdir(_folder(file)):
                    captured.removed.add(file.about.path)
            if self._data is not None:
                running.bytes += self._data.in_window(files)
        _still_there({*standing.alive, *(early.threads if early else ())})
        return captured

    def _complete(self, images: ImageSet, pids: Mapping[int, int], early: Early | None) -> ImageSet:
        """Add to CRIU's page maps the pages that were hidden from CRIU."""
        hidden = read_hidden(self._images / HIDDEN_FILE)
        if unknown := hidden.keys() - pids.keys():
            raise DumpFailed(
                f"CRIU was kept from memory of processes that are not in the tree: {sorted(unknown)}"
            )
        by_image = {image: pid for pid, image in pids.items() if pid in hidden}
        processes = []
        for pagemap in images.processes:
            pid = by_image.get(pagemap.number)
            if pid is not None:
                present = early.present.get(pagemap.number) if early else None
                pagemap = pagemap.with_hidden(
                    find_hidden(pid, pagemap.regions, hidden[pid], present, self._context.threads)
                )
            processes.append(pagemap)
        return ImageSet(processes, self._with_shared(images.shared, early))

    def _with_shared(self, pagemaps: list[Pagemap], early: Early | None) -> list[Pagemap]:
        """Add the pages of shared memory that CRIU was kept from seeing."""
        hidden = read_shared(self._images / HIDDEN_FILE)
        found = []
        for pagemap in pagemaps:
            size = hidden.pop(pagemap.number, None)
            if size is not None:
                key = str(pagemap.number)
                known = early.shared.get(key) if early else None
                pagemap = find_shared(
                    pagemap,
                    self._shared.objects[key],
                    size,
                    known[0] if known else None,
                    self._context.threads,
                )
            found.append(pagemap)
        if hidden:
            raise DumpFailed(
                f"CRIU wrote no images of shared memory that was hidden from it: {sorted(hidden)}"
            )
        return found

    def _hidden_shared(
        self, pagemap: Pagemap, number: int, early: Early | None, captured: Captured
    ) -> int:
        """Read shared memory that CRIU did not see; return the bytes read."""
        key = str(pagemap.number)
        parent = self._parent.space("shared", key) if self._parent else None
        regions = inherit_origins(pagemap.regions, parent.space.regions if parent else [])
        copied = self._shared.copied.get(key)
        capture = SpaceCapture(
            "shared",
            key,
            0,
            regions,
            self._shared.known(key, self._parent),
            parent,
            self._stream(number),
            copied.seen if copied else None,
        )
        captured.spaces.append(capture)
        known = early.shared.get(key) if early else None
        return capture.scan(
            self._shared.objects[key],
            pagemap.extents,
            self._context,
            known[1] if known else None,
        )

    def _process(
        self,
        pagemap: Pagemap,
        number: int,
        reader: RemoteReader,
        device: Sequence[tuple[int, int]],
        copied: PreCopied | None,
    ) -> SpaceCapture:
        key = str(pagemap.number)
        parent = self._parent.space("process", key) if self._parent else None
        known = copied.known if copied else parent.known if parent else KnownCells.none()
        regions = grid(pagemap.regions, pagemap.extents, device, reader, parent, copied)
        seen = copied.seen if copied else None
        return SpaceCapture("process", key, 0, regions, known, parent, self._stream(number), seen)

    def _stream(self, number: int) -> int:
        return number % self._context.streams

    def _file(self, file: FoundFile, captured: Captured, early: Early | None) -> int:
        """Record an open file and read its content if its policy says so; return the bytes read."""
        about = file.about
        if file.deleted and file.links:
            about = msgspec.structs.replace(about, links=_other_names(file))
            captured.lost[file.identity] = Lost(file.lost)
        if not file.deleted and file.links > 1 and _SEMAPHORE.fullmatch(about.path):
            raise SemaphoreInMaking(
                "a POSIX semaphore was being created (sem_open(3))", cure="dump it again"
            )
        before = self._parent.file(about.path) if self._parent else None
        if about.policy != "content":
            digest = (
                _digest(file.reach, about.size)
                if self._options.verify_files and about.policy == "checked"
                else ""
            )
            captured.files.append(msgspec.structs.replace(about, digest=digest))
            return about.size if digest else 0
        captured.files.append(about)
        parent = self._parent.space("file", about.path) if self._parent else None
        if (
            parent is not None
            and self._parent is not None
            and unchanged_since(file, before, self._parent.manifest.created_ns)
        ):
            captured.reused.append(parent.space)
            return 0
        descriptor = os.open(file.reach, os.O_RDONLY | os.O_CLOEXEC)
        try:
            source = FileSource(descriptor, about.size, about.path)
            regions = (
                [Region(0, -(-about.size // PAGE) * PAGE, 0, kind="file", name=about.path)]
                if about.size
                else []
            )
            capture = SpaceCapture.make("file", about.path, about.size, regions, parent)
            captured.spaces.append(capture)
            if file.identity in captured.lost:
                captured.lost[file.identity].content = capture
            done = None
            one = self._opened.objects.get(about.path)
            if one is not None and (one.device, one.inode) == (about.device, about.inode):
                if (copied := self._opened.copied.get(about.path)) is not None:
                    capture.known, capture.seen = copied.known, copied.seen
                if (pages := self._opened.unchanged(file)) is not None:
                    return capture.take_over(source, pages, self._context)
                done = early.shared.get(about.path) if early else None
            if done is not None and one is not None and one.size == about.size:
                extents = done[0]  # the tree stood still since
            else:
                extents = source.extents()
            read = capture.scan(source, extents, self._context, done[1] if done else None)
            if os.fstat(descriptor).st_size < about.size:
                raise DumpFailed(
                    f"{about.path} shrank while it was read: something outside the job writes to it"
                )
            return read
        finally:
            os.close(descriptor)

    def after_window(self, captured: Captured) -> None:
        """Read everything that CRIU has written: shared memory that it saw, and its image files."""
        images = captured.images
        remove_copies(self._images / HIDDEN_FILE)
        complete(self._images, [*images.processes, *images.shared], self._version)
        _require_no_requests(self._images, captured.standing.pids)
        _require_no_proc_files(self._images, captured.standing)
        self._require_stored(captured)
        close_outside(self._images)
        standing = captured.standing
        write_posix_locks(
            self._images,
            {standing.pids[pid]: one.descriptors for pid, one in standing.opened.items()},
        )
        _rename(captured, self._images, self._is_own)
        captured.surroundings = find_surroundings(
            self._images,
            captured.standing.pids,
            captured.standing.processes,
            captured.files,
            captured.removed,
            read_surroundings(self._parent.manifest) if self._parent else None,
            self._is_own,
        )
        for pagemap in images.shared:
            if len(pagemap.hidden):
                continue  # it was read in the window
            key = str(pagemap.number)
            parent = self._parent.space("shared", key) if self._parent else None
            capture = SpaceCapture.make("shared", key, 0, pagemap.regions, parent)
            captured.spaces.append(capture)
            self._pages(capture, pagemap)
        for path in image_files(self._images):
            captured.spaces.append(self._image(path))

    def _require_stored(self, captured: Captured) -> None:
        """Raise if a file is in the queue of a socket, no process has it open, and a restore would
        not bring back its content. The window does not find such a file, because only CRIU's images
        show the queues.
        """
        if self._options.files != "content" or not (flying := files_in_flight(self._images)):
            return
        stored = {
            file.path
            for file in captured.files
            if file.policy == "content" and (file.device, file.inode) not in captured.lost
        }
        opened = OpenedImages(self._images)
        for number in captured.standing.pids.values():
            flying -= {one.file.id for one in opened.descriptors(number).values()}
        flying -= {one.original for one in load_remaps(self._images) if one.kind == GHOST}
        for file in load_files(self._images):
            if file.id not in flying or file.external:
                continue
            writable = stat.S_ISREG(file.mode) and file.flags & os.O_ACCMODE != os.O_RDONLY
            elsewhere = self._is_own(file.path) or (
                self._data is not None and self._data.contain(file.path)
            )
            if writable and file.path not in stored and not elsewhere:
                raise FileInFlight(
                    f"{file.path} is in the queue of a socket (SCM_RIGHTS), open for writing, and was not read in the window",
                    cure="take the snapshot again once the receiver has received the file",
                )

    def _pages(self, capture: SpaceCapture, pagemap: Pagemap) -> None:
        if not len(pagemap.written):
            return
        source = PagesImage(str(self._images / f"pages-{pagemap.pages}.img"), pagemap.written)
        try:
            order = np.argsort(pagemap.written["address"], kind="stable")
            capture.scan(source, pagemap.written[order], self._context)
        finally:
            source.close()

    def _image(self, path: Path) -> SpaceCapture:
        size = path.stat().st_size
        parent = self._parent.space("image", path.name) if self._parent else None
        regions = (
            [Region(0, -(-size // PAGE) * PAGE, 0, kind="image", name=path.name)] if size else []
        )
        capture = SpaceCapture.make("image", path.name, size, regions, parent)
        if size:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                extents = np.array([(0, -(-size // PAGE))], EXTENT)
                capture.scan(FileSource(descriptor, size, path.name), extents, self._context)
            finally:
                os.close(descriptor)
        return capture


def _still_there(pids: Iterable[int]) -> None:
    """Raise if a process did not live to the end of the window. SIGKILL reaches a frozen process
    too, and CRIU exits with 0 all the same.
    """
    for pid in pids:
        if not procfs.exists(pid) or procfs.is_zombie(pid):
            raise DumpFailed(f"process {pid} was killed while it was being dumped")


def _require_no_requests(images: Path, pids: Mapping[int, int]) -> None:
    """Raise if a process may have had asynchronous I/O requests in flight. Preflight refuses such
    processes, but one may have begun since.
    """
    if (found := asynchronous_io.direct_user(images, pids)) is not None:
        raise DumpFailed(asynchronous_io.unseen(*found), cure=asynchronous_io.CURE)


def _require_no_proc_files(images: Path, standing: Standing) -> None:
    """Raise if a job with pids of its own has a file of its processes in the machine's /proc open: a
    restore gives them other pids there, and would not find it.
    """
    for file in load_files(images) if standing.namespaces.pid else ():
        found = _OF_PROCESS.match(file.path)
        if found and int(found[1]) in standing.pids:
            raise ProcFileOpen(
                f"the job has {file.path} open, which a restore would not find: the processes get other pids in the machine's /proc",
                cure="dump it again later; if the job keeps such files open, start it with 'icecore run --root private', where it has a /proc of its own",
            )


def _rename(captured: Captured, images: Path, is_own: Callable[[str], bool]) -> None:
    """Rename the files that lost their name to the name that CRIU will look for, which is known once
    CRIU's images are complete.

    Args:
        is_own: Returns whether a path is on one of the job's own file systems.

    Raises:
        DumpFailed: CRIU will look for a file under a name that a restore would not make.
    """
    links = LostNames(images, captured.standing.pids)
    links.make_unique(f".{secrets.token_hex(4)}", is_own)
    names = {identity: links.join(lost.reached) for identity, lost in captured.lost.items()}
    if left := links.left():
        raise DumpFailed(
            f"{left[0]} is open but was deleted or replaced, and a restore could not bring it back",
            cure="have the job close the file, or open it through one mount only",
        )
    captured.files = [
        msgspec.structs.replace(file, path=name)
        if (name := names.get((file.device, file.inode)))
        else file
        for file in captured.files
    ]
    for identity, lost in captured.lost.items():
        if lost.content is not None and (name := names[identity]):
            lost.content.key = name


def _folder(file: FoundFile) -> str:
    """Return the path of the file's directory below its process's root: mounts may differ there."""
    return f"/proc/{file.reach.split('/')[2]}/root{os.path.dirname(file.about.path)}"


def _other_names(file: FoundFile) -> list[str]:
    """Return the file's other names in the same directory; other directories are not searched."""
    folder = _folder(file)
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.inode() == file.about.inode]
        return sorted(
            os.path.join(os.path.dirname(file.about.path), n)
            for n in names
            if os.lstat(f"{folder}/{n}").st_dev == file.about.device
        )
    except FileNotFoundError:
        return []  # the folder was deleted too


def _digest(path: str, size: int) -> str:
    hasher = blake3.blake3()
    with open(path, "rb") as file:
        left = size
        while left and (piece := file.read(min(_HASH_BYTES, left))):
            hasher.update(piece)
            left -= len(piece)
    return hasher.hexdigest()
