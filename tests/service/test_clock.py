"""A wall clock that is set back while a job is supervised: no snapshot that was reported is forgotten
in favour of older ones, whose times lie in the future.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

#: Counts until it has counted enough.
_COUNTER = """
import os, time
number = 0
while not os.path.exists("enough"):
    number += 1
    print(number, flush=True)
    time.sleep(0.1)
"""


def test_a_clock_that_is_set_back_forgets_nothing_new(cli: Cli) -> None:
    cli.run("init")
    clock, out = cli.folder / "clock", cli.folder / "out"
    clock.write_text("7200")
    environment = {
        **cli.environment,
        "PYTHONPATH": str(Path(__file__).with_name("clock")),
        "ICECORE_TEST_CLOCK": str(clock),
    }
    words = ("run", "--name", "counter", "--resume", "--every", "0.5s", "--keep-last", "2", "--")
    with open(out, "wb") as file:
        process = subprocess.Popen(
            cli.command("--json", *words, sys.executable, "-c", _COUNTER),
            env=environment,
            cwd=cli.folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    try:
        until(lambda: len(_reported(out)) >= 2, "two snapshots")
        clock.write_text("-7200")
        until(lambda: len(_reported(out)) >= 4, "two more")
        (cli.folder / "enough").touch()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)
    reported = _reported(out)
    listed = {
        event["snapshot"] for event in cli.events("ls", "counter") if event["event"] == "snapshot"
    }
    assert set(reported[-2:]) <= listed, "the newest snapshots were forgotten"


def _reported(out: Path) -> list[str]:
    """Return the snapshots that were reported so far."""
    found = []
    for line in out.read_text().splitlines():
        if '"run.snapshot"' in line:
            found.append(str(json.loads(line)["snapshot"]))
    return found
