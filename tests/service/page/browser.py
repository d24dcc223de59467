"""A real Chromium that is driven by its own driver, and what it has to say about a page."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

AXE = Path(__file__).with_name("vendor") / "axe.min.js"
SECONDS = 40.0
WIDE, NARROW = (1360, 900), (390, 844)
#: WCAG 2.2 A and AA, and what axe's authors recommend.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-device-scale-factor=1", "--no-first-run"),
    "--proxy-server=direct://",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # it works offline
)


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str) -> None:
        self.driver.get(self.url + path)

    def one(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def press(self, text: str) -> None:
        """Press the button with this text, and say yes to its question."""
        self.driver.find_element(By.XPATH, f"//main//button[normalize-space()='{text}']").click()
        with_alert = self.driver.switch_to
        time.sleep(0.2)
        try:
            with_alert.alert.accept()
        except Exception:  # noqa: BLE001 - it asks nothing
            pass

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                found = holds()
            except Exception:  # noqa: BLE001 - the page is being replaced
                found = None
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {SECONDS} s; {self.one('main').text[:2000]}")

    def resize(self, size: tuple[int, int]) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
        )

    def scheme(self, name: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, among them what the security policy refused."""
        return [
            f"{one['level']} {one['message']}"
            for one in self.driver.get_log("browser")
            if one["level"] in ("SEVERE", "WARNING")
        ]

    def inaccessible(self) -> list[str]:
        """What axe finds."""
        self.run(AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            f"axe.run(document, {{runOnly: {json.dumps(RULES)}, resultTypes: ['violations']}})"
            ".then(done, (error) => done({violations: [{id: String(error), nodes: []}], passes: []}));"
        )
        assert found["violations"] or len(found["passes"]) > 15, "axe has looked at nothing"
        return [
            f"{one['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
            for one in found["violations"]
            for node in one["nodes"] or [{"html": "", "failureSummary": ""}]
        ]

    def overflows(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(self.run("return document.documentElement.scrollWidth > innerWidth + 1"))


@contextmanager
def chromium(url: str, folder: Path) -> Iterator[Browser]:
    """Run a browser of its own."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("no Chromium: tools/prepare-machine --tests installs it")
    options = Options()
    options.binary_location = str(programs[0])
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(programs[1])))
    try:
        driver.set_page_load_timeout(SECONDS)
        driver.set_script_timeout(SECONDS)
        browser = Browser(driver, url)
        browser.resize(WIDE)
        yield browser
    finally:
        driver.quit()
