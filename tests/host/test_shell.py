"""A user's shell command: what it ends with, what it writes to, and that nothing is left where it
is given up.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from icecore.host.jobs.shell import run_shell
from icecore.host.kernel import procfs
from tests.host.target import eventually


def test_status_environment_and_output(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as out:
        assert (
            run_shell(
                "echo $WORD; echo why >&2; exit 3",
                {"WORD": "word"},
                seconds=20,
                output=out.fileno(),
            )
            == 3
        )
        assert run_shell("kill -KILL $$", {}, seconds=20, output=out.fileno()) == -9
    assert (tmp_path / "out").read_text() == "word\nwhy\n"


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
def test_what_takes_too_long_is_ended_with_all_that_it_started(trap: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with open(os.devnull, "wb") as out, pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        run_shell(
            f"{trap} sleep 300 & echo $! > {tmp_path}/pid; wait",
            dict(os.environ),
            seconds=0.5,
            output=out.fileno(),
        )
    assert time.monotonic() - began < 20
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: procfs.is_over(pid))


class Stopped(BaseException):
    pass


def test_a_signal_that_comes_before_it_is_known_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *words: object, **how: object) -> None:
            super().__init__(*words, **how)  # type: ignore[call-overload]
            pids.append(self.pid)
            time.sleep(0.3)  # the handler of a signal runs late, and raises
            raise Stopped

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with open(os.devnull, "wb") as out, pytest.raises(Stopped):
        run_shell(f"touch {tmp_path}/begun", dict(os.environ), seconds=20, output=out.fileno())
    assert eventually(lambda: procfs.is_over(pids[0]))
    assert not (tmp_path / "begun").exists()
