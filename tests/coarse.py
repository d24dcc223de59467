"""A file system that records only whole seconds."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_with_seconds(folder: Path) -> Iterator[Path]:
    """Mount an ext4 whose inodes have no room for nanoseconds; skip the test where that is
    impossible.

    Args:
        folder: Where the image and the mount point are made.
    """
    program = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("needs mkfs.ext4 (apt-get install e2fsprogs)")
    image, top = folder / "seconds-image", folder / "seconds"
    top.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run([program, "-q", "-I", "128", image], timeout=60, capture_output=True, check=True)
    done = subprocess.run(
        ["mount", "-o", "loop", image, top], timeout=60, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine cannot mount an image of ext4: {done.stderr.strip()}")
    try:
        yield top
    finally:
        subprocess.run(["umount", "--lazy", top], timeout=60, check=True)


def begin_of_second(within: float = 0.15) -> None:
    """Wait until a second has just begun."""
    while time.time() % 1 > within:
        time.sleep(0.01)
