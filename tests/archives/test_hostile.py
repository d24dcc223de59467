"""Archives that no engine writes: refused before anything is stored, in bounded memory."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from icecore.dumper import archive as reading
from icecore.dumper.archive import open_archive
from icecore.dumper.imported import open_images
from icecore.errors import Damaged, IcecoreError, NotFound, StoreError, UsageError
from icecore.store.format import archive as layout
from icecore.store.format.archive import Archive, Member, decode_members, encode_members, gaps
from tests.archives import making

Change = Callable[[tarfile.TarInfo], None]


def member(name: str = "checkpoint/x", data: bytes = b"", change: Change | None = None) -> bytes:
    """Return a tar with one member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = making.plain(tarfile.TarInfo(name))
        info.size = len(data)
        if change is not None:
            change(info)
        tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def kind(which: bytes, target: str = "") -> Change:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = which, target

    return change


def opened(data: bytes, folder: Path) -> None:
    """Open an archive and all that an import reads of it."""
    path = folder / "archive"
    path.write_bytes(data)
    with open_images(path):
        pass


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (member("/etc/passwd"), UsageError, "not a path in the archive"),
        (member("checkpoint/../../x"), UsageError, "not a path in the archive"),
        (member("a" * 5000), UsageError, "not a path in the archive"),
        (member("bad\udcff"), UsageError, "not a path in the archive"),
        (member(change=kind(tarfile.SYMTYPE, "/etc/shadow")), UsageError, "neither a plain file"),
        (member(change=kind(tarfile.LNKTYPE, "config.dump")), UsageError, "neither a plain file"),
        (member(change=kind(tarfile.CHRTYPE)), UsageError, "neither a plain file"),
        (member(change=kind(tarfile.FIFOTYPE)), UsageError, "neither a plain file"),
        (member(change=kind(b"S")), UsageError, "neither a plain file"),
        (
            member("checkpoint/parent", change=kind(tarfile.SYMTYPE, "../pre-checkpoint")),
            UsageError,
            "incremental checkpoint",
        ),
        (member("one")[:512] + member("./one"), UsageError, "one twice"),
        (member("config.dump", b"{}"), NotFound, "no checkpoint/pstree.img"),
        (b"", Damaged, "it is no tar"),
        (b"no tar at all" * 100, Damaged, "it is no tar"),
        (gzip.compress(b"no tar" * 1000, mtime=0)[:-9], Damaged, "cannot be unpacked"),
        (b"\x1f\x8b" + bytes(100), Damaged, "cannot be unpacked"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 100, Damaged, "cannot be unpacked"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), Damaged, "it is no tar"),
        (member("config.dump", b"{}")[:1024], Damaged, "it is cut off"),
        (
            making.compressed(member("x", random.Random(1).randbytes(300_000)), "zstd")[:-50],
            Damaged,
            "beyond the end",
        ),
    ],
)
def test_what_no_engine_writes_is_refused(
    tmp_path: Path, data: bytes, error: type[IcecoreError], words: str
) -> None:
    with pytest.raises(error, match=words):
        opened(data, tmp_path)


def test_sizes_that_lie_are_refused(tmp_path: Path) -> None:
    """A header that claims more than there is, a negative size, an extended header of 8 GiB."""
    good = bytearray(member("checkpoint/pstree.img", b"x" * 100))
    for size in (b"77777777777\0", b"\x80" + bytes(7) + b"\x7f" + bytes(3), b"\xff" * 12):
        bad = bytearray(good)
        bad[124:136] = size
        with pytest.raises(Damaged, match="is no tar"):
            opened(_sealed(bad), tmp_path)
    for type_ in (b"x", b"L", b"g"):
        bad = bytearray(good)
        bad[124:136], bad[156:157] = b"77777777777\0", type_
        with pytest.raises(Damaged, match="a header of"):
            opened(_sealed(bad), tmp_path)


