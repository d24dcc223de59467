"""The prepare phase: set up everything that can be set up while the job runs, pre-copy included,
so that the window has only the rest to do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.dumper.data.directories import DataDirectories
from icecore.dumper.encode.encoders import encoders_for
from icecore.dumper.freeze.claim import Claim
from icecore.dumper.freeze.guard import DumpGuard
from icecore.dumper.freeze.window import ConnectionUnaccepted, TreeRestless, Window
from icecore.dumper.gpu.devices import Devices
from icecore.dumper.gpu.resident import Resident
from icecore.dumper.memory.background import beside
from icecore.dumper.memory.early import ALL_STOPPED
from icecore.dumper.memory.open_files import OpenFiles, open_files
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.shared import SharedMemory, open_shared
from icecore.dumper.observe.files import (
    FoundFile,
    find_files,
    read_opened,
    settle_temporary,
    tree_pids,
)
from icecore.dumper.observe.inspection import Inspection
from icecore.dumper.observe.sockets import owner
from icecore.dumper.phases.ahead import PRE_COPY_STAGING, look_ahead, pre_copy, reserve
from icecore.dumper.phases.preflight import Accepted
from icecore.dumper.phases.request import Request
from icecore.dumper.preflight.checks import over_budget
from icecore.dumper.preflight.gpu_changes import GpusChanged
from icecore.dumper.preflight.prediction import predict
from icecore.dumper.storing import Storing
from icecore.errors import DumpFailed, PreflightRefused
from icecore.events import Event, phase
from icecore.host.criu.hidden import hides
from icecore.host.criu.log import BEGUN_GPU, RESTLESS, UNACCEPTED
from icecore.host.criu.program import explain
from icecore.host.kernel import limits, oom, procfs
from icecore.host.kernel.scanning import native_scan_lacks
from icecore.host.resident.copyplan import NOTHING
from icecore.host.workdir import LOCK, make_work_directory
from icecore.store.format.manifest import Manifest

#: Resident memory without room on its GPU goes into the host's memory at a rate at which this many
#: bytes take a tenth of a second of the window.
_PRE_COPY_RESIDENT = 4 << 30
#: How long to wait for another dump of the same job; one with device memory may store some of it
#: first.
_CLAIM_SECONDS, _CLAIM_DEVICES_SECONDS = 60.0, 300.0
#: Each shard stream holds a shard buffer.
_MAX_STREAMS = 16
#: Upper bound on scan threads unless the options name another number; with more, a scan takes
#: longer (measured on 16 cores).
SCAN_THREADS = 8
#: The same where the threads do not need the interpreter between cells
#: (`icecore.host.kernel.scanning`). There, process_vm_readv alone gains a third from 8 to 12
#: threads and an eighth from 12 to 16; the scan as a whole was not measured so.
NATIVE_SCAN_THREADS = 12
ENCODE_THREADS = 4
#: CRIU's error about a connection that waits for accept(2); it ends with the socket's inode.
_IN_FLIGHT = re.compile(r"[Ii]n-flight .* (?:0x)?([0-9a-f]+)$")


class Ready(msgspec.Struct, frozen=True):
    """Everything a window needs. The exit stack that `prepare` was given undoes all of it.

    Attributes:
        images: CRIU's image directory.
        guard: The process that runs CRIU.
        devices: The tree's GPU processes; None: it has none.
        storing: Where cells go.
        copied: What pre-copy learnt, by image id.
        shared: Shared memory that is read in place.
        files: Files open for writing that are stored before the window.
        hiding: Whether CRIU is kept from seeing memory that is read in place.
        claim: Keeps other dumps from stopping the same processes.
        window: Not begun.
        data: The job's data directories; None: it has none.
    """

    images: Path
    guard: DumpGuard
    devices: Devices | None
    storing: Storing
    copied: Mapping[int, PreCopied]
    shared: SharedMemory
    files: OpenFiles
    hiding: bool
    claim: Claim
    window: Window
    data: DataDirectories | None = None


class Begun(msgspec.Struct, frozen=True):
    """What starts while preflight looks at the tree.

    Attributes:
        images: CRIU's image directory.
        guard: The process that will run CRIU; it may not be ready yet.
    """

    images: Path
    guard: DumpGuard


def begin(request: Request, stack: ExitStack) -> Begun:
    """Start what takes a while and does not depend on the tree.

    Args:
        stack: Undoes it.
    """
    images, lock = _make_workdir(request, stack)
    guard = DumpGuard(str(images), lock=lock)
    stack.callback(guard.release)
    return Begun(images, guard)


def prepare(request: Request, accepted: Accepted, begun: Begun, stack: ExitStack) -> Ready:
    """Set up the window.

    Args:
        stack: Undoes, in reverse, everything that is set up here.

    Raises:
        PreflightRefused: A GPU process is in a state in which it cannot be dumped.
        DumpFailed: Something could not be set up, or another dump has the job.
        StoreError: The storage failed.
    """
    found, options = accepted.found, request.options
    images, guard = begun.images, begun.guard
    devices = _devices(request, found, guard, images, stack)
    threads = options.scan_threads or limits.threads_for(
        SCAN_THREADS if native_scan_lacks() else NATIVE_SCAN_THREADS
    )
    storing = Storing(
        request.repository,
        request.loop,
        stack,
        job=request.target.job,
        parent=request.target.parent,
        purpose="dump",
        streams=min(_MAX_STREAMS, len(found.processes)),
        staging_bytes=_staging_bytes(request, found),
        threads=threads,
        encode_threads=options.scan_threads or limits.threads_for(ENCODE_THREADS),
        encoders=options.encoders or (0 if options.scan_threads else encoders_for()),
        eager=bool(options.encoders),
        link_rate=options.link_rate,
        emit=request.emit,
        under=options.under,
        processes=[guard.pid],
        last=request.stopping.asked,
    )
    request.stopping.when_asked(storing.budget.lift_for_good)
    if storing.parent is not None:
        _warn_of_another_program(request, storing.parent.manifest)
        storing.parent.prepare()
    # A streamed dump gets its memory from CRIU alone, so CRIU must see all of it.
    hiding = options.memory != "streamed" and hides(request.criu)
    shared = open_shared(found.processes, stack) if hiding else SharedMemory()
    settled = _settled(request, found.files, storing)
    files = open_files(settled, storing.parent, stack)
    shared, files = shared.map(stack), files.map(stack)
    activity = look_ahead(options, found, (shared, files), storing.budget)
    # Not earlier: starting encoders would distort the measurement of idle cores.
    storing.pipeline.expect(_expected(found, storing.parent))
    data = _data(request, storing, stack)
    with _devices_beside(request, found, devices, storing):
        copied = pre_copy(request, found, storing, (shared, files), activity)
        _require_budget(request, found, files, storing)
    learnt = [*copied.values(), *shared.expected, *files.expected]
    reserve(found, storing, learnt, shared.used + files.volatile, threads)
    claim = _claim(request, found)
    stack.callback(claim.release)
    if devices is not None:
        _pre_copy_devices(request, found, devices, storing)
    if data is not None:
        with storing.staging.limited(PRE_COPY_STAGING):
            data.look_ahead(lambda: _open_files(request), once=True)
    storing.pipeline.close_gate()
    _warn_if_unprotected(request, guard)
    window = _window(request, images, guard, storing)
    return Ready(
        images, guard, devices, storing, copied, shared, files, hiding, claim, window, data
    )


def _expected(found: Inspection, parent: Parent | None) -> int:
    """Return how many bytes will probably be stored: those that changed in the parent, or all."""
    if parent is not None:
        return parent.manifest.sizes.changed
    device, host, left = found.resident.copies if found.resident is not None else NOTHING
    return found.private_bytes + sum(device.values()) + sum(host.values()) + left


def _require_budget(
    request: Request, found: Inspection, files: OpenFiles, storing: Storing
) -> None:
    """Require that the window would not read more file content than the budget allows. icecore's
    own logs of the job do not count, because the job does not control them.

    Raises:
        PreflightRefused: It would read more.
    """
    most = request.options.file_budget
    if 2 * sum(file.about.size for file in found.files) <= most:
        return
    record = request.target.record
    now = [
        file
        for file in _settled(request, _open_files(request), storing)
        if file.about.policy == "content" and not (record and record.is_own(file.about.path))
    ]
    read = files.to_read(now, storing.parent)
    size = sum(file.about.size for file in read)
    if size <= most:
        return
    largest = max(read, key=lambda file: file.about.size).about.path
    raise PreflightRefused([over_budget(size, most, largest)])


def _data(request: Request, storing: Storing, stack: ExitStack) -> DataDirectories | None:
    """Store the files of the job's data directories that the parent does not have."""
    record = request.target.record
    if record is None or not record.data:
        return None
    data = stack.enter_context(
        DataDirectories(
            request.target.pid,
            record.data,
            record.user,
            storing.parent,
            storing.context,
            request.options.data_budget,
        )
    )
    with (
        phase(request.emit, "dump.data") as running,
        storing.context.staging.limited(PRE_COPY_STAGING),
    ):
        running.bytes = data.look_ahead(lambda: _open_files(request))
    return data


