"""`icecore run --gpu` with the preload: its dumps leave device memory where it is, and its restores
run beside it, each with a keeper of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import pytest

from icecore import api
from icecore.commands.event_text import describe
from icecore.config import Config, RunSettings
from icecore.errors import MissingTool, RestoreFailed, UsageError
from icecore.events import Event
from icecore.host.cuda import nccl
from icecore.host.gpu.backend import VARIABLE
from icecore.host.jobs.job import Job as Running
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.resident import keeper
from icecore.host.resident.client import Keeper
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases import releasing
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.cli.documents import check_event, documented_events
from tests.fakes import job as program
from tests.fakes.joined import Ring
from tests.fakes.machine import HERE, MIB, Machine, until, uuid_of
from tests.zygote import Zygote

from .conftest import NewMachine

pytestmark = pytest.mark.criu
BUFFERS = 2


@pytest.fixture(scope="session")
def zygote(programs: Path) -> Iterator[Zygote]:
    """The parent of commands that find the fake libcuda."""
    with closing(Zygote({**os.environ, "LD_LIBRARY_PATH": str(programs)})) as made:
        yield made


@pytest.fixture
def visible(new_machine: NewMachine, cli: Cli, tmp_path: Path) -> Machine:
    """Two GPUs that a job with a private root sees, too."""
    machine = new_machine(gpus=2, memory=96 << 20, world=True, folder=str(tmp_path))
    own = {
        name: value
        for name, value in machine.environment(resident=False).items()
        if name.startswith(("FAKE_CUDA", "LD_LIBRARY"))
    }
    cli.environment.update({**own, VARIABLE: f"fake:{machine.cuda}"})
    return machine


def start(cli: Cli, *words: str) -> Running:
    order = json.dumps(
        {
            "out": "/dev/stdout",
            "gpus": [0],
            "mib": 4,
            "buffers": BUFFERS,
            "end": str(cli.folder / "end"),
        }
    )
    cli.run(
        "run",
        "-d",
        "--gpu",
        *words,
        "--name",
        "gpu",
        "--",
        sys.executable,
        "-S",
        str(HERE / "job.py"),
        order,
    )
    job = cli.job("gpu")
    goes_on(job, 10)
    return job


def goes_on(job: Running, more: int = 10) -> None:
    """It makes steps, and all lines are right."""

    def lines() -> list[str]:
        return job.log_path("stdout").read_text().split("\n")[:-1]

    before, end = len(lines()), time.monotonic() + 20
    while len(lines()) < before + more:
        assert time.monotonic() < end, job.log_path("stderr").read_text()
        time.sleep(0.01)
    found = lines()
    assert found == program.expected(len(found), 4, BUFFERS)


@pytest.mark.parametrize("root", ["private", "host"])
def test_a_job_and_its_instances(cli: Cli, visible: Machine, root: str) -> None:
    cli.run("init")
    job = start(cli, "--root", root)
    documented = documented_events()
    events = cli.events("dump", "gpu")
    for event in events:
        check_event(event, documented)
    looked = next(
        event for event in events if event["event"] == "dump.preflight" and event["state"] == "end"
    )
    assert (looked["resident_bytes"], looked["moved_bytes"], looked["no_room"]) == (
        BUFFERS * 4 * MIB,
        MIB // 2,
        0,
    )
    assert looked["left"] == {"small_bytes": MIB // 2}
    assert looked["window_least"] < looked["window_seconds"] < looked["window_most"] < 1.1
    assert [
        event["bytes"]
        for event in events
        if event["event"] == "dump.resident.unmap" and event["state"] == "end"
    ] == [BUFFERS * 4 * MIB]
    goes_on(job)
    said = cli.run("dump", "gpu").stderr
    assert (
        "8.0 MiB stay on GPUs, " in said
        and " will be moved\n  a window of about 429." in said
        and "if all resident memory has changed\n" in said
    )
    assert "\n  512 KiB with the driver: 512 KiB in small allocations\n" in said
    shown = cli.one("snapshot.details", "show", "gpu")
    check_event(shown, documented)
    assert (shown["resident_bytes"], shown["moved_bytes"]) == (BUFFERS * 4 * MIB, MIB // 2)
    assert shown["device_bytes"] < shown["resident_bytes"] + shown["moved_bytes"] and shown[
        "left"
    ] == {"small_bytes": MIB // 2}
    lines = {
        line[:14].strip(): line[14:].strip() for line in cli.run("show", "gpu").stdout.splitlines()
    }
    assert lines["device memory"].endswith("of data; 8.5 MiB including zeros")
    assert lines["of it resident"].startswith("8.0 MiB including zeros") and lines[
        "of it moved"
    ].startswith("512 KiB including zeros")
    assert lines["allocated"] == "512 KiB with the driver: 512 KiB in small allocations"
    if root == "private":  # beside the first, on the other GPU
        for event in cli.events("restore", "gpu", "--name", "second", "--gpu-map", "0=1"):
            check_event(event, documented)
        second = cli.job("second")
        goes_on(second)
        goes_on(job)
        assert (visible.used(0), visible.used(1)) == (BUFFERS * 4 * MIB + MIB // 2,) * 2
        places = [one.directory / "resident" for one in (job, second)]
        assert [len(Keeper(place).processes()) for place in places] == [1, 1]
        cli.run("dump", "second")
        goes_on(second)
        cli.run("kill", "second", "-s", "KILL")
        until(lambda: visible.used(1) == 0)
    cli.run("dump", "gpu", "--stop", "--keep-resident")
    until(lambda: not cli.job("gpu").alive)
    until(lambda: visible.used(0) == BUFFERS * 4 * MIB)
    events = cli.events("restore", "gpu", "--name", "third", "--from-resident")
    assert [
        event.get("fetched")
        for event in events
        if event["event"] == "restore.resident.memory" and event["state"] == "end"
    ] == [0]
    third = cli.job("third")
    goes_on(third)
    until(lambda: visible.used(0) == BUFFERS * 4 * MIB + MIB // 2)
    if root == "private":
        assert (
            "not held"
            in cli.run("restore", "gpu", "--name", "fourth", "--from-resident", status=6).stderr
        )
    cli.run("dump", "third", "--stop", "--keep-resident")
    until(lambda: not cli.job("third").alive)
    until(lambda: visible.used(0) == BUFFERS * 4 * MIB)
    cli.run("rm", "third")
    if root == "host":
        cli.run("rm", "gpu")  # the first one's keeper is the third's
    until(lambda: visible.used(0) == 0)


def restored_from_memory(cli: Cli, *words: str) -> int:
    """How many cells that fetched."""
    events = cli.events("restore", *words, "--from-resident")
    for event in events:
        check_event(event, documented_events())
    [fetched] = [
        int(event["fetched"])
        for event in events
        if event["event"] == "restore.resident.memory" and event["state"] == "end"
    ]
    return fetched


def kept(cli: Cli) -> dict[str, int]:
    """What ``ps -a`` says of each instance."""
    return {
        event["instance"]: event["kept_bytes"]
        for event in cli.events("ps", "-a")
        if event["event"] == "job"
    }


@pytest.mark.parametrize("root", ["private", "host"])
def test_a_job_that_crashes(cli: Cli, visible: Machine, root: str) -> None:
    size = BUFFERS * 4 * MIB
    cli.run("init")
    early = start(cli, "--root", root, "--keep-resident")
    cli.run("kill", "gpu", "-s", "KILL")  # nothing could be restored from its memory
    until(lambda: visible.used(0) == 0)
    cli.run("rm", early.instance)
    first = start(cli, "--root", root, "--keep-resident")
    cli.run("dump", "gpu")
    goes_on(first, 20)
    os.kill(first.main_process(), signal.SIGKILL)
    assert first.wait(20).signal == signal.SIGKILL
    assert (visible.used(0), kept(cli)) == (size, {first.instance: size})
    assert "KEPT ON GPUS" in cli.run("ps", "-a").stdout
    assert restored_from_memory(cli, "gpu") == BUFFERS  # only the first cell of each changes
    second = cli.job("gpu")
    goes_on(second)
    assert (visible.used(0), "KEPT" in cli.run("ps", "-a").stdout) == (size + MIB // 2, False)
    # What was restored is treated alike, before its next snapshot too.
    cli.run("kill", "gpu", "-s", "KILL")
    assert kept(cli) == {first.instance: 0, second.instance: size}
    cli.run("rm", first.instance)
    assert restored_from_memory(cli, second.description.snapshot) <= BUFFERS
    third = cli.job("gpu")
    goes_on(third)
    cli.run("dump", "gpu")
    cli.run("kill", "gpu")
    third.wait(20)
    assert kept(cli) == {second.instance: 0, third.instance: size}
    cli.run("rm", second.instance)
    assert visible.used(0) == size
    cli.run("rm", third.instance)
    until(lambda: visible.used(0) == 0)
    assert "not held" in cli.run("restore", "gpu", "--from-resident", status=6).stderr
    cli.run("restore", "gpu")
    goes_on(cli.job("gpu"))


def test_a_restore_that_breaks_off_while_it_runs(
    cli: Cli, visible: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tree is killed for want of host memory, and leaves nothing on the GPU."""
    cli.run("init")
    job = start(cli, "--keep-resident")
    cli.run("dump", "gpu")
    cli.run("kill", "gpu", "-s", "KILL")
    cli.run("rm", job.instance)
    until(lambda: visible.used(0) == 0)
    for name, value in cli.environment.items():
        monkeypatch.setenv(name, value)

    def fails(*_: object) -> None:
        raise RestoreFailed("the rest does not come")

    monkeypatch.setattr(releasing, "load_memory", fails)
    restored = api.restore("gpu", options=RestoreOptions(mode="lazy"))
    with pytest.raises(RestoreFailed, match="does not come"):
        restored.wait_resident(30)
    assert restored.job is not None and not restored.job.alive
    until(lambda: visible.used(0) == 0)


