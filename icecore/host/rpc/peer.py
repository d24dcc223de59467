"""First steps of a process that serves the other end of its socket: ignore signals of the terminal,
and pass no descriptor on.
"""

from __future__ import annotations

import os
import signal
import socket

#: Signals of a terminal, and those that are meant for the starter.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def ignore_signals() -> None:
    """Ignore the signals that a terminal sends to all of its processes."""
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
