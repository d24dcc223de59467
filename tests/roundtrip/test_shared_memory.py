"""Shared memory of every kind goes through the dumper's and the restorer's hands, each object once,
and comes back with its content, its sharers and its holes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.dumper.dump import DumpResult
from icecore.dumper.options import DumpOptions
from icecore.host.criu.hidden import hides
from icecore.host.criu.program import find_criu
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from icecore.store.runtime.loop import LoopThread
from tests.dumper.puppet import Puppet
from tests.dumper.world import Events, Store

MIB = 1 << 20

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(not hides(find_criu()), reason="CRIU sees all memory here"),
]

#: Makes an object of 5 MiB, of which 1 MiB in the middle was never touched; ``m`` is a mapping of
#: it, ``f`` a descriptor, if there is one.
MAKE = {
    "anonymous": "f = None; m = mmap.mmap(-1, 5 * MIB)",
    "memfd": "f = os.memfd_create('a name'); os.ftruncate(f, 5 * MIB); m = mmap.mmap(f, 5 * MIB)",
    "memfd that may not change its size": (
        "import fcntl; f = os.memfd_create('x', 3); os.ftruncate(f, 5 * MIB)\n"
        "fcntl.fcntl(f, 1033, 2 | 4); m = mmap.mmap(f, 5 * MIB)"
    ),
    "segment": (
        "f = None; assert libc.unshare(0x08000000) == 0; libc.shmat.restype = ctypes.c_void_p\n"
        "n = libc.shmget(77, 5 * MIB, 0o1600); at = libc.shmat(n, None, 0); assert at != -1\n"
        "m = (ctypes.c_char * (5 * MIB)).from_address(at)"
    ),
}
FILL = "m[: 2 * MIB] = os.urandom(2 * MIB); m[3 * MIB : 4 * MIB + 10] = os.urandom(MIB + 10)"
DIGEST = (
    "import hashlib\nwith open('digest', 'w') as file: file.write(hashlib.sha256(m[:]).hexdigest())"
)


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    folder = tmp_path / "puppet"
    folder.mkdir()
    puppet = Puppet(folder)
    yield puppet
    puppet.end()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with (
        LoopThread() as loop,
        tempfile.TemporaryDirectory(prefix="icecore-test-", dir="/dev/shm") as workdir,
    ):
        yield Store.make(loop, tmp_path / "repository", Path(workdir))


def dumped(puppet: Puppet, store: Store, pre_copy: str = "on") -> tuple[DumpResult, int]:
    """Dump; return the result, and the bytes that CRIU was kept from seeing."""
    events = Events()
    options = DumpOptions(pre_copy=pre_copy)  # type: ignore[arg-type]
    result = store.dump(puppet.pid, options, events=events)
    (window,) = [e for e in events.named("dump.window") if e.fields["state"] == "end"]
    return result, int(str(window.fields["hidden"]))


def back(store: Store, snapshot: str, mode: str) -> tuple[Restored, Events]:
    """Restore the tree, with all its memory."""
    events = Events()
    options = RestoreOptions(mode=mode, workdir=str(store.workdir))  # type: ignore[arg-type]
    restored = restore(store.repository, store.loop, snapshot, options, emit=events)
    restored.wait_resident(60)
    return restored, events


def ended(restored: Restored) -> None:
    with suppress(ProcessLookupError):
        os.killpg(restored.pid, signal.SIGKILL)
    restored.wait(20)


def tell(puppet: Puppet, code: str) -> None:
    """Have the restored puppet execute code: its process is another one than the first."""
    said = puppet.folder / f"said{puppet._step}"
    told = puppet.folder / ".told"
    told.write_text(code)
    told.rename(puppet.folder / f"do{puppet._step}")
    puppet._step += 1
    end = time.monotonic() + 20
    while not said.exists():
        assert time.monotonic() < end, f"no answer to {code!r}"
        time.sleep(0.002)
    assert said.read_text() == "done", said.read_text()


def read(puppet: Puppet, name: str) -> str:
    return (puppet.folder / name).read_text()


@pytest.mark.parametrize("mode", ["full", "lazy"])
@pytest.mark.parametrize("kind", MAKE)
def test_an_object_comes_back(kind: str, mode: str, puppet: Puppet, store: Store) -> None:
    puppet.do(f"{MAKE[kind]}\n{FILL}")
    _, hidden = dumped(puppet, store)
    puppet.do(f"m[MIB : MIB + 5] = b'again'; m[4 * MIB + 8 : 4 * MIB + 20] = bytes(12)\n{DIGEST}")
    before = read(puppet, "digest")
    result, again = dumped(puppet, store, "off")
    assert min(hidden, again) >= 3 * MIB
    assert result.sizes.stored < 3 * MIB  # most of the parent's cells are still true
    (space,) = [s for s in store.read(result.snapshot).manifest.spaces if s.kind == "shared"]
    content = store.read(result.snapshot).content("shared", space.key)
    assert hashlib.sha256(content.ljust(5 * MIB, b"\0")).hexdigest() == before
    puppet.end()
    restored, events = back(store, result.snapshot, mode)
    try:
        assert len(events.named("restore.shared")) >= 2
        # Before it is read: that takes memory for what was never written.
        blocks = f"/proc/{restored.pid}/map_files"
        taken = max(
            about.st_blocks * 512
            for name in os.listdir(blocks)
            if (about := os.stat(f"{blocks}/{name}")).st_size == 5 * MIB
        )
        assert taken <= 3 * MIB + 2 * 4096  # the hole is still one
        tell(puppet, DIGEST)
        assert read(puppet, "digest") == before
        tell(puppet, "m[2 * MIB + 5 : 2 * MIB + 6] = b'x'; assert m[2 * MIB + 5] in (120, b'x')")
        result, hidden = dumped_pid(restored.pid, store)
        assert hidden >= 3 * MIB
    finally:
        ended(restored)


def dumped_pid(pid: int, store: Store) -> tuple[DumpResult, int]:
    """Dump the restored tree; see `dumped`."""
    events = Events()
    result = store.dump(pid, DumpOptions(pre_copy="on"), events=events)
    (window,) = [e for e in events.named("dump.window") if e.fields["state"] == "end"]
    return result, int(str(window.fields["hidden"]))


def test_processes_still_share_it(puppet: Puppet, store: Store) -> None:
    """One process maps all of it, one a part of it, one may only read it."""
    puppet.do(
        "m = mmap.mmap(-1, 4 * MIB); m[:] = os.urandom(4 * MIB)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "parts = os.fork()\n"
        "if parts == 0:\n"
        "    libc.munmap(ctypes.c_void_p(at), 2 * MIB)\n"
        "    count = ctypes.c_uint.from_address(at + 3 * MIB)\n"
        "    count.value = 0\n"
        "    while True: count.value += 1; time.sleep(0.01)\n"
        "reads = os.fork()\n"
        "if reads == 0:\n"
        "    libc.mprotect(ctypes.c_void_p(at), 4 * MIB, 1)\n"
        "    while True:\n"
        "        if m[100:105] == b'hello' and not os.path.exists('seen'): open('seen', 'w').close()\n"
        "        time.sleep(0.01)"
    )
    result, hidden = dumped(puppet, store)
    assert hidden >= 4 * MIB
    spaces = [s for s in store.read(result.snapshot).manifest.spaces if s.kind == "shared"]
    assert len(spaces) == 1
    puppet.end()
    restored, _ = back(store, result.snapshot, "full")
    try:
        tell(
            puppet,
            "m[100:105] = b'hello'; first = m[3 * MIB : 3 * MIB + 4]; end = time.monotonic() + 10\n"
            "while m[3 * MIB : 3 * MIB + 4] == first or not os.path.exists('seen'):\n"
            "    assert time.monotonic() < end; time.sleep(0.01)",
        )
    finally:
        ended(restored)


#: Objects that CRIU brings back itself, or that have no mapping or an odd size.
OTHERS = {
    "sealed": (
        "import fcntl; f = os.memfd_create('s', 3); os.write(f, os.urandom(2 * MIB))\n"
        "fcntl.fcntl(f, 1033, 8); m = mmap.mmap(f, 2 * MIB, prot=1)",
        False,
    ),
    "only open": ("f = os.memfd_create('o'); os.write(f, os.urandom(2 * MIB + 777))", True),
    "read only": (
        "f = os.memfd_create('r'); os.write(f, os.urandom(2 * MIB))\n"
        "m = mmap.mmap(f, 2 * MIB, prot=1); os.close(f); f = None",
        True,
    ),
    "mapped privately": (
        "f = os.memfd_create('p'); os.write(f, os.urandom(2 * MIB))\n"
        "m = mmap.mmap(f, 2 * MIB, flags=2); m[5:9] = b'mine'",
        True,
    ),
    "deleted file on tmpfs": (
        "import tempfile; file = tempfile.TemporaryFile(dir='/dev/shm'); f = file.fileno()\n"
        "os.write(f, os.urandom(MIB - 1)); m = mmap.mmap(f, MIB - 1)",
        None,
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_objects(kind: str, puppet: Puppet, store: Store) -> None:
    code, placed = OTHERS[kind]
    digest = (
        "import hashlib; h = hashlib.sha256()\n"
        "if f is not None: h.update(os.pread(f, 9 * MIB, 0)); h.update(str(os.fstat(f).st_size).encode())\n"
        "try: h.update(m[:])\n"
        "except NameError: pass\n"
        "with open('digest', 'w') as file: file.write(h.hexdigest())"
    )
    puppet.do(f"{code}\n{digest}")
    before = read(puppet, "digest")
    result, _ = dumped(puppet, store)
    puppet.end()
    restored, events = back(store, result.snapshot, "full")
    try:
        tell(puppet, digest)
        assert read(puppet, "digest") == before
        assert bool(events.named("restore.shared")) == bool(placed)
        if kind == "sealed":
            tell(puppet, "try: os.pwrite(f, b'x', 0)\nexcept PermissionError: pass\nelse: 1 / 0")
    finally:
        ended(restored)


def test_an_object_made_after_the_list_is_left_to_criu(puppet: Puppet, store: Store) -> None:
    puppet.do(f"f = None; m = mmap.mmap(-1, 2 * MIB); m[:] = os.urandom(2 * MIB)\n{DIGEST}")
    made = "late = mmap.mmap(-1, 3 * MIB); late[:] = b'l' * 3 * MIB"
    events = Events({("dump.criu", "begin"): lambda _: puppet.do(made)})
    result = store.dump(puppet.pid, DumpOptions(pre_copy="on"), events=events)
    recorded = store.read(result.snapshot)
    contents = [recorded.content("shared", key) for key in recorded.keys("shared")]
    assert b"l" * 3 * MIB in contents
    (held,) = [content for content in contents if content != b"l" * 3 * MIB]
    assert hashlib.sha256(held).hexdigest() == read(puppet, "digest")
