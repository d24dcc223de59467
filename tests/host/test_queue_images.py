"""Files in the queues of sockets, in CRIU's images."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from icecore.errors import Damaged
from icecore.host.criu.images import COMMON, SK_QUEUES
from icecore.host.criu.protobuf import Message
from icecore.host.criu.queue_images import files_in_flight


def packet(data: bytes, *rights: int) -> bytes:
    fields: list[tuple[int, int, int | bytes]] = [(1, 0, 7), (2, 0, len(data))]
    if rights:
        control = Message([(1, 0, 1), *((2, 0, one) for one in rights)])
        fields.append((4, 2, control.encode()))
    body = Message(fields).encode()
    return struct.pack("<I", len(body)) + body + data


def test_files_in_flight(tmp_path: Path) -> None:
    assert files_in_flight(tmp_path) == set()
    image = struct.pack("<II", COMMON, SK_QUEUES)
    image += packet(b"x" * 1000) + packet(b"y", 3, 300) + packet(b"", 4)
    (tmp_path / "sk-queues.img").write_bytes(image)
    assert files_in_flight(tmp_path) == {3, 300, 4}


@pytest.mark.parametrize("cut", [1, 500, 1010])
def test_an_image_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    image = struct.pack("<II", COMMON, SK_QUEUES) + packet(b"x" * 1000, 5) + packet(b"y" * 4)
    (tmp_path / "sk-queues.img").write_bytes(image[:-cut])
    with pytest.raises(Damaged):
        files_in_flight(tmp_path)
