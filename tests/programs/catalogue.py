"""The test programs: how each is built, started, watched, asked for its verdict and damaged; it knows nothing of icecore.

A program runs until ``finish`` appears in its state directory, verifies everything, writes its verdict into ``state.json``
and exits with 0 or 1. A restored program is watched in the same way; only its exit status may be out of reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tests.programs import redis_client, redis_load, report

HERE = Path(__file__).resolve().parent
POLL_S = 0.01


@dataclass(frozen=True)
class Program:
    """One test program.

    Args:
        what: What it does, in one sentence.
        source: Its file in this folder; empty for redis-server alone.
        arguments: What follows the state directory, in the size that round trips are to be tested with; ``{port}``
            stands for a free TCP port.
        quick: The same, small enough for a test of seconds.
        environment: Variables that it needs.
        needs: Programs that must be on the machine.
        damage: Regions (by the beginning of their name) in which one changed byte must be noticed.
        ready_s, finish_s: How long at most, in seconds, until its first progress and until its verdict.
        exit_status: What it exits with when nothing was violated.
        open_connections: What it does to TCP connections beyond its tree: ``none``, or ``clients outside``.
        criu_options: What plain CRIU needs, beyond ``-t PID -D DIR --shell-job``-less defaults, to dump it, kill it and
            restore it on a host without netfilter; measured with CRIU 4.1.1 (``criu_notes`` says what happens without).
        restore_options: The same for ``criu restore``.
        own_ipc: It can only be dumped in an ipc namespace of its own.
    """

    name: str
    what: str
    source: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    needs: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    ready_s: float = 20.0
    finish_s: float = 60.0
    exit_status: int = 0
    clients: Literal["none", "in the tree", "outside"] = "none"
    criu_options: tuple[str, ...] = ()
    restore_options: tuple[str, ...] = ()
    criu_notes: str = ""
    own_ipc: bool = False


@dataclass(frozen=True)
class Command:
    """An argument vector and the complete environment to run it with."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Progress:
    """What a program last wrote about itself."""

    counter: int
    writes: int
    errors: tuple[str, ...]
    finished: bool
    passed: bool | None
    regions: tuple[tuple[str, int, int], ...]  # name, address, bytes
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Running:
    """A program that was started here: ``process`` is its first process, the leader of its own session."""

    program: Program
    state_dir: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


class ProgramError(Exception):
    """A program did not do what was asked of it in time; the message ends with what it last said."""


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        program.name: program
        for program in (
            Program(
                name="training",
                what="A multi-threaded numpy training loop that can be replayed bit by bit.",
                source="training.py",
                arguments=("--threads", "3", "--mib", "96"),
                quick=("--threads", "2", "--mib", "12"),
                damage=("0.weight0", "0.moment2", "1.weight1"),
            ),
            Program(
                name="tree",
                what="A process tree that holds one of nearly every kernel object.",
                source="tree.py",
                damage=("blackboard",),
            ),
            Program(
                name="tree-system-v",
                what="The same tree with System V shared memory, a semaphore and a message queue.",
                source="tree.py",
                arguments=("--system-v", "1"),
                quick=("--system-v", "1"),
                own_ipc=True,
            ),
            Program(
                name="redis",
                what="redis-server and clients that load it, in one tree, over established loopback connections.",
                source="redis_load.py",
                arguments=("--port", "{port}", "--clients", "3", "--keys", "5000"),
                quick=("--port", "{port}", "--keys", "500"),
                needs=("redis-server",),
                clients="in the tree",
            ),
            Program(
                name="redis-append-only",
                what="The same with an append-only file that grows all the time.",
                source="redis_load.py",
                arguments=("--port", "{port}", "--clients", "3", "--keys", "5000", "--append-only", "1"),
                quick=("--port", "{port}", "--keys", "500", "--append-only", "1"),
                needs=("redis-server",),
                clients="in the tree",
            ),
            Program(
                name="redis-alone",
                what="redis-server alone; its clients are outside and lose their connections.",
                source="",
                needs=("redis-server",),
                clients="outside",
            ),
            Program(
                name="logger",
                what="A job that appends to a log and rewrites a file in place.",
                source="logger.py",
                arguments=("--ledger-mib", "4"),
                quick=("--ledger-mib", "0.25"),
            ),
            Program(
                name="node",
                what="A Node.js process: timers, buffers, a churning heap, a worker thread sharing memory.",
                source="node_app.js",
                arguments=("32",),
                quick=("4",),
                environment=MappingProxyType({"UV_USE_IO_URING": "0"}),
                needs=("node",),
            ),
            Program(
                name="many-vmas",
                what="20 000 VMAs of alternating protections, with data behind PROT_NONE.",
                source="many_vmas.c",
                needs=("cc",),
                damage=("read-write", "read-only", "inaccessible"),
            ),
            Program(
                name="sparse",
                what="8 GB of address space, touched irregularly.",
                source="sparse.c",
                quick=("--mib", "512"),
                needs=("cc",),
                damage=("touched", "untouched"),
            ),
            Program(
                name="mutator",
                what="Forks, moves, grows, unmaps and discards memory as fast as it can once the file ``go`` is there.",
                source="mutator.c",
                arguments=("--mib", "500"),
                quick=("--mib", "64"),
                needs=("cc",),
                damage=("data",),
            ),
            Program(
                name="inference",
                what="An inference-like job: static weights, a cache rewritten block by block, a churning heap.",
                source="inference.py",
                arguments=("--mib", "256"),
                quick=("--mib", "32"),
                damage=("weight0.0", "weight1.3", "cache"),
                ready_s=60.0,
            ),
            Program(
                name="memory-pattern",
                what="Private memory whose pages change only on request; the input of measurements.",
                source="memory_pattern.c",
                arguments=("--mib", "256"),
                quick=("--mib", "32"),
                needs=("cc",),
                damage=("data",),
                ready_s=60.0,
            ),
        )
    }
)

