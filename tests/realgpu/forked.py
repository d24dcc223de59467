"""Facts about children that were forked from a CUDA process, on a real GPU: what they inherit, and
what a checkpoint with live children does.

    tools/test-gpu --forked          about half a minute; prints as it goes, a fact a line, and goes
    on after a part that fails

Needs neither PyTorch nor CRIU. It decides nothing: what icecore makes of these facts is in
docs/results/2026-11-24.md ("Forked children of a CUDA process").
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
DEVICE_BYTES, PINNED_BYTES, WORKERS = 2 * GIB, 64 * MIB, 4
_SECONDS = 150
_started = time.monotonic()


def say(what: str, *values: object) -> None:
    print(f"[{time.monotonic() - _started:6.2f}] {what}:", *values, flush=True)


# -- the target: commands on its standard input, answers on its standard output, each a line of JSON


def ok(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) > 1 else None


class Target:
    """A CUDA process, and in the child of one the child."""

    def __init__(self) -> None:
        self.children: list[tuple[int, int, int]] = []  # pid, reading end, writing end
        self.memory = self.pinned = 0

    def start(self) -> list[int]:
        from cuda.bindings import driver as cu

        ok(cu.cuInit(0))
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))))
        self.memory = int(ok(cu.cuMemAlloc(DEVICE_BYTES)))
        ok(cu.cuMemsetD32(self.memory, 7, DEVICE_BYTES // 4))
        self.pinned = int(ok(cu.cuMemHostAlloc(PINNED_BYTES, 0)))
        ctypes.memset(self.pinned, 5, PINNED_BYTES)
        ok(cu.cuCtxSynchronize())
        return [self.memory, self.pinned]

    def init(self) -> int:
        """cuInit alone."""
        from cuda.bindings import driver as cu

        return int(cu.cuInit(0)[0])

    def check(self) -> list[int]:
        """The first and the last word of device memory, and the first byte of pinned memory."""
        from cuda.bindings import driver as cu

        found, piece = [], bytearray(4)
        for at in (self.memory, self.memory + DEVICE_BYTES - 4):
            ok(cu.cuMemcpyDtoH(piece, at, 4))
            found.append(int.from_bytes(piece, "little"))
        return [*found, self.read()]

    def read(self) -> int:
        return ctypes.string_at(self.pinned, 1)[0]

    def write(self, value: int) -> int:
        ctypes.memset(self.pinned, value, PINNED_BYTES)
        return value

    def touch(self) -> dict[str, int]:
        """What CUDA answers: in a child of a CUDA process it cannot work."""
        from cuda.bindings import driver as cu

        return {
            "cuInit": int(cu.cuInit(0)[0]),
            "cuDeviceGetCount": int(cu.cuDeviceGetCount()[0]),
            "cuMemAlloc": int(cu.cuMemAlloc(4096)[0]),
        }

    def nvml(self) -> str:
        """Initialise NVML and keep it."""
        import pynvml

        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return self.nvml_call()

    def nvml_call(self) -> str:
        import pynvml

        try:
            return f"{pynvml.nvmlDeviceGetMemoryInfo(self.handle).total} bytes, {pynvml.nvmlDeviceGetTemperature(self.handle, 0)} degrees"
        except pynvml.NVMLError as error:
            return f"{type(error).__name__}: {error}"

    def nvml_again(self) -> str:
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return self.nvml_call()

    def replace(self, how: str) -> list[int]:
        """Replace each descriptor of a device file by one of /dev/null, or of the same file opened
        anew, and each mapping by one of /dev/zero.
        """
        numbers = [
            number for number, path in descriptors(os.getpid()) if path.startswith("/dev/nvidia")
        ]
        for number in numbers:
            path = "/dev/null" if how == "null" else os.readlink(f"/proc/self/fd/{number}")
            made = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(made, number, inheritable=False)
            os.close(made)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        zero, done = os.open("/dev/zero", os.O_RDWR), 0
        for start, end, path, _, _ in mappings(os.getpid()):
            if path.startswith("/dev/nvidia"):
                assert (
                    libc.mmap(start, end - start, 3, 0x11, zero, 0) == start
                )  # MAP_SHARED | MAP_FIXED
                done += 1
        os.close(zero)
        return [len(numbers), done]

    def leave(self) -> None:
        """End as a program does, with all its exit handlers."""
        sys.exit(0)

    # -- its children

    def fork(self, count: int) -> list[int]:
        for _ in range(count):
            ours, theirs = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                self.children = []
                serve(self, os.fdopen(ours[0]), os.fdopen(theirs[1], "w"))
                sys.exit(0)
            os.close(ours[0])
            os.close(theirs[1])
            self.children.append((pid, theirs[0], ours[1]))
        return [pid for pid, _, _ in self.children]

    def child(self, number: int, *words: Any) -> Any:
        """Have a child do something; for `leave`: its exit status."""
        pid, reading, writing = self.children[number]
        os.write(writing, (json.dumps(words) + "\n").encode())
        if words == ("leave",):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(os.dup(reading)) as stream:
            return json.loads(stream.readline())


def serve(target: Target, reading: Any, writing: Any) -> None:
    for line in reading:
        name, *words = json.loads(line)
        try:
            answer = getattr(target, name)(*words)
        except Exception as error:  # noqa: BLE001 - told
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=writing, flush=True)


# -- looking at it


def descriptors(pid: int) -> list[tuple[int, str]]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.append((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return sorted(found)


def mappings(pid: int) -> list[tuple[int, int, str, str, str]]:
    """Start, end, path, permissions, VmFlags."""
    found: list[tuple[int, int, str, str, str]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(None, 5)
        if "-" in words[0] and ":" not in words[0]:
            start, end = (int(one, 16) for one in words[0].split("-"))
            found.append((start, end, words[5] if len(words) > 5 else "", words[1], ""))
        elif words[0] == "VmFlags:" and found:
            found[-1] = (*found[-1][:4], " ".join(line.split()[1:]))
    return found


def look(pid: int, about: str, pinned: int = 0) -> None:
    files = Counter(path for _, path in descriptors(pid) if path.startswith("/dev/nvidia"))
    others = Counter(
        path.split(":")[0] + path.partition(":[")[2][:0]
        for _, path in descriptors(pid)
        if not path.startswith("/dev/nvidia")
    )
    say(f"{about}: descriptors of device files", sum(files.values()), dict(files))
    say(
        f"{about}: other descriptors",
        dict(others),
        {path for _, path in descriptors(pid) if path.startswith("anon_inode")},
    )
    every = mappings(pid)
    device = [
        (f"{e - s >> 10} KiB", path, perms, flags)
        for s, e, path, perms, flags in every
        if path.startswith("/dev/nvidia")
    ]
    say(f"{about}: mappings of device files", len(device), dict(Counter(device)))
    shared = [
        (f"{e - s >> 10} KiB", path, perms)
        for s, e, path, perms, _ in every
        if path.startswith(("/dev/zero", "/dev/shm"))
    ]
    say(f"{about}: shared memory", dict(Counter(shared)))
    say(f"{about}: threads", threads(pid))
    if pinned:
        say(
            f"{about}: at the pinned memory",
            [
                (hex(s), e - s, path, perms, flags)
                for s, e, path, perms, flags in every
                if s <= pinned < e
            ],
        )


def threads(pid: int) -> dict[str, int]:
    return dict(
        Counter(
            Path(f"/proc/{pid}/task/{one}/comm").read_text().strip()
            for one in os.listdir(f"/proc/{pid}/task")
        )
    )


class Running:
    """A target from outside."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.realgpu.forked", "target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def do(self, *words: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or '"it has ended"')

    def end(self) -> None:
        """It and its children, which lead no sessions of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running() -> Iterator[Running]:
    made = Running()
    try:
        yield made
    finally:
        made.end()


def used() -> str:
    from icecore.host.cuda.inventory import read_inventory

    return f"{read_inventory().gpus[0].used / MIB:.0f} MiB used on the GPU"


def timed(what: str, call: Callable[[], object]) -> bool:
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told
        say(what, "FAILED", error)
        return False
    say(what, f"{time.monotonic() - began:.2f} s, {used()}")
    return True


def cycle(driver: Any, one: Running, about: str, pinned: int, children: list[int]) -> bool:
    """Checkpoint and restore in place; whether it runs again."""
    if not timed(f"{about}: lock", lambda: driver.lock(one.pid, 10.0)):
        return False
    done = timed(
        f"{about}: checkpoint with {len(children)} children", lambda: driver.checkpoint(one.pid)
    )
    if done:
        look(one.pid, f"{about}: checkpointed parent", pinned)
        if children:
            look(children[0], f"{about}: child of the checkpointed parent", pinned)
            say(f"{about}: states of children", [driver.state(pid).value for pid in children])
        done = timed(f"{about}: restore in place", lambda: driver.restore(one.pid, {}))
    say(f"{about}: state", driver.state(one.pid).value)
    done = timed(f"{about}: unlock", lambda: driver.unlock(one.pid)) and done
    if done:
        say(f"{about}: device memory (7 7) and pinned memory", one.do("check"))
    return done


def with_children(driver: Any) -> None:
    say("before", used())
    with running() as one:
        _, pinned = one.do("start")
        say("a CUDA process with 2 GiB", used())
        look(one.pid, "parent", pinned)
        children = one.do("fork", WORKERS)
        say(
            "state of the parent, and of each child",
            driver.state(one.pid).value,
            [driver.state(pid).value for pid in children],
        )
        look(children[0], "child", pinned)
        say("pinned memory in a child (5)", one.do("child", 0, "read"))
        one.do("write", 6)
        say("pinned memory in a child after the parent has written 6", one.do("child", 0, "read"))
        if not cycle(driver, one, "1st", pinned, children):
            return
        one.do("write", 8)
        say(
            "pinned memory in a child after a restore in place, and the parent has written 8",
            one.do("child", 0, "read"),
        )
        late = one.do("fork", 2)[WORKERS:]
        cycle(driver, one, "2nd, with two more", pinned, [*children, *late])
        say(
            "a child that touches CUDA",
            one.do("child", 1, "touch"),
            driver.state(children[1]).value,
            threads(children[1]),
        )
        say("a child's end with exit handlers", one.do("child", 1, "leave"))
        say(
            "what a child replaces: descriptors, mappings",
            [one.do("child", n, "replace", "null") for n in (0, 2, 3, 4, 5)],
        )
        say("a child that touches CUDA once they are replaced", one.do("child", 0, "touch"))
        say("its end with exit handlers", one.do("child", 0, "leave"))
        cycle(driver, one, "3rd, all replaced", pinned, [children[2], children[3], *late])
    time.sleep(0.5)
    say("after all have ended", used())


def others(driver: Any) -> None:
    with running() as one:
        say(
            "cuInit alone",
            one.do("init"),
            driver.state(one.pid).value,
            threads(one.pid),
            Counter(p for _, p in descriptors(one.pid) if "nvidia" in p),
        )
    with running() as one:
        child = one.do("fork", 1)[0]
        say(
            "a child that calls cuInit before its parent",
            one.do("child", 0, "init"),
            driver.state(child).value,
            threads(child),
        )
        say(
            "and has a context and memory",
            one.do("child", 0, "start"),
            driver.state(child).value,
            threads(child),
        )
        say("its parent", driver.state(one.pid).value)


def nvml(driver: Any) -> None:
    with running() as one:
        say(
            "NVML alone",
            one.do("nvml"),
            driver.state(one.pid).value,
            threads(one.pid),
            descriptors(one.pid),
        )
        child = one.do("fork", 1)[0]
        say("NVML in a child of it", one.do("child", 0, "nvml_call"), driver.state(child).value)
        say(
            "replaced by /dev/null",
            one.do("child", 0, "replace", "null"),
            one.do("child", 0, "nvml_call"),
        )
        say("and NVML initialised again", one.do("child", 0, "nvml_again"))
        say("replaced by the same opened anew", one.do("replace", "same"), one.do("nvml_call"))
        say("and NVML initialised again", one.do("nvml_again"))
    with running() as one:
        _, pinned = one.do("start")
        before = {number for number, path in descriptors(one.pid) if "nvidia" in path}
        say(
            "NVML beside CUDA",
            one.do("nvml"),
            "opens",
            [(n, p) for n, p in descriptors(one.pid) if "nvidia" in p and n not in before],
        )
        cycle(driver, one, "NVML beside CUDA", pinned, [])
        say("NVML after that", one.do("nvml_call"))


def main() -> int:
    """Command line."""
    if sys.argv[1:] == ["target"]:
        serve(Target(), sys.stdin, sys.stdout)
        return 0
    from icecore.host.cuda.driver import Driver
    from icecore.host.cuda.inventory import read_inventory
    from icecore.host.gpu.backend import find_backend

    signal.signal(signal.SIGALRM, lambda *_: sys.exit("this takes too long"))
    signal.alarm(_SECONDS)
    say("driver", read_inventory().driver, "device files' kinds", find_backend().kinds())
    nodes = {
        str(path): (os.major(path.stat().st_rdev), stat.filemode(path.stat().st_mode))
        for path in Path("/dev").glob("nvidia*")
        if not path.is_dir()
    }
    say("nodes", nodes)
    driver = Driver()
    failed = 0
    for part in (with_children, others, nvml):
        try:
            part(driver)
        except Exception:  # noqa: BLE001 - the next part tells something, too
            failed += 1
            traceback.print_exc()
    say("done", f"{failed} parts failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
