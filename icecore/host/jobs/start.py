"""Start a job's init through launch.py, and hold it back until the starter has recorded it. If the
starter dies first, the init ends.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.host.jobs import launch
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.namespaces import (
    INSTANCE_MOUNT,
    Isolation,
    make_instance_mount,
    own_paths,
    private_mounts,
)
from icecore.host.jobs.temporary import NO_MOUNTS, covering, covers


class StartFailed(IcecoreError):
    """The command could not be started; nothing of it is left running."""


class Launch(msgspec.Struct, frozen=True):
    """The description of what is to be started.

    Attributes:
        directory: The instance's; the init's program lies there as ``icecore-init``.
        command: Program path, then its arguments from argv[0] on.
        cwd, environment, umask: The command's.
        isolation: Its namespaces.
        binds: The host's mount points to bind into a private root.
        tmp: Mount points of its private temporary directories, which exist already
            (`icecore.host.jobs.temporary`).
        identity: The user that it runs as, who looks up the program in the environment's PATH;
            None: this process's.
        group: Directory of the cgroup of its own; None: it gets none.
        io_uring: It may use io_uring.
    """

    directory: Path
    command: Sequence[str]
    cwd: str
    environment: Mapping[str, str]
    umask: int
    isolation: Isolation
    binds: Sequence[str]
    identity: Identity | None = None
    group: Path | None = None
    tmp: Sequence[str] = ()
    io_uring: bool = False

    def as_line(self) -> bytes:
        """Encode it for launch.py.

        Raises:
            UsageError: A cgroup of the identity cannot be joined.
        """
        paths = own_paths(self.directory, self.isolation)
        private = self.isolation.root
        binds = [[point, point] for point in self.binds] + [[str(self.directory), INSTANCE_MOUNT]]
        return (
            json.dumps(
                {
                    "namespaces": self.isolation.names(),
                    "root": str(self.directory / "root") if private else None,
                    "binds": binds if private else [],
                    "private": private_mounts() if private else [],
                    "covers": covers(self.directory, self.tmp),
                    "stdout": paths["stdout.log"],
                    "stderr": paths["stderr.log"],
                    "status": paths["status"],
                    "init": paths["icecore-init"],
                    "cwd": self.cwd,
                    "umask": self.umask,
                    "command": list(self.command),
                    "identity": None if self.identity is None else self.identity.as_launch(),
                    "environment": dict(self.environment),
                    "group": None if self.group is None else str(self.group / "cgroup.procs"),
                    "io_uring": self.io_uring,
                }
            ).encode()
            + b"\n"
        )


class Starting:
    """An init that waits for `go` (a context manager: on exit without it, the init ends).

    Args:
        wanted: What is to be started.
        seconds: How long starting may take in all.

    Attributes:
        pid: The init's.
        permitted: Why io_uring could not be denied to the job; empty: that did not fail.

    Raises:
        StartFailed, UsageError: The namespaces or the private root could not be made.
    """

    def __init__(self, wanted: Launch, *, seconds: float = 30.0) -> None:
        self._wanted = wanted
        self._until = time.monotonic() + seconds
        self._rest = b""
        self.pid = 0
        self.permitted = ""
        if wanted.isolation.root:
            make_instance_mount()
            (wanted.directory / "root").mkdir(mode=0o700, exist_ok=True)
        # -I -S: whatever the user's PYTHON… variables and site packages hold, this program does not
        # load it; names are bytes as in this process.
        self._launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", launch.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
        try:
            self._write(wanted.as_line())
            first = self._read_answer()
            if first is None or "pid" not in first:
                raise self._failure(first)
            self.pid = int(first["pid"])
            self.permitted = str(first["permitted"])
        except BaseException:
            self._end()
            raise

    def go(self) -> None:
        """Let the init start the command; returns once it runs.

        Raises:
            NotFound: There is no such program, or its interpreter is missing.
            UsageError: It is not executable.
            StartFailed: Anything else.
        """
        self._write(b"g")
        answer = self._read_answer()
        if answer is not None:
            raise self._failure(answer)

    def _write(self, data: bytes) -> None:
        assert self._launcher.stdin is not None
        try:
            self._launcher.stdin.write(data)
            self._launcher.stdin.flush()
        except BrokenPipeError:
            pass  # why it ended stands in its answer

    def _read_answer(self) -> dict[str, Any] | None:
        """Return the next line as JSON; None at the end of the output."""
        assert self._launcher.stdout is not None
        fd = self._launcher.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._rest:
            left = self._until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise StartFailed(
                    "starting the job took too long",
                    cure="a mount of this machine may hang: see 'mount'",
                )
            piece = os.read(fd, 65536)
            if not piece:
                break
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        if not line:
            return None
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # a traceback
            text = (line + b"\n" + self._rest).decode(errors="replace").strip()
            raise StartFailed(f"the launcher failed: {text[-1000:]}") from None
        return answer

    def _failure(self, answer: dict[str, Any] | None) -> IcecoreError:
        if answer is None:
            return StartFailed("the launcher ended without an answer")
        program = self._wanted.command[0]
        if "exec_errno" in answer:
            number = int(answer["exec_errno"])
            if number == errno.ENOENT:
                point = covering(self._wanted.tmp, program)
                cure = f"leave out --tmp private: a private {point} is empty at first"
                return NotFound(
                    f"there is no program {program}, or its interpreter is missing",
                    cure=cure if point else "",
                )
            if number in (errno.EACCES, errno.ENOEXEC):
                return UsageError(
                    f"cannot run {program}: {os.strerror(number)}",
                    cure="a script needs a first line '#!…' and chmod +x",
                )
            return StartFailed(f"cannot run {program}: {os.strerror(number)}")
        step, number = (
            answer.get("step", "starting the init"),
            answer.get("errno", answer.get("fork_errno", 0)),
        )
        text = answer.get("error", os.strerror(number))
        cure = ""
        if step == "entering the working directory":
            directory = self._wanted.cwd
            if number == errno.ENOENT:
                return NotFound(f"there is no directory {directory}")
            cure = f"name one that the job's user can enter, with --cwd instead of {directory}"
        elif self._wanted.tmp and step.startswith(("making the namespaces", "mounting")):
            cure = NO_MOUNTS
        elif number == errno.EPERM:
            cure = "icecore run needs root, with the capabilities that 'icecore doctor' names"
        elif number == errno.EACCES and str(self._wanted.directory) in text:
            cure = "the state directory must not lie on a file system mounted noexec; set ICECORE_STATE"
        return StartFailed(f"{step}: {text}", cure=cure)

    def _end(self) -> None:
        for pipe in (self._launcher.stdin, self._launcher.stdout):
            if pipe is not None:
                pipe.close()  # the waiting init reads the end of the file and leaves
        try:
            self._launcher.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._end()
