"""CRIU itself, in every version on the machine: who is frozen when, who thaws whom, what a restore
needs, what errors mean.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import DumpFailed, MissingTool, RestoreFailed
from icecore.host.criu.log import BEGUN_GPU, diagnose
from icecore.host.criu.page_server import PE_PRESENT, PROCESS
from icecore.host.criu.pagemap_image import (
    ENTRY,
    PE_LAZY,
    load_pagemap,
    merge_entries,
    write_pagemap,
)
from icecore.host.criu.program import DumpArguments, RestoreArguments, find_criu
from icecore.host.kernel import limits, procfs
from icecore.host.kernel.memory import RemoteReader
from icecore.sizes import PAGE
from tests.host.criu_harness import (
    capture,
    images_folder,
    lazy_only_removed,
    parametrize,
    restored,
    stopped,
    wait_for,
    worker,
)
from tests.host.criu_run import LazyDump, PlainDump, StreamDump
from tests.host.target import dead_pid, eventually

ALONE = DumpArguments(network_lock="skip")


@parametrize
def test_the_tree_stands_still_until_finish(criu):
    with worker() as it, images_folder() as images:
        with LazyDump(criu, it.pid, images, ALONE) as dump:
            assert 0 < dump.wait_serving(30) < 30
            assert stopped(it.pid) and dump.serving()
            count = it.progress()
            time.sleep(0.1)
            assert it.progress() == count
            dump.finish(30)
        assert not dump.serving() and dump.process.returncode == 0
        assert it.works() and not stopped(it.pid)


@parametrize
def test_hanging_up_thaws_at_any_time(criu):
    with worker() as it:
        for wait in (True, False):
            with images_folder() as images:
                dump = LazyDump(criu, it.pid, images, ALONE)
                if wait:
                    dump.wait_serving(30)
                dump.abandon(30)
                assert dump.process.returncode is not None
                assert not stopped(it.pid) and it.works()


@parametrize
def test_the_death_of_whoever_holds_the_connection_thaws(criu):
    with worker() as it, images_folder() as images:
        holder = os.fork()
        if holder == 0:
            try:
                dump = LazyDump(criu, it.pid, images, ALONE)
                dump.wait_serving(30)
                (images / "serving").touch()
                time.sleep(60)
            finally:
                os._exit(1)
        try:
            wait_for(images / "serving")
            assert stopped(it.pid)
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        assert eventually(lambda: not stopped(it.pid))
        assert it.works()
        assert eventually(
            lambda: "Dumping finished successfully" in (images / "dump.log").read_text()
        )


@parametrize
def test_the_death_of_criu_in_the_window_is_noticed(criu):
    with worker() as it, images_folder() as images, LazyDump(criu, it.pid, images, ALONE) as dump:
        dump.wait_serving(30)
        dump.process.kill()
        dump.process.wait(10)
        assert not dump.serving()
        with pytest.raises(DumpFailed):
            dump.finish(10)
        assert it.works()


@parametrize
def test_a_criu_that_dies_early_is_noticed(criu):
    with worker() as it, images_folder() as images, LazyDump(criu, it.pid, images, ALONE) as dump:
        dump.process.kill()  # so early that it has touched nothing
        with pytest.raises(DumpFailed, match="status -9"):
            dump.wait_serving(10)
        assert it.works()


@parametrize
def test_a_failing_dump_says_why_and_thaws(criu):
    code = """
    import socket
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted = server.accept()
    """
    with (
        worker(code=code) as it,
        images_folder() as images,
        LazyDump(criu, it.pid, images, ALONE) as dump,
    ):
        able = criu.dumps_internet_sockets(limits.kernel_version())
        with pytest.raises(
            DumpFailed, match="established TCP connection" if able else "internet socket"
        ) as caught:
            dump.wait_serving(30)
        assert caught.value.cure
        assert it.works()
    with (
        images_folder() as images,
        LazyDump(criu, dead_pid(), images, ALONE) as dump,
        pytest.raises(DumpFailed),
    ):
        dump.wait_serving(30)


@parametrize
@pytest.mark.parametrize("keep_lazy_entries", [True, False])
def test_a_lazy_restore_goes_on_with_every_byte(criu, keep_lazy_entries):
    """Registration goes by VMA, so a pagemap needs only the entries whose pages CRIU itself puts
    in.
    """
    with worker() as it, images_folder() as images:
        memory = capture(criu, it.pid, images)
        count = it.progress()
        it.kill()
        if not keep_lazy_entries:
            assert lazy_only_removed(images, it.pid, criu.version) > 0
        with restored(criu, images, memory) as (restore, daemon):
            pid = restore.wait(30)
            assert pid == it.pid and procfs.status(pid).parent == os.getpid()
            daemon.place_all()
            assert it.works() and eventually(lambda: it.progress() > count)
            assert (
                daemon.failure is None
                and list(daemon.uffds) == [it.pid]
                and daemon.finished.wait(5)
            )


def script(folder: Path, stage: str, end: str) -> Path:
    """An action script that waits at a stage until a file ``go`` is there."""
    path = folder / "script.sh"
    path.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = {stage} ] || exit 0\n'
        f"echo $CRTOOLS_INIT_PID > {folder}/at; mv {folder}/at {folder}/here\n"
        f"while [ ! -e {folder}/go ]; do sleep 0.01; done\n{end}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@parametrize
@pytest.mark.parametrize("stage", ["post-restore", "pre-resume"])
def test_everything_can_be_made_resident_in_an_action_script(criu, stage):
    with worker() as it, images_folder() as images:
        memory = capture(criu, it.pid, images)
        it.kill()
        arguments = RestoreArguments(
            network_lock="skip", action_script=script(images, stage, "exit 0")
        )
        with restored(criu, images, memory, arguments) as (restore, daemon):
            wait_for(images / "here")
            count = it.progress()
            daemon.place_all()
            faults = daemon.faults
            with RemoteReader(it.pid) as reader:
                pages = [
                    (np.frombuffer(reader.read(address, buffer.size), np.uint8) != buffer.array)
                    .reshape(-1, PAGE)
                    .any(axis=1)
                    for address, buffer in memory.items()
                ]
            # The kernel keeps each thread's restartable sequence up to date in one page.
            assert sum(int(p.sum()) for p in pages) <= 1
            assert it.progress() == count
            (images / "go").touch()
            assert restore.wait(30) == it.pid
            assert it.works() and daemon.faults <= faults + 3


@parametrize
def test_a_failing_script_kills_at_post_restore_and_is_ignored_at_pre_resume(criu):
    with worker() as it, images_folder() as images:
        memory = capture(criu, it.pid, images)
        it.kill()
        (images / "go").touch()
        for stage in ("post-restore", "pre-resume"):
            arguments = RestoreArguments(
                network_lock="skip", action_script=script(images, stage, "exit 3")
            )
            with restored(criu, images, memory, arguments) as (restore, daemon):
                if stage == "post-restore":
                    with pytest.raises(RestoreFailed):
                        restore.wait(30)
                    assert eventually(lambda: not procfs.exists(it.pid) or procfs.is_zombie(it.pid))
                    try:
                        os.waitpid(it.pid, 0)
                    except ChildProcessError:
                        pass  # CRIU has already waited for it
                else:
                    assert restore.wait(30) == it.pid  # CRIU only logs it
                    daemon.place_all()
                    assert it.works()


@parametrize
def test_a_taken_pid_is_named(criu):
    with worker() as it, images_folder() as images:
        memory = capture(criu, it.pid, images)
        with restored(criu, images, memory) as (restore, _):
            with pytest.raises(RestoreFailed, match="process id of the job is in use"):
                restore.wait(30)
            assert it.works()  # whoever has the pid is left alone


@parametrize
def test_a_file_that_grew_is_named(criu, tmp_path):
    log = tmp_path / "log"
    with (
        worker(code=f"log = open({str(log)!r}, 'wb'); log.write(b'x' * 100); log.flush()") as it,
        images_folder() as images,
    ):
        memory = capture(criu, it.pid, images)
        it.kill()
        log.write_bytes(b"x" * 300)
        with (
            restored(criu, images, memory) as (restore, _),
            pytest.raises(RestoreFailed, match="no longer as it was"),
        ):
            restore.wait(30)
        os.truncate(log, 100)
        with restored(criu, images, memory) as (restore, daemon):
            restore.wait(30)
            daemon.place_all()
            assert it.works()


@parametrize
def test_the_streamed_dump_brings_all_pages(criu):
    with worker(32) as it, images_folder() as images:
        dump = StreamDump(criu, it.pid, images, ALONE)
        dump.connection.socket.settimeout(30)
        extents, content = [], []
        for extent in dump.connection.extents():
            assert (extent.kind, extent.number) == (PROCESS, it.pid) and extent.flags & PE_PRESENT
            data = bytearray(extent.pages * PAGE)
            dump.connection.receive_into(memoryview(data))
            extents.append((extent.address, extent.pages, extent.flags))
            content.append(data)
        dump.wait(30)
        assert it.works()
        it.kill()
        entries = np.array(extents, ENTRY)
        assert int(entries["pages"].sum()) * PAGE > 32 << 20
        # what was streamed makes images from which a plain restore goes on
        (images / "pages-1.img").write_bytes(b"".join(content))
        write_pagemap(images / f"pagemap-{it.pid}.img", 1, entries, criu.version)
        arguments = RestoreArguments(lazy=False, network_lock="skip")
        with restored(criu, images, {}, arguments) as (restore, _):
            assert restore.wait(30) == it.pid
            assert it.works()


@parametrize
def test_the_plain_dump_writes_all_pages(criu):
    with worker() as it, images_folder() as images:
        PlainDump(criu, it.pid, images, ALONE).wait(60)
        assert it.works()
        pages_id, entries = load_pagemap(images / f"pagemap-{it.pid}.img")
        present = entries[entries["flags"] & PE_PRESENT != 0]
        assert (images / f"pages-{pages_id}.img").stat().st_size == int(
            present["pages"].sum()
        ) * PAGE
        assert (entries["flags"] & PE_LAZY).any() and len(merge_entries(entries)) == len(entries)


@parametrize
def test_check_passes_and_versions_are_read(criu):
    criu.check()
    assert criu.version >= (4, 0, 0)


def fake_criu(folder: Path, version: str, code: int = 0) -> Path:
    path = folder / "criu"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Version: {version}" || echo "not supported: soft-dirty"\nexit {code}\n'
    )
    path.chmod(0o755)
    return path


def test_a_criu_that_is_missing_too_old_or_broken_is_refused_with_the_cure(tmp_path, monkeypatch):
    with pytest.raises(MissingTool, match="does not start") as caught:
        find_criu(tmp_path / "none")
    assert "tools/install-criu" in caught.value.cure
    with pytest.raises(MissingTool, match=r"3\.17, older than 4\.0"):
        find_criu(fake_criu(tmp_path, "3.17.1"))
    with pytest.raises(MissingTool, match=r"no criu\.json"):
        find_criu(tmp_path)
    monkeypatch.setenv("ICECORE_CRIU", str(fake_criu(tmp_path, "4.7")))
    assert find_criu().version == (4, 7, 0)
    monkeypatch.setenv("ICECORE_CRIU", str(fake_criu(tmp_path, "4.1.1", 1)))
    with pytest.raises(MissingTool, match="soft-dirty"):
        find_criu().check()
    monkeypatch.delenv("ICECORE_CRIU")
    monkeypatch.setenv("ICECORE_CRIU_PREFIX", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (tmp_path / "criu.json").write_text(f'{{"criu": "{fake_criu(tmp_path, "4.2.1")}"}}')
    assert find_criu().version == (4, 2, 1)
    assert find_criu(tmp_path).path == tmp_path / "criu"


def test_the_log_is_understood():
    log = """(00.031199) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.05) Warn  (criu/x.c:1): Error is not this one
