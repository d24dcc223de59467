"""A repository that cannot be reached while a supervised job is to be resumed delays the job; real
processes, a real CRIU and a real S3 server behind a network that fails.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from icecore.store.backend.s3 import S3Place
from tests.cli.conftest import SECONDS, Cli, until
from tests.fakes.bad_proxy import Fate, unreliable
from tests.seaweedfs import Server

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

_COUNTER = "import time; [print(n, flush=True) or time.sleep(0.1) for n in range(30)]"
_WORDS = ("run", "--name", "counter", "--resume", "--", sys.executable, "-c", _COUNTER)

#: Returns whether a request fails, by method and path.
Failing = Callable[[str, str], bool]


class Network:
    """The network between a command line and its bucket."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.fails: Failing = lambda method, path: False

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self.cli.folder / "said", "wb") as said, open(self.output, "ab") as output:
            return subprocess.Popen(
                self.cli.command(*words),
                env=self.cli.environment,
                cwd=self.cli.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=said,
            )

    @property
    def output(self) -> str:
        return str(self.cli.folder / "output")

    def lines(self) -> list[str]:
        with open(self.output) as file:
            return file.read().splitlines()

    def said(self) -> str:
        return (self.cli.folder / "said").read_text()


@pytest.fixture
def network(cli: Cli, region_a: Server, s3_place: S3Place) -> Iterator[Network]:
    with ExitStack() as stack:
        plan = lambda method, path: Fate.REFUSE if made.fails(method, path) else Fate.PASS  # noqa: E731
        endpoint, _ = stack.enter_context(unreliable(region_a.endpoint, plan))
        own = {
            "ICECORE_REPOSITORY": s3_place.location,
            "ICECORE_S3_ENDPOINT": endpoint,
            "ICECORE_S3_ATTEMPTS": "1",
        }
        made = Network(
            replace(cli, environment={**cli.environment, **region_a.environment(), **own})
        )
        yield made


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(lambda method, path: True, id="while it is opened"),
        pytest.param(lambda method, path: method == "PUT", id="while the lease is taken"),
        pytest.param(lambda method, path: "/shards/" in path, id="while the job is restored"),
    ],
)
def test_a_job_is_resumed_once_the_repository_can_be_reached(
    fails: Failing, network: Network
) -> None:
    network.cli.run("init")
    process = network.start(*_WORDS)
    try:
        until(lambda: len(network.lines()) > 3, "4 lines")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 85, network.said()
        network.fails = fails
        process = network.start(*_WORDS)
        told = "waits for the repository, retrying in"
        until(lambda: network.said().count(told) >= 2 or process.poll() is not None, "two tries")
        assert process.poll() is None, network.said()
        network.fails = lambda method, path: False
        assert process.wait(SECONDS) == 0, network.said()
    finally:
        process.kill()
        process.wait()
    assert network.lines() == [str(number) for number in range(30)]


@pytest.mark.parametrize(
    "fails", [lambda method, path: True, lambda method, path: "/shards/" in path]
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 85), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_the_repository(
    number: int, status: int, fails: Failing, network: Network
) -> None:
    network.cli.run("init")
    process = network.start(*_WORDS)
    words = [*_WORDS]
    words[1:1] = ["--requeue-command", "echo $ICECORE_SNAPSHOT > requeued"]
    requeued = network.cli.folder / "requeued"
    try:
        until(lambda: len(network.lines()) > 3, "4 lines")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 85, network.said()
        network.fails = fails
        process = network.start(*words)
        until(lambda: "retrying in 2" in network.said(), "two tries")
        process.send_signal(number)
        assert process.wait(20) == status, network.said()
    finally:
        process.kill()
        process.wait()
    assert requeued.exists() == (status == 85)
    if status == 85:
        network.fails = lambda method, path: False
        assert requeued.read_text().strip() in network.cli.run("ls", "--json").stdout


def test_lasting_failures_are_not_retried(network: Network) -> None:
    network.cli.run("init")
    network.fails = lambda method, path: True
    plain = network.start(
        *["--on-term=snapshot" if word == "--resume" else word for word in _WORDS]
    )
    assert plain.wait(SECONDS) == 8, network.said()
    network.fails = lambda method, path: False
    wrong = replace(
        network.cli, environment={**network.cli.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    )
    done = subprocess.run(
        wrong.command(*_WORDS), env=wrong.environment, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 8, done.stderr
