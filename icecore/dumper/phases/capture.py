"""The capture phase: read the stopped tree, then let it run again, unless the caller ends the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from icecore.dumper.capture import Capture, Captured
from icecore.dumper.phases.freeze import Frozen
from icecore.dumper.phases.logs import log_starts
from icecore.dumper.phases.prepare import Ready
from icecore.dumper.phases.request import Request
from icecore.events import Phase
from icecore.host.jobs.logs import Stream


class CaptureResult(msgspec.Struct, frozen=True):
    """A tree that was read, not yet stored.

    Attributes:
        capture: Reads, after the window, what CRIU wrote.
        tree: What has been read.
        window_seconds: How long the job stood still; if it is to be ended, until here.
        ends: The job stands still, and the dump ends it once the snapshot is committed.
        log_starts: The start offsets of the job's logs.
    """

    capture: Capture
    tree: Captured
    window_seconds: float
    ends: bool
    log_starts: Mapping[Stream, int]


def capture(request: Request, ready: Ready, frozen: Frozen, running: Phase) -> CaptureResult:
    """Read what the running job would change, then let it run.

    Args:
        running: The phase ``dump.window``.

    Raises:
        WindowExceeded: It took too long.
        DumpFailed: The tree could not be read, or CRIU or the driver failed to let it go.
    """
    window, devices = ready.window, ready.devices
    reading = Capture(
        request.options,
        ready.images,
        request.criu.version,
        ready.storing.parent,
        ready.copied,
        ready.shared,
        ready.files,
        ready.storing.context,
        request.emit,
        request.target.record.is_own if request.target.record else lambda path: False,
        ready.data,
    )
    tree = reading.in_window(request.target.pid, frozen.device, frozen.images, frozen.early)
    # After the logs were read: a start offset is raised before output is removed.
    starts = log_starts(request.target)
    running.bytes = tree.scanned
    running.fields["hidden"] = tree.hidden
    if devices is not None:
        devices.wait_copied(window.check)
    if frozen.ends:
        window.seconds = time.monotonic() - window.started
    else:
        _let_run(ready, tree, running)
    with suppress(RuntimeError):  # no thread: it is done at the end
        threading.Thread(target=_unmap, args=(ready,), name="unmap").start()
    return CaptureResult(reading, tree, window.seconds, frozen.ends, starts)


def _unmap(ready: Ready) -> None:
    """Unmap shared memory and files while the dump goes on."""
    for memory in (ready.shared, ready.files):
        memory.unmap()


def _let_run(ready: Ready, tree: Captured, running: Phase) -> None:
    """End the window. The driver brings device memory back before CRIU lets go of the tree.

    Args:
        running: The phase ``dump.window``.
    """
    window, devices = ready.window, ready.devices
    window.thaw()
    if devices is not None:
        devices.go()
    window.thawed(list(tree.standing.pids))
    if devices is not None:
        devices.give_back()
        window.over()
    window.end()
    ready.claim.release()
    running.fields["window_seconds"] = window.seconds
