"""CRIU's library starts the action script only for its stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from icecore.host.criu.libraries import CRIU_LIBRARY, dump_environment

pytestmark = pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a C compiler")

_START = """
import ctypes, sys
words = [word.encode() for word in sys.argv[1:]]
ctypes.CDLL(None).execvp(words[0], (ctypes.c_char_p * (len(words) + 1))(*words, None))
sys.exit("it was not started")
"""


def start(hold: str, stage: str, *words: str) -> str:
    """What a program says that is started by execvp(3), in an action script's environment."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _START, *words],
        env={**dump_environment(None, hold), **({"CRTOOLS_SCRIPT_ACTION": stage} if stage else {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_script_is_started_for_its_stage_alone(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho $CRTOOLS_SCRIPT_ACTION\n")
    script.chmod(0o755)
    path = str(script)
    assert start(path, "pre-dump", path) == "pre-dump\n"
    assert start(path, "post-dump", path) == ""
    assert start(path, "", path) == "\n", "not by CRIU, as an action script"
    assert start("", "post-dump", path) == "post-dump\n", "it is not icecore's"
    assert start(path, "post-dump", "echo", "other") == "other\n", "CRIU starts other programs, too"
