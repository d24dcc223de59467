"""The page without a browser: who sees what, what forms need, and what a browser is told."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar, UnixConnector

from icecore.service.api import routing
from icecore.service.api.caller import Role
from icecore.service.api.journal import Reader, Writer
from icecore.service.page import actions, content, render, routes
from icecore.service.page.sessions import COOKIE, LINK_SECONDS, Holder, Sessions
from tests.service.api.conftest import ALICE, BOB, Node
from tests.service.page.conftest import Go

ROOT = Path(__file__).resolve().parents[3]
PRIVATE = [route for route in routes.routes() if route.identify is not None]
NAMES = {"name": "train", "job": "train", "snapshot": f"{1:032x}", "operation": "0" * 32}


@asynccontextmanager
async def browser(node: Node, name: str, role: Any, **more: Any) -> AsyncIterator[ClientSession]:
    """A browser that has signed in with a token."""
    secret = node.service.tokens.add(name, role, **more)
    async with ClientSession(node.url, cookie_jar=CookieJar(unsafe=True)) as session:
        async with session.post(
            "/page/sign-in", data={"token": secret}, allow_redirects=False
        ) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/page"
            cookie = answer.headers["Set-Cookie"]
            assert {"HttpOnly", "SameSite=Strict", "Path=/page"} <= set(cookie.split("; "))
        yield session


async def text_of(session: ClientSession, path: str, status: int = 200) -> str:
    async with session.get(path) as answer:
        assert answer.status == status, (path, await answer.text())
        _has_headers(answer)
        return html.unescape(await answer.text())


def _has_headers(answer: ClientResponse) -> None:
    policy = answer.headers["Content-Security-Policy"]
    assert policy == render.POLICY and "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def from_another_process(socket: str, cookie: str) -> bytes:
    """Return the first line of the answer to another process that has a cookie."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20);"
        " s.connect(sys.argv[1]); s.sendall(b'GET /page HTTP/1.1\\r\\nHost: localhost\\r\\n'"
        " b'Cookie: ' + sys.argv[2].encode() + b'\\r\\n\\r\\n'); print(s.recv(100).split(b'\\r')[0])"
    )
    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, socket, f"{COOKIE}={cookie}"), stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(asking.communicate(), 30)
    return out


async def form_token(session: ClientSession) -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', await text_of(session, "/page"))
    assert found is not None
    return found[1]


def test_nothing_is_shown_to_who_has_not_signed_in(node: Node, go: Go) -> None:
    async def test(session: ClientSession) -> None:
        admin = node.token("admin", "admin")
        async with ClientSession(node.url) as stranger:
            for route in PRIVATE:
                # On the socket root would be an administrator; a token is for the API alone.
                for asking, headers in ((session, {}), (stranger, {}), (stranger, admin)):
                    path = route.path.format(**NAMES)
                    async with asking.request(
                        route.method, path, headers=headers, allow_redirects=False
                    ) as answer:
                        assert answer.status == (303 if route.method == "GET" else 401), path
                        assert "train" not in await answer.text()
                        if route.method == "GET":
                            assert answer.headers["Location"] == "/page/sign-in"
            async with stranger.post("/page/sign-in", data={"token": "icecore_no"}) as answer:
                assert answer.status == 401 and COOKIE not in answer.cookies

    go(test)


def test_each_user_sees_their_own(node: Node, go: Go) -> None:
    async def test(_: ClientSession) -> None:
        async with browser(node, "alice", "operate", uid=ALICE) as alice:
            jobs = await text_of(alice, "/page")
            assert "train" in jobs and "secret" not in jobs and "system" not in jobs
            await text_of(alice, "/page/jobs/train")
            await text_of(alice, "/page/jobs/secret", 404)
            await text_of(alice, f"/page/snapshots/{2:032x}", 404)
            await text_of(alice, "/page/repository/statistics", 403)
            await text_of(alice, "/page/audit", 403)
            assert "/page/audit" not in jobs
            assert "secret" not in await text_of(alice, "/page/nodes")
        async with browser(node, "bob", "read", uid=BOB, jobs=["secret"]) as bob:
            jobs = await text_of(bob, "/page")
            assert "secret" in jobs and "gone" not in jobs and "train" not in jobs
        async with browser(node, "admin", "admin") as admin:
            jobs = await text_of(admin, "/page")
            assert all(name in jobs for name in ("train", "secret", "system", "ancient"))
            assert "unreachable" in await text_of(admin, "/page/repository/replicas")
            assert "refused" in await text_of(admin, "/page/audit")

    go(test)


