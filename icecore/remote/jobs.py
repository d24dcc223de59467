"""The jobs that the node service shows, with the methods of `icecore.host.jobs`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NoReturn

from icecore.errors import Damaged, IcecoreError, ServiceFailed, UsageError
from icecore.host.jobs.description import Description
from icecore.host.jobs.job import ExitStatus, Job
from icecore.host.jobs.logs import LogPiece, Stream
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.remote.connection import Service, at

_POLL_SECONDS = 0.2
_TERM = 15


class RemoteJob(Job, frozen=True):
    """An instance as described by the service."""

    service: Service
    about: dict[str, Any]

    @classmethod
    def of(cls, service: Service, about: dict[str, Any]) -> RemoteJob:
        """Return the instance of a resource."""
        known = Description(
            name=about["name"],
            instance=about["instance"],
            command=about["command"],
            cwd=about["cwd"],
            isolation=Isolation(**about["isolation"]),
            binds=[],
            created=about["created"],
            boot="",
            owner=(0, 0),
            pid=about["pid"],
            restored_from=about["restored_from"],
            lineage=about["lineage"],
            snapshot=about["snapshot"],
            user=about["owner"],
            user_name=about["user"],
            data=about.get("data", []),
        )
        return cls(Path("/nonexistent"), known, service, about)

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = self.service.get(at("jobs", self.instance))
        return found

    @property
    def alive(self) -> bool:
        """Return whether the job runs."""
        return self.state == "running"

    @property
    def state(self) -> Literal["starting", "running", "ended", "failed"]:
        """Return the state in the last description."""
        state: Literal["starting", "running", "ended", "failed"] = self.about["state"]
        return state

    def status(self) -> ExitStatus | None:
        """Return the exit status in the last description; None: not ended."""
        return _status(self.about)

    def kill(self, number: int = _TERM) -> None:
        """Send a signal."""
        self.service.post(at("jobs", self.instance, "signal"), {"signal": str(number)})

    def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait until it has ended.

        Raises:
            TimeoutError: It still runs.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (status := _status(self._now())) is None:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"job {self.name} still runs")
            time.sleep(_POLL_SECONDS)
        return status

    def log_sizes(self) -> dict[Stream, int]:
        """Return the current size of each log in bytes."""
        sizes = self._now()["log_bytes"]
        return {"stdout": sizes.get("stdout", 0), "stderr": sizes.get("stderr", 0)}

    def logs_after(self, seen: Mapping[Stream, int], *, follow: bool) -> Iterator[LogPiece]:
        """Yield the output after some offsets; wait for a service that restarts."""
        offsets: dict[Stream, int] = {"stdout": 0, "stderr": 0, **seen}
        failures = 0
        while True:
            query: dict[str, Any] = {
                "follow": "true" if follow else "",
                **{str(k): v for k, v in offsets.items()},
            }
            try:
                with self.service.lines(at("jobs", self.instance, "logs"), **query) as lines:
                    for line in lines:
                        failures = 0
                        record = json.loads(line or b"{}")
                        if "ended" in record:
                            return
                        if record:
                            data = base64.b64decode(record["data"])
                            removed = record.get("removed", 0)
                            offsets[record["stream"]] += removed + len(data)
                            yield LogPiece(record["stream"], data, removed)
            except (ServiceFailed, OSError, HTTPException):
                failures += 1
                if failures * _POLL_SECONDS > 30:
                    raise
            else:
                if not follow:
                    return
            time.sleep(_POLL_SECONDS)


def _status(about: dict[str, Any]) -> ExitStatus | None:
    if about["state"] in ("running", "starting"):
        return None
    return ExitStatus(code=about["code"], signal=about["signal"])


class RemoteRegistry(Registry):
    """The jobs that the caller may see.

    Args:
        service: The node's.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def instances(self) -> list[Job]:
        """Return all instances, oldest first."""
        return [
            RemoteJob.of(self._service, one) for one in self._service.items("/v1/jobs", all="true")
        ]

    def damaged(self) -> dict[str, Damaged]:
        """Return none: only root sees them."""
        return {}

    def find(self, which: str | int) -> RemoteJob:
        """Return the job with this name, instance id or pid."""
        return RemoteJob.of(self._service, self._service.get(at("jobs", str(which))))

    def kept(self, job: Job) -> int:
        """Return the bytes of GPU memory that are kept for an instance."""
        assert isinstance(job, RemoteJob)
        return int(job.about["kept_bytes"])

    def remove(self, job: Job) -> None:
        """Forget an instance that has ended."""
        if job.state in ("running", "starting"):
            raise UsageError(
                f"job {job.name} ({job.instance}) runs",
                cure=f"end it first: icecore kill {job.name}",
            )
        self._service.delete(at("jobs", job.instance))

    def remove_damaged(self, instance: str) -> None:
        """Raise: only root sees them."""
        self._refuse()

    def start(self, *arguments: Any, **named: Any) -> Job:
        """Raise: `icecore.commands.remote` starts jobs."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise IcecoreError("not available through the service", cure="run as root")