# What the benchmarks run: the sizes of the inference-like and training-like jobs, in MiB of private memory.
BENCHMARK_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inference": ("--mib", "1300"),
        "training": ("--threads", "2", "--mib", "2100"),
        "memory-pattern": ("--mib", "4096"),
    }
)


def missing(program: Program) -> list[str]:
    """The programs that it needs and the machine lacks."""
    return [name for name in program.needs if shutil.which(name) is None]


def build(program: Program, cache: Path) -> Path:
    """What is to be executed or interpreted. C sources are compiled into ``cache``, once for each content.

    Raises:
        subprocess.CalledProcessError: The compiler refused it.
    """
    source = HERE / program.source
    if source.suffix != ".c":
        return source
    content = source.read_bytes() + (HERE / "report.h").read_bytes()
    binary = cache / f"{source.stem}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{binary.name}.{os.getpid()}"
        subprocess.run(
            ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", partial, source], check=True, capture_output=True, timeout=60
        )
        partial.replace(binary)
    return binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(program: Program, state_dir: Path, cache: Path, arguments: Sequence[str] | None = None) -> Command:
    """The command that runs the program; also writes ``port`` into the state directory where it has one.

    Args:
        state_dir: An existing directory, not used before.
        cache: Where binaries are kept.
        arguments: Instead of ``program.arguments``.
    """
    given = list(program.arguments if arguments is None else arguments)
    if program.clients != "none":
        port = free_port()
        (state_dir / "port").write_text(str(port))
        given = [word.replace("{port}", str(port)) for word in given]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LANG": "C.UTF-8",
        "HOME": str(state_dir),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **program.environment,
    }
    if not program.source:
        argv = redis_load.server_command(port_of(state_dir), str(state_dir), append_only=False) + given
        return Command(tuple(argv), MappingProxyType(environment))
    file = build(program, cache)
    interpreter = {".py": [sys.executable], ".js": ["node"]}.get(file.suffix, [])
    if program.source.endswith(".c"):
        interpreter = []
    argv = [*interpreter, str(file), str(state_dir), *given]
    return Command(tuple(argv), MappingProxyType(environment))


