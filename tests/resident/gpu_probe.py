"""Resident device memory on a real GPU: what no fake can show. Not a pytest file; it needs nothing
of icecore's dependencies but numpy.

    python3 tests/resident/gpu_probe.py [--gb 8] [--steps 60] [--criu PATH] [--seconds 540] [PART
    ...]

As root, with torch, cuda.bindings and gcc. Parts, in this order unless named: doors, overhead,
fingerprint, digest, window, share, worker, stress, driver, kill. Each prints as it goes and `OK` or
`FAILED` at its end; no process is left behind; the last lines sum up. The status is 1 where a part
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "doors",
    "overhead",
    "fingerprint",
    "digest",
    "window",
    "share",
    "ipc",
    "worker",
    "stress",
    "driver",
    "kill",
)
GIB = 1 << 30
MIB = 1 << 20

TRAIN = """
import hashlib, os, sys, time, torch
gib, steps, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
width, layers = 4096, 6
model = torch.nn.Sequential(*(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.GELU()))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
have = 4 * sum(p.numel() * 4 for p in model.parameters())
ballast = [torch.randint(0, 255, (256 << 20,), dtype=torch.uint8, device="cuda") for _ in range(max(0, int((gib * (1 << 30) - have) // (256 << 20))))]
check = lambda: sum(int(b.long().sum()) * (i + 1) for i, b in enumerate(ballast))
total = check()
print("ready", torch.cuda.memory_reserved() >> 20, "MiB", flush=True)
for step in range(steps):
    x = torch.randn(256, width, device="cuda")
    began = time.perf_counter()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    took = time.perf_counter() - began
    with open(out, "a") as file:
        file.write(f"{step} {value.hex()} {took:.6f}\\n")
    if len(sys.argv) > 4:
        time.sleep(float(sys.argv[4]))
assert check() == total, "the ballast changed"
with open(out, "a") as file:
    file.write("end 0 0\\n")
"""

STRESS = """
import random, sys, threading, time, torch
stop = threading.Event()
rounds = [0] * 6
def work(n):
    torch.cuda.set_device(n % torch.cuda.device_count())
    stream, rng = torch.cuda.Stream(), random.Random(n)
    with torch.cuda.stream(stream):
        sizes = [rng.choice((1 << 12, 3 << 20, 17 << 20, 130 << 20)) for _ in range(6)]
        values = [rng.randrange(200) for _ in sizes]
        buffers = [torch.full((size,), v, dtype=torch.uint8, device="cuda") for size, v in zip(sizes, values)]
        while not stop.is_set():
            k = rng.randrange(6)
            if not bool((buffers[k] == values[k]).all()):
                print("WRONG", n, k, flush=True)
                stop.set()
            values[k] = (values[k] + 7) % 251
            if rng.random() < 0.1:
                buffers[k] = None
                if rng.random() < 0.3:
                    torch.cuda.empty_cache()
                buffers[k] = torch.full((sizes[k],), values[k], dtype=torch.uint8, device="cuda")
            else:
                buffers[k].fill_(values[k])
            rounds[n] += 1
threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
for t in threads: t.start()
while min(rounds) < 20 and not stop.is_set(): time.sleep(0.05)
print("ready", flush=True)
sys.stdin.readline()
good = not stop.is_set()
stop.set()
for t in threads: t.join()
print("rounds", rounds, flush=True)
sys.exit(0 if good else 1)
"""

ALLOCATE = """
import json, statistics, time
from cuda.bindings import driver as cu
def ck(r):
    assert int(r[0]) == 0, r[0]
    return r[1] if len(r) == 2 else None
ck(cu.cuInit(0)); ck(cu.cuCtxSetCurrent(ck(cu.cuDevicePrimaryCtxRetain(0))))
found = {}
mib = 1 << 20
for name, sizes, at_once in (
    ("1 MiB", [mib] * 400, 1), ("2 MiB", [2 * mib] * 400, 1), ("2 MiB, 8 at a time", [2 * mib] * 800, 8), ("32 MiB", [32 * mib] * 200, 1),
    ("4 MiB and a little less", [4 * mib - 4096 * (n % 7) for n in range(400)], 1), ("1 GiB", [1024 * mib] * 20, 1),
    ("70 to 108 MiB, each once", [n * mib for n in range(70, 110, 2)], 1),
):
    gets, frees = [], []
    for first in range(0, len(sizes), at_once):
        held = []
        for size in sizes[first : first + at_once]:
            a = time.perf_counter(); held.append(ck(cu.cuMemAlloc(size))); gets.append(time.perf_counter() - a)
        for p in held:
            a = time.perf_counter(); ck(cu.cuMemFree(p)); frees.append(time.perf_counter() - a)
    found[name] = [1e6 * figure for figure in (statistics.median(gets), statistics.median(frees), (sum(gets) + sum(frees)) / len(sizes))]
print(json.dumps(found))
"""

DOORS = """
import ctypes, glob, json, os, sys, torch
from cuda.bindings import driver as cu
keep = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda")]
p = cu.cuMemAlloc(6 << 20); assert int(p[0]) == 0; keep.append(p)
runtime = [l.split()[-1] for l in open("/proc/self/maps") if "libcudart.so" in l]
code = None
if runtime:
    r = ctypes.CDLL(runtime[0]); out = ctypes.c_void_p(); code = r.cudaMalloc(ctypes.byref(out), ctypes.c_size_t(10 << 20))
    pitch = ctypes.c_size_t(); q = ctypes.c_void_p()
    assert r.cudaMallocPitch(ctypes.byref(q), ctypes.byref(pitch), ctypes.c_size_t(5000), ctypes.c_size_t(1000)) == 0
    print("cudaMallocPitch 5000 x 1000: pitch", pitch.value)
print("libcudart", runtime[:1], "cudaMalloc ->", code)
small = torch.empty(1 << 10, device="cuda")
rng = cu.cuMemGetAddressRange(p[1]); print("cuMemGetAddressRange", rng[0], rng[2] if len(rng) > 2 else rng, "of", 6 << 20)
a, b = torch.cuda.mem_get_info(); print("mem_get_info", a >> 20, b >> 20)
print("ready", flush=True)
sys.stdin.readline()
"""

SHARE = """
import os, socket, sys
from cuda.bindings import driver as cu
role, path, device = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIZE = 64 << 20
def ck(r):
    assert int(r[0]) == 0, r[0]
    return None if len(r) == 1 else r[1] if len(r) == 2 else r[1:]
ck(cu.cuInit(0)); ck(cu.cuCtxSetCurrent(ck(cu.cuDevicePrimaryCtxRetain(device))))
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
def mapped(handle):
    address = ck(cu.cuMemAddressReserve(SIZE, 0, cu.CUdeviceptr(0), 0))
    ck(cu.cuMemMap(address, SIZE, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ck(cu.cuMemSetAccess(address, SIZE, [access], 1))
    return int(address)
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
if role == "taker":
    link.bind(path)
def send():
    descriptor = int(ck(cu.cuMemExportToShareableHandle(handle, FD, 0)))
    socket.send_fds(link, [b"x"], [descriptor])
    os.close(descriptor)
def receive():
    _, [descriptor], _, _ = socket.recv_fds(link, 1, 1)
    found = ck(cu.cuMemImportFromShareableHandle(descriptor, FD))
    os.close(descriptor)
    return found
if role == "maker":
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.requestedHandleTypes = FD
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    handle = ck(cu.cuMemCreate(SIZE, p, 0))
    address = mapped(handle)
    link.connect(path)
else:
    print("listening", flush=True)
    handle = receive()
    address = mapped(handle)
"""

TALK = """
print("ready", flush=True)
import numpy as np
host = np.zeros(SIZE // 4, np.uint32)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "write":
        ck(cu.cuMemsetD32(address, int(rest[0]), SIZE // 4)); ck(cu.cuCtxSynchronize())
        print("wrote", rest[0], flush=True)
    elif word == "read":
        ck(cu.cuMemcpyDtoH(host.ctypes.data, address, SIZE))
        print("read", int(host[0]) if (host == host[0]).all() else "uneven", flush=True)
"""

SHARE += (
    TALK
    + """\
    elif word == "send":
        send(); print("sent", flush=True)
    elif word == "again":
        other = receive(); there = mapped(other)
        ck(cu.cuMemcpyDtoH(host.ctypes.data, there, SIZE))
        ck(cu.cuMemUnmap(there, SIZE)); ck(cu.cuMemRelease(other)); ck(cu.cuMemAddressFree(there, SIZE))
        print("again", int(host[0]), flush=True)
    elif word == "handles":
        same = ck(cu.cuMemRetainAllocationHandle(address)); ck(cu.cuMemRelease(same))
        q = ck(cu.cuMemGetAllocationPropertiesFromHandle(handle))
        again = cu.cuMemExportToShareableHandle(handle, FD, 0)
        if int(again[0]) == 0: os.close(int(again[1]))
        print("handles", int(same) == int(handle), int(q.location.id), int(again[0]), flush=True)
    elif word == "free":
        ck(cu.cuMemUnmap(address, SIZE)); ck(cu.cuMemRelease(handle)); ck(cu.cuMemAddressFree(address, SIZE))
        print("freed", flush=True)
"""
)

IPC = (
    """
import ctypes, socket, sys, torch
from cuda.bindings import driver as cu
role, path, device = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIZE = 64 << 20
def ck(r):
    assert int(r[0]) == 0, r[0]
    return None if len(r) == 1 else r[1] if len(r) == 2 else r[1:]
torch.cuda.set_device(device); torch.cuda.synchronize()
runtime = ctypes.CDLL([l.split()[-1] for l in open("/proc/self/maps") if "libcudart.so" in l][0])
ck(cu.cuInit(0)); ck(cu.cuCtxSetCurrent(ck(cu.cuDevicePrimaryCtxRetain(device))))
class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]
def reference():
    out = Handle(); code = runtime.cudaIpcGetMemHandle(ctypes.byref(out), ctypes.c_void_p(address)); assert code == 0, code
    return bytes(out)
def opened(reference):
    out = ctypes.c_void_p(); code = runtime.cudaIpcOpenMemHandle(ctypes.byref(out), Handle.from_buffer_copy(reference), 1)
    return code, out.value
def closed(address):
    return runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
if role == "taker":
    link.bind(path)
    print("listening", flush=True)
    theirs = link.recv(64)
    code, address = opened(theirs); assert code == 0, code
else:
    tensor = torch.zeros(SIZE // 4, dtype=torch.int32, device="cuda"); address = tensor.data_ptr()
    torch.cuda.synchronize()
    theirs = reference()
    link.connect(path)
"""
    + TALK
    + """\
    elif word == "send":
        assert reference() == theirs
        link.send(theirs); print("sent", flush=True)
    elif word == "again":
        code, there = opened(link.recv(64)); assert (code, there) == (0, address), (code, there)
        ck(cu.cuMemcpyDtoH(host.ctypes.data, there, SIZE))
        assert closed(there) == 0
        print("again", int(host[0]), flush=True)
    elif word == "handles": # 0 and 0 in the taker, 201 and 1 in the maker
        code, _ = opened(theirs); print("handles", code, closed(address), flush=True)
    elif word == "free":
        if role == "taker": assert closed(address) == 0
        else: del tensor; torch.cuda.empty_cache()
        print("freed", flush=True)
"""
)


def bootstrap() -> Path:
    """Make ``icecore.host.resident`` of this tree importable, and build its programs."""
    folder = Path(tempfile.mkdtemp(prefix="icecore-probe-"))
    sys.path.insert(0, str(ROOT))
    here = ROOT / "icecore/host/resident"
    sources = sorted(str(path) for path in here.glob("*.c") if path.name != "keeper.c")
    flags = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra"]
    subprocess.run(
        [*flags, "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(here / "libicecore-resident.so"),
         *sources, "-lpthread", "-ldl"],
        check=True, timeout=120,
    )  # fmt: skip
    subprocess.run(
        [*flags, "-o", str(here / "icecore-keeper"), str(here / "keeper.c")],
        check=True,
        timeout=120,
    )
    return folder


class Probe:
    """The machine, and all that was started on it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from icecore.host.resident import keeper

        self.arguments = arguments
        self.folder = folder
        self.directory = Path(tempfile.mkdtemp(prefix="icecore-resident-", dir="/dev/shm"))
        self._keeper_module = keeper
        self.keeper = keeper.start_keeper(self.directory)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pids: list[int] = []
        self.results: dict[str, str] = {}
        self.cu: Any = None

    def environment(self, resident: bool) -> dict[str, str]:
        """A job's."""
        base = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "USE_LIBUV": "0",
        }
        return (
            {**base, **self._keeper_module.environment(str(self.directory), base)}
            if resident
            else base
        )

    def start(
        self, script: str, *words: object, resident: bool, log: Path, talk: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a Python program whose output goes to ``log``."""
        path = self.folder / f"script-{len(self.processes)}.py"
        path.write_text(textwrap.dedent(script))
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(path), *(str(word) for word in words)], env=self.environment(resident),
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                cwd="/",
            )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, script: str, *words: object, resident: bool, seconds: float = 200) -> str:
        """Run one to its end; its output."""
        log = self.folder / f"run-{len(self.processes)}.log"
        process = self.start(script, *words, resident=resident, log=log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -99
        if code:
            raise RuntimeError(f"status {code}: {log.read_text()[-3000:]}")
        return log.read_text()

    def driver(self) -> Any:
        """cuda.bindings.driver, with CUDA initialised."""
        if self.cu is None:
            from cuda.bindings import driver

            self.check(driver.cuInit(0))
            self.cu = driver
        return self.cu

    @staticmethod
    def check(result: Any) -> Any:
        """The value of a driver call."""
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]

    def lock(self, pid: int, seconds: float = 20.0) -> None:
        """cuCheckpointProcessLock."""
        from icecore.host.cuda.api import device_error

        arguments = self.driver().CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, int(1000 * seconds))
        code = int(self.driver().cuCheckpointProcessLock(pid, arguments)[0])
        if code:
            raise device_error("lock", pid, code, str(code))

    def unlock(self, pid: int) -> None:
        """cuCheckpointProcessUnlock."""
        self.check(self.driver().cuCheckpointProcessUnlock(pid, None))

    def checkpoint(self, pid: int) -> None:
        """cuCheckpointProcessCheckpoint."""
        self.check(self.driver().cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """cuCheckpointProcessRestore."""
        self.check(self.driver().cuCheckpointProcessRestore(pid, None))

    def close(self) -> None:
        """End everything."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            for one in self.keeper.processes():
                self.keeper.forget(one.token)
        shutil.rmtree(self.directory, ignore_errors=True)  # the keeper ends by itself


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Print how long something takes."""
    began = time.perf_counter()
    yield
    print(f"    {name:<12} {time.perf_counter() - began:8.4f} s", flush=True)


def wait(what: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
    """Until something is true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds} s: {why()}")
        time.sleep(0.02)


def losses(out: Path) -> dict[str, str]:
    """Loss by step; a step that ran twice (it cannot) would show."""
    found: dict[str, str] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        step, value, _ = line.split()
        if step in found:
            raise RuntimeError(f"step {step} ran twice")
        found[step] = value
    return found


def doors(probe: Probe) -> None:
    """Every way to the allocation, of a real runtime."""
    from icecore.host.resident.client import Agent

    log = probe.folder / "doors.log"
    process = probe.start(DOORS, resident=True, log=log, talk=True)
    wait(lambda: "ready" in log.read_text() or process.poll() is not None, 90, log.read_text)
    print(textwrap.indent(log.read_text(), "    "))
    agent = Agent(probe.directory, process.pid)
    for one in agent.allocations():
        print(
            f"    {one.identity:3} {one.address:#x} {one.size / MIB:8.1f} MiB, asked for {one.requested}, {one.device} ({one.ordinal})"
        )
    print("   ", agent.report().counts)
    requested = [one.requested for one in agent.allocations()]
    assert 6 * MIB in requested, "cuMemAlloc of cuda.bindings is not resident"
    assert 64 * MIB in requested, "torch's cudaMalloc is not resident"
    if "cudaMalloc -> 0" in log.read_text():
        assert 10 * MIB in requested, "cudaMalloc of the shared runtime is not resident"
    print("    keeper:", probe.keeper.processes())
    process.kill()
    process.wait(10)
    wait(lambda: not probe.keeper.processes(), 10, lambda: "the keeper still holds something")


def overhead(probe: Probe) -> None:
    """The cost where no snapshot is taken."""
    for name in ("first", "second"):
        both = [
            json.loads(probe.run(ALLOCATE, resident=resident).splitlines()[-1])
            for resident in (False, True)
        ]
        print(f"  {name}: loops of alloc + free, medians in µs (both, on average)", flush=True)
        for loop, without in both[0].items():
            texts = [
                f"{get:.0f} + {free:.0f} ({mean:.0f})"
                for get, free, mean in (without, both[1][loop])
            ]
            print(
                f"    {loop:26} without {texts[0]:26} with {texts[1]:26} × {both[1][loop][2] / without[2]:.2f}",
                flush=True,
            )
    medians = {}
    for resident in (False, True, False, True):
        out = probe.folder / f"overhead-{resident}-{time.monotonic_ns()}"
        probe.run(TRAIN, 1, 150, out, resident=resident)
        times = [float(line.split()[2]) for line in out.read_text().splitlines()[30:-1]]
        medians.setdefault(resident, []).append(1e3 * statistics.median(times))
    print(f"  training, ms a step: without {medians[False]}, with {medians[True]}")


def fingerprint(probe: Probe) -> None:
    """The kernel against its reference, and how fast it is beside a copy."""
    import numpy as np
    from cuda.bindings import nvrtc

    from icecore.host.resident.fingerprint import CELL, KERNEL_SOURCE, reference

    cu, check = probe.driver(), probe.check
    context = check(cu.cuDevicePrimaryCtxRetain(0))
    check(cu.cuCtxSetCurrent(context))
    major = check(
        cu.cuDeviceGetAttribute(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0
        )
    )
    minor = check(
        cu.cuDeviceGetAttribute(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0
        )
    )
    program = check(nvrtc.nvrtcCreateProgram(KERNEL_SOURCE.encode(), b"fingerprint.cu", 0, [], []))
    with timed("nvrtc"):
        result = nvrtc.nvrtcCompileProgram(
            program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]
        )
    if int(result[0]):
        text = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, text)
        raise RuntimeError(text.decode())
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = check(cu.cuModuleLoadData(np.frombuffer(cubin, np.uint8).ctypes.data))
    kernel = check(cu.cuModuleGetFunction(module, b"fingerprint"))
    size = 4 * GIB
    memory, other = int(check(cu.cuMemAlloc(size))), int(check(cu.cuMemAlloc(size)))
    cells = size // CELL
    places = int(check(cu.cuMemAlloc(8 * cells)))
    out = int(check(cu.cuMemAlloc(16 * cells)))
    addresses = np.arange(cells, dtype=np.uint64) * np.uint64(CELL) + np.uint64(memory)
    check(cu.cuMemcpyHtoD(places, addresses.ctypes.data, 8 * cells))
    noise = np.frombuffer(np.random.default_rng(1).bytes(64 * MIB), np.uint8)
    for at in range(0, size, 64 * MIB):
        check(cu.cuMemcpyHtoD(memory + at, noise.ctypes.data, 64 * MIB))
    seed = 0x1234567890ABCDEF

    def launch(some: int) -> None:
        values = (ctypes.c_uint64(places), ctypes.c_uint64(seed), ctypes.c_uint64(out))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        check(cu.cuMemsetD8(out, 0, 16 * some))
        check(cu.cuLaunchKernel(kernel, some, 1, 1, 256, 1, 1, 0, 0, ctypes.addressof(pointers), 0))

    launch(cells)
    found = np.zeros((cells, 2), np.uint64)
    check(cu.cuMemcpyDtoH(found.ctypes.data, out, 16 * cells))
    assert (found == np.tile(reference(noise, seed), (cells // 64, 1))).all(), (
        "kernel and reference differ"
    )
    print("    kernel equals reference on", cells, "cells")

    def rate(call: Callable[[], None], moved: int) -> float:
        call()
        check(cu.cuCtxSynchronize())
        began = time.perf_counter()
        for _ in range(10):
            call()
        check(cu.cuCtxSynchronize())
        return 10 * moved / (time.perf_counter() - began) / 1e9

    hashed = rate(lambda: launch(cells), size)
    copied = rate(lambda: check(cu.cuMemcpyDtoDAsync(other, memory, size, 0)), size)
    print(
        f"    fingerprints {hashed:.0f} GB/s, copies on the device {copied:.0f} GB/s ({2 * copied:.0f} read and written): {hashed / copied:.2f}"
    )
    for address in (memory, other, places, out):
        check(cu.cuMemFree(address))
    check(cu.cuDevicePrimaryCtxRelease(0))


def digest(probe: Probe) -> None:
    """Chunk ids made on the device against those of the host, and how fast."""
    import numpy as np

    from icecore.host.cuda.inventory import read_inventory
    from icecore.host.resident.cuda_memory import Cuda, CudaMemory
    from icecore.host.resident.digest import reference
    from icecore.host.resident.fingerprint import CELL
    from icecore.host.resident.memory import Piece

    memory = CudaMemory(Cuda(), read_inventory().gpus[0].uuid)
    with timed("nvrtc"):
        memory.prepare_digests()
    size = 4 * GIB
    address, descriptor = memory.allocate(size)
    os.close(descriptor)
    noise = np.frombuffer(np.random.default_rng(1).bytes(64 * MIB), np.uint8)
    memory.copy(
        [Piece(address + at, noise.ctypes.data, len(noise)) for at in range(0, size, len(noise))]
    )
    key, cells = bytes(range(32)), address + CELL * np.arange(size // CELL, dtype=np.uint64)
    assert (
        memory.digests(cells, key) == np.tile(reference(noise, key), (size // len(noise), 1))
    ).all(), "digest and reference differ"
    for some in (len(cells), 64):
        began = time.perf_counter()
        for _ in range(10):
            memory.digests(cells[:some], key)
        print(
            f"    digests of {some} cells at once: {10 * some * CELL / (time.perf_counter() - began) / 1e9:.0f} GB/s"
        )
    memory.unmap(address)


def take_down(probe: Probe, pid: int) -> None:
    """Everything before the image."""
    from icecore.host.resident.client import Agent
    from icecore.host.resident.window import take_away

    def lock(seconds: float) -> None:
        with timed(f"lock {seconds:.2f}"):
            probe.lock(pid, seconds)

    with timed("take away"):
        size = take_away(Agent(probe.directory, pid), lock, lambda: probe.unlock(pid), lease=60)
    print(f"    {size / GIB:.2f} GiB unmapped")
    with timed("lock"):
        probe.lock(pid)
    with timed("checkpoint"):
        probe.checkpoint(pid)


def bring_up(probe: Probe, pid: int) -> None:
    """Everything after it."""
    from icecore.host.resident.client import Agent

    agent = Agent(probe.directory, pid)
    with timed("restore"):
        probe.restore(pid)
    with timed("unlock"):
        probe.unlock(pid)
    with timed("map"):
        agent.map()
    with timed("go"):
        agent.go()


def train(
    probe: Probe, name: str, steps: int, resident: bool, pause: float = 0.0
) -> tuple[subprocess.Popen[bytes], Path, Path]:
    """A training process that has begun."""
    log, out = probe.folder / f"{name}.log", probe.folder / f"{name}.out"
    process = probe.start(TRAIN, probe.arguments.gb, steps, out, pause, resident=resident, log=log)
    wait(lambda: "ready" in log.read_text() or process.poll() is not None, 180, log.read_text)
    print("  ", log.read_text().strip()[-300:], flush=True)
    wait(lambda: len(losses(out)) > 5 or process.poll() is not None, 60, log.read_text)
    if process.poll() is not None:
        raise RuntimeError(log.read_text()[-3000:])
    return process, log, out


def compare(probe: Probe, out: Path, steps: int) -> None:
    """With an uninterrupted run without the preload."""
    plain = probe.folder / f"plain-{steps}.out"
    if not plain.exists():
        probe.run(TRAIN, probe.arguments.gb, steps, plain, resident=False)
    expected, found = losses(plain), losses(out)
    assert set(found) == set(expected), (len(found), len(expected))
    wrong = [step for step in expected if expected[step] != found[step]]
    assert not wrong, f"losses differ from step {wrong[0]} on"
    print(f"    {len(found) - 1} losses equal an uninterrupted run's, bit for bit")


def window(probe: Probe) -> None:
    """Three windows in a training process that goes on."""
    steps = probe.arguments.steps
    process, log, out = train(probe, "window", steps, True, 0.1)
    names = [
        Path(f"/proc/{process.pid}/task/{task}/comm").read_text().strip()
        for task in os.listdir(f"/proc/{process.pid}/task")
    ]
    print("    threads:", ", ".join(sorted(set(names))))
    for number in range(3):
        print(f"  window {number}")
        began = time.perf_counter()
        take_down(probe, process.pid)
        bring_up(probe, process.pid)
        print(f"    in all       {time.perf_counter() - began:8.4f} s")
        seen = len(losses(out))
        wait(lambda: len(losses(out)) > seen + 1 or process.poll() is not None, 30, log.read_text)  # noqa: B023
    if process.wait(240):
        raise RuntimeError(log.read_text()[-3000:])
    compare(probe, out, steps)


def share(probe: Probe) -> None:
    """Two processes with one memory, as NCCL's ranks have it: three windows of both, with the
    driver's checkpoint.
    """
    two_with_one_memory(probe, SHARE)


def ipc(probe: Probe) -> None:
    """The same of a PyTorch tensor, shared by the CUDA runtime's legacy IPC."""
    two_with_one_memory(probe, IPC)


def two_with_one_memory(probe: Probe, script: str) -> None:
    """`share` and `ipc`."""
    from icecore.host.resident.client import Agent
    from icecore.host.resident.sharing import find_shares
    from icecore.host.resident.tree import ResidentTree

    second = 1 if probe.check(probe.driver().cuDeviceGetCount()) > 1 else 0
    path, logs, processes = str(probe.folder / f"link-{len(probe.processes)}"), {}, {}
    for role, device in (("taker", second), ("maker", 0)):
        logs[role] = probe.folder / f"share-{role}.log"
        processes[role] = probe.start(
            script, role, path, device, resident=True, log=logs[role], talk=True
        )
        sign = "listening" if role == "taker" else "ready"
        wait(
            lambda sign=sign, role=role: (
                sign in logs[role].read_text() or processes[role].poll() is not None
            ),
            60,
            logs[role].read_text,
        )

    def say(role: str, line: str, sign: str) -> str:
        some = len(logs[role].read_text().splitlines())
        stdin = processes[role].stdin
        assert stdin is not None
        if line:
            stdin.write(line.encode() + b"\n")
            stdin.flush()

        def new() -> list[str]:
            return [
                one
                for one in logs[role].read_text().splitlines()[some if line else 0 :]
                if one.startswith(sign)
            ]

        wait(lambda: new() or processes[role].poll() is not None, 60, logs[role].read_text)
        assert new(), logs[role].read_text()[-2000:]
        return new()[0]

    say("maker", "send", "sent")
    say("taker", "", "ready")
    pids = [processes[role].pid for role in ("maker", "taker")]
    for number in range(3):
        say("maker", f"write {10 + number}", "wrote")
        assert say("taker", "read", "read") == f"read {10 + number}"
        say("taker", f"write {20 + number}", "wrote")
        print(f"  window {number}", flush=True)
        tree = ResidentTree(probe.directory, {pid: pid for pid in pids})
        with tree, timed("in all"):
            tree.take_away(
                lambda who, seconds: [probe.lock(pid, seconds) for pid in who] and None,
                lambda who: [probe.unlock(pid) for pid in who] and None,
            )
            found = find_shares(tree.taken)
            assert [len(found.owned[pid]) for pid in pids] == [1, 0] and len(
                found.imports[pids[1]]
            ) == 1, found
            for call in (probe.lock, probe.checkpoint, probe.restore, probe.unlock):
                for pid in pids:
                    with timed(call.__name__):
                        call(pid)
            tree.give_back()
        assert say("maker", "read", "read") == f"read {20 + number}"
        print(
            "    maker:",
            say("maker", "handles", "handles"),
            "taker:",
            say("taker", "handles", "handles"),
            flush=True,
        )
        say("maker", "send", "sent")
        assert say("taker", "again", "again") == f"again {20 + number}"
    for role in ("maker", "taker"):
        print("   ", role, Agent(probe.directory, processes[role].pid).report().counts)
        say(role, "free", "freed")
        processes[role].kill()
        processes[role].wait(10)


def worker(probe: Probe) -> None:
    """The GPU worker on a training process's memory, in a window: fingerprints, copies, and memory
    that it makes itself.
    """
    import numpy as np

    from icecore.host.gpu.working import HostRegion, Worker
    from icecore.host.resident.client import Agent
    from icecore.host.resident.fingerprint import CELL, reference
    from icecore.host.resident.gpu import NOWHERE, ON_DEVICE
    from icecore.host.resident.window import give_back, take_away

    steps = probe.arguments.steps
    process, log, out = train(probe, "worker", steps, True, 0.1)
    pid = process.pid
    agent = Agent(probe.directory, pid)
    host = HostRegion(1 * GIB)
    with Worker("probe") as made:
        device = agent.allocations()[0].device
        with timed("begin"):
            print("    free:", made.begin([device])[device] >> 20, "MiB")
        with timed("prefault"):
            host.prefault()
        with timed("pin"):
            made.take_host(host, device)
        began = time.perf_counter()
        take_away(
            agent, lambda seconds: probe.lock(pid, seconds), lambda: probe.unlock(pid), lease=60
        )
        try:
            held = probe.keeper.take(agent.report().token)
            sizes = [one.size for one, _ in held]
            handles = made.new_handles(len(held))
            with timed("map"):
                made.map(device, handles, sizes, [fd for _, fd in held])
            for _, fd in held:
                os.close(fd)
            cells = sum(sizes) // CELL
            for again in ("first", "second"):
                at = time.perf_counter()
                words = made.fingerprints(device, handles, 77)
                took = time.perf_counter() - at
                print(
                    f"    fingerprints {again} {took:.4f} s: {cells * CELL / took / 1e9:.0f} GB/s of {cells} cells"
                )
            starts = np.cumsum([0, *sizes]) // CELL
            for share in (0.05, 1.0):
                mask = np.random.default_rng(1).random(cells) < share
                for room in (256 * MIB, host.size - 64 * MIB):
                    at = time.perf_counter()
                    places = made.stage(device, handles, mask, 64 * MIB, room, spare=1 << 62)
                    took = time.perf_counter() - at
                    on, left = int((places >= ON_DEVICE).sum()), int((places == NOWHERE).sum())
                    print(
                        f"    stage {share:4.0%} {took:.4f} s: {on} cells on the device, {len(places) - on - left} on the host, {left} nowhere",
                        flush=True,
                    )
            rows = np.flatnonzero(mask)
            for row in (0, len(rows) // 2, len(rows) - 1):
                number = int(np.searchsorted(starts, rows[row], side="right")) - 1
                own = (handles[number], int(rows[row] - starts[number]) * CELL)
                place = int(places[row])
                copy = (-1, place - ON_DEVICE) if place >= ON_DEVICE else own
                made.finish(made.fetch(device, [own, copy], [0, CELL]))
                data = [ctypes.string_at(host.address + where, CELL) for where in (0, CELL)]
                assert data[0] == data[1], "a copy differs"
                assert (reference(data[0], 77) == words[rows[row]]).all(), "a fingerprint differs"
            for name, wanted in (("fetch", made.fetch), ("place", made.place)):
                at = time.perf_counter()
                for _ in range(16):
                    made.finish(
                        wanted(device, [(handles[0], 0)] * 32, [CELL * n for n in range(32)])
                    )
                print(
                    f"    {name} {16 * 32 * CELL / (time.perf_counter() - at) / 1e9:.1f} GB/s, 32 cells at a time",
                    flush=True,
                )
                if name == "fetch":  # what is placed is what was there
                    made.finish(
                        made.fetch(device, [(handles[0], 0)] * 32, [CELL * n for n in range(32)])
                    )
            made.release(device, handles, spare=True)
        finally:
            give_back(agent)
        print(f"    it stood still for {time.perf_counter() - began:.2f} s")
        with timed("allocate"):
            fresh = made.new_handles(4)
            for fd in made.allocate(device, fresh, [GIB] * 4):
                os.close(fd)
        made.finish(made.fetch(device, [(fresh[3], GIB - CELL)], [0]))
        assert ctypes.string_at(host.address, CELL) == bytes(CELL), "new memory is not zero"
        made.release(device, fresh)
    host.close()
    if process.wait(240):
        raise RuntimeError(log.read_text()[-3000:])
    compare(probe, out, steps)


def stress(probe: Probe) -> None:
    """Threads and streams that check every buffer, and windows all the while; without the driver's
    checkpoint in nine of ten.
    """
    from icecore.host.cuda.api import LockTimeout
    from icecore.host.resident.client import Agent
    from icecore.host.resident.window import give_back, take_away

    log = probe.folder / "stress.log"
    process = probe.start(STRESS, resident=True, log=log, talk=True)
    pid = process.pid
    wait(lambda: "ready" in log.read_text() or process.poll() is not None, 120, log.read_text)
    agent, times = Agent(probe.directory, pid), []
    with timed("lock alone"), contextlib.suppress(LockTimeout):
        probe.lock(pid, 5)
        probe.unlock(pid)
        print("    the driver's lock is had of threads that run")
    for number in range(probe.arguments.windows):
        began = time.perf_counter()
        locks: list[float] = []

        def lock(seconds: float) -> None:
            locks.append(seconds)  # noqa: B023
            probe.lock(pid, seconds)

        take_away(agent, lock, lambda: probe.unlock(pid), seconds=40)
        if len(locks) > 1 or number < 3:
            print(
                f"    window {number}: {time.perf_counter() - began:.3f} s until unmapped, locks {locks}",
                flush=True,
            )
        if number % 10 == 0:
            probe.lock(pid)
            for call in (probe.checkpoint, probe.restore, probe.unlock):
                call(pid)
        give_back(agent)
        times.append(time.perf_counter() - began)
        time.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"it ended in window {number}: {log.read_text()[-2000:]}")
    plain = [took for number, took in enumerate(times) if number % 10]
    print(
        f"    {len(times)} windows; without checkpoint median {1e3 * statistics.median(plain):.1f} ms, longest {1e3 * max(plain):.1f} ms"
    )
    print("   ", agent.report().counts)
    process.communicate(b"\n", timeout=60)
    print(textwrap.indent(log.read_text(), "    "))
    if process.returncode:
        raise RuntimeError("a buffer was wrong")


def driver(probe: Probe) -> None:
    """The same through the driver alone, of a process without the preload."""
    process, _, _ = train(probe, "driver", 100000, False, 0.1)
    began = time.perf_counter()
    for name in ("lock", "checkpoint", "restore", "unlock"):
        with timed(name):
            getattr(probe, name)(process.pid)
    print(f"    in all       {time.perf_counter() - began:8.4f} s")
    process.kill()
    process.wait(10)


def kill(probe: Probe) -> None:
    """Checkpointed, killed, brought back with its memory where it was."""
    criu = find_criu(probe.arguments.criu)
    if criu is None:
        raise RuntimeError("no CRIU: name one with --criu")
    steps = probe.arguments.steps
    process, log, out = train(probe, "kill", steps, True, 0.1)
    pid = process.pid
    probe.pids.append(pid)
    images = probe.directory / "images"
    images.mkdir()
    flags = ["-D", str(images), "-v4", "--ext-unix-sk", "--file-locks", "--network-lock", "skip"]
    take_down(probe, pid)
    with timed("criu dump"):
        code = subprocess.run(
            [criu, "dump", "-t", str(pid), "-o", "dump.log", *flags], timeout=120, check=False
        ).returncode
    if code:
        errors = [
            line
            for line in (images / "dump.log").read_text(errors="replace").splitlines()
            if "Error" in line
        ]
        bring_up(probe, pid)
        raise RuntimeError("criu dump failed, the process runs on:\n" + "\n".join(errors[-10:]))
    process.wait(20)
    size = sum(file.stat().st_size for file in images.iterdir())
    print(f"    killed; images {size / MIB:.0f} MiB; keeper: {probe.keeper.processes()}")
    began = time.perf_counter()
    with timed("criu restore"):
        code = subprocess.run(
            [criu, "restore", "-d", "-o", "restore.log", *flags], timeout=120, check=False
        ).returncode
    if code:
        errors = [
            line
            for line in (images / "restore.log").read_text(errors="replace").splitlines()
            if "Error" in line
        ]
        raise RuntimeError("criu restore failed:\n" + "\n".join(errors[-10:]))
    bring_up(probe, pid)
    print(f"    brought back {time.perf_counter() - began:8.4f} s")
    wait(lambda: "end" in losses(out) or not Path(f"/proc/{pid}").exists(), 240, log.read_text)
    compare(probe, out, steps)


def find_criu(named: str) -> str | None:
    """The newest of the machine."""
    places = [
        named,
        *sorted(
            (str(one) for one in Path("/usr/local/lib/icecore").glob("criu*/sbin/criu")),
            reverse=True,
        ),
    ]
    return next((place for place in places if place and Path(place).exists()), shutil.which("criu"))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--gb", type=float, default=8.0, help="device memory of the training process, GiB"
    )
    parser.add_argument("--steps", type=int, default=80, help="steps of it")
    parser.add_argument("--windows", type=int, default=100, help="windows of the stress part")
    parser.add_argument("--criu", default="", help="path of criu")
    parser.add_argument(
        "--seconds", type=int, default=540, help="after this time everything is ended"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {unknown}")
    parts: dict[str, Callable[[Probe], None]] = {
        "doors": doors, "overhead": overhead, "fingerprint": fingerprint, "digest": digest,
        "window": window, "share": share, "ipc": ipc, "worker": worker, "stress": stress, "driver": driver, "kill": kill,
    }  # fmt: skip
    probe = Probe(arguments, bootstrap())

    def out_of_time(number: int, frame: object) -> None:
        raise TimeoutError(f"{arguments.seconds} s are over")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGTERM, out_of_time)
    signal.alarm(arguments.seconds)
    try:
        for name in arguments.parts or PARTS:
            print(f"== {name}: {parts[name].__doc__}", flush=True)
            began = time.monotonic()
            try:
                parts[name](probe)
                probe.results[name] = "OK"
            except TimeoutError:
                probe.results[name] = "out of time"
                raise
            except Exception as error:  # noqa: BLE001 - the next part is of interest all the same
                traceback.print_exc()
                probe.results[name] = f"FAILED: {error}".splitlines()[0][:200]
            print(
                f"== {name}: {probe.results[name]} ({time.monotonic() - began:.1f} s)\n", flush=True
            )
    except TimeoutError as error:
        print(error)
    finally:
        signal.alarm(0)
        probe.close()
        shutil.rmtree(probe.folder, ignore_errors=True)
    for name, result in probe.results.items():
        print(f"{name:12} {result}")
    return int(any(result != "OK" for result in probe.results.values()))


if __name__ == "__main__":
    sys.exit(main())
