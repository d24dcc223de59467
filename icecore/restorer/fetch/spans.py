"""Placers that fill a file, kept busy by one thread; its rule: a row is there because who put it
there has said so, or it is left over.

One thread for all of them: as many as there are placers would keep each other, and whoever writes
images and asks the driver, from the interpreter.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from icecore.errors import RestoreFailed
from icecore.restorer.place.placers import Placer, PlacerLost
from icecore.restorer.place.placing import ROOM_CELLS, Stored

#: What a placer has been asked for at most: it finds the next when it has done one.
_AHEAD = 2
_POLL_SECONDS = 0.1

#: Takes what became of rows: the first of them, and the answer.
Came = Callable[[int, Stored], None]


@dataclass
class _Asked:
    """A placer, since when nothing has been heard of it, whether it has begun, and what it is at."""

    placer: Placer
    since: float
    begun: bool
    spans: deque[range] = field(default_factory=deque)

    def hear(self, came: Came) -> list[int]:
        """What it says; the rows that it could not have.

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
        """Nothing has been heard of it.

        Raises:
            PlacerLost: For so long that it will not begin.
            RestoreFailed: For so long that it will not answer.
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
    """Have rows 0 to ``rows`` of a file's table brought, in that order.

    Args:
        placers: That have been told of the file.
        stopped: Whether nobody wants it any more.
        patience: Seconds that one may take for an answer.

    Returns:
        Rows that are left over: those that could not be had, or whose placer has ended; all that
        were not brought yet, once it is stopped.

    Raises:
        RestoreFailed: One does not answer.
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
        for number in heard or list(living):  # who says nothing is looked at when nobody does
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
