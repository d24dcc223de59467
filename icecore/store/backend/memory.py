"""A back end in a dictionary, for tests and for trying things out: the contract of Backend in its
plainest form.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

from icecore.errors import Damaged, ObjectExists, ObjectMissing
from icecore.store.backend.base import Backend, Buffer, ObjectInfo, check_name, check_prefix


class MemoryBackend(Backend):
    """Objects held in this process; gone when it is.

    Args:
        objects: A dictionary to hold them, filled before; several clients of one "bucket" share the
            back end itself.
    """

    direct = True
    where = "memory"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self._lock = threading.Lock()

    def _object(self, name: str) -> bytes:
        try:
            return self.objects[check_name(name)]
        except KeyError:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from None

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        check_name(name)
        await asyncio.sleep(0)  # as with real storage, other tasks run in between
        data = b"".join(parts)
        with self._lock:
            if name in self.objects:
                raise ObjectExists(f"object {name} exists in {self.where}")
            self.objects[name] = data

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        await asyncio.sleep(0)
        data = self._object(name)
        if len(data) > limit:
            raise Damaged(
                "object", name, f"it has {len(data)} bytes, more than the {limit} that it can have"
            )
        return data

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await asyncio.sleep(0)
        self.read_into(name, offset, out)

    async def size(self, name: str) -> int:
        await asyncio.sleep(0)
        return len(self._object(name))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        await asyncio.sleep(0)
        for name in sorted(self.objects.copy()):
            if name.startswith(prefix):
                data = self.objects.get(name)
                if data is not None:
                    yield ObjectInfo(name, len(data))

    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)
        self.objects.pop(check_name(name), None)

    async def delete_many(self, names: Sequence[str]) -> None:
        await asyncio.sleep(0)
        for name in names:
            self.objects.pop(check_name(name), None)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        data = memoryview(self._object(name))[offset : offset + out.nbytes]
        if len(data) != out.nbytes:
            raise Damaged(
                "object",
                name,
                f"it ends {out.nbytes - len(data)} bytes before offset {offset + out.nbytes}",
            )
        out.cast("B")[:] = data
