"""One instance of a job on this node, as its directory describes it. A pid is valid only together
with its start time and the boot id.

The directory of an instance holds ``job.json`` (`icecore.host.jobs.description`), ``stdout.log`` and ``stderr.log``
(append-only), ``status`` (one line by the init once the command has ended), ``icecore-init``
(the init's program), ``end-requested`` (`note_end`: seconds since boot, and a snapshot's id), and
the start offsets of logs that have a limit (`icecore.host.jobs.log_trimming`).
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from icecore.errors import Damaged, NotFound, UsageError
from icecore.events import Event, Sink
from icecore.host.jobs.description import Description, boot_id
from icecore.host.jobs.namespaces import RunRecord, own_paths
from icecore.host.kernel import freezer, procfs
from icecore.private import create_private

if TYPE_CHECKING:
    from icecore.host.jobs.logs import LogPiece, Stream

_POLL_SECONDS = 0.05
_PIECE = 1 << 20  # bytes of a log that are read at once
_LEAVE_SECONDS = 1.0  # for the last processes of a job whose init has ended
_UNKNOWN = -1  # a start time that no process has
_MOST_STATUS = 64  # bytes
_END_REQUESTED = "end-requested"
_ENDING = (signal.SIGTERM, signal.SIGKILL)
#: A job that ends within so many seconds after it was asked to counts as ended by that.
ASKED_SECONDS = 600.0
_STATUS_FD = 3  # in the init: launch.py puts it there, CRIU keeps it


def note_end(directory: Path, snapshot: str = "") -> None:
    """Record in an instance's directory that its end is requested, so that a supervisor does not
    count it as a failure. Ignore errors, such as a full disk: the end matters more than the record.

    Args:
        snapshot: The snapshot with which it ends; empty: none.
    """
    with suppress(OSError), open(create_private(directory / _END_REQUESTED), "w") as file:
        file.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME)} {snapshot}\n")


def stopped_with(job: Job) -> str:
    """Return the snapshot with which a dump ended an instance; empty: none did, or it still runs.

    A dump notes it before it kills the tree, which stands still. If that dump was killed in between,
    the job ran on, and ended in another way later.
    """
    status = job.status()
    if status is None or status.signal != signal.SIGKILL:
        return ""
    return job._end_note()[1]


class Inits:
    """The processes that hold a status file, as an init does. The first query searches /proc; later
    ones search it again only if a process that was found no longer holds its file.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], int] | None = None

    def of(self, directory: Path) -> int:
        """Return the pid of the init that holds the status file of the instance in ``directory``; 0
        if none does.
        """
        try:
            ours = os.stat(directory / "status")
        except FileNotFoundError:
            return 0
        for _ in range(2):  # what was found may have ended since
            if self._found is None:
                # The init comes before its children, which may have inherited it.
                self._found = dict(reversed([*_held()]))
            pid = self._found.get((ours.st_dev, ours.st_ino), 0)
            with suppress(OSError):
                if not pid or os.path.samestat(ours, os.stat(f"/proc/{pid}/fd/{_STATUS_FD}")):
                    return pid
            self._found = None
        return 0


def _held() -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (device, inode) of the file at each process's descriptor `_STATUS_FD`, and the pid."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):  # no such descriptor, or it ended meanwhile
            held = os.stat(f"/proc/{pid}/fd/{_STATUS_FD}")
            yield (held.st_dev, held.st_ino), pid


class ExitStatus(msgspec.Struct, frozen=True):
    """How a command ended: ``code`` or ``signal``; both None if it is unknown (the machine was
    restarted meanwhile).
    """

    code: int | None = None
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """Return the status as a shell would: the code, or 128 + the signal; 255 if it is unknown."""
        if self.code is not None:
            return self.code
        return 255 if self.signal is None else 128 + self.signal

    def __str__(self) -> str:
        if self.code is not None:
            return f"exited {self.code}"
        if self.signal is None:
            return "lost"
        return f"killed by {signal.Signals(self.signal).name if self.signal in set(signal.Signals) else f'signal {self.signal}'}"


