"""Read checkpoint archives of Podman, CRI-O and the kubelet: a tar, possibly compressed, of CRIU's
images and of files that describe the container.

An archive is not trusted: names, kinds, counts and sizes are checked before anything is kept, and
only a few small members are read into memory.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec
import zstandard

from icecore.errors import Damaged, NotFound, StoreError, UsageError
from icecore.host.criu.images import load_pstree, pagemaps
from icecore.host.criu.pagemap_image import load_pagemap
from icecore.host.kernel.limits import free_space
from icecore.sizes import PAGE
from icecore.store.format.archive import (
    FOLDER,
    MAX_HEADERS,
    MAX_MEMBERS,
    MAX_TAR,
    Archive,
    Compression,
    Member,
    MemoryKind,
    image_key,
)
from icecore.text import is_utf8, printable

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 1 << 20
#: Largest header that a member may have (a pax header with long names has a few KiB).
_MAX_HEADER = 64 << 10
#: zstd's own programs refuse a larger window unless asked.
_MAX_WINDOW = 128 << 20
#: Most bytes of a JSON file about the container.
_MAX_JSON = 8 << 20
#: Most bytes of all images that an import parses; others are only copied.
_MAX_PARSED = 1 << 30
_PARSED = ("pstree.img", "files.img", "remap-fpath.img", "core-", "mm-", "pagemap-")
#: A tar ends with two blocks of zeros; zstd's reader does not report that its input is cut off.
_END_BYTES = 1024
_MAX_TIME = 1 << 33
_LOG_BYTES = 1 << 16
_MAX_TEXT = 256
_MAX_PATH = 4096


class _Readable(Protocol):
    """A stream from which an archive is unpacked."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""


class _Config(msgspec.Struct):
    """The fields of ``config.dump`` that are used."""

    id: str = ""
    name: str = ""
    rootfsImageName: str = ""
    runtime: str = ""


class _Spec(msgspec.Struct):
    """The fields of ``spec.dump`` that are used."""

    annotations: dict[str, str] | None = None


class _Metadata(msgspec.Struct):
    """CRI-O's annotation about a container."""

    name: str = ""


class OpenArchive(msgspec.Struct, frozen=True):
    """An archive that can be read at any offset.

    Attributes:
        path: The tar, uncompressed.
        about: Its description.
        members: The content of each regular file, ascending.
        folder: A directory with the images that describe processes and memory.
    """

    path: Path
    about: Archive
    members: list[Member]
    folder: Path


@contextmanager
def open_archive(source: Path) -> Iterator[OpenArchive]:
    """Read the members of an archive. A compressed one is unpacked into an unlinked file in
    ``TMPDIR`` (default: /var/tmp), and may take half of the free space there.

    Raises:
        NotFound: There is no such file, or it is not an archive.
        UsageError: It has a member that no engine writes.
        Damaged: It, or an image in it, is malformed.
        StoreError: There is no room to unpack it.
    """
    spool = os.environ.get("TMPDIR") or "/var/tmp"
    with ExitStack() as stack:
        try:
            file: IO[bytes] = stack.enter_context(open(source, "rb"))
        except OSError as error:
            raise NotFound(f"cannot read {source}: {error.strerror}") from error
        compression, file = _plain(file, source, spool, stack)
        path = Path(f"/proc/self/fd/{file.fileno()}")
        size = file.seek(0, os.SEEK_END)
        found = _members(file, source)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory("", "icecore-", spool)))
        names = {name: (info, offset) for name, info, offset in found}
        if FOLDER + "pstree.img" not in names:
            raise NotFound(
                f"{source} is no checkpoint archive: it has no {FOLDER}pstree.img",
                cure="name an archive of 'podman container checkpoint --export', of CRI-O or of the"
                " kubelet",
            )
        _extract(file, names, folder)
        about = _about(file, names, size, compression)
        memory = _memory(folder, {name: info.size for name, info, _ in found})
        members = [
            Member(name, offset, info.size, *memory.get(name) or ("image", image_key(name)))
            for name, info, offset in found
        ]
        if size - sum(member.size for member in members) > MAX_HEADERS:
            raise UsageError(
                f"{source} has more than {MAX_HEADERS >> 20} MiB outside of its members"
            )
        yield OpenArchive(path, about, members, folder)


