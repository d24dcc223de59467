"""The metrics of a real run: rules and dashboard use only what exists, and promtool accepts all."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from icecore import Config, Repository
from icecore.config import DumpSettings
from icecore.node.watching import scraped, watch
from icecore.service.record import read
from tests.cli.conftest import SECONDS, Cli, until

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RULES = [CONFIGS / "prometheus" / f"icecore.{name}.yml" for name in ("rules", "alerts")]
_METRIC = re.compile(r"\bicecore_[a-z0-9_]+")
_RULE = re.compile(r"\b[a-z]+:icecore_[a-z0-9_]+:[a-z0-9_]+")


def promtool(*words: str, given: bytes = b"") -> str:
    program = shutil.which("promtool")
    assert program is not None, "tools/prepare-machine --tests installs it"
    done = subprocess.run(
        [program, *words], input=given, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout.decode() + done.stderr.decode()


@pytest.fixture
def exposed(cli: Cli, needs_criu: None) -> str:
    """The exposition after a supervised job was snapshotted and preempted, a dump failed, and a
    replica was made that lacks a snapshot.
    """
    cli.run("init")
    words = (
        "run",
        "--name",
        "count",
        "--every",
        "0.5s",
        "--notice",
        "60s",
        "--on-term",
        "snapshot",
    )
    program = "import time\nfor n in range(600): print(n, flush=True); time.sleep(0.1)"
    process = cli.start(*words, "--", sys.executable, "-c", program)
    until(lambda: len(read(cli.folder / "state", "count").taken) >= 3, "three snapshots")
    cli.run("init", "--replica-of", str(cli.folder / "repository"), str(cli.folder / "replica"))
    running = _scrape(cli)
    assert 'icecore_job_running{job="count"} 1.0' in running
    assert 'icecore_notice_seconds{job="count"} 60.0' in running
    assert 'icecore_predicted_stop_seconds{job="count"}' in running
    assert 'icecore_next_snapshot_timestamp_seconds{job="count"}' in running
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 85
    cli.run("dump", "count", status=3)
    cli.run("gc")
    return running + _scrape(cli)


def _scrape(cli: Cli) -> str:
    config = Config(
        repository=str(cli.folder / "repository"),
        state=str(cli.folder / "state"),
        replicas=(str(cli.folder / "replica"), str(cli.folder / "nowhere")),
        dump=DumpSettings(),
    )

    async def scrape(repository: Repository) -> str:
        known = watch(repository, config)
        try:
            await known.settled()
            return (await scraped(known, config)).decode()
        finally:
            await known.close()

    with Repository.open(config.repository, state=config.state, config=config) as repository:
        return asyncio.run(scrape(repository))


def samples(text: str) -> dict[str, float]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.criu
def test_a_real_run(exposed: str) -> None:
    found = samples(exposed)
    assert found['icecore_job_running{job="count"}'] == 0
    assert (
        abs(found['icecore_last_good_snapshot_timestamp_seconds{job="count"}'] - time.time()) < 60
    )
    assert found['icecore_operations_total{operation="dump",result="done"}'] >= 4
    assert found['icecore_window_seconds_count{job="count"}'] >= 4
    assert found['icecore_window_seconds_bucket{job="count",le="+Inf"}'] >= 4
    assert found['icecore_phases_total{phase="dump.window",result="end"}'] >= 4
    assert found['icecore_failures_total{class="NotFound",operation="dump"}'] == 1
    assert found['icecore_supervision_events_total{event="preempted"}'] == 1
    assert found["icecore_last_gc_timestamp_seconds"] > time.time() - 60
    assert found["icecore_repository_up"] == 1 and found["icecore_dedup_ratio"] >= 1
    replicas = {name: value for name, value in found.items() if name.startswith("icecore_replica_")}
    assert sorted(replicas.values())[:2] == [0, 0] or len(replicas) == 4, replicas
    up = [value for name, value in replicas.items() if name.startswith("icecore_replica_up")]
    assert sorted(up) == [0, 1]
    missing = [value for name, value in replicas.items() if "missing" in name]
    assert missing == [found["icecore_repository_snapshots"]]
    # what rules and dashboard use exists
    names = {re.split(r"[{ ]", name)[0] for name in found}
    rules = "\n".join(path.read_text() for path in RULES)
    board = json.loads((CONFIGS / "grafana" / "icecore.json").read_text())
    used = " ".join(
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    )
    recorded = set(_RULE.findall(rules))
    assert set(_RULE.findall(used)) <= recorded
    needed = set(_METRIC.findall(_RULE.sub("", rules + used)))
    optional = {name for name in needed if name.startswith("icecore_store_re")}  # only buckets
    described = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    assert needed - names - optional == set()
    assert optional <= described
    half = exposed[exposed.rindex("# HELP icecore_build_info") :]
    promtool("check", "metrics", given=half.encode())


def test_rules() -> None:
    promtool("check", "rules", *(str(path) for path in RULES))
    promtool("test", "rules", str(CONFIGS / "prometheus" / "icecore.test.yml"))
    promtool("check", "config", "--syntax-only", str(CONFIGS / "prometheus" / "prometheus.yml"))
