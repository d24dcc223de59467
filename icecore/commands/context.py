"""What all commands share: configuration, output, the open repository, and the parser's parts."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import Field, dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from icecore import units
from icecore.access import passphrase
from icecore.commands.output import Output
from icecore.config import Config
from icecore.config.kinds import SECONDS, SIZE, SWITCH, THREADS, Kind
from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.events import Event, Sink

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from icecore.host.jobs.identity import Identity
    from icecore.host.jobs.registry import Registry
    from icecore.remote.connection import Service
    from icecore.repository import Repository
    from icecore.service.metrics.tally import Tally
    from icecore.store.format.state import SnapshotRecord

Settings = TypeVar("Settings")
#: Help texts that several commands share.
DRY_RUN = "print what would be done; change nothing"
READ_ONLY = "write nothing to the repository, not even this reader's registration"
#: For commands that fail if an object disappears while they read.
READ_ONLY_ALL = f"{READ_ONLY}: fails if a concurrent garbage collection deletes what it still needs"
SNAPSHOT = (
    "an id or the beginning of one, JOB, JOB~1 (the one before), JOB@1 (the oldest), or latest"
)
JOB = "a job's name, its instance id, or the pid of one of its processes"
TAG = "label the snapshot; repeatable"
PIN = "exempt the snapshot from retention policies"
#: Rows that commands list without --all.
ROWS = 20
PLACE = "a directory, or s3://BUCKET/PREFIX (default: the configured repository)"
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Load numpy without starting the threads of its linear algebra library.

    Nothing here uses that library, and starting one thread per core takes a third of a command's
    start-up time.
    """
    if _BLAS_THREADS in os.environ:
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_BLAS_THREADS]  # else jobs and hooks inherit it


@dataclass(frozen=True)
class Origin:
    """Whose request a command is, where the node service runs it.

    Attributes:
        identity: With which a job runs.
        environment: Of a job.
        supervised: The command supervises a job, and takes signals once it does.
    """

    identity: Identity | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    supervised: bool = False


