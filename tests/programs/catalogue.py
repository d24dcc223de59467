"""The test programs: what each is, how it is built and started, what CRIU needs for it; nothing
here knows of icecore.

A program runs until ``finish`` appears in its state directory, verifies everything, writes its
verdict into ``state.json`` and exits with 0 or 1. A restored program is watched in the same way;
only its exit status may be out of reach.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tests.programs import redis_load

HERE = Path(__file__).resolve().parent
POLL_S = 0.01


@dataclass(frozen=True)
class Program:
    """One test program.

    Args:
        what: What it does, in one sentence.
        source: Its file in this folder; empty for redis-server alone.
        arguments: What follows the state directory, in the size that round trips are to be tested
            with; ``{port}`` stands for a free TCP port.
        quick: The same, small enough for a test of seconds.
        environment: Variables that it needs.
        needs: Programs that must be on the machine.
        damage: Regions (by the beginning of their name) in which one changed byte must be noticed.
        ready_s, finish_s: How long at most, in seconds, until its first progress and until its
            verdict.
        exit_status: What it exits with when nothing was violated.
        clients: Whether it has TCP clients, and where.
        criu_options: What ``criu dump`` needs beyond ``--tree`` and ``--images-dir``. Measured with
            CRIU 4.1.1 and 4.2.1 on Linux 6.18, the process a session leader without a terminal, in
            the host's namespaces and in pid and ipc namespaces of its own, with and without
            ``--lazy-pages``.
        restore_options: What ``criu restore`` needs beyond ``--images-dir``.
        criu_notes: What was seen without an option, and what plain CRIU leaves to its caller.
        least_criu: The oldest CRIU that can do it on Linux 6.16 and newer.
        own_ipc: It can only be dumped in an ipc namespace of its own.
        dumpable: False where CRIU fails to dump it: it must then go on as if nothing had been
            tried.
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
    least_criu: tuple[int, int] = (4, 0)
    own_ipc: bool = False
    dumpable: bool = True


