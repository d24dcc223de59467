"""Unix sockets in CRIU's images (images/sk-unix.proto): which there are, and connections that lead
out of the tree. A restore cannot bring those back: it makes closed ones, in which what had arrived
can still be read.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import msgspec

from icecore.errors import Damaged
from icecore.host.criu.images import FILES, read_image, write_image
from icecore.host.criu.protobuf import Message

UNIX_SOCKET = 5
_ENTRY_TYPE, _ENTRY_SOCKET = 1, 16
_INODE, _KIND, _STATE, _FLAGS, _PEER = 2, 3, 4, 6, 8
_NAME, _SHUTDOWN, _PERMISSIONS, _DIRECTORY, _DELETED = 11, 12, 13, 14, 15
_MODE, _USER, _GROUP = 1, 2, 3
#: States as in linux/tcp_states.h.
ESTABLISHED = 1
#: sk_shutdown (images/sk-opts.proto): for reading and writing.
_BOTH = 3
#: uflags: the socket is outside of the tree; a plugin dumped it.
_EXTERNAL, _BY_PLUGIN = 1, 4


class UnixImage(msgspec.Struct, frozen=True):
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
    def leads_up(self) -> bool:
        """Return whether its name has a component ``..``: where that leads, `path` does not say if
        the component before it is a link.
        """
        return ".." in os.path.join(self.directory, os.fsdecode(self.name)).split("/")

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


def close_outside(folder: Path) -> int:
    """Make closed connections of those that lead out of the tree, in complete images; return how
    many.

    CRIU restores a connection whose peer has closed it: it fills the queue, then ends it. A
    datagram socket loses its peer. Those whose peer has a name stay: a restore may connect them
    again (`drop_datagrams`).
    """

    def leads_out(one: Message, peer: UnixImage | None) -> bool:
        if not one.integer(_PEER) or one.integer(_FLAGS) & _EXTERNAL:
            return False
        outside = peer is None or peer.external
        named = peer is not None and bool(peer.name)
        return outside and not (one.integer(_KIND) == socket.SOCK_DGRAM and named)

    return _edit(folder, leads_out)


def outside_datagrams(folder: Path) -> list[UnixImage]:
    """Return the sockets outside of the tree to which CRIU connects datagram sockets again."""
    every = load_unix(folder)
    wanted = {one.peer for one in every if one.kind == socket.SOCK_DGRAM and not one.external}
    return [one for one in every if one.external and one.inode in wanted]


def drop_datagrams(folder: Path, inodes: Set[int]) -> None:
    """Leave datagram sockets without a peer that were connected to one of these outside of the
    tree.
    """
    _edit(folder, lambda one, peer: one.integer(_PEER) in inodes)


def put_peers_first(folder: Path) -> bool:
    """Put each unix socket after the one to which it is connected, unless two are connected to each
    other; return whether the order changed.

    CRIU (4.0 to 4.2: criu/sk-unix.c, try_resolve_unix_peer) finds a peer that it reads later only if
    that peer is connected back. Two kinds of peers are not: a listener whose connection waits to be
    accepted, and a datagram socket to which others send.
    """
    path = folder / "files.img"
    entries = read_image(path, FILES)
    sockets = {
        entry.message(_ENTRY_SOCKET).integer(_INODE): entry
        for entry in entries
        if entry.integer(_ENTRY_TYPE) == UNIX_SOCKET
    }
    peers = {one: entry.message(_ENTRY_SOCKET).integer(_PEER) for one, entry in sockets.items()}
    order: dict[int, None] = {}
    for number in sockets:
        chain: dict[int, None] = {}
        while number in sockets and number not in order and number not in chain:
            chain[number] = None
            peer = peers[number]
            number = 0 if peers.get(peer) == number else peer
        order |= dict.fromkeys(reversed(chain))
    if list(order) == list(sockets):
        return False
    if len(sockets) < sum(entry.integer(_ENTRY_TYPE) == UNIX_SOCKET for entry in entries):
        raise Damaged("image", path.name, "two sockets have one inode")
    ordered = (sockets[number] for number in order)
    moved = [
        next(ordered) if entry.integer(_ENTRY_TYPE) == UNIX_SOCKET else entry for entry in entries
    ]
    path.unlink()  # it may be shared with the repository
    write_image(path, moved, FILES)
    return True


def _edit(folder: Path, leads_out: Callable[[Message, UnixImage | None], bool]) -> int:
    """Take the peer away from each socket that ``leads_out`` names, and the peers that nobody needs
    any more; return how many sockets were changed.
    """
    path = folder / "files.img"
    entries = read_image(path, FILES)
    peers = {about.inode: about for about in map(_unix, _sockets(entries))}
    changed, wanted = 0, set()
    for entry in entries:
        if entry.integer(_ENTRY_TYPE) != UNIX_SOCKET:
            continue
        one = entry.message(_ENTRY_SOCKET)
        if not leads_out(one, peers.get(one.integer(_PEER))):
            wanted.add(one.integer(_PEER))
            continue
        changed += 1
        one.set(_PEER, 0)
        one.set(_FLAGS, one.integer(_FLAGS) & ~_BY_PLUGIN)
        if one.integer(_KIND) != socket.SOCK_DGRAM:
            one.set(_SHUTDOWN, _BOTH)
        entry.set(_ENTRY_SOCKET, one)
    if changed:
        gone = {number for number, one in peers.items() if one.external} - wanted
        kept = [entry for entry in entries if not _is_one_of(entry, gone)]
        path.unlink()  # it may be shared with the repository
        write_image(path, kept, FILES)
    return changed


def _is_one_of(entry: Message, inodes: Set[int]) -> bool:
    return (
        entry.integer(_ENTRY_TYPE) == UNIX_SOCKET
        and entry.message(_ENTRY_SOCKET).integer(_INODE) in inodes
    )
