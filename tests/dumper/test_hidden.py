"""Memory that CRIU is kept from seeing: the snapshot, and the pagemap that a restore uses, are the
same as if CRIU had seen everything.
"""

from __future__ import annotations

import numpy as np
import pytest

from icecore.dumper.freeze.window import Window
from icecore.dumper.memory.cells import EXTENT
from icecore.dumper.memory.early import EarlyScan
from icecore.dumper.memory.hidden import clip
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed, PreflightRefused
from icecore.host.criu.hidden import RANGE, hides
from icecore.host.criu.pagemap_image import PE_LAZY, PE_PRESENT, Entries, decode_pagemap
from icecore.host.criu.program import PREFIX, find_criu
from icecore.host.kernel.pagemap import guards_told

from .puppet import Puppet
from .world import Events, Recorded, Stillness, Store, assert_same_memory, page_runs

PAGE = 4096

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        not hides(find_criu()),
        reason="needs a C compiler when icecore is built, Linux 6.7, and from 6.13 on CRIU 4.2",
    ),
]

#: Code → whether its pages are restored lazily.
KINDS = {
    "plain": ("m = private(9 * MIB); put(m, os.urandom(3 * MIB)); put(m + 5 * MIB, b'x')", True),
    "heap": (
        "libc.sbrk.restype = ctypes.c_void_p; m = libc.sbrk(4 * MIB); put(m + MIB, os.urandom(2 * MIB))",
        True,
    ),
    "locked": (
        "m = private(3 * MIB); put(m, os.urandom(3 * MIB)); assert libc.mlock(ctypes.c_void_p(m), 3 * MIB) == 0",
        False,
    ),
    "no access": (
        "m = private(3 * MIB); put(m, os.urandom(2 * MIB)); libc.mprotect(m, 3 * MIB, 0)",
        True,
    ),
    "executable": ("m = private(3 * MIB, protection=7); put(m, os.urandom(2 * MIB))", True),
    "grows down": ("m = private(3 * MIB, more=0x100); put(m + MIB, os.urandom(MIB))", True),
    "droppable": ("m = libc.mmap(None, 3 * MIB, 3, 0x28, -1, 0); put(m, os.urandom(MIB))", None),
    # CRIU asks for these at once. It calls none of the droppable pages its own.
    "small droppable": (
        "m = private(4 * MIB); m += -m % (2 * MIB); libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]; libc.munmap(m, 2 * MIB)\n"
        "for n in range(4):\n"
        "    at = m + n * 0x10000\n"
        "    assert libc.mmap(ctypes.c_void_p(at), 0x8000, 3, 0x100030 | (8 if n % 2 else 2), -1, 0) == at; put(at, os.urandom(0x8000))",
        None,
    ),
    # Unnamed if the kernel has no names for anonymous memory.
    "named": (
        "m = private(3 * MIB); put(m, os.urandom(MIB)); libc.prctl(0x53564d41, 0, ctypes.c_void_p(m), 3 * MIB, b'a b x')",
        True,
    ),
    # CRIU makes both readable, so they become one, and asks for both at once.
    "two that merge": (
        "m = private(12 * MIB); m += -m % (2 * MIB) + 2 * MIB; libc.mprotect(m - 2 * MIB, 2 * MIB, 1); libc.mprotect(m + 2 * MIB, 2 * MIB, 2)\n"
        "put(m, os.urandom(2 * MIB)); libc.mprotect(m, MIB, 1); libc.mprotect(m + MIB, MIB, 0)",
        True,
    ),
    "large ones that merge": (
        "m = private(9 * MIB); put(m, os.urandom(9 * MIB)); libc.mprotect(m, 3 * MIB, 1); libc.mprotect(m + 3 * MIB, 3 * MIB, 0)",
        True,
    ),
    "zeros": (
        "m = private(3 * MIB); put(m, bytes(MIB)); [ctypes.string_at(m + 2 * MIB + i, 1) for i in range(0, MIB, 4096)]",
        True,
    ),
    "shared": ("m = libc.mmap(None, 3 * MIB, 3, 0x21, -1, 0); put(m, os.urandom(2 * MIB))", None),
    "file": (
        "open('f', 'wb').write(os.urandom(3 * MIB)); f = os.open('f', os.O_RDONLY); m = libc.mmap(None, 3 * MIB, 3, 2, f, 0); os.close(f); "
        "put(m + MIB, os.urandom(MIB))",
        False,
    ),
    "small file": (
        "open('f', 'wb').write(os.urandom(MIB)); f = os.open('f', os.O_RDONLY); m = libc.mmap(None, MIB, 3, 2, f, 0); os.close(f); "
        "put(m + 4096, os.urandom(70000)); libc.mprotect(m, 8192, 1)",
        None,
    ),
    "code of a file": (
        "open('f', 'wb').write(os.urandom(3 * MIB)); f = os.open('f', os.O_RDONLY); m = libc.mmap(None, 3 * MIB, 7, 2, f, 0); os.close(f); "
        "put(m + MIB, os.urandom(MIB))",
        False,
    ),
    "small": ("m = private(70000); put(m, os.urandom(66000))", None),
    "inherited": (
        "m = private(3 * MIB); put(m, os.urandom(2 * MIB)); child = os.fork()\n"
        "if child == 0: put(m + MIB, bytes(70000)); time.sleep(1000)\n"
        "put(m + MIB, b'1' * 70000)",
        True,
    ),
    "thread's stack": (
        "import threading; threading.stack_size(8 * MIB); stop = threading.Event(); libc.pthread_self.restype = ctypes.c_ulong; tops = []\n"
        "def wait(): tops.append(libc.pthread_self()); stop.wait()\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "while not tops: time.sleep(0.01)\n"
        "m = (tops[0] >> 12 << 12) - 2 * MIB",
        None,
    ),
}