def test_a_form_has_to_come_from_the_page(node: Node, go: Go) -> None:
    async def test(_: ClientSession) -> None:
        async with browser(node, "admin", "admin") as admin:
            token = await form_token(admin)
            names = {**NAMES, "operation": "0" * 32}
            for route in (one for one in PRIVATE if one.method == "POST"):
                if route.scope == "operation":
                    continue
                path = route.path.format(**names)
                for data, headers in (
                    ({}, {}),
                    ({"form_token": "guess"}, {}),
                    ({"form_token": token}, {"Sec-Fetch-Site": "cross-site"}),
                    ({"form_token": token}, {"Sec-Fetch-Site": "same-site"}),
                ):
                    async with admin.post(path, data=data, headers=headers) as answer:
                        assert answer.status in (400, 403), (path, data)
            assert not node.service.operations.all()
            data = {"form_token": token, "pin": "yes"}
            async with admin.post(
                f"/page/snapshots/{1:032x}/mark", data=data, allow_redirects=False
            ) as answer:
                assert answer.status == 303
                place = answer.headers["Location"]
            (operation,) = node.service.operations.all()
            assert place == f"/page/operations/{operation.id}" and operation.kind == "mark"
            assert "mark" in await text_of(admin, place)
        async with browser(node, "reader", "read") as reader:
            token = await form_token(reader)
            for route in (one for one in PRIVATE if one.role >= Role.OPERATE):
                if route.method == "POST" and route.scope != "operation":
                    path = route.path.format(**NAMES)
                    async with reader.post(path, data={"form_token": token}) as answer:
                        assert answer.status == 403, path

    go(test)


def test_a_link_signs_in_once(node: Node, go: Go) -> None:
    async def test(socket: ClientSession) -> None:
        async with socket.post("/page/links") as answer:
            path = (await answer.json())["path"]
        async with ClientSession(node.url) as other, other.get(path) as answer:
            assert answer.status == 401  # it is for the process that asked for it
        async with socket.post("/page/links") as answer:
            path = (await answer.json())["path"]
        jar = CookieJar(unsafe=True)
        async with ClientSession(
            "http://localhost", connector=UnixConnector(str(node.socket)), cookie_jar=jar
        ) as same:
            assert "train" in await text_of(same, path)
            token = await form_token(same)
            async with socket.get(path) as answer:
                assert answer.status == 401 and "used" in await answer.text()
            # Whoever has the port afterwards gets the cookie, and is another process.
            (cookie,) = [one.value for one in jar]
            assert b" 303 " in await from_another_process(node.socket, cookie)
            async with same.post("/page/sign-out", data={"form_token": token}) as answer:
                assert answer.status == 200 and "Sign in" in await answer.text()
            async with same.get("/page", allow_redirects=False) as answer:
                assert answer.status == 303

    go(test)


def test_links_and_sessions_end() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    holder = Holder((1, 2))
    link = sessions.link(holder)
    now[0] = LINK_SECONDS + 1
    assert sessions.enter(link, holder) is None and sessions.enter("", holder) is None
    assert sessions.enter(sessions.link(holder), Holder((1, 3))) is None
    assert sessions.enter(sessions.link(holder), holder)
    assert sessions.find("") is None


