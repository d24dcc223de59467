"""The completion command: prints completion scripts for shells, and the words that they complete.

A script is generated from the parser: an argument completes by its metavar.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from icecore.access import passphrase
from icecore.commands.context import Context
from icecore.commands.parsing import Commands
from icecore.config.kinds import Kind
from icecore.errors import IcecoreError

_SHELLS = ("bash", "zsh", "fish")
_WORDS = ("jobs", "snapshots")


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "completion",
        completion,
        "Print a completion script for a shell.",
        "icecore completion bash > /etc/bash_completion.d/icecore",
        "icecore completion zsh > ~/.zfunc/_icecore",
        "icecore completion fish > ~/.config/fish/completions/icecore.fish",
        more="The scripts call 'icecore completion jobs' and 'icecore completion snapshots', which print the"
        " names that a command accepts. Snapshots are listed only where that is fast: in a directory, without a"
        " passphrase.",
        numpy=False,
    )
    parser.add_argument(
        "what",
        choices=(*_SHELLS, *_WORDS),
        metavar="SHELL",
        help="bash, zsh or fish",
    )


def completion(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore completion."""
    if arguments.what in _WORDS:
        for word in sorted(_jobs(context) if arguments.what == "jobs" else _snapshots(context)):
            context.output.line(word)
        return 0
    context.output.raw(script(arguments.parser(), arguments.what).encode())
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for a shell. It changes the parser, which must not parse again.

    Args:
        shell: bash, zsh or fish.
    """
    import shtab

    def words(what: str) -> object:
        return shtab.cmd(f"icecore completion {what} </dev/null 2>/dev/null")

    by_metavar = {
        "DIR": shtab.DIRECTORY,
        "DIR|ARCHIVE": shtab.FILE,  # which offers directories as well
        "FILE": shtab.FILE,
        "PLACE": shtab.DIRECTORY,
        "JOB": words("jobs"),
        "JOB|PID": words("jobs"),
        "SNAPSHOT": words("snapshots"),
        "OLDER": words("snapshots"),
        "NEWER": words("snapshots"),
    }
    for action in _actions(parser):
        if isinstance(action.type, Kind) and action.type.words:
            action.choices = action.type.words
        if action.metavar in by_metavar and not action.choices:
            action.complete = by_metavar[action.metavar]  # type: ignore[attr-defined]
    text: str = shtab.complete(parser, shell)
    return text


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _jobs(context: Context) -> set[str]:
    return {job.name for job in context.registry().instances()}


def _snapshots(context: Context) -> set[str]:
    """Return the words that name snapshots; only jobs' names if listing snapshots is slow or fails."""
    found = _jobs(context) | {"latest"}
    if "://" in context.location or passphrase.current(context.config).configured:
        return found
    try:
        records = context.repository().snapshots()
    except IcecoreError:
        return found
    return found | {record.job for record in records} | {record.snapshot for record in records}
