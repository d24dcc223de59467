"""CRIU's images as they are read: against pycriu, against the process they were made of, and
against damage.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.errors import Damaged
from icecore.host.criu import images as im
from icecore.host.criu.pagemap_image import (
    ENTRY,
    PE_LAZY,
    PE_PRESENT,
    decode_pagemap,
    encode_pagemap,
    load_pagemap,
    merge_entries,
)
from icecore.host.criu.program import DumpArguments
from icecore.host.criu.protobuf import Message, WireError
from icecore.host.kernel import procfs
from tests.host.criu_harness import images_folder, parametrize, worker
from tests.host.criu_run import LazyDump

#: Magic of memfd.img: name 1, size 4, shared memory 5 (images/memfd.proto).
MEMFD_INODE = 0x48453499

TREE = """
import tempfile
m = os.memfd_create("a memfd"); os.ftruncate(m, 3 * 4096); os.pwrite(m, b"x" * 5000, 0)
s = anonymous(64 * 4096, 3, 0x21); ctypes.memset(s, 7, 10 * 4096)
locked = anonymous(4096); libc.mlock(ctypes.c_void_p(locked), 4096)
none = anonymous(8 * 4096); ctypes.memset(none, 3, 8 * 4096); libc.mprotect(none, 8 * 4096, 0)
ghost = tempfile.TemporaryFile(dir="/tmp"); ghost.write(b"gone"); ghost.flush()
zombie = os.fork()
if zombie == 0: os._exit(7)
child = os.fork()
if child == 0:
    import time
    while True: time.sleep(0.01)
