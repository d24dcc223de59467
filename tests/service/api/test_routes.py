"""Every route: without a token, with every role, for another user's things, and malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from icecore.service.api.caller import Role
from icecore.service.api.route_table import ROUTES
from icecore.service.api.routing import Route
from tests.service.api.conftest import ALICE, BOB, Go, Node, Session, ended

#: Whose things each place of a path names: alice's, and another user's.
OWN = {"job": "train", "snapshot": f"{1:032x}", "operation": ""}
OTHERS = {"job": "secret", "snapshot": f"{2:032x}", "operation": ""}
BODIES: dict[str, Any] = {
    "run_job": {"command": ["true"], "cwd": "/"},
    "forget_snapshots": {"snapshots": [f"{1:032x}"]},
    "mark_snapshot": {"pin": True},
}
PRIVATE = [route for route in ROUTES if route.role > Role.PUBLIC]


def path_of(route: Route, names: dict[str, str]) -> str:
    return route.path.format(**names)


async def ask(
    session: Session, node: Node, route: Route, headers: dict[str, str], names: dict[str, str]
) -> tuple[int, Any]:
    """Send a well-formed request on TCP; return status and problem."""
    body = BODIES.get(route.name, {}) if route.body is not None else None
    url = node.url + path_of(route, names)
    async with session.request(route.method, url, json=body, headers=headers) as response:
        kind = response.content_type
        if response.status >= 400:
            assert kind == "application/problem+json", (route.path, kind)
            problem = await response.json(content_type=kind)
            assert problem["status"] == response.status
            assert {"type", "title", "detail", "error_class", "exit_status", "cure"} <= set(problem)
            return response.status, problem
        if kind != "text/event-stream":
            await response.read()
        return response.status, None


def test_each_route_says_who_may_call_it() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        assert isinstance(route.role, Role)
        for scope in ("job", "snapshot", "operation"):
            assert (f"{{{scope}}}" in route.path) == (route.scope == scope), route.path
        if route.method != "GET":
            assert route.role >= Role.OPERATE or route.name in (
                "print_snapshot",
                "compare_snapshot",
            )
        if route.role == Role.PUBLIC:
            assert route.scope == "none" and route.method == "GET"
    with pytest.raises(TypeError):
        Route("GET", "/v1/x", what="", handle=PRIVATE[0].handle, answer=None)  # type: ignore[call-arg]


def test_without_a_token_nothing_is_said(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        names = {**OWN, "operation": "0" * 32}
        for headers in (
            {},
            {"Authorization": "Bearer icecore_wrong"},
            {"Authorization": "Basic YTpi"},
            {"Authorization": "Bearer"},
        ):
            for route in PRIVATE:
                status, problem = await ask(session, node, route, headers, names)
                assert status == 401, route.path
                assert problem["error_class"] == "Denied"
        for route in ROUTES:
            if route.role == Role.PUBLIC:
                assert (await ask(session, node, route, {}, {}))[0] == 200

    go(test)
    node.service.audit.close()
    log = node.service.audit.path.with_name("audit-refused.jsonl").read_text()
    first, same, others = (json.loads(line) for line in log.splitlines())
    assert (first["state"], first["what"]) == ("refused", PRIVATE[0].name)
    assert (same["what"], same["more"]) == (PRIVATE[0].name, 3)
    assert (others["who"], others["more"]) == ("", 4 * (len(PRIVATE) - 1))
    assert node.service.audit.path.read_text() == ""


@pytest.mark.parametrize("role", ["read", "operate", "admin"])
def test_roles(node: Node, go: Go, role: str) -> None:
    """A role may call its own routes and those below, of what its user owns."""

    async def test(session: Session) -> None:
        headers = node.token("t", role, uid=ALICE)
        names = {**OWN, "operation": await an_operation(session, ALICE)}
        for route in PRIVATE:
            status, _ = await ask(session, node, route, headers, names)
            if Role[role.upper()] < route.role:
                assert status == 403, route.path
            elif route.scope in ("node", "repository"):
                assert status == 403, route.path  # it is one user's, and all share this repository
            elif route.name == "remove_job":
                assert status == 409  # it runs
            elif route.name == "explain_schedule":
                assert status == 404  # it is not supervised
            else:
                assert status in (200, 202), (route.path, status)

    go(test)


async def an_operation(session: Session, uid: int) -> str:
    """Let root start an operation on a user's job."""
    job = {ALICE: "train", BOB: "secret"}[uid]
    async with session.post(f"/v1/jobs/{job}/dump") as response:
        assert response.status == 202
        found: dict[str, Any] = await response.json()
    await ended(session, found["id"])
    return str(found["id"])


