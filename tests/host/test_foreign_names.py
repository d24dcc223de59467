"""Names that a process chose, as /proc shows them: they are read exactly, and no part of a name is
taken for anything else.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from icecore.dumper.observe.inspection import mount_ids
from icecore.dumper.preflight.judge import check_target
from icecore.dumper.target import Target
from icecore.errors import Damaged
from icecore.host.criu.program import explain
from icecore.host.cuda.inventory import read_inventory
from icecore.host.cuda.nccl import passes_descriptors, settings_of
from icecore.host.jobs import launch
from icecore.host.jobs.namespaces import Isolation, RunRecord, bindable_mounts
from icecore.host.jobs.registry import require_name
from icecore.host.kernel import procfs
from tests.host.target import target
from tests.recorded import through_manifest

#: With line ends that are none for the kernel, fields of /proc/PID/status, bytes that are not
#: UTF-8; 15 bytes at most.
THREADS = [
    b"x\rTgid:\t1",
    b"a\x0bb",
    b"\xff\xfe\x80",
    b"x\nNSpid:\t1\n",
    b"\x1c\x1d\xc2\x85\xe2\x80\xa8",
    b"\rUid:\t7 7",
    b"\x1b[31m) R 1",
    b"\\\\n\\012",
    b"\rState: Z",
]


@pytest.mark.parametrize("name", THREADS, ids=range(len(THREADS)))
def test_a_name_adds_nothing_to_a_status(name: bytes) -> None:
    with target(f"libc.prctl(15, {name!r}, 0, 0, 0)\nsay(1); hear()") as it:
        it.hear()
        told = procfs.status(it.pid)
        assert os.fsencode(told.name) == name
        assert (
            told.user == os.geteuid()
            and told.own_pid == it.pid
            and told.parent == os.getpid()
            and not told.zombie
        )
        fields = procfs.status_fields(it.pid, it.pid)
        assert fields["Tgid"] == fields["NSpid"] == [str(it.pid)] and fields["Threads"] == ["1"]
        assert check_target(it.pid) == [], (
            "it is no thread of another process, whatever its name says"
        )


def test_paths_of_mappings_and_descriptors_are_exact(tmp_path: Path) -> None:
    """Maps write a newline as four characters that a name may hold itself."""
    source = random.Random(5)
    alphabet = [bytes([code]) for code in range(1, 256) if code != 0x2F] + [
        b"\\012",
        b"\n",
        b" (deleted)",
    ] * 20
    names = [
        b"a\\012b",
        b"a\nb",
        b"x (deleted)",
        b"\\\\012",
        *(b"%d" % n + b"".join(source.choices(alphabet, k=20)) for n in range(40)),
    ]
    paths = [os.path.join(os.fsencode(tmp_path), name) for name in names]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"x")
    code = """
    keep = []
    for word in sys.argv[1:]:
        fd = os.open(bytes.fromhex(word), os.O_RDONLY)
        keep.append(mmap.mmap(fd, 1, prot=mmap.PROT_READ))
    say(1); hear()
    """
    with target(code, *(path.hex() for path in paths)) as it:
        it.hear()
        mapped = {os.fsencode(mapping.path) for mapping in procfs.read_maps(it.pid)}
        detailed = {
            os.fsencode(mapping.path) for mapping in procfs.read_maps(it.pid, vm_flags=True)
        }
        opened = {os.fsencode(descriptor.target) for descriptor in procfs.descriptors(it.pid)}
        assert set(paths) <= opened
        assert set(paths) <= mapped and set(paths) <= detailed
        assert [os.fsencode(word).hex() for word in procfs.command_line(it.pid)[-2:]] == [
            path.hex().encode().hex() for path in paths[-2:]
        ]


def test_mount_points_of_any_name(tmp_path: Path) -> None:
    """In a mount namespace of the test's own: a line end in a mount point is none of mountinfo's."""
    names = [b"m\r\x0b\xff", b"m\\134 \t\n", b"- tmpfs - x", b"\xc2\x85\xe2\x80\xa8"]
    points = [os.path.join(os.fsencode(tmp_path), name) for name in names]
    for point in points:
        os.mkdir(point)
        launch.mount("none", os.fsdecode(point), "tmpfs", 0)
    try:
        found = {os.fsencode(mount.point): mount for mount in procfs.mounts()}
        assert all(found[point].kind == "tmpfs" for point in points)
        assert mount_ids(os.getpid()) == {mount.id for mount in procfs.mounts()}
        assert set(bindable_mounts()) <= {mount.point for mount in procfs.mounts()}
    finally:
        for point in points:
            launch._libc.umount2(point, launch.MNT_DETACH)


def test_the_job_of_a_program_with_any_name(tmp_path: Path) -> None:
    for name in (b"\xff\x1b[31m", b"...", b"a b\n\xe2\x80\xae", b"-rf", b"x" * 200):
        program = os.path.join(os.fsencode(tmp_path), name)
        os.symlink(sys.executable, program)
        with open("/bin/sleep", "rb") as binary:
            os.unlink(program)
            Path(os.fsdecode(program)).write_bytes(binary.read())
        os.chmod(program, 0o755)
        pid = os.posix_spawn(program, [b"sleep", b"60"], {})
        try:
            while os.readlink(f"/proc/{pid}/exe".encode()) != program:
                pass
            require_name(Target.of_process(pid).job)
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_socket_of_somebody_elses_with_lines_in_its_name() -> None:
    """Every user can give a socket such a name; /proc/net/unix shows it as it is."""
    with socket.socket(socket.AF_UNIX) as hostile, socket.socket(socket.AF_UNIX) as real:
        hostile.bind(
            b"\0/tmp/nccl-socket-\n1 2 3 4 5 6 no-number /tmp/nccl-socket-@/tmp/nccl-socket- \xff"
        )
        real.bind(f"\0/tmp/nccl-socket-{os.getpid()}")
        assert passes_descriptors(os.getpid(), {os.fstat(real.fileno()).st_ino})
        assert not passes_descriptors(os.getpid(), {1})


def test_variables_of_any_bytes() -> None:
    with target(
        "os.execve('/bin/sleep', ['sleep', '60'], {b'NCCL_X': b'\\xff=1', b'\\xfe': b'2'})"
    ) as it:
        while "NCCL_X" not in settings_of(it.pid):
            pass
        assert settings_of(it.pid)["NCCL_X"] == "\udcff=1"


def test_the_name_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pynvml")
    module.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    vars(module).update(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580\xff",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1, used=0),
        nvmlDeviceGetUUID=lambda handle: "GPU-\x1b[31m",
        nvmlDeviceGetName=lambda handle: b"H\xff\n",
        nvmlDeviceGetMinorNumber=lambda handle: 0,
        nvmlDeviceGetMigMode=lambda handle: (0, 0),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
        nvmlDeviceGetMPSComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = read_inventory()
    assert (found.driver, found.gpus[0].name, found.gpus[0].uuid) == (
        r"580\xff",
        r"H\xff\n",
        r"GPU-\x1b[31m",
    )


def test_a_log_of_criu_with_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "dump.log").write_bytes(
        b"(00.1) Error (criu/x.c:1): Can't dump \xff\x0bError (x): io_uring \x85\n(00.2) Error (y): two\n"
    )
    assert explain(tmp_path).errors == ["Can't dump \udcff\x0bError (x): io_uring \udc85", "two"]


@pytest.mark.parametrize("wrong", ["a\0b", "\ud800"])
def test_the_record_of_a_run_holds_what_a_process_can_have(wrong: str) -> None:
    files = {name: f"/{name}" for name in ("stdout.log", "stderr.log", "status", "icecore-init")}
    good = RunRecord("job", ["a\udcff"], "/\udcfe", Isolation(), files, [], b"")
    assert through_manifest(good) == good
    with pytest.raises(Damaged):
        through_manifest(RunRecord("job", ["a", wrong], "/", Isolation(), files, [], b""))
