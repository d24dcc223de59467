"""Find out how mapped files were opened, from the links in /proc/PID/map_files.

The kernel sets the mode of such a link when it is first looked up, and keeps it until a lookup
finds no mapping at exactly these addresses (Linux 6.18: fs/proc/base.c, map_files_d_revalidate).
So the mode may be that of an earlier mapping. Each instance of /proc caches links of its own: a
new instance shows the present state.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import ExitStack

from icecore.host.kernel import libc, procfs

# <asm-generic/unistd.h> and <linux/mount.h>
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _CREATE = 1, 6


class MappedFiles:
    """Tell how mapped files were opened. Answers are cached: they show the state at the first
    question about a mapping, or about its process if /proc cannot be mounted.

    Args:
        owned: Closes what is opened here.
    """

    def __init__(self, owned: ExitStack) -> None:
        self._owned = owned
        self._proc: int | None = None
        self._writable: dict[int, set[int]] = {}

    def opened_for_writing(self, pid: int, mapping: procfs.Mapping) -> bool:
        """Return whether a shared mapping's file was opened for writing, so that mprotect(2) can make
        the mapping writable. Return False if it has been unmapped since.

        Raises:
            NotFound: The process has ended.
        """
        if self._proc is None and not self._writable:
            try:
                self._proc = _new_proc()
            except PermissionError:
                pass  # a seccomp filter or a security module forbids mounts
            else:
                self._owned.callback(os.close, self._proc)
        if self._proc is None:
            return mapping.start in self._writable_of(pid)
        link = f"{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
        try:
            return bool(os.lstat(link, dir_fd=self._proc).st_mode & stat.S_IWUSR)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _writable_of(self, pid: int) -> set[int]:
        """Return the start addresses of the mappings with the flag "sh" (VM_SHARED). Reading the
        flags is slow: the kernel also counts all pages of the process.
        """
        found = self._writable.get(pid)
        if found is None:
            flags = procfs.read_maps(pid, vm_flags=True)
            found = self._writable[pid] = {one.start for one in flags if "sh" in one.vm_flags}
        return found


def _new_proc() -> int:
    """Return a descriptor of a new instance of /proc, which is mounted nowhere.

    Raises:
        OSError: The kernel refused; PermissionError if this process may not mount.
    """
    context = libc.syscall(_FSOPEN, b"proc", _CLOEXEC)
    if context < 0:
        raise libc.last_error("fsopen")
    try:
        if libc.syscall(_FSCONFIG, context, _CREATE, None, None, ctypes.c_int(0)) < 0:
            raise libc.last_error("fsconfig")
        mount: int = libc.syscall(_FSMOUNT, context, _CLOEXEC, 0)
        if mount < 0:
            raise libc.last_error("fsmount")
    finally:
        os.close(context)
    return mount
