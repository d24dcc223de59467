"""When a tree whose memory is streamed stands still: once the first of the stream can be read, and
as long as its end is not answered.
"""

from __future__ import annotations

import select
import socket

from icecore.errors import DumpFailed


def wait_for_stream(pages: socket.socket, control: socket.socket, seconds: float) -> bool:
    """Wait until CRIU streams (True: the tree stands still) or the guard has something to say
    (False).

    Raises:
        DumpFailed: Neither in time.
    """
    poll = select.poll()
    poll.register(pages, select.POLLIN)
    poll.register(control, select.POLLIN)
    ready = {number for number, _ in poll.poll(seconds * 1000)}
    if not ready:
        raise DumpFailed(f"CRIU did not begin within {seconds:.0f} s")
    return control.fileno() not in ready