def watched(
    puppet: Puppet, store: Store, options: DumpOptions | None = None, *, lost: bool = False
) -> Entries:
    """Return the pagemap of a snapshot that passes its checks; ``lost``: pages may be missing."""
    still = Stillness()
    events = Events({("dump.files", "begin"): lambda _: still.look(puppet.pid)})
    recorded = store.read(store.dump(puppet.pid, options, events=events).snapshot)
    if not lost:
        assert_same_memory(recorded, still)
    return pagemap_of(recorded, puppet.pid)


def pagemap_of(recorded: Recorded, pid: int) -> Entries:
    """Return the pagemap of a process and check that it has exactly the recorded pages."""
    _, entries = decode_pagemap(recorded.content("image", f"pagemap-{pid}.img"))
    pages = set(recorded.pages(recorded.space("process", str(pid))))
    assert pages_of(entries).keys() == pages
    return entries


def pages_of(entries: Entries) -> dict[int, int]:
    """Map addresses to flags."""
    found = {}
    for address, pages, flags in entries.tolist():
        for at in range(address, address + pages * PAGE, PAGE):
            assert at not in found
            found[at] = flags
    return found


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_recorded_as_if_nothing_were_hidden(
    kind: str, early: bool, puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lazy = KINDS[kind]
    puppet.do(code)
    address = puppet.number("m")
    if not early:
        finish = EarlyScan.finish
        monkeypatch.setattr(EarlyScan, "finish", lambda scan: [finish(scan), None][1])
    ours = pages_of(watched(puppet, store, lost="droppable" in kind))
    prepare = Window.prepare
    monkeypatch.setattr(
        Window,
        "prepare",
        lambda window, command, hidden, *rest: prepare(window, command, None, *rest),
    )
    theirs = pages_of(watched(puppet, store, lost="droppable" in kind))
    # What Python itself did between the two dumps does not matter here.
    area = range(address, address + 9 * (1 << 20), PAGE)
    assert ours.keys() & set(area) == theirs.keys() & set(area)
    # Where some thread's stack pointer is the first byte of a page, CRIU writes all pages itself
    # (criu/mem.c: is_stack).
    if PE_LAZY in theirs.values():
        assert {at: ours[at] for at in area if at in ours} == {
            at: theirs[at] for at in area if at in theirs
        }
    assert kind in ("shared", "droppable") or ours.keys() & set(area)
    if lazy is not None:
        assert {ours[a] for a in area if a in ours and a < address + (1 << 20) * 3} == {
            PE_LAZY if lazy else PE_PRESENT
        }


#: 24 MiB, anonymous or of a file, of which parts are written, protected, unmapped, locked, shared, advised about. Parts are
#: executable or guard pages, not both: CRIU runs what it injects in the first mapping that is
#: executable, guard pages or not.
_LAYOUT = """
import random
chosen = random.Random({seed})
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 24 * MIB
m = private(size + 2 * MIB)
m += -m % (2 * MIB)
if {of_file}:
    open("f", "wb").write(os.urandom(size))
    f = os.open("f", os.O_RDONLY)
    assert libc.mmap(ctypes.c_void_p(m), size, 3, 0x12, f, 0) == m
    os.close(f)
for _ in range(chosen.randrange(3, 40)):
    first = chosen.randrange(size // 4096)
    if chosen.random() < 0.5:
        first = first // 256 * 256
    count = min(size // 4096 - first, chosen.choice([1, 3, 100, 256, 500, 512, 513, 1024, 2000]))
    at, length = m + first * 4096, count * 4096
    what = chosen.choice(["write"] * 4 + ["no access"] * 4 + ["read"] * 2 + ["drop"] * 2 + ["unmap", "share", "advise", "lock"] + ["{more}"] * 2)
    if what == "write":
        libc.mprotect(at, length, 3)
        with open("/proc/self/mem", "r+b", 0) as memory:
            memory.seek(at)
            try: memory.write(os.urandom(length))
            except OSError: pass
    elif what == "no access": libc.mprotect(at, length, 0)
    elif what == "read": libc.mprotect(at, length, 1)
    elif what == "execute": libc.mprotect(at, length, 7)
    elif what == "drop": libc.madvise(at, length, chosen.choice([4, 20, 21]))
    elif what == "unmap": libc.munmap(at, length)
    elif what == "guard": libc.madvise(at, length, 102)
    elif what == "share": libc.mmap(at, length, 3, 0x31, -1, 0)
    elif what == "advise": libc.madvise(at, length, chosen.choice([10, 12, 14, 15, 16, 18]))
    elif what == "lock": libc.mlock(ctypes.c_void_p(at), length)
"""


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(4, 300))]
)
def test_a_random_layout(
    seed: int, puppet: Puppet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet.do(
        _LAYOUT.format(
            seed=seed,
            of_file=seed % 3 == 2,
            more="execute" if seed % 2 or not guards_told() else "guard",
        )
    )
    address = puppet.number("m")
    area = set(range(address, address + (24 << 20), PAGE))

    def taken() -> tuple[dict[int, int], dict[int, bytes]]:
        recorded = store.read(store.dump(puppet.pid).snapshot)
        pages = recorded.pages(recorded.space("process", str(puppet.pid)))
        return pages_of(pagemap_of(recorded, puppet.pid)), {
            at: page for at, page in pages.items() if at in area
        }

    flags, pages = taken()
    prepare = Window.prepare
    monkeypatch.setattr(
        Window,
        "prepare",
        lambda window, command, hidden, *rest: prepare(window, command, None, *rest),
    )
    flags_seen, pages_seen = taken()
    assert pages == pages_seen
    if PE_LAZY in flags_seen.values():
        assert all(flags[at] == flags_seen[at] for at in pages)


def test_most_of_it_is_hidden(puppet: Puppet, store: Store) -> None:
    """Without this, all of these tests would pass with a library that does nothing."""
    puppet.do("m = private(64 * MIB); put(m, os.urandom(MIB) * 64)")
    seen = []

    def look(_: object) -> None:
        (images,) = store.workdir.iterdir()
        seen.append(
            pages_of(decode_pagemap((images / f"pagemap-{puppet.pid}.img").read_bytes())[1])
        )
        seen.append((images / "hidden.log").stat().st_size)

    events = Events({("dump.files", "begin"): look})
    store.dump(puppet.pid, events=events)
    (said,) = [
        event.fields["hidden"]
        for event in events.all
        if event.name == "dump.window" and "hidden" in event.fields
    ]
    assert said >= 64 << 20
    address = puppet.number("m")
    assert not any(address <= at < address + (64 << 20) for at in seen[0]) and seen[1] >= 24


def test_a_stream_has_everything(puppet: Puppet, store: Store) -> None:
    puppet.do("m = private(8 * MIB); put(m, os.urandom(8 * MIB))")
    watched(puppet, store, DumpOptions(memory="streamed"))


@pytest.mark.skipif(
    not guards_told(), reason="guard pages can be told from others from Linux 6.15 on"
)
def test_guard_pages(puppet: Puppet, store: Store) -> None:
    puppet.do(
        "m = private(8 * MIB); put(m, os.urandom(8 * MIB)); libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]"
    )
    puppet.do(
        "assert libc.madvise(m + MIB, MIB, 102) == 0; assert libc.madvise(m + 4 * MIB, 4096, 102) == 0"
    )
    if find_criu().version < (4, 2):
        pytest.skip("needs CRIU 4.2")
    result = store.dump(puppet.pid)
    recorded = store.read(result.snapshot)
    address = puppet.number("m")
    pages = set(pages_of(pagemap_of(recorded, puppet.pid)))
    guards = {*range(address + (1 << 20), address + (2 << 20), PAGE), address + (4 << 20)}
    assert not pages & guards and set(range(address, address + (8 << 20), PAGE)) - guards <= pages


@pytest.mark.skipif(
    not guards_told(), reason="guard pages can be told from others from Linux 6.15 on"
)
def test_guard_pages_are_not_lost_by_an_older_criu(puppet: Puppet, store: Store) -> None:
    """The dump is refused. If guard pages appear later, CRIU fails on them, because nothing is
    hidden from it then.
    """
    older = find_criu(PREFIX)
    if older.version >= (4, 2):
        pytest.skip("there is none")
    puppet.do(
        "m = private(8 * MIB); put(m, os.urandom(8 * MIB)); libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]"
    )
    events = Events(
        {
            ("dump.window", "begin"): lambda _: puppet.do(
                "assert libc.madvise(m + MIB, MIB, 102) == 0"
            )
        }
    )
    with pytest.raises(DumpFailed, match="failed"):
        store.dump(puppet.pid, criu=older, events=events)
    with pytest.raises(PreflightRefused, match="guard pages"):
        store.dump(puppet.pid, criu=older)
    assert store.snapshots() == []
    puppet.do("pass")


def test_what_may_not_be_hidden_prevents_the_snapshot(puppet: Puppet, store: Store) -> None:
    puppet.do("m = libc.mmap(None, 3 * MIB, 3, 0x21, -1, 0); put(m, os.urandom(2 * MIB))")
    address = puppet.number("m")

    def lie(_: object) -> None:
        (images,) = store.workdir.iterdir()
        entry = np.array([puppet.pid, address, address + (1 << 20)], "<u8")
        with open(images / "hidden.log", "ab") as file:
            file.write(entry.tobytes())

    with pytest.raises(DumpFailed, match="not private"):
        store.dump(puppet.pid, events=Events({("dump.window", "begin"): lie}))
    puppet.do("pass")


@pytest.mark.parametrize("seed", range(20))
def test_clip(seed: int) -> None:
    random = np.random.default_rng(seed)
    there = random.random(300) < random.choice([0.1, 0.5, 0.9])
    extents = np.array([(a * PAGE, n) for a, n in page_runs(there)], EXTENT)
    edges = np.sort(random.choice(np.arange(301), 2 * int(random.integers(0, 20)), replace=False))
    ranges = np.array([(int(a) * PAGE, int(b) * PAGE) for a, b in edges.reshape(-1, 2)], RANGE)
    wanted = np.zeros(300, np.bool_)
    for a, b in edges.reshape(-1, 2):
        wanted[a:b] = there[a:b]
    found = np.zeros(300, np.int64)
    for address, pages in clip(extents, ranges).tolist():
        found[address // PAGE : address // PAGE + pages] += 1
    assert (found == wanted).all()
