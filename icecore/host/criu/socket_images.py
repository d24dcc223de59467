"""Unix sockets in CRIU's images (images/sk-unix.proto): which there are, and connections that lead
out of the tree.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from icecore.host.criu.images import FILES, read_image
from icecore.host.criu.protobuf import Message

UNIX_SOCKET = 5
_ENTRY_TYPE, _ENTRY_SOCKET = 1, 16
_INODE, _KIND, _STATE, _FLAGS, _PEER = 2, 3, 4, 6, 8
_NAME, _PERMISSIONS, _DIRECTORY, _DELETED = 11, 13, 14, 15
_MODE, _USER, _GROUP = 1, 2, 3
#: States as in linux/tcp_states.h.
ESTABLISHED = 1
#: uflags: the socket is outside of the tree.
_EXTERNAL = 1


@dataclass(frozen=True)
class UnixImage:
    """A unix socket of the images.

    Attributes:
        inode, peer: Which socket it was, and the one at its other end; 0: it had none.
        kind: SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET.
        state: As in linux/tcp_states.h.
        external: It lies outside of the tree.
        name: Its address: empty, a path, or a zero byte and an abstract name.
        directory: What a relative path is relative to.
        mode, user, group: Of the name.
        deleted: The name was removed or replaced.
    """

    inode: int
    peer: int
    kind: int
    state: int
    external: bool
    name: bytes
    directory: str
    mode: int
    user: int
    group: int
    deleted: bool

    @property
    def path(self) -> str:
        """Return the absolute path of its name; empty: it has none."""
        if not self.name or not self.name[0]:
            return ""
        path = os.path.join(self.directory or "/", os.fsdecode(self.name.rstrip(b"\0")))
        return os.path.normpath(path)

    @property
    def is_bound(self) -> bool:
        """Return whether a restore gives the name to it. An accepted socket only shows its
        listener's.
        """
        accepted = self.kind != socket.SOCK_DGRAM and self.state == ESTABLISHED
        return bool(self.path) and not (self.external or self.deleted or accepted)


def load_unix(folder: Path) -> list[UnixImage]:
    """Return the unix sockets of files.img."""
    return [_unix(entry) for entry in _sockets(read_image(folder / "files.img", FILES))]


def _sockets(entries: list[Message]) -> Iterator[Message]:
    return (
        entry.message(_ENTRY_SOCKET)
        for entry in entries
        if entry.integer(_ENTRY_TYPE) == UNIX_SOCKET
    )


def _unix(one: Message) -> UnixImage:
    owner = one.message(_PERMISSIONS) if one.has(_PERMISSIONS) else Message()
    return UnixImage(
        one.integer(_INODE),
        one.integer(_PEER),
        one.integer(_KIND),
        one.integer(_STATE),
        bool(one.integer(_FLAGS) & _EXTERNAL),
        one.raw(_NAME),
        one.text(_DIRECTORY) if one.has(_DIRECTORY) else "",
        owner.integer(_MODE) & 0o7777,
        owner.integer(_USER),
        owner.integer(_GROUP),
        bool(one.integer(_DELETED)),
    )
