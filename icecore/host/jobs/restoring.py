"""An instance that CRIU is about to restore: its command line, files, cgroup and keeper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from icecore.errors import NotFound, RestoreRefused
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import RestoreNamespaces, RunRecord


class Restoring:
    """An instance that CRIU is about to restore (a context manager: on exit before `started`, the
    instance is forgotten).

    The caller puts back what the logs held (`redirected`), runs ``[*prefix, criu, "restore", …,
    *options]`` with ``pass_fds``, and calls `started` once CRIU has made the tree. From then on the
    job is found, waited for and killed as any other.

    Attributes:
        job: The instance; it has no pid yet.
    """

    def __init__(self, job: Job, record: RunRecord, namespaces: RestoreNamespaces) -> None:
        self.job = job
        self._record = record
        self._namespaces = namespaces
        self._started = False

    @property
    def prefix(self) -> list[str]:
        """Return the command line before ``criu``; often empty."""
        return self._namespaces.prefix

    @property
    def options(self) -> list[str]:
        """Return the options of ``criu restore``."""
        return self._namespaces.options

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Return the descriptors that CRIU must inherit."""
        return self._namespaces.pass_fds

    @property
    def redirected(self) -> dict[str, Path]:
        """Map the paths in the images that are the instance's own to the new instance's files.
        Nothing else may be put at those paths.
        """
        return {path: self.job.directory / name for name, path in self._record.files.items()}

    def bind_copies(self, images: Path) -> None:
        """Mount the instance's copies over the originals, or make CRIU do so; they are written, and
        CRIU does not run yet.

        Args:
            images: CRIU's images.

        Raises:
            RestoreRefused: It cannot be done.
        """
        try:
            self._namespaces.bind_copies(images)
        except OSError as error:
            raise RestoreRefused(
                f"cannot bind a copy of a file: {error.strerror}",
                cure="check the file and the directory of --files-to, or use --files instead",
            ) from error

    def make_group(self, groups: Mapping[str, str] | None) -> Path | None:
        """Make a cgroup of the instance's own, into which CRIU goes before it restores.

        Args:
            groups: The groups that it joins, by hierarchy; None: those of this process.

        Returns:
            Its directory; None: the instance gets none.
        """
        self.job = self.job.with_group(groups)
        return self.job.group

    def has_keeper(self, place: Path, *, keep: bool) -> None:
        """Record where the keeper of its GPU memory is, and whether that memory outlives it."""
        self.job = self.job.with_resident(place, keep=keep)

    def started(self, pid: int) -> Job:
        """Record the restored init, which CRIU has released; it may have ended since, and is then
        known as an ended job.

        Args:
            pid: As this machine sees it (CRIU's ``--pidfile``).
        """
        self._started = True
        try:
            self.job = self.job.with_pid(pid)
        except NotFound:
            self.job = self.job.with_lost(pid)
        return self.job

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._namespaces.close()
        if not self._started:
            self.job.discard()
