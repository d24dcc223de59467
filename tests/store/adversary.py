"""Storage whose owner lies about the log: it withholds entries, replays old ones under their right
names, and mixes entries of several forks.

It has no key: every entry that it shows was written by a client. All other objects are shown as
they are.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

from icecore.errors import ObjectExists, ObjectMissing
from icecore.store.backend.base import Backend, Buffer, ObjectInfo
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.names import LOG, log_generation, log_name
from icecore.store.format.state import decode_entry, entry_digest
from icecore.store.log.entries import Entry


class Archive:
    """All log entries that clients ever wrote, and their predecessors.

    Args:
        key: The repository's log key, by which the test knows what the adversary does not.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.data: dict[bytes, bytes] = {}
        self.entries: dict[bytes, Entry] = {}

    def add(self, name: str, data: bytes) -> bytes:
        generation = log_generation(name)
        assert generation is not None
        digest = entry_digest(data)
        self.data[digest] = data
        self.entries[digest] = Entry(decode_entry(name, generation, data, self.key), digest)
        return digest

    def chain(self, tip: bytes) -> list[Entry]:
        """Return the entry and all before it, newest first."""
        found = [self.entries[tip]]
        while found[-1].state.predecessor:
            found.append(self.entries[found[-1].state.predecessor])
        return found

    def continues(self, tip: bytes, before: bytes) -> bool:
        """Return whether ``before`` is in the history of ``tip``."""
        return any(entry.digest == before for entry in self.chain(tip))


class Shown(Backend):
    """What one client sees of the repository.

    Attributes:
        view: The log entries that it can read, by name.
        hidden: Names that listings leave out.
    """

    direct = True
    where = "an adversary's"

    def __init__(self, inner: MemoryBackend, archive: Archive) -> None:
        self.inner = inner
        self.archive = archive
        self.view: dict[str, bytes] = {}
        self.hidden: set[str] = set()

    def show(self, tip: bytes, keep: int) -> None:
        """Show a whole log, of which all but ``keep`` entries were trimmed."""
        self.view = {
            log_name(entry.generation): self.archive.data[entry.digest]
            for entry in self.archive.chain(tip)[:keep]
        }
        self.hidden = set()

    def withhold(self, dice: random.Random) -> None:
        """Hide some of what is shown."""
        for name in dice.sample(sorted(self.view), min(len(self.view), dice.randint(1, 4))):
            del self.view[name]

    def withhold_newest(self, dice: random.Random) -> None:
        """Hide the newest entries."""
        for name in sorted(self.view)[: dice.randint(1, 6)]:
            del self.view[name]

    def hide(self, dice: random.Random) -> None:
        """Omit some from listings only."""
        self.hidden |= set(dice.sample(sorted(self.view), min(len(self.view), dice.randint(1, 4))))

    def mix(self, dice: random.Random) -> None:
        """Show entries of any fork under their right names."""
        for digest in dice.sample(
            list(self.archive.data), min(len(self.archive.data), dice.randint(1, 8))
        ):
            self.view[log_name(self.archive.entries[digest].generation)] = self.archive.data[digest]

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if not name.startswith(LOG):
            await self.inner.create(name, parts)
            return
        if name in self.view:
            raise ObjectExists(f"object {name} exists")
        self.view[name] = b"".join(parts)
        self.archive.add(name, self.view[name])

    def _entry(self, name: str) -> bytes:
        if name not in self.view:
            raise ObjectMissing(f"there is no object {name}")
        return self.view[name]

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return (
            self._entry(name) if name.startswith(LOG) else await self.inner.get(name, limit=limit)
        )

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        self.read_into(name, offset, out)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        if name.startswith(LOG):
            out.cast("B")[:] = self._entry(name)[offset : offset + out.nbytes]
        else:
            self.inner.read_into(name, offset, out)

    async def size(self, name: str) -> int:
        return len(self._entry(name)) if name.startswith(LOG) else await self.inner.size(name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        if prefix != LOG:
            async for info in self.inner.list(prefix):
                yield info
            return
        for name in sorted(self.view.keys() - self.hidden):
            yield ObjectInfo(name, len(self.view.get(name, b"")))

    async def delete(self, name: str) -> None:
        if name.startswith(LOG):
            self.view.pop(name, None)
        else:
            await self.inner.delete(name)
