"""A dump from beginning to end: preflight, prepare, freeze, capture, commit. The job is never lost,
whatever fails.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress

import msgspec

from icecore.dumper.capture import FileInFlight, ProcFileOpen, SemaphoreInMaking
from icecore.dumper.freeze.window import ConnectionUnaccepted, TreeRestless
from icecore.dumper.hooks import Hooks, hooks_of
from icecore.dumper.observe.deaths import DeathWatch, ProcessEnded
from icecore.dumper.observe.outlived import await_ends
from icecore.dumper.observe.unaccepted import await_accepted
from icecore.dumper.options import DumpOptions
from icecore.dumper.phases.capture import capture
from icecore.dumper.phases.commit import Committed, commit
from icecore.dumper.phases.freeze import freeze, start_criu, undisturbed
from icecore.dumper.phases.logs import trim_logs
from icecore.dumper.phases.preflight import Accepted, preflight
from icecore.dumper.phases.prepare import Ready, begin, prepare, prepare_again
from icecore.dumper.phases.request import Request
from icecore.dumper.preflight.gpu_changes import GpusChanged
from icecore.dumper.stopping import StopRequest
from icecore.dumper.target import Target
from icecore.errors import HookFailed, NotFound, UsageError
from icecore.events import Event, Sink, discard, phase
from icecore.host.criu.program import Criu, find_criu
from icecore.host.kernel import limits, procfs
from icecore.store.format.manifest import Sizes
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.text import require_label

#: How often a dump tries to stop a tree whose processes come and go, and the pauses in between, in
#: seconds.
_ATTEMPTS = 12
_FIRST_PAUSE, _MOST_PAUSE = 0.02, 1.0
#: The most tries of a whole dump if a transient condition that shows only late makes it fail, and
#: the seconds between two tries: about as long as CUDA takes to initialise.
_REPEATS, _REPEAT_PAUSE = 4, 1.0
#: Failures by conditions that pass, so that another dump may succeed.
_PASSING = (
    ConnectionUnaccepted,
    FileInFlight,
    GpusChanged,
    ProcessEnded,
    ProcFileOpen,
    SemaphoreInMaking,
    TreeRestless,
)


class DumpResult(msgspec.Struct, frozen=True):
    """The result of a dump.

    Attributes:
        snapshot: The snapshot's id.
        window_seconds: How long the job stood still (with ``stop``: until CRIU and the scan were
            done).
        seconds: Duration of the whole dump.
        sizes: In bytes.
        pre_copied: Bytes that were stored before the window.
        spilled: Staging ran full in the window, which made it longer.
    """

    snapshot: str
    job: str
    lineage: str
    parent: str
    window_seconds: float
    seconds: float
    sizes: Sizes
    pre_copied: int
    spilled: bool


def dump(
    repository: StoredRepository,
    loop: LoopThread,
    target: Target,
    options: DumpOptions | None = None,
    *,
    criu: Criu | None = None,
    workdir: str = "/dev/shm",
    committed: Callable[[DumpResult], None] | None = None,
    stopping: StopRequest | None = None,
    emit: Sink = discard,
) -> DumpResult:
    """Take a snapshot of a running process tree.

    Args:
        repository: Where the snapshot goes; it lives in ``loop``.
        target: The tree.
        options: See `DumpOptions`; None: all defaults.
        criu: The CRIU to run; None: the one that `find_criu` finds.
        workdir: Directory on tmpfs for CRIU's images while the dump lasts.
        committed: Called with the result once the snapshot is committed and the job runs, before
            the command after the dump.
        stopping: Can ask the dump to end the job, until the window begins. A streamed dump ignores
            it.
        emit: Gets ``dump.*`` and ``store.*`` events.

    Raises:
        PreflightRefused: The dump would lose or hang the job; nothing was frozen, unless an earlier
            attempt of this dump had begun its window and started over (``dump.retry``).
        WindowExceeded: The job would have stood still for too long; it runs.
        DumpFailed: The snapshot was abandoned; the job runs.
        StoreError: The snapshot could not be stored; the job runs.
        HookFailed: The snapshot is committed, but the command after the dump failed.
    """
    started = time.monotonic()
    options = options or DumpOptions()
    if options.keep_resident and not options.stop:
        raise UsageError(
            "resident memory can be kept only of a job that ends",
            cure="add --stop, or leave out --keep-resident",
        )
    if options.stop and options.memory == "streamed":
        raise UsageError(
            "a streamed dump cannot hold the tree until the commit, because CRIU writes its last images when it lets go",
            cure="dump without --stop and end the job afterwards",
        )
    if stopping is None or options.memory == "streamed":
        stopping = StopRequest()
    if options.stop:
        stopping.ask()
    limits.require_directory(workdir, "--workdir")
    for tag in options.tags:
        require_label(tag)
    try:
        with hooks_of(options, target, emit) as hooks:
            criu = criu or find_criu()
            request = Request(repository, loop, target, options, criu, workdir, emit, stopping)
            made = _run_until_fit(request, hooks)
            snapshot = hooks.snapshot = made.snapshot
            manifest = made.manifest
            done = DumpResult(
                snapshot=snapshot,
                job=manifest.job,
                lineage=manifest.lineage,
                parent=manifest.parent,
                window_seconds=manifest.window_seconds,
                seconds=time.monotonic() - started,
                sizes=manifest.sizes,
                pre_copied=made.pre_copied,
                spilled=made.spilled,
            )
            if committed is not None:
                committed(done)
    except HookFailed as error:
        error.result = done
        raise
    emit(
        Event(
            "dump.done",
            {
                "snapshot": snapshot,
                "job": done.job,
                "parent": done.parent,
                "window_seconds": done.window_seconds,
                "seconds": done.seconds,
                "logical": done.sizes.logical,
                "changed": done.sizes.changed,
                "stored": done.sizes.stored,
                "pre_copied": done.pre_copied,
                "spilled": done.spilled,
            },
        )
    )
    return done


def _run_until_fit(request: Request, hooks: Hooks) -> Committed:
    """Run the phases. Start over if they fail because of a condition that passes:

    - A process started to use a GPU after the inspection, as the process that starts
      torch.compile's compilers does.
    - A process without device memory ended.
    - CRIU could not stop a tree with device memory.
    - The job had a file open that a restore would not find.
    - A connection waited for accept(2).
    - A file that was open for writing was only in the queue of a socket.
    - A POSIX semaphore was being created.
    """
    began = DeathWatch(request.target.pid, request.target.job)
    met: set[str] = set()
    for pause in (*[_REPEAT_PAUSE] * (_REPEATS - 1), None):
        deaths = DeathWatch(request.target.pid, request.target.job)
        try:
            # Between two attempts, only `began` watches.
            with began.explaining(), ExitStack() as stack, deaths.explaining():
                committed = _run(request, hooks, deaths, stack)
            break
        except _PASSING as error:
            # A job may leave a file in a queue, which each window would find there.
            again = isinstance(error, FileInFlight) and str(error) in met
            met.add(str(error))
            final = again or (isinstance(error, TreeRestless) and error.final)
            if pause is None or final or not _runs(request.target.pid):
                raise
            began.watch([request.target.pid])
            request.emit(Event("dump.retry", {"error": str(error), "pause": pause}))
        time.sleep(pause)
    return committed


def _run(request: Request, hooks: Hooks, deaths: DeathWatch, stack: ExitStack) -> Committed:
    """Run the phases in order. ``stack`` undoes, in reverse, everything that they begin."""
    trim_logs(request)
    begun = begin(request, stack)
    accepted = preflight(request, deaths)
    if not hooks.begun:
        hooks.before()
    ready = prepare(request, accepted, begun, stack)
    for pause in (*_pauses(), None):
        try:
            committed = _window(request, accepted, ready, deaths)
            break
        except TreeRestless as error:
            error.final = pause is None
            # Device memory has gone and come back: that is not repeated for seconds on end.
            if pause is None or ready.devices is not None or not _runs(request.target.pid):
                raise
            request.emit(Event("dump.retry", {"error": str(error), "pause": pause}))
        time.sleep(pause)
        ready = prepare_again(request, ready)
    # Before the guard is released: until then it removes them if this process is killed.
    shutil.rmtree(ready.images, ignore_errors=True)
    return committed


def _window(request: Request, accepted: Accepted, ready: Ready, deaths: DeathWatch) -> Committed:
    """Stop the tree, read it, let it run, and commit."""
    # On an error, first the driver brings back what it has moved out, then CRIU lets go.
    with ready.window, ready.devices or nullcontext():
        start_criu(request, accepted, ready)
        # Preflight was a while ago. If something still hinders CRIU after the waits, CRIU reports it.
        await_ends(request.target.pid)
        await_accepted(request.target.pid, tcp=request.options.connections == "keep")
        with phase(request.emit, "dump.window") as running, undisturbed():
            frozen = freeze(request, accepted, ready, running)
            result = capture(request, ready, frozen, running)
        return commit(request, accepted, ready, result, deaths)


def _runs(pid: int) -> bool:
    with suppress(NotFound):
        return not procfs.is_zombie(pid)
    return False


def _pauses() -> list[float]:
    """Return the seconds to wait before each further attempt to stop a restless tree. They are
    random, because what a job does is often periodic.
    """
    bounds = [min(_MOST_PAUSE, _FIRST_PAUSE * 2**number) for number in range(_ATTEMPTS - 1)]
    return [random.uniform(bound / 2, bound) for bound in bounds]
