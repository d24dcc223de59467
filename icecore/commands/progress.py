"""Progress bars of running phases, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from icecore.commands.event_text import TITLES
from icecore.events import Event

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """Progress bars; cleared before anything else is written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def event(self, event: Event) -> None:
        """Update the bars."""
        state = event.fields.get("state")
        total, done = event.fields.get("total"), event.fields.get("bytes")
        if event.name == "store.upload" and isinstance(done, int) and self._progress is not None:
            # The total is unknown beforehand, so the bar shows the bytes stored so far.
            for shown in self._tasks.values():
                self._progress.advance(shown, done)
            return
        if event.name not in TITLES and event.name not in self._tasks:
            return
        if state in ("end", "failed"):
            self._end(event.name)
            return
        progress = self._shown()
        task = self._tasks.get(event.name)
        if task is None:
            task = self._tasks[event.name] = progress.add_task(TITLES[event.name], total=None)
        if isinstance(total, (int, float)):
            progress.update(task, total=total)
        if isinstance(done, (int, float)):
            progress.update(task, completed=done)

    def _shown(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TransferSpeedColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description:<24}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=Console(file=self._file),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        return self._progress

    def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None and self._progress is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self.clear()

    def clear(self) -> None:
        """Remove the bars from the terminal; the next event shows them again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()
