"""The OOM killer's ranking: CRIU and its guards are protected as far as the kernel permits, and a
restored job has the rank that it had when it was dumped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from icecore.dumper.freeze.guard import DumpGuard
from icecore.host.kernel import limits, oom, procfs
from icecore.restorer.guard.client import RestoreGuard
from tests.cli.conftest import Cli, until

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

#: The lowest that the kernel permits here to a process that was started with 0 and raised itself.
LOWEST = oom.PROTECTED if "CAP_SYS_RESOURCE" in limits.capabilities() else 0
_TELL = "import sys; open(sys.argv[1], 'w').write(open('/proc/self/oom_score_adj').read())"


@contextmanager
def own_score(value: int) -> Iterator[None]:
    """Give this process and its children this ``oom_score_adj`` within the block."""
    before = oom.score()
    Path("/proc/self/oom_score_adj").write_text(str(value))
    try:
        yield
    finally:
        Path("/proc/self/oom_score_adj").write_text(str(before))


def scores(root: int) -> dict[str, int]:
    """Return the score of each process of a tree by its program's name."""
    return {os.path.basename(procfs.executable(pid)): oom.score(pid) for pid in procfs.tree(root)}


@pytest.mark.parametrize("score", [0, 500])
def test_a_restored_job_has_the_rank_that_it_was_dumped_with(cli: Cli, score: int) -> None:
    cli.run("init")
    # A job begins with the rank of whoever starts it, which is not 0 on every machine.
    own, other = oom.score(), oom.score() + 300
    script = (
        f"echo {other} > /proc/self/oom_score_adj; sleep 1000 & "
        f"echo {own} > /proc/self/oom_score_adj; wait; true"
    )
    cli.run("run", "-d", "--name", "j", "--", "/bin/bash", "-c", script)
    before = {"icecore-init": own, "bash": own, "sleep": other}
    until(lambda: scores(cli.job("j").pid) == before, "the job has set its scores")
    with own_score(score):
        cli.run("dump", "j", "--stop")
        cli.run("restore", "j")
    assert scores(cli.job("j").pid) == before


@pytest.mark.parametrize("score", [0, 500])
def test_criu_of_a_dump_is_protected_as_far_as_permitted(tmp_path: Path, score: int) -> None:
    with own_score(score):
        guard = DumpGuard(str(tmp_path))
        try:
            assert guard.wait_ready() == oom.score(guard.pid) == LOWEST
            told = tmp_path / "told"
            assert guard.prepare([sys.executable, "-c", _TELL, str(told)], 20) == 0
            assert int(told.read_text()) == LOWEST
        finally:
            guard.release()


@pytest.mark.parametrize("score", [0, 500])
def test_the_guard_of_a_restore_is_protected_and_its_criu_is_not(
    tmp_path: Path, score: int
) -> None:
    """The tree inherits the rank of its CRIU."""
    told, folder = tmp_path / "told", tmp_path / "work"
    folder.mkdir()
    with own_score(score):
        guard = RestoreGuard(str(folder), str(folder))
        try:
            guard.run([sys.executable, "-c", _TELL, str(told)])
            while (message := guard.receive(20)) is not None and message.say != "ended":
                pass
            assert oom.score(guard.pid) == LOWEST
            assert int(told.read_text()) == 0
        finally:
            guard.end(20)


def test_what_the_kernel_refuses_is_said(cli: Cli) -> None:
    cli.run("init")
    cli.run("run", "-d", "--name", "j", "--", "sleep", "1000")
    said = [event for event in cli.events("dump", "j") if event["event"] == "dump.unprotected"]
    assert [event["oom_score"] for event in said] == ([] if oom.PROTECTED == LOWEST else [LOWEST])
    [found] = [
        event for event in cli.events("doctor", status=0) if event.get("name") == "OOM killer"
    ]
    assert found["state"] == ("good" if oom.PROTECTED == LOWEST else "warning")
