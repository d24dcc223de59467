"""The soak: supervised jobs for ICECORE_TORTURE_SECONDS, on a repository in S3 and on one on a small
disk. Supervisors and jobs are killed at random, the server does not answer for a while, the disk is
full for a while, and the wall clock jumps. In the end every job has computed what an undisturbed run
computes, snapshots are taken again, all that were reported are there, and memory is flat.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from icecore.errors import IcecoreError
from icecore.host.jobs.registry import Registry
from tests.cli.conftest import Cli
from tests.conftest import BUCKET
from tests.seaweedfs import Server
from tests.service import soak_job

pytestmark = [
    pytest.mark.criu,
    pytest.mark.torture,
    pytest.mark.usefixtures("needs_criu"),
    pytest.mark.timeout(7200),
]

SECONDS = float(os.environ.get("ICECORE_TORTURE_SECONDS", "300"))
JOBS = min(20, 3 * (os.cpu_count() or 1))
EVERY = 20.0
#: Seconds between two disturbances, for four jobs: long enough for snapshots in between.
_PAUSES = (2.0, 9.0)
_DISK = 256 << 20
_KEEP = 3
#: What one supervisor may have more at the end than after a third of the time.
_GROWTH_KIB = 32 << 10
_END_SECONDS = 600.0
#: Statuses after which a service manager starts a job again: stopped with a snapshot, killed, ended
#: by a signal before it was ready (-15) or by a second one (143), or the repository could not be
#: reached (8). 16: the lease of a holder that was killed is still there.
_AGAIN = {85, -9, -15, 143, 8, 16, 17}


@dataclass
class Managed:
    """One job and what starts it again, as a service manager does.

    Attributes:
        heard: (monotonic time, event) of what its supervisors reported.
        statuses: Their exit statuses.
        resident: (monotonic time, KiB) of the present supervisor.
    """

    cli: Cli
    name: str
    steps: int
    environment: dict[str, str]
    options: tuple[str, ...]
    steady: bool
    heard: list[tuple[float, dict[str, object]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    supervisor: subprocess.Popen[str] | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.out = self.cli.folder / f"{self.name}.out"
        self.thread = threading.Thread(target=self._manage, name=self.name, daemon=True)

    def _manage(self) -> None:
        words = ["run", "--name", self.name, "--resume", "--every", f"{EVERY:.0f}s"]
        words += ["--restart", "on-failure", "--fall-back", "3", *self.options, "--"]
        words += [sys.executable, soak_job.__file__, str(self.steps), str(self.out)]
        while not self.over:
            with open(self.cli.folder / f"{self.name}.err", "a") as err:
                self.supervisor = subprocess.Popen(
                    self.cli.command("--json", *words),
                    env=self.environment,
                    cwd=self.cli.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
            assert self.supervisor.stdout is not None
            for line in self.supervisor.stdout:
                with suppress(ValueError):  # the last line of one that was killed
                    self.heard.append((time.monotonic(), json.loads(line)))
            self.statuses.append(self.supervisor.wait())
            if self.statuses[-1] not in _AGAIN:
                return
            time.sleep(random.uniform(0.1, 2.0))

    def look(self) -> None:
        """Note how much memory the supervisor has."""
        if self.supervisor is None:
            return
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.supervisor.pid}/status").read_text().splitlines()
            size = next(line for line in lines if line.startswith("VmRSS:"))
            self.resident.append((time.monotonic(), int(size.split()[1])))

    def kill(self, number: signal.Signals) -> None:
        """Signal the supervisor."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.send_signal(number)

    def snapshots(self) -> list[tuple[float, str]]:
        """Return when each snapshot was reported, and its id."""
        names = ("run.snapshot", "run.preempted")
        return [(at, str(e["snapshot"])) for at, e in self.heard if e.get("event") in names]