class Job(msgspec.Struct, frozen=True, dict=True, weakref=True):
    """One instance. ``description`` is what was read when the object was created; the methods query
    the machine.
    """

    directory: Path
    description: Description
    _over: ClassVar[bool] = False  # per object: whether the init is known to have ended
    _untrimmed: ClassVar[bool] = False  # per object: whether it was reported

    @classmethod
    def load(cls, directory: Path, inits: Inits | None = None) -> Job:
        """Load the instance in ``directory``.

        Args:
            inits: Finds the init of an instance if none is recorded. Default: search /proc now.

        Raises:
            NotFound: There is none.
            Damaged: Its job.json cannot be read.
        """
        try:
            data = (directory / "job.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no job in {directory}") from error
        try:
            description = msgspec.convert(json.loads(data), Description)
        except (ValueError, msgspec.ValidationError, UsageError) as error:
            damaged = Damaged("job description", str(directory / "job.json"), str(error))
            damaged.cure = f"'icecore rm {directory.name}' forgets it, with its logs"
            raise damaged from error
        return cls(directory, description)._found_restored(inits or Inits())

    def save(self) -> None:
        """Write job.json atomically and durably."""
        # A unique name, because another process may save at the same time.
        new = self.directory / f"job.json.{os.urandom(4).hex()}.new"
        try:
            with open(create_private(new), "w") as file:
                # The standard library's JSON: it can hold names that are not UTF-8, escaped.
                file.write(json.dumps(msgspec.to_builtins(self.description), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.directory / "job.json")
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def with_pid(self, pid: int) -> Job:
        """Record the init's pid and return the job with it.

        Raises:
            NotFound: There is no such process.
        """
        known = replace(
            self.description, pid=pid, start_time=procfs.start_time(pid), boot=boot_id()
        )
        job = Job(self.directory, known)
        job.save()
        return job

    def with_lost(self, pid: int) -> Job:
        """Record that the init ran and ended before it was seen, and return the job with that:
        another process may have its pid by now.
        """
        job = Job(
            self.directory, replace(self.description, pid=pid, start_time=_UNKNOWN, boot=boot_id())
        )
        job.save()
        return job

    def with_snapshot(self, snapshot: str, lineage: str) -> Job:
        """Record the snapshot just taken of the job, and its lineage, and return the job with them.
        Several dumps may call this at the same time.

        Raises:
            NotFound, Damaged: As `load`.
        """
        now = Job.load(self.directory).description
        job = Job(self.directory, replace(now, snapshot=snapshot, lineage=lineage))
        job.save()
        return job

    def with_resident(self, place: Path, *, keep: bool) -> Job:
        """Record where the job's keeper is and whether its GPU memory outlives it, and return the
        job with that.
        """
        job = Job(
            self.directory, replace(self.description, resident=str(place), keep_resident=keep)
        )
        job.save()
        return job

    def with_group(self, groups: Mapping[str, str] | None = None) -> Job:
        """Make a cgroup of the job's own where that is possible, and return the job with it.

        Args:
            groups: The groups that the job joins, by hierarchy; None: those of this process.
        """
        group = freezer.make_group(self.instance, groups)
        if group is None:
            return self
        job = Job(self.directory, replace(self.description, group=str(group)))
        job.save()
        return job

    # -- what it is

    @property
    def name(self) -> str:
        """Return the job's name."""
        return self.description.name

    @property
    def instance(self) -> str:
        """Return the instance's id."""
        return self.description.instance

    @property
    def pid(self) -> int:
        """Return the init's pid; 0 before there is one."""
        return self.description.pid

    @property
    def status_path(self) -> Path:
        """Return where the init records how the command ended, as this machine sees it."""
        return self.directory / "status"

    def may_be_touched_by(self, user: int) -> bool:
        """Return whether a user may see, signal, dump or remove the job."""
        from icecore.host.jobs.identity import may_touch

        return may_touch(user, self.description.user)

    def log_path(self, stream: Stream) -> Path:
        """Return the file of one stream, as this machine sees it."""
        return self.directory / f"{stream}.log"

    def record(self) -> RunRecord:
        """Return what a snapshot of the job must keep (`RunRecord`)."""
        known = self.description
        return RunRecord(
            name=known.name,
            command=known.command,
            cwd=known.cwd,
            isolation=known.isolation,
            files=own_paths(self.directory, known.isolation),
            binds=known.binds,
            init=(self.directory / "icecore-init").read_bytes(),
            files_to=known.files_to,
            copies=known.copies,
            user=known.user,
            user_name=known.user_name,
            data=known.data,
            log_limit=known.log_limit,
        )

    # -- how it is

    @property
    def alive(self) -> bool:
        """Return whether the init runs (a zombie does not count)."""
        known = self.description
        if self._over or known.pid == 0:
            return False
        if known.boot == boot_id() and procfs.runs(known.pid, known.start_time):
            return True
        self.__dict__["_over"] = True  # final: a pid and a start time identify one process
        return False

    @property
    def state(self) -> Literal["starting", "running", "ended", "failed"]:
        """Return the state; ``failed``: the process that started or restored it died before it ran."""
        if self.alive:
            return "running"
        if self.description.pid:
            return "ended"
        pid, started = self.description.owner
        try:
            owned = self.description.boot == boot_id() and procfs.start_time(pid) == started
        except NotFound:
            owned = False
        return "starting" if owned else "failed"

    def status(self) -> ExitStatus | None:
        """Return how it ended; None while it runs or starts."""
        return None if self.state in ("running", "starting") else self._final_status

    @cached_property
    def _final_status(self) -> ExitStatus:
        """Return how the command ended. Use it only after the end."""
        try:
            with self.status_path.open("rb") as file:
                line = file.read(_MOST_STATUS).decode("ascii", "replace")
        except FileNotFoundError:
            line = ""
        found = re.fullmatch(r"(exited|killed) (\d+)\n", line)
        if found:
            number = int(found[2])
            return ExitStatus(code=number) if found[1] == "exited" else ExitStatus(signal=number)
        # An init that left no word was killed: nothing but SIGKILL from outside can end it before
        # it writes.
        same_boot = self.description.boot == boot_id() and self.description.pid != 0
        return ExitStatus(signal=signal.SIGKILL) if same_boot else ExitStatus()

    def main_process(self) -> int:
        """Return the pid of the command itself (the init's first child), as this machine sees it.

        Raises:
            NotFound: It has ended.
        """
        children = procfs.children(self.pid) if self.alive else []
        if not self.description.isolation.pid:
            children = children[:1]
        for child in children:
            # The init's first fork is pid 2 of a fresh namespace, and stays it through every
            # restore.
            if not self.description.isolation.pid or procfs.status(child).own_pid == 2:
                return child
        raise NotFound(f"the command of job {self.name} has ended")

    # -- what one does with it

    def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait until it has ended, whoever its parent is.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            TimeoutError: It still runs.
        """
        until = None if timeout is None else time.monotonic() + timeout
        job = self
        while job.state == "starting":
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"job {self.name} is still being started")
            time.sleep(_POLL_SECONDS)
            job = Job.load(self.directory)
        if not job._sleep_until_end(None if until is None else max(0.0, until - time.monotonic())):
            raise TimeoutError(f"job {self.name} still runs")
        status = job.status()
        assert status is not None
        job.tidy()
        return status

    def tidy(self, seconds: float = _LEAVE_SECONDS, removal: float | None = None) -> None:
        """Remove the cgroup and the private temporary directories of a job that has ended. What
        cannot be removed stays for the next call. The directories stay, too, while processes of
        the job go on without its init.

        Args:
            seconds: How long to wait for processes that its init left, which are still ending.
            removal: How many seconds the removal of the directories may take if a process is
                adding to them; None: `icecore.host.jobs.temporary.REMOVAL_SECONDS`.
        """
        known = self.description
        if not (known.group or known.isolation.tmp) or self.state not in ("ended", "failed"):
            return
        if known.group and not freezer.remove_group(Path(known.group), seconds):
            return
        self._remove_temporary(removal)

    def discard(self) -> None:
        """Remove the directory and the cgroup of an instance that does not run."""
        if self.group is not None:
            freezer.remove_group(self.group)
        self._remove_temporary()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _remove_temporary(self, seconds: float | None = None) -> None:
        """Remove the job's private temporary directories, if it has any."""
        if self.description.isolation.tmp:
            from icecore.host.jobs import temporary  # few jobs have them

            with suppress(OSError):
                temporary.remove(
                    self.directory, temporary.REMOVAL_SECONDS if seconds is None else seconds
                )

    @property
    def group(self) -> Path | None:
        """Return the directory of the cgroup of its own; None: it has none."""
        return Path(self.description.group) if self.description.group else None

    def open_init(self) -> int | None:
        """Return a pidfd of the init, which the caller closes; None: the job has ended. Its identity
        is checked after opening: from then on it cannot change.
        """
        try:
            fd = os.pidfd_open(self.pid) if self.pid else None
        except ProcessLookupError:
            return None
        if fd is not None and not self.alive:
            os.close(fd)
            return None
        return fd

    def _open_command(self) -> int:
        """Open a pidfd of the command. Its parent is checked after opening, as in `open_init`.

        Raises:
            NotFound: It has ended.
        """
        child = self.main_process()
        ended = f"the command of job {self.name} has ended"
        try:
            fd = os.pidfd_open(child)
        except ProcessLookupError as error:
            raise NotFound(ended) from error
        try:
            if child not in procfs.children(self.pid) or not self.alive:
                raise NotFound(ended)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sleep_until_end(self, seconds: float | None) -> bool:
        """Wait up to ``seconds``; return whether the init has ended."""
        fd = self.open_init()
        if fd is None:
            return True
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(None if seconds is None else seconds * 1000))
        finally:
            os.close(fd)

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the command. SIGKILL ends the whole job at once; the others reach the
        command through its init.

        Raises:
            NotFound: It has ended.
        """
        # What the init cannot pass on. Its own death would end the others only where it has a pid
        # namespace; without one it ends them once the command is dead.
        fd: int | None
        if number == signal.SIGSTOP:
            fd = self._open_command()
        elif number == signal.SIGKILL and not self.description.isolation.pid:
            try:
                fd = self._open_command()
            except NotFound:  # there is only the init
                fd = self.open_init()
        else:
            fd = self.open_init()
        if fd is None:
            raise NotFound(
                f"job {self.name} does not run", cure="'icecore ps' lists the jobs of this node"
            )
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError as error:
            raise NotFound(f"job {self.name} has ended") from error
        finally:
            os.close(fd)

    def end(self, number: int) -> None:
        """Send a signal as ``kill`` does. For TERM and KILL, first record that the end is
        requested, so that a supervisor does not restore the job.

        Raises:
            NotFound: It has ended.
        """
        if number in _ENDING:
            note_end(self.directory)
        self.kill(number)

    def end_requested(self, within: float = ASKED_SECONDS) -> bool:
        """Return whether ``end`` asked this instance to end in the last ``within`` seconds."""
        at, snapshot = self._end_note()
        return (
            not snapshot
            and self.description.boot == boot_id()
            and 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - at <= within
        )

    def _end_note(self) -> tuple[float, str]:
        """Return when the end was requested, in seconds since boot, and the snapshot, if any."""
        with suppress(OSError, ValueError):
            at, _, snapshot = (self.directory / _END_REQUESTED).read_text().strip().partition(" ")
            return float(at), snapshot
        return -math.inf, ""

    def log_sizes(self) -> dict[Stream, int]:
        """Return the current size of each log in bytes, including what was removed; 0 if it does not
        exist: the instance is being made or removed.
        """
        from icecore.host.jobs.logs import STREAMS  # 'ps' does not need it

        sizes: dict[Stream, int] = dict.fromkeys(STREAMS, 0)
        for stream in STREAMS:
            with suppress(FileNotFoundError):
                sizes[stream] = self.log_path(stream).stat().st_size
        return sizes

    def logs(self, *, follow: bool = False) -> Iterator[LogPiece]:
        """Yield what the command has written to both streams; with ``follow`` also what it writes
        until it ends.
        """
        return self.logs_after({}, follow=follow)

    def logs_after(self, seen: Mapping[Stream, int], *, follow: bool) -> Iterator[LogPiece]:
        """Yield the output after an offset in each log, as `logs` does.

        Args:
            seen: The offsets, in bytes. Default: 0.
        """
        from icecore.host.jobs.logs import STREAMS, LogReader  # 'ps' does not need it

        with ExitStack() as stack:
            readers = {
                stream: stack.enter_context(LogReader(self.directory, stream, seen.get(stream, 0)))
                for stream in STREAMS
            }
            ended = not follow
            while True:
                for reader in readers.values():
                    while piece := reader.read(_PIECE):
                        yield piece
                if ended:
                    return
                ended = self._sleep_until_end(_POLL_SECONDS)

    def trim_logs(self, emit: Sink, most: int | None = None) -> None:
        """Trim the logs to their limit, if they have one.

        Args:
            emit: Gets ``job.trim_failed``, once for this object. The next call tries again.
            most: Bytes of each log to remove at most. Default: those of
                `icecore.host.jobs.log_trimming.trim`.
        """
        known = self.description
        # Without a pid, a restore may still be writing the logs.
        if not known.log_limit or not known.pid:
            return
        from icecore.host.jobs import log_trimming  # few jobs have a limit

        try:
            log_trimming.trim(self.directory, known.log_limit, most or log_trimming.TRIM_BYTES)
        except FileNotFoundError:  # the instance is being removed
            return
        except OSError as error:
            if self._untrimmed:
                return
            self.__dict__["_untrimmed"] = True
            emit(
                Event(
                    "job.trim_failed",
                    {"job": self.name, "instance": self.instance, "error": str(error)},
                )
            )

    def _found_restored(self, inits: Inits) -> Job:
        """Return the job; if its restorer died before it recorded the pid, with the pid of the init
        that holds this instance's status file.
        """
        if self.description.pid or self.state != "failed" or self.description.boot != boot_id():
            return self
        with suppress(NotFound):  # it ended meanwhile
            if pid := inits.of(self.directory):
                return self.with_pid(pid)
        return self
