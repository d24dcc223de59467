"""CRIU's page-server protocol, in the layouts of 4.1 and 4.2. Every received length is bounded
before memory is allocated for it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from icecore.errors import DumpFailed

ADD = 1
OPEN = 3
OPEN2 = 4
PARENT = 5
ADD_FLAGS = 6
CLOSE = 0x1023
FORCE_CLOSE = 0x1024

#: Pagemap entry flags (criu/include/pagemap.h).
PE_PARENT, PE_LAZY, PE_PRESENT = 1, 2, 4

PROCESS, SHARED = 1, 2

_RECORD_41 = struct.Struct("<IIQQ")
_RECORD_42 = struct.Struct("<I4xQQQ")
_STATUS = struct.Struct("<i")
#: More pages than an address space of 47 bits has: a record that says so is not one.
_MOST_PAGES = 1 << 35


def page_server_record(version: tuple[int, ...]) -> struct.Struct:
    """Return the layout of struct page_server_iov (command, pages, address, image) of a CRIU
    version: 24 bytes up to 4.1, 32 from 4.2 on.
    """
    return _RECORD_42 if version[:2] >= (4, 2) else _RECORD_41


class Extent(msgspec.Struct, frozen=True):
    """Pages that CRIU announces: ``pages`` pages from ``address`` of image ``number`` of ``kind``.
    Their bytes follow if ``flags`` contains PE_PRESENT.
    """

    kind: int
    number: int
    address: int
    pages: int
    flags: int


class Connection:
    """One end of a page-server connection.

    Args:
        connection: A connected stream socket; closed by `close`.
        version: CRIU's version, which decides the layout.
    """

    def __init__(self, connection: socket.socket, version: tuple[int, ...]) -> None:
        self.socket = connection
        self.record = page_server_record(version)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, command: int, *, pages: int = 0, address: int = 0, image: int = 0) -> None:
        """Send one record."""
        self.socket.sendall(self.record.pack(command, pages, address, image))

    def finish(self, seconds: float) -> None:
        """As the client: report the end and require CRIU's confirmation, which proves that it
        served until now.

        Raises:
            DumpFailed: No confirmation, or not in time.
        """
        try:
            self.socket.settimeout(seconds)
            self.send(CLOSE)
            (status,) = _STATUS.unpack(self._exactly(_STATUS.size))
        except (OSError, EOFError) as error:
            raise DumpFailed(f"CRIU did not confirm the end of the dump: {error}") from error
        if status:
            raise DumpFailed(f"CRIU ended the dump with status {status}")

    def confirm(self) -> None:
        """As the server of a dump: confirm the end, which `extents` has left unanswered."""
        self.socket.sendall(_STATUS.pack(0))

    def extents(self, *, answer: bool = True) -> Iterator[Extent]:
        """As the server of a dump: yield what CRIU sends until it reports the end, and confirm
        that.

        Without ``answer`` that is left to `confirm`; until then CRIU waits, the tree frozen.

        After an extent with PE_PRESENT, its bytes must be taken by `receive_into` before the next
        one.

        Raises:
            DumpFailed: The connection broke or made no sense.
        """
        while True:
            try:
                word, pages, address, image = self.record.unpack(self._exactly(self.record.size))
            except (OSError, EOFError) as error:
                raise DumpFailed(f"CRIU's page stream broke off: {error}") from error
            command, flags = word & 0xFFFF, word >> 16
            if command in (CLOSE, FORCE_CLOSE):
                if answer:
                    self.confirm()
                return
            if command == OPEN2:
                self.socket.sendall(b"\0")  # there is no parent
            elif command == PARENT:
                self.socket.sendall(_STATUS.pack(0))
            elif command in (ADD, ADD_FLAGS):
                if pages > _MOST_PAGES:
                    raise DumpFailed(
                        f"CRIU's page stream announces {pages} pages: the record layout is another one"
                    )
                yield Extent(
                    image & 0xFF,
                    image >> 8,
                    address,
                    pages,
                    flags if command == ADD_FLAGS else PE_PRESENT,
                )
            elif command != OPEN:
                raise DumpFailed(
                    f"CRIU's page stream holds an unknown command {command:#x}: its record layout is another one"
                )

    def receive_into(self, out: memoryview) -> None:
        """Receive exactly as many bytes as ``out`` has.

        Raises:
            DumpFailed: The connection broke.
        """
        done = 0
        try:
            while done < len(out):
                got = self.socket.recv_into(out[done:], 0)
                if got == 0:
                    raise DumpFailed("CRIU's page stream broke off within a page")
                done += got
        except OSError as error:
            raise DumpFailed(f"CRIU's page stream broke off: {error}") from error

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError("the other end hung up")
            data += more
        return bytes(data)
