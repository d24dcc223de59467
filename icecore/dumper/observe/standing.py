"""Facts about a tree that stands still, read from /proc as soon as every thread is held, while CRIU
writes its images.

Meanwhile CRIU's code runs in one process after another. It opens CRIU's log there, and makes
private mappings readable for a while, so that neighbours become one. So what a process has open and
mapped is compared once CRIU is done, and read again where it differs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from icecore.dumper.observe.facts import (
    describe_namespaces,
    describe_processes,
    listening_ports,
    thread_ids,
)
from icecore.dumper.observe.files import (
    FoundFile,
    Opened,
    find_files,
    read_opened,
    tree_pids,
)
from icecore.dumper.options import DumpOptions
from icecore.errors import NotFound
from icecore.host.kernel import procfs
from icecore.store.format.manifest import Namespaces, Process


class Standing(msgspec.Struct, frozen=True):
    """A tree that stands still.

    Attributes:
        at_ns: A time before anything below was read, ns since the epoch.
        pids: Host pid → image id, root first.
        alive: Host pids of the processes that are not zombies.
        ids: Process and thread ids that must be free for a restore.
        ports: The addresses on which it listens for TCP connections.
        opened: Host pid → what the process had open and mapped, CRIU's code in it included.
        maps: Reads the tree's mappings.
    """

    at_ns: int
    pids: dict[int, int]
    alive: list[int]
    ids: list[int]
    processes: list[Process]
    namespaces: Namespaces
    ports: list[str]
    opened: dict[int, Opened]
    maps: procfs.MapsReader

    def find_files(self, options: DumpOptions) -> list[FoundFile]:
        """Find the regular files that the tree has open or mapped. Call it once CRIU is done, before
        the tree runs again.

        Args:
            options: Say which files' content is stored.
        """
        opened = {}
        for pid, before in self.opened.items():
            with suppress(NotFound):  # it was killed; the capture reports it
                opened[pid] = self._as_it_is(pid, before)
        return find_files(opened, options, self.at_ns)

    def _as_it_is(self, pid: int, before: Opened) -> Opened:
        mappings, numbers = self.maps.read(pid), procfs.descriptor_numbers(pid)
        descriptors = before.descriptors
        if numbers != [one.number for one in descriptors]:
            descriptors = procfs.descriptors(pid)
        return Opened(descriptors, mappings)


class Ahead(NamedTuple):
    """What some processes of a tree have open and mapped, read before the other processes stand
    still.

    Attributes:
        at_ns: A time before anything was read, ns since the epoch.
        opened: Host pid → what the process has open and mapped.
    """

    at_ns: int
    opened: dict[int, Opened]


def read_ahead(
    pids: Sequence[int], maps: procfs.MapsReader, stop: threading.Event | None = None
) -> Ahead:
    """Read what some processes have open and mapped. They stand still; others of the tree may run.

    Args:
        pids: Host pids of the processes.
        maps: Reads their mappings.
        stop: When set, reading ends.

    Raises:
        DumpFailed: ``stop`` was set.
    """
    return Ahead(time.time_ns(), read_opened(pids, maps, stop))


def observe(
    root: int,
    maps: procfs.MapsReader,
    stop: threading.Event | None = None,
    ahead: Ahead | None = None,
) -> Standing:
    """Read the facts about a tree that stands still.

    Args:
        root: Host pid of its root.
        maps: Reads its mappings.
        stop: When set, reading ends.
        ahead: What `read_ahead` returned for some of its processes; they are not read again.

    Raises:
        NotFound: A process was killed meanwhile.
        DumpFailed: ``stop`` was set.
    """
    at, known = ahead or Ahead(time.time_ns(), {})
    pids = tree_pids(root)
    alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]
    namespaces = describe_namespaces(root)
    rest = read_opened([pid for pid in alive if pid not in known], maps, stop)
    opened = {pid: own for pid in alive if (own := known.get(pid) or rest.get(pid)) is not None}
    return Standing(
        at,
        pids,
        alive,
        [] if namespaces.pid else thread_ids(pids),
        describe_processes(pids),
        namespaces,
        listening_ports({pid: own.descriptors for pid, own in opened.items()}),
        opened,
        maps,
    )
