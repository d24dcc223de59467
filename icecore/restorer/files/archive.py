"""Write a snapshot that was imported from a container's checkpoint archive as the same archive, with
identical tar and the same kind of compression. The file appears once it is complete.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import zstandard
from msgspec.structs import replace

from icecore.errors import Damaged, StoreError, UsageError
from icecore.events import Progress
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.files.filewriter import FileTarget, shortage, write_files
from icecore.restorer.files.images import image_targets, plan_memory, read_spaces, spaces_of
from icecore.restorer.plan.cells import SpaceCells
from icecore.store.backend.base import Backend
from icecore.store.format.archive import (
    ARCHIVE,
    HEADERS,
    MAX_HEADERS,
    MEMBERS,
    Archive,
    Compression,
    Member,
    decode_archive,
    decode_members,
    gaps,
)
from icecore.store.format.manifest import Space
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_BLOCK = 1 << 20
_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6
#: File systems without hard links answer with one of these.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_archive(
    backend: Backend,
    loop: LoopThread,
    reader: SnapshotReader,
    path: Path,
    limits: Limits,
    progress: Progress,
) -> tuple[int, int]:
    """Write the archive of a snapshot that has one.

    Args:
        path: The file to create. Its directory also holds the uncompressed tar meanwhile.

    Returns:
        Bytes of the file, and the number of members with content.

    Raises:
        UsageError: ``path`` exists.
        Damaged: The snapshot lacks a member of its list.
        StoreError: The storage failed, or there is no room.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists", cure="name a new file")
    about = decode_archive(reader.manifest.extra[ARCHIVE])
    try:
        with tempfile.TemporaryDirectory("", ".icecore-", path.parent) as folder:
            writer = _Writer(backend, loop, reader, Path(folder), limits)
            tar, members = writer.write(about, progress)
            done = _compressed(tar, about.compression)
            size = done.stat().st_size
            _appear(done, path)
    except OSError as error:
        raise StoreError(f"cannot write {error.filename or path}: {error.strerror}") from error
    return size, members


def _compressed(tar: Path, compression: Compression) -> Path:
    """Return the compressed tar; it has the permissions of the tar."""
    if compression == "none":
        return tar
    path = tar.with_name("compressed")
    with open(tar, "rb") as source, open(path, "xb", opener=_private) as file:
        out: IO[bytes]
        if compression == "gzip":
            out = gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0)  # type: ignore[assignment]
        else:
            compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=-1)
            out = compressor.stream_writer(file, closefd=False)
        with out:
            shutil.copyfileobj(source, out, _BLOCK)
    return path


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: it holds the container's memory."""
    return os.open(path, flags, 0o600)


def _appear(done: Path, path: Path) -> None:
    """Give a complete file its name, unless another file has that name by now."""
    try:
        os.link(done, path)
    except FileExistsError:
        raise UsageError(f"{path} exists", cure="name a new file") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(done, path)


class _Writer:
    """Writes one tar."""

    def __init__(
        self,
        backend: Backend,
        loop: LoopThread,
        reader: SnapshotReader,
        folder: Path,
        limits: Limits,
    ) -> None:
        self.backend = backend
        self.loop = loop
        self.reader = reader
        self.folder = folder
        self.limits = limits

    def write(self, about: Archive, progress: Progress) -> tuple[Path, int]:
        """Return the path of the tar, and the number of its members."""
        manifest = self.reader.manifest
        spaces = spaces_of(manifest, "image", "process", "shared")
        cells: dict[tuple[str, str], SpaceCells] = dict(
            zip(
                [(str(space.kind), space.key) for space in spaces],
                read_spaces(self.reader, spaces, parallel=not self.backend.direct),
                strict=True,
            )
        )
        self._write_images(spaces, cells)
        members = decode_members((self.folder / MEMBERS).read_bytes(), about.size)
        path = self.folder / "tar"
        with open(path, "xb+", opener=_private) as tar:
            os.ftruncate(tar.fileno(), about.size)
            targets = self._targets(members, spaces, cells, tar.fileno())
            if short := shortage(self.folder, targets):
                raise StoreError(
                    f"there is no room for the archive: {short}",
                    cure="name a file on a larger file system",
                )
            write_files(self.backend, self.reader, targets, self.limits, self.loop, progress)
            self._write_headers(tar, members, about.size)
        return path, len(members)

    def _write_images(
        self, spaces: Sequence[Space], cells: dict[tuple[str, str], SpaceCells]
    ) -> None:
        """Write the images with the layout: the list of members, the headers, the pagemaps."""
        wanted = [
            space
            for space in spaces
            if space.kind == "image" and space.key.startswith(("pagemap-", HEADERS, MEMBERS))
        ]
        if not {HEADERS, MEMBERS} <= {space.key for space in wanted}:
            raise Damaged("manifest", "of the snapshot", "its archive has no list of members")
        if max(space.size for space in wanted) > MAX_HEADERS * 2:
            raise Damaged("manifest", "of the snapshot", "an image of its archive is too long")
        own = [cells["image", space.key] for space in wanted]
        targets = image_targets(self.folder, wanted, own)
        write_files(self.backend, self.reader, targets, self.limits, self.loop)

    def _targets(
        self,
        members: Sequence[Member],
        spaces: Sequence[Space],
        cells: dict[tuple[str, str], SpaceCells],
        descriptor: int,
    ) -> list[FileTarget]:
        """Return the position of the content of each member."""
        memory = [(s, cells[s.kind, s.key]) for s in spaces if s.kind in ("process", "shared")]
        # The version is that of a CRIU that would read changed pagemaps; these stay as they are.
        planned = plan_memory(self.folder, memory, (4, 0), lazily=False).page_images
        pages = {os.path.basename(target.path): target for target in planned}
        sizes = {space.key: space.size for space in spaces if space.kind == "image"}
        found = []
        for member in members:
            target: FileTarget | None = None
            if member.kind != "image":
                target = pages.get(os.path.basename(member.path))
            elif member.key in sizes:
                own = cells["image", member.key]
                target = FileTarget(member.path, sizes[member.key], own)
            if target is None or target.size != member.size:
                raise Damaged("image", MEMBERS, f"the snapshot does not hold {member.path}")
            found.append(replace(target, descriptor=descriptor, offset=member.offset))
        return found

    def _write_headers(self, tar: IO[bytes], members: Sequence[Member], size: int) -> None:
        with open(self.folder / HEADERS, "rb") as headers:
            for offset, length in gaps(members, size):
                data = headers.read(length)
                if len(data) != length:
                    raise Damaged("image", HEADERS, "it is shorter than the gaps between members")
                tar.seek(offset)
                tar.write(data)
