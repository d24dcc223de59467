"""tools/man-page: the man page names every command, and troff accepts it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys

import pytest

from icecore.cli import build_parser
from tests.cli.documents import ROOT


def test_the_man_page() -> None:
    page = subprocess.run(
        [sys.executable, ROOT / "tools" / "man-page"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    commands = next(
        one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)
    )
    headings = [line for line in page.splitlines() if line.startswith(".SS ")]
    assert headings == [f".SS {name}" for name in commands.choices]
    sections = [line for line in page.splitlines() if line.startswith(".SH ")]
    assert len(sections) == len(set(sections)), "a group has one section"
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--files-to DIR" in re.sub(".\b", "", done.stdout), "bold is overstruck"
