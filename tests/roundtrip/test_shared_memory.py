"""Shared memory of every kind passes through the dumper's and the restorer's hands, each object once,
and comes back with its content, its sharers and its holes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from icecore.dumper.memory.shared import _merged
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import RestoreFailed
from icecore.host.criu.hidden import hides
from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.criu.program import find_criu
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.fill import charging
from icecore.restorer.fill import shared as shared_fill
from icecore.restorer.guard.client import Message
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases import files as restored_files
from icecore.restorer.restore import restore
from icecore.restorer.restored import Restored
from icecore.sizes import PAGE
from icecore.store.runtime.loop import LoopThread
from tests.dumper.puppet import Puppet
from tests.dumper.world import Events, Store
from tests.host.memory_group import frozen_group, memory_group, used
from tests.host.target import eventually

MIB = 1 << 20

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(not hides(find_criu()), reason="CRIU sees all memory here"),
    pytest.mark.skipif(not RESTORE_LIBRARY.exists(), reason="CRIU fills shared memory here"),
]

#: `kinds` maps a name to what returns a digest of everything that can be seen of that object.
#: Nothing is read through a mapping that has holes: that takes memory for them.
HELPERS = """
import fcntl, hashlib, json, tempfile, threading
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SEALS, PAGE = 1033, 4096
kinds = {}

def at(m):
    return ctypes.addressof(ctypes.c_char.from_buffer(m))

def mapped(address):
    for line in open('/proc/self/maps'):
        start, end = (int(word, 16) for word in line.split()[0].split('-'))
        if start <= address < end:
            return os.open(f'/proc/self/map_files/{start:x}-{end:x}', os.O_RDONLY)

def content(f):
    h = hashlib.sha256()
    size = os.fstat(f).st_size
    for begin in range(0, size, MIB):
        h.update(os.pread(f, min(MIB, size - begin), begin))
    return [size, h.hexdigest()]

def through(address, begin=0, length=None):
    f = mapped(address)
    try:
        return content(f) + [os.fstat(f).st_blocks]
    finally:
        os.close(f)

def opened(f):
    return content(f) + [fcntl.fcntl(f, SEALS + 1), os.fstat(f).st_blocks, os.lseek(f, 0, 1)]

def seen(m):
    return hashlib.sha256(m[:]).hexdigest()

def memfd(name, size, flags=1):
    f = os.memfd_create(name, flags)
    os.ftruncate(f, size)
    return f

def fill(m):
    m[: 2 * MIB] = os.urandom(2 * MIB)
    m[3 * MIB : 4 * MIB + 10] = os.urandom(MIB + 10)

def tell():
    with open('.digests', 'w') as file:
        json.dump({name: digest() for name, digest in kinds.items()}, file)
    os.rename('.digests', 'digests')

