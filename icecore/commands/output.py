"""Output of the command line: JSON lines, or tables and progress for people.

Results go to stdout, everything else to stderr. Names from jobs and repositories are always
escaped: all text goes through `Output._say`, which escapes each line (`icecore.text.harmless`),
including embedded newlines, so callers pass several lines separately. Only `Output.raw`, which
shows a job's output, writes bytes unchanged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from icecore import units
from icecore.errors import IcecoreError, PreflightRefused
from icecore.events import Event, Value
from icecore.text import harmless

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Titles of phases that are shown to people.
TITLES: Mapping[str, str] = {
    "check": "checking",
    "dump.criu": "starting CRIU",
    "dump.gpu.checkpoint": "device memory to host",
    "dump.resident.unmap": "unmapping resident memory",
    "dump.resident.fingerprint": "comparing resident memory",
    "dump.resident.copy": "copying changed memory",
    "dump.resident.map": "mapping resident memory",
    "dump.gpu.lock": "waiting for GPUs",
    "dump.gpu.restore": "device memory to GPUs",
    "dump.precopy": "scanning while it runs",
    "dump.preflight": "preflight",
    "dump.store": "storing",
    "dump.window": "window",
    "export.write": "exporting",
    "gc.compact": "rewriting objects",
    "gc.delete": "deleting",
    "gc.survey": "listing objects",
    "hook": "hook",
    "import.store": "importing",
    "repair": "repairing",
    "restore.criu": "building the tree",
    "restore.resident.memory": "filling resident memory",
    "restore.resident.map": "mapping resident memory",
    "restore.gpu.memory": "filling device memory",
    "restore.gpu.restore": "device memory to GPUs",
    "restore.images": "writing images",
    "restore.memory": "filling memory",
    "restore.shared": "filling shared memory",
    "stats": "counting",
    "store.commit": "committing",
}

#: Kinds of device memory that the preload leaves to the driver, by the names of its counters.
_LEFT: Mapping[str, str] = {
    "pool": "in pools",
    "small": "in small allocations",
    "managed": "of managed memory",
    "foreign": "of other kinds",
}


#: SGR parameters (ECMA-48) of a table's header and title.
_BOLD, _ITALIC = "1", "3"


def _laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], terminal: bool
) -> list[str]:
    """Return the lines of a table, escaped and as long as they need to be: wrapped text could not
    be copied or searched for.
    """
    cells = [[harmless(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = []
        for cell, width, column in zip(row, widths, columns, strict=True):
            room = " " * (width - _width(cell))
            padded.append(room + cell if column in right else cell + room)
        lines.append("  ".join(padded).rstrip())
    return [_styled(lines[0], _BOLD, terminal), *lines[1:]] if any(columns) else lines[1:]


def _styled(text: str, style: str, terminal: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if terminal else text


def _width(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


class Output:
    """The output of a command.

    Args:
        as_json: Print one JSON object per line on stdout, events included, instead of text.
        quiet: Print no progress and no remarks.
        stdout, stderr: Default: this process's.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.as_json = as_json
        self._quiet = quiet
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._lock = threading.Lock()
        self._bars: _Bars | None = None
        if not as_json and not quiet and self._stderr.isatty():
            self._bars = _Bars(self._stderr)

    # -- results

    def result(self, name: str, fields: Mapping[str, Value], text: str = "") -> None:
        """Print a result: an event as JSON, else ``text`` as a line, if it is not empty."""
        if self.as_json:
            self._json(Event(name, dict(fields)))
        elif text:
            self.line(text)

    def line(self, text: str) -> None:
        """Print one line on stdout; nothing in JSON mode."""
        if not self.as_json:
            self._say(self._stdout, text)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        right: Sequence[str] = (),
    ) -> None:
        """Print a table on stdout; nothing in JSON mode.

        Args:
            right: Right-aligned columns, for numbers.
        """
        if self.as_json or not rows:
            return
        terminal = self._stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        lines = [
            *([_styled(harmless(title), _ITALIC, terminal)] if title else []),
            *_laid_out(columns, rows, right, terminal),
        ]
        with self._lock:
            self._pause()
            self._write(self._stdout, "".join(f"{line}\n" for line in lines))

    def raw(
        self,
        data: bytes,
        *,
        error: bool = False,
        again: Callable[[OSError], bool] = lambda error: False,
    ) -> None:
        """Write bytes of a job's output unchanged, as cat(1) does.

        Args:
            again: Says whether to try again what could not be written; may wait.
        """
        stream = self._stderr if error else self._stdout
        left = memoryview(data)
        while left:
            try:
                with self._lock:
                    self._pause()
                    stream.flush()
                    written = os.write(stream.fileno(), left)
            except OSError as failed:
                if not again(failed):
                    raise
            else:
                left = left[written:]

    def _say(self, stream: TextIO, *lines: str) -> None:
        """Print lines for people, each of them escaped."""
        with self._lock:
            self._pause()
            self._write(stream, "".join(f"{harmless(line)}\n" for line in lines))

    def _write(self, stream: TextIO, text: str) -> None:
        """Write escaped text; escape characters that the stream's encoding lacks as well."""
        encoding = getattr(stream, "encoding", None)
        if encoding:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        stream.write(text)
        stream.flush()

    # -- while it lasts

    def event(self, event: Event) -> None:
        """Handle an event; any thread may call this."""
        if self.as_json:
            self._json(event)
            return
        if self._quiet:
            return
        with self._lock:
            if self._bars is not None:
                self._bars.event(event)
        lines = describe(event)
        # With progress bars, a phase prints no line at its end, except the predicted window.
        tells = event.fields.get("state") in (None, "failed") or "moved_bytes" in event.fields
        if lines and (self._bars is None or tells):
            self._say(self._stderr, *lines)

    def note(self, text: str) -> None:
        """Print a one-line remark on stderr; nothing in JSON or quiet mode."""
        if not self.as_json and not self._quiet:
            self._say(self._stderr, text)

    def trace(self, text: str) -> None:
        """Print a traceback on stderr with each line marked, because its messages may contain
        foreign text and newlines.
        """
        self._say(self._stderr, *(f"| {line}" for line in text.rstrip("\n").split("\n")))

    def error(self, error: IcecoreError) -> None:
        """Print an error and its cure on stderr and, in JSON mode, as an ``error`` event."""
        fields: dict[str, Value] = {
            "class": type(error).__name__,
            "message": error.message,
            "cure": error.cure,
            "exit_code": error.exit_code,
        }
        if isinstance(error, PreflightRefused):
            fields["reasons"] = [
                {"name": name, "message": message, "cure": cure}
                for name, message, cure in error.reasons
            ]
        if self.as_json:
            self._json(Event("error", fields))
        self._say(self._stderr, *explain(error))

    def _json(self, event: Event) -> None:
        # ASCII in every locale. JSON escapes all control characters except DEL.
        line = json.dumps(event.as_json(), allow_nan=False).replace("\x7f", "\\u007f")
        with self._lock:
            self._write(self._stdout, f"{line}\n")

    def _pause(self) -> None:
        if self._bars is not None:
            self._bars.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._pause()


