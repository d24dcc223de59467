"""The command line: parses, loads the configuration, runs one command, and turns errors into exit
codes (docs/cli.md).
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from icecore import config
from icecore.commands import (
    exchange,
    jobs,
    keys,
    node,
    regions,
    repositories,
    snapshots,
    supervise,
    trust,
)
from icecore.commands.context import Commands, Context, Interrupted, Parser, load_numpy
from icecore.errors import IcecoreError, StoreFull, UsageError
from icecore.host.workdir import sweep
from icecore.output import Output

GROUPS = (jobs, supervise, snapshots, repositories, trust, keys, regions, exchange, node)
#: Commands that see or change what runs on this node: they put right first what a killed restore
#: left among jobs' files.
_OF_THIS_NODE = frozenset({"run", "ps", "dump", "restore", "doctor"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def build_parser() -> Parser:
    """The parser with all commands."""
    parser = Parser(
        prog="icecore",
        description="Transparent, incremental snapshots of running process trees.",
        epilog="Snapshots hold everything that a job had in memory, secrets too: guard the repository like the job itself.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    _common(parser, first=True)
    parsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    commands = Commands(parsers, _common)
    for group in GROUPS:
        group.add(commands)
    return parser


def _common(parser: argparse.ArgumentParser, first: bool = False) -> None:
    """The options of every command; they may stand before it or after it."""

    def default(value: object) -> object:
        return value if first else argparse.SUPPRESS

    group = parser.add_argument_group("common options")
    group.add_argument(
        "-r",
        "--repository",
        metavar="PLACE",
        default=default(""),
        help="the repository (or ICECORE_REPOSITORY)",
    )
    group.add_argument(
        "--config", metavar="FILE", default=default(""), help="a further configuration file"
    )
    group.add_argument(
        "--json",
        action="store_true",
        default=default(False),
        help="print JSON objects, one a line (docs/events.md)",
    )
    group.add_argument(
        "-q", "--quiet", action="store_true", default=default(False), help="show no progress"
    )


def split_command(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words before the first ``--`` and those after it, which are a job's command and not ours
    to parse.
    """
    if "--" not in words:
        return list(words), None
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    own, rest = split_command(sys.argv[1:] if words is None else words)
    _prepare_streams()
    output = Output(as_json="--json" in own, quiet=True)
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    threads_before = threading.excepthook
    threading.excepthook = lambda about: output.trace(
        "".join(traceback.format_exception(about.exc_type, about.exc_value, about.exc_traceback))
    )
    try:
        _require_utf8()
        return _run(own, rest)
    except IcecoreError as error:
        output.error(error)
        return error.exit_code
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError:
        output.error(
            IcecoreError(
                "this machine has too little memory for that", cure="lower --staging or --budget"
            )
        )
        return 1
    except OSError as error:
        output.error(_of_system(error))
        return 1
    except Exception as error:  # noqa: BLE001 - a mistake of ours: told in full, and to whoever reads JSON as well
        output.trace(traceback.format_exc())
        output.error(
            IcecoreError(
                f"internal error: {type(error).__name__}: {error}",
                cure="report it with the lines above",
            )
        )
        return 1
    finally:
        threading.excepthook = threads_before
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare_streams() -> None:
    """Make the standard streams usable, whatever was closed and whatever the locale says.

    A closed one is /dev/null: else the next file that is opened got its number, and would be
    written to by who means the stream. What an encoding cannot say is escaped, and is no error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115 - for as long as the process lives
            setattr(sys, name, stream)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _require_utf8() -> None:
    """Refuse an encoding of names in which bytes and texts are not what they are elsewhere.

    Raises:
        UsageError: It is not UTF-8.
    """
    found = sys.getfilesystemencoding()
    if codecs.lookup(found).name != "utf-8":
        raise UsageError(
            f"the locale encodes file names as {found}; icecore requires UTF-8, which keeps all names exactly",
            cure="set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8",
        )


def _run(words: list[str], rest: list[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.version:
        from importlib.metadata import version

        print(f"icecore {version('icecore')}")
        return 0
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command is given", cure="'icecore COMMAND --help' explains one")
    if rest is not None and arguments.command != "run":
        raise UsageError(
            f"'--' and what follows it belong to 'run', not to '{arguments.command}'",
            cure="leave them out",
        )
    arguments.job_command = rest or []
    settings = config.load(arguments.config)
    if arguments.numpy:
        load_numpy()
    with (
        Output(as_json=arguments.json, quiet=arguments.quiet) as output,
        Context(settings, output, arguments.repository or settings.repository) as context,
    ):
        if arguments.command in _OF_THIS_NODE:
            context.recover_files()
        for workdir in {settings.dump.workdir, settings.restore.workdir or "/dev/shm"}:
            sweep(workdir, output.event)
        status: int = arguments.run(arguments, context)
        return status


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: a second signal must not break the undoing.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _of_system(error: OSError) -> IcecoreError:
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space left: {error}", cure="make room, or name another --workdir")
    cure = "run as root" if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() else ""
    return IcecoreError(
        f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", cure=cure
    )


if __name__ == "__main__":
    sys.exit(main())
