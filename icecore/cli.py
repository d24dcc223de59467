"""The command line: parses arguments, loads the configuration, runs one command, and maps errors to
exit codes.
"""

from __future__ import annotations

import argparse
import codecs
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from icecore.commands.context import Context, Interrupted, Origin, load_numpy
from icecore.commands.demand import OnDemand, OneCommand, TopOnDemand
from icecore.commands.output import Output
from icecore.commands.parsing import CommandParser, Commands, TopParser
from icecore.config.loading import load
from icecore.errors import IcecoreError, ServiceFailed, StoreFull, UsageError
from icecore.host.workdir import sweep

if TYPE_CHECKING:
    from icecore.config import Config
    from icecore.remote.connection import Service

#: The groups of commands in the order of the help text: each module of `icecore.commands`, and the
#: commands that it adds. A module is imported when one of its commands is called.
GROUPS: tuple[tuple[str, Mapping[str, tuple[str, ...]]], ...] = (
    (
        "jobs",
        {
            "jobs": ("run", "ps", "logs", "attach", "wait", "kill", "rm"),
            "supervise": ("schedule",),
        },
    ),
    ("snapshots", {"snapshots": ("dump", "restore", "ls", "show", "diff")}),
    (
        "repositories",
        {
            "repositories": ("forget", "mark", "init", "gc", "check", "repair", "stats"),
            "trust": ("trust",),
        },
    ),
    (
        "replicas and exchange",
        {"regions": ("sync", "copy"), "exchange": ("import", "export")},
    ),
    (
        "node and keys",
        {
            "keys": ("key",),
            "node": ("doctor",),
            "serve": ("serve", "token"),
            "page": ("page",),
            "completion": ("completion",),
        },
    ),
)
#: Commands that see or change what runs on this node. They first recover what a killed dump left
#: frozen, and the files that a killed restore left changed.
_OF_THIS_NODE = frozenset({"run", "ps", "dump", "restore", "doctor", "serve"})
#: Commands whose outcome is counted here; `icecore.api` counts dumps and restores.
_COUNTED = frozenset({"check", "copy", "forget", "gc", "repair", "sync"})
#: Commands that the node service does for users who are not root.
_OF_REPOSITORY = frozenset({"ls", "show", "diff", "mark", "forget"})
_SERVED = _OF_REPOSITORY | {
    *("run", "ps", "logs", "attach", "wait", "kill", "rm", "dump", "restore", "schedule"),
}
#: Garbage is collected when this many more objects that can form cycles were created than freed.
_GC_THRESHOLD = 50_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Options of ``run`` with any of which it supervises the job.
_SUPERVISING = frozenset({"--resume", "--every", "--on-term", "--restart"})
_TOP: Mapping[str, Any] = {
    "prog": "icecore",
    "usage": "icecore [options] COMMAND ...",
    "description": "Transparent, incremental snapshots of running process trees.",
    "epilog": "'icecore COMMAND --help' explains a command and shows examples.\n\n"
    "A snapshot contains everything that the job had in memory, including secrets: "
    "protect the repository like the job itself.",
    "allow_abbrev": False,
}


def build_parser() -> TopParser:
    """Return the parser of all commands."""
    parser = TopParser(**_TOP)
    commands = Commands(_prepare(parser), _common)
    for title, modules in GROUPS:
        for module in modules:
            _module(module).add(commands.of_group(title))
    return parser


def parser_on_demand() -> TopParser:
    """Return a parser that parses as `build_parser`'s does."""
    homes = {
        name: module for _, modules in GROUPS for module, names in modules.items() for name in names
    }
    parser = TopOnDemand(**_TOP)
    parser.whole = build_parser
    parsers = _prepare(parser, OnDemand)
    parsers.defer(homes, lambda name: _module(homes[name]).add(OneCommand(parsers, _common, name)))
    return parser


def _module(name: str) -> Any:
    return import_module(f"icecore.commands.{name}")


def _prepare(parser: TopParser, action: Any = argparse._SubParsersAction) -> Any:
    """Add the options of the program; return what commands are added to."""
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    _common(parser, first=True)
    return parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        title="commands",
        prog="icecore",
        parser_class=CommandParser,
        action=action,
    )


def _common(parser: argparse.ArgumentParser, first: bool = False) -> None:
    """Add the options of every command, which may precede or follow the command."""

    def default(value: object) -> object:
        return value if first else argparse.SUPPRESS

    group = parser.add_argument_group("common options")
    group.add_argument(
        "-r",
        "--repository",
        metavar="PLACE",
        default=default(""),
        help="the repository: a directory, or s3://BUCKET/PREFIX (default: ICECORE_REPOSITORY, "
        "or the configured one)",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        default=default(""),
        help="read this configuration file after the standard ones (default: ICECORE_CONFIG)",
    )
    group.add_argument(
        "--service",
        metavar="SOCKET",
        default=default(""),
        help="let the node service at this socket do it (default: ICECORE_SERVICE; for users other"
        " than root, the configured one, where it runs)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        default=default(False),
        help="print one JSON object per line instead of text",
    )
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        default=default(False),
        help="print no progress and no remarks",
    )