def _plain(
    file: IO[bytes], source: Path, spool: str, stack: ExitStack
) -> tuple[Compression, IO[bytes]]:
    """Return the compression of an archive, and its tar as a file that can be read anywhere."""
    regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    buffered = io.BufferedReader(io.FileIO(os.dup(file.fileno())), _BLOCK)
    stack.enter_context(buffered)
    head = buffered.peek(4)[:4]
    compression = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if compression is None and regular:
        return "none", file
    tar = tempfile.TemporaryFile(dir=spool, buffering=0)  # noqa: SIM115
    stack.callback(tar.close)
    room = free_space(spool) // 2
    reader: _Readable = buffered
    if compression == "gzip":
        reader = stack.enter_context(GzipFile(fileobj=buffered))
    elif compression == "zstd":
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(
            buffered, read_across_frames=True
        )
    written = 0
    try:
        while block := reader.read(_BLOCK):
            written += len(block)
            if written > min(room, MAX_TAR):
                raise StoreError(
                    f"{source} has more than {room >> 20} MiB unpacked, half of what is free in"
                    f" {spool}",
                    cure="set TMPDIR to a directory on a larger file system",
                )
            tar.write(block)
    except (EOFError, BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise Damaged("archive", source.name, f"it cannot be unpacked: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot unpack {source} into {spool}: {error.strerror}") from error
    return compression or "none", tar


class _Bounded:
    """A file for `tarfile`, which reads a header in whole however long it claims to be."""

    def __init__(self, file: IO[bytes]) -> None:
        self.tell = file.tell
        self.seek = file.seek
        self._read = file.read

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._read(size)


def _members(file: IO[bytes], source: Path) -> list[tuple[str, tarfile.TarInfo, int]]:
    """Return path, header and offset of the content of each regular file, in the tar's order."""
    found: dict[str, tuple[str, tarfile.TarInfo, int]] = {}
    seen: set[str] = set()
    size, last = os.fstat(file.fileno()).st_size, -1
    file.seek(max(0, size - _END_BYTES))
    ends = file.read(_END_BYTES) == bytes(_END_BYTES)
    file.seek(0)
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], _Bounded(file)), mode="r:", errors="surrogateescape"
        ) as tar:
            while (info := tar.next()) is not None:
                cast(Any, tar).members = []  # tarfile would keep all of them
                end = info.offset_data + info.size
                if info.offset <= last or info.size < 0 or (info.isreg() and end > size):
                    raise tarfile.ReadError("a member lies beyond the end, or before another")
                last = info.offset
                path = _checked(info, source)
                if path in seen or len(seen) >= MAX_MEMBERS:
                    raise UsageError(
                        f"{source} has {printable(path)} twice"
                        if path in seen
                        else f"{source} has more than {MAX_MEMBERS} members"
                    )
                seen.add(path)
                if info.isreg():
                    found[path] = (path, info, info.offset_data)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged("archive", source.name, f"it is no tar: {error}") from error
    if not ends:
        raise Damaged("archive", source.name, "it is cut off: it has no end of a tar")
    return list(found.values())


def _checked(info: tarfile.TarInfo, source: Path) -> str:
    """Return the path of a member, without a leading ``./``.

    Raises:
        UsageError: No engine writes such a member.
    """
    name = info.name
    shown = printable(name[:200])
    unnamed = name.startswith("/") or ".." in name.split("/") or len(name) > _MAX_PATH
    if unnamed or not is_utf8(name) or "\0" in name:
        raise UsageError(f"{source} has a member named {shown}, which is not a path in the archive")
    if info.issym() and os.path.normpath(name) == f"{FOLDER}parent":
        raise UsageError(
            f"{source} is an incremental checkpoint, whose pages are in an earlier archive",
            cure="checkpoint without --with-previous",
        )
    if not (info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.isdir()) or info.issparse():
        raise UsageError(
            f"{source} has a member {shown} that is neither a plain file nor a directory"
        )
    return os.path.normpath(name)