def test_nothing_of_another_user_is_there(node: Node, go: Go) -> None:
    """Whatever route: what belongs to bob is to alice as if it did not exist."""

    async def test(session: Session) -> None:
        headers = node.token("alice", "admin", uid=ALICE)
        others = {**OTHERS, "operation": await an_operation(session, BOB)}
        missing = {"job": "absent", "snapshot": f"{9:032x}", "operation": "1" * 32}
        walked = 0
        for route in PRIVATE:
            if route.scope not in ("job", "snapshot", "operation"):
                continue
            walked += 1
            one = await ask(session, node, route, headers, others)
            two = await ask(session, node, route, headers, missing)
            assert one[0] == two[0] == 404, route.path
            hidden, absent = (
                problem["detail"].replace(names[route.scope], "X")
                for problem, names in ((one[1], others), (two[1], missing))
            )
            assert hidden == absent
        assert walked > 10
        for path in ("/v1/jobs?all=true", "/v1/snapshots", "/v1/operations"):
            async with session.get(node.url + path, headers=headers) as response:
                items = (await response.json())["items"]
            assert items or path == "/v1/operations"
            assert all(item["owner"] == ALICE for item in items), path
        for path, body in (
            ("/v1/snapshots/forget", {"snapshots": [f"{2:032x}"]}),
            (f"/v1/snapshots/{1:032x}/diff", {"older": f"{2:032x}"}),
        ):
            async with session.post(node.url + path, json=body, headers=headers) as response:
                assert response.status == 404
        async with session.get(f"{node.url}/v1/snapshots?user={BOB}", headers=headers) as response:
            assert response.status == 403

    go(test)


