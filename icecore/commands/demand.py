"""Parsing without building the parsers of all commands, which takes longer than many a command: only
the module of the command that is called is imported, and only that command's parser is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from icecore.commands.parsing import CommandParser, Commands, TopParser


class OnDemand(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The argument COMMAND, which builds the parser of a command when it meets its name."""

    def defer(self, names: Iterable[str], build: Callable[[str], None]) -> None:
        """Accept these names; ``build`` adds the parser of one."""
        self.choices = dict.fromkeys(names)
        self._build = build

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Parse the rest of the line with the command's parser."""
        assert values
        self._build(values[0])
        super().__call__(parser, namespace, values, option_string)


class TopOnDemand(TopParser):
    """A top parser whose help comes from the parser of all commands."""

    whole: Callable[[], TopParser]

    def format_help(self) -> str:
        """Return the help text."""
        return self.whole().format_help()


class OneCommand(Commands):
    """Adds one of the commands that a module offers, and skips the others.

    Args:
        name: Its name.
    """

    def __init__(
        self,
        parsers: argparse._SubParsersAction[CommandParser],
        common: Callable[[argparse.ArgumentParser], None],
        name: str,
    ) -> None:
        super().__init__(parsers, common)
        self._name = name

    def of_group(self, group: str) -> Commands:
        """Return this: the group matters to the help of all commands only."""
        return self

    def add(self, name: str, *arguments: Any, **named: Any) -> CommandParser:
        """Add the command if it is the one."""
        return super().add(name, *arguments, **named) if name == self._name else _Skipped()


class _Skipped(CommandParser):
    """Takes the options of a command that is not called, and forgets them."""

    def __init__(self) -> None:
        """Build nothing."""

    def add_argument(self, *_arguments: Any, **_named: Any) -> Any:
        """Forget an argument."""

    def add_argument_group(self, *_arguments: Any, **_named: Any) -> Any:
        """Forget a group, and what is added to it."""
        return self

    def add_mutually_exclusive_group(self, **_named: Any) -> Any:
        """Forget a group, and what is added to it."""
        return self

    def set_defaults(self, **_named: Any) -> None:
        """Forget defaults."""
