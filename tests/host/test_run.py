"""Starting a job: its init, its surroundings, its end. Real processes in real namespaces."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.errors import MissingTool, NotFound, UsageError
from icecore.events import Event
from icecore.host.jobs import namespaces
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation, init_program
from icecore.host.jobs.registry import Registry
from icecore.host.jobs.start import Launch, Starting
from icecore.host.kernel import limits, procfs

from .criu_round import emptied, output, until

pytestmark = pytest.mark.criu

EVERY_ISOLATION = [
    pytest.param(Isolation(), id="pid+ipc"),
    pytest.param(Isolation(network=True), id="network"),
    pytest.param(Isolation(root=True), id="root"),
    pytest.param(Isolation(network=True, root=True), id="network+root"),
    pytest.param(Isolation(pid=False, ipc=False), id="none"),
]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with emptied(Registry(tmp_path / "state")) as registry:
        yield registry


def run(registry: Registry, script: str, isolation: Isolation | None = None) -> Job:
    return registry.start(["sh", "-c", script], name="job", isolation=isolation)


# -- how it ends


@pytest.mark.parametrize("isolation", EVERY_ISOLATION)
@pytest.mark.parametrize(
    ("script", "word", "code"),
    [
        ("exit 0", "exited 0", 0),
        ("exit 3", "exited 3", 3),
        ("kill -TERM $$", "killed by SIGTERM", 143),
    ],
)
def test_exit_status(
    registry: Registry, isolation: Isolation, script: str, word: str, code: int
) -> None:
    status = run(registry, script, isolation).wait(10)
    assert (str(status), status.exit_code) == (word, code)
    assert str(registry.find("job").status()) == word  # another look at it says the same


def test_what_the_command_leaves_behind_is_ended_first(registry: Registry) -> None:
    job = run(
        registry, "(trap '' TERM; while :; do echo alive; sleep 0.02; done) & sleep 0.5; exit 3"
    )
    assert job.wait(10).code == 3
    written = len(output(job))
    assert written > 0
    time.sleep(0.1)
    assert len(output(job)) == written


def test_without_a_pid_namespace_only_its_own_tree_is_ended(registry: Registry) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            # Two forks: the sleeper's parent ends, so it comes to the init, its subreaper.
            job = run(
                registry,
                "trap 'exit 4' USR1; (sleep 61 & echo $! ); while :; do sleep 0.02; done",
                Isolation(pid=False),
            )
            until(lambda: output(job).endswith("\n"))
            sleeper = int(output(job))
            until(lambda: procfs.status(sleeper).parent == job.pid)
            job.kill(signal.SIGUSR1)
            assert job.wait(10).code == 4
            assert not procfs.exists(sleeper) or procfs.is_zombie(sleeper)
            assert bystander.poll() is None
        finally:
            bystander.kill()


@pytest.mark.parametrize("isolation", [Isolation(), Isolation(pid=False)])
def test_orphans_are_reaped(registry: Registry, isolation: Isolation) -> None:
    job = run(
        registry,
        "for i in 1 2 3 4 5; do (true & sleep 0.01; sleep 0.05 &) ; done; sleep 0.3; echo done; sleep 60",
        isolation,
    )
    until(lambda: "done" in output(job))
    until(lambda: len(procfs.children(job.pid)) == 1)
    assert not any(procfs.is_zombie(pid) for pid in procfs.tree(job.pid))


def test_an_init_killed_from_outside_counts_as_killed(registry: Registry) -> None:
    job = run(registry, "sleep 60")
    job.kill(signal.SIGKILL)
    assert str(job.wait(10)) == "killed by SIGKILL"


# -- signals


def test_signals_from_outside_reach_the_command(registry: Registry) -> None:
    job = run(
        registry,
        "trap 'echo usr1' USR1; trap 'exit 5' INT; echo ready; while :; do sleep 0.02; done",
    )
    until(lambda: "ready" in output(job))
    job.kill(signal.SIGUSR1)
    until(lambda: "usr1" in output(job))
    job.kill(signal.SIGINT)
    assert job.wait(10).code == 5


def test_signals_from_inside_to_the_init_do_not(registry: Registry) -> None:
    job = run(
        registry, "trap 'exit 5' USR1; kill -USR1 1; kill -TERM 1; kill -KILL 1; sleep 0.1; exit 6"
    )
    assert job.wait(10).code == 6


def test_a_kill_of_its_own_group_spares_the_init(registry: Registry) -> None:
    assert str(run(registry, "kill -TERM 0; sleep 5").wait(10)) == "killed by SIGTERM"


def test_stop_and_continue(registry: Registry) -> None:
    job = run(registry, "while :; do sleep 0.02; done")
    job.kill(signal.SIGSTOP)
    main = job.main_process()
    until(lambda: procfs.status(main).stopped)
    job.kill(signal.SIGCONT)
    until(lambda: not procfs.status(main).stopped)


# -- surroundings

LOOK = r"""
import fcntl, json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "fds": {name: os.readlink(f"/proc/self/fd/{name}") for name in sorted(os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{name}")},
    "append": [bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND) for fd in (1, 2)],
    "blocked": status["SigBlk"].strip(), "ignored": status["SigIgn"].strip(),
    "umask": status["Umask"].strip(), "cwd": os.getcwd(), "environment": dict(os.environ), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0), "parent": os.getppid(),
}))
"""


def look(
    registry: Registry, isolation: Isolation | None = None, **options: object
) -> dict[str, object]:
    job = registry.start([sys.executable, "-S", "-c", LOOK], isolation=isolation, **options)  # type: ignore[arg-type]
    assert job.wait(20).code == 0, output(job, "stderr")
    found: dict[str, object] = json.loads(output(job))
    return found


@pytest.mark.parametrize("isolation", EVERY_ISOLATION)
def test_surroundings(registry: Registry, tmp_path: Path, isolation: Isolation) -> None:
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = (
        max(int(name) for name in os.listdir("/proc/self/fd")) + 100
    )  # other tests' files may still be open
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        found = look(
            registry,
            isolation,
            cwd=tmp_path,
            umask=0o027,
            environment={"PATH": os.environ["PATH"], "GREETING": "grüß\udcff"},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(inherited)
    directory = (
        namespaces.INSTANCE_MOUNT if isolation.root else str(registry.instances()[0].directory)
    )
    assert found["fds"] == {
        "0": "/dev/null",
        "1": f"{directory}/stdout.log",
        "2": f"{directory}/stderr.log",
    }
    assert found["append"] == [True, True]
    assert int(str(found["blocked"]), 16) == 0
    assert int(str(found["ignored"]), 16) == (1 << signal.SIGPIPE - 1) | (
        1 << signal.SIGXFSZ - 1
    )  # Python's own
    assert (found["umask"], found["cwd"], found["files"]) == (
        "0027",
        str(tmp_path),
        [limit, before[1]],
    )
    environment = found["environment"]
    assert isinstance(environment, dict)
    assert environment["GREETING"] == "grüß\udcff"
    assert found["group"] == found["pid"]
    assert found["session"] == found["parent"]
    if isolation.pid:
        assert (found["pid"], found["parent"]) == (2, 1)


def test_logs_are_private(registry: Registry) -> None:
    job = run(registry, "true")
    job.wait(10)
    assert stat.S_IMODE(registry.state.joinpath("jobs").stat().st_mode) == 0o700
    assert {
        stat.S_IMODE(job.log_path(stream).stat().st_mode) for stream in ("stdout", "stderr")
    } == {0o600}


@pytest.mark.parametrize("allowed", [False, True])
def test_io_uring_is_denied(registry: Registry, allowed: bool) -> None:
    call = "import ctypes as c; n = c.CDLL(None, use_errno=True).syscall(425, 4, c.create_string_buffer(120))"
    thread = f"{call}; print(n > 0 or c.get_errno())"
    text = f"import threading as t; one = t.Thread(target=exec, args=({thread!r},)); one.start(); one.join()"
    events: list[Event] = []
    job = registry.start([sys.executable, "-c", text], io_uring=allowed, emit=events.append)
    job.wait(30)
    known = "True" if limits.io_uring_disabled() == 0 else str(errno.EPERM)
    said = job.log_path("stdout").read_text()
    assert said == f"{known if allowed else errno.EPERM}\n", job.log_path("stderr").read_text()
    assert [event.name for event in events] == ["run.started"]


def test_own_network_has_loopback_alone(registry: Registry) -> None:
    job = registry.start(
        ["sh", "-c", "cat /proc/net/dev; cat /proc/net/route"],
        isolation=Isolation(network=True, root=True),
    )
    job.wait(10)
    assert re.findall(r"^\s*(\w+):", output(job), re.MULTILINE) == ["lo"]
    program = "import socket; s = socket.create_server(('127.0.0.1', 80)); socket.create_connection(s.getsockname())"
    assert (
        registry.start([sys.executable, "-c", program], isolation=Isolation(network=True))
        .wait(10)
        .code
        == 0
    )


def test_private_root(registry: Registry) -> None:
    marker = Path("/dev/shm") / f"icecore-test-{os.getpid()}"
    marker.write_text("host")
    try:
        script = f"ls /proc | grep -c '^[0-9]'; test -e {marker}; echo $?; ls /dev/pts; echo; cat /proc/self/mountinfo; echo x > {marker}2"
        job = run(registry, script, Isolation(root=True))
        assert job.wait(10).code == 0, output(job, "stderr")
    finally:
        marker.unlink()
    counted, absent, *rest = output(job).split("\n")
    assert int(counted) <= 5
    assert absent == "1"
    assert rest[0].split() == ["ptmx"]
    points = [line.split()[4] for line in rest if line[:1].isdecimal()]
    assert set(points) == {
        "/",
        *job.description.binds,
        namespaces.INSTANCE_MOUNT,
        *(m[0] for m in namespaces.private_mounts()),
    }
    assert len(points) == len(set(points))
    assert not marker.with_name(marker.name + "2").exists()
    assert (
        str(job.directory) not in Path("/proc/self/mountinfo").read_text()
    )  # nothing reached the host


def test_a_private_root_needs_a_pid_namespace() -> None:
    with pytest.raises(UsageError, match="pid namespace"):
        Isolation(pid=False, root=True)


# -- who starts it


def test_it_survives_who_started_it(registry: Registry) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from icecore.host.jobs.registry import Registry
job = Registry(Path({str(registry.state)!r})).start(["sh", "-c", "while :; do echo tick; sleep 0.02; done"], name="ticker")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], timeout=30)
    assert done.returncode == -signal.SIGKILL
    job = registry.find("ticker")
    assert job.alive
    written = len(output(job))
    until(lambda: len(output(job)) > written)
    assert procfs.status(job.pid).session == job.pid


def test_whoever_dies_before_noting_it_down_leaves_nothing(
    registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "icecore-init").write_bytes(init_program().read_bytes())
    (tmp_path / "icecore-init").chmod(0o700)
    wanted = Launch(
        tmp_path,
        ["/bin/sh", "sh", "-c", f"echo ran > {tmp_path}/ran"],
        "/",
        {},
        0o022,
        Isolation(),
        [],
    )
    with Starting(wanted) as starting:
        assert procfs.exists(starting.pid)
    until(lambda: not procfs.exists(starting.pid) or procfs.is_zombie(starting.pid))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("isolation", [Isolation(), Isolation(root=True)])
def test_what_cannot_be_started_leaves_nothing(
    registry: Registry, tmp_path: Path, isolation: Isolation
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    with pytest.raises(UsageError, match="Permission denied"):
        registry.start([str(broken)], isolation=isolation)
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="Exec format error"):
        registry.start([str(broken)], isolation=isolation)
    broken.write_text("#!/no/such/interpreter\n")
    with pytest.raises(NotFound, match="interpreter"):
        registry.start([str(broken)], isolation=isolation)
    with pytest.raises(NotFound, match="no program"):
        registry.start(["no-such-program"], isolation=isolation)
    with pytest.raises(NotFound, match="no directory"):
        registry.start(["true"], cwd=tmp_path / "nowhere", isolation=isolation)
    with pytest.raises(UsageError, match="no command"):
        registry.start([])
    assert registry.instances() == []


def test_programs_are_looked_up_where_the_job_starts(registry: Registry, tmp_path: Path) -> None:
    script = tmp_path / "here"
    script.write_text("#!/bin/sh\necho $0 $1\n")
    script.chmod(0o755)
    job = registry.start(["./here", "one"], cwd=tmp_path)
    assert job.wait(10).code == 0, output(job, "stderr")
    assert (job.name, output(job).split()[-1]) == ("here", "one")
    job = registry.start(["here", "two"], environment={"PATH": str(tmp_path)})
    assert job.wait(10).code == 0, output(job, "stderr")
    assert output(job).split()[-1] == "two"


def test_without_the_init_it_says_what_is_missing(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "__file__", str(tmp_path / "namespaces.py"))
    with pytest.raises(MissingTool, match="compiler"):
        registry.start(["true"])
    assert registry.instances() == []


def test_the_init_is_small(registry: Registry) -> None:
    job = run(registry, "echo ready; sleep 60")
    until(lambda: "ready" in output(job))
    assert init_program().stat().st_size < 8192
    private = re.search(
        r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{job.pid}/status").read_text(), re.MULTILINE
    )
    assert private is not None
    assert int(private[1]) <= 16
    until(lambda: os.listdir(f"/proc/{job.pid}/fd") == ["3"])  # the command may run before
    assert os.readlink(f"/proc/{job.pid}/cwd") == "/"