def start(program: Program, state_dir: Path, cache: Path, arguments: Sequence[str] | None = None) -> Running:
    """Starts it as a session leader, without a terminal, its output in ``state_dir/output.log``."""
    run = command(program, state_dir, cache, arguments)
    with open(state_dir / "output.log", "ab") as output:
        process = subprocess.Popen(
            run.argv,
            env=dict(run.environment),
            cwd=state_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Running(program, state_dir, process)


def port_of(state_dir: Path) -> int:
    return int((state_dir / "port").read_text())


def progress(state_dir: Path) -> Progress | None:
    """What the program last wrote, or None before its first write."""
    try:
        state = json.loads((state_dir / report.STATE).read_text())
    except FileNotFoundError:
        return None
    regions = tuple((region["name"], region["address"], region["bytes"]) for region in state["regions"])
    return Progress(
        state["counter"],
        state["writes"],
        tuple(state["errors"]),
        state["finished"],
        state["passed"],
        regions,
        MappingProxyType(state["facts"]),
    )


def wait_until(state_dir: Path, holds: Callable[[Progress], bool], timeout_s: float, what: str) -> Progress:
    """Waits until the program's own words fulfil a condition.

    Raises:
        ProgramError: They did not within ``timeout_s`` seconds.
    """
    until = time.monotonic() + timeout_s
    while True:
        now = progress(state_dir)
        if now is not None and holds(now):
            return now
        if time.monotonic() > until:
            raise ProgramError(f"not {what} within {timeout_s} s; {last_words(state_dir)}")
        time.sleep(POLL_S)


def last_words(state_dir: Path) -> str:
    """The last progress and the end of the output, for messages."""
    log = state_dir / "output.log"
    output = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    now = progress(state_dir)
    said = "no progress" if now is None else f"counter {now.counter}, errors {list(now.errors)}, facts {dict(now.facts)}"
    return f"{said}, output: {output!r}"


def wait_ready(program: Program, state_dir: Path) -> None:
    """Returns once it makes progress; redis-server alone, once it answers.

    Raises:
        ProgramError, OSError: It did not in time.
    """
    if not program.source:
        redis_load.connect(port_of(state_dir), timeout_s=10).close()
        return
    wait_until(state_dir, lambda now: now.counter > 0, program.ready_s, "ready")


def wait_progress(state_dir: Path, timeout_s: float = 20.0, *, steps: int = 2) -> Progress:
    """Waits until it has written its state ``steps`` times more than now: it lives, wherever its counter stands."""
    before = progress(state_dir)
    start_writes = -1 if before is None else before.writes
    return wait_until(state_dir, lambda now: abs(now.writes - start_writes) >= steps, timeout_s, "making progress")


def forget(state_dir: Path) -> Progress | None:
    """Removes the state file and returns what it said; what comes next was written by the restored program."""
    before = progress(state_dir)
    for name in (report.STATE, report.FINISH):
        (state_dir / name).unlink(missing_ok=True)
    return before


def ask_finish(program: Program, state_dir: Path) -> None:
    """Asks for the final verification; redis-server alone is told to shut down without saving."""
    if program.source:
        (state_dir / report.FINISH).touch()
        return
    connection = redis_load.connect(port_of(state_dir), timeout_s=10)
    with contextlib.suppress(redis_client.RedisError, ConnectionError):  # it answers by hanging up
        connection.call("SHUTDOWN", "NOSAVE")
    connection.close()


def wait_finished(program: Program, state_dir: Path, timeout_s: float | None = None) -> Progress:
    """Waits for the verdict of a self-checking program, which is in the result's ``passed`` and ``errors``."""
    return wait_until(state_dir, lambda now: now.finished, timeout_s or program.finish_s, "finished")


def go(state_dir: Path) -> None:
    """Lets the mutator begin; it sees this within a millisecond, or as soon as it runs again."""
    (state_dir / "go").touch()


def change(state_dir: Path, number: int, cells_percent: int, pages_percent: int, timeout_s: float = 60.0) -> int:
    """Makes memory-pattern rewrite part of its pages and returns how many.

    Args:
        number: Of the request; each is a different choice of pages.
        cells_percent: How many of the 1 MiB cells change.
        pages_percent: How many of the pages of such a cell change.
    """
    (state_dir / ".change.new").write_text(f"{number} {cells_percent} {pages_percent}\n")
    (state_dir / ".change.new").replace(state_dir / "change")
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            answer = json.loads((state_dir / "changed").read_text())
            if answer["id"] == number:
                return int(answer["pages"])
        time.sleep(0.001)
    raise ProgramError(f"request {number} was not answered within {timeout_s} s; {last_words(state_dir)}")


def damage(pid: int, now: Progress, region: str) -> int:
    """Flips one bit in the middle of a region, through /proc/PID/mem, and returns the address."""
    name, address, size = next(found for found in now.regions if found[0].startswith(region))
    at = address + size // 2 + (1 if size > 4096 else 100)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(at)
        byte = memory.read(1)[0]
        memory.seek(at)
        memory.write(bytes([byte ^ 0x40]))
    return at


def tree_of(pid: int) -> list[int]:
    """The process and all that descend from it, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                found += [int(child) for child in children if int(child) not in found]
    return found


def kill_tree(pid: int, timeout_s: float = 10.0) -> None:
    """Kills a tree, also a restored one, and returns when nothing of it runs; what may remain is a zombie of another's.

    The tree is stopped from the root on first, so that nothing in it can fork or notice.
    """
    stopped: list[int] = []
    while fresh := [one for one in tree_of(pid) if one not in stopped]:
        for one in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        stopped += fresh
    for one in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    until = time.monotonic() + timeout_s
    for one in stopped:
        while alive(one):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one, os.WNOHANG)
            if time.monotonic() > until:
                raise ProgramError(f"process {one} of the tree of {pid} does not die")
            time.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] not in "ZX"


def clean(state_dir: Path) -> None:
    """Removes what a killed program left outside its state directory (a POSIX shared memory file)."""
    last = progress(state_dir)
    for name in last.facts.get("shm", ()) if last is not None else ():
        Path("/dev/shm", name).unlink(missing_ok=True)


def stop(running: Running) -> None:
    """Ends a program that was started here, whatever state it is in, and cleans up after it."""
    kill_tree(running.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(timeout=10)
    clean(running.state_dir)