def explain(error: IcecoreError) -> list[str]:
    """Return an error as lines for people."""
    if isinstance(error, PreflightRefused) and error.reasons:
        lines = ["icecore: refused; nothing was stopped:"]
        for name, message, cure in error.reasons:
            lines += _lines(f"  {name}: ", message)
            if cure:
                lines += _lines("    cure: ", cure)
        return lines
    lines = _lines("icecore: ", error.message)
    if error.cure:
        lines += _lines("  cure: ", error.cure)
    return lines


def _lines(start: str, text: str) -> list[str]:
    """Return a text as lines. All lines but the first are marked, so that foreign text, such as a
    hook's output, cannot imitate icecore's own.
    """
    first, *others = text.split("\n")
    return [f"{start}{first}", *(f"  | {line}" for line in others)]


def describe(event: Event) -> list[str]:
    """Return an event as lines for people; none for events that people need not see."""
    fields = event.fields
    state = fields.get("state")
    if state == "begin":
        return []
    title = TITLES.get(event.name, event.name)
    if state in ("end", "failed"):
        if event.name not in TITLES:
            return []
        words = [title, units.seconds(_number(fields, "seconds"))]
        if "bytes" in fields:
            words.append(units.size(_number(fields, "bytes")))
        if "gb_per_s" in fields:
            words.append(f"{_number(fields, 'gb_per_s'):.2f} GB/s")
        if state == "failed":
            words.append("failed")  # the error follows once, at the end
        if "moved_bytes" in fields:
            first, *others = _window_words(fields)
            return ["  ".join([*words, first]), *others]
        return ["  ".join(words)]
    if event.name == "dump.predicted":
        return [_predicted_words(fields)]
    if event.name == "run.gpu":
        return _gpu_words(fields)
    if event.name == "run.withheld":
        return [_withheld_words(fields)]
    if event.name in ("run.limits", "restore.limits"):
        return [_limits_words(fields)]
    if event.name == "workdir.swept":
        return [f"note: removed {fields['directory']}, left by a killed dump or restore"]
    if event.name == "state.tightened":
        return [
            f"note: others had access to the directory {fields['directory']} (mode {fields['before']}); now only its owner has"
        ]
    if event.name in ("restore.warning", "export.warning", "copy.warning", "sync.warning"):
        return _lines("warning: ", str(fields.get("message")))
    if event.name == "restore.recovered":
        what = f"a killed restore of snapshot {fields['snapshot']} had changed files; its changes were {fields['how']}"
        left = fields["left"]
        return [
            what,
            *(f"warning: {sentence}" for sentence in (left if isinstance(left, list) else [])),
        ]
    if "error" in fields and event.name != "restore.failed":
        return _lines(f"warning: {event.name}: ", str(fields["error"]))
    return []