assert libc.unshare(0x08000000) == 0
"""

#: Each makes one object.
KINDS = {
    "anonymous": "a = mmap.mmap(-1, 5 * MIB); fill(a); kinds[k] = lambda: through(at(a))",
    "anonymous, mapped in part": (
        "part = libc.mmap(0, 6 * MIB, 3, 0x21, -1, 0); put(part, os.urandom(6 * MIB))\n"
        "libc.munmap(part, 2 * MIB); libc.munmap(part + 5 * MIB, MIB); part += 2 * MIB\n"
        "kinds[k] = lambda: hashlib.sha256(ctypes.string_at(part, 3 * MIB)).hexdigest()"
    ),
    "memfd": (
        "mf = memfd('a name', 5 * MIB); mm = mmap.mmap(mf, 5 * MIB); fill(mm); os.lseek(mf, 77, 0)\n"
        "kinds[k] = lambda: opened(mf)"
    ),
    "memfd of a fixed size": (
        "ff = memfd('f', 5 * MIB, 3); fcntl.fcntl(ff, SEALS, 2 | 4); fm = mmap.mmap(ff, 5 * MIB)\n"
        "fill(fm); kinds[k] = lambda: opened(ff)"
    ),
    "memfd, mapped beyond its end": (
        "bf = memfd('b', 2 * MIB + 777); os.pwrite(bf, os.urandom(2 * MIB + 777), 0)\n"
        "bm = libc.mmap(0, 4 * MIB, 3, 1, bf, 0); kinds[k] = lambda: opened(bf)"
    ),
    "memfd, read only": (
        "rf = memfd('r', 2 * MIB); os.write(rf, os.urandom(2 * MIB))\n"
        "rm = mmap.mmap(rf, 2 * MIB, prot=1); os.close(rf); kinds[k] = lambda: seen(rm)"
    ),
    "memfd, mapped privately": (
        "pf = memfd('p', 2 * MIB); os.write(pf, os.urandom(2 * MIB))\n"
        "pm = mmap.mmap(pf, 2 * MIB, flags=2); pm[5:9] = b'mine'\n"
        "kinds[k] = lambda: [seen(pm), opened(pf)]"
    ),
    "memfd, not mapped": (
        "of = memfd('o', 0); os.write(of, os.urandom(2 * MIB + 777)); kinds[k] = lambda: opened(of)"
    ),
    "memfd, sealed": (
        "sf = memfd('s', 0, 3); os.write(sf, os.urandom(2 * MIB)); fcntl.fcntl(sf, SEALS, 15)\n"
        "kinds[k] = lambda: opened(sf)"
    ),
    "memfd, sealed against new writers": (
        "wf = memfd('w', 2 * MIB, 3); wm = mmap.mmap(wf, 2 * MIB); wm[:] = os.urandom(2 * MIB)\n"
        "fcntl.fcntl(wf, SEALS, 16); kinds[k] = lambda: opened(wf)"
    ),
    "segment": (
        "n1 = libc.shmget(77, 5 * MIB, 0o1600); sa = libc.shmat(n1, None, 0); assert sa != -1\n"
        "fill((ctypes.c_char * (5 * MIB)).from_address(sa)); kinds[k] = lambda: through(sa)"
    ),
    "segment, not attached": (
        "n2 = libc.shmget(78, 2 * MIB, 0o1600); ua = libc.shmat(n2, None, 0)\n"
        "put(ua, os.urandom(2 * MIB)); libc.shmdt(ctypes.c_void_p(ua))\n"
        "def unattached():\n"
        "    a = libc.shmat(n2, None, 0)\n"
        "    try: return through(a)\n"
        "    finally: libc.shmdt(ctypes.c_void_p(a))\n"
        "kinds[k] = unattached"
    ),
    "file on tmpfs": (
        "n = os.open(place + '/file', os.O_RDWR | os.O_CREAT); os.ftruncate(n, 5 * MIB)\n"
        "nm = mmap.mmap(n, 5 * MIB); fill(nm); kinds[k] = lambda: content(n)"
    ),
    "deleted file on tmpfs": (
        "df = tempfile.TemporaryFile(dir='/dev/shm'); d = df.fileno()\n"
        "os.write(d, os.urandom(MIB - 1)); dm = mmap.mmap(d, MIB - 1); kinds[k] = lambda: content(d)"
    ),
}
#: Kinds that CRIU fills: two that are sealed against writes, and one that is mapped privately.
LEFT = 3


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    folder = tmp_path / "puppet"
    folder.mkdir()
    puppet = Puppet(folder)
    puppet.do(HELPERS)
    yield puppet
    puppet.end()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with (
        LoopThread() as loop,
        tempfile.TemporaryDirectory(prefix="icecore-test-", dir="/dev/shm") as workdir,
    ):
        yield Store.make(loop, tmp_path / "repository", Path(workdir))


def dumped(
    pid: int, store: Store, pre_copy: str = "on", events: Events | None = None
) -> tuple[str, int, int]:
    """Dump; return the snapshot, the bytes that CRIU was kept from seeing, and the bytes stored."""
    events = events or Events()
    options = DumpOptions(pre_copy=pre_copy)  # type: ignore[arg-type]
    result = store.dump(pid, options, events=events)
    (window,) = [e for e in events.named("dump.window") if e.fields["state"] == "end"]
    return result.snapshot, int(str(window.fields["hidden"])), result.sizes.stored


@contextmanager
def restored(store: Store, snapshot: str, mode: str) -> Iterator[tuple[Restored, int]]:
    """Restore the tree, with all its memory; yield how many objects were filled, too."""
    events = Events()
    options = RestoreOptions(mode=mode, workdir=str(store.workdir), detach=False)  # type: ignore[arg-type]
    tree = restore(store.repository, store.loop, snapshot, options, emit=events)
    try:
        tree.wait_resident(60)
        begun = [e for e in events.named("restore.shared") if e.fields["state"] == "begin"]
        yield tree, int(str(begun[0].fields["objects"])) if begun else 0
    finally:
        for pid in procfs.tree(tree.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        tree.wait(20)


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


def end_tree(puppet: Puppet) -> None:
    """End the puppet and its children, and wait until their pids are free."""
    pids = procfs.tree(puppet.pid)
    puppet.end()
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, f"processes {pids} do not end"
        time.sleep(0.01)


def rewind(puppet: Puppet, step: int) -> None:
    """Forget what the puppet was told since a snapshot: its restored process would be told again."""
    for number in range(step, puppet._step):
        for word in ("do", "said"):
            (puppet.folder / f"{word}{number}").unlink(missing_ok=True)
    puppet._step = step


def digests(puppet: Puppet) -> dict[str, object]:
    read: dict[str, object] = json.loads((puppet.folder / "digests").read_text())
    return read


def hold(puppet: Puppet, kind: str, code: str) -> None:
    puppet.do(f"k = {kind!r}\n{code}")


def test_every_kind_comes_back(puppet: Puppet, store: Store) -> None:
    puppet.do(f"place = {str(store.workdir)!r}")
    for kind, code in KINDS.items():
        hold(puppet, kind, code)
    _, hidden, _ = dumped(puppet.pid, store)
    assert hidden >= 20 * MIB
    for change in ("a", "mm", "fm", "nm"):
        puppet.do(
            f"{change}[MIB : MIB + 5] = b'again'; {change}[4 * MIB + 8 : 4 * MIB + 20] = bytes(12)"
        )
    puppet.do("tell()")
    before = digests(puppet)
    assert set(before) == set(KINDS)
    step = puppet._step
    snapshot, again, stored = dumped(puppet.pid, store, "off")
    assert again >= 20 * MIB
    assert stored < 8 * MIB  # most of the parent's cells are still true
    recorded = store.read(snapshot).content("file", f"{store.workdir}/file")
    assert [5 * MIB, hashlib.sha256(recorded).hexdigest()] == before["file on tmpfs"]
    puppet.do("nm[7:12] = b'later'")
    puppet.end()
    for mode in ("full", "lazy"):
        rewind(puppet, step)
        with restored(store, snapshot, mode) as (tree, objects):
            assert objects == len(KINDS) - LEFT - 2  # the files are none
            tell(puppet, "tell()")
            assert digests(puppet) == before, mode
            tell(
                puppet,
                "for f in (sf, wf):\n try: os.pwrite(f, b'x', 0)\n except PermissionError: pass\n else: 1 / 0",
            )
            tell(
                puppet,
                "wm[5:6] = b'x'; a[2 * MIB + 5 : 2 * MIB + 6] = b'x'; os.pwrite(rm and mf, b'y', 9)",
            )
            _, hidden, _ = dumped(tree.pid, store)
            assert hidden >= 20 * MIB


def test_processes_still_share_it(puppet: Puppet, store: Store) -> None:
    """One process maps all of it, one a part of it, one may only read it, and one alone has a second
    object that its parent has left.
    """
    puppet.do(
        "m = mmap.mmap(-1, 4 * MIB); m[:] = os.urandom(4 * MIB); all = at(m)\n"
        "f = memfd('left', 3 * MIB); left = libc.mmap(0, 3 * MIB, 3, 1, f, 0)\n"
        "put(left, os.urandom(3 * MIB)); open('left', 'wb').write(ctypes.string_at(left, 3 * MIB))\n"
        "parts = os.fork()\n"
        "if parts == 0:\n"
        "    os.close(f); libc.munmap(left, 3 * MIB); libc.munmap(all, 2 * MIB)\n"
        "    count = ctypes.c_uint.from_address(all + 3 * MIB)\n"
        "    while True: count.value += 1; time.sleep(0.01)\n"
        "reads = os.fork()\n"
        "if reads == 0:\n"
        "    os.close(f); libc.munmap(left, 3 * MIB); libc.mprotect(all, 4 * MIB, 1)\n"
        "    while True:\n"
        "        if m[100:105] == b'hello' and not os.path.exists('seen'): open('seen', 'w').close()\n"
        "        time.sleep(0.01)\n"
        "keeps = os.fork()\n"
        "if keeps == 0:\n"
        "    os.close(f); libc.munmap(all, 4 * MIB); seen = ctypes.string_at(left, 3 * MIB)\n"
        "    while not os.path.exists('tell'): time.sleep(0.01)\n"
        "    open('.told', 'wb').write(ctypes.string_at(left, 3 * MIB)); os.rename('.told', 'told')\n"
        "    time.sleep(1000)\n"
        "os.close(f); libc.munmap(left, 3 * MIB)"
    )
    snapshot, hidden, _ = dumped(puppet.pid, store)
    assert hidden >= 7 * MIB
    assert len(store.read(snapshot).keys("shared")) == 2
    end_tree(puppet)
    with restored(store, snapshot, "full") as (_, objects):
        assert objects == 2
        tell(
            puppet,
            "m[100:105] = b'hello'; first = m[3 * MIB : 3 * MIB + 4]; end = time.monotonic() + 10\n"
            "open('tell', 'w').close()\n"
            "while m[3 * MIB : 3 * MIB + 4] == first or not os.path.exists('seen') or "
            "not os.path.exists('told'):\n"
            "    assert time.monotonic() < end; time.sleep(0.01)",
        )
        assert (puppet.folder / "told").read_bytes() == (puppet.folder / "left").read_bytes()


def test_objects_that_change_between_pre_copy_and_window(puppet: Puppet, store: Store) -> None:
    """One shrinks, one grows, one loses a part, one is replaced, one is made."""
    names = ("shrinks", "grows", "punched", "goes")
    puppet.do(
        "files = {}\n"
        f"for name in {names!r}:\n"
        "    files[name] = f = memfd(name, 0); os.write(f, os.urandom(4 * MIB))\n"
        "    kinds[name] = lambda f=f: opened(f)"
    )
    code = (
        "os.ftruncate(files['shrinks'], MIB + 5); os.pwrite(files['grows'], b'more', 6 * MIB)\n"
        "libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]\n"
        "assert libc.fallocate(files['punched'], 3, MIB + 4096, MIB) == 0\n"
        "os.close(files.pop('goes')); new = memfd('new', 3 * MIB); os.write(new, os.urandom(MIB))\n"
        "kinds['goes'] = lambda: opened(new); tell()"
    )
    events = Events({("dump.criu", "begin"): lambda _: puppet.do(code)})
    snapshot, hidden, _ = dumped(puppet.pid, store, events=events)
    assert hidden >= 8 * MIB
    before = digests(puppet)
    puppet.end()
    with restored(store, snapshot, "lazy") as (_, objects):
        assert objects == 4
        tell(puppet, "tell()")
        assert digests(puppet) == before


def test_a_process_that_truncates_all_the_time(puppet: Puppet, store: Store) -> None:
    puppet.do(
        "f = memfd('restless', 0); g = memfd('calm', 2 * MIB); os.pwrite(g, os.urandom(2 * MIB), 0)\n"
        "if os.fork() == 0:\n"
        "    data = os.urandom(2 * MIB)\n"
        "    while True: os.ftruncate(f, 0); os.pwrite(f, data, 0); os.ftruncate(f, MIB + 3)\n"
        "kinds['calm'] = lambda: opened(g)"
    )
    puppet.do("tell()")
    before = digests(puppet)
    for _ in range(3):
        snapshot, _, _ = dumped(puppet.pid, store)
    end_tree(puppet)
    with restored(store, snapshot, "full"):
        tell(puppet, "tell()")
        assert digests(puppet) == before


def test_ranges_that_share_a_page_are_joined() -> None:
    ranges = np.array([(0, MIB + 3), (MIB + 3, 2 * MIB), (3 * MIB, 3 * MIB + 1)], np.uint64)
    pages = [(int(row["address"]), int(row["pages"])) for row in _merged(ranges)]
    assert pages == [(0, 2 * MIB // PAGE), (3 * MIB, 1)]


def test_memory_on_huge_pages_is_left_to_criu(puppet: Puppet, store: Store) -> None:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text(str(int(before) + 6))
        if int(setting.read_text()) < int(before) + 6:
            pytest.skip("this machine has no room for huge pages")
        puppet.do(
            "h = memfd('h', 4 * MIB, 4); hm = mmap.mmap(h, 4 * MIB); hm[5 : MIB + 5] = os.urandom(MIB)\n"
            "ha = libc.mmap(0, 2 * MIB, 3, 0x40021, -1, 0); put(ha, b'h' * MIB)\n"
            "kinds['memfd'] = lambda: seen(hm); kinds['a'] = lambda: ctypes.string_at(ha, MIB).decode()\n"
            "n = mmap.mmap(-1, 2 * MIB); n[:] = os.urandom(2 * MIB); kinds['n'] = lambda: seen(n); tell()"
        )
        expected = digests(puppet)
        snapshot, _, _ = dumped(puppet.pid, store)
        puppet.end()
        with restored(store, snapshot, "full") as (_, objects):
            assert objects == 1
            tell(puppet, "tell()")
            assert digests(puppet) == expected
    finally:
        puppet.end()
        setting.write_text(before)


#: Prints the digest of everything that it holds, again and again.
PRINTS = """
import ctypes, hashlib, mmap, os, sys, time
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p; size = 2 << 20
f = os.memfd_create('f'); os.ftruncate(f, size)
segment = libc.shmat(libc.shmget(5, size, 0o1600), None, 0)
held = [mmap.mmap(-1, size), mmap.mmap(f, size), (ctypes.c_char * size).from_address(segment)]
for one in held: one[:] = os.urandom(size)
while True:
    print(hashlib.sha256(b"".join(one[:] for one in held)).hexdigest(), flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_job_with_a_root_of_its_own(mode: str, store: Store, tmp_path: Path) -> None:
    """No path of the restorer's exists where CRIU makes the objects."""
    registry = Registry(tmp_path / "jobs")
    isolation = Isolation(network=True, root=True)
    job = registry.start([sys.executable, "-S", "-c", PRINTS], name="job", isolation=isolation)
    jobs = [job]

    def printed(more_than: int) -> list[str]:
        end = time.monotonic() + 20
        while len(lines := jobs[-1].log_path("stdout").read_text().split()) <= more_than:
            assert time.monotonic() < end, jobs[-1].log_path("stderr").read_text()
            time.sleep(0.01)
        return lines

    try:
        printed(2)
        target = Target(job.pid, job.name, record=job.record())
        snapshot = store.dump(target, DumpOptions(pre_copy="on")).snapshot
        before = printed(0)
        options = RestoreOptions(mode=mode, workdir=str(store.workdir))  # type: ignore[arg-type]
        tree = restore(store.repository, store.loop, snapshot, options, registry=registry)
        assert tree.job is not None
        jobs.append(tree.job)
        tree.wait_resident(60)
        lines = printed(len(before) + 3)
        assert set(lines) == {before[0]}
    finally:
        for one in jobs:
            if one.alive:
                one.kill(9)
                one.wait(10)


@pytest.mark.parametrize("streamed", [True, False])
def test_criu_reads_it_from_images_where_nothing_can_fill_it(
    streamed: bool, puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the reverse: what CRIU wrote into its images is filled."""
    for kind in ("anonymous", "memfd", "segment"):
        hold(puppet, kind, KINDS[kind])
    puppet.do("tell()")
    before = digests(puppet)
    if streamed:
        result = store.dump(puppet.pid, DumpOptions(memory="streamed"))
        snapshot = result.snapshot
    else:
        snapshot, _, _ = dumped(puppet.pid, store)
        monkeypatch.setattr(restored_files, "can_fill_shared", lambda: False)
    puppet.end()
    with restored(store, snapshot, "full") as (_, objects):
        assert objects == (3 if streamed else 0)
        tell(puppet, "tell()")
        assert digests(puppet) == before


@pytest.mark.parametrize("broken", ["open", "fill"])
def test_nothing_runs_if_it_cannot_be_filled(
    broken: str, puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet.do(KINDS["anonymous"].replace("[k]", "['a']"))
    snapshot, _, _ = dumped(puppet.pid, store)
    pid = puppet.pid
    puppet.end()

    def fail(*_: object) -> None:
        raise RestoreFailed("as planned")

    if broken == "open":
        monkeypatch.setattr(shared_fill.SharedFill, "_take", fail)
    else:
        monkeypatch.setattr(shared_fill.FileWriter, "place", fail)
    with (
        pytest.raises(RestoreFailed, match="as planned"),
        restored(store, snapshot, "full"),
    ):
        pass
    assert not Path(f"/proc/{pid}").exists()
    assert not any(store.workdir.glob("icecore-restore-*"))


def test_a_restore_that_fails_does_not_wait_for_a_frozen_cgroup(
    puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of one object are being allocated when the next one fails."""
    puppet.do("held = [mmap.mmap(-1, 2 * MIB) for _ in range(2)]")
    puppet.do("for one in held: one[:] = os.urandom(2 * MIB)")
    snapshot, _, _ = dumped(puppet.pid, store)
    puppet.end()
    opened, take = [], shared_fill.SharedFill._take

    def take_one(self: shared_fill.SharedFill, message: Message) -> None:
        if opened:
            assert eventually(lambda: (group / "cgroup.procs").read_text())
            raise RestoreFailed("as planned")
        opened.append(message)
        take(self, message)

    monkeypatch.setattr(shared_fill.SharedFill, "_take", take_one)
    with frozen_group() as group:
        monkeypatch.setattr(shared_fill, "paying_group", lambda _: group)
        began = time.monotonic()
        with (
            pytest.raises(RestoreFailed, match="as planned"),
            restored(store, snapshot, "full"),
        ):
            pass
        assert time.monotonic() - began < charging._SECONDS / 4
        assert eventually(lambda: not (group / "cgroup.procs").read_text())


def test_a_mapped_file_in_memory_is_stored_before_the_window(puppet: Puppet, store: Store) -> None:
    puppet.do(f"place = {str(store.workdir)!r}; k = 'file'\n{KINDS['file on tmpfs']}")
    events = Events()
    result = store.dump(puppet.pid, DumpOptions(pre_copy="on"), events=events)
    (pre,) = [e for e in events.named("dump.precopy") if e.fields["state"] == "end"]
    assert int(str(pre.fields["stored"])) >= 3 * MIB
    assert result.pre_copied >= 3 * MIB
    recorded = store.read(result.snapshot)
    content = recorded.content("file", f"{store.workdir}/file")
    assert content[: 5 * MIB] == (store.workdir / "file").read_bytes()


def test_the_jobs_cgroup_pays_for_what_is_filled(puppet: Puppet, store: Store) -> None:
    puppet.do("m = mmap.mmap(-1, 32 * MIB); m[:] = os.urandom(MIB) * 32")
    snapshot, _, _ = dumped(puppet.pid, store)
    end_tree(puppet)
    with memory_group() as (group, groups):
        owner = replace(Identity.of_process(os.getpid()), cgroups=groups)
        options = RestoreOptions(workdir=str(store.workdir), detach=False, identity=owner)
        tree = restore(store.repository, store.loop, snapshot, options, emit=Events())
        try:
            tree.wait_resident(60)
            assert used(group) >= 32 << 20
        finally:
            for pid in procfs.tree(tree.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            tree.wait(20)
