"""What a process of `tree.py` keeps: set up once, checked in every round, used up in the last.

``check`` looks without changing what a later look relies on; ``last`` consumes what is in flight
and compares it. Both raise Broken with what they expected and found.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Broken(Exception):
    """An object is not what it was."""


class Kept(Protocol):
    """What a process checks in each round and once more, thoroughly, at the end."""

    def check(self) -> None: ...

    def last(self) -> None: ...


def same(what: str, found: Any, expected: Any) -> None:
    """Raises Broken unless both are equal; long byte strings are described, not shown."""
    if found == expected:
        return
    if isinstance(found, bytes) and isinstance(expected, bytes):
        at = next(
            (n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found)
        )
        raise Broken(
            f"{what}: {len(found)} bytes instead of {len(expected)}, the first difference at {at}"
        )
    raise Broken(f"{what}: {found!r} instead of {expected!r}")


def content(size: int, *key: int) -> bytes:
    """Pseudo-random bytes that are a function of the key."""
    return np.random.Generator(np.random.SFC64(list(key))).bytes(size)
