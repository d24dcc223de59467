"""Commands that print the output of a job: logs, attach."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import Context, Interrupted
from icecore.commands.parsing import JOB, Commands

if TYPE_CHECKING:
    from icecore.host.jobs.job import Job
    from icecore.host.jobs.logs import LogPiece, Stream


def add(commands: Commands) -> None:
    """Add the commands."""
    command = partial(commands.add, numpy=False)
    parser = command("logs", logs, "Print a job's output.", "icecore logs -f train")
    parser.add_argument("job", metavar="JOB", help=JOB)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new output until the job ends"
    )
    parser.add_argument(
        "--stream",
        choices=("both", "stdout", "stderr"),
        default="both",
        metavar="both|stdout|stderr",
        help="print only this stream (default: both)",
    )

    parser = command(
        "attach",
        attach,
        "Follow a job's output.",
        "icecore attach train",
        more="Prints new output until the job ends and returns the job's exit status; Ctrl-C leaves the job running.",
    )
    parser.add_argument("job", metavar="JOB", help=JOB)


def logs(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore logs."""
    job = context.registry().find(arguments.job)
    writer = OutputWriter(job, context, arguments.stream)
    for piece in job.logs(follow=arguments.follow):
        writer.write(piece)
    return 0


def attach(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore attach."""
    job = context.registry().find(arguments.job)
    return follow(job, context, seen=job.log_sizes())


def follow(job: Job, context: Context, *, seen: Mapping[Stream, int] | None = None) -> int:
    """Print a job's output until it ends; return its exit status.

    Args:
        seen: Bytes at the beginning of each log to skip. None: skip nothing, and do not announce
            that the job is followed.
    """
    writer = OutputWriter(job, context, "both")
    if seen is not None:
        context.output.result("job.attached", {"job": job.name, "instance": job.instance})
        context.output.note(f"following job {job.name}; Ctrl-C detaches and leaves it running")
    try:
        for piece in job.logs_after(seen or {}, follow=True):
            writer.write(piece)
        status = job.wait()
    except Interrupted:
        context.output.note("")
        context.output.note(
            f"job {job.name} continues; 'icecore attach {job.name}' follows it again, 'icecore kill {job.name}' ends it"
        )
        raise
    context.output.result(
        "job.ended",
        {
            "job": job.name,
            "instance": job.instance,
            "how": str(status),
            "exit_code": status.exit_code,
        },
    )
    if status.code is None:
        context.output.note(f"job {job.name}: {status}")
    return status.exit_code


class OutputWriter:
    """Writes a job's output unchanged, or as ``job.output`` events, and reports gaps."""

    def __init__(
        self,
        job: Job,
        context: Context,
        stream: str,
        again: Callable[[OSError], bool] = lambda error: False,
    ) -> None:
        self._job = job
        self._again = again
        self._output = context.output
        self._stream = stream
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("surrogateescape") for name in ("stdout", "stderr")}

    def write(self, piece: LogPiece) -> None:
        """Write one piece."""
        if self._stream not in ("both", piece.stream):
            return
        if piece.removed:
            self._report_gap(piece)
        if not piece.data:
            return
        if self._output.as_json:
            self._text(piece.stream, self._decoders[piece.stream].decode(piece.data))
        else:
            self._output.raw(piece.data, error=piece.stream == "stderr", again=self._again)

    def _text(self, stream: Stream, text: str) -> None:
        self._output.result("job.output", {"job": self._job.name, "stream": stream, "text": text})

    def _report_gap(self, piece: LogPiece) -> None:
        name, stream = self._job.name, piece.stream
        # The gap may begin within a character.
        if self._output.as_json and (text := self._decoders[stream].decode(b"", final=True)):
            self._text(stream, text)
        self._output.result(
            "job.output_skipped", {"job": name, "stream": stream, "bytes": piece.removed}
        )
        size = units.size(piece.removed)
        self._output.note(f"note: job {name}: skipped {size} of {stream}, removed by --log-limit")