@dataclass(frozen=True)
class Command:
    """An argument vector and the complete environment to run it with."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


TREE_OPTIONS = ("--ghost-limit", "64M", "--link-remap", "--file-locks")
TREE_NOTES = (
    'Without --ghost-limit: "Can\'t dump ghost file … of 2097152 size, increase limit". Without --link-remap: "Can\'t create '
    'link remap … Use link-remap option". Without --file-locks at dump: "Some file locks are hold by dumping tasks!"; '
    "without it at restore the locks are silently lost. --ext-unix-sk is not needed. If the tree runs on after the dump, "
    'restore fails ("File … shared-description has bad size") unless its files are put back.'
)
TCP_OPTIONS = ("--tcp-established", "--network-lock", "skip")
TCP_NOTES = (
    'CRIU 4.1 cannot dump any inet socket on Linux 6.16 or newer ("Can\'t get 1:16 opt: Operation not supported"). Without '
    '--network-lock skip CRIU runs iptables; where there is none: "Failed to lock TCP connection". '
)

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
                criu_options=TREE_OPTIONS,
                restore_options=("--file-locks",),
                criu_notes=TREE_NOTES,
            ),
            Program(
                name="tree-system-v",
                what="The same tree with System V shared memory, a semaphore and a message queue.",
                source="tree.py",
                arguments=("--system-v", "1"),
                quick=("--system-v", "1"),
                own_ipc=True,
                criu_options=TREE_OPTIONS,
                restore_options=("--file-locks",),
                criu_notes="In the host's ipc namespace: \"Task … with SysVIPC shmem map … doesn't live in IPC ns\".",
            ),
            Program(
                name="tree-credentials",
                what="The same tree with a message in a queue that carries its sender's credentials.",
                source="tree.py",
                arguments=("--credentials", "1"),
                quick=("--credentials", "1"),
                criu_options=TREE_OPTIONS,
                restore_options=("--file-locks",),
                criu_notes='The dump fails with "Control messages in queue, not supported" and thaws the tree.',
                dumpable=False,
            ),
            Program(
                name="redis",
                what="redis-server and clients that load it, in one tree, over established loopback connections.",
                source="redis_load.py",
                arguments=("--port", "{port}", "--clients", "3", "--keys", "5000"),
                quick=("--port", "{port}", "--keys", "500"),
                needs=("redis-server",),
                clients="in the tree",
                criu_options=TCP_OPTIONS,
                restore_options=("--tcp-established",),
                criu_notes=TCP_NOTES,
                least_criu=(4, 2),
            ),
            Program(
                name="redis-append-only",
                what="The same with an append-only file that grows all the time.",
                source="redis_load.py",
                arguments=(
                    "--port",
                    "{port}",
                    "--clients",
                    "3",
                    "--keys",
                    "5000",
                    "--append-only",
                    "1",
                ),
                quick=("--port", "{port}", "--keys", "500", "--append-only", "1"),
                needs=("redis-server",),
                clients="in the tree",
                criu_options=TCP_OPTIONS,
                restore_options=("--tcp-established",),
                criu_notes=TCP_NOTES
                + "CRIU does not compare the size of a file that is open O_WRONLY | O_APPEND: if the tree ran on after the "
                "dump, the file keeps what was appended since, and only reading it again shows that.",
                least_criu=(4, 2),
            ),
            Program(
                name="redis-alone",
                what="redis-server alone; its clients are outside and lose their connections.",
                source="",
                needs=("redis-server",),
                clients="outside",
                criu_options=TCP_OPTIONS,
                restore_options=("--tcp-close",),
                criu_notes=TCP_NOTES
                + "The policy may be chosen at restore: dumped with --tcp-established, restored with "
                "--tcp-close, clients see a reset; restored with --tcp-established at once, they do not even notice. Dumped "
                "with --tcp-close it needs no network lock, but then restore takes only --tcp-close.",
                least_criu=(4, 2),
            ),
            Program(
                name="logger",
                what="A job that appends to a log and rewrites a file in place.",
                source="logger.py",
                arguments=("--ledger-mib", "4"),
                quick=("--ledger-mib", "0.25"),
                criu_notes='If it runs on after the dump, restore fails ("File … job.log has bad size") unless its files '
                "are put back.",
            ),
            Program(
                name="node",
                what="A Node.js process: timers, buffers, a churning heap, a worker thread sharing memory.",
                source="node_app.js",
                arguments=("32",),
                quick=("4",),
                criu_notes="With io_uring its ring could not be dumped: UV_USE_IO_URING=0.",
                environment=MappingProxyType({"UV_USE_IO_URING": "0"}),
                needs=("node",),
            ),
            Program(
                name="many-vmas",
                what="20 000 VMAs of alternating protections, with data behind PROT_NONE.",
                source="many_vmas.c",
                quick=("--vmas", "5000"),
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
                name="guarded",
                what="Memory with guard pages in it.",
                source="guarded.c",
                quick=("--mib", "9"),
                needs=("cc",),
                damage=("data",),
                criu_notes="CRIU before 4.2 fails to read guard pages.",
                least_criu=(4, 2),
            ),
            Program(
                name="mutator",
                what="Forks, moves, grows, unmaps and discards memory as fast as it can once the file ``go`` is there.",
                source="mutator.c",
                arguments=("--mib", "500"),
                quick=("--mib", "64"),
                needs=("cc",),
                damage=("data",),
                criu_notes='Restored by CRIU\'s own lazy-pages daemon and let go at once, it ends with "mremap: Bad address": '
                "that daemon unregisters a range from userfaultfd on MADV_DONTNEED, which splits the VMA.",
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
                criu_notes="CRIU restores into a time namespace in which CLOCK_MONOTONIC goes on from the dump: only "
                "CLOCK_REALTIME can be compared with the outside.",
            ),
        )
    }
)

# What the benchmarks run: the sizes of the inference-like and training-like jobs, in MiB of private
# memory.
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
    """What is to be executed or interpreted. C sources are compiled into ``cache``, once for each
    content.

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
            ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", partial, source],
            check=True,
            capture_output=True,
            timeout=60,
        )
        partial.replace(binary)
    return binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(
    program: Program, state_dir: Path, cache: Path, arguments: Sequence[str] | None = None
) -> Command:
    """The command that runs the program; also writes ``port`` into the state directory where it has
    one.

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
        argv = (
            redis_load.server_command(port_of(state_dir), str(state_dir), append_only=False) + given
        )
        return Command(tuple(argv), MappingProxyType(environment))
    file = build(program, cache)
    interpreter = {".py": [sys.executable], ".js": ["node"]}.get(file.suffix, [])
    if program.source.endswith(".c"):
        interpreter = []
    argv = [*interpreter, str(file), str(state_dir), *given]
    return Command(tuple(argv), MappingProxyType(environment))


def port_of(state_dir: Path) -> int:
    return int((state_dir / "port").read_text())