def _settled(request: Request, files: Sequence[FoundFile], storing: Storing) -> list[FoundFile]:
    """Decide which files are temporary (`settle_temporary`)."""
    parent, record = storing.parent, request.target.record
    data = tuple(f"{path}/" for path in record.data) if record is not None else ()
    return settle_temporary(
        files,
        request.options,
        parent.file if parent is not None else lambda path: None,
        lambda path: path.startswith(data),
    )


def _open_files(request: Request) -> list[FoundFile]:
    """Return the files that the tree has open now."""
    looked_ns = time.time_ns()
    opened = read_opened(tree_pids(request.target.pid), procfs.MapsReader())
    return find_files(opened, request.options, looked_ns)


def _window(request: Request, images: Path, guard: DumpGuard, storing: Storing) -> Window:
    return Window(
        guard,
        request.criu.version,
        limit=request.options.max_window,
        explain=lambda status: _explain(request, images, status),
        abandon=storing.abandon,
    )


def prepare_again(request: Request, ready: Ready) -> Ready:
    """Set up another window after one in which CRIU could not stop the tree, and wrote nothing that
    counts.
    """
    for entry in ready.images.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    ready.storing.context.stop.clear()  # nothing reads the tree any more
    return replace(ready, window=_window(request, ready.images, ready.guard, ready.storing))


