"""The freeze phase: start CRIU as far as it gets without touching the tree, then stop the tree."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec

from icecore.dumper.capture import HIDDEN_FILE
from icecore.dumper.freeze.guard_process import WINDOW_PRIORITY
from icecore.dumper.freeze.streamed import receive
from icecore.dumper.memory.early import Early, EarlyScan
from icecore.dumper.memory.images import ImageSet, read_images
from icecore.dumper.observe.files import tree_pids
from icecore.dumper.phases.preflight import Accepted
from icecore.dumper.phases.prepare import Ready
from icecore.dumper.phases.request import Request
from icecore.errors import DumpFailed
from icecore.events import Event, Phase, phase
from icecore.host.criu.hidden import list_shared
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.criu.program import (
    SOCKETS_PLUGIN,
    DumpArguments,
    lazy_dump_command,
    plugin_folder,
    stream_dump_command,
)
from icecore.host.cuda.holder import require_plugin
from icecore.host.jobs.namespaces import dump_options, dump_prefix
from icecore.host.kernel import freezer, frozen

_STREAM_SECONDS = 60.0
_FREEZE_SECONDS = 30.0


class Frozen(msgspec.Struct, frozen=True):
    """A tree that stands still.

    Attributes:
        ends: The dump ends it once the snapshot is committed.
        device: Host pid → where device memory lies in the process's memory, (start, end),
            ascending.
        images: The page maps that CRIU wrote.
        early: What was read while CRIU was at work; None: nothing.
    """

    ends: bool
    device: Mapping[int, Sequence[tuple[int, int]]]
    images: ImageSet
    early: Early | None


def start_criu(request: Request, accepted: Accepted, ready: Ready) -> None:
    """Start CRIU; it waits before it touches the tree.

    Raises:
        GpusChanged: Another process has started to use a GPU.
        DumpFailed: It failed.
    """
    with phase(request.emit, "dump.criu"):
        hidden = ready.images / HIDDEN_FILE
        hidden.touch()
        list_shared(hidden, ready.shared.rows())
        group = _group(request, ready.guard.pid)
        command = _criu_command(request, accepted, ready, group)
        with ready.devices.holder() if ready.devices is not None else nullcontext() as holder:
            ready.window.prepare(command, hidden if ready.hiding else None, holder, group)
        if ready.devices is not None:
            ready.devices.require_unchanged()


def freeze(request: Request, accepted: Accepted, ready: Ready, running: Phase) -> Frozen:
    """Begin the window and stop the tree.

    Args:
        running: The phase ``dump.window``.

    Raises:
        WindowExceeded: It took too long.
        DumpFailed: The tree could not be frozen, or its device memory not moved.
    """
    window = ready.window
    ends = request.stopping.decide()
    window.begin(limited=not ends)
    if request.options.memory == "streamed":
        _stop(accepted, ready)
        window.freeze(streamed=True)
        running.fields["streamed"] = receive(
            ready.guard.pages(), request.criu.version, ready.images, _STREAM_SECONDS
        )
        return Frozen(ends, _device(ready), read_images(ready.images), None)
    with EarlyScan(
        request.target.pid,
        ready.images,
        ready.storing.parent,
        ready.copied,
        lambda: _device(ready),
        (ready.shared, ready.files),
        accepted.found.maps,
        ready.storing.context,
        request.emit,
        ready.images / HIDDEN_FILE if ready.hiding else None,
        ready.devices.pids if ready.devices is not None else (),
    ) as early:
        _stop(accepted, ready, early.driver_works)
        window.freeze()
        running.fields["freeze_seconds"] = time.monotonic() - window.started
        early.criu_is_done()
        images = read_images(ready.images)  # while the scan still reads
        return Frozen(ends, _device(ready), images, early.finish())


def _device(ready: Ready) -> Mapping[int, Sequence[tuple[int, int]]]:
    return ready.devices.ranges if ready.devices is not None else {}


def _stop(
    accepted: Accepted, ready: Ready, driver_works: Callable[[], None] = lambda: None
) -> None:
    """Have CRIU stop the tree. If it has GPU processes, lock these before, and move device memory
    out once CRIU holds the tree.

    Args:
        driver_works: Called when it does.
    """
    window, devices = ready.window, ready.devices
    if devices is None:
        window.go()
        return
    storing, gpus = ready.storing, accepted.found.gpus
    # The parent may mislead about how much changes. The driver copies for so long that staging for
    # all of it can be faulted in meanwhile.
    with storing.staging.growing(gpus.most_bytes >> 20 if gpus else 0):
        devices.lock(window.left, storing.context, storing.parent)
        window.go()
        left = _FREEZE_SECONDS if window.left is None else min(_FREEZE_SECONDS, window.left)
        if not devices.checkpoint(left, driver_works):
            window.freeze()  # raises what CRIU says
            raise DumpFailed(f"CRIU did not freeze the tree within {left:.0f} s")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the window short: no cyclic garbage collection, which stops every thread, and precedence
    over other work of the machine.

    Threads that are started meanwhile inherit the precedence, which Linux keeps for each thread.
    Without the right to raise it, it stays as it is.
    """
    enabled, thread = gc.isenabled(), threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    gc.disable()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, WINDOW_PRIORITY)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
        if enabled:
            gc.enable()


