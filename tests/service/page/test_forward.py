"""``icecore page``: a link over the unix socket, and a port that leads to the page alone."""

from __future__ import annotations

import http.client
import signal
from urllib.parse import urlsplit

from tests.cli.conftest import SECONDS, Cli


def ask(
    address: str, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_a_port_that_leads_to_the_page_alone(cli: Cli, service: str) -> None:
    process = cli.start("page", "--socket", str(cli.folder / "run" / "s"))
    try:
        assert process.stdout is not None
        link = urlsplit(process.stdout.readline().strip())
        address = link.netloc
        assert address.startswith("127.0.0.1:") and link.path == "/page/enter"
        # who has no cookie sees nothing, and nobody reaches the API as the user of `icecore page`
        assert ask(address, "/page")[0] == 303
        for path in (
            "/v1/jobs",
            "/v1/self",
            "/metrics",
            "/page/../v1/self",
            "/page/%2e%2e/v1/self",
            "/page/..%2fv1/self",
            "/page/./../v1/self",
            "//v1/self",
            "/pages",
            "/page/links",
        ):
            assert ask(address, path)[0] == 404, path
        assert ask(address, "/page/links", "POST")[0] == 404
        assert ask(address, "/page", Host="evil.example")[0] == 421
        assert ask(address, "/page", Host=f"evil.example:{link.port}")[0] == 421
        status, _, headers = ask(address, f"{link.path}?{link.query}")
        assert status == 303 and headers["Location"] == "/page"
        cookie = headers["Set-Cookie"].partition(";")[0]
        status, shown, headers = ask(address, "/page", Cookie=cookie)
        assert status == 200 and "uid 0" in shown and headers["Content-Security-Policy"]
        assert ask(address, f"{link.path}?{link.query}")[0] == 401  # it works once
        assert ask(urlsplit(service).netloc, "/v1/jobs", Cookie=cookie)[0] == 401
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "there is no service" in cli.run("page", "--socket", "/nowhere", status=3).stderr
