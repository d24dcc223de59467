"""When a tree stands still: one tracer holds every thread of it."""

from __future__ import annotations

from collections.abc import Collection

from icecore.errors import NotFound
from icecore.host.kernel import procfs


class HeldTree:
    """Finds out when one tracer holds every thread of a tree. Use it only after CRIU has stopped
    them all (`icecore.dumper.memory.early.ALL_STOPPED` exists, or CRIU's plugin says so). Before, CRIU may resume a thread that
    it has stopped.

    Each thread must be seen stopped once. After that, only its tracer can let it run. CRIU executes
    its own code in one thread after another, so threads are rarely all stopped at once.

    Args:
        root: Host pid of the tree's root.
        apart: Host pids of processes that do not count.
    """

    def __init__(self, root: int, apart: Collection[int] = ()) -> None:
        self._root = root
        self._apart = apart
        self._tracers: dict[int, int] = {}

    def threads(self) -> dict[int, list[int]]:
        """Return the threads by host pid if all of them are held and the tree did not change
        meanwhile; otherwise an empty mapping. May be called repeatedly.
        """
        try:
            found = self.members()
            threads = [thread for own in found.values() for thread in own]
            for thread in threads:
                if thread not in self._tracers and (tracer := procfs.tracer_in_stop(thread)):
                    self._tracers[thread] = tracer
            tracers = {self._tracers.get(thread, 0) for thread in threads}
            held = len(tracers) == 1 and 0 not in tracers
            return found if held and self.members() == found else {}
        except NotFound:
            return {}

    def members(self) -> dict[int, list[int]]:
        """Return the threads by host pid, held or not.

        Raises:
            NotFound: The root, or another process, has ended.
        """
        pids = [pid for pid in procfs.tree(self._root) if pid not in self._apart]
        return {pid: procfs.threads(pid) for pid in pids if not procfs.is_zombie(pid)}