def _make_workdir(request: Request, stack: ExitStack) -> tuple[Path, int]:
    """Make CRIU's image directory; its lock says that it is in use."""
    images, lock = make_work_directory("icecore-dump-", request.workdir, request.emit)
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, images, ignore_errors=True)
    return images, lock


def _warn_if_unprotected(request: Request, guard: DumpGuard) -> None:
    """Warn if the kernel may choose CRIU to end when memory is short."""
    score = guard.wait_ready()
    if score > oom.PROTECTED:
        request.emit(
            Event(
                "dump.unprotected",
                {"oom_score": score, "wanted": oom.PROTECTED, "cure": oom.CURE},
            )
        )


def _devices(
    request: Request, found: Inspection, guard: DumpGuard, images: Path, stack: ExitStack
) -> Devices | None:
    """Start what makes the driver's calls, if the tree uses GPUs. It initialises CUDA in the
    background, which takes a while.
    """
    if found.gpus is None:
        return None
    resident = None
    if found.resident is not None:
        resident = Resident(
            found.resident, str(images), request.emit, outlives=bool(request.target.status)
        )
        stack.callback(resident.close)
    devices = Devices(
        found.root,
        found.gpus,
        guard,
        str(images),
        request.options.gpu_lock,
        request.emit,
        resident,
        request.options.populate,
    )
    stack.callback(devices.close)
    return devices


