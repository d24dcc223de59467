"""A real ``icecore serve`` with real users: their jobs, and nothing of each other's."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from icecore.errors import ServiceFailed
from icecore.host.jobs import temporary
from icecore.host.jobs.identity import user_name
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import freezer, frozen
from icecore.remote.connection import Service, at
from tests.cli.conftest import until
from tests.roundtrip.test_restless import freeze
from tests.service.api.conftest import ALICE, BOB
from tests.zygote import Forked, Zygote

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="the service is root's"),
]

#: Users who can read this Python wherever it is, and can do nothing else that others cannot.
_READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
COUNT = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"


@cache
def _zygote() -> Zygote:
    """Return the parent of services and of root's commands, to which a warning is an error."""
    return Zygote({"PATH": os.environ["PATH"], "HOME": "/", "PYTHONWARNINGS": "error"})


@dataclass
class Node:
    """A node with a service.

    Attributes:
        more: Options of ``icecore serve``.
    """

    folder: Path
    repository: Path
    more: list[str] = field(default_factory=list)
    process: Forked | None = None

    @property
    def socket(self) -> str:
        return str(self.folder / "run" / "service.sock")

    @property
    def client(self) -> Service:
        return Service(self.socket)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONWARNINGS": "error"}
        return {**kept, "ICECORE_STATE": str(self.folder / "state"), **more}

    def start(self, **environment: str) -> None:
        words = ["-r", str(self.repository), "serve", "--socket", self.socket, *self.more]
        self.process = _zygote().start(words, self.environment(**environment), "/", text=False)
        until = time.monotonic() + 30
        while True:
            try:
                assert self.client.get("/v1/healthz") == {"status": "ok"}
                return
            except ServiceFailed:
                assert self.process.poll() is None, self.process.communicate()[1].decode()
                assert time.monotonic() < until
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> bytes:
        """End the service; return what it wrote."""
        assert self.process is not None
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        if number == signal.SIGTERM:
            assert self.process.returncode == 0, said.decode()
        self.process = None
        return said

    def command(self, uid: int, *words: str) -> list[str]:
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *_READS]
        return [*user, sys.executable, "-P", "-m", "icecore", "--service", self.socket, *words]

    def run(
        self, uid: int, *words: str, timeout: float = 60, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of a user."""
        kept = {"PATH": os.environ["PATH"], "HOME": "/", **more}
        return subprocess.run(
            self.command(uid, *words), cwd="/", env=kept, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip

    def root(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of root's that does not ask the service."""
        return _zygote().run(list(words), self.environment(), "/", 60)

    def ok(self, uid: int, *words: str, **more: str) -> str:
        done = self.run(uid, *words, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def node(public: Path) -> Iterator[Node]:
    found = Node(public, public / "repository")
    assert found.root("init", str(found.repository)).returncode == 0
    try:
        yield found
    finally:
        _end_jobs(public / "state")
        if found.process is not None:
            found.process.kill()
            found.process.communicate()


def _end_jobs(state: Path) -> None:
    from icecore.service.api import operation_files as files

    for directory in (state / "service" / "operations").glob("*"):
        process = files.read_process(directory)
        if process is not None and files.read_result(directory) is None:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    for job in Registry(state).instances():
        if job.alive:
            job.kill(signal.SIGKILL)


def test_a_user_runs_snapshots_and_restores_a_job(node: Node) -> None:
    node.start()
    done = node.run(
        ALICE, "run", "--", "sh", "-c", "id -u; echo $FOO; echo e >&2; exit 3", FOO="bar"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{ALICE}\nbar\n", "e\n")
    assert node.ok(ALICE, "run", "-d", "--name", "count", "--", "sh", "-c", COUNT) == "count\n"
    time.sleep(0.5)
    snapshot = node.ok(ALICE, "dump", "--stop", "--tag", "a", "count").split()[0]
    written = node.ok(ALICE, "logs", "count").split()
    listed = [json.loads(line) for line in node.ok(ALICE, "--json", "ls").splitlines()]
    assert [(one["snapshot"], one["tags"]) for one in listed] == [(snapshot, ["a"])]
    assert [(one["user"], one["user_name"]) for one in listed] == [(ALICE, user_name(ALICE))]
    jobs = [json.loads(line) for line in node.ok(ALICE, "--json", "ps", "-a").splitlines()]
    assert {(one["user"], one["user_name"]) for one in jobs} == {(ALICE, user_name(ALICE))}
    local = node.root("-r", str(node.repository), "--json", "ls")
    assert json.loads(local.stdout) | {"at": 0} == {**listed[0], "at": 0}
    assert f"snapshot       {snapshot}" in node.ok(ALICE, "show", "count")
    assert "count runs as process" in node.ok(ALICE, "restore", "count")
    time.sleep(0.5)
    rest = node.ok(ALICE, "logs", "count").split()
    assert len(rest) > len(written) > 3
    assert rest == [str(number) for number in range(1, len(rest) + 1)]  # none lost, none twice
    job = node.client.get(at("jobs", "count"))
    assert job["owner"] == ALICE and job["state"] == "running"
    assert os.stat(f"/proc/{job['pid']}").st_uid in (0, ALICE)
    node.ok(ALICE, "kill", "-s", "KILL", "count")
    assert node.run(ALICE, "wait", "count").returncode == 137
    node.ok(ALICE, "rm", "count")

    # another user sees nothing of it, and root everything
    assert node.ok(BOB, "ps", "-a") == "" and node.ok(BOB, "ls") == ""
    for words in (
        ["restore", "count"],
        ["show", snapshot],
        ["dump", "count"],
        ["logs", "sh"],
        ["rm", "sh"],
    ):
        refused = node.run(BOB, *words)
        assert refused.returncode == 3, (words, refused.stderr)
        assert "there is no" in refused.stderr
    assert len(list(node.client.items("/v1/snapshots"))) == 1


def test_the_logs_of_a_users_job_are_limited(node: Node) -> None:
    """By the service, while nobody follows the job."""
    node.start()
    words = ("seq", "-f", "%015.0f", "65536")
    command = ("sh", "-c", '"$@"; sleep 60', "sh", *words)
    node.ok(ALICE, "run", "-d", "--name", "long", "--log-limit", "64 KiB", "--", *command)
    (log,) = (node.folder / "state" / "jobs").glob("*/stdout.log")
    until(lambda: log.stat().st_size == 1 << 20, "a MiB is written")
    start = log.with_suffix(".start")
    until(lambda: (1 << 20) - start.stat().st_size < 128 << 10, "the log is trimmed")
    done = node.run(ALICE, "logs", "long")
    first = start.stat().st_size // 16 + 1
    assert done.stdout.split() == [f"{number:015}" for number in range(first, 65537)]
    assert "of stdout, removed by --log-limit" in done.stderr
    node.ok(ALICE, "kill", "-s", "KILL", "long")


#: Its number in memory, the one in a closed file and the number of files may never differ.
FILED = """
cd "$1"; i=0
while :; do
    [ "$(cat count 2>/dev/null || echo 0)" = $i ] || exit 41
    [ "$(ls | grep -c segment)" = $i ] || exit 42
    echo $i > segment-$i; i=$((i+1)); echo $i > new; mv new count; echo $i; sleep 0.05
done
"""


def test_data_of_a_user_is_dumped_and_restored(node: Node) -> None:
    node.start()
    data = node.folder / "data"
    data.mkdir()
    refused = node.run(ALICE, "run", "-d", "--data", str(data), "--", "true")
    assert refused.returncode == 2 and "belongs to user 0" in refused.stderr
    os.chown(data, ALICE, ALICE)
    words = ["run", "-d", "--name", "filed", "--data", str(data), "--"]
    node.ok(ALICE, *words, "sh", "-c", FILED, "sh", str(data))
    until(lambda: len(list(data.iterdir())) > 5, "5 files")
    # A directory owned by root, such as programs outside the job create. It does not belong to the
    # job, although icecore's init in the job also runs as root.
    with tempfile.TemporaryDirectory(prefix="icecore-not-the-jobs-"):
        snapshot = node.ok(ALICE, "dump", "filed").split()[0]
    taken = len(list(data.iterdir()))
    until(lambda: len(list(data.iterdir())) > taken + 3, "it goes on")
    assert f" {data}" in node.ok(ALICE, "show", snapshot)
    node.ok(ALICE, "kill", "-s", "KILL", "filed")
    node.run(ALICE, "wait", "filed")
    (data / "segment-0").unlink()
    (data / "segment-of-another").write_text("added")
    os.chown(data / "segment-of-another", BOB, BOB)
    planned = node.ok(ALICE, "restore", "-n", snapshot)
    assert "segment-of-another" in planned and "segment-0" in planned
    assert node.run(BOB, "restore", snapshot).returncode == 3
    node.ok(ALICE, "restore", snapshot)
    before = len(list(data.iterdir()))
    until(lambda: len(list(data.iterdir())) > before + 3, "it goes on")
    assert node.client.get(at("jobs", "filed"))["state"] == "running"
    node.ok(ALICE, "kill", "-s", "KILL", "filed")
    node.run(ALICE, "wait", "filed")
    last = int(node.ok(ALICE, "logs", "filed").split()[-1])
    assert {path.name for path in data.iterdir() if "segment" in path.name} >= {
        f"segment-{number}" for number in range(last)
    }
    assert {path.stat().st_uid for path in [data, *data.iterdir()]} == {ALICE}


@pytest.mark.skipif(
    bool(temporary.hidden_from_criu(temporary.POINTS, "/", Path("/"))),
    reason="icecore is installed in /tmp, which a private /tmp hides from CRIU",
)
def test_a_users_job_has_a_tmp_of_its_own(public: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="icecore-test-") as name:
        Path(name).chmod(0o755)
        node = Node(Path(name), public / "repository")
        assert node.root("init", str(node.repository)).returncode == 0
        try:
            node.start()
            words = ["run", "-d", "--name", "own", "--tmp", "private", "--", "sh", "-c", FILED]
            node.ok(ALICE, *words, "sh", "/tmp")
            until(lambda: len(node.ok(ALICE, "logs", "own").split()) > 5, "5 files")
            snapshot = node.ok(ALICE, "dump", "--stop", "own").split()[0]
            assert "/tmp (private to the job)" in node.ok(ALICE, "show", snapshot)
            planned = node.ok(ALICE, "restore", "-n", snapshot)
            assert "the job gets a private /tmp" in planned and "segment" not in planned
            node.ok(ALICE, "restore", "--name", "again", snapshot)
            before = len(node.ok(ALICE, "logs", "again").split())
            until(lambda: len(node.ok(ALICE, "logs", "again").split()) > before + 3, "it goes on")
            job = node.client.get(at("jobs", "again"))
            assert job["isolation"]["tmp"] and job["data"] == ["/tmp", "/var/tmp"]
            top = os.stat(f"/proc/{job['pid']}/root/tmp")
            assert (top.st_uid, top.st_gid, top.st_mode & 0o7777) == (0, 0, 0o1777)
        finally:
            _end_jobs(Path(name) / "state")
            if node.process is not None:
                node.process.kill()
                node.process.communicate()


def test_errors_and_statuses_are_those_of_the_command_line(node: Node) -> None:
    node.start()
    for words in (
        ["dump", "nosuch"],
        ["run", "--", "/no/such/program"],
        ["run", "--cwd", "/nowhere", "--", "true"],
        ["restore", "nosuch"],
        ["kill", "nosuch"],
        ["ls", "nosuch"],
        ["--json", "dump", "nosuch"],
        ["run", "--every", "1m", "--", "true"],
        ["run", "-d", "--rm", "--", "true"],
    ):
        through = node.run(ALICE, *words)
        own = [*words[:1], "--user", str(ALICE), *words[1:]] if words[0] == "run" else words
        direct = node.root("-r", str(node.repository), *own)
        assert (through.returncode, through.stderr) == (direct.returncode, direct.stderr), words
        assert direct.returncode != 0
        if "--json" in words:
            one, two = json.loads(through.stdout), json.loads(direct.stdout)
            assert {**one, "at": 0} == {**two, "at": 0}
    loaded = node.run(ALICE, "restore", "nosuch", PYTHONPROFILEIMPORTTIME="1").stderr
    assert "icecore.remote" in loaded and "numpy" not in loaded  # a client starts fast
    refused = node.run(ALICE, "dump", "--before", "id", "x")
    assert refused.returncode == 2 and "refuses --before" in refused.stderr
    refused = node.run(ALICE, "-r", "/elsewhere", "dump", "x")
    assert refused.returncode == 2 and "refuses --repository" in refused.stderr


def test_without_a_service(tmp_path: Path, node: Node) -> None:
    missing = node.run(ALICE, "ps")
    assert missing.returncode == 19 and "there is no service" in missing.stderr
    forged = tmp_path / "forged.sock"
    with socket.socket(socket.AF_UNIX) as other:  # of somebody who would like to see environments
        other.bind(str(forged))
        os.chown(forged, BOB, BOB)
        done = subprocess.run(
            [*node.command(ALICE, "ps")[:-3], "--service", str(forged), "ps"],
            cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 19


def test_a_supervised_job_outlives_client_and_service(node: Node) -> None:
    node.start()
    client = subprocess.Popen(
        node.command(ALICE, "run", "--name", "s", "--every", "2s", "--preempted-exit", "85",
                     "--", "sh", "-c", COUNT),
        cwd="/", env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == b"1\n"
    until = time.monotonic() + 30
    while not list(node.client.items("/v1/snapshots")):
        assert time.monotonic() < until
        time.sleep(0.2)
    node.stop(signal.SIGKILL)
    node.start()
    (operation,) = node.client.items("/v1/operations", state="running")
    assert operation["supervised"] and operation["job"] == "s" and operation["attempt"] == 1
    while not node.client.get(at("jobs", "s"))["schedule"]["snapshots"]:
        assert time.monotonic() < until
        time.sleep(0.2)
    (explained,) = map(
        json.loads, node.ok(ALICE, "--json", "schedule", "explain", "s").splitlines()
    )
    assert explained["interval_seconds"] == 2.0 and explained["snapshots"] >= 1
    assert node.run(BOB, "schedule", "explain", "s").returncode == 3
    client.kill()  # hangs up
    client.communicate()
    time.sleep(0.5)
    assert node.client.get(at("jobs", "s"))["state"] == "running"
    assert node.client.get(at("jobs", "s"))["operation"] == operation["id"]

    # A supervisor that is killed is replaced by one that takes the job over.
    before = node.client.get(at("jobs", "s"))["instance"]
    path = node.folder / "state" / "service" / "operations" / operation["id"] / "process.json"
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    until = time.monotonic() + 30
    while node.client.get(at("operations", operation["id"]))["attempt"] != 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(2)
    assert node.client.get(at("jobs", "s"))["instance"] == before

    done = node.run(ALICE, "run", "--name", "s", "--every", "1h", "-d", "--", "true")
    assert done.returncode == 16 and "supervised by another process" in done.stderr
    node.client.post(at("operations", operation["id"], "cancel"), {"signal": "TERM"})
    until = time.monotonic() + 40
    while (found := node.client.get(at("operations", operation["id"])))["ended"] is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert found["exit_status"] == 85
    assert node.client.get(at("jobs", "s"))["state"] == "ended"
    words = ["run", "--name", "s", "--resume", "--every", "1h", "-d", "--", "false"]
    assert node.ok(ALICE, *words) == "s\n"  # restored, and left to the service
    assert node.client.get(at("jobs", "s"))["restored_from"]


def test_what_replaces_a_supervisor(node: Node) -> None:
    """It brings back what the supervisor before it ran, not an earlier run of the same name; waits
    for the repository; and finishes a stop.
    """
    node.start()
    words = ["run", "-d", "--name", "s", "--every", "1h", "--", "sh", "-c", COUNT]
    node.ok(ALICE, *words)
    node.ok(ALICE, "dump", "s")
    node.ok(ALICE, "kill", "-s", "KILL", "s")
    until(lambda: not [*node.client.items("/v1/operations", state="running")], "the first is over")
    node.ok(ALICE, *words)
    (operation,) = node.client.items("/v1/operations", state="running")
    found = at("operations", operation["id"])
    folder = node.folder / "state" / "service" / "operations" / operation["id"]

    def end_both(attempt: int) -> None:
        until(lambda: node.client.get(at("jobs", "s"))["state"] == "running", "it runs")
        os.kill(json.loads((folder / "process.json").read_text())["pid"], signal.SIGKILL)
        os.kill(node.client.get(at("jobs", "s"))["pid"], signal.SIGKILL)
        until(lambda: node.client.get(found)["attempt"] > attempt, "another supervisor")

    first = node.client.get(at("jobs", "s"))["instance"]
    end_both(1)
    until(lambda: node.client.get(at("jobs", "s"))["instance"] != first, "another instance")
    until(lambda: node.client.get(at("jobs", "s"))["state"] == "running", "it runs")
    assert not node.client.get(at("jobs", "s"))["restored_from"], "it has no snapshot"
    snapshot = node.ok(ALICE, "dump", "s").split()[0]

    attempt = node.client.get(found)["attempt"]
    end_both(attempt)
    node.repository.rename(node.repository.with_name("away"))
    # It tries for 30 s, and its successor waits for up to a minute.
    until(lambda: node.client.get(found)["attempt"] > attempt + 1, "it tries again", 150.0)
    node.repository.with_name("away").rename(node.repository)
    until(lambda: node.client.get(at("jobs", "s"))["restored_from"] == snapshot, "restored")
    lines = len(node.ok(ALICE, "logs", "s").split())
    until(lambda: len(node.ok(ALICE, "logs", "s").split()) > lines + 20, "it goes on")

    pid = json.loads((folder / "process.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    node.client.post(f"{found}/cancel", {"signal": "TERM"})
    os.kill(pid, signal.SIGKILL)
    until(lambda: node.client.get(found)["ended"] is not None, "it is stopped")
    assert node.client.get(found)["exit_status"] == 85
    assert len(list(node.client.items("/v1/snapshots"))) == 3


def test_a_dump_that_stops_a_supervised_job_ends_it(node: Node) -> None:
    """Nothing takes it for a failure, and restores it."""
    node.start()
    node.ok(ALICE, "run", "-d", "--name", "s", "--every", "1h", "--restart", "on-failure",
            "--", "sh", "-c", COUNT)  # fmt: skip
    (operation,) = node.client.items("/v1/operations", state="running")
    node.ok(ALICE, "dump", "--stop", "s")
    found = at("operations", operation["id"])
    until(lambda: node.client.get(found)["ended"] is not None, "it is stopped")
    assert node.client.get(found)["exit_status"] == 85
    assert node.client.get(at("jobs", "s"))["state"] == "ended"


def test_a_service_thaws_what_a_dump_left_frozen(node: Node) -> None:
    """All processes of a dump were killed, and nobody runs a command."""
    node.start()
    node.ok(ALICE, "run", "-d", "--name", "c", "--", "sh", "-c", COUNT)
    node.stop()
    (job,) = Registry(node.folder / "state").instances()
    assert job.group is not None
    with subprocess.Popen(["sleep", "600"]) as guard:
        assert freezer.mark(job.group, guard.pid)
        freeze(job.group)
        guard.kill()
    node.start()
    until(lambda: not frozen.is_frozen(job.group), "it is thawed")
    lines = len(node.ok(ALICE, "logs", "c").split())
    until(lambda: len(node.ok(ALICE, "logs", "c").split()) > lines, "it goes on")


def test_a_new_service_finds_a_dump_under_way(node: Node) -> None:
    """The service is killed while a dump runs; the dump commits, and the next service knows it."""
    node.start()
    node.ok(ALICE, "run", "-d", "--name", "c", "--", "sh", "-c", COUNT)
    begun = node.client.post(at("jobs", "c", "dump"), {})
    node.stop(signal.SIGKILL)
    node.start()
    records = list(node.client.events(begun["id"]))
    assert records[-1]["operation"]["state"] == "succeeded"
    assert records[-1]["operation"]["result"]["event"] == "dump.done"
    assert len(list(node.client.items("/v1/snapshots"))) == 1


def test_groups_and_policies(node: Node) -> None:
    """Members of the group of administrators see all; users have repositories of their own."""
    config = node.folder / "c.toml"
    own = node.folder / "of"
    own.mkdir()
    config.write_text(
        f'[service]\nadmin_group = "4000000"\nothers = "operate"\nrepository = "{own}/{{uid}}"\n'
    )
    node.more = ["--config", str(config)]
    with pytest.raises(AssertionError, match="there is no group"):
        node.start()
    node.process = None
    config.write_text(config.read_text().replace('"4000000"', '"daemon"'))
    node.start()
    node.ok(ALICE, "run", "-d", "--name", "c", "--", "sh", "-c", COUNT)
    node.ok(ALICE, "dump", "c")
    assert (own / str(ALICE)).is_dir() and (own / str(ALICE)).stat().st_mode & 0o777 == 0o700
    assert len(node.ok(ALICE, "ls").splitlines()) == 2
    assert node.ok(BOB, "ps", "-a") == ""
    member = node.command(BOB, "ps", "-a")
    member[3:4] = ["--groups=1"]  # daemon's, in place of --clear-groups
    done = subprocess.run(
        member,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.splitlines()[1].startswith("c "), done.stderr
    assert node.client.get("/v1/snapshots")["items"] == []  # the administrators' is another one
    assert len(node.client.get("/v1/snapshots", user=str(ALICE))["items"]) == 1


def test_tcp(node: Node) -> None:
    """TCP is refused without TLS, except on loopback if asked for; tokens are required."""
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    for more, said in (
        (["--listen", f"127.0.0.1:{port}"], "TCP without TLS"),
        (["--listen", f"0.0.0.0:{port}", "--plain-loopback"], "not a loopback address"),
        (["--listen", "nonsense", "--plain-loopback"], "HOST:PORT"),
        (["--listen", f"127.0.0.1:{port}", "--certificate", "/nowhere"], "cannot be used"),
    ):
        node.more = more
        with pytest.raises(AssertionError, match=said):
            node.start()
        node.process = None
    _certificate(node.folder)
    node.more = ["--listen", f"127.0.0.1:{port}", "--certificate", str(node.folder / "c.pem")]
    node.start()
    token = subprocess.run(
        [sys.executable, "-P", "-m", "icecore", "-q", "token", "add", "ci", "--role", "read"],
        env=node.environment(), capture_output=True, text=True, check=True, timeout=30,
    ).stdout.strip()  # fmt: skip
    import ssl

    context = ssl.create_default_context(cafile=str(node.folder / "c.pem"))

    def get(path: str, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    assert get("/v1/self")[0] == 401
    status, about = get("/v1/self", Authorization=f"Bearer {token}")
    assert (status, about["name"], about["role"]) == (200, "token ci", "read")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b"GET /v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" not in plain.recv(1000)
    # Connections count before the handshake. Those of one address are bounded, and leave others room.
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    began = time.monotonic()
    refused = len(select.select(idle, [], [], 5)[0])
    until(
        lambda: len(select.select(idle, [], [], 0)[0]) >= 200 - 512 // 4, "the others are refused"
    )
    assert refused and time.monotonic() - began < 8
    assert node.client.get("/v1/self")["role"] == "admin"
    until(lambda: len(select.select(idle, [], [], 0)[0]) == 200, "no handshake in time")
    for one in idle:
        one.close()
    assert get("/v1/self", Authorization=f"Bearer {token}")[0] == 200
    subprocess.run(
        [sys.executable, "-P", "-m", "icecore", "token", "remove", "ci"],
        env=node.environment(), check=True, timeout=30, capture_output=True,
    )  # fmt: skip
    assert get("/v1/self", Authorization=f"Bearer {token}")[0] == 401


def _certificate(folder: Path) -> None:
    """Write a key and a certificate for localhost into one file."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "c.pem").write_bytes(
        key.private_bytes(form, serialization.PrivateFormat.PKCS8, plain) + made.public_bytes(form)
    )


def test_the_service_manager_is_told(node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        where = str(node.folder / "notify")
        manager.bind(where)
        manager.settimeout(20)
        node.start(NOTIFY_SOCKET=where, WATCHDOG_USEC="200000")
        said = {manager.recv(100) for _ in range(6)}
        assert said == {b"READY=1", b"WATCHDOG=1"}
        node.stop()
        while (word := manager.recv(100)) != b"STOPPING=1":
            assert word == b"WATCHDOG=1"


def test_a_socket_that_is_passed(node: Node) -> None:
    """Socket activation: the listening socket is descriptor 3."""
    path = Path(node.socket)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as passed:
        passed.bind(str(path))
        passed.listen()
        start = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            " os.environ['LISTEN_PID'] = str(os.getpid());"
            " os.execv(sys.executable, [sys.executable, '-P', '-m', 'icecore', *sys.argv[2:]])"
        )
        node.process = subprocess.Popen(
            [sys.executable, "-c", start, str(passed.fileno()), "-r", str(node.repository), "serve"],
            cwd="/", env=node.environment(LISTEN_FDS="1"), stderr=subprocess.PIPE,
            pass_fds=(passed.fileno(),),
        )  # fmt: skip
        assert node.client.get("/v1/self")["name"] == "uid 0 (root)"  # waits until it serves
    node.stop()


def test_one_service_for_a_state_directory(node: Node) -> None:
    node.start()
    second = subprocess.run(
        [sys.executable, "-P", "-m", "icecore", "-r", str(node.repository), "serve",
         "--socket", str(node.folder / "run" / "other")],
        env=node.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 16 and "another service runs" in second.stderr
    assert node.client.get("/v1/healthz") == {"status": "ok"}


def test_a_directory_that_others_can_write(node: Node) -> None:
    (node.folder / "run").mkdir(mode=0o777)
    (node.folder / "run").chmod(0o777)
    with pytest.raises(AssertionError, match="other users can write"):
        node.start()
    node.process = None
