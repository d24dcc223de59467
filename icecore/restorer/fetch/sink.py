"""The contract of what takes fetched cells: the memory of processes (`TreeFill`), files and CRIU's
page images (`FileWriter`), the file of device memory (`DeviceFile`), and GPUs (`ResidentFill`).
"""

from __future__ import annotations

from typing import Protocol


class CellSink(Protocol):
    """Puts cells where they belong. The workers of a fetcher call it, several at a time."""

    def needs(self, row: int) -> bool:
        """Return whether a row must still be placed; asked before it is decoded."""
        return True

    def place(self, row: int, data: memoryview) -> None:
        """Put the verified bytes of a row where they belong. An exception ends the fetcher.

        Args:
            data: Its data pages, one after the other; valid during the call only.
        """

    def failed(self, error: BaseException) -> None:
        """Hear of the error that ended the fetcher: once, in any thread."""
        return None  # not abstract: most sinks have nothing to do