(00.061)  123: Error (criu/files.c:480): Can't dump file 7 of that type [600] (unknown anon_inode:[io_uring])
(00.07) Error (criu/cr-dump.c:2111): Dumping FAILED.
"""
    found = diagnose(log)
    assert found.cause is not None and found.cause.name == "io-uring" and len(found.errors) == 2
    message, cure = found.sentence("the dump of process 1")
    assert "io_uring" in message and "sysctl" in cure
    assert diagnose("").cause is None and "no reason" in diagnose("").sentence("x")[0]
    unknown = diagnose("Error (criu/a.c:1): something new\n")
    assert unknown.cause is None and "something new" in unknown.sentence("x")[0]
    full = diagnose(
        "(00.1) Error (criu/page-pipe.c:120): page-pipe: Can't make pipe for page-pipe: Too many open files\n"
    )
    assert full.cause is not None and full.cause.name == "descriptors"
    high = diagnose(
        "(00.1) 1: Error (criu/servicefd.c:262): sfd: Can't chose service_fd_base: 19968 20026\n"
        "(00.2) 1: Error (criu/x.c:1): Can't open file: No such file or directory\n"
    )
    assert high.cause is not None and "ulimit -Hn" in high.cause.cure
    taken = diagnose("pie: 7: Error (criu/pie/restorer.c:2090): Unable to create a thread: -17\n")
    assert taken.cause is not None and taken.cause.name == "pid-taken"
    begun = diagnose(
        "Error (criu/proc_parse.c:118): handle_device_vma plugin failed: No such file or directory\n"
    )
    assert begun.cause is not None and begun.cause.name == BEGUN_GPU
    began = diagnose(
        "Error (criu/files-ext.c:98): Can't dump file 5 of that type [20666] (chr 195:255 /dev/nvidiactl)\n"
    )
    assert began.cause is not None and began.cause.name == BEGUN_GPU
    met = diagnose(
        "pie: 1: Error (criu/pie/parasite.c:634): Can't create a directory (-17)\n"
        "Error (criu/parasite-syscall.c:320): Parasite failed to dump /proc/self/cgroup\n"
    )
    assert met.cause is not None and met.cause.name == "proc" and len(met.errors) == 2


def test_command_lines():
    arguments = RestoreArguments(
        inherit=((5, "net"),),
        external=("mnt[]",),
        connections="close",
        root=Path("/r"),
        stopped=True,
    )
    words = arguments.arguments()
    assert (
        words[words.index("--inherit-fd") + 1] == "fd[5]:net"
        and "--tcp-close" in words
        and "--leave-stopped" in words
    )
    assert (
        "--restore-sibling" in words
        and "--lazy-pages" in words
        and words[words.index("--root") + 1] == "/r"
    )
    words = DumpArguments(
        connections="keep", shell_job=True, cgroups=True, ghost_limit=5, extra=("--x",)
    ).arguments()
    assert {"--tcp-established", "--shell-job", "--x"} <= set(
        words
    ) and "--manage-cgroups=ignore" not in words
    assert words[words.index("--ghost-limit") + 1] == "5"
