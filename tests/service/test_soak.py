"""The soak: supervised jobs for ICECORE_TORTURE_SECONDS, on a repository in S3 and on one on a small
disk, in the foreground and through a node service with ICECORE_SOAK_CLIENTS clients of its API.
Supervisors, jobs and the service are killed at random, the server does not answer for a while, the
disk is full for a while, and the wall clock jumps. In the end every job has computed what an
undisturbed run computes, snapshots are taken again, all that were reported are there, memory is
flat, and the service has answered its clients in time.

An hour with 20 jobs: ICECORE_TORTURE_SECONDS=3600 ICECORE_SOAK_JOBS=20.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import pytest

from icecore.errors import IcecoreError
from icecore.host.jobs.registry import Registry
from tests.cli.conftest import Cli, until
from tests.conftest import BUCKET
from tests.seaweedfs import Server
from tests.service import soak_job
from tests.service.soak_service import Clients, Serving, kinds_of_memory, note_resident

pytestmark = [
    pytest.mark.criu,
    pytest.mark.torture,
    pytest.mark.usefixtures("needs_criu"),
    pytest.mark.timeout(7200),
]

SECONDS = float(os.environ.get("ICECORE_TORTURE_SECONDS", "300"))
JOBS = int(os.environ.get("ICECORE_SOAK_JOBS", min(20, 3 * (os.cpu_count() or 1))))
EVERY = 20.0
#: Seconds between two disturbances, for four jobs: long enough for snapshots in between.
_PAUSES = (2.0, 9.0)
_DISK = (256 << 20) * max(1, JOBS // 6)
_KEEP = 3
#: What a process may grow by, by the median slope of its resident memory after the first third. In
#: a run of minutes, the caches that fill at first are part of it.
_GROWTH_KIB = (4 if SECONDS >= 1800 else 32) << 10
#: The service is not killed after this share of the time, so that its memory can be watched.
_SERVICE_LIVES = 0.4
_KILLS = max(2, round(SECONDS / 60))
_FIRST_SECONDS = 180.0
_END_SECONDS = 600.0
#: A job that failed again and again is restored after a minute (the longest back-off).
_CALM_SECONDS = 60.0 + 3 * EVERY
#: Statuses after which a service manager starts a job again: stopped with a snapshot, killed, ended
#: by a signal before it was ready (-15) or by a second one (143), or the repository could not be
#: reached (8). 16: the lease of a holder that was killed is still there. 19: the service is down. 137:
#: the job failed from every snapshot that there is.
_AGAIN = {85, -9, -15, 143, 8, 16, 17, 19, 137}


@dataclass
class Managed:
    """One job and what starts it again, as a service manager does.

    Attributes:
        heard: (monotonic time, event) of what its supervisors reported.
        statuses: Their exit statuses.
        resident: (monotonic time, KiB) of the present supervisor.
        service: Runs it; None: it is supervised in the foreground.
    """

    cli: Cli
    name: str
    steps: int
    environment: dict[str, str]
    options: tuple[str, ...]
    steady: bool
    service: Serving | None = None
    heard: list[tuple[float, dict[str, object]]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    supervisor: subprocess.Popen[str] | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.out = self.cli.folder / f"{self.name}.out"
        self.thread = threading.Thread(target=self._manage, name=self.name, daemon=True)

    def _manage(self) -> None:
        words = [] if self.service is None else ["--service", self.service.socket]
        words += ["run", "--name", self.name, "--resume", "--every", f"{EVERY:.0f}s"]
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
        if self.supervisor is not None:
            note_resident(self.supervisor.pid, self.resident)

    def kill(self, number: signal.Signals) -> None:
        """Signal the supervisor. The client of a service passes a signal on, but not SIGKILL."""
        if self.service is not None and number == signal.SIGKILL:
            self.service.kill_supervisor(self.name)
            return
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.send_signal(number)

    def end(self) -> None:
        """End whatever supervises the job."""
        self.kill(signal.SIGKILL)
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.kill()

    def snapshots(self) -> list[tuple[float, str]]:
        """Return when each snapshot was reported, and its id."""
        names = ("run.snapshot", "run.preempted")
        return [(at, str(e["snapshot"])) for at, e in self.heard if e.get("event") in names]


@dataclass
class Soak:
    """The jobs, and what disturbs them."""

    cli: Cli
    service: Serving
    clients: Clients
    jobs: list[Managed]
    server: Server
    disk: Path
    clock: Path
    log: list[str] = field(default_factory=list)
    starting: threading.Lock = field(default_factory=threading.Lock)

    def say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:7.1f} {what}")

    def run(self, seconds: float) -> None:
        """Disturb the jobs for so long."""
        self.clients.busy = True
        for job in self.jobs:
            job.thread.start()
        until(lambda: all(job.snapshots() for job in self.jobs[:2]), "snapshots", _FIRST_SECONDS)
        self.began = time.monotonic()
        plans = (
            (0.20, self.unreachable, min(60.0, seconds / 4)),
            (0.50, self.full, min(60.0, seconds / 6)),
            (0.70, self.jumps, min(60.0, seconds / 6)),
            *((random.uniform(0.02, _SERVICE_LIVES), self.killed, 0.0) for _ in range(_KILLS)),
        )
        others = [
            threading.Thread(target=self._later, args=(share * seconds, work, length), daemon=True)
            for share, work, length in plans
        ]
        for thread in (*others, threading.Thread(target=self._look, daemon=True)):
            thread.start()
        while time.monotonic() - self.began < seconds:
            time.sleep(random.uniform(*_PAUSES) * 4 / max(1, JOBS - 2))
            self.disturb()
        for thread in others:
            thread.join(seconds)

    def _look(self) -> None:
        """Note how much memory the processes have, until the jobs end, and say how it goes."""
        for second in count(1):
            if self.clients.over:
                return
            if second % 300 == 0:
                self.say_so_far()
            for job in self.jobs:
                job.look()
            self.service.look()
            time.sleep(1.0)

    def say_so_far(self) -> None:
        """Print what the clients saw, and the memory of the processes that live on."""
        first, _, _ = self.clients.about(self.began).partition("\n")
        print(f"{time.monotonic() - self.began:7.1f} {first}", flush=True)
        watched = [(job.name, job.supervisor) for job in self.jobs[:2]]
        for name, process in (*watched, ("service", self.service.process)):
            if process is not None:
                print(f"        {name}: {kinds_of_memory(process.pid)}", flush=True)

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
                found = Registry(self.cli.folder / "state").find(job.name)
                if found.pid:  # of one that only starts it is 0, which would be this test's group
                    os.kill(found.pid, signal.SIGKILL)
        if what == "stop":
            job.kill(signal.SIGTERM)

    def killed(self, seconds: float) -> None:
        """The service is killed, and started again."""
        with self.starting:
            self.say("service")
            self.service.kill()
            self.service.start()

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
    with small_disk(cli.folder / "disk") as disk, ExitStack() as stack:
        places = (f"s3://{BUCKET}/soak-{os.getpid()}", str(disk / "repository"))
        steps = int(12 * SECONDS)
        # The service works on the small disk, so that its answers do not wait for the S3 server.
        service = Serving(cli, {**common, "ICECORE_REPOSITORY": places[1]})
        jobs = []
        for number in range(JOBS):
            served = service if number % 3 == 2 else None
            local = 1 if served else number % 2
            environment = {**common, **region_a.environment(), "ICECORE_REPOSITORY": places[local]}
            keep = ("--keep-last", str(_KEEP)) if local else ()
            # Two run undisturbed, one on each repository: their memory is looked at.
            jobs.append(Managed(cli, f"job-{number}", steps, environment, keep, number < 2, served))
        for job in jobs[:2]:
            subprocess.run(
                cli.command("init"),
                env=job.environment,
                check=True,
                capture_output=True,
                timeout=60,
            )
        service.start()
        stack.callback(service.end)
        clients = stack.enter_context(Clients.running(service))
        made = Soak(cli, service, clients, jobs, region_a, disk, clock)
        try:
            yield made
        finally:
            with suppress(ProcessLookupError):
                region_a.process.send_signal(signal.SIGCONT)
            for job in jobs:
                job.over = True
                job.end()
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
    time.sleep(max(10.0, SECONDS / 20))  # the service is idle but for its clients
    soak.run(SECONDS)
    calm = time.monotonic()
    time.sleep(_CALM_SECONDS)
    hurried = time.monotonic()
    soak.clients.over = True
    for job in soak.jobs:
        Path(f"{job.out}.hurry").touch()
    for job in soak.jobs:
        job.thread.join(max(1.0, hurried + _END_SECONDS - time.monotonic()))
    report = "\n".join(
        [
            f"seed {seed}",
            *soak.log,
            *(_about(job) for job in soak.jobs),
            soak.clients.about(soak.began),
            *(
                f"{name}: {growth(resident):+.0f} KiB in {len(resident)} samples"
                for name, resident in _watched(soak)
            ),
        ]
    )
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
        assert job.statuses == [0], f"{job.name} was to run undisturbed\n{report}"
    for name, resident in _watched(soak):
        assert len(resident) > 10 and growth(resident) <= _GROWTH_KIB, f"{name} grows\n{report}"
    soak.clients.require_answers(report)
    served = [job for job in soak.jobs if job.service is not None]
    assert served and soak.service.starts == 1 + _KILLS, report


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


def _watched(soak: Soak) -> list[tuple[str, list[tuple[float, int]]]]:
    """Return the processes that live on, and how much memory they had."""
    steady = [(job.name, job.resident) for job in soak.jobs[:2]]
    return [*steady, ("service", soak.service.resident)]


def growth(resident: list[tuple[float, int]]) -> float:
    """Return by how many KiB a process grew after the first third of its time: the median of the
    slopes between samples (Theil and Sen), times the time.
    """
    later = resident[len(resident) // 3 :]
    slopes = [
        (b - a) / (then - now)
        for index, (now, a) in enumerate(later)
        for then, b in later[index + 1 :]
        if then > now
    ]
    return median(slopes) * (later[-1][0] - later[0][0]) if slopes else 0.0
