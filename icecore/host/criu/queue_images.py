"""Queues of sockets in CRIU's images (images/sk-packet.proto)."""

from __future__ import annotations

import struct
from pathlib import Path

from icecore.errors import Damaged
from icecore.host.criu.images import COMMON, SK_QUEUES
from icecore.host.criu.pagemap_image import read_whole
from icecore.host.criu.protobuf import Message, WireError

_NAME = "sk-queues.img"
_LENGTH, _CONTROL, _RIGHTS = 2, 4, 2


def files_in_flight(folder: Path) -> set[int]:
    """Return the numbers of the files that are in the queue of a socket (SCM_RIGHTS in unix(7)).

    Raises:
        Damaged: The image is cut off.
    """
    try:
        data = read_whole(folder / _NAME)
    except FileNotFoundError:
        return set()
    found: set[int] = set()
    try:
        if struct.unpack_from("<II", data) != (COMMON, SK_QUEUES):
            raise WireError("wrong magic")
        at = 8
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            packet = Message.decode(data[at + 4 : at + 4 + size])
            for control in packet.messages(_CONTROL):
                found.update(control.integers(_RIGHTS))
            at += 4 + size + packet.integer(_LENGTH)  # the packet's data follows
        if at > len(data):
            raise WireError("cut off")
    except (WireError, struct.error) as error:
        raise Damaged("image", _NAME, str(error)) from error
    return found
