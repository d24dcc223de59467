"""Many small waits at once: bounded, and after the first failure nothing of it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int = 16) -> None:
    """Do ``work`` for each of ``items``, ``at_once`` of them at a time.

    Raises:
        BaseException: The first that ``work`` raised, once all the others have ended or been cancelled.
    """
    left: Iterator[T] = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