def _withheld_words(fields: Mapping[str, Any]) -> str:
    return f"note: the job does not get {', '.join(fields['names'])}; '--env NAME' passes one on"


def _limits_words(fields: Mapping[str, Any]) -> str:
    return f"warning: limits of the job are lower than wanted: {', '.join(fields['short'])}"


def _window_words(fields: Mapping[str, Any]) -> list[str]:
    """Return what preflight predicts for a GPU job."""
    seconds, least, most = (
        units.seconds(_number(fields, f"window_{which}")) for which in ("seconds", "least", "most")
    )
    window = f"  a window of about {seconds} ({least} to {most})"
    moved = f"{units.size(_number(fields, 'moved_bytes'))} will be moved"
    if "resident_bytes" not in fields:
        return [f"device memory: {moved}", window]
    without = _number(fields, "no_room")
    why = f"; {units.size(without)} have no room for a copy on the GPU" if without else ""
    stays = f"device memory: {units.size(_number(fields, 'resident_bytes'))} stay on GPUs, {moved}"
    left = left_words(fields.get("left", {}))
    return [
        stays,
        f"{window}, if all resident memory has changed{why}",
        *([f"  {left}"] if left else []),
    ]


def _predicted_words(fields: Mapping[str, Any]) -> str:
    """Return the prediction that follows the comparison of resident memory."""
    seconds, least, most = (
        units.seconds(_number(fields, f"window_{which}")) for which in ("seconds", "least", "most")
    )
    without = _number(fields, "no_room")
    why = f"; {units.size(without)} have no room for a copy on the GPU" if without else ""
    return f"a window of about {seconds} ({least} to {most}), by what changed in device memory so far{why}"


def left_words(left: Mapping[str, int]) -> str:
    """Return the device memory that the preload has left to the driver (docs/reference/format.md), as text;
    empty if there is none.
    """
    sizes = {kind: left.get(f"{name}_bytes", 0) for name, kind in _LEFT.items()}
    parts = ", ".join(f"{units.size(size)} {kind}" for kind, size in sizes.items() if size)
    words = [f"{units.size(sum(sizes.values()))} with the driver: {parts}"] if parts else []
    if left.get("captured"):
        words.append(f"{left['captured']} allocated in stream captures")
    if left.get("ipc_exports"):
        words.append(f"{left['ipc_exports']} shared by CUDA IPC")
    return "; ".join(words)


def _gpu_words(fields: Mapping[str, Any]) -> list[str]:
    """Return what ``run --gpu`` did."""
    lines = [
        f"--gpu set {' '.join(f'{key}={value}' for key, value in fields['added'].items()) or 'nothing'}: {fields['cost']}"
    ]
    if fields["kept"]:
        own = " ".join(f"{key}={value}" for key, value in fields["kept"].items())
        lines.append(f"warning: you set {own}: a job whose ranks use this cannot be snapshotted")
    if fields["resident"] and fields["driver"]:
        lines.append(
            "device memory is resident: it stays on its GPUs in windows; allocations take slightly longer"
        )
    return [*lines, *(f"note: {note}" for note in fields["notes"])]


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


class _Bars:
    """Progress bars of running phases; cleared before anything else is written."""

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
