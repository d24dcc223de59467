"""A process of another user that changes what the names in its directories mean, as fast as it can,
until its standard input closes.

Run as ``python -I -S hostile.py UID HOME SHARED VICTIM PAUSE``. HOME is its own, in SHARED
everybody may write, VICTIM is root's. With a PAUSE (seconds) it mends after each change, and waits
so long. Made of the standard library alone: it is started with no rights.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import sys
import time
from contextlib import suppress

_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: str, other: str) -> None:
    """Exchange two names in one step: nobody sees a moment without either."""
    _libc.renameat2(_AT_FDCWD, one.encode(), _AT_FDCWD, other.encode(), _EXCHANGE)


def write(place: str, data: bytes) -> None:
    """Write a file; a FIFO that stands there by now, as a restore undoes its changes, is an error
    instead of a wait without end.
    """
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def plant(place: str, victim: str, kind: int) -> None:
    """Put something at a name that leads to the victim's files, or blocks who opens it."""
    if kind == 0:
        os.symlink(f"{victim}/secret", place)
    elif kind == 1:
        os.link(f"{victim}/secret", place)
    elif kind == 2:
        os.mkfifo(place)
    elif kind == 3:
        os.symlink(victim, place)
    else:
        write(place, b"hostile content\n" * random.randrange(400))


def turn(home: str, shared: str, victim: str) -> None:
    """One change, chosen at random."""
    choice = random.randrange(8)
    folder = f"{home}/dir"
    if choice == 0:  # the directory and a link to the victim's change places
        link = f"{home}/link"
        if not os.path.lexists(link):
            os.symlink(victim, link)
        exchange(folder, link)
        exchange(folder, link) if random.random() < 0.8 else None
    elif choice == 1:
        os.rename(folder, f"{home}/away")
        os.symlink(victim, folder)
        os.unlink(folder)
        os.rename(f"{home}/away", folder)
    elif choice in (2, 3):  # a file changes places with something else
        name = random.choice(
            [
                *("data.bin", "grown.bin", "linked.bin", "link_remap.7", "root.bin", "sub"),
                *("made", "made/in", "fifo"),
            ]
        )
        other = f"{home}/evil-{random.randrange(10**9)}"
        plant(other, victim, random.randrange(5))
        if os.path.lexists(f"{folder}/{name}"):
            exchange(f"{folder}/{name}", other)
        else:
            os.rename(other, f"{folder}/{name}")
    elif choice == 4:  # what is being prepared is replaced
        for name in os.listdir(folder):
            if ".icecore-" in name:
                other = f"{home}/evil-{random.randrange(10**9)}"
                plant(other, victim, random.randrange(5))
                exchange(f"{folder}/{name}", other)
    elif choice == 5:
        place = f"{shared}/data.bin"
        with suppress(OSError):
            os.unlink(place)
        plant(place, victim, random.randrange(5))
    elif choice == 6:  # it mends what it broke, so that restores get further
        mend(home)
    else:
        for name in os.listdir(home):
            if name.startswith("evil-"):
                os.unlink(f"{home}/{name}")


def mend(home: str) -> None:
    """Make plain files of its own again."""
    folder = f"{home}/dir"
    if os.path.islink(folder):
        os.unlink(folder)
        for other in ("link", "away"):
            if os.path.isdir(f"{home}/{other}") and not os.path.islink(f"{home}/{other}"):
                os.rename(f"{home}/{other}", folder)
    with suppress(FileExistsError):
        os.mkdir(folder)
    for name in ("data.bin", "grown.bin", "root.bin"):
        place = f"{folder}/{name}"
        with suppress(OSError):
            os.unlink(place)
        write(place, b"mended, and longer than it was\n" * 700)


def main() -> None:
    user, home, shared, victim = int(sys.argv[1]), *sys.argv[2:5]
    pause = float(sys.argv[5])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while not poll.poll(0):
        with suppress(OSError):
            turn(home, shared, victim)
        if pause:
            time.sleep(random.random() * pause / 10)
            with suppress(OSError):
                mend(home)
            time.sleep(random.random() * pause)


if __name__ == "__main__":
    main()
