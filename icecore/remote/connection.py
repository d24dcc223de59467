"""Requests to the node service on its unix socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from icecore import errors
from icecore.errors import IcecoreError, PreflightRefused, ServiceFailed
from icecore.private import is_own

_SECONDS = 60.0
_AGAIN_SECONDS = 30.0
_PAUSE_SECONDS = 0.25
_MOST_LINE = 64 << 20


class _Unix(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Service:
    """The node service.

    Args:
        path: Its socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def get(self, path: str, **query: Any) -> Any:
        """Return a resource."""
        return self._answer("GET", path, None, query)

    def items(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page."""
        after = ""
        while True:
            found = self.get(path, **query, **({"after": after} if after else {}))
            yield from found["items"]
            after = found["next"]
            if not after:
                return

    def post(self, path: str, body: Mapping[str, Any], **headers: str) -> Any:
        """Request a change; return the response."""
        return self._answer("POST", path, body, {}, headers)

    def delete(self, path: str) -> None:
        """Remove a resource."""
        self._answer("DELETE", path, None, {})

    def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        with self._sent(method, path, body, query, headers) as response:
            data = response.read()
        if not data:
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            raise ServiceFailed(
                f"the response of the service at {self.path} is not JSON: {error}"
            ) from error

    def events(self, operation: str) -> Iterator[dict[str, Any]]:
        """Yield the records of an operation until it has ended; last, the operation itself as the
        record ``end``. Wait for a service that restarts.
        """
        after, until = 0, time.monotonic() + _AGAIN_SECONDS
        path = f"/v1/operations/{operation}/events"
        while True:
            try:
                with self._sent("GET", path, None, {"text": "true", "after": after}) as response:
                    for id, name, data in _parsed(response):
                        after = id or after
                        until = time.monotonic() + _AGAIN_SECONDS
                        yield {"do": "end", "operation": data} if name == "end" else data
                        if name == "end":
                            return
            except (ServiceFailed, OSError, http.client.HTTPException):
                if time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_SECONDS)  # it is being restarted

    @contextmanager
    def lines(self, path: str, **query: Any) -> Iterator[Iterator[bytes]]:
        """Lend the lines of a response as they arrive."""
        with self._sent("GET", path, None, query) as response:
            yield _lines(response)

    @contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and lend the response.

        Raises:
            ServiceFailed: The service cannot be reached.
            IcecoreError: The service returned an error.
        """
        connection = _Unix(self.path)
        words = {key: str(value) for key, value in query.items() if value not in (None, "")}
        target = f"{path}?{urlencode(words)}" if words else path
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        try:
            try:
                connection.request(method, target, data, {**sent, **(headers or {})})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ServiceFailed(
                    f"the service at {self.path} does not answer: {error}",
                    cure="check 'systemctl status icecore'; root can work without the service",
                ) from error
            if response.status >= 400:
                raise error_of(_problem(response))
            yield response
        finally:
            connection.close()


def at(*parts: str) -> str:
    """Return a path of the API whose parts are names."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def is_there(path: str) -> bool:
    """Return whether a service of root or of this user listens there. No other process may receive a
    job's environment.
    """
    try:
        about = os.stat(path)
    except OSError:
        return False
    if not stat.S_ISSOCK(about.st_mode) or not is_own(about):
        return False
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.settimeout(_SECONDS)
            tried.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):  # left by a killed service
        return False
    except OSError:
        return True  # it is busy
    return True


def error_of(problem: Mapping[str, Any]) -> IcecoreError:
    """Return the error that the command would raise without the service."""
    kind = getattr(errors, str(problem.get("error_class")), None)
    message, cure = str(problem.get("detail") or problem.get("title")), str(problem.get("cure", ""))
    if kind is PreflightRefused:
        return PreflightRefused(
            [(one["name"], one["message"], one["cure"]) for one in problem.get("reasons", [])]
        )
    if not (isinstance(kind, type) and issubclass(kind, IcecoreError)):
        return ServiceFailed(f"the service answers: {message}", cure=cure)
    error = kind.__new__(kind, message)  # each class has an initialiser of its own
    error.message, error.cure = message, cure
    return error


def _problem(response: http.client.HTTPResponse) -> dict[str, Any]:
    data = response.read(_MOST_LINE)
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {"detail": f"{response.status} {response.reason}"}


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline(_MOST_LINE):
        yield line.rstrip(b"\n")


def _parsed(response: http.client.HTTPResponse) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield server-sent events: id (0: none), name, data."""
    id, name, data = 0, "", b""
    for line in _lines(response):
        if not line:
            if data:
                yield id, name, json.loads(data)
            id, name, data = 0, "", b""
            continue
        field, _, value = line.partition(b": ")
        if field == b"id":
            id = int(value)
        elif field == b"event":
            name = value.decode()
        elif field == b"data":
            data = value
