"""Many small waits at once: bounded, and nothing keeps running after the first failure."""

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
    """Do ``work`` for each of ``items``, at most ``at_once`` at a time.

    Raises:
        BaseException: The first error of ``work``, after all others have ended or been cancelled.
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
    """Yield the results of ``work`` for ``items``, in their order; start ``ahead`` of them in
    advance.

    Close it (``contextlib.aclosing``) if it may not be read to its end, to cancel what was started.

    Raises:
        BaseException: An error of ``work``, when it is that item's turn.
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
