"""How mapped files were opened, if the mode of a link in /proc/PID/map_files is out of date."""

from __future__ import annotations

import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from icecore.host.criu.libraries import CRIU_LIBRARY, dump_environment
from icecore.host.kernel import map_files, procfs
from icecore.host.kernel.map_files import MappedFiles
from tests.host.target import Target, target

#: Maps a file from descriptors opened for reading and for writing, shared and (last) private. Then
#: swaps the modes at the same addresses. All mappings are read-only.
CODE = """
    import tempfile
    file = tempfile.NamedTemporaryFile(); file.truncate(4096)
    a = anonymous(8 * 4096)
    def put(at, kind, flags=1):
        opened = os.open(file.name, kind)
        assert libc.mmap(at, 4096, 1, 0x10 | flags, opened, 0) == at
        os.close(opened)
    put(a, os.O_RDONLY); put(a + 8192, os.O_RDWR); put(a + 16384, os.O_RDWR, 2)
    say(a); hear()
    put(a, os.O_RDWR); put(a + 8192, os.O_RDONLY); put(a + 16384, os.O_RDONLY, 2)
    say("changed"); hear()
    libc.munmap(a, 8 * 4096)
    say("unmapped"); hear()
"""

#: lstat of links, as CRIU asks for them: after it has opened smaps.
_MODES = """
import ctypes, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
process = os.open(f"/proc/{sys.argv[1]}", os.O_RDONLY | os.O_DIRECTORY)
smaps = open(libc.openat64(process, b"smaps", os.O_RDONLY), "rb").read()
assert smaps.count(b"VmFlags:") > 10
folder = os.open("map_files", os.O_RDONLY | os.O_DIRECTORY, dir_fd=process)
for name in sys.argv[2:]:
    about = (ctypes.c_uint * 64)()
    assert not libc.fstatat64(folder, name.encode(), about, 0x100)
    print(oct(about[6] & 0o600))
"""


def mapping(it: Target, at: int) -> procfs.Mapping:
    return next(one for one in procfs.read_maps(it.pid) if one.start == at)


def modes(it: Target, starts: list[int]) -> list[int]:
    links = [f"/proc/{it.pid}/map_files/{at:x}-{at + 4096:x}" for at in starts]
    return [stat.S_IMODE(Path(link).lstat().st_mode) for link in links]


@pytest.mark.parametrize("mounts", [True, False])
def test_an_earlier_mapping_does_not_matter(mounts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a process that may not mount."""

    def refuse() -> int:
        raise PermissionError

    if not mounts:
        monkeypatch.setattr(map_files, "_new_proc", refuse)
    with target(CODE) as it:
        (a,) = map(int, it.hear())
        shared = [a, a + 8192]
        first = [mapping(it, at) for at in shared]
        assert modes(it, shared) == [0o400, 0o600]
        with ExitStack() as owned:
            links = MappedFiles(owned)
            assert [links.opened_for_writing(it.pid, one) for one in first] == [False, True]
        it.tell("go on")
        it.hear()
        assert modes(it, shared) == [0o400, 0o600], "the kernel still shows the old mode"
        with ExitStack() as owned:
            links = MappedFiles(owned)
            assert [links.opened_for_writing(it.pid, one) for one in first] == [True, False]
        it.tell("go on")
        it.hear()
        with ExitStack() as owned:
            assert not MappedFiles(owned).opened_for_writing(it.pid, first[0])


@pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a C compiler when icecore is built")
@pytest.mark.parametrize("hides", [True, False], ids=["in place", "streamed"])
def test_criu_is_told_how_files_were_opened(hides: bool, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.touch()
    environment = dump_environment(str(hidden) if hides else None)

    def told(it: Target, starts: list[int]) -> list[int]:
        names = [f"{at:x}-{at + 4096:x}" for at in starts]
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MODES, str(it.pid), *names],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not done.returncode, done.stderr
        return [int(word, 8) for word in done.stdout.split()]

    with target(CODE) as it:
        (a,) = map(int, it.hear())
        starts = [a, a + 8192, a + 16384]
        assert modes(it, starts) == [0o400, 0o600, 0o600]
        assert told(it, starts) == [0o400, 0o600, 0o400], "the last one is private"
        it.tell("go on")
        it.hear()
        assert modes(it, starts) == [0o400, 0o600, 0o600]
        assert told(it, starts) == [0o600, 0o400, 0o400]
