"""What /proc tells of a tree that stands still. It can be read as soon as every thread is held, while
CRIU writes its images.

Code of CRIU runs in one process after the other meanwhile. That process has a unix socket, some
memory and CRIU's log more than it should. Only the log is a regular file with a name.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from icecore.dumper.observe.facts import (
    describe_namespaces,
    describe_processes,
    listening_ports,
    thread_ids,
)
from icecore.dumper.observe.files import FoundFile, find_files, read_opened, tree_pids
from icecore.dumper.options import DumpOptions
from icecore.host.kernel import procfs
from icecore.store.format.manifest import Namespaces, Process


@dataclass(frozen=True)
class Standing:
    """A tree that stands still.

    Attributes:
        at_ns: When it was read, ns since the epoch: not later than anything below.
        pids: Host pid → image id, root first.
        alive: Host pids of those that are no zombies.
        ids: Process and thread ids that must be free for a restore.
        ports: The addresses on which it listens for TCP.
        files: The regular files that it has open or mapped, or that CRIU had open in it.
    """

    at_ns: int
    pids: dict[int, int]
    alive: list[int]
    ids: list[int]
    processes: list[Process]
    namespaces: Namespaces
    ports: list[str]
    files: list[FoundFile]

    def own_files(self) -> list[FoundFile]:
        """Return the files that the tree itself has open or mapped, once CRIU is done."""
        return [file for file in self.files if os.path.lexists(file.reach)]


def observe(root: int, options: DumpOptions, maps: procfs.MapsReader) -> Standing:
    """Read a tree that stands still.

    Args:
        root: Host pid of its root.
        options: Say which files' content is stored.
        maps: Reads its mappings.

    Raises:
        NotFound: A process was killed meanwhile.
    """
    at = time.time_ns()
    pids = tree_pids(root)
    alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]
    namespaces = describe_namespaces(root)
    opened = read_opened(alive, maps)
    return Standing(
        at,
        pids,
        alive,
        [] if namespaces.pid else thread_ids(pids),
        describe_processes(pids),
        namespaces,
        listening_ports({pid: own.descriptors for pid, own in opened.items()}),
        find_files(opened, options, at),
    )
