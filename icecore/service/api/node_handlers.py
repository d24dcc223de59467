"""The handlers of the routes about the node, the caller and the service itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

from icecore.service.api import models
from icecore.service.api.routing import Call
from icecore.service.api.starting import start
from icecore.text import host_name


async def show_node(call: Call) -> Any:
    """Show this node: its jobs, operations, and room for staging."""

    operations = dict(Counter(str(one.state) for one in call.service.operations.all()))

    def look() -> models.Node:
        service = call.service
        return models.Node(
            host=host_name(),
            version=service.version,
            started=service.started,
            jobs_running=sum(job.state == "running" for job in service.registry.instances()),
            operations=operations,
            staging=service.backing.staging(),
        )

    return await call.service.locally(look)


async def examine_node(call: Call) -> Any:
    """Examine this machine, as ``icecore doctor`` does."""
    return start(
        call,
        "doctor",
        ["doctor"],
        owner=0,
        where=await call.service.stored(call.service.backing.where, None),
    )


async def show_self(call: Call) -> Any:
    """Show the caller as the service knows it."""
    caller = call.known
    where = await call.service.stored(call.service.where, caller)
    return models.Self(
        name=caller.name,
        kind="socket" if caller.kind == "socket" else "token",
        role=caller.role.name.lower(),
        uid=caller.uid,
        jobs=list(caller.jobs),
        repository=where.location,
    )


async def health(call: Call) -> Any:
    """Return the state of the service."""
    return models.Health(status="stopping" if call.service.stopping else "ok")
