"""A user's commands before and after a dump."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.environment import without_secrets
from icecore.errors import DumpFailed, HookFailed
from icecore.events import Event, Sink
from icecore.host.jobs.shell import run_shell

#: How much of the end of a hook's output its error quotes, in bytes.
_QUOTED_BYTES = 300


class BeforeFailed(DumpFailed):
    """The command before the dump failed, and nothing was stopped."""


class Hooks(msgspec.Struct):
    """The commands around one dump.

    Attributes:
        begun: The command before the dump was started, so the one after it must run whatever
            happens: it may have to undo what the first did.
        snapshot: Value of ICECORE_SNAPSHOT for the command after the dump; empty: the dump failed.
    """

    options: DumpOptions
    target: Target
    begun: bool = False
    snapshot: str = ""

    def before(self) -> None:
        """Run the command before the dump.

        Raises:
            BeforeFailed: It failed.
        """
        self.begun = True
        try:
            self.run(self.options.before)
        except HookFailed as error:
            raise BeforeFailed(error.message) from error

    def run(self, command: str) -> None:
        """Run a shell command within the time allowed; it sees ICECORE_JOB, ICECORE_PID and
        ICECORE_SNAPSHOT.

        Raises:
            HookFailed: It ended with a status other than 0, or not in time.
        """
        if not command:
            return
        environment = {
            **without_secrets(os.environ),
            "ICECORE_JOB": self.target.job,
            "ICECORE_PID": str(self.target.pid),
            "ICECORE_SNAPSHOT": self.snapshot,
        }
        seconds = self.options.hook_seconds
        # Not a pipe: what the command leaves in the background may hold it open for ever.
        with open(os.memfd_create("icecore-hook"), "r+b") as printed:
            try:
                status = run_shell(command, environment, seconds=seconds, output=printed.fileno())
            except TimeoutError as error:
                raise HookFailed(
                    f"the hook {command!r} did not end within {seconds:g} s"
                ) from error
            if status:
                printed.seek(max(0, os.fstat(printed.fileno()).st_size - _QUOTED_BYTES))
                raise HookFailed(
                    f"the hook {command!r} ended with status {status}: {printed.read().decode(errors='replace').strip()}"
                )


@contextmanager
def hooks_of(options: DumpOptions, target: Target, emit: Sink) -> Iterator[Hooks]:
    """Run the command after the dump when the context is left, also on an error, which is then the
    one that is raised.

    Raises:
        HookFailed: The snapshot is committed, but the command failed.
    """
    hooks = Hooks(options, target)
    try:
        yield hooks
    except BaseException:
        if hooks.begun:
            try:
                hooks.run(options.after)
            except HookFailed as error:
                emit(Event("dump.hook", {"command": options.after, "error": str(error)}))
        raise
    try:
        hooks.run(options.after)
    except HookFailed as error:
        raise HookFailed(
            f"snapshot {hooks.snapshot} is committed, but {error}", cure="correct the command"
        ) from error
