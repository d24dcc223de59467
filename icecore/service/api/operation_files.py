"""The files of an operation, which survive a restart of the service.

``STATE/service/operations/ID/`` holds ``request.json`` (`Stored`), ``process.json`` (`Process`, which
the worker writes first), ``cancel`` (after a cancel request), ``instance`` (of the job that it
supervises), ``failures`` (of supervisors in a row), ``result.json`` (`Result`, which the worker writes last), the records (`journal`),
``output.log`` (other output of the worker) and ``lock``, which the worker locks for as long as it
lives.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from icecore.private import create_private
from icecore.service.api.models import Kind

T = TypeVar("T")

FOLDER = "operations"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The request.


    Attributes:
        caller: The caller, for display; ``caller_key``: for comparison.
        owner: The uid whose job or repository it works on.
        words: The command line of icecore; ``command``: the job's command, after ``--``.
        environment: The job's.
        identity: The identity of the job's user (`icecore.host.jobs.identity`), as JSON.
        supervised: It supervises a job, and is restarted if its process is killed.
        as_json: It prints the output of ``--json``.
        key, digest: Idempotency key and digest of the request.
    """

    id: str
    kind: Kind
    caller: str
    caller_key: str
    owner: int
    created: float
    words: list[str]
    command: list[str] = []
    environment: dict[str, str] | None = None
    identity: dict[str, Any] | None = None
    job: str = ""
    snapshot: str = ""
    supervised: bool = False
    key: str = ""
    digest: str = ""


class Process(msgspec.Struct, frozen=True):
    """The worker: its pid counts only with its start time (clock ticks after boot) and the boot."""

    pid: int
    start_time: int
    boot: str
    started: float
    attempt: int = 1


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: the exit status of the command, the error that it reported, and its last result."""

    exit_status: int
    ended: float
    error: dict[str, Any] | None = None
    result: dict[str, Any] = {}


def write(directory: Path, name: str, value: msgspec.Struct) -> None:
    """Write one file of an operation, durably and atomically."""
    new = directory / f"{name}.new"
    with open(create_private(new), "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, directory / name)


def read_stored(directory: Path) -> Stored | None:
    """Return the request; None: it cannot be read."""
    return _read(directory / "request.json", Stored)


def read_process(directory: Path) -> Process | None:
    """Return the worker; None: there is none yet."""
    return _read(directory / "process.json", Process)


def read_result(directory: Path) -> Result | None:
    """Return the result; None: it has not ended, or its worker was killed."""
    return _read(directory / "result.json", Result)


def write_instance(directory: Path, instance: str) -> None:
    """Record which instance the operation supervises.

    Raises:
        OSError: The disk is full, perhaps.
    """
    _write_text(directory, "instance", instance)


def read_instance(directory: Path) -> str:
    """Return the instance that the operation supervised last; empty: none is known."""
    return _read_text(directory, "instance")


def write_failures(directory: Path, count: int) -> None:
    """Record how many supervisors in a row have failed.

    Raises:
        OSError: The disk is full, perhaps.
    """
    _write_text(directory, "failures", str(count))


def read_failures(directory: Path) -> int:
    """Return how many supervisors in a row have failed."""
    text = _read_text(directory, "failures")
    return int(text) if text.isdecimal() else 0


def _write_text(directory: Path, name: str, text: str) -> None:
    new = directory / f"{name}.new"
    with open(create_private(new), "w") as file:
        file.write(f"{text}\n")
    os.replace(new, directory / name)


def _read_text(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text().strip()
    except OSError:
        return ""


def note_cancel(directory: Path, number: int) -> None:
    """Note that an operation was asked to end, and by which signal.

    Raises:
        OSError: The disk is full, perhaps.
    """
    path = directory / "cancel"
    path.touch(mode=0o600)
    path.write_text(f"{number}\n")


def cancelled_by(directory: Path) -> int:
    """Return the signal that asked an operation to end; 0: none did."""
    try:
        said = (directory / "cancel").read_text().strip()
    except FileNotFoundError:
        return 0
    return int(said) if said.isdecimal() else signal.SIGINT  # the disk was full


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def lock(directory: Path) -> int:
    """Return a descriptor that holds the lock of an operation; -1: its worker has it."""
    descriptor = os.open(
        directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


def is_free(directory: Path) -> bool:
    """Return whether no worker has the lock of an operation. It needs no space on the disk."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # no worker was ever made
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
