"""Sources of passphrases: a file, a command, the environment, or the terminal; never the command
line, which every process can read.

A passphrase is read only when an encrypted repository is opened. The first source that exists
counts: ICECORE_PASSPHRASE_FILE or ``passphrase_file``, ICECORE_PASSPHRASE_COMMAND or
``passphrase_command``, ICECORE_PASSPHRASE, the terminal. A trailing line break is ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from icecore.config import Config
from icecore.errors import UsageError, WrongPassphrase

_COMMAND_SECONDS = 60.0
_MAX_BYTES = 4096

Passphrase = Callable[[], bytes]


class Source(msgspec.Struct, frozen=True):
    """A callable that returns a passphrase and reads nothing before the call.

    Attributes:
        file, command: The file or shell command to read it from; empty: neither.
        variable: The environment variable to read otherwise.
        prompt: The prompt at the terminal, where nothing else provides the passphrase.
        twice: Ask twice.
    """

    file: str
    command: str
    variable: str
    prompt: str
    twice: bool = False

    @property
    def configured(self) -> bool:
        """Whether a file, a command or the environment provides the passphrase; then repositories
        are expected to be encrypted.
        """
        return bool(self.file or self.command or os.environb.get(self.variable.encode()))

    def __call__(self) -> bytes:
        return _find(self.file, self.command, self.variable, self.prompt, twice=self.twice)


def is_configured(passphrase: Passphrase | None) -> bool:
    """Return whether a passphrase is available without asking a person. A caller's own function
    always provides one.
    """
    return passphrase.configured if isinstance(passphrase, Source) else passphrase is not None


def current(config: Config | None = None) -> Source:
    """Return the source of the passphrase that opens a repository.

    Args:
        config: Provides ``passphrase_file`` and ``passphrase_command``. None: only the environment
            does.
    """
    file = config.passphrase_file if config else os.environ.get("ICECORE_PASSPHRASE_FILE", "")
    command = (
        config.passphrase_command if config else os.environ.get("ICECORE_PASSPHRASE_COMMAND", "")
    )
    return Source(file, command, "ICECORE_PASSPHRASE", "Passphrase: ")


def given(file: str, command: str) -> Source:
    """Return the source of the passphrase of a copy's target: the file, the command, or
    ICECORE_TARGET_PASSPHRASE.
    """
    return Source(
        file, command, "ICECORE_TARGET_PASSPHRASE", "Passphrase of the other repository: "
    )


def new(file: str = "", command: str = "", *, variable: str = "ICECORE_NEW_PASSPHRASE") -> Source:
    """Return the source of a new passphrase: the file, the command, the environment variable, or
    the terminal, which asks twice.
    """
    return Source(file, command, variable, "New passphrase: ", twice=True)


def _find(file: str, command: str, variable: str, prompt: str, *, twice: bool) -> bytes:
    if file:
        found, where = _read(file), file
    elif command:
        found, where = _ask(command), f"the command {command!r}"
    elif os.environb.get(variable.encode()):
        found, where = os.environb[variable.encode()], variable
    elif sys.stdin is not None and sys.stdin.isatty():
        found, where = _prompt(prompt, twice), "the terminal"
    else:
        raise WrongPassphrase(
            "a passphrase is needed and none is given",
            cure=f"set {variable}_FILE, {variable}_COMMAND or {variable}, or use a terminal",
        )
    found = found.removesuffix(b"\n").removesuffix(b"\r")
    if not found or len(found) > _MAX_BYTES:
        raise UsageError(
            f"the passphrase from {where} has {len(found)} bytes",
            cure=f"use 1 to {_MAX_BYTES} bytes",
        )
    return found


def _read(file: str) -> bytes:
    try:
        with open(Path(file).expanduser(), "rb") as opened:
            return opened.read(_MAX_BYTES + 3)
    except OSError as error:
        raise UsageError(
            f"the passphrase file {file} cannot be read: {error.strerror}",
            cure="correct its name or permissions",
        ) from error


def _ask(command: str) -> bytes:
    import subprocess

    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the passphrase command {command!r} took longer than {_COMMAND_SECONDS:.0f} s"
        ) from None
    if done.returncode:
        raise UsageError(
            f"the passphrase command {command!r} ended with status {done.returncode}",
            cure="correct it",
        )
    return done.stdout


def _prompt(prompt: str, twice: bool) -> bytes:
    import getpass

    given = getpass.getpass(prompt)
    if twice and getpass.getpass("Once more: ") != given:
        raise UsageError("the two passphrases differ", cure="try again")
    return os.fsencode(given)
