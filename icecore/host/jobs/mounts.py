"""Mount files over others for a tree. The mounts are made in the tree's own mount namespace: no
other process sees them, and they vanish with its last process.

A bind mount covers one file, by its directory entry. Its limits are the kernel's (rename(2)): a
process in the namespace cannot rename or remove the file (EBUSY); a process outside can, and the
mount vanishes with the entry.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

from icecore.host.jobs import launch
from icecore.host.kernel import libc
from icecore.host.kernel.filesystem import open_confined

T = TypeVar("T")

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on every architecture
_OPEN_TREE_CLONE, _AT_EMPTY_PATH = 1, 0x1000
_MOVE_MOUNT_FROM_EMPTY, _MOVE_MOUNT_TO_EMPTY = 0x4, 0x40
_CLONE_FS = 0x200


def in_thread(make: Callable[[], T]) -> T:
    """Run ``make`` in a thread that ends right after: namespaces are a thread's own, and this
    process must keep its own.

    Raises:
        OSError: What ``make`` raised; a failed step of launch.py is one, too.
    """
    made: list[T] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            made.append(make())
        except (OSError, launch.StepFailed) as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="namespaces")
    thread.start()
    thread.join()
    if failed:
        error = failed[0]
        if isinstance(error, launch.StepFailed):
            raise OSError(error.error.errno, f"{error.step}: {error.error.strerror}") from error
        raise error
    return made[0]


def new_view(covers: Iterable[tuple[str, str]] = ()) -> int:
    """Give the calling thread a mount namespace like its own, for `bind`; return its descriptor.

    Args:
        covers: ``(directory, mount point)`` of what is bound there.

    Later mounts and unmounts outside are visible inside too (propagation ``slave``), never the
    other way round.
    """
    launch.unshare(launch.CLONE_NEWNS)
    launch.cover(covers)
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def bind(namespace: int, directory: str, paths: Iterable[str]) -> None:
    """Mount the files of a directory over those at the same paths below the root of a mount
    namespace.

    Args:
        namespace: Descriptor of the namespace.
        directory: Holds each file under its whole path.
        paths: Absolute.

    Raises:
        OSError: A file is missing on either side, is no regular file, is reached through a symbolic
            link, or the kernel refused the mount.
    """
    with ExitStack() as stack:
        trees = []
        for path in paths:
            source = _open_file(directory + path)
            stack.callback(os.close, source)
            tree = _checked(
                libc.syscall(
                    _OPEN_TREE, source, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
                ),
                f"open_tree({directory + path})",
            )
            stack.callback(os.close, tree)
            trees.append((path, tree))

        def attach() -> None:
            launch.unshare(_CLONE_FS)  # setns(2) requires it
            launch.enter(namespace, launch.CLONE_NEWNS)
            for path, tree in trees:
                target = _open_file(path)
                try:
                    flags = _MOVE_MOUNT_FROM_EMPTY | _MOVE_MOUNT_TO_EMPTY
                    _checked(
                        libc.syscall(_MOVE_MOUNT, tree, b"", target, b"", flags),
                        f"move_mount({path})",
                    )
                finally:
                    os.close(target)

        in_thread(attach)


def _open_file(path: str) -> int:
    """Return an O_PATH descriptor of a regular file, reached without symbolic links."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = open_confined(root, path.lstrip("/"), os.O_PATH | os.O_NOFOLLOW)
    finally:
        os.close(root)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is no regular file")
    return descriptor


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise libc.last_error(what)
    return int(result)
