"""Build ids of ELF files: as readelf prints them, and none of what has none or is damaged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.host.kernel.elf import build_id


def of(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return build_id(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def libc() -> Path:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return Path(next(line.split()[-1] for line in file if "/libc" in line))


def test_it_is_the_one_that_readelf_prints(libc: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("this machine has no readelf")
    for path in (libc, Path(sys.executable).resolve()):
        said = subprocess.run(
            ["readelf", "-n", path], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        found = re.search(r"Build ID: ([0-9a-f]+)", said)
        assert of(path) == (found[1] if found else "")


def test_what_is_cut_off_or_something_else_has_none(libc: Path, tmp_path: Path) -> None:
    whole = libc.read_bytes()
    expected = of(libc)
    place = tmp_path / "file"
    for size in (0, 3, 20, 63, 64, 100, 500):
        place.write_bytes(whole[:size])
        assert of(place) == ""
    place.write_bytes(b"#!/bin/sh\n" * 20)
    assert of(place) == ""
    for at in range(64):  # whatever a header says, it ends
        place.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 : 1 << 16])
        assert of(place) in ("", expected)
