"""One GPU: training and inference that go on bit for bit, programs without PyTorch, and what is
refused.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from icecore.dumper.options import DumpOptions
from icecore.errors import PreflightRefused
from icecore.host.kernel import procfs

from . import driver_api
from .conftest import needs
from .first import TRAIN, lineage, reference
from .jobs import HERE, Lab, lines, same, wait_lines

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_training_goes_on_bit_for_bit(mode: str, lab: Lab) -> None:
    needs(1, "torch")
    lineage(lab, reference(lab.folder), mode)


def test_training_under_run_gpu(lab: Lab) -> None:
    needs(1, "torch")
    wanted = reference(lab.folder)
    out = lab.folder / "losses"
    job = lab.run("train", TRAIN, "--out", str(out), "--pause", "0.02", resident=False)
    wait_lines(out, 20, lambda: job.log_path("stderr").read_text())
    snapshot = lab.dump("train").snapshot
    lab.kill(job.pid)
    lab.restore(snapshot)
    same(wait_lines(out, len(lines(out)) + 50), wanted)


def ask(path: Path, count: int) -> list[str]:
    """The next tokens."""
    end = time.monotonic() + 180
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(180)
                connection.connect(str(path))
                with connection.makefile("rw") as stream:
                    print(count, file=stream, flush=True)
                    return stream.readline().split()
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def test_inference_gives_the_same_tokens(lab: Lab) -> None:
    """A transformer of a billion parameters with its KV cache; a second server, never disturbed,
    says what is right.
    """
    needs(1, "torch")
    place = lab.folder / "socket"
    other = lab.plain(str(HERE / "serve.py"), "--socket", str(lab.folder / "other"))
    wanted = ask(lab.folder / "other", 200)
    lab.kill(other)
    pid = lab.plain(str(HERE / "serve.py"), "--socket", str(place))
    got = ask(place, 50)
    result = lab.dump(pid)
    assert result.sizes.device > 2 << 30
    got += ask(place, 50)
    again = lab.dump(pid)
    # Static weights: an incremental snapshot adds little.
    assert again.sizes.stored < 0.02 * again.sizes.device
    lab.kill(pid)
    place.unlink(missing_ok=True)
    lab.restore(again.snapshot)
    got += ask(place, 100)
    assert got == wanted


def test_a_program_without_pytorch(lab: Lab) -> None:
    out = lab.folder / "lines"
    pid = lab.plain(str(HERE / "driver_api.py"), "--out", str(out))
    wait_lines(out, 50)
    result = lab.dump(pid)
    regions = [
        r
        for s in lab.repository.manifest(result.snapshot).spaces
        for r in s.regions
        if r.kind == "device"
    ]
    print("device regions:", [(hex(r.start), r.length) for r in regions])
    assert result.sizes.device >= 64 << 20
    wait_lines(out, len(lines(out)) + 50)
    lab.kill(pid)
    lab.restore(result.snapshot)
    found = wait_lines(out, len(lines(out)) + 50)
    same(found, driver_api.expected(len(found), 64))


@pytest.fixture
def nvcc_program(lab: Lab) -> Path:
    """The runtime's program, compiled with its static runtime."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.path.exists(compiler):
        pytest.skip("there is no nvcc")
    made = lab.folder / "others"
    subprocess.run([compiler, "-O2", "-o", made, HERE / "others.cu"], check=True, timeout=120)
    return made


@pytest.mark.parametrize("library", ["nvcc", "cupy", "jax"])
def test_other_libraries(library: str, lab: Lab, request: pytest.FixtureRequest) -> None:
    """Against an uninterrupted run, from the first and the second of two snapshots."""
    if library == "nvcc":
        program = request.getfixturevalue("nvcc_program")
    else:
        needs(1, library)

    def start(out: Path) -> int:
        if library == "nvcc":
            return lab.plain(str(out), program=program)
        return lab.plain(str(HERE / "others.py"), library, str(out))

    out, reference = lab.folder / "lines", lab.folder / "reference"
    pid = start(out)
    wait_lines(out, 50)
    snapshots = [lab.dump(pid)]
    wait_lines(out, len(lines(out)) + 50)
    snapshots.append(lab.dump(pid))
    lab.kill(pid)
    found = []
    for snapshot in snapshots:
        assert snapshot.sizes.device >= 128 << 20
        restored = lab.restore(snapshot.snapshot)
        found.append(wait_lines(out, len(lines(out)) + 100))
        lab.kill(restored.pid)
    other = start(reference)
    wanted = wait_lines(reference, max(map(len, found)))
    lab.kill(other)
    for one in found:
        same(one, wanted)


@pytest.mark.parametrize("managed", [False, True])
def test_managed_memory_is_refused_and_the_job_goes_on(managed: bool, lab: Lab) -> None:
    out = lab.folder / "lines"
    pid = lab.plain(
        str(HERE / "driver_api.py"), "--out", str(out), *(["--managed"] if managed else [])
    )
    wait_lines(out, 20)
    uvm = [m for m in procfs.read_maps(pid) if m.path == "/dev/nvidia-uvm"]
    print("nvidia-uvm mappings:", [(hex(m.start), hex(m.offset), m.length) for m in uvm])
    if managed:
        with pytest.raises(PreflightRefused, match="gpu-managed"):
            lab.dump(pid)
    else:
        lab.dump(pid)
    found = wait_lines(out, len(lines(out)) + 50)
    same(found, driver_api.expected(len(found), 64))


def test_a_window_that_cannot_be_kept_is_not_begun(lab: Lab) -> None:
    out = lab.folder / "lines"
    pid = lab.plain(str(HERE / "driver_api.py"), "--out", str(out), "--mib", "2048")
    wait_lines(out, 20)
    with pytest.raises(PreflightRefused, match="gpu-window"):
        import icecore

        icecore.dump(pid, lab.repository, DumpOptions(max_window=0.1), config=lab.config)
    wait_lines(out, len(lines(out)) + 50)
