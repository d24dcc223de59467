"""All data directories of one dump, read with the rights of the job's user."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from icecore.dumper.data.capture import DataCapture, Identity, OpenHere
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.observe.files import FoundFile
from icecore.errors import DumpFailed, NotFound
from icecore.host.jobs.identity import file_rights
from icecore.host.kernel import procfs
from icecore.host.kernel.filesystem import acting_as, open_confined
from icecore.store.format.data import DataDirectory

Result = TypeVar("Result")


class DataDirectories:
    """The data directories of a job; a context manager.

    Args:
        pid: A process of the job, in whose file system they are.
        paths: As the job sees them.
        user: The job's user. A job of root may read everything.
        budget: Bytes of files, for each directory, that may be read in the window.

    Raises:
        DumpFailed: One cannot be opened.
    """

    def __init__(
        self,
        pid: int,
        paths: Sequence[str],
        user: int,
        parent: Parent | None,
        context: ScanContext,
        budget: int,
    ) -> None:
        self._user = user
        self._group, self._groups = _rights(pid, user) if user else (0, [])
        # No signal handler runs there, between taking a user's identity and giving it back.
        self._thread = ThreadPoolExecutor(1, "data")
        self._captures: list[DataCapture] = []
        try:
            for path in paths:
                top = self._open(pid, path)
                capture = DataCapture(top, path, parent, context, budget, privileged=not user)
                self._captures.append(capture)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all descriptors, and end the thread."""
        self._thread.shutdown()
        for capture in self._captures:
            capture.close()
        self._captures.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def look_ahead(self, files: Callable[[], Sequence[FoundFile]], *, once: bool = False) -> int:
        """Read what can be read while the job runs; return the bytes.

        Args:
            files: Returns the files that the job has open now.
            once: Look only once.
        """

        def written() -> frozenset[Identity]:
            found = elsewhere.submit(files).result()  # not with the rights of the job's user alone
            return frozenset(
                (file.about.device, file.about.inode) for file in found if file.about.writable
            )

        more = {"rounds": 1} if once else {}
        with ThreadPoolExecutor(1, "open-files") as elsewhere:
            elsewhere.submit(int).result()  # a thread has the rights of the one that starts it
            return self._do(lambda: sum(one.look_ahead(written, **more) for one in self._captures))

    def in_window(self, files: Sequence[FoundFile]) -> int:
        """Read what changed; return the bytes. See `DataCapture.in_window`.

        Args:
            files: The files that the tree has open.
        """
        identified = [((file.about.device, file.about.inode), file) for file in files]
        opened = OpenHere(
            {
                identity: file.about.path
                for identity, file in identified
                if file.about.policy == "content" and not file.deleted
            },
            frozenset(identity for identity, file in identified if file.mapped_writable),
        )
        return self._do(lambda: sum(one.in_window(opened) for one in self._captures))

    def after_window(self) -> list[SpaceCapture]:
        """Return the spaces of all directories."""
        return self._do(lambda: [space for one in self._captures for space in one.after_window()])

    def contain(self, path: str) -> bool:
        """Return whether a path of the job lies in one of the directories."""
        return any(path.startswith(f"{one.path}/") for one in self._captures)

    @property
    def summaries(self) -> list[DataDirectory]:
        """Return what the manifest says of the directories, after `after_window`."""
        return [one.summary for one in self._captures if one.summary is not None]

    def _open(self, pid: int, path: str) -> int:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return self._do(
                lambda: open_confined(root, path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY)
            )
        except OSError as error:
            raise DumpFailed(
                f"cannot open the data directory {path}: {error.strerror}",
                cure="make it again, or let the job's user read it",
            ) from error
        finally:
            os.close(root)

    def _do(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(self._as_user, work).result()

    def _as_user(self, work: Callable[[], Result]) -> Result:
        if not self._user:
            return work()
        with acting_as(self._user, self._group, self._groups):
            return work()


def _rights(pid: int, user: int) -> tuple[int, list[int]]:
    try:
        return file_rights(user, procfs.tree(pid))
    except NotFound as error:
        raise DumpFailed(
            f"{error.message}, and no process of the job runs as that user alone, so the rights for"
            " reading --data are unknown",
            cure="make the user again, or snapshot a job of root",
        ) from error
