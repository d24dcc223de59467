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
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from icecore.errors import IcecoreError, PreflightRefused
from icecore.events import Event, Value
from icecore.text import harmless

if TYPE_CHECKING:
    from icecore.commands.progress import Bars
    from icecore.commands.relay import Relay

#: Time at the end for a relay to print what still waits.
_LAST_SECONDS = 5.0
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
        self._bars: Bars | None = None
        self._relay: Relay | None = None
        if not as_json and not quiet and self._stderr.isatty():
            from icecore.commands.progress import Bars  # on a terminal only

            self._bars = Bars(self._stderr)

    def relay(self) -> None:
        """From now on, print events and remarks in a separate thread, so that no caller waits for a
        reader. If too many wait, drop further ones. Results and a job's output still wait for their
        reader.
        """
        from icecore.commands.relay import Relay

        self._relay = Relay()

    def _report(self, call: Callable[[], None]) -> None:
        """Print something for which no caller should wait."""
        if self._relay is None:
            call()
        else:
            self._relay.put(call)

    # -- results

    def result(self, name: str, fields: Mapping[str, Value], text: str = "") -> None:
        """Print a result: an event as JSON, else ``text`` as a line, if it is not empty."""
        if self.as_json:
            event = Event(name, dict(fields))
            if self._relay is None:
                self._json(event)
            else:
                self._relay.do(lambda: self._json(event))
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
        if self._relay is not None:
            self._relay.settle()  # earlier remarks come first
        left = memoryview(data)
        while left:
            try:
                if self._relay is None or self._bars is not None:
                    with self._lock:
                        self._pause()
                        stream.flush()
                written = os.write(stream.fileno(), left)  # may block, so it does not hold the lock
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
            data = text.encode(encoding, "backslashreplace")
            if self._relay is not None:
                from icecore.commands.relay import write_all

                write_all(stream.fileno(), data)
                return
            text = data.decode(encoding)
        stream.write(text)
        stream.flush()

    # -- while it lasts

    def event(self, event: Event) -> None:
        """Handle an event; any thread may call this."""
        if self.as_json or not self._quiet:
            self._report(lambda: self._event(event))

    def _event(self, event: Event) -> None:
        if self.as_json:
            self._json(event)
            return
        with self._lock:
            if self._bars is not None:
                self._bars.event(event)
        from icecore.commands.event_text import describe  # many commands have no event

        lines = describe(event)
        # With progress bars, a phase prints no line at its end, except the predicted window.
        tells = event.fields.get("state") in (None, "failed") or "moved_bytes" in event.fields
        if lines and (self._bars is None or tells):
            self._say(self._stderr, *lines)

    def note(self, text: str) -> None:
        """Print a one-line remark on stderr; nothing in JSON or quiet mode."""
        if not self.as_json and not self._quiet:
            self._report(lambda: self._say(self._stderr, text))

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
        from icecore.commands.event_text import explain

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
        if self._relay is None:
            self._end()
            return
        self._relay.put(self._end)
        if not self._relay.finish(_LAST_SECONDS):
            self._give_up()

    def _end(self) -> None:
        with self._lock:
            self._pause()

    def _give_up(self) -> None:
        """Discard all further output, so that nothing waits for a reader that does not read."""
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for stream in (self._stdout, self._stderr):
            with suppress(OSError):
                os.dup2(null, stream.fileno())
        os.close(null)