def _staging_bytes(request: Request, found: Inspection) -> int:
    """Return the bound on staging. A checkpoint copies device memory into the host's; staging for
    it comes out of what is left then.
    """
    device = found.gpus.most_bytes if found.gpus is not None else 0
    if not device:
        return request.options.staging_bytes
    return min(
        request.options.staging_bytes + device, max(0, limits.memory_available() - device) // 2
    )


def _warn_of_another_program(request: Request, parent: Manifest) -> None:
    """Warn if the job's newest snapshot is of another command. Two processes that run the same
    interpreter are not the same job: policies would forget the snapshots of one for the other's.
    """
    target = request.target
    before = parent.processes[0].command if parent.processes else []
    if target.guessed and procfs.command_line(target.pid) != before:
        message = f"the newest snapshot of job {target.job} is of another command, {shlex.join(before)}: they count as one job's"
        request.emit(
            Event(
                "dump.warning",
                {"name": "job", "message": message, "cure": "name the job with --job"},
            )
        )


def _claim(request: Request, found: Inspection, stop: threading.Event | None = None) -> Claim:
    """Claim the tree's window, and those of its GPU processes. ``stop`` ends the wait for another
    dump.
    """
    with_devices = (
        [process.pid for process in found.gpus.processes] if found.gpus is not None else []
    )
    return Claim(
        {request.target.pid, *with_devices},
        _CLAIM_DEVICES_SECONDS if with_devices else _CLAIM_SECONDS,
        stop,
    )


@contextmanager
def _devices_beside(
    request: Request, found: Inspection, devices: Devices | None, storing: Storing
) -> Iterator[None]:
    """Prepare the devices while the context runs. Pre-copy, which runs in it, mostly waits."""
    if devices is None:
        yield
        return
    over = threading.Event()
    reserved = limits.at_most_a_third(request.options.staging_bytes)

    def require() -> None:
        # Two dumps that inspect device memory at once would take GPU memory that the other one
        # needs in its window, and each would end the other's inspection.
        claim = _claim(request, found, over)
        try:
            devices.require(
                request.options.staging_bytes,
                storing.context,
                storing.parent,
                reserved=reserved,
            )
        finally:
            claim.release()

    def give_up() -> None:
        over.set()
        devices.give_up()

    with beside(require, give_up, storing.context.stop.set):
        yield


def _pre_copy_devices(
    request: Request, found: Inspection, devices: Devices, storing: Storing
) -> None:
    least = {"off": None, "on": 0}.get(request.options.pre_copy, _PRE_COPY_RESIDENT)
    if least is not None:
        with storing.staging.limited(PRE_COPY_STAGING):
            devices.pre_copy(storing.context, storing.parent, least=least)
    if found.resident is not None and devices.foreseen is not None:
        # Preflight took all resident memory for changed; by now it is known how much is.
        foreseen = replace(found, resident=replace(found.resident, copies=devices.foreseen))
        request.emit(Event("dump.predicted", predict(foreseen)))


def _explain(request: Request, images: Path, status: int) -> DumpFailed:
    found = explain(images)
    message, cure = found.sentence(f"the dump of process {request.target.pid}")
    cause = found.cause.name if found.cause is not None else ""
    # Once CRIU has stopped every thread, the early scan may have begun.
    stopped = (images / ALL_STOPPED).exists()
    kind = TreeRestless if cause == RESTLESS and not stopped else DumpFailed
    if cause == BEGUN_GPU:
        kind = GpusChanged
    if cause == UNACCEPTED:
        kind = ConnectionUnaccepted
        socket = _IN_FLIGHT.search(found.errors[0])
        if socket and (who := owner(int(socket[1], 16))):
            message += f", a socket of process {who}"
    return kind(f"{message} (criu's exit status {status})", cure=cure)
