"""The script in which CRIU waits, on machines that forbid executing files in memory."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from icecore.dumper.freeze import waiting_criu


@pytest.mark.parametrize("forbidden", [False, True])
def test_a_script_that_can_be_executed(forbidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, "vm.memfd_noexec=2")

    if forbidden:
        monkeypatch.setattr(os, "memfd_create", refuse)
    script = waiting_criu._executable("#!/bin/sh\necho executed\n")
    try:
        done = subprocess.run(
            [f"/proc/{os.getpid()}/fd/{script}"],
            stdout=subprocess.PIPE,
            text=True,
            timeout=20,
            check=True,
        )
    finally:
        os.close(script)
    assert done.stdout == "executed\n"
    if forbidden:
        monkeypatch.setattr(waiting_criu, "_FOLDERS", ())
        with pytest.raises(OSError, match="noexec"):
            waiting_criu._executable("")
