"""Compares the kernel's objects of two threads or processes (kcmp(2))."""

from __future__ import annotations

import ctypes
import os
from typing import Literal

from icecore.host.kernel import libc

_NUMBERS = {"x86_64": 312, "aarch64": 272}
#: An open file, by descriptor; all descriptors; working directory, root and umask.
_KINDS = {"file": 0, "files": 2, "fs": 3}


def kcmp(
    one: int, other: int, kind: Literal["file", "files", "fs"], first: int = 0, second: int = 0
) -> int:
    """Return 0 if both have the same object, else -1 or 1: the order that the kernel gives to the
    two objects.

    Args:
        one, other: Thread or process ids.
        first, second: For a file, the descriptors of ``one`` and ``other``.

    Raises:
        ProcessLookupError: One of them has ended.
        OSError: The kernel lacks CONFIG_KCMP, or this process may not inspect them.
    """
    result = libc.syscall(
        _NUMBERS[os.uname().machine],
        one,
        other,
        _KINDS[kind],
        ctypes.c_ulong(first),
        ctypes.c_ulong(second),
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"kcmp: {os.strerror(number)}")
    return {0: 0, 1: -1, 2: 1}.get(result, 0)
