"""Keeps the placers that fill a file busy, from one thread. A row counts as done only if its placer
has said so; all others are left over.

One thread serves all placers: a thread for each would keep the others, and those that write images
and call the driver, from the interpreter.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from icecore.errors import RestoreFailed
from icecore.restorer.place.placers import Placer, PlacerLost
from icecore.restorer.place.placing import ROOM_CELLS, Stored

#: Requests that a placer has at most: it finds the next one when it has done one.
_AHEAD = 2
_POLL_SECONDS = 0.1

#: Gets the first row of a request, and the answer to it.
Came = Callable[[int, Stored], None]


class _Asked(msgspec.Struct):
    """A placer: since when it has been silent, whether it has begun, and what it was asked for."""

    placer: Placer
    since: float
    begun: bool
    spans: deque[range] = msgspec.field(default_factory=deque)

    def hear(self, came: Came) -> list[int]:
        """Take what it says; return the rows that it could not deliver.

        Raises:
            PlacerLost: It has ended.
        """
        self.since = time.monotonic()
        if not self.spans and self.begun:
            raise PlacerLost("a placer process has ended")
        if not self.spans:
            self.begun = self.placer.ready
            return []
        answer = self.placer.stored()
        span = self.spans.popleft()
        came(span.start, answer)
        return [row for row, there in zip(span, answer.there, strict=True) if not there]

    def ask(self, planned: deque[range]) -> None:
        """Keep it busy.

        Raises:
            PlacerLost: It has ended.
        """
        while self.begun and planned and len(self.spans) < _AHEAD:
            self.spans.append(planned.popleft())
            self.placer.store(self.spans[-1])

    def check(self, patience: float) -> None:
        """Check that a silent placer is still within its time.

        Raises:
            PlacerLost: It did not begin in time.
            RestoreFailed: It did not answer in time.
        """
        if time.monotonic() - self.since <= patience:
            return
        if not self.begun:
            raise PlacerLost(f"a placer process did not begin within {patience:.0f} s")
        if self.spans:
            raise RestoreFailed(f"a placer process gave no answer for {patience:.0f} s")


def hand_out(
    placers: Sequence[Placer], rows: int, came: Came, stopped: Callable[[], bool], patience: float
) -> list[int]:
    """Have placers deliver rows 0 to ``rows`` of a file's table, in that order.

    Args:
        placers: They have been handed the file.
        came: Gets each answer.
        stopped: Returns whether the file is not wanted any more.
        patience: Seconds that a placer may take to answer.

    Returns:
        Rows that are left over: those that could not be delivered, or whose placer has ended; once
        it is stopped, all that were not delivered yet.

    Raises:
        RestoreFailed: A placer does not answer.
    """
    planned = deque(range(at, min(at + ROOM_CELLS, rows)) for at in range(0, rows, ROOM_CELLS))
    left: list[int] = []
    poll, living = (
        select.poll(),
        {placer.fileno(): _Asked(placer, time.monotonic(), placer.ready) for placer in placers},
    )
    for number in living:
        poll.register(number, select.POLLIN)
    while living and (planned or any(asked.spans for asked in living.values())) and not stopped():
        heard = [number for number, _ in poll.poll(_POLL_SECONDS * 1000)]
        for number in heard or list(living):  # silent ones are checked when none says anything
            asked = living[number]
            try:
                if heard:
                    left += asked.hear(came)
                else:
                    asked.check(patience)
                asked.ask(planned)
            except PlacerLost:
                poll.unregister(number)
                del living[number]
                left += [row for span in asked.spans for row in span]
    return left + [
        row
        for spans in (planned, *(asked.spans for asked in living.values()))
        for span in spans
        for row in span
    ]
