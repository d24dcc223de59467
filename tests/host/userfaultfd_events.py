"""Reads a userfaultfd's events in this process, where the product's guard reads them for the
daemon; both take the messages apart with the same function.
"""

from __future__ import annotations

import os
import struct

from icecore.host.kernel.userfaultfd import Event
from icecore.restorer.fill.daemon import parse_events

_MESSAGE = struct.Struct("<B7xQQQ")
_FORK = 0x13


def read_events(descriptor: int, maximum: int = 64) -> list[Event]:
    """Return the waiting events, oldest first; none if nothing waits on a non-blocking descriptor.

    The caller must close the descriptor in a `Fork`.
    """
    try:
        data = os.read(descriptor, _MESSAGE.size * maximum)
    except BlockingIOError:
        return []
    children = [first for kind, first, _, _ in _MESSAGE.iter_unpack(data) if kind == _FORK]
    return parse_events(data, children)
