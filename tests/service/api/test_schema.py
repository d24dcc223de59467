"""Requests that are made from the OpenAPI document: whatever it allows, the service answers as the
document says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from schemathesis.specs.openapi.checks import positive_data_acceptance

from icecore.service.api.documents import document
from icecore.service.api.route_table import ROUTES
from icecore.service.api.routing import Route
from tests.service.api.conftest import Node, listening

_STREAMS = ("operation_events", "job_logs")
_EXAMPLES = 5


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    """The address of a service that runs in a thread."""
    ready, stop = threading.Event(), threading.Event()

    async def whole() -> None:
        async with listening(node):
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(whole()))
    thread.start()
    assert ready.wait(30)
    try:
        yield node.url
    finally:
        stop.set()
        thread.join(30)


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.name not in _STREAMS],  # a stream is no document
    ids=lambda route: route.name,
)
def test_the_service_does_what_its_document_says(node: Node, url: str, route: Route) -> None:
    """For each route, requests that fit the document and some that do not, with a token of the role
    admin: no status that is not described, no body that does not fit, no failure (5xx).
    """
    whole = schemathesis.openapi.from_dict(document([route], "0"))
    whole.config.update(base_url=url)
    operation = whole[route.path][route.method]
    headers = node.token("t", "admin")
    table = node.service.operations._table
    table._bounds = replace(table._bounds, node=0)  # none runs

    @given(data=st.data())
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    def check(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy())
        case.call_and_validate(
            headers={**(case.headers or {}), **headers},
            timeout=20,
            # A schema does not say which snapshots there are, or which fields exclude each other.
            excluded_checks=[positive_data_acceptance],
        )

    check()
