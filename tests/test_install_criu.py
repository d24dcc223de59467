"""tools/install-criu: what it reports works, a second run changes nothing, and nothing unverified
is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools/install-criu"
PREFIX = Path(os.environ.get("ICECORE_CRIU_PREFIX", "/usr/local/lib/icecore/criu"))
SECOND = PREFIX.with_name(PREFIX.name + "-sid")

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="criu check needs root"),
]


def tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def installed(prefix: Path) -> dict[str, Any]:
    done = tool("--check", "--json", "--prefix", prefix)
    if done.returncode != 0:
        pytest.skip(f"no CRIU at {prefix} ('make test' installs it): {done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize("prefix", [PREFIX, SECOND], ids=["first", "second"])
def test_what_is_recorded_works(prefix: Path) -> None:
    record = installed(prefix)
    assert record == json.loads((prefix / "criu.json").read_text())
    check = subprocess.run(
        [record["criu"], "check"], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert check.returncode == 0, check.stdout + check.stderr
    version = subprocess.run(
        [record["criu"], "--version"], capture_output=True, text=True, timeout=20
    ).stdout
    assert f"Version: {record['version']}\n" in version
    assert tuple(int(part) for part in record["version"].split(".")[:2]) >= (4, 0)


@pytest.mark.parametrize("prefix", [PREFIX, SECOND], ids=["first", "second"])
def test_pycriu_of_the_record_reads_and_writes_images(prefix: Path) -> None:
    record = installed(prefix)
    code = (
        "import io, sys; sys.path.insert(0, sys.argv[1])\n"
        "import pycriu, pycriu.images as images\n"
        "assert pycriu.__file__.startswith(sys.argv[1]), pycriu.__file__\n"
        "wanted = {'magic': 'PSTREE', 'entries': [{'pid': 7, 'ppid': 0, 'pgid': 7, 'sid': 7, 'threads': [7, 8]}]}\n"
        "found = images.loads(images.dumps(wanted))\n"
        "assert found == wanted, found\n"
    )
    command = [sys.executable, "-P", "-c", code, record["pycriu_path"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_second_run_changes_nothing() -> None:
    installed(PREFIX)

    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns)
            for path in [PREFIX, *PREFIX.rglob("*")]
        }

    before = state()
    done = tool("--prefix", PREFIX)
    assert done.returncode == 0, done.stderr
    assert "already installed" in done.stderr
    assert state() == before


def test_check_only_tells(tmp_path: Path) -> None:
    done = tool("--check", "--suite", "trixie", "--prefix", tmp_path / "criu")
    assert done.returncode == 1
    assert "no usable CRIU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_installation_is_not_called_usable(tmp_path: Path) -> None:
    record = installed(PREFIX)
    prefix = tmp_path / "criu"
    (prefix / "python/pycriu").mkdir(parents=True)
    (prefix / "sbin").mkdir()
    (prefix / "sbin/criu").write_bytes(Path(record["criu"]).read_bytes()[:50000])
    (prefix / "sbin/criu").chmod(0o755)
    moved = {
        **record,
        "criu": str(prefix / "sbin/criu"),
        "pycriu_path": str(prefix / "python"),
        "suite": "trixie",
    }
    (prefix / "criu.json").write_text(json.dumps(moved))
    done = tool("--check", "--suite", "trixie", "--prefix", prefix)
    assert done.returncode == 1
    assert "does not start" in done.stderr


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    done = tool("--suite", "trixie", "--prefix", tmp_path)
    assert done.returncode == 1
    assert "not replacing it" in done.stderr
    assert precious.read_text() == "keep me"


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt on this machine")
def test_an_unsigned_archive_is_refused(tmp_path: Path) -> None:
    """An archive with correct hashes and without Debian's signature is not unpacked."""
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True
    ).stdout.strip()
    stanza = {
        "Package": "criu",
        "Architecture": architecture,
        "Version": "9.9-1",
        "Filename": "criu.deb",
        "Size": "1",
        "SHA256": "0" * 64,
    }
    packages = "".join(f"{key}: {value}\n" for key, value in stanza.items())
    suite = tmp_path / "archive/dists/trixie"
    place = suite / f"main/binary-{architecture}"
    place.mkdir(parents=True)
    (place / "Packages").write_text(packages)
    (place / "Packages.gz").write_bytes(gzip.compress(packages.encode()))
    release = f"Origin: Debian\nSuite: trixie\nCodename: trixie\nArchitectures: {architecture}\nComponents: main\nSHA256:\n"
    for path in sorted(place.iterdir()):
        content = path.read_bytes()
        release += (
            f" {hashlib.sha256(content).hexdigest()} {len(content)} {path.relative_to(suite)}\n"
        )
    (tmp_path / "archive/dists/trixie/Release").write_text(release)
    prefix = tmp_path / "criu"
    done = tool("--suite", "trixie", "--prefix", prefix, "--mirror", f"file://{tmp_path}/archive")
    assert done.returncode == 1, done.stderr
    assert "not signed" in done.stderr
    assert not prefix.exists()