@dataclass
class Context:
    """One run of the command line; a context manager that closes what it opened.

    Attributes:
        location: The repository's location; empty if none is configured.
        origin: Whose request this is; None: this process's user's.
        service: The node service that does it for this user; None: this process does it.
    """

    config: Config
    output: Output
    location: str
    origin: Origin | None = None
    service: Service | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _repository: Repository | None = None
    _tally: Tally | None = None

    @property
    def emit(self) -> Sink:
        """The sink of a repository's events, which are counted."""
        if self._tally is None:
            from icecore.access.places import state_directory
            from icecore.service.metrics.tally import Tally

            self._tally = Tally(state_directory(self.config.state))
            self._stack.callback(self._tally.flush)
        return self._tally.hears(self.output.event)

    def repository(self, *, rebuild: bool = False) -> Repository:
        """Return the repository; open it on first use.

        Args:
            rebuild: Open it for repair even if its configuration is lost.

        Raises:
            UsageError: No repository is named.
            NotFound: There is no repository at the location.
        """
        if self._repository is None:
            from icecore.repository import Repository

            opened = Repository.open(
                self.location,
                replicas=self.config.replicas,
                passphrase=passphrase.current(self.config),
                state=self.config.state,
                config=self.config,
                rebuild=rebuild,
                emit=self.emit,
            )
            self._repository = self._stack.enter_context(opened)
            self._count_requests(opened)
        return self._repository

    def snapshots(self) -> list[SnapshotRecord]:
        """Return the snapshots in commit order; of the service: those of this user."""
        if self.service is None:
            return self.repository().snapshots()
        return [record for record, _ in self.owned_snapshots()]

    def owned_snapshots(self) -> list[tuple[SnapshotRecord, int | None]]:
        """Return the snapshots in commit order, each with the uid of its owner; None: it cannot be
        read. Without the service, this reads the manifest of each snapshot.
        """
        if self.service is None:
            from icecore.restorer.owner import owners

            repository = self.repository()
            records = repository.snapshots()
            known = repository.loop.run(owners(repository.core, records))
            return list(zip(records, known, strict=True))
        from icecore.remote.snapshots import listed

        return listed(self.service)

    def _count_requests(self, opened: Repository) -> None:
        """Count the requests to a bucket while it is open: a supervisor keeps it for weeks."""
        from icecore.store.backend.metrics import meters_of

        if self._tally is not None:
            for meter in meters_of(opened.core.backend):
                self._tally.watch(meter.counts)

    def registry(self) -> Registry:
        """Return the registry of this node's jobs; of the service: those of this user."""
        if self.service is not None:
            from icecore.remote.jobs import RemoteRegistry

            return RemoteRegistry(self.service)
        from icecore.access.places import state_directory
        from icecore.host.jobs.registry import Registry

        return Registry(state_directory(self.config.state), emit=self.output.event)

    def recover(self) -> None:
        """Let jobs run that killed dumps left frozen; roll back or complete the changes that killed
        restores made to jobs' files.
        """
        from icecore.access.places import state_directory
        from icecore.host.jobs.registry import Registry

        registry = Registry(state_directory(self.config.state), emit=self.output.event)
        with suppress(IcecoreError, OSError):  # the command itself says what is wrong with jobs
            registry.thaw_left()
        state = registry.state
        try:
            if not any(os.scandir(state / "restores")):
                return
        except OSError:  # no restore has changed a file yet, or this user has no access
            return
        from icecore.restorer.files.file_recovery import recover

        try:
            recover(state, self.output.event)
        except IcecoreError as error:
            self.output.event(Event("restore.warning", {"name": "files", "message": str(error)}))

    def require_job(self, name: str) -> None:
        """Require a snapshot of a job with this name, or an instance of it on this node.

        Raises:
            NotFound: There is neither.
        """
        if any(record.job == name for record in self.snapshots()) or any(
            job.name == name for job in self.registry().instances()
        ):
            return
        raise NotFound(
            f"there is no job {name!r} and no snapshot of one",
            cure="'icecore ls' lists all snapshots, 'icecore ps -a' the jobs of this node",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


Run = Callable[[argparse.Namespace, Context], int]


class Interrupted(BaseException):
    """Raised when a signal asks this process to end: unfinished work is rolled back, and jobs
    continue to run.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Formatter(argparse.HelpFormatter):
    """Wraps prose, but not within an option's name, and keeps indented lines such as examples."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            "\n".join(f"{indent}{line}" for line in part.splitlines())
            if "\n  " in part
            else "\n".join(
                f"{indent}{line}" for line in self._split_lines(part, width - len(indent))
            )
            for part in text.split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` and whose usage line lists arguments, not options."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Formatter, **named})
        self._positionals.title = "arguments"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual; an optional argument may also follow options (argparse takes it to be
        left out if options stand between it and the argument before).
        """
        found, left = super().parse_known_args(args, namespace)
        late = [one for one in self._actions if not one.option_strings and one.nargs == "?"]
        if len(late) == len(left) == 1 and not left[0].startswith("-"):
            (action,) = late
            if getattr(found, action.dest) == action.default:
                setattr(found, action.dest, self._get_values(action, left))
                left = []
        return found, left

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, cure=f"'{self.prog} --help' lists commands and options")

    def format_usage(self) -> str:
        """Return the usage line."""
        self.usage = self.usage or self._short_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """Return the help text."""
        self.usage = self.usage or self._short_usage()
        return super().format_help()

    def _short_usage(self) -> str:
        words = [self.prog, "[options]"]
        for action in self._actions:
            if action.option_strings or action.help == argparse.SUPPRESS:
                continue
            name = str(action.metavar or action.dest)
            words.append(
                f"[{name} ...]"
                if action.nargs == "*"
                else f"[{name}]"
                if action.nargs == "?"
                else name
            )
        return " ".join(words)


class TopParser(Parser):
    """The parser of the whole command line, whose help shows the commands in groups."""

    def format_help(self) -> str:
        """Return the help text."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        parsers = next(one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        groups: dict[str, list[argparse.Action]] = {}
        for pseudo in parsers._choices_actions:
            groups.setdefault(parsers.choices[pseudo.dest].group, []).append(pseudo)
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([one for one in group._group_actions if one is not parsers])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class CommandParser(Parser):
    """The parser of one command.

    Attributes:
        group: The title of the group that lists the command.
    """

    group = ""


class Commands:
    """Adds commands to the parser, with the common options.

    Args:
        group: The title under which the help lists the commands that are added.
    """

    def __init__(
        self,
        parsers: argparse._SubParsersAction[CommandParser],
        common: Callable[[argparse.ArgumentParser], None],
        group: str = "",
    ) -> None:
        self._parsers = parsers
        self._common = common
        self._group = group

    def of_group(self, group: str) -> Commands:
        """Return the same for another group."""
        return Commands(self._parsers, self._common, group)

    def add(
        self,
        name: str,
        run: Run,
        what: str,
        *examples: str,
        more: str = "",
        usage: str | None = None,
        numpy: bool = True,
    ) -> CommandParser:
        """Add a command.

        Args:
            run: Runs the command; returns the exit status.
            what: What the command does, in one short sentence.
            examples: Command lines for the end of the help text.
            more: What else its help says.
            numpy: Whether to load numpy for it.
        """
        parser = self._parsers.add_parser(
            name,
            help=what[0].lower() + what[1:].rstrip("."),
            description=f"{what} {more}".strip(),
            epilog="\n  ".join(
                ["example:" if len(examples) == 1 else "examples:", *examples],
            ),
            usage=usage,
            allow_abbrev=False,
        )
        parser.group = self._group
        self._common(parser)
        parser.set_defaults(run=run, numpy=numpy)
        return parser


def add_setting(
    parser: argparse.ArgumentParser,
    settings: type[DataclassInstance],
    key: str,
    what: str,
    *flags: str,
    default: str = "",
) -> None:
    """Add an option that overrides a setting; without it the configuration's value applies.

    Args:
        what: The help text, without the default.
        flags: Default: the key with dashes.
        default: How the help describes the built-in default. Empty: by its value.
    """
    about: Field[Any] = next(one for one in fields(settings) if one.name == key)
    kind = about.metadata["kind"]
    assert isinstance(kind, Kind)
    names = flags or (f"--{key.replace('_', '-')}",)
    text = f"{what} (default: {default or _shown(about.default, kind)})"
    if kind is SWITCH:
        parser.add_argument(
            *names, dest=key, action=argparse.BooleanOptionalAction, default=None, help=text
        )
        return
    words = kind.words
    parser.add_argument(
        *names,
        dest=key,
        type=kind,
        default=None,
        metavar="|".join(words) if words else kind.short,
        help=text,
    )


def _shown(value: Any, kind: Kind[Any]) -> str:
    if kind is SWITCH:
        return "yes" if value else "no"
    if kind is SIZE and value:
        return units.exact_size(value)
    if kind is SECONDS and value:
        return units.exact_seconds(value)
    return "none" if value in ("", 0) and kind is not THREADS else str(value)


def overridden(settings: Settings, arguments: argparse.Namespace) -> Settings:
    """Return ``settings`` with the values from the command line."""
    known: Sequence[Field[Any]] = fields(settings)  # type: ignore[arg-type]
    given = {about.name: getattr(arguments, about.name, None) for about in known}
    changed: Any = replace(
        settings, **{name: value for name, value in given.items() if value is not None}
    )  # type: ignore[type-var]
    result: Settings = changed
    return result


def gpu_map(pairs: list[str]) -> dict[str, str]:
    """Return what ``--gpu-map`` says: old → new.

    Raises:
        UsageError: A pair is malformed, or a GPU is given twice.
    """
    out: dict[str, str] = {}
    for pair in pairs:
        old, separator, new = pair.partition("=")
        if not separator or not old or not new or old in out:
            raise UsageError(f"--gpu-map {pair!r} is wrong", cure="write OLD=NEW, each GPU once")
        out[old] = new
    return out
