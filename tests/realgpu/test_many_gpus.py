"""Several GPUs: DDP over NCCL, what is refused of it, and snapshots that come back on other GPUs."""

from __future__ import annotations

import pytest

from icecore.errors import PreflightRefused
from icecore.host.cuda.inventory import read_inventory

from . import driver_api
from .conftest import needs
from .first import TRAIN, reference
from .jobs import HERE, Lab, lines, same, wait_lines

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ddp_goes_on_bit_for_bit(world: int, resident: bool, lab: Lab) -> None:
    needs(world, "torch")
    # The order in which NCCL adds up must be the same in both runs: the same settings in both.
    out, ranks = lab.folder / "losses", ("--world", str(world))
    unbroken = lab.folder / "unbroken"
    first = lab.run(
        "reference",
        TRAIN,
        "--out",
        str(unbroken),
        "--steps",
        "600",
        *ranks,
        network=True,
        resident=resident,
    )
    assert first.wait(600).exit_code == 0, first.log_path("stderr").read_text()[-3000:]
    wanted = lines(unbroken)
    job = lab.run(
        "ddp", TRAIN, "--out", str(out), "--pause", "0.02", *ranks, network=True, resident=resident
    )

    def log() -> str:
        return job.log_path("stderr").read_text()[-3000:]

    wait_lines(out, 20, log)
    result = lab.dump("ddp", gpu_shared=not resident)
    assert (
        len(
            {
                s.key
                for s in lab.repository.manifest(result.snapshot).spaces
                for r in s.regions
                if r.kind == "device"
            }
        )
        == world
    )
    wait_lines(out, len(lines(out)) + 20, log)
    lab.kill(job.pid)
    lab.restore(result.snapshot)
    same(wait_lines(out, len(lines(out)) + 50, log), wanted)


def test_nccl_with_peer_access_is_refused_and_the_job_goes_on(lab: Lab) -> None:
    needs(2, "torch")
    out = lab.folder / "losses"
    pid = lab.plain(
        TRAIN,
        "--out",
        str(out),
        "--pause",
        "0.02",
        "--world",
        "2",
        environment={"NCCL_P2P_DISABLE": "0"},
    )
    wait_lines(out, 20)
    with pytest.raises(PreflightRefused, match="gpu-nccl") as caught:
        lab.dump(pid, gpu_shared=True)
    assert "NCCL_P2P_DISABLE=1" in caught.value.cure and "run --gpu" in caught.value.cure
    wait_lines(out, len(lines(out)) + 50)


def test_another_gpu(lab: Lab) -> None:
    needs(2, "torch")
    wanted = reference(lab.folder)
    out = lab.folder / "losses"
    pid = lab.plain(TRAIN, "--out", str(out), "--pause", "0.02")
    wait_lines(out, 20)
    snapshot = lab.dump(pid).snapshot
    lab.kill(pid)
    idle = [gpu.used for gpu in read_inventory().gpus]
    lab.restore(snapshot, gpu_map={"0": "1"})
    took = [gpu.used - before for gpu, before in zip(read_inventory().gpus, idle, strict=True)]
    assert took[1] > 200 << 20 and took[0] < 50 << 20, (
        took
    )  # NVML need not know the process: it may be of another pid namespace
    same(wait_lines(out, len(lines(out)) + 50), wanted)


def test_two_instances_on_two_gpus(lab: Lab) -> None:
    needs(2)
    # A network of its own: CUDA binds abstract unix sockets that carry its pid.
    job = lab.run("one", str(HERE / "driver_api.py"), "--out", "/dev/stdout", network=True)
    wait_lines(job.log_path("stdout"), 50)
    snapshot = lab.dump("one").snapshot
    jobs = [
        lab.restore(snapshot, instance=f"copy-{number}", gpu_map={"0": str(number)}).job
        for number in (0, 1)
    ]
    for one in (job, *jobs):
        assert one is not None
        log = one.log_path("stdout")
        found = wait_lines(log, len(lines(log)) + 50)
        same(found, driver_api.expected(len(found), 64))
