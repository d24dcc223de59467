"""Operations: started within bounds, cancelled, repeated, found again, and never confused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.host.jobs.description import boot_id
from icecore.host.kernel import procfs
from icecore.host.rpc import packets
from icecore.service.api import operation_files as files
from icecore.service.api import operation_table, operations, workers
from icecore.service.api.journal import Reader, Writer
from icecore.service.api.models import Operation
from icecore.service.api.operation_files import Process, Result, Stored
from icecore.service.api.operation_table import Bounds
from icecore.service.api.operations import Operations, new_id
from icecore.service.api.problems import Busy, Conflict
from icecore.service.api.requests import RunRequest
from tests.service.api.conftest import WORKER


def wanted(word: str = "echo", **more: Any) -> Stored:
    known: dict[str, Any] = {
        "id": new_id(),
        "kind": "dump",
        "caller": "uid 1 (a)",
        "caller_key": "uid:1",
        "owner": 1,
        "created": time.time(),
        "words": [word],
    }
    return Stored(**{**known, **more})


def running(
    state: Path, test: Callable[[Operations], Awaitable[None]], bounds: Bounds | None = None
) -> None:
    async def whole() -> None:
        own = Operations(state, WORKER, bounds)
        await own.recover()
        try:
            await asyncio.wait_for(test(own), 60)
        finally:
            await own.close()

    asyncio.run(whole())


async def until(own: Operations, id: str, *states: str) -> Operation:
    for _ in range(1000):
        if own.get(id).state in states:
            return own.get(id)
        await asyncio.sleep(0.01)
    raise AssertionError(f"{own.get(id)} is not {states}")


def pid_of(state: Path, id: str) -> int:
    for _ in range(500):
        process = files.read_process(state / "service" / "operations" / id)
        if process is not None:
            return process.pid
        time.sleep(0.01)
    raise AssertionError("no process")


def test_an_operation_ends_with_its_result(state: Path) -> None:
    async def test(own: Operations) -> None:
        good, new = own.create(wanted())
        bad, _ = own.create(wanted("fail"))
        assert new
        done = await own.wait(good.id, 30)
        assert (done.state, done.exit_status, done.error) == ("succeeded", 0, None)
        assert done.result == {"event": "stub", "attempt": 1}
        failed = await own.wait(bad.id, 30)
        assert failed.state == "failed" and failed.exit_status == 5
        assert failed.error is not None and failed.error.error_class == "DumpFailed"
        assert failed.error.cure == "try again"
        with pytest.raises(NotFound):
            own.get("0" * 32)

    running(state, test)


def test_a_killed_worker_is_a_failed_operation(state: Path) -> None:
    async def test(own: Operations) -> None:
        made, _ = own.create(wanted("crash"))
        done = await own.wait(made.id, 30)
        assert done.state == "failed" and done.error is not None
        assert "was killed" in done.error.detail

    running(state, test)


def test_a_worker_has_nothing_that_was_the_zygotes(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as a program that the service has started, and so are those that it starts."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/none")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    found = []

    async def test(own: Operations) -> None:
        own.descriptors, own.priority = (200, 300), 3
        for _ in range(2):
            made, _ = own.create(wanted("show"))
            assert (await own.wait(made.id, 30)).state == "succeeded"
            found.append(json.loads((own.directory(made.id) / "about.json").read_text()))
            folder = str(own.directory(made.id))
            log = f"{folder}/output.log"
            assert found[-1].pop("standard") == ["/dev/null", log, log]
            assert all(path.startswith(folder) for path in found[-1].pop("others"))

    running(state, test)
    assert found[0].pop("random") != found[1].pop("random")
    assert found == 2 * [
        {
            "session": True,
            "threads": 1,
            "limit": [200, 300],
            "nice": 3,
            "blocked": sorted({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}),
            "child": True,
            "environment": [],
        }
    ]


def zygote_of() -> int:
    """The zygote of the only service of this process."""
    [zygote] = [
        pid for pid in procfs.children(os.getpid()) if "icecore.zygote" in procfs.command_line(pid)
    ]
    return zygote


def test_a_killed_zygote_is_replaced_and_its_workers_go_on(state: Path) -> None:
    async def test(own: Operations) -> None:
        first, _ = own.create(wanted("wait"))
        pid = await asyncio.to_thread(pid_of, state, first.id)
        zygote = zygote_of()
        assert procfs.status(pid).parent == zygote
        assert procfs.status(zygote).threads == 1
        os.kill(zygote, signal.SIGKILL)
        second, _ = own.create(wanted())
        assert (await own.wait(second.id, 30)).state == "succeeded"
        assert zygote_of() != zygote
        assert own.get(first.id).state == "running"
        (state / "go").touch()
        assert (await own.wait(first.id, 30)).state == "succeeded"

    running(state, test)


def test_a_zygote_that_hangs_is_replaced(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ANSWER_SECONDS", 0.5)

    async def test(own: Operations) -> None:
        first, _ = own.create(wanted())
        assert (await own.wait(first.id, 30)).state == "succeeded"
        zygote = zygote_of()
        os.kill(zygote, signal.SIGSTOP)
        second, _ = own.create(wanted())
        assert (await own.wait(second.id, 30)).state == "succeeded"
        assert zygote_of() != zygote
        os.kill(zygote_of(), signal.SIGSTOP)  # the service ends all the same

    began = time.monotonic()
    running(state, test)
    assert time.monotonic() - began < 20


def test_an_installation_is_noticed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(own: Operations) -> None:
        seen = []
        for installed in (((1, 1),), ((1, 1),), (), ((1, 2),)):
            monkeypatch.setattr(workers, "_installed", lambda found=installed: found)
            made, _ = own.create(wanted())
            assert (await own.wait(made.id, 30)).state == "succeeded"
            seen.append(zygote_of())
        assert seen[0] == seen[1] == seen[2] != seen[3]

    running(state, test)


def test_a_zygote_that_does_not_come_up_is_a_failed_operation(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_ZYGOTE", "icecore.nothing")

    async def test(own: Operations) -> None:
        made, _ = own.create(wanted())
        done = await own.wait(made.id, 30)
        assert done.state == "failed" and done.error is not None
        assert "ended with status 1" in done.error.detail

    running(state, test)


def test_a_worker_runs_although_the_service_has_no_descriptor_left(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its pidfd."""

    async def test(own: Operations) -> None:
        first, _ = own.create(wanted())
        assert (await own.wait(first.id, 30)).state == "succeeded"
        real = packets.receive

        def lost(*words: Any) -> Any:
            data, descriptors = real(*words)
            for descriptor in descriptors:
                os.close(descriptor)
            raise packets.DescriptorsLost(data)

        with monkeypatch.context() as patch:
            patch.setattr(packets, "receive", lost)
            made, _ = own.create(wanted("wait"))
            await asyncio.to_thread(pid_of, state, made.id)
        assert own.get(made.id).state == "running"
        own.cancel(made.id)
        assert (await own.wait(made.id, 30)).state == "cancelled"

    running(state, test)


