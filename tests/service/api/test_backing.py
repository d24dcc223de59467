"""What the service needs of this machine."""

from __future__ import annotations

from pathlib import Path

from icecore.config import Config, DumpSettings, RestoreSettings
from icecore.node.backing import Repositories


def test_a_missing_working_directory_is_left_out(tmp_path: Path) -> None:
    there, gone = str(tmp_path), str(tmp_path / "gone")
    config = Config(
        dump=DumpSettings(workdir=gone),
        restore=RestoreSettings(workdir=there),
        state=str(tmp_path / "state"),
    )
    (found,) = Repositories(config, "").staging()
    assert found.directory == there and 0 < found.free_bytes <= found.total_bytes
