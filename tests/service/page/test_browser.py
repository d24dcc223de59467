"""The page in a real Chromium, over a real service with a real job."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from icecore.service.record import read
from tests.cli.conftest import SECONDS, Cli, until
from tests.service.page.browser import NARROW, WIDE, Browser, chromium

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

JOB = """
import os, time
memory = bytearray(8 << 20)
for step in range(100_000):
    at = step % 8 << 20
    memory[at:at + 65536] = os.urandom(65536)
    print("step", step, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def job(cli: Cli, service: str) -> Iterator[subprocess.Popen[str]]:
    """A supervised job with two snapshots."""
    process = cli.start(
        *("run", "--name", "train", "--every", "1s", "--notice", "30s", "--on-term", "snapshot"),
        *("--", sys.executable, "-c", JOB),
    )
    try:
        until(lambda: len(read(cli.folder / "state", "train").taken) >= 2, "two snapshots")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)


@pytest.fixture
def browser(cli: Cli, service: str, tmp_path: Path) -> Iterator[Browser]:
    """A browser that has signed in as an administrator."""
    token = cli.run("token", "add", "page", "--role", "admin").stdout.strip()
    with chromium(service, tmp_path / "chromium") as found:
        found.open("/page")
        found.one("#token").send_keys(token, Keys.ENTER)
        found.until(lambda: found.one("h1").text == "Jobs", "signed in")
        yield found


def test_a_look_at_a_job_and_a_snapshot_of_it(job: subprocess.Popen[str], browser: Browser) -> None:
    """Sign in, follow a job, take a snapshot, watch the operation, pin what it made."""
    row = browser.one("tr#job-train")
    assert re.search("running.*(fresh|due|late)", row.text, re.DOTALL)
    # it keeps itself up to date
    before = row.text
    browser.until(lambda: browser.one("tr#job-train").text != before, "the list changes")
    # keys: the row's link, then the job
    row.find_element("css selector", "a").send_keys(Keys.ENTER)
    browser.until(lambda: browser.one("h1").text == "train", "the job's page")
    browser.until(lambda: len(browser.all(".plot canvas")) == 3, "three charts")
    assert len(browser.all("svg.lineage a")) >= 2
    for plot in browser.all(".plot"):
        table = browser.one(f"table#{plot.get_attribute('data-from')}")
        assert len(table.find_elements("css selector", "tbody tr")) >= 2
    assert "icecore dump train" in browser.one(".actions").text
    browser.press("Snapshot now")
    browser.until(lambda: "/page/operations/" in browser.driver.current_url, "the operation")
    browser.until(
        lambda: "succeeded" in browser.one("#live").text, "it ends, and the page shows it"
    )
    assert "dump.window" in browser.one("#phases ~ .scroll, .phases").text
    browser.until(lambda: browser.one("#result ~ table a"), "its result").click()
    browser.until(lambda: browser.one("h1").text.startswith("Snapshot"), "the snapshot")
    assert "python" in browser.one("#processes ~ .scroll").text
    snapshot = browser.driver.current_url
    browser.press("Pin")
    browser.until(lambda: "succeeded" in browser.one("#live").text, "it is pinned")
    browser.open(snapshot.removeprefix(browser.url))
    assert "pinned" in browser.one(".head").text
    assert browser.complaints() == []
    # the other colours, a narrow window, and what axe says
    browser.scheme("dark")
    browser.resize(NARROW)
    browser.open("/page/jobs/train")
    browser.until(lambda: len(browser.all(".plot canvas")) == 3, "three charts")
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 80
    assert browser.inaccessible() == [] and not browser.overflows()
    assert browser.complaints() == []


@pytest.mark.torture
def test_every_view_in_both_schemes_and_on_a_small_screen(
    job: subprocess.Popen[str], browser: Browser, cli: Cli
) -> None:
    newest = (
        browser.until(lambda: browser.all("tr#job-train a"), "the job")
        and cli.run("ls", "--json").stdout.splitlines()[-1]
    )
    snapshot = re.search(r'"snapshot": ?"([0-9a-f]{32})"', newest)
    assert snapshot is not None
    browser.open("/page/repository")
    browser.press("Plan a garbage collection")
    browser.until(lambda: "succeeded" in browser.one("#live").text, "the plan")
    plan = browser.driver.current_url.removeprefix(browser.url)
    browser.open("/page/nodes")
    browser.press("Examine this node")
    browser.until(lambda: "succeeded" in browser.one("#live").text, "the examination")
    assert "kernel" in browser.one("#findings ~ .scroll").text
    doctor = browser.driver.current_url.removeprefix(browser.url)
    views = [
        *("/page", "/page/jobs/train", f"/page/snapshots/{snapshot[1]}", "/page/operations"),
        *("/page/repository", "/page/nodes", "/page/audit", plan, doctor),
    ]
    for size in (WIDE, NARROW):
        browser.resize(size)
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            for view in views:
                browser.open(view)
                time.sleep(0.5)
                assert browser.inaccessible() == [], (view, scheme, size)
                assert not browser.overflows(), (view, size)
                assert browser.complaints() == [], view


@pytest.mark.torture
def test_a_collection_is_planned_before_it_is_done(
    job: subprocess.Popen[str], browser: Browser, cli: Cli
) -> None:
    cli.run("forget", "train@1")
    browser.open("/page/repository")
    browser.until(lambda: "Deduplication" in browser.one("#statistics").text, "the statistics")
    browser.press("Plan a garbage collection")
    browser.until(lambda: browser.one("#apply"), "the plan and what carries it out")
    browser.press("Free the space")
    browser.until(
        lambda: "succeeded" in browser.one("#live").text and not browser.all("#apply"), "it is done"
    )
    assert browser.complaints() == []


@pytest.mark.torture
def test_keys(job: subprocess.Popen[str], browser: Browser) -> None:
    body = browser.one("body")
    for key, title in (("o", "Operations"), ("r", "Repository"), ("n", "Nodes"), ("a", "Audit")):
        browser.one("body").send_keys("g" + key)
        browser.until(lambda title=title: browser.one("h1").text == title, title)
    browser.one("body").send_keys("gj")
    browser.until(lambda: browser.one("h1").text == "Jobs", "Jobs")
    browser.one("body").send_keys("/")
    assert browser.run("return document.activeElement.id") == "q"
    browser.one("#q").send_keys("nothing")
    browser.until(lambda: "No job" in browser.one("#jobs").text, "the filter")
    assert body is not None and browser.complaints() == []