def _extract(file: IO[bytes], names: dict[str, tuple[tarfile.TarInfo, int]], folder: Path) -> None:
    """Write the images that describe processes and memory into ``folder``."""
    left = _MAX_PARSED
    for path, (info, offset) in names.items():
        name = path.removeprefix(FOLDER)
        if path == "dump.log":
            file.seek(offset)
            (folder / path).write_bytes(file.read(min(info.size, _LOG_BYTES)))
        if not path.startswith(FOLDER) or not name.startswith(_PARSED) or "/" in name:
            continue
        left -= info.size
        if left < 0:
            raise Damaged("archive", FOLDER, f"its images have more than {_MAX_PARSED >> 20} MiB")
        file.seek(offset)
        with open(folder / name, "xb") as out:
            for at in range(0, info.size, _BLOCK):
                out.write(file.read(min(_BLOCK, info.size - at)))
        moment = min(max(int(info.mtime), 0), _MAX_TIME)
        os.utime(folder / name, (moment, moment))


def _memory(folder: Path, sizes: dict[str, int]) -> dict[str, tuple[MemoryKind, str]]:
    """Return which space each page image holds, by its path in the archive, and remove the other
    pagemaps from ``folder``.

    An engine may dump into a directory that still has images of an earlier checkpoint. Pagemaps of
    processes that are not in the tree are such remains, and are stored like other files.
    """
    found: dict[str, tuple[MemoryKind, str]] = {}
    alive = {task.pid for task in load_pstree(folder)}
    processes, shared = pagemaps(folder)
    for kind, stem, numbers in (
        ("process", "pagemap-", processes),
        ("shared", "pagemap-shmem-", shared),
    ):
        for number in numbers:
            path = folder / f"{stem}{number}.img"
            if kind == "process" and number not in alive:
                path.unlink()
                continue
            pages, entries = load_pagemap(path)
            image = f"{FOLDER}pages-{pages}.img"
            if not len(entries):
                continue
            fits = sizes.get(image) == int(entries["pages"].sum()) * PAGE and image not in found
            if kind == "process" and not fits:
                why = f"pages-{pages}.img is missing, has another size or another pagemap"
                raise Damaged("image", path.name, why)
            if not fits:
                path.unlink()
                continue
            found[image] = ("process" if kind == "process" else "shared", str(number))
    return found


def _about(
    file: IO[bytes],
    names: dict[str, tuple[tarfile.TarInfo, int]],
    size: int,
    compression: Compression,
) -> Archive:
    """Return an archive's description of its container; an archive may lack the files with it."""

    def read(path: str) -> bytes:
        info, offset = names.get(path, (None, 0))
        if info is None:
            return b"{}"
        if info.size > _MAX_JSON:
            raise Damaged("archive", path, f"it has more than {_MAX_JSON >> 20} MiB")
        file.seek(offset)
        return file.read(info.size)

    try:
        config = msgspec.json.decode(read("config.dump"), type=_Config)
        annotations = msgspec.json.decode(read("spec.dump"), type=_Spec).annotations or {}
        crio = annotations.get("io.kubernetes.cri-o.Metadata") or "{}"
        inner = msgspec.json.decode(crio, type=_Metadata).name
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged("archive", "config.dump or spec.dump", str(error)) from error

    def annotation(*keys: str) -> str:
        return next((annotations[key] for key in keys if annotations.get(key)), "")

    of_containerd = any(key.startswith("io.kubernetes.cri.") for key in annotations)
    texts = {
        "engine": annotation("io.container.manager") or ("containerd" if of_containerd else ""),
        "name": inner or annotation("io.kubernetes.cri.container-name") or config.name,
        "id": config.id,
        "image": config.rootfsImageName or annotation("io.kubernetes.cri.image-name"),
        "runtime": config.runtime,
        "pod": annotation("io.kubernetes.pod.name", "io.kubernetes.cri.sandbox-name"),
    }
    return Archive(size, compression, **{key: text[:_MAX_TEXT] for key, text in texts.items()})
