"""What tests of several folders share: real S3 servers, started when first asked for, one for each
region and run of pytest.
"""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from icecore.store.backend.s3 import S3Place
from tests import rotation
from tests.moments import Due, Moment
from tests.seaweedfs import Server, shared

BUCKET = "icecore-tests"

# What Python, S3 and icecore would be told by the surroundings. With PYTHONUNBUFFERED, print()
# writes a line in two calls, and a job may be frozen between the two; the tests' jobs flush what
# they print. With PYTHONDONTWRITEBYTECODE, every process that a test starts compiles what it imports.
_OURS = (
    "ICECORE_CRIU",
    "ICECORE_CRIU_PREFIX",
    "ICECORE_TORTURE_SECONDS",
    "ICECORE_SOAK_JOBS",
    "ICECORE_SOAK_CLIENTS",
)
for _name in [name for name in os.environ if re.match("AWS_|ICECORE_", name) and name not in _OURS]:
    del os.environ[_name]
for _name in (
    "UNBUFFERED",
    "DONTWRITEBYTECODE",
    "WARNINGS",
    "DEVMODE",
    "TRACEMALLOC",
    "OPTIMIZE",
    "MALLOC",
):
    os.environ.pop(f"PYTHON{_name}", None)
# The threads of numpy's linear algebra library spin for a while as they start: a fifth of what many
# short processes take.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# nohup(1) ignores it, and what ignores it at its start keeps it so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Servers of tests are on this machine, whatever way others are to be asked.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"

# How long an example takes is the machine's affair: a pause of a fifth of a second is no failure.
settings.register_profile("icecore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("icecore-same", settings.get_profile("icecore"), derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--every-case``."""
    parser.addoption("--every-case", action="store_true", help="also the cases of other turns")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first where there are several workers. Leave out the cases that are not this
    commit's turn, unless somebody asks for tests by name.
    """
    _leave_out(config, items)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        order = rotation.ordered([item.nodeid.partition("[")[0] for item in items], workers)
        items[:] = [items[at] for at in order]


def pytest_collection_finish() -> None:
    """Spare every collection of garbage the walk through what stays as long as the process: all
    tests and all modules.
    """
    gc.collect()
    gc.freeze()


def _is_asked_for(config: pytest.Config) -> bool:
    """Return whether all cases run: somebody asks for them, or for tests by name."""
    asked = config.getoption("every_case") or config.getoption("keyword")
    asked = asked or config.getoption("markexpr") == "torture"
    return bool(asked) or any("::" in word for word in config.args)


@pytest.fixture
def due(request: pytest.FixtureRequest) -> Due:
    """Choose the moments that this commit runs; see `rotation.MOMENTS`."""
    test = request.node.nodeid.partition("[")[0]

    def choose(moments: Sequence[Moment]) -> list[Moment]:
        if _is_asked_for(request.config):
            return [*moments]
        return [
            moment
            for number, moment in enumerate(moments)
            if rotation.is_moment_due(test, number, len(moments))
        ]

    return choose


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_asked_for(config):
        return
    left, taken = [], []
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases, before = Counter(tests), Counter[str]()
    for item, test in zip(items, tests, strict=True):
        (taken if rotation.is_due(test, before[test], cases[test]) else left).append(item)
        before[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = taken


def pytest_configure(config: pytest.Config) -> None:
    """In the ordinary run the examples are always the same: what it says is about the commit. New
    ones are drawn under torture.
    """
    settings.load_profile(
        "icecore" if config.getoption("markexpr") == "torture" else "icecore-same"
    )


@pytest.fixture(scope="session")
def region_a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server with a bucket ``icecore-tests``."""
    yield from _region("region-a", tmp_path_factory)


@pytest.fixture(scope="session")
def region_b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another one."""
    yield from _region("region-b", tmp_path_factory)


def _region(name: str, folders: pytest.TempPathFactory) -> Iterator[Server]:
    own = folders.getbasetemp()
    # pytest-xdist gives each worker a directory below that of the run.
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with shared(run / name, BUCKET) as server:
        yield server


@pytest.fixture
def s3_place(region_a: Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A place of this test's own in region a, with credentials in the environment."""
    for name, value in region_a.environment().items():
        monkeypatch.setenv(name, value)
    return S3Place(BUCKET, prefix=f"test-{secrets.token_hex(6)}", endpoint=region_a.endpoint)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users may enter; pytest closes its own to others."""
    with tempfile.TemporaryDirectory(prefix="icecore-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
