"""Work that is started ahead yields its results in order, and none of it outlives a failure or a
reader that leaves.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from icecore.store.runtime.parallel import in_order


def test_results_come_in_order_and_no_more_is_begun_than_asked() -> None:
    async def body() -> None:
        begun: list[int] = []

        async def work(number: int) -> int:
            begun.append(number)
            await asyncio.sleep(0.003 * (number % 3))
            return number * 10

        got = []
        async with aclosing(in_order(range(20), work, ahead=3)) as results:
            async for result in results:
                got.append(result)
                assert len(begun) <= len(got) + 3
        assert got == [number * 10 for number in range(20)] and begun == list(range(20))
        async with aclosing(in_order([], work, ahead=3)) as results:
            assert [result async for result in results] == []

    asyncio.run(body())


@pytest.mark.parametrize("leave", [False, True])
def test_nothing_goes_on_after_a_failure(leave: bool) -> None:
    async def body() -> None:
        ended: list[int] = []

        async def work(number: int) -> int:
            if number == 2 and not leave:
                raise ValueError("two")
            try:
                await asyncio.sleep(0 if number < 2 else 60)
            finally:
                ended.append(number)
            return number

        got = []
        with pytest.raises(ValueError, match="two"):
            async with aclosing(in_order(range(9), work, ahead=4)) as results:
                async for result in results:
                    got.append(result)
                    if leave and result == 1:
                        raise ValueError("two")
        assert (
            got == [0, 1] and len(asyncio.all_tasks()) == 2
        )  # this one and the one that waits for it
        assert {0, 1} <= set(ended) <= set(range(7))

    asyncio.run(asyncio.wait_for(body(), 30))
