"""CRIU's amdgpu plugin: its images are stored and restored like the others. Not on AMD hardware: a
plugin writing images of that layout stands in.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight import checks_descriptors
from icecore.dumper.preflight.judge import refuse
from icecore.errors import RestoreFailed
from icecore.host.criu.program import find_criu
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests import fakes
from tests.dumper.world import Events, Store

from .conftest import Launch

pytestmark = pytest.mark.criu


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A directory with the plugin alone."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    source = Path(fakes.__file__).with_name("amdgpu_plugin.c")
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", folder / "amdgpu_plugin.so", source],
        check=True,
        timeout=60,
    )
    return folder


def test_its_images_go_through_a_snapshot(
    plugins: Path, launch: Launch, store: Store, tmp_path: Path
) -> None:
    target = launch()
    options = DumpOptions(criu_plugins=str(plugins))
    first, second = store.dump(target.pid, options), store.dump(target.pid, options)
    names = [key for key in store.read(second.snapshot).keys("image") if key.startswith("amdgpu-")]
    assert sorted(names) == ["amdgpu-kfd-5.img", "amdgpu-pages-5-0001.img", "amdgpu-renderD-6.img"]
    assert second.sizes.stored < first.sizes.stored - (2 << 20), (
        "what did not change is not stored again"
    )
    target.kill()
    restore(
        store.repository,
        store.loop,
        second.snapshot,
        RestoreOptions(criu_plugins=str(plugins)),
        emit=Events(),
    )
    target.wait_steps(5)
    target.is_right()
    target.kill()
    # The plugin does look: without its images it lets CRIU fail.
    other = launch()
    without = store.dump(other.pid, DumpOptions(stop=True)).snapshot
    other.reap()
    with pytest.raises(RestoreFailed):
        restore(
            store.repository,
            store.loop,
            without,
            RestoreOptions(criu_plugins=str(plugins)),
            emit=Events(),
        )


def test_other_gpus_are_refused_without_it(
    plugins: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = launch()
    found = inspect_tree(target.pid, find_criu(), "/dev/shm", DumpOptions())
    assert "gpu" not in {refusal.name for refusal in refuse(found)}
    # No machine here has /dev/kfd: what the process has open takes its part.
    monkeypatch.setattr(checks_descriptors, "_OTHER_GPU", re.compile(r"/dev/null"))
    assert "--criu-plugins" in next(r.cure for r in refuse(found) if r.name == "gpu")
    with_plugin = inspect_tree(
        target.pid, find_criu(), "/dev/shm", DumpOptions(criu_plugins=str(plugins))
    )
    assert "gpu" not in {refusal.name for refusal in refuse(with_plugin)}
