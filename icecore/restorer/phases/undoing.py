"""Undoes a restore that failed: nothing of its tree runs afterwards, and the job's files are as
they were.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

from icecore.errors import RestoreFailed
from icecore.events import Event
from icecore.restorer.files.ghost_names import remove_ghosts
from icecore.restorer.files.put_back import PutBack
from icecore.restorer.guard.client import RestoreGuard
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.tree import Tree

_GUARD_SECONDS = 60.0


class Undo:
    """What an attempt has begun. Each phase notes here what it makes, as soon as it exists.

    Attributes:
        stack: Undoes, in reverse, everything that was begun and is not part of the tree.
        guard: The guard, once it runs.
        put_back: The changes of the job's files, from before the first of them.
        ghosts: Names that a killed CRIU may leave, some in directories that the restore made.
        tree: The tree, from before CRIU starts.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._request = attempt
        self.stack = ExitStack()
        self.guard: RestoreGuard | None = None
        self.put_back: PutBack | None = None
        self.ghosts: list[str] = []
        self.tree: Tree | None = None

    @property
    def failure(self) -> BaseException | None:
        """What broke the tree first, which may not be what is being raised."""
        return self.tree.failure if self.tree is not None else None

    def run(self, error: BaseException) -> None:
        """Kill what was started, and remove what was made. Of a tree that was released (an
        interrupt came while this process was leaving it) undo only what belongs to the restore.
        """
        attempt = self._request
        released = self.tree is not None and self.tree.released
        if not released and attempt.after(error) is None:
            attempt.tell(
                Event(
                    "restore.failed",
                    {"snapshot": attempt.snapshot, "error": f"{type(error).__name__}: {error}"},
                )
            )
        # The steps run in reverse, each even if another fails; the caller gets what broke first.
        with attempt.only_warning("not all of it could be undone"), ExitStack() as steps:
            steps.callback(self.stack.close)
            if self.tree is not None and released:
                # Without detach the guard is the tree's parent, and may be asked how it ends.
                if attempt.options.detach:
                    steps.callback(self.tree.leave)
                return
            if self.put_back is not None:
                steps.callback(self._abandon_files, self.put_back)
            steps.callback(remove_ghosts, self.ghosts, attempt.options.root)
            if self.tree is not None:
                steps.callback(self.tree.kill, error)
            elif self.guard is not None:
                steps.callback(_end_guard, self.guard)

    def _abandon_files(self, put_back: PutBack) -> None:
        went, ran = (self.tree.went, self.tree.ran) if self.tree is not None else (False, False)
        self._request.tell_left(put_back.abandon(went=went, ran=ran))


def _end_guard(guard: RestoreGuard) -> None:
    with suppress(RestoreFailed):
        guard.end(_GUARD_SECONDS)
