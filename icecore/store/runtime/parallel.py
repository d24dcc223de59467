"""Many small waits at once: bounded, and after the first failure nothing of it runs on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def each(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int = 16
) -> None:
    """Do ``work`` for each of ``items``, ``at_once`` of them at a time.

    Raises:
        BaseException: The first that ``work`` raised, once all the others have ended or been
            cancelled.
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


async def in_order(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], *, ahead: int
) -> AsyncGenerator[R, None]:
    """Yield what ``work`` makes of ``items``, in their order; ``ahead`` of them are begun before it
    is their turn.

    To be closed (``contextlib.aclosing``) where it may not be read to its end: what was begun is
    then cancelled.

    Raises:
        BaseException: What ``work`` raised, when it is that item's turn.
    """
    begun: deque[asyncio.Future[R]] = deque()
    try:
        for item in items:
            begun.append(asyncio.ensure_future(work(item)))
            if len(begun) > ahead:
                yield await begun.popleft()
        while begun:
            yield await begun.popleft()
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