def _sealed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def test_counts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_MEMBERS", 10)
    many = b"".join(member(f"f{n}")[:512] for n in range(11))
    with pytest.raises(UsageError, match="more than 10 members"):
        opened(many + bytes(1024), tmp_path)
    monkeypatch.setattr(reading, "_MAX_PARSED", 50)
    with pytest.raises(Damaged, match="its images have more than"):
        opened(member("checkpoint/pstree.img", b"x" * 51), tmp_path)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_bomb_fills_neither_disk_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An archive may unpack to half of the free space; what was unpacked is gone afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(reading, "free_space", lambda path: 8 << 20)
    with pytest.raises(StoreError, match="half of what is free"):
        opened(making.compressed(bytes(64 << 20), how), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_a_large_window_is_refused(tmp_path: Path) -> None:
    """zstd's decoder would take 1 GiB for it."""
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    out = io.BytesIO()
    with compressor.stream_writer(out, closefd=False) as writer:
        writer.write(b"x" * 100)
    with pytest.raises(Damaged, match="cannot be unpacked"):
        opened(out.getvalue(), tmp_path)


def test_a_large_member_does_not_go_through_memory(tmp_path: Path) -> None:
    """With 1 GiB of address space beyond what Python takes, a sparse archive of 7 GiB is read."""
    header = bytearray(member("rootfs-diff.tar"))[:512]
    header[124:136] = b"%011o\0" % (7 << 30)
    path = tmp_path / "archive"
    with open(path, "wb") as file:
        file.write(_sealed(header))
        file.truncate(512 + (7 << 30))
        file.seek(0, 2)
        file.write(member("config.dump", b"{}"))
    code = (
        "import resource, sys\n"
        "from icecore.dumper.archive import open_archive\n"
        "from icecore.errors import NotFound\n"
        "from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    open_archive(Path(sys.argv[1])).__enter__()\n"
        "except NotFound as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert "no checkpoint/pstree.img" in done.stdout, done.stderr


def test_the_list_of_members_is_checked() -> None:
    """It comes from a repository, which others may write to."""
    members = [
        Member("a", 512, 100, "image", "member:1"),
        Member("b", 1536, 0, "process", "7"),
    ]
    assert decode_members(encode_members(members), 4096) == members
    assert gaps(members, 4096) == [(0, 512), (612, 924), (1536, 2560)]
    for bad in (members[::-1], [Member("a", 0, 5000, "image", "x")]):
        with pytest.raises(Damaged, match="overlap, or lie beyond"):
            decode_members(encode_members(bad), 4096)
    noise = random.Random(7)
    for _ in range(300):
        data = bytearray(encode_members(members))
        data[noise.randrange(len(data))] = noise.randrange(256)
        try:
            decode_members(bytes(data), 4096)
        except Damaged:
            pass
    with pytest.raises(Damaged, match="its archive"):
        layout.decode_archive('{"size": -1, "compression": "none"}')
    assert Archive(1, "none").title == "without a name"


@pytest.mark.criu
def test_damaged_images_are_reported_as_such(tmp_path: Path) -> None:
    """Whatever byte of the images that are read is another, an import says so or goes on."""
    (tmp_path / "spool").mkdir()
    with making.tree(tmp_path) as tree:
        data = making.containerd(tree.dump("images"))
    path = tmp_path / "archive"
    path.write_bytes(data)
    with open_archive(path) as archive:
        names = (".pstree", "pagemap", "mm-", "core-", "files")
        places = [
            m for m in archive.members if m.path.startswith(tuple(f"checkpoint/{n}" for n in names))
        ]
    assert len(places) > 4
    noise = random.Random(11)
    for _ in range(100):
        chosen = noise.choice(places)
        at = chosen.offset + noise.randrange(chosen.size)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([noise.randrange(256)]))
        try:
            with open_images(path):
                pass
        except IcecoreError:
            pass
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
