"""redis-server and clients that load it, in one process tree, over loopback connections that stay
open.

python redis_load.py STATE_DIR --port PORT [--clients 2] [--keys 2000] [--append-only 0]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

if not __package__:  # run as a program
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.programs import kernel
from tests.programs.redis_client import Connection, Load, RedisError
from tests.programs.report import Report, run

START_S = STOP_S = 20.0


def server_command(port: int, directory: str, *, append_only: bool) -> list[str]:
    """A server on loopback that keeps everything in memory, or also writes its append-only file."""
    always = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        directory,
        "--save",
        "",
    ]
    return [*always, "--daemonize", "no", "--appendonly", "yes" if append_only else "no"]


def connect(port: int, *, timeout_s: float | None = None) -> Connection:
    """Waits until a server answers on the port. Raises OSError or RedisError when it does not
    within 20 s.
    """
    until = time.monotonic() + START_S
    while True:
        try:
            connection = Connection(port, timeout_s=timeout_s)
            connection.call("PING")
            return connection
        except (OSError, RedisError):  # not listening yet, or still reading its files
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def die_with_parent() -> None:
    kernel.set_death_signal(signal.SIGKILL)


class Server:
    """The server process, which is started again to see what its append-only file holds."""

    def __init__(self, report: Report, port: int, *, append_only: bool) -> None:
        command = server_command(port, str(report.state_dir), append_only=append_only)
        with open(report.state_dir / "redis.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=STOP_S)


def verify(report: Report, loads: list[Load], what: str) -> None:
    """Compares everything that the server holds with what the loads know."""
    for load in loads:
        for wrong in load.verify_all():
            report.violation(f"{what}: {wrong}")
    present = sum(len(load.version) + 2 for load in loads)
    if (size := loads[0].connection.call("DBSIZE")) != present:
        report.violation(f"{what}: the server holds {size!r} keys, not {present}")


def main(report: Report, port: int, clients: int, keys: int, *, append_only: bool) -> int:
    server = Server(report, port, append_only=append_only)
    loads = [Load(connect(port), f"client{n}", keys, seed=n) for n in range(clients)]
    turns = 0
    while not report.finish_asked():
        turns += 1
        for load in loads:
            for wrong in load.round():
                report.violation(wrong)
        if server.process.poll() is not None:
            raise RuntimeError(f"redis-server ended with {server.process.returncode}")
        report.write(turns, server=server.process.pid, port=port)
        time.sleep(0.01)
    verify(report, loads, "at the end")
    if (status := server.stop()) != 0:
        report.violation(f"redis-server ended with {status}")
    if append_only:
        server = Server(report, port, append_only=True)
        for load in loads:
            load.connection = connect(port)
        verify(report, loads, "read from the append-only file")
        server.stop()
    return report.end(turns, port=port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--append-only", type=int, default=0)
    options = parser.parse_args()
    append = bool(options.append_only)
    sys.exit(
        run(
            Report(options.state_dir, "redis_load"),
            lambda report: main(
                report, options.port, options.clients, options.keys, append_only=append
            ),
        )
    )