def test_patterns_of_a_token(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        headers = node.token("t", "admin", jobs=["tr*", "syst?m"])
        async with session.get(f"{node.url}/v1/jobs?all=true", headers=headers) as response:
            names = {item["name"] for item in (await response.json())["items"]}
        assert names == {"train", "system"}
        for path in ("/v1/jobs/secret", f"/v1/snapshots/{2:032x}"):
            async with session.get(node.url + path, headers=headers) as response:
                assert response.status == 404
        for path in ("/v1/node", "/v1/repository"):  # more than its jobs
            async with session.get(node.url + path, headers=headers) as response:
                assert response.status == 403
        async with session.post(
            f"{node.url}/v1/jobs", json={"command": ["true"], "cwd": "/", "name": "x"},
            headers=headers,
        ) as response:  # fmt: skip
            assert response.status == 403

    go(test)


def test_what_runs_as_root_is_not_given_by_users(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        operate = node.token("o", "operate", uid=ALICE)
        nobody = node.token("n", "operate")
        base = {"command": ["true"], "cwd": "/", "name": "x"}
        for more in (
            {"supervise": {"requeue_command": "id"}},
            {"supervise": {"notice_command": "id"}},
            {"supervise": {"notice_url": "http://169.254.169.254/"}},
            {"supervise": {"keep": {"keep_last": 1}}},  # the repository is everybody's
        ):
            async with session.post(
                f"{node.url}/v1/jobs", json={**base, **more}, headers=operate
            ) as response:
                assert response.status == 403, more
        async with session.post(f"{node.url}/v1/jobs", json=base, headers=nobody) as response:
            assert response.status == 403  # it names no user, and root is none for it
            assert "has no user" in (await response.json(content_type=None))["detail"]
        async with session.post(
            f"{node.url}/v1/snapshots/forget", json={"job": "train"}, headers=operate
        ) as response:
            assert response.status == 403  # bob may have a job of this name
        for field in ("before", "workdir", "criu_plugins", "after"):
            async with session.post(
                f"{node.url}/v1/jobs/train/dump", json={field: "x"}, headers=operate
            ) as response:
                assert response.status == 400

    go(test)


@pytest.mark.parametrize("restriction", [{"uid": ALICE}, {"jobs": ["x*"]}], ids=["user", "jobs"])
def test_no_restricted_token_gives_what_runs_as_root(
    node: Node, go: Go, restriction: dict[str, Any]
) -> None:
    """Whatever its role: the commands of a supervised job are root's."""

    async def test(session: Session) -> None:
        unrestricted = node.token("all", "admin")
        restricted = node.token("some", "admin", **restriction)
        for number, given in enumerate(("requeue_command", "notice_command", "notice_url")):
            supervise = {given: "http://127.0.0.1/"}
            body = {"command": ["true"], "cwd": "/", "name": f"x{number}", "supervise": supervise}
            for headers, expected in ((restricted, 403), (unrestricted, 202)):
                async with session.post(
                    f"{node.url}/v1/jobs", json=body, headers=headers
                ) as response:
                    assert response.status == expected, (given, expected)

    go(test)


def test_a_snapshot_without_an_owner_is_the_administrators(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        headers = node.token("a", "operate", uid=ALICE)
        path = f"/v1/snapshots/{4:032x}"
        async with session.get(node.url + path, headers=headers) as response:
            assert response.status == 404
        node.backing.own = True
        node.backing.known[:] = [one for one in node.backing.known if one.owner is not None]
        async with session.get(f"{node.url}/v1/repository", headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["location"] == f"/of/{ALICE}"
        async with session.get(path) as response:
            assert response.status == 404

    go(test)


@pytest.mark.parametrize("route", PRIVATE, ids=lambda route: route.name)
def test_malformed_requests(node: Node, go: Go, route: Route) -> None:
    """Nothing that is sent makes the service fail."""

    async def test(session: Session) -> None:
        names = {**OWN, "operation": await an_operation(session, ALICE)}
        path = path_of(route, names)

        async def status(path: str = path, **more: Any) -> int:
            async with session.request(route.method, path, **more) as response:
                return response.status

        assert await status(f"{path}?nonsense=1") == 400
        if route.query is not None and "limit" in route.query.__struct_fields__:
            for query in ("limit=0", "limit=x", "limit=1&limit=2", "after=nothing"):
                assert await status(f"{path}?{query}") == 400, query
        if route.body is not None:
            for data in (b"{", b"[]", b'"x"', b"\xff", b'{"nonsense": 1}', b"1e400", b"{" * 10_000):
                headers = {"Content-Type": "application/json"}
                assert await status(data=data, headers=headers) == 400, data[:10]
            assert await status(data=b"a=b", headers={"Content-Type": "text/plain"}) == 400
            assert await status(data=b"x" * (9 << 20)) == 413
        if "{" in route.path:
            for name in ("%00", "..", "%2e%2e%2fetc", "%ff", "x" * 3000, "-h", "1e9", "9" * 30):
                bad = path_of(route, dict.fromkeys(names, name))
                assert await status(bad) in (400, 404), name

    go(test)


def test_other_methods_and_paths(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.put("/v1/jobs") as response:
            assert response.status == 405 and "POST" in response.headers["Allow"]
            assert response.content_type == "application/problem+json"
        async with session.get("/v2") as response:
            assert response.status == 404
            assert response.content_type == "application/problem+json"

    go(test)


def test_words_of_a_request_are_never_options(node: Node, go: Go) -> None:
    """What reaches the command line stands in its option's word, or after '--'."""

    async def test(session: Session) -> None:
        body = {"tags": ["--stop"], "max_window": 2.5}
        async with session.post("/v1/jobs/train/dump", json=body) as response:
            id = (await response.json())["id"]
        stored = words_of(node.state, id)
        assert "--tag=--stop" in stored and "--stop" not in stored
        body = {"command": ["--service", "x"], "cwd": "/", "name": "y"}
        async with session.post("/v1/jobs", json=body) as response:
            assert response.status == 202
            id = (await response.json())["id"]
        assert words_of(node.state, id)[-1] == "--detach"

    go(test)


def words_of(state: Path, id: str) -> list[str]:
    path = state / "service" / "operations" / id / "request.json"
    return list(json.loads(path.read_text())["words"])


def test_idempotency_over_http(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async def dump(key: str, **body: Any) -> tuple[int, str]:
            headers = {"Idempotency-Key": key}
            async with session.post("/v1/jobs/train/dump", json=body, headers=headers) as response:
                found = await response.json(content_type=None)
                return response.status, found.get("id", "")

        first, again = await dump("k"), await dump("k")
        assert first == again and first[0] == 202
        assert (await dump("k", pinned=True))[0] == 409
        assert (await dump("other"))[1] != first[1]
        assert (await dump("x" * 256))[0] == 400
        async with session.post(
            "/v1/jobs/system/dump", json={}, headers={"Idempotency-Key": "k"}
        ) as response:
            assert response.status == 409  # the same body for another job

    go(test)


def test_everything_that_changes_is_in_the_audit_log(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.post("/v1/jobs/train/dump", json={}) as response:
            id = (await response.json())["id"]
        async with session.get("/v1/jobs"):
            pass
        async with session.delete("/v1/jobs/train"):
            pass
        async with session.delete("/v1/jobs/old") as response:
            assert response.status == 204
        log = node.service.audit.path.read_text()
        entries = [json.loads(line) for line in log.splitlines()]
        assert [(entry["state"], entry.get("what")) for entry in entries] == [
            ("begun", "dump_job"),
            ("done", None),
            ("begun", "remove_job"),
            ("failed", None),
            ("begun", "remove_job"),
            ("done", None),
        ]
        assert entries[0]["who"] == "uid 0 (root)" and entries[0]["from"].startswith("pid ")
        assert entries[0]["subject"] == {"job": "train"}
        assert entries[1]["id"] == entries[0]["id"] and entries[1]["operation"] == id
        assert {entry["who"] for entry in entries} == {"uid 0 (root)"}
        assert entries[3]["status"] == 409
        assert node.service.audit.path.stat().st_mode & 0o777 == 0o600

    go(test)


def test_what_cannot_be_recorded_does_not_happen(node: Node, go: Go) -> None:
    def full(**fields: Any) -> None:
        raise OSError(28, "No space left on device")

    async def test(session: Session) -> None:
        node.service.audit.write = full  # type: ignore[method-assign]
        async with session.delete("/v1/jobs/old") as response:
            assert response.status == 500
        async with session.get("/v1/jobs/old") as response:
            assert response.status == 200

    go(test)


def test_pages_of_a_list(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.get("/v1/jobs?all=true") as response:
            whole = (await response.json())["items"]
        found, after = [], ""
        for _ in range(10):
            query = f"&after={after}" if after else ""
            async with session.get(f"/v1/jobs?all=true&limit=2{query}") as response:
                page = await response.json()
            found += page["items"]
            after = page["next"]
            if not after:
                break
        assert found == whole and len(whole) == 5

    go(test)


def test_rates(node: Node, go: Go) -> None:
    from icecore.service.api.limits import Rate

    node.service.rate = Rate(1, 3)

    async def test(session: Session) -> None:
        statuses = []
        for _ in range(5):
            async with session.get("/v1/self") as response:
                statuses.append(response.status)
                after = response.headers.get("Retry-After")
        assert statuses == [200, 200, 200, 429, 429] and after == "1"
        async with session.get(
            f"{node.url}/v1/self", headers=node.token("t", "read")
        ) as response:  # another caller
            assert response.status == 200

    go(test)


def test_the_document_describes_the_table(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.get("/v1/openapi.json") as response:
            document = await response.json()
        listed = {
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method in methods
        }
        assert listed == {(route.method, route.path) for route in ROUTES}
        for route in ROUTES:
            about = document["paths"][route.path][route.method.lower()]
            assert about["x-icecore-role"] == route.role.name.lower()
            assert about["security"] == ([] if route.role == Role.PUBLIC else [{"token": []}])

    go(test)
