"""What a process does first that was started for the other end of its socket: it outlives signals of
the terminal, and passes no descriptor on.
"""

from __future__ import annotations

import os
import signal
import socket

#: Signals of a terminal, and of whoever ends its starter.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def ignore_signals() -> None:
    """Ignore what a terminal sends to all of its processes."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def take_over(control: int, *held: int) -> socket.socket:
    """Return the socket of an inherited descriptor. Children inherit neither it nor the others.

    Args:
        control: The descriptor.
        held: Descriptors that this process only holds open; negative: none.
    """
    for descriptor in (control, *held):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    return socket.socket(fileno=control)
