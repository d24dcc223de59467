"""Directories of other users are removed whole, even while something is added to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.kernel.removal import remove_tree

USER = 12345


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def _deep(path: Path, levels: int) -> None:
    path.mkdir()
    for _ in range(levels):
        path = path / "a"
        path.mkdir()


def test_a_removal_that_takes_too_long_can_be_continued(tmp_path: Path, top: int) -> None:
    _deep(tmp_path / "own", 20)
    with pytest.raises(OSError) as caught:
        remove_tree(top, "own", seconds=0.0)
    assert caught.value.errno == errno.ETIMEDOUT and (tmp_path / "own").exists()
    remove_tree(top, "own")
    assert not (tmp_path / "own").exists()
    remove_tree(top, "own")  # another one did it


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_nobody_adds_to_a_directory_that_is_being_removed(tmp_path: Path, top: int) -> None:
    _deep(tmp_path / "own", 3)
    for folder in (tmp_path / "own", tmp_path / "own/a"):
        os.chown(folder, USER, USER)
        folder.chmod(0o1777)
    kept = os.open(tmp_path / "own/a", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match="timed out"):
            remove_tree(top, "own", seize=True, seconds=0.0)
        about = (tmp_path / "own").stat()
        assert (about.st_uid, about.st_mode & 0o7777) == (0, 0o700)
        about = os.fstat(kept)
        assert (about.st_uid, about.st_mode & 0o7777) == (0, 0o700)
    finally:
        os.close(kept)
    remove_tree(top, "own", seize=True)
    assert not (tmp_path / "own").exists()