def test_a_session_ends_with_its_token(node: Node, go: Go) -> None:
    async def test(_: ClientSession) -> None:
        async with browser(node, "temporary", "read") as session:
            await text_of(session, "/page")
            node.service.tokens.remove("temporary")
            async with session.get("/page", allow_redirects=False) as answer:
                assert answer.status == 303 and answer.headers["Location"] == "/page/sign-in"

    go(test)


def test_a_session_of_a_link_ends_with_its_token(node: Node, go: Go) -> None:
    async def test(_: ClientSession) -> None:
        headers = node.token("temporary", "read")
        async with ClientSession(node.url, cookie_jar=CookieJar(unsafe=True)) as session:
            async with session.post("/page/links", headers=headers) as answer:
                await text_of(session, (await answer.json())["path"])
            node.service.tokens.remove("temporary")
            async with session.get("/page", allow_redirects=False) as answer:
                assert answer.status == 303 and answer.headers["Location"] == "/page/sign-in"

    go(test)


def test_a_form_has_to_arrive_in_time(node: Node, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "BODY_SECONDS", 0.2)

    async def test(_: ClientSession) -> None:
        reader, writer = await asyncio.open_unix_connection(node.socket)
        writer.write(
            b"POST /page/sign-in HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
        )
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 2.5)
        writer.close()

    go(test)


def test_a_long_operation_is_read_to_its_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(3):
        writer.write(b'{"do":"line","text":"%d%b"}' % (number, b"x" * (1 << 20)))
    writer.close()
    course = content.course_of(Reader(tmp_path), content.Course())
    assert [text[0] for _, text in course.lines] == ["0", "1", "2"]


def test_what_others_named_is_escaped(node: Node, go: Go) -> None:
    name = "<script>alert(1)</script>"
    node.backing.known[2] = node.backing.known[2].__class__(
        **{
            **{
                f: getattr(node.backing.known[2], f)
                for f in node.backing.known[2].__struct_fields__
            },
            "job": name,
            "tags": ['"><img src=x onerror=alert(1)>'],
        }
    )

    async def test(_: ClientSession) -> None:
        async with browser(node, "admin", "admin") as admin:
            for path in (
                "/page",
                f"/page/snapshots/{3:032x}",
                "/page/jobs/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
            ):
                async with admin.get(path) as answer:
                    shown = await answer.text()
                    assert answer.status == 200, path
                    assert name not in shown and "<img" not in shown
                    assert "&lt;script&gt;" in shown

    go(test)


def test_files_have_their_versions(node: Node, go: Go) -> None:
    async def test(session: ClientSession) -> None:
        for name in ("page.css", "page.js", "vendor/htmx.min.js", "icon.svg"):
            async with session.get(render.asset(name)) as answer:
                assert answer.status == 200 and "immutable" in answer.headers["Cache-Control"]
                _has_headers(answer)
        for path in ("0/page.css", "0/../render.py", "0/vendor/../../render.py", "0/__init__.py"):
            async with session.get(f"/page/static/{path}") as answer:
                assert answer.status == 404, path

    go(test)


def test_templates_have_nothing_inline() -> None:
    for path in (ROOT / "icecore/service/page/templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(
            r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)|javascript:", text
        ), path
        assert "|safe}" not in text.replace(" ", ""), path


def test_vendored_files_are_those_of_their_packages() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/vendor-assets"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (None, "–")],
)
def test_spans(seconds: float | None, text: str) -> None:
    assert render.span(seconds) == text


def test_a_live_view_ends_with_its_session(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "BEAT_SECONDS", 0.2)
    monkeypatch.setenv("STUB", "wait")

    async def test(session: ClientSession) -> None:
        async with session.post("/v1/jobs/train/dump", json={}) as answer:
            id = (await answer.json())["id"]
        try:
            async with (
                browser(node, "alice", "read", uid=ALICE) as alice,
                alice.get(f"/page/operations/{id}/live") as answer,
            ):
                assert await answer.content.readline()
                node.service.tokens.remove("alice")
                rest = await asyncio.wait_for(answer.content.read(), 10)
                assert b"event: over" not in rest
        finally:
            (node.state / "go").touch()

    go(test)
