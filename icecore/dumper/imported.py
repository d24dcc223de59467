"""Input of an import: CRIU's images, in a directory or in a checkpoint archive, as pieces of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from icecore.dumper.archive import OpenArchive, open_archive
from icecore.dumper.memory.images import image_files
from icecore.errors import Damaged, NotFound, UsageError
from icecore.host.criu.program import find_criu
from icecore.store.format.archive import (
    ARCHIVE,
    HEADERS,
    MEMBERS,
    encode_archive,
    encode_members,
    gaps,
)
from icecore.text import harmless, job_name

_PAGES = re.compile(r"(?:checkpoint/)?pages-(\d{1,10})\.img\Z")
_MAX_TAG = 120


class Piece(msgspec.Struct, frozen=True):
    """Content that lies somewhere in a file: ``size`` bytes from ``offset`` on.

    ``key`` is that of its space, ``name`` is for messages.
    """

    key: str
    path: Path
    offset: int
    size: int
    name: str


class Images(msgspec.Struct, frozen=True):
    """The images of one process tree.

    Attributes:
        source: The directory or archive.
        folder: A directory with the images that describe processes and memory.
        pieces: Everything that is stored as images.
        pages: The page images by number.
        name: The container's name; empty: none.
        tags: Labels that the snapshot gets.
        extra: For the manifest.
    """

    source: Path
    folder: Path
    pieces: list[Piece]
    pages: dict[int, Piece]
    name: str = ""
    tags: list[str] = msgspec.field(default_factory=list)
    extra: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of everything."""
        return sum(piece.size for piece in [*self.pieces, *self.pages.values()])

    def page_image(self, number: int) -> Piece:
        """Return a page image.

        Raises:
            Damaged: There is none of this number.
        """
        try:
            return self.pages[number]
        except KeyError:
            raise Damaged("image", f"pages-{number}.img", "it is missing") from None

    def criu_version(self) -> tuple[int, ...]:
        """Return the version of the CRIU that wrote the images, from its log; without a log, that of
        this machine's CRIU.
        """
        for log in sorted(self.folder.glob("*.log")):
            with open(log, "rb") as file:
                found = re.search(rb"Version: (\d+)\.(\d+)(?:\.(\d+))?", file.read(1 << 16))
            if found:
                return tuple(int(number or 0) for number in found.groups())
        return find_criu().version


@contextmanager
def open_images(source: Path) -> Iterator[Images]:
    """Open an image directory, or an archive.

    Raises:
        NotFound: ``source`` is neither.
        UsageError: It depends on other directories.
        Damaged: It is malformed.
    """
    if source.exists() and not source.is_dir():
        with open_archive(source) as archive:
            yield _of_archive(source, archive)
        return
    if not (source / "pstree.img").is_file():
        raise NotFound(
            f"{source} is no image directory: it has no pstree.img",
            cure="name the directory that was given to 'criu dump -D'",
        )
    if os.path.lexists(source / "parent"):
        raise UsageError(
            f"{source} is an incremental dump, whose pages are in its parent directories",
            cure="dump again without --prev-images-dir, or import the parents and dump in full",
        )
    pages = {
        int(found[1]): _file(path)
        for path in source.iterdir()
        if (found := _PAGES.match(path.name)) and path.is_file()
    }
    yield Images(source, source, [_file(path) for path in image_files(source)], pages)


def _file(path: Path) -> Piece:
    return Piece(path.name, path, 0, path.stat().st_size, path.name)


def _of_archive(source: Path, archive: OpenArchive) -> Images:
    about, members, folder = archive.about, archive.members, archive.folder
    headers, index = folder / "headers", folder / "members"
    with open(archive.path, "rb") as tar, open(headers, "xb") as out:
        for offset, length in gaps(members, about.size):
            tar.seek(offset)
            out.write(tar.read(length))
    index.write_bytes(encode_members(members))
    pieces, pages = [], {}
    for member in members:
        piece = Piece(member.key, archive.path, member.offset, member.size, member.path)
        if member.kind == "image":
            pieces.append(piece)
        elif found := _PAGES.match(member.path):
            pages[int(found[1])] = piece
    for key, path in ((HEADERS, headers), (MEMBERS, index)):
        pieces.append(Piece(key, path, 0, path.stat().st_size, key))
    labels = {"container": about.name, "image": about.image, "runtime": about.runtime}
    return Images(
        source,
        folder,
        pieces,
        pages,
        name=job_name(f"{about.pod}-{about.name}" if about.pod else about.name),
        tags=[f"{key}:{harmless(text)[:_MAX_TAG]}" for key, text in labels.items() if text],
        extra={ARCHIVE: encode_archive(about)},
    )
