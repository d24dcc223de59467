"""Helpers that are forked from a command: as new interpreters would run them, but at once."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from icecore.host.kernel import procfs

#: What helpers do, by their first argument.
_HELPER = """
import json, os, resource, signal, sys, threading, time

def main():
    what, *words = sys.argv[1:]
    if what == "tell":
        own = os.getpid()
        about = {
            "words": words,
            "pid": own,
            "parent": os.getppid(),
            "leads": os.getsid(0) == own == os.getpgid(0),
            "variable": os.environ.get("ICECORE_OF_TEST", ""),
            "left_out": "ICECORE_GONE" in os.environ,
            "open": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "default": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "targets": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1)],
        }
        os.write(int(words[1]), json.dumps(about).encode())
    elif what == "fail":
        raise ValueError("as it should")
    elif what == "sleep":
        time.sleep(60)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a command that may have a fork server; its output is a line of JSON each time."""
    (tmp_path / "helper_of_test.py").write_text(_HELPER)

    def start(body: str) -> subprocess.Popen[str]:
        script = tmp_path / "command.py"
        script.write_text(
            "import json, os, resource, signal, subprocess, sys, threading, time\n"
            "from icecore.host.rpc import forkserver\n"
            "def say(about): print(json.dumps(about), flush=True)\n"
            "def told(reading): os.close(w); return json.loads(os.read(reading, 1 << 16))\n"
            + textwrap.dedent(body)
        )
        return subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def heard(started: subprocess.Popen[str]) -> list[Any]:
    """Return what a command said, which ends well."""
    out, err = started.communicate(timeout=30)
    assert started.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def gone(pid: int) -> bool:
    """Return whether a process has ended within some seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


_TELL = """
r, w = os.pipe()
os.environ["ICECORE_GONE"] = "1"
signal.signal(signal.SIGUSR1, lambda *about: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
secret = open("/etc/passwd")
other = os.pipe()
{before}
del os.environ["ICECORE_GONE"]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
process = server.start("helper_of_test", ["tell", "x", "{{w}}"], {{"{{w}}": w}}, {{"ICECORE_OF_TEST": "it"}})
say([os.getpid(), process.pid, type(process).__name__, told(r), process.wait(20)])
"""


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "new"])
def test_a_helper_has_what_it_was_given_and_nothing_else(
    forked: bool, command: Callable[..., subprocess.Popen[str]]
) -> None:
    """Whether it was forked or not."""
    before = "server = forkserver.ForkServer()" if forked else "server = forkserver"
    ((own, pid, kind, about, status),) = heard(command(_TELL.format(before=before)))
    assert kind == ("Forked" if forked else "Popen") and status == 0
    assert about["pid"] == pid and about["leads"]
    assert (about["parent"] == own) != forked, "a fork server forks in place of the command"
    word, number = about["words"]
    assert (word, about["variable"], about["left_out"]) == ("x", "it", False)
    assert about["targets"] == ["/dev/null", "/dev/null"]
    assert about["limit"] == 200 and about["default"]
    if not forked:
        assert about["open"] == [0, 1, 2, int(number)]
        return
    # Numbers of the command's descriptors are in use, by /dev/null.
    assert about["blocked"] == [] and int(number) in about["open"]


def test_a_forked_helper_holds_nothing_of_the_command_open(
    command: Callable[..., subprocess.Popen[str]],
) -> None:
    """Such as the pipe whose end somebody waits for."""
    assert heard(
        command(
            """
            reading, writing = os.pipe()
            with forkserver.ForkServer() as server:
                process = server.start("helper_of_test", ["sleep"], {}, {})
                os.close(writing)
                say(os.read(reading, 1) == b"")
                say(process.poll())
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    say("runs")
                process.kill()
                say(process.wait(10))
                process.kill()  # it has ended
            """
        )
    ) == [True, None, "runs", 0]


def test_with_threads_nothing_is_forked(command: Callable[..., subprocess.Popen[str]]) -> None:
    assert heard(
        command(
            """
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            with forkserver.ForkServer() as server:
                process = server.start("helper_of_test", ["sleep"], {}, {})
                say(type(process).__name__)
                process.kill()
                process.wait(10)
            """
        )
    ) == ["Popen"]


def test_without_its_server_a_command_starts_an_interpreter(
    command: Callable[..., subprocess.Popen[str]],
) -> None:
    """The server was killed, or has been told to end."""
    assert heard(
        command(
            """
            with forkserver.ForkServer() as server:
                os.kill(server.pid, signal.SIGKILL)
                time.sleep(0.2)
                process = server.start("helper_of_test", ["sleep"], {}, {})
                say(type(process).__name__)
                process.kill()
                process.wait(10)
            process = server.start("helper_of_test", ["sleep"], {}, {})
            say(type(process).__name__)
            process.kill()
            process.wait(10)
            """
        )
    ) == ["Popen", "Popen"]


def test_who_fails_says_why(command: Callable[..., subprocess.Popen[str]]) -> None:
    started = command(
        """
        with forkserver.ForkServer() as server:
            process = server.start("helper_of_test", ["fail"], {}, {})
            say(process.wait(20))
        """
    )
    out, err = started.communicate(timeout=30)
    assert out == "0\n" and "ValueError: as it should" in err


def test_the_server_ends_with_a_command_that_is_killed(
    command: Callable[..., subprocess.Popen[str]],
) -> None:
    started = command(
        """
        with forkserver.ForkServer() as server:
            process = server.start("helper_of_test", ["sleep"], {}, {})
            say([server.pid, process.pid])
            time.sleep(60)
        """
    )
    assert started.stdout is not None and started.stderr is not None
    server, helper = json.loads(started.stdout.readline())
    started.kill()
    started.wait(10)
    try:
        assert gone(server)
        assert not procfs.is_zombie(helper), "helpers decide for themselves when they end"
    finally:
        os.kill(helper, signal.SIGKILL)
    started.stdout.close()
    started.stderr.close()
    end = time.monotonic() + 10
    while not gone(helper) and time.monotonic() < end:
        time.sleep(0.01)
