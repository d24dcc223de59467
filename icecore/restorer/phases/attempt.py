"""What the caller of a restore wants, and how it hears what happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.events import Event, Sink
from icecore.host.criu.program import Criu
from icecore.host.jobs.registry import Registry
from icecore.restorer.fill.device_file import FileUnusable
from icecore.restorer.options import RestoreOptions
from icecore.restorer.tree import PidTaken
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread

DEFAULT_WORKDIR = "/dev/shm"


class Attempt(msgspec.Struct, frozen=True):
    """One attempt at a restore.

    Attributes:
        repository: Holds the snapshot; it lives in ``loop``.
        snapshot: Its id.
        record: Its record, if the caller has looked it up.
        criu: Which CRIU; None: the one that `find_criu` finds.
        registry: Records the jobs of `icecore run`.
        emit: Gets the events; an exception from it fails the restore.
        began: When the attempt began (`time.perf_counter`).
        device_file: Whether device memory may come through a file.
        tries: Number of times that the tree may be built, including this one.
    """

    repository: StoredRepository
    loop: LoopThread
    snapshot: str
    record: SnapshotRecord | None
    options: RestoreOptions
    criu: Criu | None
    registry: Registry
    emit: Sink
    began: float
    device_file: bool
    tries: int = 3

    def after(self, error: BaseException) -> Attempt | None:
        """Return what to try after this attempt has failed with ``error``; None: nothing."""
        if isinstance(error, FileUnusable) and self.device_file:
            return replace(self, began=time.perf_counter(), device_file=False)
        if isinstance(error, PidTaken) and self.tries > 1:
            return replace(self, began=time.perf_counter(), tries=self.tries - 1)
        return None

    @property
    def workdir(self) -> str:
        """The directory in which the restore makes its working directory."""
        return self.options.workdir or DEFAULT_WORKDIR

    @property
    def state(self) -> Path:
        """The state directory, which holds the journals of file changes."""
        return self.registry.state

    def tell(self, event: Event) -> None:
        """Emit an event that must not stop anything if the sink raises."""
        with suppress(Exception):
            self.emit(event)

    def tell_left(self, sentences: Sequence[str]) -> None:
        """Warn of each file that could not be put back or removed."""
        for sentence in sentences:
            self.tell(Event("restore.warning", {"name": "files", "message": sentence}))

    @contextmanager
    def only_warning(self, what: str) -> Iterator[None]:
        """Turn a failure into a warning."""
        try:
            yield
        except Exception as left:  # noqa: BLE001 - what it is part of does not fail for it
            self.tell(
                Event(
                    "restore.warning",
                    {"name": "undo", "message": f"{what}: {type(left).__name__}: {left}"},
                )
            )
