"""What CRIU gets for ptrace when it restores: as the C library's, but for threads that were killed
while others run already.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from errno import ESRCH
from pathlib import Path

import pytest

from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.kernel import procfs
from tests.host.target import eventually

PEEKDATA, DETACH, SEIZE, INTERRUPT = 2, 17, 0x4206, 0x4207
_WALL = 0x40000000

pytestmark = pytest.mark.skipif(
    not RESTORE_LIBRARY.exists(), reason="needs a C compiler when icecore is built"
)

Ptrace = Callable[[int, int, int | None, int | None], int]
BUFFER = ctypes.create_string_buffer(b"what is here is there")


@pytest.fixture
def ptrace(tmp_path: Path) -> Ptrace:
    """The library's, which knows of no thread yet."""
    shutil.copy(RESTORE_LIBRARY, tmp_path / "library.so")
    made = ctypes.CDLL(str(tmp_path / "library.so"), use_errno=True).ptrace
    made.argtypes, made.restype = (
        [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
        ctypes.c_long,
    )
    return made  # type: ignore[no-any-return]


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Four processes, which sleep."""
    made = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            while True:
                time.sleep(60)
        made.append(pid)
    yield made
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def seize(ptrace: Ptrace, *pids: int) -> None:
    for pid in pids:
        assert ptrace(SEIZE, pid, None, None) == 0
        assert ptrace(INTERRUPT, pid, None, None) == 0
        assert os.waitpid(pid, _WALL)[0] == pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: procfs.is_over(pid))


def states(pids: list[int]) -> list[str]:
    return [procfs.status(pid).state for pid in pids]


def test_who_was_killed_before_anybody_runs_is_missed(ptrace: Ptrace, children: list[int]) -> None:
    seize(ptrace, *children)
    kill(children[2])
    assert (ptrace(DETACH, children[0], None, None), ctypes.get_errno()) == (-1, ESRCH)
    assert states([*children[:2], children[3]]) == ["t", "t", "t"]


def test_the_first_itself(ptrace: Ptrace, children: list[int]) -> None:
    seize(ptrace, *children)
    kill(children[0])
    assert (ptrace(DETACH, children[0], None, None), ctypes.get_errno()) == (-1, ESRCH)


def test_who_is_killed_once_others_run_is_dead(ptrace: Ptrace, children: list[int]) -> None:
    seize(ptrace, *children)
    assert ptrace(DETACH, children[3], None, None) == 0  # in whatever order
    kill(children[0])
    kill(children[1])
    assert [ptrace(DETACH, pid, None, None) for pid in children[:3]] == [0, 0, 0]
    assert "t" not in states(children[2:])


def test_who_is_let_go_for_a_while(ptrace: Ptrace, children: list[int]) -> None:
    """As GPU processes are while the driver works: nobody runs for good yet."""
    seize(ptrace, *children)
    assert [ptrace(DETACH, pid, None, None) for pid in children[:2]] == [0, 0]
    seize(ptrace, *children[:2])
    kill(children[1])
    assert (ptrace(DETACH, children[0], None, None), ctypes.get_errno()) == (-1, ESRCH)


def test_who_is_not_traced_at_all(ptrace: Ptrace, children: list[int]) -> None:
    assert (ptrace(DETACH, children[0], None, None), ctypes.get_errno()) == (-1, ESRCH)


def test_what_is_read_is_returned(ptrace: Ptrace, children: list[int]) -> None:
    seize(ptrace, children[0])
    assert (
        ptrace(PEEKDATA, children[0], ctypes.addressof(BUFFER), None).to_bytes(8, "little")
        == BUFFER.raw[:8]
    )
    assert (ptrace(PEEKDATA, children[0], 8, None), ctypes.get_errno()) == (-1, 5)
