"""The library that CRIU gets keeps private memory from it, nothing else, and nothing that it cannot
write down.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import Damaged
from icecore.host.criu.hidden import read_hidden
from icecore.host.criu.libraries import CRIU_LIBRARY, dump_environment
from icecore.host.kernel import procfs
from icecore.host.kernel.pagemap import guards_told, scan_supported
from icecore.sizes import PAGE
from tests.host.target import target

MIB = 1 << 20

_ASK = """
import sys
from icecore.host.kernel.pagemap import SCAN_GUARD, Pagemap
with Pagemap(int(sys.argv[1])) as pages:
    for start, end, guards in (word.split(",") for word in sys.argv[2:]):
        kinds = {"any_of": SCAN_GUARD, "wanted": SCAN_GUARD} if int(guards) else {}
        print(sum(int(run["end"] - run["start"]) for run in pages.runs(int(start), int(end), **kinds)))
"""

SOURCES = Path(__file__).resolve().parents[2] / "icecore" / "host" / "criu"
_READ = """
#include "process_maps.c"
int main(void)
{
    char line[4096];
    struct mapping found;
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\\n")] = 0;
        if (parse(line, &found))
            printf("%d %lu %lu\\n", found.hideable, found.start, found.end);
    }
    return 0;
}
"""
_LINKS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
folder = os.open(f"/proc/{sys.argv[1]}/map_files", os.O_RDONLY | os.O_DIRECTORY)
print(flush=True)
for line in sys.stdin:
    about, name = ctypes.create_string_buffer(256), line.strip().encode()
    found = [ctypes.get_errno() if libc.fstatat64(folder, name, about, 0x100) else 0]
    file = libc.openat64(folder, name, os.O_RDONLY | os.O_CLOEXEC)
    found.append(ctypes.get_errno() if file < 0 else 0)
    if file >= 0:
        os.close(file)
    print(*found, flush=True)
"""


def build(folder: Path, program: str) -> None:
    """Build a program that contains the library's source."""
    (folder / "main.c").write_text(program)
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-Wno-unused-function", "-Wno-unused-result"]
    command = ["cc", *flags, f"-I{SOURCES}", "-o", "read", "main.c"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)


needs_library = pytest.mark.skipif(
    not (CRIU_LIBRARY.exists() and scan_supported()),
    reason="needs a C compiler when icecore is built, and Linux 6.7",
)


