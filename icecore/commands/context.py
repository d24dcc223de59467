"""What every command shares: configuration, output, the repository it works on, and how options are
taken from settings.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import Field, dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from icecore import passphrase
from icecore.config import SWITCH, Config, Kind
from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.events import Event
from icecore.output import Output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from icecore.host.jobs.registry import Registry
    from icecore.repository import Repository

Settings = TypeVar("Settings")
READ_ONLY = "write nothing to the repository, not even that it is being looked at"
#: For what reads much and must get all of it.
READ_ONLY_ALL = (
    f"{READ_ONLY}: a collection elsewhere may delete what is still to come, and then this fails"
)
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Load numpy without the threads of its linear algebra, which nothing here uses: one a core,
    they were a third of a command's start.
    """
    if _BLAS_THREADS in os.environ:
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_BLAS_THREADS]  # jobs and hooks inherit the environment


@dataclass
class Context:
    """One run of the command line; a context manager that closes what was opened.

    Attributes:
        location: Where the repository is; empty where nothing says.
    """

    config: Config
    output: Output
    location: str
    _stack: ExitStack = field(default_factory=ExitStack)
    _repository: Repository | None = None

    def repository(self, *, rebuild: bool = False) -> Repository:
        """The repository, opened when first asked for.

        Args:
            rebuild: Open it even if nothing is left of its configuration, to repair it.

        Raises:
            UsageError: None is named.
            NotFound: There is none.
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
                emit=self.output.event,
            )
            self._repository = self._stack.enter_context(opened)
        return self._repository

    def registry(self) -> Registry:
        """The jobs of this node."""
        from icecore.host.jobs.registry import Registry
        from icecore.places import state_directory

        return Registry(state_directory(self.config.state), emit=self.output.event)

    def recover_files(self) -> None:
        """Undo or finish what restores that were killed left of their changes to jobs' files."""
        from icecore.host.jobs.registry import Registry
        from icecore.places import state_directory

        state = Registry(state_directory(self.config.state)).state
        try:
            if not any(os.scandir(state / "restores")):
                return
        except OSError:  # no restore ever changed a file, or this user may not look
            return
        from icecore.restorer.files.file_recovery import recover

        try:
            recover(state, self.output.event)
        except IcecoreError as error:
            self.output.event(Event("restore.warning", {"name": "files", "message": str(error)}))

    def require_job(self, name: str) -> None:
        """Nothing, if there is a snapshot of a job with this name, or an instance of it on this
        node.

        Raises:
            NotFound: There is neither.
        """
        if any(record.job == name for record in self.repository().snapshots()) or any(
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
    """A signal asked this process to end: everything that was begun is undone on the way out, and
    jobs run on.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, cure=f"'{self.prog} --help' shows what there is")


class Commands:
    """Adds commands to the parser; each knows the options that stand before it too."""

    def __init__(
        self,
        parsers: argparse._SubParsersAction[Parser],
        common: Callable[[argparse.ArgumentParser], None],
    ) -> None:
        self._parsers = parsers
        self._common = common

    def add(
        self,
        name: str,
        run: Run,
        what: str,
        *,
        more: str = "",
        usage: str | None = None,
        numpy: bool = True,
    ) -> Parser:
        """A command: its name, what runs it, what it does in one sentence, and whether numpy is
        loaded for it.
        """
        parser = self._parsers.add_parser(
            name,
            help=what[0].lower() + what[1:].rstrip("."),
            description=f"{what} {more}".strip(),
            usage=usage,
            allow_abbrev=False,
        )
        self._common(parser)
        parser.set_defaults(run=run, numpy=numpy)
        return parser


def add_setting(
    parser: argparse.ArgumentParser,
    settings: type[DataclassInstance],
    key: str,
    what: str,
    *flags: str,
) -> None:
    """An option that overrides a setting; absent, the configuration's value counts.

    Args:
        flags: Default: the key with dashes.
    """
    about: Field[Any] = next(one for one in fields(settings) if one.name == key)
    kind = about.metadata["kind"]
    assert isinstance(kind, Kind)
    names = flags or (f"--{key.replace('_', '-')}",)
    if kind is SWITCH:
        parser.add_argument(
            *names, dest=key, action=argparse.BooleanOptionalAction, default=None, help=what
        )
        return
    words = kind.words
    parser.add_argument(
        *names,
        dest=key,
        type=kind,
        default=None,
        metavar="|".join(words) if words else kind.short,
        help=f"{what} (default: {_shown(about.default)})",
    )


def _shown(value: object) -> str:
    return "none" if value == "" else str(value)


def overridden(settings: Settings, arguments: argparse.Namespace) -> Settings:
    """``settings`` with what the command line gives."""
    known: Sequence[Field[Any]] = fields(settings)  # type: ignore[arg-type]
    given = {about.name: getattr(arguments, about.name, None) for about in known}
    changed: Any = replace(
        settings, **{name: value for name, value in given.items() if value is not None}
    )  # type: ignore[type-var]
    result: Settings = changed
    return result