def test_a_job_that_ends_well(cli: Cli, visible: Machine) -> None:
    cli.run("init")
    job = start(cli, "--keep-resident")
    cli.run("dump", "gpu")
    (cli.folder / "end").touch()
    assert job.wait(20).code == 0
    until(lambda: visible.used(0) == 0)
    assert kept(cli) == {job.instance: 0}
    cli.run("rm", "gpu")


def test_of_two_instances_each_has_its_own(cli: Cli, visible: Machine) -> None:
    """They hold memory of the same snapshot; a restore without it lets go of both."""
    size = BUFFERS * 4 * MIB
    cli.environment["ICECORE_RUN_KEEP_RESIDENT"] = "true"
    cli.run("init")
    start(cli, "--root", "private")
    cli.run("dump", "gpu")
    cli.run("restore", "gpu", "--name", "second", "--gpu-map", "0=1")
    goes_on(cli.job("second"))
    cli.run("dump", "second")
    for name in ("gpu", "second"):
        cli.run("kill", name, "-s", "KILL")
    assert (visible.used(0), visible.used(1)) == (size, size)
    assert restored_from_memory(cli, "second", "--name", "third") <= BUFFERS
    goes_on(cli.job("third"))
    assert (visible.used(0), visible.used(1)) == (size, size + MIB // 2)
    cli.run("kill", "third", "-s", "KILL")
    cli.run("restore", "gpu", "--name", "fourth")
    goes_on(cli.job("fourth"))
    assert (visible.used(0), visible.used(1)) == (size + MIB // 2, 0)


def test_what_cannot_be_kept(cli: Cli) -> None:
    assert "add --gpu" in cli.run("run", "--keep-resident", "--", "true", status=2).stderr
    with pytest.raises(UsageError, match="add --gpu"):
        api.run(["true"], keep_resident=True)
    for resident in ("--no-resident", "--rm"):
        said = cli.run("run", "--gpu", "--keep-resident", resident, "--", "true", status=2).stderr
        assert "can be kept" in said if resident == "--no-resident" else "--rm releases" in said
    with pytest.raises(UsageError, match="only resident memory"):
        api.run(["true"], gpu=True, resident=False, keep_resident=True)
    assert cli.registry.instances() == []


def test_ranks(cli: Cli, visible: Machine, tmp_path: Path) -> None:
    """They have each other's memory, and so do two instances of them at the same time, each its
    own.
    """
    cli.run("init")
    folder = tmp_path / "ranks"
    folder.mkdir()
    order = json.dumps({"out": str(folder / "lines"), "ranks": 2, "mib": 4, "nccl": True})
    how = ("--gpu", "--network", "private", "--root", "private", "--name", "gpu")
    done = cli.run("run", "-d", *how, "--", sys.executable, "-S", str(HERE / "ring.py"), order)
    assert (
        "NCCL_CUMEM_ENABLE=1" in done.stderr
        and "NCCL_P2P" not in done.stderr
        and nccl.PARKED_COST in done.stderr
    )
    job = Ring.at(visible, folder)
    job.goes_on()
    for _ in range(2):
        cli.run("dump", "gpu")
        job.goes_on()
    until(lambda: sum(visible.used(gpu) for gpu in range(2)) == job.resident + MIB)
    cli.run("kill", "gpu", "-s", "KILL")
    until(lambda: sum(visible.used(gpu) for gpu in range(2)) == 0)
    cli.run("restore", "gpu", "--name", "again", "--gpu-map", "0=1", "--gpu-map", "1=0")
    job.goes_on()
    cli.run("dump", "again", "--stop", "--keep-resident")
    until(lambda: not cli.job("again").alive)
    until(lambda: sum(visible.used(gpu) for gpu in range(2)) == job.resident)
    cli.run("restore", "again", "--name", "third", "--from-resident")
    job.goes_on()
    until(lambda: sum(visible.used(gpu) for gpu in range(2)) == job.resident + MIB)


def test_without_the_preload(cli: Cli, visible: Machine) -> None:
    cli.run("init")
    job = start(cli, "--no-resident")
    environment = Path(f"/proc/{job.pid}/environ").read_bytes()
    assert b"LD_PRELOAD" not in environment and b"ICECORE_RESIDENT" not in environment
    goes_on(job)


@pytest.mark.parametrize("asked", [None, True, False])
def test_python_api(asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cuda" / "dev").mkdir(parents=True)
    (tmp_path / "cuda" / "dev" / "nvidiactl").touch()
    monkeypatch.setenv("ICECORE_CUDA", f"fake:{tmp_path / 'cuda'}")
    events: list[Event] = []
    config = Config(state=str(tmp_path / "state"), run=RunSettings(resident=asked is not True))
    job = api.run(["sleep", "60"], gpu=True, resident=asked, config=config, emit=events.append)
    environment = Path(f"/proc/{job.pid}/environ").read_bytes()
    job.kill(9)
    job.wait(10)
    [about] = [event for event in events if event.name == "run.gpu"]
    assert about.fields["resident"] is (asked is not False) is (b"ICECORE_RESIDENT=" in environment)
    assert ("device memory is resident" in "\n".join(describe(about))) is (asked is not False)


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICECORE_CUDA", f"fake:{tmp_path / 'cuda'}")
    events: list[Event] = []
    job = api.run(
        ["sleep", "60"], gpu=True, config=Config(state=str(tmp_path / "state")), emit=events.append
    )
    job.kill(9)
    job.wait(10)
    [about] = [event for event in events if event.name == "run.gpu"]
    assert about.fields["driver"] is False
    assert "no NVIDIA driver" in "\n".join(describe(about)) and "is resident" not in "\n".join(
        describe(about)
    )


def keepers(place: Path) -> list[int]:
    """The processes of a directory's keeper."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[1:2] == [
                f"{place}/keeper".encode()
            ]:
                found.append(int(name))
    return found


@pytest.mark.parametrize("root", ["host", "private"])
def test_what_cannot_be_started_leaves_no_keeper(
    root: Literal["host", "private"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would find it any more."""
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    registry = Registry(tmp_path / "state")
    made: list[Path] = []

    def note(self: Running, place: Path, *, keep: bool) -> Running:
        made.append(place)
        return noted(self, place, keep=keep)

    noted = Running.with_resident
    monkeypatch.setattr(Running, "with_resident", note)
    with pytest.raises(UsageError, match="Permission denied"):
        api.start_gpu(registry, [str(broken)], Isolation(), pid=root, root=root)
    [place] = made
    assert not place.exists() and registry.instances() == []
    until(lambda: not keepers(place))


def test_where_no_compiler_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise MissingTool("it was not built", cure="install gcc")

    monkeypatch.setattr(keeper, "preload_path", missing)
    events: list[Event] = []
    registry = Registry(tmp_path / "state")
    with pytest.raises(MissingTool, match="it was not built"):
        api.start_gpu(registry, ["sleep", "60"], Isolation(), keep_resident=True, must_keep=True)
    job = api.start_gpu(
        registry, ["sleep", "60"], Isolation(), keep_resident=True, emit=events.append
    )  # as the configuration says
    job.kill(9)
    job.wait(10)
    [about] = [event.fields for event in events if event.name == "run.gpu"]
    assert about["keep_resident"] is False
    assert (
        about["resident"] is False
        and "is resident" not in describe(Event("run.gpu", about))
        and "it was not built (install gcc)" in about["notes"]
    )  # type: ignore[operator]


def test_uuids(visible: Machine) -> None:
    known = json.loads((visible.cuda / "inventory.json").read_text())
    assert [gpu["uuid"] for gpu in known["gpus"]] == [uuid_of(0), uuid_of(1)]
