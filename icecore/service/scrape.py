"""The route that Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from icecore.service.api.caller import Role
from icecore.service.api.responses import Response
from icecore.service.api.routing import Call, Route
from icecore.service.metrics.exposition import CONTENT_TYPE

Scrape = Callable[[Mapping[tuple[str, str], int]], Awaitable[bytes]]


def route(scrape: Scrape) -> Route:
    """Return the route of the metrics, for callers that see all jobs.

    Args:
        scrape: Returns the metrics; gets how many operations there are, by kind and state.
    """

    async def show_metrics(call: Call) -> Any:
        """Return the metrics of the repository and this node."""
        operations: Counter[tuple[str, str]] = Counter(
            (one.kind, one.state) for one in call.service.operations.all()
        )
        body = await scrape(operations)
        return Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    what = "Return metrics in the text format of Prometheus."
    return Route("GET", "/metrics", Role.READ, "node", what, show_metrics, "text/plain")