def split_command(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments at the first ``--``: icecore's own, and the job's command, which is not
    parsed. The latter is None without a ``--``.
    """
    if "--" not in words:
        return list(words), None
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def program() -> int:
    """Run the command line of this process, which does nothing else; return the exit status.

    A command imports hundreds of modules, whose objects live until it ends. So garbage is collected
    rarely, unless the command runs for long, and not again at exit. Collections took a tenth of the
    time of a short command.
    """
    if not _lives_long(split_command(sys.argv[1:])[0]):
        gc.set_threshold(_GC_THRESHOLD)
    try:
        return main()
    finally:
        gc.freeze()


def main(
    words: Sequence[str] | None = None,
    *,
    output: Output | None = None,
    origin: Origin | None = None,
) -> int:
    """Run the command line; return the exit status.

    Args:
        words: Default: this process's arguments.
        output: Gets the output; default: this process's streams.
        origin: Whose request this is, where the node service runs the command.
    """
    own, rest = split_command(sys.argv[1:] if words is None else words)
    if words is None and _lives_long(own):
        _begin_again()
    _prepare_streams()
    recorder = output
    output = output or Output(as_json="--json" in own, quiet=True)
    before = {
        number: signal.signal(number, _interrupt)
        for number in _SIGNALS
        # nohup(1) ignores it for what it starts.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    if origin is not None and not origin.supervised:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threads_before = threading.excepthook
    threading.excepthook = lambda about: output.trace(
        "".join(traceback.format_exception(about.exc_type, about.exc_value, about.exc_traceback))
    )
    try:
        _require_utf8()
        return _run(own, rest, recorder, origin)
    except IcecoreError as error:
        output.error(error)
        return error.exit_code
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except BrokenPipeError:
        # The reader closed the pipe: flushing it at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError:
        output.error(
            IcecoreError("this machine has too little memory", cure="lower --staging or --budget")
        )
        return 1
    except OSError as error:
        output.error(_of_system(error))
        return 1
    except Exception as error:  # noqa: BLE001 - a bug: report it in full, to readers of JSON too
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
            # A signal that is ignored by now must not change the exit status of the ending process.
            if words is not None or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def _lives_long(words: Sequence[str]) -> bool:
    """Return whether a command line is that of a service or of a supervisor."""
    supervised = any(word.partition("=")[0] in _SUPERVISING for word in words)
    return "serve" in words or ("run" in words and supervised)


def _begin_again() -> None:
    """Execute this program again, with an allocator that does not grow for hours."""
    from icecore.host.kernel import libc

    given = len(sys.orig_argv) - len(sys.argv) + 1
    own = sys.orig_argv[max(1, given) :] == sys.argv[1:]  # not within another program
    if libc.restore_environment() or not own or not os.path.isabs(sys.executable):
        return
    environment = libc.without_thread_caches(os.environ)
    with suppress(OSError):  # it works without, too
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _prepare_streams() -> None:
    """Make the standard streams usable, even if they are closed and whatever the locale is.

    A closed stream becomes /dev/null: otherwise the next open file gets its number, and output for
    the stream goes into that file. Characters that the encoding lacks are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115 - stays open until exit
            setattr(sys, name, stream)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _require_utf8() -> None:
    """Require UTF-8 as the encoding of file names.

    Raises:
        UsageError: The locale uses another encoding.
    """
    found = sys.getfilesystemencoding()
    if codecs.lookup(found).name != "utf-8":
        raise UsageError(
            f"the locale encodes file names as {found}; icecore requires UTF-8, which keeps all names exactly",
            cure="set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8",
        )


def _run(
    words: list[str], rest: list[str] | None, recorder: Output | None, origin: Origin | None
) -> int:
    parser = parser_on_demand()
    arguments = parser.parse_args(words)
    if arguments.version:
        from importlib.metadata import version

        print(f"icecore {version('icecore')}")
        return 0
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command is given", cure="'icecore COMMAND --help' explains a command")
    if rest is not None and arguments.command != "run":
        raise UsageError(
            f"'--' and the words after it belong to 'run', not to '{arguments.command}'",
            cure="leave them out",
        )
    arguments.job_command = rest or []
    arguments.parser = build_parser
    settings = load(arguments.config)
    with (
        recorder or Output(as_json=arguments.json, quiet=arguments.quiet) as output,
        Context(settings, output, arguments.repository or settings.repository, origin) as context,
    ):
        if origin is None:
            context.service = _service(arguments, settings)
        if arguments.numpy and context.service is None:
            load_numpy()
        if arguments.command in _OF_THIS_NODE and context.service is None:
            context.recover()
        for workdir in {settings.dump.workdir, settings.restore.workdir or "/dev/shm"}:
            sweep(workdir, output.event)
        if arguments.command not in _COUNTED:
            status: int = arguments.run(arguments, context)
            return status
        from icecore.access.places import state_directory
        from icecore.service.metrics.tally import counted

        state = state_directory(settings.state)
        with counted(state, arguments.command, output.event):
            status = arguments.run(arguments, context)
        return status


def _service(arguments: argparse.Namespace, settings: Config) -> Service | None:
    """Return the node service that does the command for this user; None: this process does it.

    Raises:
        ServiceFailed: The service that is named is not there.
    """
    if arguments.command not in _SERVED:
        return None
    named = arguments.service or os.environ.get("ICECORE_SERVICE", "")
    if not named and os.geteuid() == 0:
        return None
    own = arguments.repository or os.environ.get("ICECORE_REPOSITORY")
    if arguments.command in _OF_REPOSITORY and own and not arguments.service:
        return None
    from icecore.remote.connection import Service, is_there

    if is_there(named or settings.service.socket):
        return Service(named or settings.service.socket)
    if named:
        raise ServiceFailed(
            f"there is no service of root or of this user at {named}",
            cure="'icecore serve' runs it; correct --service or ICECORE_SERVICE",
        )
    return None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the rollback.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _of_system(error: OSError) -> IcecoreError:
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space left: {error}", cure="free space, or use another --workdir")
    cure = "run as root" if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() else ""
    return IcecoreError(
        f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", cure=cure
    )


if __name__ == "__main__":
    sys.exit(main())
