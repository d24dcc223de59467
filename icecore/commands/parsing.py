"""The parser's parts: commands in groups with their examples, and options that override settings."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace

from icecore import units
from icecore.config import kinds_of
from icecore.config.kinds import SECONDS, SIZE, SWITCH, THREADS, Kind
from icecore.errors import UsageError

if TYPE_CHECKING:
    from icecore.commands.context import Context

Settings = TypeVar("Settings", bound=msgspec.Struct)
#: Runs a command; returns its exit status.
Run = Callable[[argparse.Namespace, "Context"], int]
#: Help texts that several commands share.
DRY_RUN = "print what would be done; change nothing"
READ_ONLY = "write nothing to the repository, not even this reader's registration"
#: For commands that fail if an object disappears while they read.
READ_ONLY_ALL = f"{READ_ONLY}: fails if a concurrent garbage collection deletes what it still needs"
SNAPSHOT = (
    "an id or the beginning of one, JOB, JOB~1 (the one before), JOB@1 (the oldest), or latest"
)
JOB = "a job's name, its instance id, or the pid of one of its processes"
TAG = "add this tag to the snapshot; repeatable"
PIN = "exempt the snapshot from retention policies"
#: Rows that commands list without --all.
ROWS = 20
PLACE = "a directory, or s3://BUCKET/PREFIX (default: the configured repository)"


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
    settings: type[msgspec.Struct],
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
    kind = kinds_of(settings)[key]
    names = flags or (f"--{key.replace('_', '-')}",)
    text = f"{what} (default: {default or _shown(getattr(settings(), key), kind)})"
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
    given = {key: getattr(arguments, key, None) for key in settings.__struct_fields__}
    return replace(settings, **{key: value for key, value in given.items() if value is not None})


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
