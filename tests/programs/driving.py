"""Driving a test program from outside: start it, watch it, ask for its verdict, damage it, end it.

Everything goes through files in the state directory and /proc, so that a restored program is driven
like a started one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.programs import redis_client, redis_load, report
from tests.programs.catalogue import Program, command, port_of

POLL_S = 0.01
SET_ASIDE = "state.before.json"


@dataclass(frozen=True)
class Progress:
    """What a program last wrote about itself."""

    counter: int
    writes: int
    errors: tuple[str, ...]
    finished: bool
    passed: bool | None
    regions: tuple[
        tuple[str, int, int, int], ...
    ]  # name, address, bytes, pid as the program counts it
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Running:
    """A program that was started here.

    Args:
        process: What was started: its first process, or the unshare(1) that waits for it.
        pid: Its first process, which leads a session of its own.
    """

    program: Program
    state_dir: Path
    process: subprocess.Popen[bytes]
    pid: int


class ProgramError(Exception):
    """A program did not do what was asked of it in time; the message ends with what it last said."""


def start(
    program: Program,
    state_dir: Path,
    cache: Path,
    arguments: Sequence[str] | None = None,
    *,
    own_namespaces: bool = False,
) -> Running:
    """Starts it as a session leader, without a terminal, its output in ``state_dir/output.log``.

    Args:
        state_dir: An existing directory, not used before.
        cache: Where binaries are kept.
        arguments: Instead of ``program.arguments``.
        own_namespaces: In a pid and an ipc namespace of its own, as the first process there, over
            the host's /proc.
    """
    run = command(program, state_dir, cache, arguments)
    argv = list(run.argv)
    if own_namespaces:
        argv = ["unshare", "--pid", "--ipc", "--fork", "setsid", *argv]
    with open(state_dir / "output.log", "ab") as output:
        process = subprocess.Popen(
            argv,
            env=dict(run.environment),
            cwd=state_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    pid = process.pid
    until = time.monotonic() + 10
    while own_namespaces and pid == process.pid:
        pid = [*tree_of(process.pid), process.pid][1]
        if time.monotonic() > until:
            process.kill()
            raise ProgramError(f"unshare(1) started nothing; {last_words(state_dir)}")
        time.sleep(0.001)
    return Running(program, state_dir, process, pid)


def progress(state_dir: Path, name: str = report.STATE) -> Progress | None:
    """What the program last wrote, or None before its first write."""
    try:
        state = json.loads((state_dir / name).read_text())
    except FileNotFoundError:
        return None
    regions = tuple(
        (region["name"], region["address"], region["bytes"], region["pid"])
        for region in state["regions"]
    )
    return Progress(
        state["counter"],
        state["writes"],
        tuple(state["errors"]),
        state["finished"],
        state["passed"],
        regions,
        MappingProxyType(state["facts"]),
    )


def wait_until(
    state_dir: Path, holds: Callable[[Progress], bool], timeout_s: float, what: str
) -> Progress:
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
    said = (
        "no progress"
        if now is None
        else f"counter {now.counter}, errors {list(now.errors)}, facts {dict(now.facts)}"
    )
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
    """Waits until it has written its state ``steps`` times more than now: it lives, wherever its
    counter stands.
    """
    before = progress(state_dir)
    start_writes = -1 if before is None else before.writes
    return wait_until(
        state_dir, lambda now: abs(now.writes - start_writes) >= steps, timeout_s, "making progress"
    )


def forget(state_dir: Path) -> Progress | None:
    """Sets the state file aside and returns what it said; what comes next was written by the
    restored program.
    """
    before = progress(state_dir)
    if before is not None:
        (state_dir / report.STATE).replace(state_dir / SET_ASIDE)
    (state_dir / report.FINISH).unlink(missing_ok=True)
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
    """Waits for the verdict of a self-checking program, which is in the result's ``passed`` and
    ``errors``.
    """
    return wait_until(
        state_dir, lambda now: now.finished, timeout_s or program.finish_s, "finished"
    )


def go(state_dir: Path) -> None:
    """Lets the mutator begin; it sees this within a millisecond, or as soon as it runs again."""
    (state_dir / "go").touch()


def change(
    state_dir: Path, number: int, cells_percent: int, pages_percent: int, timeout_s: float = 60.0
) -> int:
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
    raise ProgramError(
        f"request {number} was not answered within {timeout_s} s; {last_words(state_dir)}"
    )


def steps(state_dir: Path) -> tuple[int, int]:
    """memory-pattern's counter and the time of its last step (time.time_ns)."""
    counter, at, _page = struct.unpack_from("<QQQ", (state_dir / "progress").read_bytes())
    return counter, at


def wait_step(state_dir: Path, since_ns: int, timeout_s: float = 60.0) -> int:
    """When memory-pattern made the first step seen after that time, both as time.time_ns counts.

    Raises:
        ProgramError: It made none within ``timeout_s`` seconds.
    """
    until = time.monotonic() + timeout_s
    while (at := steps(state_dir)[1]) <= since_ns:
        if time.monotonic() > until:
            raise ProgramError(f"no step within {timeout_s} s; {last_words(state_dir)}")
        time.sleep(0.0005)
    return at


def damage(root: int, now: Progress, region: str, *, after: int = 0) -> int:
    """Flips one bit in the middle of a region of a program whose first process is ``root``, or
    ``after`` bytes further on; returns the address.
    """
    _, address, size, inner = next(found for found in now.regions if found[0].startswith(region))
    pid = next(pid for pid in tree_of(root) if innermost(pid) == inner)
    at = address + size // 2 + (1 if size > 4096 else 100) + after
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(at)
        byte = memory.read(1)[0]
        memory.seek(at)
        memory.write(bytes([byte ^ 0x40]))
    return at


def innermost(pid: int) -> int:
    """The pid that the process has in its own pid namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ProgramError(f"/proc/{pid}/status has no NSpid")


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
    """Kills a tree, also a restored one, and returns when nothing of it runs; what may remain is a
    zombie of another's.

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
    for last in (progress(state_dir), progress(state_dir, SET_ASIDE)):
        for name in last.facts.get("shm", ()) if last is not None else ():
            Path("/dev/shm", name).unlink(missing_ok=True)


def members(state_dir: Path) -> list[int]:
    """The live processes that work in that state directory: the program, started or restored,
    whatever their parents.
    """
    found = []
    top = str(state_dir.resolve())
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            cwd = os.readlink(f"/proc/{name}/cwd")
            if cwd == top or cwd.startswith(f"{top}/"):
                found.append(int(name))
    return [pid for pid in found if alive(pid)]


def stop(running: Running) -> None:
    """Ends a program that was started here, restored or not, and cleans up after it."""
    for pid in members(running.state_dir):
        kill_tree(pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(timeout=10)
    clean(running.state_dir)
