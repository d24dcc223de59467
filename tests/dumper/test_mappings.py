"""What CRIU reads of mappings: copies that the dumper made ahead, and nothing else than without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.dumper.memory import early
from icecore.dumper.options import DumpOptions
from icecore.host.criu import mappings
from icecore.host.criu.hidden import hides
from icecore.host.criu.libraries import dump_environment
from icecore.host.criu.mappings import copy_mappings
from icecore.host.criu.program import find_criu
from icecore.host.kernel.scanning import native_scan_lacks

from .puppet import Puppet
from .world import Events, Store

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        bool(native_scan_lacks()) or not hides(find_criu()),
        reason="needs a C compiler when icecore is built, and Linux 6.7",
    ),
]

WORKERS = 6

_READ = """
import os, sys
for pid, name in (word.split(",") for word in sys.argv[1:]):
    folder = os.open(f"/proc/{pid}", os.O_PATH)
    print(os.read(os.open(name, os.O_RDONLY, dir_fd=folder), 7).decode())
"""


def read(hidden: Path | None, *files: tuple[int, str]) -> list[str]:
    """The first bytes of files of processes, as CRIU reads them."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _READ, *(f"{pid},{name}" for pid, name in files)],
        env=dump_environment(str(hidden) if hidden else None),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def test_a_copy_is_used_once(tmp_path: Path) -> None:
    hidden, own, other = tmp_path / "hidden.log", os.getpid(), os.getppid()
    hidden.touch()
    copy = tmp_path / f"hidden.log.{own}.smaps.log"
    copy.write_text("a copy of it")
    smaps, maps = (own, "smaps"), (own, "maps")
    assert "a copy " not in read(None, smaps)
    found = read(hidden, (other, "smaps"), maps, smaps, smaps)
    assert [one == "a copy " for one in found] == [False, False, True, False]
    assert not copy.exists()


def test_what_is_copied(tmp_path: Path) -> None:
    hidden, own = tmp_path / "hidden.log", os.getpid()
    (tmp_path / "mm-2.img").touch()
    lines = Path("/proc/self/maps").read_text().count("\n")
    copy_mappings(hidden, [(own, 1), (own, 2), (1 << 22, 3)], lambda: False)
    (copy,) = tmp_path.glob("*.log")
    assert copy.name == f"hidden.log.{own}.smaps.log"
    assert abs(copy.read_text().count("VmFlags:") - lines) < 9
    copy.unlink()
    copy_mappings(hidden, [(own, 1)], lambda: True)
    assert not list(tmp_path.glob("*.log"))


def test_criu_writes_the_same(
    puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the lines of maps do not show: locked memory, and advice about it."""
    puppet.do(
        "libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]; m = private(8 * MIB); put(m, os.urandom(MIB))\n"
        "for n, advice in enumerate((10, 12, 14, 15, 16, 18)): assert libc.madvise(m + n * MIB, MIB, advice) == 0\n"
        "assert libc.mlock(ctypes.c_void_p(m + 7 * MIB), MIB) == 0"
    )
    puppet.do(f"for _ in range({WORKERS}):\n    if os.fork() == 0: time.sleep(1000)")
    copied: list[int] = []
    left: list[int] = []
    copy = mappings._copy

    def counted(pid: int, target: Path) -> None:
        copy(pid, target)
        copied.append(pid)

    def images() -> dict[str, bytes]:
        look = Events(
            {
                ("dump.files", "begin"): lambda _: left.append(
                    len(list(store.workdir.glob("*/*.smaps.log")))
                )
            }
        )
        recorded = store.read(store.dump(puppet.pid, DumpOptions(), events=look).snapshot)
        names = [space.key for space in recorded.manifest.spaces if space.kind == "image"]
        return {name: recorded.content("image", name) for name in names if name.startswith("mm-")}

    monkeypatch.setattr(mappings, "_copy", counted)
    for _ in range(10):
        with_copies = images()
        if len(copied) > left[-1]:  # otherwise CRIU was done before it was noticed
            break
        copied.clear()
    monkeypatch.setattr(early, "copy_mappings", lambda *_: None)
    without = images()
    assert len(copied) > left[-2], "none was used"
    assert with_copies == without and len(without) == WORKERS + 1