"""


@parametrize
def test_what_the_images_say_is_what_the_processes_are(criu):
    with worker(code=TREE) as it, images_folder() as folder:
        tree = procfs.tree(it.pid)
        with LazyDump(criu, it.pid, folder, DumpArguments(network_lock="skip")) as dump:
            dump.wait_serving(30)
            maps = {pid: procfs.read_maps(pid, vm_flags=True) for pid in tree}
            descriptors = procfs.descriptors(it.pid)
            dump.finish(30)

        tasks = im.load_pstree(folder)
        assert (
            [t.pid for t in tasks] == tree
            and tasks[0].session == it.pid
            and tasks[1].parent == it.pid
        )
        (zombie,) = (t.pid for t in tasks if im.load_core(folder, t.pid).state == im.DEAD)
        alive = [t.pid for t in tasks if t.pid != zombie]
        assert len(tasks) == 3 and im.load_core(folder, it.pid).command.startswith("python")
        assert im.load_core(folder, zombie).exit_code == 7 << 8
        areas = im.RseqAreas(folder).addresses()  # glibc has one for each thread
        writable = [
            m for pid in alive for m in maps[pid] if m.private and m.protection & procfs.PROT_WRITE
        ]
        assert areas and all(any(m.start <= area < m.end for m in writable) for area in areas)
        processes, shared = im.pagemaps(folder)
        assert processes == sorted(alive) and len(shared) >= 2

        for pid in alive:
            mm = im.load_mm(folder, pid)
            kernels = im.VMA_VVAR | im.VMA_VDSO | im.VMA_VSYSCALL
            # CRIU makes one of [vvar] and [vvar_vclock]
            theirs = [m for m in maps[pid] if not m.path.startswith("[v")]
            ours = mm.vmas[mm.vmas["status"] & kernels == 0]
            assert [(int(v["start"]), int(v["end"]), int(v["protection"])) for v in ours] == [
                (m.start, m.end, m.protection) for m in theirs
            ]
            lazy = mm.lazy()
            _, entries = load_pagemap(folder / f"pagemap-{pid}.img")
            # every page that CRIU calls lazy lies in a VMA that is, and every page of another VMA
            # is not
            owner = np.searchsorted(mm.vmas["start"], entries["address"], side="right") - 1
            is_lazy = entries["flags"] & PE_LAZY != 0
            assert lazy[owner][is_lazy].all()
            # in a lazy VMA only stack pages are left to CRIU
            eager = lazy[owner] & ~is_lazy
            assert entries["pages"][eager].sum() <= 4
            assert not lazy[mm.vmas["status"] & kernels != 0].any()
            for mine, mapping in zip(lazy[mm.vmas["status"] & kernels == 0], theirs, strict=True):
                if mapping.path in ("", "[heap]", "[stack]") and mapping.private:
                    assert mine == ("lo" not in mapping.vm_flags), mapping
                else:
                    assert not mine, mapping

        files = im.load_files(folder)
        count = next(f for f in files if f.path == str(it.file))
        mine = next(d for d in descriptors if d.target == str(it.file))
        assert (
            count.size == mine.size
            and count.position == mine.position
            and count.flags & 3 == mine.flags & 3
        )
        (remap,) = im.load_remaps(folder)
        assert remap.kind == im.GHOST and "/tmp/" in next(
            f.path for f in files if f.id == remap.original
        )
        assert (folder / f"ghost-file-{remap.target:x}.img").exists()
        # CRIU treats shared anonymous memory as memfds too
        memfds = im.read_image(folder / "memfd.img", MEMFD_INODE)
        (memfd,) = (m for m in memfds if m.text(1).endswith("a memfd"))
        assert memfd.integer(4) == 3 * 4096 and memfd.integer(5) in shared
        assert any(
            f.id == im.load_mm(folder, it.pid).executable and "python" in f.path for f in files
        )


def dump_into(criu, folder):
    with worker() as it, LazyDump(criu, it.pid, folder, DumpArguments(network_lock="skip")) as dump:
        dump.wait_serving(30)
        dump.finish(30)
        return it.pid


@parametrize
def test_pycriu_agrees(criu):
    """In a process of its own: only one pycriu can be imported in each."""
    with images_folder() as folder:
        pid = dump_into(criu, folder)
        code = f"""
        import sys, numpy as np
        from pathlib import Path
        sys.path.append({str(Path(__file__).parents[2])!r})
        from icecore.host.criu.program import Criu
        from icecore.host.criu import images as im, pagemap_image as pi
        from tests.host.pycriu_images import image_as_dict, write_dict
        criu = Criu(Path({str(criu.path)!r}), {criu.version})
        folder = Path({str(folder)!r})
        known = 0
        for path in sorted(folder.glob("*.img")):
            if path.name.startswith("pages-"):
                continue
            image = image_as_dict(path, criu)
            write_dict(folder / "again", image, criu)
            assert (folder / "again").read_bytes() == path.read_bytes(), path
            known += 1
        assert known > 8
        theirs = image_as_dict(folder / "pagemap-{pid}.img", criu)["entries"]
        number, ours = pi.load_pagemap(folder / "pagemap-{pid}.img", merge=False)
        assert number == theirs[0]["pages_id"]
        theirs = [(e["vaddr"], e.get("nr_pages") or e["compat_nr_pages"], e["flags"]) for e in theirs[1:]]
        assert [tuple(map(int, e)) for e in ours] == theirs
        vmas = image_as_dict(folder / "mm-{pid}.img", criu)["entries"][0]["vmas"]
        mm = im.load_mm(folder, {pid})
        assert [(v["start"], v["end"], v["pgoff"], v["shmid"], v["prot"], v["flags"], v["status"], v.get("madv", 0)) for v in vmas] == [
            tuple(map(int, v)) for v in mm.vmas
        ]
        print("agreed")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == "agreed\n", done.stderr


@parametrize
def test_images_survive_decoding_and_encoding(criu):
    with images_folder() as folder:
        pid = dump_into(criu, folder)
        for name, magic in {
            "files.img": im.FILES,
            "pstree.img": im.PSTREE,
            "inventory.img": im.INVENTORY,
            f"mm-{pid}.img": im.MM,
        }.items():
            data = (folder / name).read_bytes()
            messages = im.decode_image(data, magic, name)
            assert im.encode_image(messages, magic) == data
        messages = im.read_image(folder / "files.img", im.FILES)
        regular = messages[0].message(3)
        regular.set(6, "/somewhere/else")
        messages[0].set(3, regular)
        im.write_image(folder / "files.img", messages, im.FILES)
        assert im.load_files(folder)[0].path == "/somewhere/else"


