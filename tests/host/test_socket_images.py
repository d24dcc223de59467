"""Unix sockets in CRIU's images: connections out of the tree are closed in them, all others stay
as they are.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from icecore.host.criu.images import FILES, read_image, write_image
from icecore.host.criu.protobuf import Message
from icecore.host.criu.socket_images import (
    close_outside,
    drop_datagrams,
    load_unix,
    outside_datagrams,
    put_peers_first,
)

STREAM, DGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM
LISTENING, ESTABLISHED, CLOSED = 10, 1, 7
EXTERNAL, PLUGIN = 1, 4


def entry(
    inode: int, kind: int, state: int, peer: int, flags: int = 0, name: bytes = b""
) -> Message:
    one = Message(
        [
            *((1, 0, inode), (2, 0, inode), (3, 0, int(kind)), (4, 0, state), (5, 0, 2)),
            *((6, 0, flags), (7, 0, 0), (8, 0, peer), (11, 2, name), (12, 0, 0)),
        ]
    )
    return Message([(1, 0, 5), (2, 0, inode), (16, 2, one.encode())])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    other = Message([(1, 0, 1), (2, 0, 99), (3, 2, b"")])
    entries = [
        other,
        entry(1, STREAM, LISTENING, 0, name=b"/run/server"),
        entry(2, STREAM, ESTABLISHED, 50, PLUGIN, b"/run/server"),  # an accepted client
        entry(50, DGRAM, LISTENING, 0, EXTERNAL),
        entry(3, STREAM, ESTABLISHED, 4),  # a pair within the tree
        entry(4, STREAM, ESTABLISHED, 3),
        entry(5, DGRAM, CLOSED, 51),  # a log daemon
        entry(51, DGRAM, LISTENING, 0, EXTERNAL, b"/dev/log"),
        entry(6, DGRAM, CLOSED, 52, PLUGIN),  # half of a socket pair
        entry(52, DGRAM, LISTENING, 0, EXTERNAL),
        entry(7, STREAM, ESTABLISHED, 60),  # waits to be accepted outside
        entry(8, DGRAM, CLOSED, 0, name=b"./box\0"),
    ]
    write_image(tmp_path / "files.img", entries, FILES)
    return tmp_path


def test_connections_out_of_the_tree_are_closed(images: Path) -> None:
    assert close_outside(images) == 3
    peers = {one.inode: one.peer for one in load_unix(images)}
    assert peers == {1: 0, 2: 0, 3: 4, 4: 3, 5: 51, 51: 0, 6: 0, 7: 0, 8: 0}
    entries = {m.integer(2): m.message(16) for m in read_image(images / "files.img", FILES)}
    assert 99 in entries, "what is no unix socket stays"
    assert {number: entries[number].integer(12) for number in (2, 3, 5, 6, 7)} == {
        2: 3,
        7: 3,
        3: 0,
        5: 0,
        6: 0,
    }
    assert not any(m.integer(6) & PLUGIN for m in entries.values())
    assert close_outside(images) == 0, "once is enough"


def test_a_datagram_socket_loses_the_peer_that_is_missing(images: Path) -> None:
    close_outside(images)
    (daemon,) = outside_datagrams(images)
    assert (daemon.inode, daemon.path) == (51, "/dev/log")
    drop_datagrams(images, {51})
    assert {one.inode: one.peer for one in load_unix(images)} == {
        1: 0,
        2: 0,
        3: 4,
        4: 3,
        5: 0,
        6: 0,
        7: 0,
        8: 0,
    }
    assert outside_datagrams(images) == []


def test_which_names_a_restore_binds(images: Path) -> None:
    assert {one.path for one in load_unix(images) if one.is_bound} == {"/run/server", "/box"}


def test_a_socket_comes_after_its_peer(tmp_path: Path) -> None:
    other = Message([(1, 0, 1), (2, 0, 99), (3, 2, b"")])
    entries = [
        entry(1, DGRAM, CLOSED, 2),  # a chain
        other,
        entry(3, STREAM, ESTABLISHED, 4),  # a pair
        entry(5, STREAM, ESTABLISHED, 6),  # waits to be accepted
        entry(4, STREAM, ESTABLISHED, 3),
        entry(2, DGRAM, CLOSED, 7),
        entry(6, STREAM, LISTENING, 0),
        entry(7, DGRAM, CLOSED, 7),  # connected to itself
        entry(8, DGRAM, CLOSED, 50),  # its peer is not there
    ]
    write_image(tmp_path / "files.img", entries, FILES)
    assert put_peers_first(tmp_path)
    found = [one.inode for one in load_unix(tmp_path)]
    assert found == [7, 2, 1, 3, 6, 5, 4, 8]
    assert read_image(tmp_path / "files.img", FILES)[1].integer(2) == 99
    assert not put_peers_first(tmp_path)
