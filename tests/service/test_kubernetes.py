"""The manifests are valid, and a job in a pod goes on in the next pod: evicted, killed without
notice, killed because the grace period was too short.
"""

from __future__ import annotations

import calendar
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import yaml

from icecore.service.supervision.supervisor import OF_NOTICE
from tests.cli.conftest import Cli, until
from tests.fakes import kubelet
from tests.fakes.kubelet import Pod

FOLDER = kubelet.MANIFEST.parent
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in MANIFESTS
    for document in yaml.safe_load_all(path.read_text())
]
#: appArmorProfile is a field since 1.30, podReplacementPolicy and podFailurePolicy longer.
VERSIONS = ("1.30", "1.31", "1.34", "1.37")

#: Appends to a file, whose content its snapshots hold, and writes the same to its log.
_COUNTER = """
import sys, time
out = open(sys.argv[2], "a")
for number in range(int(sys.argv[1])):
    print("line", number, flush=True)
    print("line", number, file=out, flush=True)
    time.sleep(0.1)
"""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_kubernetes_accepts_it(document: dict[str, Any], version: str) -> None:
    """Strict: the schemas of the release know every field."""
    validating = pytest.importorskip("kubernetes_validate")
    validating.validate(document, version, strict=True)


def test_the_job_does_what_the_manual_says() -> None:
    """Exit statuses, times and the absence of RBAC fit each other."""
    job = next(d.values[0] for d in DOCUMENTS if d.values[0]["kind"] == "Job")["spec"]
    pod = job["template"]["spec"]
    given = dict(word.lstrip("-").partition("=")[::2] for word in kubelet.options())
    rules = {
        (rule["action"], *rule.get("onExitCodes", {}).get("values", ["disruption"]))
        for rule in job["podFailurePolicy"]["rules"]
    }
    assert rules == {("Ignore", "disruption"), ("Ignore", 85), ("FailJob", 17)}
    assert job["podReplacementPolicy"] == "Failed" and pod["restartPolicy"] == "Never"
    notice, grace = float(given["notice"].rstrip("s")), pod["terminationGracePeriodSeconds"]
    assert OF_NOTICE * notice < notice < grace, "a warning comes before the kubelet kills"
    for document in DOCUMENTS:
        spec = document.values[0].get("spec", {}).get("template", {}).get("spec")
        assert spec is None or spec["automountServiceAccountToken"] is False
    kinds = {document.values[0]["kind"] for document in DOCUMENTS}
    assert kinds == {"Job", "DaemonSet", "ConfigMap", "CronJob"}


class Pods:
    """Pods of one job, one after the other, and the volume to which the job writes."""

    def __init__(self, cli: Cli, name: str, lines: int) -> None:
        self.cli = cli
        self.name = name
        self.lines = lines
        self.out = cli.folder / f"{name}.out"
        self.running: list[Pod] = []
        program = cli.folder / "counter.py"
        program.write_text(_COUNTER)
        self.job = [sys.executable, str(program), str(lines), str(self.out)]

    def start(self) -> Pod:
        """Start the next pod with the manifest's options; only name and interval are others, and
        /dev/full stands for the termination log, because a plain /dev cannot be added to.
        """
        own = [
            word.replace("/dev/termination-log", "/dev/full")
            for word in kubelet.options()
            if not word.startswith(("--name", "--every"))
        ]
        own += [f"--name={self.name}", "--every=1s"]
        name = f"{self.name}-{len(self.running)}"
        command = [sys.executable, "-P", "-m", "icecore.cli", "run", *own, "--", *self.job]
        pod = Pod.start(self.cli.folder, name, command, self.cli.environment)
        self.running.append(pod)
        return pod

    def wrote(self, number: int) -> Callable[[], bool]:
        """Return whether the job has written so many lines."""
        return lambda: self.out.exists() and len(self.out.read_text().splitlines()) >= number

    def snapshots(self) -> int:
        """Return the number of its snapshots."""
        return sum(event["job"] == self.name for event in self.cli.events("ls"))

    def end(self) -> None:
        """End what still runs."""
        for pod in self.running:
            with suppress(ProcessLookupError):
                if pod.process.poll() is None:
                    pod.kill()

    def whole(self) -> list[str]:
        """Return what an undisturbed run writes."""
        return [f"line {number}" for number in range(self.lines)]


@pytest.fixture
def pods(cli: Cli) -> Iterator[Callable[[str, int], Pods]]:
    cli.run("init")
    made: list[Pods] = []

    def make(name: str, lines: int) -> Pods:
        made.append(Pods(cli, name, lines))
        return made[-1]

    yield make
    for one in made:
        one.end()


def _written(pod: Pod) -> list[str]:
    """What the job wrote to the container's log, without what icecore says."""
    return [line for line in pod.lines if line.startswith("line ")]


@pytest.mark.criu
@pytest.mark.usefixtures("needs_criu")
def test_an_evicted_job_goes_on_in_the_next_pod(pods: Callable[[str, int], Pods]) -> None:
    """TERM to process 1 alone; the next pod has new namespaces, an empty volume and only the
    capabilities of the manifest.
    """
    job = pods("train", 60)
    first = job.start()
    until(job.wrote(10), "10 lines")
    assert first.terminate(60) == 85, first.lines
    when, snapshot = first.message.split()
    newest = [event for event in job.cli.events("ls") if event["job"] == "train"][-1]
    assert snapshot == newest["snapshot"]
    assert abs(calendar.timegm(time.strptime(when, "%Y-%m-%dT%H:%M:%SZ")) - time.time()) < 120
    second = job.start()
    assert second.wait() == 0, second.lines
    assert _written(first) + _written(second) == job.whole()
    assert job.out.read_text().splitlines() == job.whole()
    assert second.message == ""


@pytest.mark.criu
@pytest.mark.torture
@pytest.mark.usefixtures("needs_criu")
def test_a_killed_job_goes_on_from_its_last_snapshot(pods: Callable[[str, int], Pods]) -> None:
    """The node is lost, or the grace period is too short for a stop: the next pod waits until the
    lease has run out, and the file that the job writes is what an undisturbed run writes.
    """
    jobs = [pods("lost", 80), pods("short", 80)]

    def disturbed(job: Pods) -> None:
        first = job.start()
        until(lambda: job.wrote(20)() and job.snapshots() >= 1, "20 lines and a snapshot")
        before = job.snapshots()
        status = first.kill() if job.name == "lost" else first.terminate(0.05)
        assert status == 137, (status, first.lines)
        assert job.snapshots() - before <= 1 and first.message == ""
        second = job.start()
        assert second.wait(240) == 0, second.lines
        assert any("was restored from" in line for line in second.lines), second.lines
        assert _written(second) == job.whole()[-len(_written(second)) :]
        assert len(_written(first)) + len(_written(second)) >= job.lines
        assert job.out.read_text().splitlines() == job.whole()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(disturbed, job) for job in jobs]:
            done.result()


def test_the_kubelet_of_the_tests_gives_no_more_than_the_manifest() -> None:
    assert set(kubelet.capabilities()) == set(kubelet._NUMBERS)