@dataclass
class Soak:
    """The jobs, and what disturbs them."""

    cli: Cli
    jobs: list[Managed]
    server: Server
    disk: Path
    clock: Path
    log: list[str] = field(default_factory=list)

    def say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:7.1f} {what}")

    def run(self, seconds: float) -> None:
        """Disturb the jobs for so long."""
        self.began = time.monotonic()
        for job in self.jobs:
            job.thread.start()
        plans = (
            (0.20, self.unreachable, min(60.0, seconds / 4)),
            (0.50, self.full, min(60.0, seconds / 6)),
            (0.70, self.jumps, min(60.0, seconds / 6)),
        )
        others = [
            threading.Thread(target=self._later, args=(share * seconds, work, length), daemon=True)
            for share, work, length in plans
        ]
        for thread in others:
            thread.start()
        while time.monotonic() - self.began < seconds:
            time.sleep(random.uniform(*_PAUSES) * 4 / max(1, JOBS - 2))
            self.disturb()
            for job in self.jobs:
                job.look()
        for thread in others:
            thread.join(seconds)

    def _later(self, delay: float, work: object, length: float) -> None:
        time.sleep(delay)
        assert callable(work)
        work(length)

    def disturb(self) -> None:
        """Kill a supervisor or a job, or ask a supervisor to stop."""
        job = random.choice([job for job in self.jobs if not job.steady])
        what = random.choice(("supervisor", "job", "both", "stop"))
        self.say(f"{job.name}: {what}")
        if what in ("supervisor", "both"):
            job.kill(signal.SIGKILL)
        if what in ("job", "both"):
            with suppress(IcecoreError, ProcessLookupError):
                os.kill(Registry(self.cli.folder / "state").find(job.name).pid, signal.SIGKILL)
        if what == "stop":
            job.kill(signal.SIGTERM)

    def unreachable(self, seconds: float) -> None:
        """The S3 server does not answer."""
        self.say(f"unreachable for {seconds:.0f} s")
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.server.process.send_signal(signal.SIGCONT)
        self.say("reachable")

    def full(self, seconds: float) -> None:
        """The disk of the local repository is full."""
        self.say(f"full for {seconds:.0f} s")
        ballast = self.disk / "ballast"
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(seconds)
        ballast.unlink()
        self.say("room")

    def jumps(self, seconds: float) -> None:
        """The wall clock goes forward two hours, then back four, then it is right again."""
        for moved in (7200, -7200, 0):
            self.say(f"clock {moved:+d} s")
            self.clock.write_text(str(moved))
            time.sleep(seconds / 2)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 MiB."""
    folder.mkdir()
    options = f"size={_DISK},mode=700"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "soak", str(folder)], check=True, timeout=30
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=30)


@pytest.fixture
def soak(cli: Cli, region_a: Server) -> Iterator[Soak]:
    clock = cli.folder / "clock"
    clock.write_text("0")
    shim = str(Path(__file__).with_name("clock"))
    common = {**cli.environment, "PYTHONPATH": shim, "ICECORE_TEST_CLOCK": str(clock)}
    with small_disk(cli.folder / "disk") as disk:
        places = (f"s3://{BUCKET}/soak-{os.getpid()}", str(disk / "repository"))
        steps = int(12 * SECONDS)
        jobs = []
        for number in range(JOBS):
            local = number % 2
            environment = {**common, **region_a.environment(), "ICECORE_REPOSITORY": places[local]}
            keep = ("--keep-last", str(_KEEP)) if local else ()
            # Two run undisturbed, one on each repository: their memory is looked at.
            jobs.append(Managed(cli, f"job-{number}", steps, environment, keep, number < 2))
        for job in jobs[:2]:
            subprocess.run(
                cli.command("init"),
                env=job.environment,
                check=True,
                capture_output=True,
                timeout=60,
            )
        made = Soak(cli, jobs, region_a, disk, clock)
        try:
            yield made
        finally:
            with suppress(ProcessLookupError):
                region_a.process.send_signal(signal.SIGCONT)
            for job in jobs:
                job.over = True
                job.kill(signal.SIGKILL)
            for job in jobs:
                if job.thread.ident is not None:
                    job.thread.join(30)
            shutil.rmtree(disk / "ballast", ignore_errors=True)
            for instance in Registry(cli.folder / "state").instances():
                if instance.alive:
                    instance.kill(signal.SIGKILL)
                    instance.wait(timeout=30)


def test_soak(soak: Soak) -> None:
    seed = random.randrange(1 << 32)
    random.seed(seed)
    soak.run(SECONDS)
    calm = time.monotonic()
    time.sleep(3 * EVERY)
    hurried = time.monotonic()
    for job in soak.jobs:
        Path(f"{job.out}.hurry").touch()
    for job in soak.jobs:
        job.thread.join(max(1.0, hurried + _END_SECONDS - time.monotonic()))
    report = "\n".join([f"seed {seed}", *soak.log, *(_about(job) for job in soak.jobs)])
    print(report)

    whole = soak_job.expected(soak.jobs[0].steps)
    for job in soak.jobs:
        assert not job.thread.is_alive() and job.statuses[-1] == 0, f"{job.name}\n{report}"
        assert job.out.read_text().splitlines() == whole, f"{job.name} computed otherwise\n{report}"
        taken = [at for at, _ in job.snapshots() if calm < at < hurried]
        assert taken, f"{job.name} has no snapshots after the disturbances\n{report}"
        _require_listed(job, report)
    for job in soak.jobs[:2]:
        _require_sound(job)
        _require_flat(job, report)


def _about(job: Managed) -> str:
    failed = [e for _, e in job.heard if str(e.get("event", "")).endswith("_failed")]
    errors = sorted({str(e.get("error", ""))[:160] for e in failed})
    err = (job.cli.folder / f"{job.name}.err").read_text()[-600:]
    return f"{job.name}: {len(job.snapshots())} snapshots, {job.statuses}\n  {errors}\n  {err}"


def _events(job: Managed, *words: str) -> list[dict[str, object]]:
    done = subprocess.run(
        job.cli.command("--json", *words),
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def _require_listed(job: Managed, report: str) -> None:
    """Every snapshot that was reported is listed; with retention the newest ones are."""
    listed = {e["snapshot"] for e in _events(job, "ls", job.name) if e["event"] == "snapshot"}
    said = [snapshot for _, snapshot in job.snapshots()]
    lost = set(said[-_KEEP:] if job.options else said) - listed
    assert not lost, f"{job.name}: {sorted(lost)} were committed and are gone\n{report}"


def _require_sound(job: Managed) -> None:
    """The repository has everything that its snapshots name."""
    _events(job, "check", "--read-data")


def _require_flat(job: Managed, report: str) -> None:
    """Their supervisor lives for the whole time."""
    assert job.statuses == [0], f"{job.name} was to run undisturbed\n{report}"
    third = len(job.resident) // 3
    early = max(size for _, size in job.resident[third : 2 * third])
    late = max(size for _, size in job.resident[2 * third :])
    assert late <= early + _GROWTH_KIB, f"{job.name}: {early} KiB, then {late} KiB\n{report}"
