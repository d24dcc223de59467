"""The conformance suite of back ends. To test a back end, subclass it and run it with pytest. The
repository relies on no other property of storage.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

from icecore.errors import Damaged, IcecoreError, ObjectExists, ObjectMissing, UsageError
from icecore.store.backend.base import Backend, Buffer

_SECONDS = 60.0


class BackendConformance(ABC):
    """The tests of a back end. Subclass it, name the class ``Test…``, implement ``opened``.

    Attributes:
        large: Bytes of the large objects.
        racers: How many clients race for one name.
        races: How many races there are.
        listed: Objects in a long listing; more than the storage returns in one reply.
        equal_bytes_lose: Whether creating an existing object with the same bytes fails. Not so
            where lost replies are resolved.
    """

    large = 9 << 20
    racers = 8
    races = 10
    listed = 1010
    equal_bytes_lose = True

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[Backend]:
        """Return a client of one place, which is empty when the test begins; each call may create
        another client of the same place.
        """

    def run(self, work: Callable[[Backend], Awaitable[None]]) -> None:
        """Run ``work`` with a client in an event loop of its own."""

        async def body() -> None:
            async with self.opened() as backend:
                await asyncio.wait_for(work(backend), _SECONDS)

        asyncio.run(body())

    def test_gives_back_what_was_created(self) -> None:
        async def work(backend: Backend) -> None:
            parts: list[Buffer] = [b"one", bytearray(b"two"), memoryview(b"xthreex")[1:-1], b""]
            await backend.create("a/b/object-1.x_y", parts)
            assert await backend.get("a/b/object-1.x_y") == b"onetwothree"
            assert await backend.size("a/b/object-1.x_y") == 11
            await backend.create("top", [b"0"])
            assert await backend.get("top") == b"0"

        self.run(work)

    def test_many_parts_and_large_objects(self) -> None:
        async def work(backend: Backend) -> None:
            parts = [secrets.token_bytes(size) for size in (1, 4095, 4096, 4097, self.large)] + [
                bytes([n % 251]) * 3 for n in range(3000)
            ]
            whole = b"".join(parts)
            await backend.create("large", parts)
            assert await backend.get("large") == whole
            out = bytearray(self.large // 2)
            await backend.get_into("large", 5000, memoryview(out))
            assert out == whole[5000 : 5000 + len(out)]

        self.run(work)

    def test_creates_only_what_is_absent(self) -> None:
        async def work(backend: Backend) -> None:
            await backend.create("x/taken", [b"first"])
            for second in (b"second", b"first", b"") if self.equal_bytes_lose else (b"second", b""):
                try:
                    await backend.create("x/taken", [second])
                except ObjectExists:
                    pass
                else:
                    raise AssertionError("a name was taken twice")
            assert await backend.get("x/taken") == b"first"
            await backend.delete("x/taken")
            await backend.create("x/taken", [b"again"])
            assert await backend.get("x/taken") == b"again"

        self.run(work)

    def test_one_of_many_creators_wins(self) -> None:
        """Clients with loops, threads and connections of their own create the same name at the same
        time.
        """

        def race(number: int) -> None:
            barrier = threading.Barrier(self.racers)

            def creator(who: int) -> bool:
                async def body() -> bool:
                    async with self.opened() as backend:
                        barrier.wait(_SECONDS)
                        try:
                            await asyncio.wait_for(
                                backend.create(f"race/{number}", [bytes([who]) * 70_000]), _SECONDS
                            )
                        except ObjectExists:
                            return False
                        return True

                return asyncio.run(body())

            with ThreadPoolExecutor(self.racers) as pool:
                won = list(pool.map(creator, range(self.racers)))
            assert won.count(True) == 1, (
                f"{won.count(True)} creators of one name were told that they won"
            )

            async def look(backend: Backend) -> None:
                assert await backend.get(f"race/{number}") == bytes([won.index(True)]) * 70_000

            self.run(look)

        for number in range(self.races):
            race(number)

    def test_readers_see_all_or_nothing(self) -> None:
        async def work(backend: Backend) -> None:
            data = secrets.token_bytes(self.large)
            creating = asyncio.create_task(backend.create("whole", [data]))
            sizes: set[int] = set()
            while not creating.done():
                try:
                    sizes.add(len(await backend.get("whole")))
                except ObjectMissing:
                    pass
                sizes.update([info.size async for info in backend.list("") if info.name == "whole"])
                await asyncio.sleep(0)
            await creating
            assert sizes <= {self.large}, f"parts of an object were seen: {sizes}"

        self.run(work)

    def test_ranges(self) -> None:
        async def work(backend: Backend) -> None:
            data = secrets.token_bytes(10_000)
            await backend.create("ranges", [data])
            for offset, length in (
                (0, 1),
                (0, 10_000),
                (9_999, 1),
                (4_096, 4_096),
                (17, 0),
                (10_000, 0),
            ):
                out = bytearray(length)
                await backend.get_into("ranges", offset, memoryview(out))
                assert out == data[offset : offset + length]
                if backend.direct:
                    out = bytearray(length)
                    await asyncio.to_thread(backend.read_into, "ranges", offset, memoryview(out))
                    assert out == data[offset : offset + length]
            for offset, length in ((9_999, 2), (10_001, 1), (0, 10_001), (1 << 40, 1)):
                await self._fails(
                    Damaged, backend.get_into("ranges", offset, memoryview(bytearray(length)))
                )
            wide = memoryview(bytearray(4_000)).cast("Q")
            await backend.get_into("ranges", 8, wide)
            assert wide.cast("B") == data[8:4_008]
            outs = [bytearray(100) for _ in range(64)]
            await asyncio.gather(
                *(
                    backend.get_into("ranges", at * 100, memoryview(out))
                    for at, out in enumerate(outs)
                )
            )
            assert b"".join(outs) == data[:6_400]

        self.run(work)

    def test_drafts(self) -> None:
        async def work(backend: Backend) -> None:
            if not backend.drafts:
                try:
                    backend.draft("any")
                except UsageError:
                    return
                raise AssertionError("a back end without drafts gave one")
            pieces = [secrets.token_bytes(size) for size in (1, 100_000, self.large // 4)]
            draft, loser, dropped = (backend.draft("d/x" if n < 2 else "d/y") for n in range(3))
            for piece in pieces:
                for each in (draft, loser, dropped):
                    await asyncio.to_thread(each.append, [piece[:10], memoryview(piece)[10:], b""])
                await self._fails(ObjectMissing, backend.get("d/x"))
                assert draft.length == len(b"".join(pieces[: pieces.index(piece) + 1]))
            if draft.descriptor >= 0:
                pieces += [b"from another process"]
                os.pwrite(draft.descriptor, pieces[-1] + b"a part", draft.length)
                draft.grow(len(pieces[-1]))
                draft.cut()
                assert os.fstat(draft.descriptor).st_size == draft.length
                pieces += [b"the end"]
                draft.append(pieces[-1:])
            assert [info.name async for info in backend.list("")] == []
            await draft.publish()
            draft.discard()
            assert await backend.get("d/x") == b"".join(pieces)
            loser.append([b"other"])
            await self._fails(ObjectExists, loser.publish())
            assert await backend.get("d/x") == b"".join(pieces)
            dropped.discard()
            dropped.discard()
            assert [info.name async for info in backend.list("")] == ["d/x"]
            assert await backend.sweep(0) == 0

        self.run(work)

    def test_limit_of_a_get(self) -> None:
        async def work(backend: Backend) -> None:
            await backend.create("limited", [bytes(1000)])
            assert len(await backend.get("limited", limit=1000)) == 1000
            await self._fails(Damaged, backend.get("limited", limit=999))

        self.run(work)

    def test_missing_objects(self) -> None:
        async def work(backend: Backend) -> None:
            await backend.create("there/is/this", [b"1"])
            for name in ("missing", "missing/too", "there/is/that", "there/is"):
                await self._fails(ObjectMissing, backend.get(name))
                await self._fails(ObjectMissing, backend.size(name))
                await self._fails(
                    ObjectMissing, backend.get_into(name, 0, memoryview(bytearray(1)))
                )
                await backend.delete(name)
            assert await backend.get("there/is/this") == b"1"

        self.run(work)

    def test_lists_in_order(self) -> None:
        async def work(backend: Backend) -> None:
            names = sorted(
                [
                    "a/b/1",
                    "a/b/2",
                    "a/b-1",
                    "a/b.1",
                    "a/b0",
                    "a/c",
                    "a0",
                    "ab/1",
                    "b/x/y/z",
                    "b/x/y",
                    "config",
                ]
                + [f"many/{n:04x}" for n in range(self.listed)]
            )
            names.remove("b/x/y")  # storage with folders cannot hold both
            for name in reversed(names):
                await backend.create(name, [name.encode()])
            for prefix in ("", "a/", "a/b/", "b/", "b/x/", "many/", "none/", "a/b/1/"):
                listed = [(info.name, info.size) async for info in backend.list(prefix)]
                assert listed == [(name, len(name)) for name in names if name.startswith(prefix)], (
                    prefix
                )
            async for info in backend.list("many/"):  # a listing may be left early
                assert info.name == "many/0000"
                break
            await self._fails(UsageError, self._first(backend, "a"))

        self.run(work)

    def test_lists_while_objects_come_and_go(self) -> None:
        async def work(backend: Backend) -> None:
            steady = [f"go/{n:03d}-steady" for n in range(0, 100, 2)]
            for name in steady:
                await backend.create(name, [b"s"])

            async def churn() -> None:
                for n in range(1, 60, 2):
                    await backend.create(f"go/{n:03d}-brief", [b"b"])
                    await backend.delete(f"go/{n:03d}-brief")

            busy = asyncio.create_task(churn())
            while not busy.done():
                seen = [info.name async for info in backend.list("go/")]
                assert seen == sorted(set(seen))
                assert [name for name in seen if name.endswith("steady")] == steady
                await asyncio.sleep(0)
            await busy

        self.run(work)

    def test_deletes(self) -> None:
        async def work(backend: Backend) -> None:
            await backend.create("d/1", [b"1"])
            await backend.create("d/2", [b"2"])
            assert await backend.get("d/1") == b"1"
            await asyncio.gather(*(backend.delete("d/1") for _ in range(4)))
            await self._fails(ObjectMissing, backend.get("d/1"))
            await self._fails(ObjectMissing, backend.get_into("d/1", 0, memoryview(bytearray(1))))
            assert [info.name async for info in backend.list("d/")] == ["d/2"]
            names = [f"d/many/{number}" for number in range(20)]
            for name in names[::2]:
                await backend.create(name, [b"x"])
            await backend.delete_many(names)  # half of them are not there
            await backend.delete_many([])
            assert [info.name async for info in backend.list("d/")] == ["d/2"]

        self.run(work)

    def test_refuses_bad_names(self) -> None:
        async def work(backend: Backend) -> None:
            for name in (
                "",
                "/",
                "/a",
                "a/",
                "a//b",
                ".",
                "..",
                "a/../b",
                ".hidden",
                "a/.b",
                "A",
                "ä",
                "a b",
                "a\0b",
                "a\n",
                "x" * 600,
                "-a",
                "a\\b",
            ):
                for attempt in (
                    backend.create(name, [b"x"]),
                    backend.get(name),
                    backend.delete(name),
                    backend.delete_many(["fine", name]),
                    backend.size(name),
                ):
                    await self._fails(UsageError, attempt)
            assert [info.name async for info in backend.list("")] == []

        self.run(work)

    def test_many_calls_at_once(self) -> None:
        async def work(backend: Backend) -> None:
            data = [secrets.token_bytes(5_000) for _ in range(100)]
            await asyncio.gather(
                *(backend.create(f"at/once/{n}", [body]) for n, body in enumerate(data))
            )
            assert await asyncio.gather(*(backend.get(f"at/once/{n}") for n in range(100))) == data
            assert await backend.sweep(3600) == 0
            await asyncio.gather(*(backend.delete(f"at/once/{n}") for n in range(100)))
            assert [info async for info in backend.list("")] == []

        self.run(work)

    def test_cancelled_calls_leave_it_usable(self) -> None:
        async def work(backend: Backend) -> None:
            data = secrets.token_bytes(self.large)
            await backend.create("there", [data])
            for pause in (0, 0.001, 0.01):
                calls = [
                    *(
                        asyncio.create_task(backend.create(f"c/{n}-{pause}", [data]))
                        for n in range(8)
                    ),
                    *(
                        asyncio.create_task(
                            backend.get_into("there", n, memoryview(bytearray(1 << 20)))
                        )
                        for n in range(8)
                    ),
                ]
                await asyncio.sleep(pause)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            async for info in backend.list("c/"):
                assert info.size == len(data), "a part of an object was left behind"
            outs = [bytearray(1000) for _ in range(32)]
            await asyncio.gather(
                *(backend.get_into("there", n, memoryview(out)) for n, out in enumerate(outs))
            )
            assert all(out == data[n : n + 1000] for n, out in enumerate(outs))
            await backend.create("after", [b"1"])

        self.run(work)

    async def _fails(self, kind: type[IcecoreError], attempt: Awaitable[object]) -> None:
        try:
            await attempt
        except kind:
            return
        raise AssertionError(f"{kind.__name__} was to be expected")

    async def _first(self, backend: Backend, prefix: str) -> str:
        async for info in backend.list(prefix):
            return info.name
        return ""