ENTRIES = st.lists(
    st.tuples(
        st.integers(0, (1 << 57) // 4096 - 1),
        st.integers(1, 1 << 31),
        st.sampled_from([1, 2, 4, 6]),
    ),
    max_size=40,
)


@given(ENTRIES, st.integers(0, 1 << 31), st.sampled_from([(4, 1), (4, 2)]))
@settings(deadline=None)
def test_pagemaps_come_back(entries, number, version):
    array = np.array([(a * 4096, n, f) for a, n, f in entries], ENTRY)
    data = encode_pagemap(number, array, version)
    back = decode_pagemap(data)
    assert back[0] == number and (back[1] == array).all()
    for cut in {len(data) - 1, len(data) // 2, 7, 11} - {8 + 4}:
        try:
            assert len(decode_pagemap(data[: max(0, cut)])[1]) < len(array) or not len(array)
        except Damaged:
            pass


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_damaged_or_decoded(data):
    head = im.encode_image([], im.MM)
    for name in (data, head + data, bytes.fromhex("1943565425400856") + data):
        try:
            decode_pagemap(name)
        except Damaged:
            pass
        try:
            im.decode_image(name, im.MM, "mm")
        except Damaged:
            pass
        try:
            assert Message.decode(Message.decode(name).encode()) == Message.decode(name)
        except WireError:
            pass


def test_merging_joins_neighbours_of_equal_flags():
    page = 4096
    entries = np.array(
        [
            (0, 2, PE_LAZY),
            (2 * page, 3, PE_LAZY),
            (5 * page, 1, PE_PRESENT),
            (6 * page, 1, PE_PRESENT),
            (8 * page, 1, PE_PRESENT),
        ],
        ENTRY,
    )
    assert merge_entries(entries).tolist() == [
        (0, 5, PE_LAZY),
        (5 * page, 2, PE_PRESENT),
        (8 * page, 1, PE_PRESENT),
    ]
    assert len(merge_entries(entries[:0])) == 0


def test_half_a_million_entries_take_no_loop():
    entries = np.zeros(500_000, ENTRY)
    entries["address"] = 0x7F0000000000 + np.arange(500_000) * 8192
    entries["pages"], entries["flags"] = 1, PE_LAZY
    data = encode_pagemap(1, entries, (4, 2))
    begun = time.perf_counter()
    assert (decode_pagemap(data)[1] == entries).all()
    assert time.perf_counter() - begun < 5  # 0.3 s here; a message object each would take longer


def test_wire_format():
    message = Message()
    message.set(1, 300)
    message.set(2, "text")
    message.set(3, Message([(1, 0, 5)]))
    message.fields += [
        (4, 0, 1),
        (4, 0, 2),
        (5, 1, 1 << 60),
        (6, 5, 7),
        (4, 2, b"\x03\xac\x02"),
        (7, 0, (1 << 64) - 5),
        (8, 0, 3),
    ]
    back = Message.decode(message.encode())
    assert (
        back == message
        and back.integer(1) == 300
        and back.text(2) == "text"
        and back.message(3).integer(1) == 5
    )
    assert (
        back.integers(4) == [1, 2, 3, 300]
        and back.integer(5) == 1 << 60
        and back.signed(7) == -5
        and back.zigzag(8) == -2
    )
    assert (
        back.integer(9, 4) == 4
        and back.zigzag(9, -1) == -1
        and back.signed(9, -1) == -1
        and not back.has(9)
    )
    back.set(4, 9)
    assert back.integers(4) == [9] and len(back.fields) == len(message.fields) - 2
    for bad in (b"\x0a\x05a", b"\x08", b"\x08" + b"\xff" * 11, b"\x0b", b"\x09abc"):
        with pytest.raises(WireError):
            Message.decode(bad)
    with pytest.raises(WireError):
        back.integer(2)