def test_an_operation_ends_although_files_cannot_be_read_for_a_while(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, or the disk does not answer."""
    monkeypatch.setattr(operations, "_LOOK_AGAIN_SECONDS", 0.05)
    real, failures = files.read_process, [0]

    def fail_at_first(directory: Path) -> Process | None:
        if failures[0] < 3:
            failures[0] += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(directory)

    async def test(own: Operations) -> None:
        made, _ = own.create(wanted())
        with monkeypatch.context() as patch:
            patch.setattr(files, "read_process", fail_at_first)
            await own._table.get(made.id).changed.wait()
        assert own.get(made.id).state == "succeeded" and failures[0] == 3

    running(state, test)


def test_what_never_began_is_started_again(state: Path) -> None:
    """The service before was killed in the middle of it: the lock was on its way."""

    async def test(own: Operations) -> None:
        made, _ = own.create(wanted())
        assert (await own.wait(made.id, 30)).state == "succeeded"
        directory = own.directory(made.id)
        for name in ("result.json", "process.json"):
            (directory / name).unlink()
        lock = files.lock(directory)
        again = Operations(state, WORKER)
        await again.recover()
        try:
            assert again.get(made.id).state == "running"
            os.close(lock)
            assert (await again.wait(made.id, 30)).state == "succeeded"
        finally:
            await again.close()

    running(state, test)


def test_cancel_is_ctrl_c(state: Path) -> None:
    async def test(own: Operations) -> None:
        made, _ = own.create(wanted("wait"))
        await until(own, made.id, "running")
        await asyncio.to_thread(pid_of, state, made.id)
        own.cancel(made.id)
        done = await own.wait(made.id, 30)
        assert (done.state, done.exit_status) == ("cancelled", 130)
        assert own.cancel(made.id).state == "cancelled"  # once more: nothing
        with pytest.raises(UsageError):
            own.cancel(made.id, "KILL")

    running(state, test)


def test_bounds_and_the_order_of_those_that_wait(state: Path) -> None:
    async def test(own: Operations) -> None:
        first, _ = own.create(wanted("wait"))
        second, _ = own.create(wanted("wait"))  # the caller has one
        third, _ = own.create(wanted("wait", caller_key="uid:2"))
        fourth, _ = own.create(wanted("wait", caller_key="uid:3"))  # the node has two
        states = [own.get(one.id).state for one in (first, second, third, fourth)]
        assert states == ["running", "queued", "running", "queued"]
        own.cancel(fourth.id)  # it never began
        assert own.get(fourth.id).state == "cancelled"
        await asyncio.to_thread(pid_of, state, first.id)
        own.cancel(first.id)
        await own.wait(first.id, 30)
        await until(own, second.id, "running")
        for one in (second, third):
            await asyncio.to_thread(pid_of, state, one.id)
            own.cancel(one.id)
            await own.wait(one.id, 30)

    running(state, test, Bounds(node=2, caller=1))


def test_a_caller_cannot_fill_the_queue(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_table, "_QUEUED_PER_CALLER", 3)

    async def test(own: Operations) -> None:
        made = [own.create(wanted("wait"))[0] for _ in range(3)]
        with pytest.raises(Busy):
            own.create(wanted("wait"))
        other, _ = own.create(wanted(caller_key="uid:2"))
        assert (await own.wait(other.id, 30)).state == "succeeded"
        for one in reversed(made):
            own.cancel(one.id)
        await own.wait(made[0].id, 30)

    running(state, test, Bounds(node=4, caller=1))


def test_the_same_key_is_the_same_operation(state: Path) -> None:
    async def test(own: Operations) -> None:
        first, new = own.create(wanted(key="k", digest="d"))
        again, repeated = own.create(wanted(key="k", digest="d"))
        assert new and not repeated and first.id == again.id
        with pytest.raises(Conflict):
            own.create(wanted(key="k", digest="other"))
        other, new = own.create(wanted(key="k", digest="other", caller_key="uid:2"))
        assert new and other.id != first.id  # keys of callers are apart
        await own.wait(first.id, 30)

    running(state, test)

    async def after_a_restart(own: Operations) -> None:
        again, new = own.create(wanted(key="k", digest="d"))
        assert not new and again.state == "succeeded"
        late = wanted(key="k", digest="d", created=time.time() - 2 * operation_table.KEY_SECONDS)
        assert not own.create(late)[1]

    running(state, after_a_restart)


def test_a_key_is_forgotten_after_a_day(state: Path) -> None:
    async def test(own: Operations) -> None:
        old = wanted(key="k", digest="d", created=time.time() - operation_table.KEY_SECONDS - 1)
        first, _ = own.create(old)
        again, new = own.create(wanted(key="k", digest="d"))
        assert new and again.id != first.id

    running(state, test)


def test_a_new_service_adopts_what_runs(state: Path) -> None:
    ids: list[str] = []

    async def first(own: Operations) -> None:
        made, _ = own.create(wanted("wait"))
        ids.append(made.id)
        await asyncio.to_thread(pid_of, state, made.id)

    async def second(own: Operations) -> None:
        assert own.get(ids[0]).state == "running"
        own.cancel(ids[0])  # by its pidfd: it is nobody's child here
        assert (await own.wait(ids[0], 30)).exit_status == 130

    running(state, first)
    running(state, second)


def test_a_new_service_reports_what_ended_meanwhile(state: Path) -> None:
    ids: list[str] = []

    async def first(own: Operations) -> None:
        for _ in range(2):
            made, _ = own.create(wanted("wait"))
            ids.append(made.id)
            await asyncio.to_thread(pid_of, state, made.id)

    running(state, first)
    good, killed = ids
    pid = pid_of(state, good)
    (state / "go").touch()
    os.kill(pid_of(state, killed), signal.SIGKILL)
    until = time.monotonic() + 20
    while files.read_result(state / "service" / "operations" / good) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    for one in (pid, pid_of(state, killed)):
        _collect(one)

    async def second(own: Operations) -> None:
        assert (await own.wait(good, 30)).state == "succeeded"
        assert (await own.wait(killed, 30)).state == "failed"

    running(state, second)


def _collect(pid: int) -> None:
    """Collect a child that the first service left to this process."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def test_a_pid_of_another_process_is_left_alone(state: Path) -> None:
    """The worker is gone, and its pid belongs to somebody else."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        stored = wanted("wait")
        directory = state / "service" / "operations" / stored.id
        directory.mkdir(parents=True, mode=0o700)
        files.write(directory, "request.json", stored)
        files.write(directory, "process.json", Process(other.pid, 1, boot_id(), time.time(), 1))

        async def test(own: Operations) -> None:
            assert own.get(stored.id).state == "failed"
            own.cancel(stored.id)
            assert other.poll() is None

        running(state, test)
    finally:
        other.kill()
        other.wait()


def test_a_request_that_never_began_begins_with_the_next_service(state: Path) -> None:
    stored = wanted()
    directory = state / "service" / "operations" / stored.id
    directory.mkdir(parents=True, mode=0o700)
    files.write(directory, "request.json", stored)
    half = directory.with_name("abc.new")
    half.mkdir()

    async def test(own: Operations) -> None:
        assert (await own.wait(stored.id, 30)).state == "succeeded"
        assert not half.exists()

    running(state, test)


def test_nothing_that_ended_runs_again_after_a_crash(state: Path) -> None:
    """The machine went down while the oldest ran; a younger one had ended days before the restart."""
    lost, ended = wanted("wait"), wanted("echo", created=time.time() + 1)
    for one in (lost, ended):
        directory = state / "service" / "operations" / one.id
        directory.mkdir(parents=True, mode=0o700)
        files.write(directory, "request.json", one)
        files.write(directory, "process.json", Process(1, 1, "another boot", time.time(), 1))
    files.write(directory, "result.json", Result(exit_status=0, ended=time.time()))

    async def test(own: Operations) -> None:
        assert own.get(lost.id).state == "failed"
        done = own.get(ended.id)
        assert (done.state, done.attempt) == ("succeeded", 1)
        assert not (directory / "output.log").exists()  # no process was made

    running(state, test)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each write of this service fail, not those of workers."""

    def fail(*about: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", fail)
    monkeypatch.setattr(files, "create_private", fail)


def test_an_operation_ends_on_a_full_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_WRITE_AGAIN_SECONDS", 0.05)

    async def test(own: Operations) -> None:
        crash, _ = own.create(wanted("crash", environment={"A": "b"}))
        waiting, _ = own.create(wanted("echo"))
        folder = state / "service" / "operations"
        with monkeypatch.context() as full:
            full_disk(full)
            done = await own.wait(crash.id, 10)
            assert done.state == "failed" and done.error is not None
            assert "was killed" in done.error.detail
            assert (await own.wait(waiting.id, 10)).state == "succeeded"  # it got its turn
            with pytest.raises(IcecoreError, match="cannot be recorded"):
                own.create(wanted())
            assert not list(folder.glob("*.new"))
            assert files.read_result(folder / crash.id) is None
        for _ in range(100):
            stored = files.read_stored(folder / crash.id)
            if stored is not None and stored.environment is None:
                break
            await asyncio.sleep(0.05)
        result = files.read_result(folder / crash.id)
        assert result is not None and result.exit_status == 1
        assert stored is not None and stored.environment is None

    running(state, test, Bounds(node=1, caller=1))


def test_a_service_starts_on_a_full_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, ended = wanted("wait", environment={"A": "b"}), wanted(environment={"A": "b"})
    for one in (lost, ended):
        directory = state / "service" / "operations" / one.id
        directory.mkdir(parents=True, mode=0o700)
        files.write(directory, "request.json", one)
        files.write(directory, "process.json", Process(1, 1, "another boot", time.time(), 1))
    files.write(directory, "result.json", Result(exit_status=0, ended=time.time()))
    full_disk(monkeypatch)

    async def test(own: Operations) -> None:
        assert own.get(lost.id).state == "failed"
        assert own.get(ended.id).state == "succeeded"

    running(state, test)


def test_a_worker_that_is_slow_to_begin_is_not_lost(state: Path) -> None:
    """An earlier attempt has ended; the worker of the next holds the lock and is not named yet."""
    stored = wanted("wait")
    directory = state / "service" / "operations" / stored.id
    directory.mkdir(parents=True, mode=0o700)
    files.write(directory, "request.json", stored)
    files.write(directory, "process.json", Process(1, 1, "another boot", time.time(), 1))
    descriptor = files.lock(directory)

    async def test(own: Operations) -> None:
        try:
            assert (await own.wait(stored.id, 0.3)).state == "running"
            files.write(directory, "result.json", Result(exit_status=0, ended=time.time()))
        finally:
            os.close(descriptor)
        assert (await own.wait(stored.id, 10)).state == "succeeded"

    running(state, test)


def test_a_supervisor_that_was_killed_is_started_again(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_BACK_OFF", (0.05, 0.1))

    async def test(own: Operations) -> None:
        made, _ = own.create(wanted("crash-once", supervised=True, job="train"))
        assert own.supervising() == {"train": made.id}
        done = await own.wait(made.id, 30)
        assert done.state == "succeeded" and done.attempt == 2
        assert own.supervising() == {}
        hopeless, _ = own.create(wanted("crash", supervised=True, job="train"))
        await asyncio.sleep(0.5)
        own.cancel(hopeless.id)
        assert (await own.wait(hopeless.id, 30)).state == "cancelled"
        monkeypatch.setattr(operations, "_BACK_OFF", (20.0, 20.0))
        waiting, _ = own.create(wanted("crash", supervised=True, job="train"))
        async with asyncio.timeout(30):
            while own.get(waiting.id).state != "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        own.cancel(waiting.id)  # its job may run: only the next supervisor can stop it
        assert own.get(waiting.id).state == "queued"

    running(state, test)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_supervisor_that_is_killed_while_it_stops_its_job_says_so(
    state: Path, renewed: bool
) -> None:
    """As one in the foreground that a second TERM ends: whoever waits for it starts it again."""
    ids: list[str] = []

    async def first(own: Operations) -> None:
        made, _ = own.create(wanted("wait", supervised=True, job="train"))
        ids.append(made.id)
        pid = await asyncio.to_thread(pid_of, state, made.id)
        os.kill(pid, signal.SIGSTOP)  # it has no time to answer
        own.cancel(made.id, "TERM")
        if not renewed:
            os.kill(pid, signal.SIGKILL)
            assert (await own.wait(made.id, 30)).exit_status == 128 + signal.SIGTERM

    async def second(own: Operations) -> None:
        os.kill(pid_of(state, ids[0]), signal.SIGKILL)
        ended = await own.wait(ids[0], 30)
        assert (ended.state, ended.exit_status) == ("cancelled", 128 + signal.SIGTERM)

    running(state, first)
    if renewed:
        running(state, second)


def test_supervised_jobs_do_not_wait_for_others(state: Path) -> None:
    async def test(own: Operations) -> None:
        made = [own.create(wanted("wait", supervised=True))[0] for _ in range(3)]
        assert all(own.get(one.id).state == "running" for one in made)
        with pytest.raises(Busy):
            own.create(wanted("wait", supervised=True))
        short, _ = own.create(wanted())
        assert (await own.wait(short.id, 30)).state == "succeeded"
        (state / "go").touch()
        for one in made:
            await own.wait(one.id, 30)

    running(state, test, Bounds(node=1, caller=1, supervised=3))


def test_old_operations_are_forgotten(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_table, "_KEPT_PER_CALLER", 2)

    async def test(own: Operations) -> None:
        other, _ = own.create(wanted(caller_key="uid:2"))  # the oldest, but another caller's
        await own.wait(other.id, 30)
        ids = []
        for _ in range(4):
            made, _ = own.create(wanted(key=new_id(), digest="d"))
            await own.wait(made.id, 30)
            ids.append(made.id)
        assert {one.id for one in own.all()} == {other.id, *ids[2:]}
        assert not (state / "service" / "operations" / ids[0]).exists()

    running(state, test)


def test_what_a_job_was_started_with_goes_when_it_ends(state: Path) -> None:
    async def test(own: Operations) -> None:
        made, _ = own.create(wanted(command=["a" * 1000], environment={"A": "b"}))
        await own.wait(made.id, 30)
        stored = files.read_stored(state / "service" / "operations" / made.id)
        assert stored is not None and stored.words == ["echo"]
        assert stored.command == [] and stored.environment is None

    running(state, test)


def test_a_command_that_no_kernel_starts_is_refused() -> None:
    large = ["x" * 100_000] * 11
    body = {"command": large, "cwd": "/", "environment": {}}
    assert msgspec.convert(body, RunRequest).command == large
    body["environment"] = {f"A{number}": "x" * 100_000 for number in range(11)}
    with pytest.raises(msgspec.ValidationError, match="command and environment have 2200"):
        msgspec.convert(body, RunRequest)


# -- records


def test_a_reader_continues_where_it_was(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    lines = [b'{"n":%d}' % number for number in range(100)]
    for line in lines:
        writer.write(line)
    found = list(Reader(tmp_path).read())
    assert [line for _, line in found] == lines
    for place in (0, 50, 99):
        rest = list(Reader(tmp_path, found[place][0]).read())
        assert [line for _, line in rest] == lines[place + 1 :]
    inside = list(Reader(tmp_path, found[9][0] + 3).read())  # no end of a record: the next one
    assert [line for _, line in inside] == lines[11:]
    assert list(Reader(tmp_path, 10**9).read()) == []


def test_records_are_bounded_and_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icecore.service.api.journal._SEGMENT_BYTES", 1000)
    writer = Writer(tmp_path)
    reader = Reader(tmp_path)
    seen: list[tuple[int, bytes]] = []
    for number in range(1000):
        writer.write(b'{"number":%d}' % number)
        seen += reader.read()
    assert [line for _, line in seen] == [b'{"number":%d}' % number for number in range(1000)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3100
    late = Reader(tmp_path)
    rest: list[tuple[int, bytes]] = []
    while more := list(late.read()):
        rest += more
    assert rest == seen[-len(rest) :] and len(rest) > 50  # the oldest are gone


def test_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(b'{"n":1}')
    path = next(tmp_path.iterdir())
    with open(path, "ab") as file:
        file.write(b'{"n":')
    assert [line for _, line in Reader(tmp_path).read()] == [b'{"n":1}']
    Writer(tmp_path).write(b'{"n":2}')
    assert [line for _, line in Reader(tmp_path).read()] == [b'{"n":1}', b'{"n":2}']
