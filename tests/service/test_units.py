"""The unit files are what systemd accepts."""

from __future__ import annotations

import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "configs" / "systemd"
UNITS = sorted(path for kind in ("service", "socket", "timer") for path in FOLDER.glob(f"*.{kind}"))
#: Jobs would inherit these, or not see the machine's file systems.
_HARMFUL = {
    "NoNewPrivileges",
    "SystemCallFilter",
    "RestrictNamespaces",
    "ProtectSystem",
    "ProtectHome",
    "PrivateTmp",
    "PrivateDevices",
    "PrivateMounts",
    "ProtectProc",
    "MemoryDenyWriteExecute",
}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_it(unit: Path, tmp_path: Path) -> None:
    for path in UNITS:  # a unit may name another
        shutil.copy(path, tmp_path / path.name.replace("@.", "@test."))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name.replace("@.", "@test."))],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_jobs_outlive_their_service() -> None:
    """A stop ends the supervisor of a job with TERM, and of the service nothing but itself."""
    options = {}
    for unit in UNITS:
        parser = RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(unit.read_text().replace("\\\n", " "))
        options[unit.name] = dict(parser["Service"]) if unit.suffix == ".service" else {}
    job, service = options["icecore-job@.service"], options["icecore.service"]
    assert (job["KillMode"], job["Delegate"], job["SuccessExitStatus"]) == ("mixed", "yes", "85")
    assert (service["KillMode"], service["Delegate"], service["Type"]) == (
        "process",
        "yes",
        "notify",
    )
    for about in (job, service):
        assert not _HARMFUL & about.keys()
