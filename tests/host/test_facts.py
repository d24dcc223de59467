"""Where CRIU keeps what it has found out about the kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.criu import libraries
from icecore.host.criu.program import find_criu

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        Path("/run").exists()
        and subprocess.run(
            ["stat", "-f", "-c", "%T", "/run"], capture_output=True, text=True
        ).stdout
        == "tmpfs\n",
        reason="CRIU keeps it in /run",
    ),
]
LOADED = "Loaded kdat cache"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    found = tmp_path / "facts" / "criu"
    monkeypatch.setattr(libraries, "_FACTS_FOLDER", found)
    yield found


def check(environment: dict[str, str], *prefix: str) -> str:
    """What CRIU logs when it looks at the kernel."""
    criu = find_criu()
    done = subprocess.run(
        [*prefix, criu.path, "check", "-v4"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("which", ["dump", "restore"])
def test_it_finds_it_out_once(which: str, folder: Path) -> None:
    made = libraries.dump_environment(None) if which == "dump" else libraries.restore_environment()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert LOADED not in check(made)
    (kept,) = folder.iterdir()
    assert LOADED in check(made)
    # What was found out before the machine was started does not count.
    kept.rename(folder / "another-boot")
    again = libraries.dump_environment(None) if which == "dump" else libraries.restore_environment()
    assert list(folder.iterdir()) == []
    assert LOADED not in check(again)


def test_a_directory_that_others_can_write_to_is_not_used(folder: Path) -> None:
    made = libraries.restore_environment()
    for user, mode in ((0, 0o770), (65534, 0o700)):
        os.chown(folder, user, user)
        folder.chmod(mode)
        check(made)
        assert list(folder.iterdir()) == []
    assert libraries.restore_environment()[libraries._FACTS] == ""  # it is another user's
    folder.rmdir()
    (folder.parent / "other").mkdir()
    folder.symlink_to(folder.parent / "other")
    check(made)
    assert list(folder.iterdir()) == []


def test_what_a_criu_without_privileges_finds_out_is_of_no_use_to_another(folder: Path) -> None:
    """A later CRIU with privileges would restore without the events of userfaultfd."""
    made = libraries.restore_environment()
    assert LOADED not in check(made, "setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
    kept = list(folder.iterdir())
    assert LOADED not in check(made)
    assert len(list(folder.iterdir())) == len(kept) + 1


def test_what_a_killed_criu_left_is_removed(folder: Path) -> None:
    libraries.restore_environment()
    boot = libraries._BOOT.read_text().strip()
    written, left = folder / f"{boot}-1.5", folder / f"{boot}-1.6"
    for one in (written, left):
        one.touch()
    os.utime(left, (0, 0))
    libraries.restore_environment()
    assert list(folder.iterdir()) == [written]


def test_where_no_directory_can_be_made_it_finds_it_out_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(libraries, "_FACTS_FOLDER", tmp_path / "file" / "criu")
    made = libraries.restore_environment()
    assert made[libraries._FACTS] == ""
    assert LOADED not in check(made)
