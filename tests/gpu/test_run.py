"""`icecore run --gpu` and the other commands on GPU jobs, with a fake driver."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.errors import UsageError
from icecore.host.criu.program import find_criu
from icecore.host.cuda import nccl
from icecore.host.gpu.backend import VARIABLE
from icecore.host.jobs import gpu as gpu_job
from icecore.host.jobs.gpu import gpu_run
from icecore.host.jobs.namespaces import Isolation
from tests.cli.conftest import Cli
from tests.cli.documents import check_event, documented_events
from tests.fakes import fake_cuda
from tests.fakes.world import GPUS, MIB, Target, World

pytestmark = pytest.mark.criu

_ENV = "import os; print(*sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith(('NCCL', 'GLOO'))), os.getpid(), os.listdir('/proc/1'), flush=True)"


def test_what_it_sets_and_says(cli: Cli) -> None:
    done = cli.run(
        "run",
        "--gpu",
        "--no-resident",
        "--network",
        "private",
        "--",
        sys.executable,
        "-c",
        _ENV,
        NCCL_RAS_ENABLE="1",
    )
    words = done.stdout.split()
    assert words[:5] == [
        "GLOO_SOCKET_IFNAME=lo",
        "NCCL_CUMEM_HOST_ENABLE=0",
        "NCCL_NVLS_ENABLE=0",
        "NCCL_P2P_DISABLE=1",
        "NCCL_RAS_ENABLE=1",
    ]
    assert words[6] == "2", "its own pids, and /proc is theirs"
    assert "NCCL_P2P_DISABLE=1" in done.stderr and nccl.COST in done.stderr
    assert "warning: you set NCCL_RAS_ENABLE=1" in done.stderr


def test_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_run(Isolation(), {}).isolation == Isolation(root=True)
    for how in ({"root": "host"}, {"pid": "host"}):
        chosen = gpu_run(Isolation(), {}, **how)  # type: ignore[arg-type]
        assert chosen.isolation == Isolation(pid=False) and "once at a time" in chosen.notes[0]
    with pytest.raises(UsageError, match="304"):
        gpu_run(Isolation(), {}, pid="private", root="host")
    under = gpu_run(Isolation(), {"NCCL_NVLS_ENABLE": "1"}, resident=True)
    assert dict(under.added) == {
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
    }
    assert dict(under.kept) == {"NCCL_NVLS_ENABLE": "1"} and under.cost == nccl.PARKED_COST
    monkeypatch.setattr(
        gpu_job, "private_root_lack", lambda: "mount: denied"
    )  # where no container allows it
    chosen = gpu_run(Isolation(network=True), {})
    assert (
        chosen.isolation == Isolation(pid=False, network=True)
        and "mount: denied" in chosen.notes[0]
    )
    with pytest.raises(UsageError, match="mount: denied"):
        gpu_run(Isolation(), {}, root="private")


def test_what_it_starts_passes_preflight(
    cli: Cli, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.move(tmp_path)
    monkeypatch.setenv(VARIABLE, f"fake:{world.root}")
    start(cli, world, tmp_path, GPUS[:2], also=["nccl"])
    until = time.monotonic() + 20
    while time.monotonic() < until:  # the second process is the first one's child
        found = inspect_tree(cli.job("gpu").pid, find_criu(), "/dev/shm", DumpOptions())
        if found.gpus is not None and len(found.gpus.processes) == 2:
            break
        time.sleep(0.05)
    assert found.gpus is not None and [p.communicates for p in found.gpus.processes] == [True, True]
    assert all(not nccl.lacking(p.settings) for p in found.gpus.processes)


def test_dump_show_and_restore(
    cli: Cli, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.move(tmp_path)
    cli.environment[VARIABLE] = f"fake:{world.root}"
    cli.run("init")
    start(cli, world, tmp_path, GPUS[:1])
    documented = documented_events()
    events = cli.events("dump", "gpu")
    for event in events:
        check_event(event, documented)
    looked = next(
        event for event in events if event["event"] == "dump.preflight" and event["state"] == "end"
    )
    assert looked["moved_bytes"] == MIB << 20 and "resident_bytes" not in looked
    said = cli.run("dump", "gpu").stderr
    assert (
        "device memory: 3.0 MiB will be moved\n  a window of about 429." in said
        and "changed" not in said
    )
    cli.run("forget", "latest")
    (record,) = cli.events("ls")
    assert record["device"] == MIB << 20 and "3.0 MiB" in cli.run("ls").stdout
    shown = {event["event"]: event for event in cli.events("show", "gpu")}
    assert (
        shown["snapshot.details"]["device_bytes"] == MIB << 20
        and shown["snapshot.details"]["gpus"][0]["uuid"] == GPUS[0]
    )
    regions = [
        event
        for event in cli.events("show", "gpu")
        if event["event"] == "snapshot.regions" and event["kind"] == "device"
    ]
    assert [event["bytes"] for event in regions] == [MIB << 20]
    shown = cli.run("show", "gpu").stdout
    assert (
        GPUS[0] in shown
        and "3.0 MiB of data; 3.0 MiB including zeros" in shown
        and "of it moved" in shown
    )
    assert "resident" not in shown and "allocated" not in shown
    cli.run("kill", "gpu", "-s", "KILL")
    bad = [
        event
        for event in cli.events("restore", "-n", "gpu", "--gpu-map", "0=9", status=6)
        if event.get("name") == "gpu"
    ]
    assert bad and not bad[0]["met"]
    assert "OLD=NEW" in cli.run("restore", "gpu", "--gpu-map", "0", status=2).stderr
    for event in cli.events("restore", "gpu", "--gpu-map", f"0={GPUS[2]}"):
        check_event(event, documented)
    log = cli.job("gpu").log_path("stdout")
    before = len(log.read_text())
    until = time.monotonic() + 20
    while len(log.read_text()) < before + 200:
        assert time.monotonic() < until
        time.sleep(0.01)
    lines = log.read_text().split("\n")[:-1]
    assert lines == fake_cuda.expected(len(lines), MIB)
    assert world.on(GPUS[2]) == 1
    found = {
        event["name"]: event for event in cli.events("doctor") if event["event"] == "doctor.finding"
    }
    assert found["GPUs"]["state"] == "good" and "580" in found["GPUs"]["message"]


def start(
    cli: Cli, world: World, folder: Path, gpus: tuple[str, ...], *, also: list[str] | None = None
) -> None:
    """A job named gpu that prints its steps."""
    order = json.dumps(
        Target(
            world,
            folder / "target",
            gpus,
            also=also or (),
            out="/dev/stdout" if len(gpus) == 1 else "",
        ).order
    )
    code = f"import sys; sys.argv[1:] = [{order!r}]; exec(open({str(Path(fake_cuda.__file__))!r}).read())"
    cli.run(
        "run",
        "-d",
        "--gpu",
        "--no-resident",
        "--name",
        "gpu",
        "--",
        sys.executable,
        "-S",
        "-c",
        code,
    )
    until = time.monotonic() + 20
    place = cli.job("gpu").log_path("stdout") if len(gpus) == 1 else folder / "target" / "lines.1"
    while not place.exists() or len(place.read_text()) < 100:
        assert time.monotonic() < until, cli.job("gpu").log_path("stderr").read_text()
        time.sleep(0.01)
