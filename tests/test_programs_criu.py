"""Every test program survives a dump, its end and a restore by plain CRIU with the options that the
catalogue names.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.errors import IcecoreError
from icecore.host.criu.program import Criu, find_criu
from tests.programs import driving, plain_criu, redis_client, redis_load
from tests.programs.catalogue import PROGRAMS, Program, missing, port_of

pytestmark = pytest.mark.criu

DUMPABLE = [program for program in PROGRAMS.values() if program.dumpable and program.source]
CHANGED_SOCKETS = (6, 16)  # the Linux whose socket options CRIU 4.1 does not know


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("binaries")


@pytest.fixture(scope="module")
def criu() -> Criu:
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    try:
        return find_criu()
    except IcecoreError as none:
        pytest.skip(str(none))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def adopted() -> Iterator[None]:
    with plain_criu.adopting():
        yield


def begin(
    program: Program, criu: Criu, tmp_path: Path, cache: Path, *, own_namespaces: bool = False
) -> driving.Running:
    """Start a program in its small size; skip where this machine cannot run it."""
    if lacking := missing(program):
        pytest.skip(f"this machine has no {', '.join(lacking)}")
    kernel = tuple(int(part) for part in platform.release().split(".")[:2])
    if kernel >= CHANGED_SOCKETS and criu.version[:2] < program.least_criu:
        pytest.skip(f"CRIU {criu.version} cannot dump inet sockets on Linux {platform.release()}")
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    return driving.start(program, state_dir, cache, program.quick, own_namespaces=own_namespaces)


@pytest.mark.usefixtures("adopted")
@pytest.mark.parametrize("namespaces", ["host", "own"])
@pytest.mark.parametrize("program", DUMPABLE, ids=lambda program: program.name)
def test_it_goes_on_where_it_was(
    program: Program, namespaces: str, criu: Criu, images: Path, tmp_path: Path, cache: Path
) -> None:
    if program.own_ipc and namespaces == "host":
        pytest.skip("it can only be dumped in an ipc namespace of its own")
    running = begin(program, criu, tmp_path, cache, own_namespaces=namespaces == "own")
    try:
        driving.wait_ready(program, running.state_dir)
        driving.wait_progress(running.state_dir)
        plain_criu.dump(criu.path, running.pid, images, program.criu_options)
        before = driving.forget(running.state_dir)
        pid = plain_criu.restore(criu.path, images, program.restore_options)
        after = driving.wait_progress(running.state_dir, steps=3)
        assert before is not None and before.counter <= after.counter
        assert after.writes > before.writes, "the restored process is not the one that was dumped"
        driving.ask_finish(program, running.state_dir)
        said = driving.wait_finished(program, running.state_dir)
        assert said.passed, said.errors
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == program.exit_status
    finally:
        driving.stop(running)


@pytest.mark.usefixtures("adopted")
def test_what_criu_cannot_dump_goes_on(
    criu: Criu, images: Path, tmp_path: Path, cache: Path
) -> None:
    program = PROGRAMS["tree-credentials"]
    running = begin(program, criu, tmp_path, cache)
    try:
        driving.wait_ready(program, running.state_dir)
        with pytest.raises(plain_criu.CriuFailed, match="Control messages in queue"):
            plain_criu.dump(criu.path, running.pid, images, program.criu_options)
        driving.wait_progress(running.state_dir)
        driving.ask_finish(program, running.state_dir)
        said = driving.wait_finished(program, running.state_dir)
        assert said.passed, said.errors
        assert running.process.wait(timeout=20) == program.exit_status
    finally:
        driving.stop(running)


@pytest.mark.usefixtures("adopted")
def test_redis_loses_its_connections_and_no_data(
    criu: Criu, images: Path, tmp_path: Path, cache: Path
) -> None:
    program = PROGRAMS["redis-alone"]
    running = begin(program, criu, tmp_path, cache)
    try:
        driving.wait_ready(program, running.state_dir)
        connection = redis_load.connect(port_of(running.state_dir), timeout_s=10)
        load = redis_client.Load(connection, "outside", 300)
        assert [wrong for _ in range(10) for wrong in load.round()] == []
        plain_criu.dump(criu.path, running.pid, images, program.criu_options)
        pid = plain_criu.restore(criu.path, images, program.restore_options)
        with pytest.raises((OSError, redis_client.RedisError)):
            connection.call("PING")
        connection.close()
        load.connection = redis_load.connect(port_of(running.state_dir), timeout_s=10)
        assert load.verify_all() == []
        assert load.round() == []
        load.connection.close()
        driving.ask_finish(program, running.state_dir)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == program.exit_status
    finally:
        driving.stop(running)