def ask(
    pid: int, *ranges: tuple[int, int] | tuple[int, int, int], hidden: Path | None
) -> list[int]:
    """How many bytes PAGEMAP_SCAN tells CRIU of, range by range; a third number: of guard pages."""
    words = [",".join(map(str, (*one, 0)[:3])) for one in ranges]
    asked = subprocess.run(
        [sys.executable, "-P", "-c", _ASK, str(pid), *words],
        env=dump_environment(str(hidden) if hidden else None),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert not asked.returncode, asked.stderr
    return [int(line) for line in asked.stdout.split()]


@needs_library
def test_private_memory_is_hidden_and_written_down(tmp_path: Path) -> None:
    code = """
    a = anonymous(8 << 20); ctypes.memset(a, 1, 8 << 20)
    b = anonymous(4 << 20); libc.mprotect(b, 4096, 0); ctypes.memset(b + 4096, 1, (4 << 20) - 4096)
    libc.sbrk.restype = ctypes.c_void_p
    c = libc.sbrk(4 << 20); ctypes.memset(c, 1, 4 << 20)
    f = os.memfd_create("x"); os.ftruncate(f, 4 << 20)
    d = libc.mmap(None, 4 << 20, 3, 2, f, 0); ctypes.memset(d + (1 << 20), 1, 1 << 20)
    say(a, b, c, d); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with target(code) as it:
        a, b, c, d = map(int, it.hear())
        heap = -(-c // 4096) * 4096
        b += 4096
        ranges = [
            (a, a + 8 * MIB),
            (b, b + MIB),
            (heap, heap + 3 * MIB),
            (d, d + 4 * MIB),
            (a + MIB, a + 4 * MIB),
        ]
        assert ask(it.pid, *ranges, hidden=None) == [8 * MIB, MIB, 3 * MIB, MIB, 3 * MIB]
        assert read_hidden(file) == {}
        assert ask(it.pid, *ranges, hidden=file) == [0, 0, 0, 0, 0]
        # What was asked for twice is there once.
        assert read_hidden(file)[it.pid].tolist() == sorted(ranges[:4])


@needs_library
def test_of_several_mappings_only_what_may_be_hidden_is(tmp_path: Path) -> None:
    """CRIU asks for several small mappings at once."""
    code = """
    a = anonymous(1 << 20); ctypes.memset(a, 1, 1 << 20)
    f = os.memfd_create("x"); os.ftruncate(f, 1 << 20)
    def over(at, protection, flags): assert libc.mmap(a + at, 1 << 16, protection, flags, f, 0) == a + at; return a + at
    private = over(1 << 16, 3, 0x12); ctypes.memset(private, 2, 1 << 15)
    shared = over(3 << 16, 3, 0x11); ctypes.memset(shared, 3, 1 << 15)
    code = over(5 << 16, 7, 0x12); ctypes.memset(code, 4, 1 << 14)
    libc.munmap(a + (7 << 16), 1 << 16)
    say(a); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with target(code) as it:
        (a,) = map(int, it.hear())
        part = 1 << 16
        assert ask(it.pid, (a + 4096, a + MIB - 4096), hidden=file) == [(1 << 15) + (1 << 14)]
        assert read_hidden(file)[it.pid].tolist() == [
            (a + 4096, a + part),
            (a + part, a + 2 * part),
            (a + 2 * part, a + 3 * part),
            (a + 4 * part, a + 5 * part),
            (a + 6 * part, a + 7 * part),
            (a + 8 * part, a + MIB - 4096),
        ]


@needs_library
def test_an_answer_with_very_many_parts_is_the_kernels(tmp_path: Path) -> None:
    code = """
    a = anonymous(10000 * 8192)
    for i in range(10000):
        libc.mprotect(a + i * 8192, 4096, 1)
    ctypes.memset(a + 4096, 1, 4096)
    say(a); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with target(code) as it:
        (a,) = map(int, it.hear())
        assert ask(it.pid, (a, a + 10000 * 8192), hidden=file) == [4096]
        assert file.stat().st_size == 0


@needs_library
def test_all_else_is_seen(tmp_path: Path) -> None:
    code = """
    shared = anonymous(4 << 20, flags=0x21); ctypes.memset(shared, 1, 4 << 20)
    f = os.memfd_create("x"); os.ftruncate(f, 4 << 20)
    code = libc.mmap(None, 4 << 20, 7, 2, f, 0); ctypes.memset(code, 1, 4 << 20)
    zero = os.open("/dev/zero", os.O_RDWR)
    device = libc.mmap(None, 4 << 20, 3, 2, zero, 0); ctypes.memset(device, 1, 4 << 20)
    guarded = anonymous(4 << 20); libc.madvise(guarded, 1 << 20, 102)
    say(shared, code, device, guarded); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with target(code) as it:
        shared, code, device, guarded = map(int, it.hear())
        seen = ask(
            it.pid,
            (shared, shared + 4 * MIB),
            (code, code + 4 * MIB),
            (device, device + 4 * MIB),
            (guarded, guarded + 4 * MIB, int(guards_told())),
            hidden=file,
        )
    assert seen == [4 * MIB, 4 * MIB, 4 * MIB, MIB if guards_told() else 0]
    assert file.stat().st_size == 0


@needs_library
def test_nothing_is_hidden_that_cannot_be_written_down(tmp_path: Path) -> None:
    with target("a = anonymous(4 << 20); ctypes.memset(a, 1, 4 << 20); say(a); hear()") as it:
        (a,) = map(int, it.hear())
        assert ask(it.pid, (a, a + 4 * MIB), hidden=tmp_path / "none") == [4 * MIB]
        assert ask(it.pid, (a, a + 4 * MIB), hidden=Path("/dev/full")) == [4 * MIB]


@needs_library
def test_a_process_with_very_many_mappings(tmp_path: Path) -> None:
    code = """
    a = anonymous(40000 * 8192)
    for i in range(20000):
        libc.mprotect(a + i * 16384, 8192, 1)
    b = anonymous(4 << 20); ctypes.memset(b, 1, 4 << 20)
    say(a, b); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with target(code) as it:
        a, b = map(int, it.hear())
        assert ask(it.pid, (a, a + 4 * MIB), (b, b + 4 * MIB), hidden=file) == [0, 0]
        assert read_hidden(file)[it.pid].tolist() == [(b, b + 4 * MIB)], "nothing is there"


@needs_library
def test_mappings_of_no_file_are_told_without_the_kernel(tmp_path: Path) -> None:
    """The answers are those of the kernel. Those about mappings without a file are remembered."""
    code = """
    a = anonymous(3 << 20)
    shared = anonymous(1 << 20, flags=0x21)
    f = os.memfd_create("x"); os.ftruncate(f, 1 << 20)
    private = libc.mmap(None, 1 << 20, 3, 2, f, 0)
    libc.munmap(a + (1 << 20), 1 << 20)
    say(a); hear()
    assert libc.mmap(a, 1 << 20, 3, 0x11, f, 0) == a
    say("mapped"); hear()
    """
    file = tmp_path / "hidden"
    file.touch()
    with (
        target(code) as it,
        subprocess.Popen(
            [sys.executable, "-P", "-c", _LINKS, str(it.pid)],
            env=dump_environment(str(file)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as asked,
    ):
        (a,) = map(int, it.hear())
        assert asked.stdin is not None and asked.stdout is not None and asked.stdout.readline()

        def answer(name: str) -> list[int]:
            """Return the error numbers of lstat and open; 0: success."""
            assert asked.stdin is not None and asked.stdout is not None
            print(name, file=asked.stdin, flush=True)
            return [int(word) for word in asked.stdout.readline().split()]

        def kernels(name: str) -> list[int]:
            found, path = [0, 0], f"/proc/{it.pid}/map_files/{name}"
            try:
                os.lstat(path)
            except OSError as error:
                found[0] = error.errno or -1
            try:
                os.close(os.open(path, os.O_RDONLY))
            except OSError as error:
                found[1] = error.errno or -1
            return found

        names = [f"{one.start:x}-{one.end:x}" for one in procfs.read_maps(it.pid)]
        first, gone = f"{a:x}-{a + MIB:x}", f"{a + MIB:x}-{a + 2 * MIB:x}"
        inside, odd = f"{a:x}-{a + MIB - PAGE:x}", ["0-1000", "x", "-", f"{a:x}", f"{first}0"]
        said = {name: answer(name) for name in [*names, gone, inside, *odd]}
        assert said == {name: kernels(name) for name in said}
        assert said[first] == [errno.ENOENT, errno.ENOENT] and [0, 0] in said.values()
        it.tell("go on")
        it.hear()
        assert kernels(first) == [0, 0] and answer(first) == [errno.ENOENT, errno.ENOENT]
        asked.stdin.close()
        assert not asked.wait(20)


_LEFT = """
#include "process_maps.c"
#include "pages.c"
int main(void)
{
    static struct run runs[4096], left[4096];
    static struct hidden parts[4096];
    size_t count, part_count, room;
    while (scanf("%zu %zu %zu", &count, &part_count, &room) == 3) {
        for (size_t i = 0; i < count; i++)
            scanf("%lu %lu %lu", &runs[i].start, &runs[i].end, &runs[i].categories);
        for (size_t i = 0; i < part_count; i++)
            scanf("%lu %lu", &parts[i].start, &parts[i].end);
        ssize_t kept = left_of(runs, count, parts, part_count, left, room);
        printf("%zd", kept);
        for (ssize_t i = 0; i < kept; i++)
            printf(" %lu %lu %lu", left[i].start, left[i].end, left[i].categories);
        printf("\\n");
    }
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_what_is_left_of_an_answer(tmp_path: Path) -> None:
    """Of 2000 random answers, in pages."""
    build(tmp_path, _LEFT)
    random = np.random.default_rng(1)
    cases, words = [], []
    for _ in range(2000):
        run_at = np.sort(random.choice(60, 2 * int(random.integers(0, 12)), replace=False))
        part_at = np.sort(random.choice(60, 2 * int(random.integers(0, 12)), replace=False))
        runs = [(a, b, int(random.integers(3))) for a, b in run_at.reshape(-1, 2).tolist()]
        parts, room = part_at.reshape(-1, 2).tolist(), int(random.choice([2, 5, 30]))
        covered = {page for a, b in parts for page in range(a, b)}
        cases.append((runs, covered, room))
        numbers = [number for piece in (*runs, *parts) for number in piece]
        words += [len(runs), len(parts), room, *numbers]
    done = subprocess.run(
        [tmp_path / "read"],
        input=" ".join(map(str, words)),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    said = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    for (runs, covered, room), (count, *numbers) in zip(cases, said, strict=True):
        wanted = [
            (page, kind) for a, b, kind in runs for page in range(a, b) if page not in covered
        ]
        pieces = [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        found = [(page, kind) for a, b, kind in pieces for page in range(a, b)]
        joints = sum(
            after[0] != before[0] + 1 or any(run[0] == after[0] for run in runs)
            for before, after in itertools.pairwise(wanted)
        )
        needed = joints + 1 if wanted else 0
        assert count == (needed if needed <= room else -1)
        assert count < 0 or found == wanted


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_lines_of_maps_are_read_as_by_the_dumper(tmp_path: Path) -> None:
    """Also such as this kernel does not write: names of anonymous memory are an option of it."""
    build(tmp_path, _READ)
    start = "7f0000000000-7f0000400000"
    kinds = {
        f"{start} rw-p 00000000 00:00 0 ": True,
        f"{start} ---p 00000000 00:00 0": True,
        f"{start} rw-p 00000000 00:00 0                          [heap]": True,
        f"{start} rw-p 00000000 00:00 0                          [anon:a name [x]": True,
        f"{start} rw-s 00000000 00:00 0 ": False,
        f"{start} rw-p 00000000 00:00 0                          [stack]": False,
        f"{start} rw-p 00000000 00:00 0                          [anon_shmem:x]": False,
        f"{start} rw-p 00000000 00:00 0                          anon_inode:[perf_event]": False,
        f"{start} rw-p 00001000 fd:01 1234                       /lib/x [heap]": True,
        f"{start} r--p 00001000 fd:01 1234                       /lib/x": True,
        f"{start} r-xp 00001000 fd:01 1234                       /lib/x": False,
        f"{start} rw-s 00001000 fd:01 1234                       /lib/x": False,
        f"{start} rw-p 00000000 00:01 77                         /memfd:[heap] (deleted)": True,
        f"{start} rw-p 00000000 00:01 78                         /anon_hugepage (deleted)": False,
        f"{start} rw-p 00000000 00:05 9                          /dev/zero": False,
        f"{start} r--p 00000000 00:00 0                          [vvar]": False,
        f"{start} rw-s 00000000 00:0f 9                          /[aio] (deleted)": False,
    }
    lines = [*kinds, *Path("/proc/self/maps").read_text().splitlines()]
    done = subprocess.run(
        [tmp_path / "read"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    said = [line.split() for line in done.stdout.splitlines()]
    parsed = procfs.parse_maps("\n".join([*lines, ""]).encode())
    assert len(parsed) == len(said) == len(lines)
    ours = [mapping.anonymous or mapping.holds_private_data for mapping in parsed]
    assert [private == "1" for private, _, _ in said] == ours
    assert ours[: len(kinds)] == list(kinds.values())
    assert all(
        (int(a), int(b)) == (m.start, m.end) for (_, a, b), m in zip(said, parsed, strict=True)
    )


def test_what_overlaps_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "hidden"
    np.array(
        [(7, 4096, 8192), (5, 0, 8192), (7, 0, 8192), (7, 16384, 20480), (7, 8192, 12288)], "<u8"
    ).tofile(file)
    found = read_hidden(file)
    assert {pid: ranges.tolist() for pid, ranges in found.items()} == {
        5: [(0, 8192)],
        7: [(0, 8192), (8192, 12288), (16384, 20480)],
    }


def test_a_cut_off_file_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "hidden"
    file.write_bytes(bytes(30))
    with pytest.raises(Damaged):
        read_hidden(file)


def test_an_inherited_name_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICECORE_HIDDEN", "/somewhere")
    assert "ICECORE_HIDDEN" not in dump_environment(None)
    if CRIU_LIBRARY.exists():
        assert dump_environment("x")["ICECORE_HIDDEN"] == "x"
    assert os.environ["ICECORE_HIDDEN"] == "/somewhere"
