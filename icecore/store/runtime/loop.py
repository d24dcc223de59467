"""One event loop in one thread, for callers that are threads themselves: all asynchronous work of a
repository runs there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads; a context manager. Call its methods from any thread except
    the loop's own.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="icecore-loop", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int:
        """The native id of the thread."""
        return self._thread.native_id or 0

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work``; return its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result, or raise its error."""
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._cancel(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _cancel(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