def _group(request: Request, guard: int) -> Path | None:
    """Return the cgroup that contains the tree and nothing else, marked with the pid of the guard,
    which thaws it; None: there is none, or CRIU lacks the library that freezes it fast.
    """
    target = request.target
    if target.record is None or not CRIU_LIBRARY.exists():
        return None
    group = freezer.group_of(target.pid)
    if group is None:
        return None
    freezer.thaw_left(group)
    if frozen.is_frozen(group):
        return None  # frozen by somebody else, who thaws it
    if freezer.contains(group, [os.getpid()]):
        return None  # CRIU would freeze itself
    if not freezer.contains(group, tree_pids(target.pid)) or not freezer.mark(group, guard):
        return None
    return group


def _criu_command(
    request: Request, accepted: Accepted, ready: Ready, group: Path | None
) -> list[str]:
    """Return CRIU's arguments; the guard replaces the words in braces."""
    target, options = request.target, request.options
    record = target.record
    own = dump_options(target.pid, record) if record else []
    prefix = dump_prefix(target.pid, record) if record else []
    arguments = DumpArguments(
        connections=options.connections,
        network_lock="skip",
        file_locks=True,
        external_unix=True,
        shell_job=accepted.shell_job,
        ghost_limit=options.ghost_limit,
        group=group,
        verbosity=2,
        # Connections that are not accepted yet are lost at a restore; with ``close`` all are.
        extra=(
            "--link-remap",
            *("--action-script", "{hold}"),
            *(["--skip-in-flight"] if options.connections == "close" else []),
            *_plugins(request, ready),
            *own,
        ),
    )
    if options.memory == "streamed":
        request.emit(
            Event(
                "dump.fallback",
                {"memory": "streamed", "why": "CRIU sends all memory in the window"},
            )
        )
        return [
            *prefix,
            *stream_dump_command(
                request.criu, target.pid, ready.images, arguments, pages="{pages}"
            ),
        ]
    return [
        *prefix,
        *lazy_dump_command(
            request.criu, target.pid, ready.images, arguments, pages="{pages}", status="{status}"
        ),
    ]


def _plugins(request: Request, ready: Ready) -> list[str]:
    """Name the directory of CRIU's plugins."""
    others = request.options.criu_plugins
    own = [SOCKETS_PLUGIN] if SOCKETS_PLUGIN.exists() else []
    if ready.devices is not None:
        own.append(require_plugin())
    if not own:
        return ["--libdir", others] if others else []
    return ["--libdir", str(plugin_folder(ready.images / "plugins", others, own))]
